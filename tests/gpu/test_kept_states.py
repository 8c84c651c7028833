"""Checkpoints and intermediate states in tensors of the caller, and windows of a cache whose base is not aligned.

Checkpoints: the same call with its checkpoints in the pools, which other tests judge, gives the same bits. Intermediate states:
the reference in float64. Every row that is nobody's is NaN and stays it.
"""

from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import chunk_problem, recurrent_inputs, recurrent_problem
from gdn.testing.compare import same_bits
from tests.gpu import cases, test_gdn_decode, test_gdn_prefill, test_steps
from tests.gpu.chunk import FUNCTION, arguments_of
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import Arguments, backends, copied, run
from tests.gpu.framed import frame_is_untouched, on_cpu
from tests.gpu.test_recurrent_tree import parents
from tests.gpu.twins import twin, whole
from tests.references import reference

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
LAYOUTS = pytest.mark.parametrize("v_first", [True, False], ids=["V first", "K first"])
NULL = 0


def rows_of_nan(rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, gap: int = 24) -> Tensor:
    """[rows, *shape] of NaN, contiguous but for a gap after every row."""
    inner = torch.Size(shape).numel()
    return torch.full((rows, inner + gap), torch.nan, dtype=dtype, device=device)[:, :inner].unflatten(1, shape)


def renumbered(arguments: Arguments, rows: int) -> dict[int, int]:
    """Gives every slot of a checkpoint a row of its own from NULL + 1 on; slot -> row. Null slots stay null."""
    slots = arguments["checkpoint_slots"]
    live = sorted({slot for slot in slots.flatten().tolist() if slot > NULL})
    assert len(live) < rows
    row_of = {slot: rows - 1 - place for place, slot in enumerate(live)}
    values = [[row_of.get(slot, slot) for slot in row] for row in slots.tolist()]
    arguments["checkpoint_slots"] = torch.tensor(values, dtype=slots.dtype, device=slots.device)
    return row_of


def same_copies(kept: Tensor, pool: Tensor, untouched: Tensor, row_of: dict[int, int]) -> None:
    """Rows of `kept` hold what the slots of `pool` hold, in the narrower of the two dtypes. untouched: the pool before."""
    narrow = BF16 if BF16 in (kept.dtype, pool.dtype) else F32
    written = 0
    for slot, row in row_of.items():
        if same_bits(pool[slot], untouched[slot]):
            assert bool(kept[row].isnan().all()), f"row {row} was written"
            continue
        written += 1
        assert same_bits(kept[row].to(narrow), pool[slot].to(narrow)), f"row {row}"
    assert written
    others = [row for row in range(kept.shape[0]) if row not in row_of.values()]
    assert bool(kept[others].isnan().all())
    frame_is_untouched(kept)


@DTYPES
@LAYOUTS
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("segment", [0, 2])
@pytest.mark.parametrize("backend", backends("chunk"))
def test_chunk(
    dtype: torch.dtype, v_first: bool, head_dim: int, segment: int, backend: str, device: torch.device, force: Force
) -> None:
    force(split_chunks=segment)
    dims = {"head_k_dim": head_dim, "head_v_dim": head_dim, "state_v_first": v_first}
    state_dtype = "bfloat16" if dtype == F32 else "float32"
    problem = chunk_problem(**cases.MAIN | dims, state_dtype=state_dtype, has_mask=True, has_checkpoints=True)
    lengths = {"lengths": [0, 63, 64, 65, 128, 700, 64, 257, 384], "null_sequences": [6]}
    arguments = arguments_of(problem, device, **lengths)
    null_slot = arguments.get("null_slot", -1)
    arguments["checkpoint_slots"][4, 0] = null_slot
    before, in_pool = copied(arguments), copied(arguments)
    expected = run(FUNCTION, in_pool, backend)[0].clone()
    row_of = renumbered(arguments, 40)
    kept = rows_of_nan(40, arguments["initial_state"].shape[1:], dtype, device)
    o, _ = run(FUNCTION, arguments | {"checkpoint_states": kept}, backend)
    assert same_bits(o, expected)
    same_copies(kept, in_pool["initial_state"], before["initial_state"], row_of)
    plain = copied(before)
    run(FUNCTION, {name: x for name, x in plain.items() if not name.startswith("checkpoint")}, backend)
    assert same_bits(whole(arguments["initial_state"]), whole(plain["initial_state"])), "a checkpoint went to the pool"


@DTYPES
@pytest.mark.parametrize("output_final_state", [False, True])
@pytest.mark.parametrize("backend", backends("chunk"))
def test_chunk_without_a_pool(dtype: torch.dtype, output_final_state: bool, backend: str, device: torch.device) -> None:
    problem = chunk_problem(**cases.MAIN | {"index_dtype": None, "has_initial_state": False})
    arguments = arguments_of(problem, device, lengths=[130, 64, 0, 700])
    kept = rows_of_nan(6, (problem.num_state_heads, 128, 128), dtype, device)
    offsets = torch.tensor([[64, 128], [64, 0], [0, 64], [640, 704]], device=device)
    rows = torch.tensor([[5, 0], [2, 1], [1, 1], [3, 4]], dtype=torch.int32, device=device)
    given = arguments | {
        "checkpoint_offsets": offsets, "checkpoint_slots": rows, "checkpoint_states": kept, "null_slot": -1,
        "output_final_state": output_final_state,
    }  # fmt: skip
    o, final = run(FUNCTION, given, backend)
    assert (final is not None) == output_final_state
    starts = arguments["cu_seqlens"].tolist()
    for n, length, row in ((0, 64, 5), (0, 128, 0), (1, 64, 2), (3, 640, 3)):
        tokens = slice(starts[n], starts[n] + length)
        part = {name: x[:, tokens] if name in ("q", "k", "v", "g", "beta") else x for name, x in arguments.items()}
        part |= {"cu_seqlens": None, "out": None, "output_final_state": True}
        its_o, state = run(FUNCTION, part, backend)
        assert state is not None
        difference = (kept[row].double() - state[0].double()).norm() / state.double().norm()
        assert float(difference) <= 1e-2, f"row {row}: {float(difference):.2g}"
    assert bool(kept[[1, 4]].isnan().all())


@pytest.mark.parametrize("order", ["channels", "columns"])
@DTYPES
@pytest.mark.parametrize("has_pool", [True, False])
def test_convolution(order: str, dtype: torch.dtype, has_pool: bool, device: torch.device) -> None:
    case = test_steps.Case(index_dtype=torch.int64)
    arguments = test_steps.prefill(case, device, checkpoints=2, mask=has_pool)
    arguments.pop("out")
    if not has_pool:  # all sequences start from zeros, in either call
        arguments["has_initial_state"] = torch.zeros(case.count + 1, dtype=torch.bool, device=device)
    before = twin(arguments)
    in_pool = twin(arguments)
    expected = gdn.causal_conv1d_fn(**in_pool, backend="cute")
    pool, window = in_pool["conv_states"], case.width - 1
    rows = 3 * case.count
    row_of = renumbered(arguments, rows)
    shape = (rows, window + 1, case.dim) if order == "channels" else (rows, case.dim, window + 1)
    kept = torch.full(shape, torch.nan, dtype=dtype, device=device)
    kept = kept.mT if order == "channels" else kept
    if not has_pool:
        live = arguments["cache_indices"]
        arguments |= {"conv_states": None, "has_initial_state": None, "cache_indices": live}
    y = gdn.causal_conv1d_fn(**arguments, checkpoint_windows=kept, backend="cute")
    assert same_bits(y, expected)
    written = 0
    for slot, row in row_of.items():
        wanted = pool[slot, :, :window]
        if same_bits(wanted, before["conv_states"][slot, :, :window]):
            assert bool(kept[row].isnan().all()), f"row {row} was written"
            continue
        written += 1
        assert same_bits(kept[row, :, :window], wanted.to(case.dtype).to(dtype)), f"row {row}"
    assert written and bool(kept[:, :, window:].isnan().all())
    others = [row for row in range(rows) if row not in row_of.values()]
    assert bool(kept[others].isnan().all())


@pytest.mark.parametrize("form", ["apart", "side by side", "normed"])
@pytest.mark.parametrize("tensors", [("states",), ("windows",), ("states", "windows")], ids="-".join)
@pytest.mark.parametrize("layout", ["flat", "interleaved", "merged"])
def test_prefill_step(
    form: str, tensors: tuple[str, ...], layout: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_gdn_prefill.force_form(monkeypatch, form)
    case = test_gdn_prefill.Case(layout=layout, has_checkpoints=True, lengths=(130, 64, 0, 70, 1, 200))
    arguments = test_gdn_prefill.make(case, device)
    before, in_pools, plain = twin(arguments), twin(arguments), twin(arguments)
    gdn.fused_gdn_prefill(**in_pools, backend="cute")
    gdn.fused_gdn_prefill(**{name: x for name, x in plain.items() if not name.startswith("checkpoint")}, backend="cute")
    row_of = renumbered(arguments, 20)
    window = case.width - 1
    kept: Arguments = {}
    if "states" in tensors:
        kept["checkpoint_states"] = rows_of_nan(20, arguments["ssm_state"].shape[1:], F32, device)
    if "windows" in tensors:
        kept["checkpoint_windows"] = rows_of_nan(20, (case.channels, window), F32, device)
    gdn.fused_gdn_prefill(**arguments, **kept, backend="cute")
    assert same_bits(arguments["out"], in_pools["out"])
    for pool in ("ssm_state", "conv_states"):
        assert same_bits(whole(arguments[pool]), whole(plain[pool])), f"a checkpoint went to {pool}"
    if "states" in tensors:
        same_copies(kept["checkpoint_states"], in_pools["ssm_state"], before["ssm_state"], row_of)
    if "windows" in tensors:
        windows = kept["checkpoint_windows"]
        for slot, row in row_of.items():
            wanted, old = (x["conv_states"][slot, :, :window] for x in (in_pools, before))
            is_written = not same_bits(wanted, old)
            assert same_bits(windows[row], wanted.to(F32)) if is_written else bool(windows[row].isnan().all())


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double().cpu() - exact).norm() / exact.norm())


def judge_intermediate(kept: Tensor, exact: Tensor, tolerance: float) -> None:
    """kept: [rows, T_max, ...] as a kernel left it; exact: as the reference did, NaN where nothing was to be stored."""
    for row in range(kept.shape[0]):
        for token in range(kept.shape[1]):
            if bool(exact[row, token].isnan().any()):
                assert bool(kept[row, token].isnan().all()), f"row {row}, token {token} was written"
            else:
                assert relative(kept[row, token], exact[row, token]) <= tolerance, f"row {row}, token {token}"
    frame_is_untouched(kept)


TOLERANCE = {F32: 1e-4, BF16: 2.0**-8}


@DTYPES
@LAYOUTS
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [128, 60, 256])
@pytest.mark.parametrize("tree", [None, "random"])
@pytest.mark.parametrize("backend", backends("recurrent"))
def test_recurrent(
    dtype: torch.dtype, v_first: bool, state_dtype: str, head_dim: int, tree: str | None, backend: str, device: torch.device
) -> None:
    """Tokens from the fourth on are not stored; a null row, a null slot, an empty sequence and padding touch nothing."""
    lengths = [1, 0, 5, 3, 2, 4, 1, 6]
    dims = {"head_k_dim": head_dim, "head_v_dim": head_dim, "state_v_first": v_first}
    problem = recurrent_problem(**cases.MAIN | dims, state_dtype=state_dtype)
    arguments = recurrent_inputs(problem, device, lengths=lengths, strided=True, padded_tokens=4, slot_gap=24, null_sequences=[3],
                                 null_slot=NULL)  # fmt: skip
    indices = arguments["ssm_state_indices"]
    rows = torch.tensor([9, 8, 1, 7, 3, NULL, 2, 5, 99, 99], dtype=torch.int64, device=device)
    kept = rows_of_nan(10, (4, *arguments["initial_state"].shape[1:]), dtype, device)
    arguments |= {"intermediate_states": kept, "intermediate_indices": rows[: max(indices.shape[0], len(lengths))]}
    if tree is not None:
        known = parents(tree, lengths)
        known += [0] * (arguments["q"].shape[1] - len(known))
        arguments["parent_token"] = torch.tensor(known, dtype=torch.int32, device=device)
    before = copied(arguments)
    exact = on_cpu(before, wide=True) | {"intermediate_states": torch.full(kept.shape, torch.nan, dtype=torch.float64)}
    exact.pop("out", None)
    expected, _ = reference.fused_recurrent_gated_delta_rule(**exact)
    o, final = run("fused_recurrent_gated_delta_rule", arguments, backend)
    assert final is None or final is arguments["initial_state"]
    assert same_bits(whole(arguments["initial_state"]), whole(before["initial_state"])), "the pool was written"
    assert relative(o, expected) <= 2.0**-8 and not bool(o.isnan().any())
    judge_intermediate(kept, exact["intermediate_states"], TOLERANCE[dtype])


@DTYPES
@LAYOUTS
@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=["pool float32", "pool bfloat16"])
@pytest.mark.parametrize("layout", ["flat", "interleaved", "merged", "concatenated"])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("offsets", [torch.int32, None], ids=["ragged", "one token each"])
def test_decode_step(
    dtype: torch.dtype, v_first: bool, state_dtype: torch.dtype, layout: str, has_norm: bool, offsets: torch.dtype | None,
    device: torch.device,
) -> None:  # fmt: skip
    lengths = (1, 2, 0, 4, 1, 3, 8, 1) if offsets is not None else (1,) * 8
    case = test_gdn_decode.Case(
        lengths=lengths, offsets_dtype=offsets, v_first=v_first, state_dtype=state_dtype, layout=layout, has_norm=has_norm
    )
    arguments, padding = test_gdn_decode.make(case, device)
    rows = torch.tensor([9, 8, 1, 7, 3, 5, NULL, 2], dtype=torch.int64, device=device)
    kept = rows_of_nan(10, (4, *arguments["ssm_state"].shape[1:]), dtype, device)
    before = twin(arguments)
    arguments |= {"intermediate_states": kept, "intermediate_indices": rows}
    exact = on_cpu(before, wide=True) | {"intermediate_states": torch.full(kept.shape, torch.nan, dtype=torch.float64)}
    exact |= {"intermediate_indices": rows.cpu(), "out": None}
    expected = reference.fused_gdn_decode(**exact)
    result = gdn.fused_gdn_decode(**arguments, backend="cute")
    for pool in ("ssm_state", "conv_state"):
        assert same_bits(whole(arguments[pool]), whole(before[pool])), f"{pool} was written"
    live = [row for row in range(case.tokens) if row not in padding]
    assert relative(result[live], expected[live]) <= 2.0**-7
    assert bool((result[padding] == 0).all())
    judge_intermediate(kept, exact["intermediate_states"], max(TOLERANCE[dtype], 1e-3))


@pytest.mark.parametrize("operator", ["causal_conv1d_fn", "causal_conv1d_update", "fused_gdn_prefill", "fused_gdn_decode"])
def test_a_cache_of_w_columns(operator: str, device: torch.device) -> None:
    """The view [..., 1:] as the pool: not aligned, columns contiguous. As an aligned pool, bit for bit, and in place."""
    calls: dict[str, Any] = {
        "causal_conv1d_fn": lambda: test_steps.prefill(test_steps.Case(order="columns"), device),
        "fused_gdn_prefill": lambda: test_gdn_prefill.make(test_gdn_prefill.Case(order="columns"), device),
        "fused_gdn_decode": lambda: test_gdn_decode.make(test_gdn_decode.Case(order="columns"), device)[0],
        "causal_conv1d_update": lambda: {
            "x": torch.randn(3, 256, device=device).bfloat16(), "weight": torch.randn(256, 4, device=device).bfloat16(),
            "conv_state": torch.randn(5, 256, 3, device=device).bfloat16(),
            "conv_state_indices": torch.tensor([4, 0, 2], device=device),
        },
    }  # fmt: skip
    arguments = calls[operator]()
    pool = "conv_state" if "conv_state" in arguments else "conv_states"
    window = arguments[pool].shape[2]
    cache = torch.full((*arguments[pool].shape[:2], 1 + window), torch.nan, dtype=arguments[pool].dtype, device=device)
    cache[..., 1:] = arguments[pool]
    view = cache[..., 1:]
    assert view.data_ptr() % 16 and view.stride(2) == 1
    aligned = twin(arguments)
    expected = getattr(gdn, operator)(**aligned, backend="cute")
    result = getattr(gdn, operator)(**arguments | {pool: view}, backend="cute")
    assert same_bits(result, expected) and same_bits(view, aligned[pool]) and bool(cache[..., 0].isnan().all())
