"""The demo's replay decode: expected results of its calls, bytes of a sequence, and steps side by side."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gdn
from gdn.cli import app
from gdn.cli.demo import run as demo_run
from gdn.cli.demo.calls import Checker, _private, intercepting, worst
from gdn.cli.demo.expected import pairs
from gdn.cli.demo.replay import sequence_bytes, step_times
from gdn.layers import HybridModel
from gdn.layers.named import NAMED, first_layers
from gdn.layers.random_weights import fill_randomly
from gdn.runtime import env
from gdn.testing.expected import Call
from tests.cli.test_demo_engine import make_engine, make_model, make_prompts
from tests.gpu.replay_slots import Fold
from tests.layers.small import small_config

ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ("linear_attention",)}
TINY = dataclasses.replace(first_layers(NAMED["tiny"], 1), **ONE_LAYER)


def test_a_run() -> None:
    plan = demo_run.Plan("small", TINY, (7, 2), steps=2, drafts=2, device=torch.device("cpu"), replay=True)
    report = demo_run.run(plan, None)
    assert report.passed and report.has_replay and report.steps == ()
    assert [(one.drafts, one.state_dtype) for one in report.sequences] == [
        (drafts, state) for drafts in (0, 2) for state in ("float32", "bfloat16")
    ]


def test_memory_of_a_sequence_with_drafts() -> None:
    """Of a layer of Qwen3-Next-80B: at most a third of float32 states with a slot a draft, and .37 of bfloat16 ones."""
    found = {(one.drafts, one.state_dtype): one.share for one in sequence_bytes(NAMED["qwen3-next-80b"], 3, torch.bfloat16)}
    assert found[3, "float32"] <= 1 / 3 and found[3, "bfloat16"] <= 0.37
    assert 1 < found[0, "float32"] < 1.2 and 1 < found[0, "bfloat16"] < 1.3


def test_steps_side_by_side() -> None:
    """Both ways make as many tokens; a step with drafts accepts some of them, and not all."""
    model = HybridModel(small_config(vocab_size=61, intermediate_size=16, **ONE_LAYER), dtype=torch.float32)
    fill_randomly(model, 0)
    one, several = step_times(model, 3, 3, 2, use_graphs=False, seed=1)
    assert (one.batch, one.tokens, one.accepted, several.tokens) == (3, 1, 1.0, 4)
    assert min(one.with_replay, one.without, several.with_replay, several.without) > 0
    assert several.accepted == pytest.approx((4 + 4 + 1 + 4 + 1 + 2) / 6)  # of the sequences' fourth and fifth steps


def test_the_command_says_whether_and_why(monkeypatch: pytest.MonkeyPatch, switch: Callable[..., env.Switches]) -> None:
    """Nothing is run here: the options, and the lines before the run."""

    def stop(plan: demo_run.Plan, *_: Any) -> None:
        plans.append(plan)
        raise ValueError("stopped: expected no run, got one")

    plans: list[demo_run.Plan] = []
    monkeypatch.setattr("gdn.cli.demo.command.run", stop)
    texts = []
    for options, value in (((), "auto"), ((), "1"), (("--replay", "0"), "1"), (("--replay", "auto", "--batch", "4"), "1")):
        switch(GDN_REPLAY=value)
        result = CliRunner().invoke(app.app, ["demo", "--model", "tiny", "--device", "cpu", *options], env={"COLUMNS": "200"})
        texts.append(" ".join(result.output.split()))
    assert [(plan.replay, plan.batch) for plan in plans] == [(True, 0), (True, 0), (False, 0), (True, 4)]
    assert "replay decode: on (auto: on with drafts, and in caches of " in texts[0] and texts[0] == texts[3]
    assert "replay decode: on (GDN_REPLAY=1)" in texts[1] and "replay decode: off (--replay=0)" in texts[2]
    refused = CliRunner().invoke(app.app, ["demo", "--replay", "yes"])
    assert refused.exit_code == 2 and "expected auto, 0 or 1, got 'yes'" in refused.output


def test_the_command_prints_bytes_and_steps() -> None:
    options = ["--model", "tiny", "--layers", "1", "--device", "cpu", "--steps", "1", "--drafts", "1", "--batch", "2"]
    result = CliRunner().invoke(app.app, ["demo", *options, "--json", "--replay", "1"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["replay"] and [one["drafts"] for one in data["sequence_bytes"]] == [0, 0, 1, 1]
    assert [one["tokens"] for one in data["steps"]] == [1, 2] and all(one["ratio"] > 0 for one in data["steps"])


# --- expected results: wrong ones are found ------------------------------------------------------------------------------------


def test_a_wrong_entry_and_a_forgotten_fold_are_found() -> None:
    """Calls of drafts whose ring, states or other rows are not what they should be."""
    engine = make_engine(make_model("dense, experts"), num_spec=2, max_num_sequences=2, replay=True)
    engine.prefill(make_prompts((5, 20)))
    engine.decode(14)
    calls: list[Call] = []

    class Keeping(Checker):
        def __call__(self, name: str, function: Any, arguments: dict[str, Any]) -> Any:
            before = _private(arguments, ("conv_state", "ssm_state", "ring", "state_tokens"))
            result = function(**arguments)
            if name == "fused_gdn_decode":
                calls.append(Call(name, before, _private(arguments, ("conv_state", "ssm_state", "ring")), result))
            return result

    with intercepting(Keeping(None)):
        engine.verify([[1, 2], [3]])
    call = calls[0]
    error, limit = worst(pairs(call))
    assert error <= limit and limit > 0
    slot, p = (int(call.before[name][0]) for name in ("state_indices", "num_computed_tokens"))
    rows = call.before["ring"].shape[1]

    def spoilt(name: str, place: Any) -> bool:
        after = dict(call.after)
        after[name] = after[name].clone()
        after[name][place] += 0.5
        error, limit = worst(pairs(Call(call.operator, call.before, after, call.result)))
        return error > limit

    assert spoilt("ring", (slot, p % rows, 3)) and spoilt("ring", (slot, (p - 1) % rows, 3))
    assert spoilt("ring", (slot, (p + 9) % rows, -1)) and spoilt("ssm_state", (slot, 0, 1, 2))


@pytest.mark.parametrize("v_first", [True, False])
def test_folds_are_checked(v_first: bool) -> None:
    before = Fold(dims=(8, 12), v_first=v_first).arguments("cpu")
    after = _private(before, ("ssm_state", "state_tokens"))
    gdn.fold_states(**after)
    # Rows and slots of nobody are NaN: what is compared are the others.
    clean = [{**one, "ssm_state": one["ssm_state"].nan_to_num(0.25)} for one in (before, after)]
    found = pairs(Call("fold_states", *clean, None))
    assert len(found) == 4 and all(error <= limit for error, limit in [worst([one]) for one in found])
    clean[1]["ssm_state"][1, int(before["state_indices"][0]), 0, 2, 1] += 1e-2
    error, limit = worst(pairs(Call("fold_states", *clean, None)))
    assert error > limit
    clean[1]["state_tokens"] = before["state_tokens"]
    assert worst(pairs(Call("fold_states", *clean, None))) == (1.0, 0.0)
