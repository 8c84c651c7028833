"""Which kernels of a folder are listed as spilling."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gdn.runtime import compiled
from gdn.testing import machine_code
from gdn.testing.machine_code import MachineCode, Undecoded
from tests.compile import spills
from tests.compile.test_decode_config import MAIN


def test_kernels_with_a_frame_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two kernels the one with a frame, and only that one is disassembled."""
    whole = MachineCode("kernel", "sm_90a", 128, 128, 0, 0, machine_code.Counter())
    code = {b"fits": whole, b"spills": replace(whole, stack_bytes=8)}
    monkeypatch.setattr(machine_code, "undecoded", lambda library: [Undecoded(code[library], b"")])

    def decoded(kernels: list[Undecoded]) -> list[MachineCode]:
        assert all(one.kernel.stack_bytes for one in kernels)
        return [replace(one.kernel, instructions=machine_code.Counter({"LDL.64": 2, "STL": 1})) for one in kernels]

    monkeypatch.setattr(machine_code, "decoded", decoded)
    for name, library in (("one", b"fits"), ("two", b"spills")):
        about: dict[str, Any] = {"op": "gdn_decode", "backend": "cute", "problem": MAIN.static_key(), "config": name}
        place = tmp_path / "gdn_decode.cute" / name
        place.parent.mkdir(exist_ok=True)
        compiled._write(place, {"kernel": library}, about)
    (line,) = spills.spilling(tmp_path)
    assert line == f"gdn_decode.cute: 3 local loads and stores, 8 bytes of stack: two of {MAIN.static_key()}"
    monkeypatch.setattr("sys.argv", ["spills", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        spills.main()
    assert ended.value.code == 1 and capsys.readouterr().out.endswith("1 kernels spill\n")
