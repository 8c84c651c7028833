"""The scripts of `examples/` run on the CPU, and what they compute is right."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "examples"


def _run(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def test_every_example_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {"prefill_then_decode", "drafts", "indexer", "model"}


def test_prefill_then_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _run("prefill_then_decode", monkeypatch)
    states, pool, slots = found["states"], found["pool"], found["slots"].long()
    assert states.abs().max() > 0.1
    torch.testing.assert_close(pool[slots], states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["out"][0], found["whole"][0, found["last"].long()], atol=4e-3, rtol=8e-3)


def test_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _run("drafts", monkeypatch)
    assert found["expected"].abs().max() > 0.01
    torch.testing.assert_close(found["following"], found["expected"])


def test_indexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selected positions have the largest scores of the keys as they are in the cache, and attention reads these alone."""
    found = _run("indexer", monkeypatch)
    values, scales = found["index_cache"].view(8, -1).split([64 * 128, 64 * 4], dim=-1)  # of each page
    keys = values.contiguous().view(torch.float8_e4m3fn).view(-1, 128).double()
    keys *= scales.contiguous().view(torch.float32).view(-1, 1).double()
    for sequence, chosen in enumerate(found["selected"]):
        queries, weights = found["quantised"][sequence, 0].double(), found["weights"][sequence].double()
        own = keys[found["rows"][sequence]]
        scores = ((queries @ own.T).relu() * weights[:, None]).sum(0)
        assert set(chosen.tolist()) == set(scores.topk(found["TOPK"]).indices.tolist())
        places = found["rows"][sequence][chosen.long()]
        k, v = (cache.flatten(0, 1)[places, 0].double() for cache in found["kv_cache"])
        weights_of = (found["queries"][sequence].double() @ k.T * 128**-0.5).softmax(-1)
        torch.testing.assert_close(found["out"][sequence].double(), weights_of @ v, atol=4e-3, rtol=8e-3)


def test_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each token that was decoded is what a prefill of all tokens before it gives."""
    found = _run("model", monkeypatch)
    assert [len(text) for text in found["texts"]] == [1 + found["STEPS"]] * 2
    assert len(capsys.readouterr().out.splitlines()) == 2
    for prompt, text in zip(found["prompts"], found["texts"], strict=True):
        whole = [*prompt, *text[:-1]]
        (sequence,) = found["allocator"].add_prompts([whole])
        assert found["run"]([sequence], [whole]) == [text[-1]]
        found["allocator"].free(sequence)
