"""What a model asks of the tuner: every tune key that it reaches, at sizes that it calls with, or why not."""

import functools
from typing import Any

import pytest

from autotune import cases, tuning, workload
from gdn import runtime, served
from gdn.device import H100
from gdn.layers.named import NAMED
from gdn.runtime import registry

MODELS = [("qwen3-next-80b", 1, 3), ("qwen3.5-35b", 2, 0), ("qwen3.8-flash-next", 4, 2)]


@functools.cache
def _config(model: str, tp: int) -> Any:
    return NAMED[model].per_rank(tp)


@functools.cache
def _made(model: str, tp: int, num_spec: int) -> workload.Workload:
    return workload.of_config(_config(model, tp), num_spec, H100)


@pytest.mark.parametrize(("model", "tp", "num_spec"), MODELS)
def test_every_tune_key_is_tuned_or_left_out_with_a_reason(model: str, tp: int, num_spec: int) -> None:
    """The keys are those of the problems that `gdn compile` builds for."""
    problems = served.of_config(_config(model, tp), num_spec=num_spec)
    reached = {(problem.op, problem.tune_key()) for problem in problems}
    made = _made(model, tp, num_spec)
    tuned = {(shape.op, shape.problem.tune_key()) for every in made.shapes.values() for shape in every}
    assert tuned < reached
    left = {op: sum(count for (one, _), count in made.left_out.items() if one == op) for op, _ in made.left_out}
    assert left == {op: sum(one == op for one, _ in reached - tuned) for op in left} and sum(left.values()) == len(
        reached - tuned
    )
    assert all(why for _, why in made.left_out)
    assert len(reached) == (63 if (model, num_spec) == ("qwen3-next-80b", 3) else len(reached))
    every = set(problems)
    assert all(shape.problem in every for one in made.shapes.values() for shape in one)  # static fields and sizes


@pytest.mark.parametrize(("model", "tp", "num_spec"), MODELS)
def test_shapes_are_of_the_kernels_that_calls_take_and_can_be_timed(model: str, tp: int, num_spec: int) -> None:
    for kernel, every in _made(model, tp, num_spec).shapes.items():
        assert kernel.module_name == registry.operator(kernel.op).modules[kernel.backend]
        assert len({shape.name for shape in every}) == len({shape.problem for shape in every}) == len(every)
        made = tuning.plan(kernel, every, H100)
        assert not made.refusals and all(made.configs.values())
        for shape in every:
            assert runtime.explain_problem(shape.problem, H100).backend == kernel.backend
            assert cases.refusal(shape) is None
            if shape.lengths and kernel.op != "fold_states":
                assert sum(shape.lengths) == shape.problem.sizes().get("num_tokens", shape.problem.sizes().get("num_rows"))


def test_the_most_usual_size_of_a_tune_key_comes_first() -> None:
    made = _made("qwen3-next-80b", 1, 3)
    first: dict[tuple[str, str], dict[str, int]] = {}
    for every in made.shapes.values():
        for shape in every:
            first.setdefault((shape.op, shape.problem.tune_key()), shape.problem.sizes())
    by_op = {op: sizes for (op, _), sizes in first.items()}
    assert by_op["chunk"] == {"num_tokens": 8192, "num_sequences": 1}
    assert by_op["mqa_logits"] == {"num_queries": 4096, "num_keys": 32768, "num_columns": 32768}
    assert by_op["paged_mqa_logits"] == {"batch": 64, "max_context_len": 32768}


def test_sizes_that_a_model_never_has_are_replaced_by_the_nearest() -> None:
    """The model has 30 layers where the tuner's shapes have 36, and at most 2 drafts where they have 3."""
    kernel = tuning.kernels("accept_draft_tree", None)[0]
    sizes = [shape.problem.sizes() for shape in _made("qwen3.8-flash-next", 4, 2).shapes[kernel]]
    assert sizes[0] == {"num_layers": 30, "num_tokens": 24, "num_sequences": 8} and len(sizes) == 3


def test_a_rank_has_its_share_of_the_heads() -> None:
    whole, half = (workload.of_config(_config("qwen3-next-80b", tp), 0, H100) for tp in (1, 2))
    kernel = tuning.kernels("gdn_prefill", None)[0]
    assert {2 * shape.problem.num_v_heads for shape in half.shapes[kernel]} == {  # type: ignore[attr-defined]
        shape.problem.num_v_heads
        for shape in whole.shapes[kernel]  # type: ignore[attr-defined]
    }


def test_another_kernel_can_be_asked_for() -> None:
    made = workload.of_config(_config("qwen3-next-80b", 1), 0, H100, backend="tilelang")
    assert {kernel.backend for kernel in made.shapes} == {"tilelang"}
    assert all("tilelang" in registry.operator(kernel.op).modules for kernel in made.shapes)
    assert made.left_out["topk", workload.REFERENCE] > 0
    with pytest.raises(ValueError, match="backend: expected one of tilelang, cute, got 'cuda'"):
        workload.of_config(_config("qwen3-next-80b", 1), 0, H100, backend="cuda")
