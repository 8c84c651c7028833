"""Kernels between the passes of context parallel against their references in float64, and each other's bits.

The outputs are NaN before a launch, and pools have NaN between their slots: what is never written, or written where it should
not be, shows.
"""

from typing import Any

import pytest
import torch

from gdn import runtime
from gdn.ops.context import reference
from gdn.testing import compare
from gdn.testing.compare import same_bits
from tests.context_calls import Call, parts_call, start_call, total_call

pytestmark = pytest.mark.gpu

DIMS = [(128, 128), (64, 64)]
LAYOUTS = pytest.mark.parametrize("v_first", [False, True])
RANKS = [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (0, 4), (1, 4), (3, 4)]
# Without final states the first rank launches nothing.
FORMS = [(final, *place) for final in (None, "rows", "pool", "ends here") for place in RANKS if final or place[0]]
ERROR = 1e-6  # of a head of a state, relative: a few roundings of float32 a link


def launch(call: Call, device: torch.device) -> Call:
    """The call on the device, after its launch."""
    made = call.copied(device)
    prepared = runtime.prepare(made.problem, device, "cute")
    assert prepared.launch is not None
    prepared.launch(made.params)
    return made


def parts_of(call: Call, name: str, x: torch.Tensor) -> list[torch.Tensor]:
    """A result as matrices [heads of all sequences, ...], and the flags of a message as rows."""
    if name != "message":
        return [x.flatten(0, 1)]
    if call.problem.op == "context_parts":
        return [x[:, None]]
    return [
        part.flatten(0, -3) if part.dim() > 3 else part.flatten()[:, None] for part in reference.parts_of(call.problem, x[None])
    ]


def check(call: Call, device: torch.device, error: float = ERROR) -> None:
    exact = call.copied().in_float64()
    getattr(reference, call.problem.op)(exact.problem, exact.params)
    found = launch(call, device)
    for name, (one, other) in found.written_with(exact).items():
        one = one.cpu()
        if not one.is_floating_point():
            assert torch.equal(one, other), name
            continue
        assert torch.equal(torch.isnan(one), torch.isnan(other)), f"{name}: elements that only one of them writes"
        limit = error if one.dtype == torch.float32 else 4e-3
        for part, wanted in zip(parts_of(call, name, one), parts_of(call, name, other), strict=True):
            wrong = compare.error(part.nan_to_num(), wanted.nan_to_num().double(), groups=1)
            assert wrong.l2 < limit, (name, wrong)
    unwritten = [name for name in call.params._fields if name not in call.written]
    for name in unwritten:
        before, after = getattr(call.params, name), getattr(found.params, name)
        assert not isinstance(before, torch.Tensor) or same_bits(before, after.cpu()), f"{name}: not an output"
    for _ in range(3):
        again = launch(call, device)
        for name, (one, other) in found.written_with(again).items():
            assert same_bits(one, other), f"{name}: the same bits"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("segments", [1, 2, 8])
def test_parts(segments: int, dtype: torch.dtype, device: torch.device) -> None:
    for lengths in ([5000], [1000, 0, 64], [1, 63, 64, 65, 129, 0, 12345] * 30):
        check(parts_call(lengths, segments, dtype), device)
        check(parts_call(lengths, segments, dtype, index_dtype=torch.int64), device)
    check(parts_call([5000], segments, None, length=5000, index_dtype=None), device)


@LAYOUTS
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("segments", [1, 2, 8])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_total(rank: int, count: int, segments: int, dims: tuple[int, int], v_first: bool, device: torch.device) -> None:
    check(total_call(rank, count, segments, v_first, dims=dims), device)


@LAYOUTS
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64, None])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("has_mask", [False, True])
def test_starts(has_mask: bool, pool_dtype: Any, index_dtype: Any, v_first: bool, device: torch.device) -> None:
    """Starts come from pools, from rows, from zeros; some sequences are padding, some start anew."""
    check(total_call(0, 4, 2, v_first, pool_dtype=pool_dtype, index_dtype=index_dtype, has_mask=has_mask), device)


@LAYOUTS
@pytest.mark.parametrize("dims", [*DIMS, (128, 64), (64, 128)])
@pytest.mark.parametrize("segments", [1, 2, 8])
@pytest.mark.parametrize(("final", "rank", "ranks"), FORMS)
def test_start(
    final: str | None, rank: int, ranks: int, segments: int, dims: tuple[int, int], v_first: bool, device: torch.device
) -> None:
    check(start_call(rank, ranks, 3, segments, v_first, final, dims=dims), device)


@LAYOUTS
@pytest.mark.parametrize("final_index_dtype", [torch.int32, torch.int64, None])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("final", ["pool", "ends here"])
def test_final_states(
    final: str, pool_dtype: torch.dtype, index_dtype: torch.dtype, final_index_dtype: Any, v_first: bool, device: torch.device
) -> None:
    """Padding and sequences without tokens leave the pool alone, and slots that no sequence has keep their bits."""
    options = {"pool_dtype": pool_dtype, "index_dtype": index_dtype, "final_index_dtype": final_index_dtype}
    check(start_call(2, 3, 5, 2, v_first, final, **options), device)


@LAYOUTS
@pytest.mark.parametrize("dims", DIMS)
def test_all_ranks_have_the_bits_of_the_same_states(dims: tuple[int, int], v_first: bool, device: torch.device) -> None:
    """The final states of every rank, whatever it makes besides, and the state before a part on its rank and in the chain."""
    finals = []
    for rank in range(4):
        for segments, final in ((1, "rows"), (2, "rows"), (2, "pool")):
            call = launch(start_call(rank, 4, 2, segments, v_first, final, dims=dims), device)
            if final == "rows":
                finals.append(call.params.final_state)
    assert all(same_bits(one, finals[0]) for one in finals)
    for rank in (1, 2, 3):
        alone = launch(start_call(rank, 4, 2, 1, v_first, None, dims=dims), device).params.states
        cut = launch(start_call(rank, 4, 2, 2, v_first, "rows", dims=dims), device).params.states[::2]
        assert same_bits(alone, cut)


def test_many_heads(device: torch.device) -> None:
    """More blocks than run at once."""
    check(total_call(1, 3, 2, True, heads=32), device)
    check(start_call(3, 4, 3, 2, True, "pool", heads=32), device)


def test_slots_beyond_int32(device: torch.device) -> None:
    """A slot is compared in its own width: a large negative one is padding, and so is one below null_slot in 64 bits."""
    call = total_call(0, 3, 1, True, index_dtype=torch.int64)
    slots = call.params.state_indices
    slots[0], slots[1] = -(2**33) + 5, -(2**32) + 1
    check(call, device)
    stored = start_call(1, 2, 3, 1, True, "pool", index_dtype=torch.int64)
    stored.params.state_indices[0] = -(2**32) + 3
    check(stored, device)
