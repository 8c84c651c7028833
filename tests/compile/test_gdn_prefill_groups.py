"""The launches of a prefill step in groups of sequences: a loop on the host, recorded without a GPU."""

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn.device import H100
from tests.compile.test_gdn_prefill_calls import HV, D, H, params_of
from tests.compile.variants.base import example

module: Any = pytest.importorskip("kernels_cute.gdn_prefill", reason="needs the CuTe DSL")

_LENGTHS = (60, 0, 70, 70, 90)
# Places of the offsets and of the slots among the arguments of each kernel.
_PLACES = {"conv": (3, 4), "chunk": (11, 8), "norm": (3, 2)}
_OUT = 12  # of ChunkParams: the rows that are zeroed after the last sequence


@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.cover)])
def test_each_sequence_is_in_one_group(count: int, tmp_path: Path) -> None:
    """Offsets and slots of each group, grids for the tokens that it has on average, rows of padding with the last group."""
    tokens, sequences = sum(_LENGTHS) + 10, len(_LENGTHS)
    sizes = {"num_k_heads": H, "num_v_heads": HV, "head_k_dim": D, "head_v_dim": D}
    problem = example("gdn_prefill", **sizes, num_tokens=tokens, num_sequences=sequences)
    plain = dict.fromkeys(("prefetch", "split_chunks", "split_if_longest_exceeds", "num_four_sm_clusters"), 0)
    config = dataclasses.replace(
        module.configs(problem, H100)[0], **plain, stages=4, num_persistent_clusters=0, num_conv_blocks=0, conv_rows=16,
        num_group_sequences=count, conv_threads=64, conv_staged=1,
    )  # fmt: skip
    assert module.fits(problem, config, H100)
    ((entry, library),) = module.compile(problem, config).items()
    path = tmp_path / "groups.so"
    path.write_bytes(library)

    given = params_of(problem, module.workspace_bytes(problem, config))
    by_token = {name: getattr(given, name) for name in ("b", "a", "out")}
    rows: dict[str, Any] = {name: torch.zeros(tokens, *x.shape[1:], dtype=x.dtype) for name, x in by_token.items()}
    wide = torch.zeros(tokens, problem.dim + HV * D).bfloat16()
    rows |= {"mixed_qkv": wide[:, : problem.dim], "z": wide[:, problem.dim :].unflatten(1, (HV, D))}
    offsets = torch.tensor([0, *torch.tensor(_LENGTHS).cumsum(0)], dtype=torch.int32)
    given = given._replace(
        **rows, cu_seqlens=offsets, state_indices=torch.arange(sequences, dtype=torch.int32),
        has_initial_state=torch.ones(sequences, dtype=torch.bool),
    )  # fmt: skip
    launches = _recorded(path, entry, (*given, count))
    groups = [range(first, min(first + count, sequences)) for first in range(0, sequences, count)]
    assert len(launches) == 3 * len(groups)
    base = launches[0]["arguments"][_PLACES["conv"][0]][0]  # address of the offsets
    for number, group in enumerate(groups):
        mean = -(-tokens // sequences) * len(group)
        blocks = {"conv": (mean // 16 + len(group)) * problem.dim // 512, "chunk": 2 * HV * len(group)}
        blocks["norm"] = (mean // 64 + len(group)) * HV
        for at, (name, (offsets_at, slots_at)) in enumerate(_PLACES.items()):
            launch = launches[3 * number + at]
            assert launch["grid"] == blocks[name], name
            address, length = launch["arguments"][offsets_at]
            assert (address - base, length) == (4 * group[0], len(group) + 1), name
            assert launch["arguments"][slots_at][1] == len(group), name
        rows_of_call = launches[3 * number + 1]["arguments"][_OUT][1]
        assert rows_of_call == (tokens if number == len(groups) - 1 else 0)


def _recorded(library: Path, entry: str, values: tuple[Any, ...]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.compile.record_launches", str(library), entry, "5", "13", "4"]
    done = subprocess.run(command, input=pickle.dumps(values), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.decode().splitlines()]
