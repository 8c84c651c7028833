"""Index tensors that the Transformers adapter keeps: each belongs to the stream that filled it."""

from collections.abc import Callable

import pytest
import torch

from gdn.integrations import _indices

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "expected"), [("rows", [0, 1, 2]), ("slots", [0, 1, 2]), ("offsets", [0, 5, 10, 15]), ("flags", [True] * 3)]
)
def test_each_stream_has_its_own(name: str, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured call leaves none behind, and takes none that may be dropped: only rows, which stay."""
    stream, is_capturing = 1, False
    for function in ("arange", "full"):
        _on_the_cpu(function, monkeypatch)
    monkeypatch.setattr(_indices, "raw_stream", lambda index: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(_indices, "_made", {})
    monkeypatch.setattr(_indices, "_rows", {})
    arguments = {"rows": (3,), "slots": (3,), "offsets": (3, 5), "flags": (3, True)}[name]

    def make() -> torch.Tensor:
        made: torch.Tensor = getattr(_indices, name)(*arguments, CUDA)
        return made

    first = make()
    assert first.tolist() == expected and make() is first
    stream = 2
    other = make()
    assert other.tolist() == expected and other is not first
    is_capturing = True
    assert (make() is other) == (name == "rows")
    stream = 3
    assert make() is not other and make() is not make()
    is_capturing, stream = False, 1
    assert make() is first and len(_indices._made) + len(_indices._rows) == 2


def _on_the_cpu(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., torch.Tensor] = getattr(torch, function)
    monkeypatch.setattr(torch, function, lambda *sizes, **options: original(*sizes, **options | {"device": "cpu"}))
