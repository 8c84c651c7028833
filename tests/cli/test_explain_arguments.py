"""`gdn explain` takes the arguments of the public functions: they change what the same arguments of a call change."""

import inspect
import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gdn
from gdn.cli import app
from gdn.cli.explain import shape_of
from gdn.cli.explain_arguments import taken
from gdn.layers.named import NAMED
from gdn.models import MODELS
from gdn.ops.attention import examples as attention_examples
from gdn.ops.delta_rule import inputs
from gdn.ops.delta_rule.problem import ChunkProblem, RecurrentProblem
from gdn.ops.layer_step import examples as layer_step_examples
from gdn.runtime import registry

VALUES = ("float16", "int64", "none", "given", "true", "false", "7", "silu", "sigmoid", "flat", "interleaved", "score", "uint8")
# Arguments of which neither presence nor dtype decides what runs: values, outputs, what every kernel takes alike. Those that are
# numbers with a fraction never do.
NEVER = {
    "null_slot", "out", "head_first", "block_tables", "seq_lens", "context_lens", "return_lse",
    "skip_rows_up_to", "cu_seqlen_ks", "cu_seqlen_ke", "schedule_metadata", "indices", "ring", "max_seq_len", "kv",
    "workspace_bytes", "max_query_len", "lengths_host", "seq_lens_host", "query_lens_host",
    "intermediate_indices", "state_tokens", "num_computed_tokens", "accepted_nodes", "fold_phase",
}  # fmt: skip
RULES = {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "gated_delta_rule"}
SOMETIMES = {
    "A_log": {*RULES, "chunk_summary"},
    "dt_bias": {*RULES, "chunk_summary"},
    "output_final_state": RULES,  # of a pool
    "inplace_final_state": {"fused_recurrent_gated_delta_rule", "gated_delta_rule"},
    "parent_token": {"accept_draft_tree", "fused_gdn_decode"},  # required there, and refused
    "num_accepted_tokens": {"accept_draft_tree"},  # required there
    "fold_every": {"fused_recurrent_gated_delta_rule", "fused_gdn_decode"},  # with ring_rows
    "checkpoint_offsets": {"causal_conv1d_fn"},  # with checkpoint_slots, which decides
    "query_start_loc": {"sparse_attention", "attention"},
}
FUNCTIONS = sorted({name for operator in registry.OPERATORS.values() for name in operator.functions})
TINY = MODELS["tiny"]


def explain(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app.app, ["explain", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def problems(function: str) -> list[Any]:
    if function == "attention":
        return [attention_examples.attention(TINY)]
    found = registry.operators(function)
    return [registry.operator(name).example(TINY, fp8=False) for one in found for name in (one.composed_of or (one.name,))]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_is_taken(function: str) -> None:
    """Each one changes a field of one of the function's problems, or is one of those that decide nothing."""
    before = problems(function)
    for name, parameter in inspect.signature(getattr(gdn, function)).parameters.items():
        if name == "backend":
            with pytest.raises(ValueError, match="--backend"):
                taken(before, ["backend=cute"], function)
            continue
        changes = False
        for value in VALUES:
            try:
                after, notes = taken(before, [f"{name}={value}"], function)
            except ValueError as error:
                assert str(error).startswith(f"{name}: expected"), error
                continue
            changes |= after != before
            assert after == before or not notes, (name, value)
        is_number = parameter.annotation in (float, float | None)
        assert changes != (is_number or name in NEVER or function in SOMETIMES.get(name, ())), name


CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("chunk", {"beta": torch.float32}, "beta=float32"),
    ("chunk", {"use_qk_l2norm_in_kernel": False}, "use_qk_l2norm_in_kernel=false"),
    ("chunk", {"has_initial_state": None}, "has_initial_state=none"),
    ("chunk", {"cu_seqlens": torch.int64}, "cu_seqlens=int64"),
    ("chunk", {"initial_state": torch.bfloat16}, "initial_state=bfloat16"),
    ("chunk", {"state_indices": None, "has_initial_state": None, "initial_state": None}, "initial_state=none"),
    ("recurrent", {"disable_state_update": True}, "disable_state_update=true"),
    ("recurrent", {"g": torch.float32}, "g=float32"),
    ("recurrent", {"ssm_state_indices": torch.int64}, "ssm_state_indices=int64"),
]


@pytest.mark.parametrize(("op", "changes", "assignment"), CALLS, ids=[call[2] for call in CALLS])
def test_it_is_the_problem_of_such_a_call(op: str, changes: dict[str, Any], assignment: str) -> None:
    sizes = {"num_tokens": 6, "num_sequences": 2}
    example: Any = registry.operator(op).example(TINY, fp8=False)
    problem = example.__class__(**{**vars(example), **sizes})
    maker: Any = inputs.chunk_inputs if isinstance(problem, ChunkProblem) else inputs.recurrent_inputs
    arguments = maker(problem)
    for name, value in changes.items():
        arguments[name] = arguments[name].to(value) if isinstance(value, torch.dtype) else value
    if "initial_state" in changes and changes["initial_state"] is None:
        arguments["output_final_state"] = True
    called = gdn.explain(op, **arguments).problem
    assert isinstance(called, ChunkProblem | RecurrentProblem)
    (asked,), _ = taken([problem], [assignment], registry.operator(op).functions[0])
    assert asked == called and asked != problem


def test_the_command_takes_them() -> None:
    found = explain("chunk_gated_delta_rule", "q=float16", "use_gate_in_kernel=false", "scale=1", "--device", "h100")
    assert (found["problem"]["dtype"], found["problem"]["use_gate"]) == ("float16", False)
    assert found["notes"][-1] == "scale does not decide what runs"
    parts = explain("gated_delta_rule", "num_accepted_tokens=given", "head_k_dim=64", "--device", "h100")["parts"]
    assert [part["problem"]["head_k_dim"] for part in parts] == [64, 64] and parts[1]["problem"]["has_accepted"]
    scores, selection = explain("indexer_topk", "topk=64", "k=float16", "--device", "h100")["parts"]
    assert (scores["problem"]["dtype"], selection["problem"]["k"]) == ("float16", 64)
    (note,) = explain("indexer_topk", f"workspace_bytes={2**26}", "--device", "h100")["parts"][0]["notes"][-1:]
    assert note == f"512 of 4096 rows at a time (workspace_bytes={2**26})"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chunk", "topk=3"], "of an argument of chunk_gated_delta_rule, got 'topk=3'"),
        (["chunk", "q=half"], "q: expected one of float64, float32"),
        (["gdn_decode", "projection_layout=wide"], "projection_layout: expected one of flat, interleaved, merged, concatenated"),
        (["fused_gdn_decode", "parent_token=given"], "parent_token: expected none"),
        (["chunk", "backend=cute"], "backend: expected as an option, --backend cute"),
        (["topk", "--model", "qwen3.5-35b"], "model: expected one with an indexer, which topk_indices is a part of"),
        (["sparse_attention", "--model", "qwen3.5-35b"], "which sparse_attention is a part of"),
        (["indexer_topk", "--model", "qwen3.5-35b"], "which indexer_topk is a part of"),
    ],
)
def test_what_it_refuses(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app.app, ["explain", *arguments])
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2 and message in line


@pytest.mark.parametrize("name", NAMED)
def test_it_knows_the_models_of_the_demo(name: str) -> None:
    config = NAMED[name]
    assert name not in MODELS or shape_of(name, config) == MODELS[name]
    found = explain("chunk", "--model", name, "--device", "h100")
    assert (found["model"], found["problem"]["num_v_heads"]) == (name, config.linear_num_value_heads)
    parts = explain("attention", "--model", name, "--device", "h100")["parts"]
    assert [part["problem"]["num_heads"] for part in parts] == [config.num_attention_heads] * 2
    if config.index_topk:
        scores, selection = explain("indexer_topk", "--model", name, "--device", "h100")["parts"]
        selected = selection["problem"]["k"], selection["problem"]["ratio"]
        assert selected == (config.index_topk // config.index_ratio, config.index_ratio)
        assert scores["problem"]["num_heads"] == config.index_n_heads


@pytest.mark.parametrize("op", ["chunk", "recurrent", "mqa_logits", "sparse_attention_decode", "topk", "gating"])
@pytest.mark.parametrize("options", [(), ("--backend", "cute"), ("--backend", "reference")], ids=" ".join)
def test_every_other_kernel_has_a_line(op: str, options: tuple[str, ...]) -> None:
    found = explain(op, "--device", "h100", *options)
    others = set(registry.operator(op).modules) - {found["backend"]}
    assert found["lost"].keys() | found["refusals"].keys() == others and not found["lost"].keys() & found["refusals"].keys()
    text = CliRunner().invoke(app.app, ["explain", op, "--device", "h100", *options], env={"COLUMNS": "400"}).output
    for backend, reason in found["lost"].items():
        assert f"  {backend} lost: {reason}" in text.splitlines()
        assert found["backend"] in reason


def test_the_reasons(switch: Any) -> None:
    assert "1.11 to 1.47 times" in explain("chunk", "--device", "h100")["lost"]["tilelang"]
    by_table = explain("recurrent", "num_sequences=1", "num_tokens=1", "--device", "h100")
    assert by_table["decided_by"] == "tuned table"
    assert by_table["lost"]["tilelang"].endswith("of cute at num_sequences=1, num_tokens=1 (tuned tables)")
    switch(VLLM_GDN_USE_BLADNN="0")
    assert explain("chunk", "--device", "h100")["lost"] == {"cute": "VLLM_GDN_USE_BLADNN=0 asks for tilelang"}
    assert explain("chunk", "--device", "cpu")["lost"] == {}


def test_it_fits_80_columns() -> None:
    for op in ("chunk", "indexer_topk", "attention", "mqa_logits"):
        result = CliRunner().invoke(app.app, ["explain", op, "--device", "h100"], env={"COLUMNS": "80"})
        assert max(map(len, result.output.splitlines())) <= 80, result.output


def test_a_ring() -> None:
    """Tokens of a call, live entries, bytes and floor; a ring and its folds go together."""
    one = explain("gdn_decode", "ring_rows=16", "fold_every=15", "--device", "h100")
    assert one["notes"] == [
        "replay: at most 1 token of a sequence in a call",
        "replay: a mean of 8 live entries a sequence, a fold every 15 tokens; 331.6 MB, floor 109.5 us on h100",
    ]
    drafts = ("ring_rows=22", "fold_every=15", "num_accepted_tokens=given", "num_tokens=512")
    notes = explain("fused_recurrent_gated_delta_rule", *drafts, "--device", "h100")["notes"]
    assert notes[0] == "replay: at most 4 tokens of a sequence in a call" and "a mean of 9.8 live entries" in notes[1]
    assert "room" in explain("fused_gdn_decode", *drafts, "--device", "h100")["notes"][0]
    assert "replay: " in explain("fold_states", "--device", "h200")["notes"][0]
    assert not explain("gdn_decode", "ring_rows=none", "--device", "h100")["notes"]
    for wrong, message in (
        (("ring_rows=16",), "ring_rows: expected next to fold_every, got ring_rows=16 alone"),
        (("ring_rows=16", "fold_every=16"), r"ring_rows: expected at least 17 rows \(fold_every \+ 1\), got 16"),
        (("ring_rows=none", "fold_every=none", "ring_rows=x"), "ring_rows: expected a whole number or none, got 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            taken([layer_step_examples.gdn_decode(TINY)], wrong, "fused_gdn_decode")
