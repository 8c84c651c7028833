"""Cases that the tuner runs: the public calls are the problems of the shapes, and the verdict knows right from wrong."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import gdn
from autotune import cases, shapes
from gdn.core.call import operator_named
from gdn.core.tunable import resized
from gdn.device import H100
from gdn.runtime import Prepared, devices, explaining, registry
from gdn.testing import timing
from tests.ops import indexer_kernels
from tests.references import reference

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "copies_beyond_l2", lambda bytes_each, l2_bytes: 1)


def _small(shape: shapes.Shape) -> shapes.Shape:
    """The same static fields, but for heads and channels, at sizes for a CPU."""
    return cases.tunable(shape.op).small(shape)


def _one_per_static_key() -> list[Any]:
    found: dict[str, shapes.Shape] = {}
    for op in shapes.operators():
        for shape in shapes.shapes(op, measured=True):
            small = _small(shape)
            found.setdefault(f"{op} {small.problem.static_key()}", small)
    return [pytest.param(shape, id=f"{shape.op}-{shape.name}") for shape in found.values()]


_FORMS: dict[str, dict[str, Any]] = {
    "two projections, interleaved": {"interleaved": True, "z_dtype": None, "a_dtype": None},
    "two projections, merged": {"merged": True, "z_dtype": None, "a_dtype": None},
    "columns of windows together": {"conv_channels_contiguous": False},
    "neither norm nor gate": {"norm_dtype": None, "z_dtype": None},
    "states K first": {"state_v_first": False, "state_dtype": "bfloat16"},
}
_CONVOLUTIONS: dict[str, dict[str, Any]] = {"conv1d": {"has_mask": False}, "conv1d_update": {}}
_NO_WEIGHTS: dict[str, Any] = {"q_out_dtype": "bfloat16", "weights_dtype": None, "folds_weights": False}
_DRAFTS: dict[str, Any] = {"lengths": (4, 4, 4), "has_accepted": True, "cu_seqlens_dtype": "int32"}
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a ring": ("gdn_decode", {"ring_rows": 16, "fold_every": 15}),
    "a ring, bfloat16": ("gdn_decode", {"ring_rows": 12, "fold_every": 11, "state_dtype": "bfloat16"}),
    "a ring, drafts": ("gdn_decode", {"ring_rows": 22, "fold_every": 15, **_DRAFTS}),
    "no pool": ("conv1d", {"state_dtype": None, "index_dtype": None, "has_mask": False, "state_channels_contiguous": False}),
    "all positions": ("sparse_attention_decode", {"dense": True, "index_dtype": None, "k": 32}),
    "values": ("prepare_indexer", {"has_values": True, "num_kv_heads": 2, "cache_dtype": "bfloat16", **_NO_WEIGHTS}),
}  # fmt: skip


def _of_hosts() -> list[Any]:
    """As vLLM, SGLang and Transformers call these operators."""
    forms = [
        *((op, form, fields) for op in ("gdn_decode", "gdn_prefill") for form, fields in _FORMS.items()),
        *((op, "channels together", {"state_channels_contiguous": False, **fields}) for op, fields in _CONVOLUTIONS.items()),
        *((op, form, fields) for form, (op, fields) in _OTHERS.items()),
    ]
    small = {op: _small(shapes.shapes(op)[0]) for op, *_ in forms}
    return [
        pytest.param(resized(small[op], **{"lengths": small[op].lengths, **fields}), id=f"{op}-{form}")
        for op, form, fields in forms
    ]


EVERY = pytest.mark.parametrize("shape", [*_one_per_static_key(), *_of_hosts()])


@EVERY
def test_the_public_call_is_the_problem_of_the_shape(shape: shapes.Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    if shape.op == "attention_prefill":  # where its kernel cannot run, all rows go to that of decode
        monkeypatch.setattr(devices, "describe", lambda device: (H100, "H100"))
    (call,) = cases.make(shape, CPU, H100).public_calls(None)
    with explaining() as asked:
        call()
    assert [problem for _, problem in asked.answers] == [shape.problem]
    assert cases.refusal(shape) is None


def _paged_mqa_logits(tensors: tuple[Any, ...], problem: Any) -> None:
    q, cache, weights, context_lens, block_tables, out, scale, _ = tensors
    pages = cache.unflatten(1, (problem.page_size, problem.num_kv_heads, -1))
    reference.paged_mqa_logits(q, pages, weights, context_lens, block_tables, problem.max_context_len, scale=scale, out=out)


def _gdn_decode(params: Any, problem: Any) -> None:
    ring = {}
    if problem.ring_rows is not None:
        ring = {name: getattr(params, name) for name in ("ring", "state_tokens", "num_computed_tokens", "fold_phase")}
        ring["fold_every"] = problem.fold_every
    _fused_step(reference.fused_gdn_decode, params, problem, num_accepted_tokens=params.num_accepted_tokens, **ring)


def _gdn_prefill(params: Any, problem: Any) -> None:
    _fused_step(reference.fused_gdn_prefill, params, problem, has_initial_state=params.has_initial_state)


def _fused_step(step: Callable[..., torch.Tensor], params: Any, problem: Any, **own: Any) -> None:
    """As the kernels, but for the rows between those of prefill: nothing between the steps is rounded."""
    pools = (4, 10)
    given = [x if i in pools or x is None else x.double() for i, x in enumerate(params[:11])]
    qkv, z, b, a, windows, weight, bias, *rest = given
    layouts = [name for name in ("interleaved", "merged", "concatenated") if getattr(problem, name, False)]
    o = step(
        qkv, z, b, a, windows, weight, *rest, params.state_indices, conv_bias=bias, query_start_loc=params.cu_seqlens,
        num_k_heads=problem.num_k_heads, head_k_dim=problem.head_k_dim, head_v_dim=problem.head_v_dim, scale=params.scale,
        eps=params.eps, state_v_first=problem.state_v_first, null_slot=params.null_slot,
        projection_layout=layouts[0] if layouts else "flat", **own,
    )  # fmt: skip
    params.out.copy_(o.view(params.out.shape))


def _by_name(params: Any, shape: shapes.Shape) -> None:
    """The reference on the fields of Params that are named as its arguments; flags are those of the case's calls."""
    case: Any = cases.tunable(shape.op).case(shape, CPU, 1)
    work = case._work(0)
    given = {name: getattr(params, name, value) for name, value in work.arguments.items()}
    compute = operator_named(work.function).reference
    if "out" in inspect.signature(compute).parameters:
        given["out"] = params.out
    found = compute(**given)
    names = [name for one in work.outputs for name in params._fields if one is not None and getattr(work.params, name) is one]
    for name, result in zip(names, found if isinstance(found, tuple) else (found,), strict=False):
        getattr(params, name).copy_(result.view(getattr(params, name).shape))


def _stand_in(shape: shapes.Shape) -> Callable[[tuple[Any, ...]], None]:
    """The reference in a kernel's place: a function of this module, or of the indexer's stand-ins, under the operator's name, or
    by the names of the Params' fields."""
    of_indexer, own = getattr(indexer_kernels, shape.op, None), globals().get(f"_{shape.op}")
    if of_indexer is not None:
        return lambda tensors: of_indexer(shape.problem, *tensors)
    return lambda tensors: _by_name(tensors, shape) if own is None else own(tensors, shape.problem)


def _out_of(op: str, params: Any) -> torch.Tensor:
    """A tensor that the launch writes: out, else the first that is no argument of the call, else what is updated in place."""
    arguments = inspect.signature(getattr(gdn, registry.operator(op).functions[0])).parameters
    new = [name for name in params._fields if name == "out" or name not in arguments and name not in ("cu_seqlens", "eps")]
    updated = ("ssm_state", "ring", "cache")
    name = "out" if "out" in new else next((name for name in (*new, *updated) if name in params._fields), "")
    out: torch.Tensor = getattr(params, name)
    return out[0] if op in ("chunk", "recurrent") else out  # which have a batch dimension


def _prepared(shape: shapes.Shape, spoil: Callable[[tuple[Any, ...]], None] = lambda tensors: None) -> Prepared:
    """A "kernel" that is the reference, and afterwards does what spoil does."""

    def launch(*tensors: Any) -> None:
        (tensors,) = tensors  # the operator's Params
        _stand_in(shape)(tensors)
        spoil(tensors)

    choice: Any = None
    return Prepared("tilelang", None, 64, launch, choice)


@EVERY
def test_the_reference_passes(shape: shapes.Shape) -> None:
    case = cases.make(shape, CPU, H100)
    assert 0 <= case.check(_prepared(shape)) < 1e-2
    assert 0 <= case.check(_prepared(shape)) < 1e-2  # checking does not change what is checked
    (launch,) = case.launches(_prepared(shape))
    launch()


@EVERY
def test_a_wrong_element_and_a_forgotten_one_fail(shape: shapes.Shape) -> None:
    case = cases.make(shape, CPU, H100)
    for wrong in (True, False):

        def spoil(tensors: tuple[Any, ...], wrong: bool = wrong) -> None:
            element = _out_of(shape.op, tensors)[0, :1]
            if element.is_floating_point():
                element.fill_(min(1e4, torch.finfo(element.dtype).max) if wrong else torch.nan)
            elif element.dtype == torch.uint8:
                element.add_(1 if wrong else 2)
            else:
                element.fill_(10000 if wrong else -2)

        with pytest.raises(cases.WrongResult):
            case.check(_prepared(shape, spoil))


def test_a_row_that_rounding_spoils_is_judged_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row beyond the limit passes within twice the error of the reference in the call's dtypes, and others do not."""
    shape = _small(shapes.shapes("gdn_prefill")[0])
    case: Any = cases.make(shape, CPU, H100)
    exact = case._expected[0].flatten(1)
    rounded = exact.clone()
    rounded[5] *= 1.05
    monkeypatch.setattr(case, "_reference", lambda in_float64: [rounded])

    def spoil(tensors: tuple[Any, ...], row: int, error: float) -> None:
        out = _out_of("gdn_prefill", tensors)
        out[row] = (exact[row] * (1 + error)).view(out[row].shape).to(out.dtype)

    assert 0.08 < case.check(_prepared(shape, partial(spoil, row=5, error=0.09))) < 0.1
    for row, error in ((5, 0.11), (6, 0.09), (6, 0.015)):
        with pytest.raises(cases.WrongResult, match=f"output 0 error .* at row {row}"):
            case.check(_prepared(shape, partial(spoil, row=row, error=error)))


@pytest.mark.parametrize("op", ["chunk", "recurrent"])
def test_a_changed_foreign_slot_and_a_wrong_state_fail(op: str) -> None:
    shape = _small(shapes.shapes(op)[0])
    case = cases.make(shape, CPU, H100)

    def foreign(tensors: tuple[Any, ...]) -> None:
        owned = set(tensors[8].flatten().tolist())
        tensors[7][next(slot for slot in range(len(tensors[7])) if slot not in owned)] = 0

    def stale(tensors: tuple[Any, ...]) -> None:
        tensors[7][tensors[8].flatten()[0]] *= 1.05

    with pytest.raises(cases.WrongResult, match="belongs to no sequence"):
        case.check(_prepared(shape, foreign))
    with pytest.raises(cases.WrongResult, match="state error"):
        case.check(_prepared(shape, stale))


@pytest.mark.parametrize("op", ["chunk", "recurrent"])
def test_states_without_a_pool_are_checked_too(op: str) -> None:
    """As Transformers' functions call: a state comes back for each sequence."""
    fields = {"index_dtype": None, "has_mask": False} if op == "chunk" else {"index_dtype": None}
    small = _small(shapes.shapes(op)[0])
    shape = resized(small, small.lengths, **fields)
    assert cases.refusal(shape) is None
    case: Any = cases.make(shape, CPU, H100)

    def launch(tensors: Any, spoiled: float = 1.0) -> None:
        exact = case._expected
        tensors.out.copy_(exact.o)
        tensors.final_state.copy_(exact.state * spoiled)

    assert 0 <= case.check(Prepared("tilelang", None, 64, launch, None)) < 1e-2  # type: ignore[arg-type]
    with pytest.raises(cases.WrongResult, match="state error"):
        case.check(Prepared("tilelang", None, 64, partial(launch, spoiled=1.05), None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "fields", "why"),
    [
        ("gdn_decode", {"has_rounding": True}, "problem: expected no noise"),
        ("gdn_decode", {"ring_rows": 16, "fold_every": 15, "has_columns": True}, "state_indices: expected 1-D slots with ring"),
        ("gdn_decode", {"b_dtype": None}, "problem: expected every tensor that the case has"),
        ("fold_states", {"has_final_indices": False}, "problem: expected other slots to write, no accepted counts and no noise"),
        ("topk", {"ratio": 4, "position_dtype": "int64"}, "its inputs are those of calls with another ratio, position_dtype"),
        ("sparse_attention_decode", {"index_dtype": None}, "problem: expected selected positions or dense"),
    ],
)
def test_a_shape_of_which_no_case_can_be_made_says_why(op: str, fields: dict[str, Any], why: str) -> None:
    shape = shapes.shapes(op)[0]
    assert cases.refusal(resized(shape, shape.lengths, **fields)) == why


@pytest.mark.parametrize(
    "shape", [shape for op in ("conv1d", "conv1d_update") for shape in shapes.shapes(op)], ids=lambda s: s.name
)
def test_any_other_bit_of_a_convolutions_pool_fails(shape: shapes.Shape) -> None:
    shape = _small(shape)
    case = cases.make(shape, CPU, H100)

    def spoil(tensors: tuple[Any, ...]) -> None:
        tensors[3][-1, -1, -1] += 1

    with pytest.raises(cases.WrongResult, match="conv_states? is not the reference's"):
        case.check(_prepared(shape, spoil))


_VARIANTS = ("tests.compile.variants.steps", "tests.compile.variants.indexer")
_STEPS = [one.name for one in registry.with_kernels() if one.family is not None and one.family.variants in _VARIANTS]


@pytest.mark.parametrize("op", _STEPS)
def test_the_floor_of_the_steps_is_their_bytes(op: str) -> None:
    for shape in shapes.shapes(op):
        assert cases.tunable(shape.op).useful_flops(shape) == 0 and shape.problem.bytes_moved() > 0


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_the_floor_of_a_draft_tree_is_the_rows_that_move(nodes: int) -> None:
    """The root of an accepted path stays where it is, as a node does whose place on the path is its own."""
    first = _small(shapes.shapes("accept_draft_tree")[0])
    shape = resized(first, (nodes,) * 3, num_layers=2, ring_rows=16, conv_dim=None, conv_dtype=None)
    case: Any = cases.make(shape, CPU, H100)
    (call,) = case.public_calls(None)
    ring = call.keywords["ring"]
    before = ring.clone()
    call()
    moved = int((ring != before).any(-1).sum())
    assert shape.problem.bytes_moved() == 2 * moved * ring[0, 0, 0].nbytes
    assert (moved > 0) == (nodes > 2)
