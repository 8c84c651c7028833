"""States and windows that go to the caller's own tensors: checkpoints, and the state after every token, against plain runs."""

from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import same_bits
from tests.described.plain import call as plain_call

K, V, HEADS = 8, 4, 4
Arguments = dict[str, Any]


def tokens(length: int, seed: int = 0) -> Arguments:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(1, length, *shape, generator=generator, dtype=torch.float64)

    return {
        "q": randn(2, K), "k": randn(2, K), "v": randn(HEADS, V), "g": -randn(HEADS).abs() / 8, "beta": randn(HEADS).sigmoid(),
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip


def part(given: Arguments, start: int, end: int) -> Arguments:
    return {name: x[:, start:end] if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def state_shape(v_first: bool) -> tuple[int, int, int]:
    return (HEADS, V, K) if v_first else (HEADS, K, V)


def state_after(given: Arguments, start: torch.Tensor, v_first: bool) -> torch.Tensor:
    """The state [HEADS, ...] after the tokens, one by one, from a state."""
    _, final = gdn.fused_recurrent_gated_delta_rule(**given, initial_state=start[None], state_v_first=v_first)
    assert final is not None
    return final[0]


def untouched(tensor: torch.Tensor, before: torch.Tensor, rows: list[int]) -> bool:
    others = [row for row in range(tensor.shape[0]) if row not in rows]
    return same_bits(tensor[others], before[others])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("has_pool", [False, True])
def test_checkpoints_of_chunk(v_first: bool, has_pool: bool) -> None:
    """64 and 128 of 150 tokens, 64 of a sequence of 70 whose checkpoint is null, none of an empty one and of one of 64."""
    lengths = [150, 0, 70, 64]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    given = tokens(sum(lengths))
    pool = torch.randn(9, *state_shape(v_first), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kept = torch.full((7, *state_shape(v_first)), 5.0, dtype=torch.float64)
    before, first = kept.clone(), pool.clone()
    slots = torch.tensor([3, 4, 8, 2])
    result = gdn.chunk_gated_delta_rule(
        **given, initial_state=pool if has_pool else pool[slots], cu_seqlens=bounds, state_v_first=v_first,
        state_indices=slots if has_pool else None, checkpoint_states=kept, output_final_state=True,
        checkpoint_offsets=torch.tensor([[64, 128], [64, 0], [64, 192], [0, 64]]),
        checkpoint_slots=torch.tensor([[6, 0], [1, 1], [-1, 1], [2, 4]], dtype=torch.int32),
    )  # fmt: skip
    for n, offset, row in ((0, 64, 6), (0, 128, 0), (3, 64, 4)):
        start = int(bounds[n])
        expected = state_after(part(given, start, start + offset), first[slots[n]], v_first)
        torch.testing.assert_close(kept[row], expected, rtol=1e-10, atol=1e-12)
    assert untouched(kept, before, [0, 4, 6])
    plain = gdn.chunk_gated_delta_rule(
        **given, initial_state=first if has_pool else first[slots], cu_seqlens=bounds, state_v_first=v_first,
        state_indices=slots if has_pool else None, output_final_state=True,
    )  # fmt: skip
    assert all(same_bits(one, other) for one, other in zip(result, plain, strict=True))


@pytest.mark.parametrize("has_pool", [False, True])
def test_checkpoints_of_the_convolution(has_pool: bool) -> None:
    lengths, dim, width = [5, 0, 1], 6, 4
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, dim, generator=generator, dtype=torch.float64)
    pool = torch.randn(5, dim, width - 1, generator=generator, dtype=torch.float64)
    kept = torch.full((4, width, dim), 5.0, dtype=torch.float64).mT
    slots, before, first = torch.tensor([4, 2, 1]), kept.clone(), pool.clone()
    places = {"conv_states": pool, "cache_indices": slots} if has_pool else {}
    gdn.causal_conv1d_fn(
        x, torch.randn(dim, width, generator=generator, dtype=torch.float64), query_start_loc=bounds, checkpoint_windows=kept,
        checkpoint_offsets=torch.tensor([[2, 5], [1, 1], [0, 1]]), checkpoint_slots=torch.tensor([[3, 0], [1, 1], [1, 2]]),
        **places,
    )  # fmt: skip
    for n, offset, row in ((0, 2, 3), (0, 5, 0), (2, 1, 2)):
        history = first[slots[n]] if has_pool else torch.zeros(dim, width - 1, dtype=torch.float64)
        line = torch.cat([history, x[bounds[n] : bounds[n] + offset].T], dim=1)
        assert same_bits(kept[row, :, : width - 1], line[:, -(width - 1) :])
    assert untouched(kept, before, [0, 2, 3])
    assert same_bits(kept[:, :, width - 1 :], before[:, :, width - 1 :])


@pytest.mark.parametrize("kept", [("states",), ("windows",), ("states", "windows")])
def test_checkpoints_of_the_prefill_step(kept: tuple[str, ...]) -> None:
    """Rows of the tensors hold what the slots of the pools would, and the pools keep theirs."""
    given = plain_call("fused_gdn_prefill", 200, torch.bfloat16) | {"checkpoint_offsets": torch.tensor([[128, 64]] * 3)[:1]}
    given["query_start_loc"] = torch.tensor([0, 200])
    given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    given |= {"state_indices": torch.tensor([1]), "has_initial_state": None}
    states, windows = given["ssm_state"], given["conv_states"]
    in_pools = given | {"ssm_state": states.clone(), "conv_states": windows.clone(), "checkpoint_slots": torch.tensor([[0, 2]])}
    expected = gdn.fused_gdn_prefill(**in_pools)
    tensors = {}
    if "states" in kept:
        tensors["checkpoint_states"] = torch.zeros(3, *states.shape[1:], dtype=states.dtype)
    if "windows" in kept:
        tensors["checkpoint_windows"] = torch.zeros(3, *windows.shape[1:], dtype=windows.dtype)
    before = (states.clone(), windows.clone())
    result = gdn.fused_gdn_prefill(**given, **tensors, checkpoint_slots=torch.tensor([[1, 2]]))
    assert same_bits(result, expected)
    columns = given["conv_weight"].shape[1] - 1
    for name, pool in (("checkpoint_states", in_pools["ssm_state"]), ("checkpoint_windows", in_pools["conv_states"])):
        if name in tensors:
            used = slice(None) if name == "checkpoint_states" else slice(columns)
            assert same_bits(tensors[name][[1, 2]][..., used], pool[[0, 2]][..., used])
            assert not tensors[name][0].any()
    assert untouched(states, before[0], [1]) and untouched(windows, before[1], [1])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("is_tree", [False, True])
def test_intermediate_states_of_the_recurrence(v_first: bool, is_tree: bool) -> None:
    """Not stored: the last of four tokens, what has a null row, padding and an empty sequence. No pool is written."""
    lengths = [4, 2, 0, 1, 3]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    given = tokens(sum(lengths))
    pool = torch.randn(9, *state_shape(v_first), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kept = torch.full((6, 3, *state_shape(v_first)), 5.0, dtype=torch.float64)
    before, first = kept.clone(), pool.clone()
    slots, rows = torch.tensor([3, 4, 8, -1, 3]), torch.tensor([5, 0, 2, 3, -1], dtype=torch.int32)
    parents = torch.tensor([-1, 0, 0, 2, -1, -1, -1, -1, 0, 0], dtype=torch.int32) if is_tree else None
    o, final = gdn.fused_recurrent_gated_delta_rule(
        **given, initial_state=pool, cu_seqlens=bounds, state_v_first=v_first, ssm_state_indices=slots, parent_token=parents,
        intermediate_states=kept, intermediate_indices=rows,
    )  # fmt: skip
    assert final is pool and same_bits(pool, first)
    for n in (0, 1, 4):
        begin = int(bounds[n])
        for i in range(lengths[n]):
            path = [i]
            while path[0] > 0 if parents is None else int(parents[begin + path[0]]) >= 0:
                path.insert(0, path[0] - 1 if parents is None else int(parents[begin + path[0]]))
            own = {name: x[:, [begin + j for j in path]] if isinstance(x, torch.Tensor) else x for name, x in given.items()}
            o_own, expected = gdn.fused_recurrent_gated_delta_rule(
                **own, initial_state=first[slots[n]][None], state_v_first=v_first
            )
            assert expected is not None
            torch.testing.assert_close(o[:, begin + i], o_own[:, -1], rtol=1e-10, atol=1e-12)
            if n != 4 and i < 3:
                torch.testing.assert_close(kept[rows[n], i], expected[0], rtol=1e-10, atol=1e-12)
    assert not o[:, 6].any()
    assert untouched(kept, before, [0, 5]) and same_bits(kept[0, 2], before[0, 2])


def test_intermediate_states_of_the_decode_step() -> None:
    """As drafts whose slots are rows of the tensor; neither pool is written."""
    given = plain_call("fused_gdn_decode", 4, torch.bfloat16) | {"query_start_loc": torch.tensor([0, 3, 4])}
    states, windows = given["ssm_state"], given["conv_state"]
    slots = torch.tensor([1, 0])
    drafts = torch.zeros(6, *states.shape[1:], dtype=states.dtype)
    drafts[0], drafts[3] = states[1], states[0]
    wide = torch.zeros(6, windows.shape[1], windows.shape[2] + 2, dtype=windows.dtype)
    wide[0, :, : windows.shape[2]], wide[3, :, : windows.shape[2]] = windows[1], windows[0]
    columns = torch.tensor([[0, 1, 2], [3, 4, 5]])
    expected = gdn.fused_gdn_decode(**given | {"ssm_state": drafts, "conv_state": wide, "state_indices": columns})
    kept, before = torch.zeros(3, 3, *states.shape[1:], dtype=states.dtype), (states.clone(), windows.clone())
    result = gdn.fused_gdn_decode(
        **given | {"state_indices": slots}, intermediate_states=kept, intermediate_indices=torch.tensor([2, 0])
    )
    assert same_bits(result, expected)
    assert same_bits(kept[2], drafts[:3]) and same_bits(kept[0, 0], drafts[3]) and not kept[0, 1:].any() and not kept[1].any()
    assert same_bits(states, before[0]) and same_bits(windows, before[1])
