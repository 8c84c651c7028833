"""Indices beyond 32 bits: each is compared in its own width, so that padding stays padding.

Narrowed to int32, -2**33 + 1 is slot 1, 2**32 + 1 accepted tokens are 1, and -2**40 is slot 0.
"""

from typing import Any

import pytest
import torch

from gdn.testing.compare import same_bits
from tests.reference.calls import CALLS, randn
from tests.references import reference

PADDING = [-(2**33) + 1, -(2**40), -(2**63), -1]
BEYOND = [2**32 + 1, 2**32, -(2**33) + 1, 0]  # counts of accepted tokens: not one of them is in 1..columns


def run(name: str, arguments: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The first result, and the pools after the call."""
    result = getattr(reference, name)(**arguments)
    pools = ("initial_state", "conv_states", "conv_state", "ssm_state", "cache", "ring")
    first = result[0] if isinstance(result, tuple) else result
    return first, [arguments[key] for key in pools if key in arguments]


def check_same(name: str, arguments: dict[str, Any], plain: dict[str, Any]) -> None:
    """Checks that both calls give the same results and pools. Pools and caches are taken from `arguments`, in copies."""

    def copied(call: dict[str, Any]) -> dict[str, Any]:
        return {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in call.items()}

    got, got_pools = run(name, copied(arguments))
    want, want_pools = run(name, copied(arguments | plain))
    assert (got is None and want is None) or same_bits(got, want)
    assert all(same_bits(x, y) for x, y in zip(got_pools, want_pools, strict=True))


@pytest.mark.parametrize("slot", PADDING)
@pytest.mark.parametrize(
    ("name", "key", "seen"),
    [
        ("chunk_gated_delta_rule", "state_indices", True),
        ("chunk_gated_delta_rule", "final_state_indices", False),
        ("chunk_gated_delta_rule", "checkpoint_slots", False),
        ("fused_recurrent_gated_delta_rule", "ssm_state_indices", True),
        ("causal_conv1d_fn", "cache_indices", True),
        ("causal_conv1d_update", "conv_state_indices", True),
        ("fused_gdn_decode", "state_indices", True),
        ("fused_gdn_prefill", "state_indices", True),
    ],
)
def test_null_slots(name: str, key: str, seen: bool, slot: int) -> None:
    """The other indices stay int32. The first sequence is padding, or (final, checkpoint) is not stored there."""
    arguments = CALLS[name]()
    spoilt = arguments[key].long()
    spoilt[0] = slot
    plain = arguments[key].clone()
    plain[0] = -1
    check_same(name, arguments | {key: spoilt}, {key: plain})
    if seen:
        result, _ = run(name, arguments | {key: spoilt})
        rows = result[0] if name.endswith("delta_rule") else result
        assert bool((rows[0] == 0).all()) and not bool((rows == 0).all())


@pytest.mark.parametrize("slot", PADDING)
def test_null_slot_to_write_next_to_int32_indices(slot: int) -> None:
    arguments = CALLS["fused_recurrent_gated_delta_rule"]()
    indices = arguments["ssm_state_indices"]
    assert indices.dtype == torch.int32 and indices.dim() == 2
    final = indices.long()
    final[0, 1] = slot
    plain = indices.clone()
    plain[0, 1] = -1
    check_same("fused_recurrent_gated_delta_rule", arguments | {"final_state_indices": final}, {"final_state_indices": plain})


@pytest.mark.parametrize("accepted", BEYOND)
@pytest.mark.parametrize("name", ["fused_recurrent_gated_delta_rule", "causal_conv1d_update", "fused_gdn_decode"])
def test_accepted_counts(name: str, accepted: int) -> None:
    arguments = CALLS[name]()
    if name == "fused_gdn_decode":
        slots, channels, columns = arguments["conv_state"].shape
        arguments["state_indices"] = torch.tensor([[4, 1], [2, 0]])
        arguments["conv_state"] = randn(slots, channels, columns + 1)
        arguments["num_accepted_tokens"] = torch.ones(2, dtype=torch.int64)
    spoilt = arguments["num_accepted_tokens"].long()
    spoilt[0] = accepted
    plain = arguments["num_accepted_tokens"].clone()
    plain[0] = -1
    check_same(name, arguments | {"num_accepted_tokens": spoilt}, {"num_accepted_tokens": plain})
    result, _ = run(name, arguments | {"num_accepted_tokens": spoilt})
    rows = result[0] if name.endswith("delta_rule") else result
    assert bool((rows[0] == 0).all()) and not bool((rows == 0).all())


@pytest.mark.parametrize("offset", [2**32 + 64, -(2**32) + 64, -(2**63)])
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "causal_conv1d_fn", "fused_gdn_prefill"])
def test_checkpoint_offsets(name: str, offset: int) -> None:
    """An offset beyond the sequence makes no checkpoint."""
    arguments = CALLS[name]()
    if name == "causal_conv1d_fn":
        arguments |= {"x": randn(70, arguments["x"].shape[1]), "query_start_loc": torch.tensor([0, 66, 70])}
    arguments["checkpoint_slots"] = torch.tensor([[3], [4]])
    none = torch.zeros(2, 1, dtype=torch.int64)
    spoilt = none.clone()
    spoilt[0] = offset
    check_same(name, arguments | {"checkpoint_offsets": spoilt}, {"checkpoint_offsets": none})


@pytest.mark.parametrize("slot", PADDING)
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("write_indexer_cache", "slot_mapping"),
        ("prepare_indexer", "slot_mapping"),
        ("compress_indexer_keys", "slot_mapping"),
        ("compress_indexer_keys", "ring_slots"),
    ],
)
def test_skipped_tokens_of_the_indexer(name: str, key: str, slot: int) -> None:
    arguments = CALLS[name]()
    spoilt, plain = arguments[key].long(), arguments[key].int()
    spoilt[-2:], plain[-2:] = slot, -1
    check_same(name, arguments | {key: spoilt}, {key: plain})


@pytest.mark.parametrize("position", PADDING)
def test_positions_that_do_not_count(position: int) -> None:
    arguments = CALLS["sparse_attention"]() | {"topk_length": None}
    spoilt, plain = arguments["topk_indices"].long(), arguments["topk_indices"].clone()
    spoilt[0, 1], spoilt[1, 0] = position, 2**32
    plain[0, 1], plain[1, 0] = -1, -1
    check_same("sparse_attention", arguments | {"topk_indices": spoilt}, {"topk_indices": plain})


def test_ranges_and_lengths_are_clamped_in_their_own_width() -> None:
    ragged = CALLS["mqa_logits"]()
    starts, ends = torch.tensor([-(2**40), 2**40, 0, 3, 2**32, 0]), torch.tensor([2**40, 3, -(2**33), 2**33 + 2, 2**32 + 9, 20])
    plain = {"cu_seqlen_ks": torch.tensor([0, 20, 0, 3, 20, 0]), "cu_seqlen_ke": torch.tensor([20, 20, 0, 20, 20, 20])}
    check_same("mqa_logits", ragged | {"cu_seqlen_ks": starts, "cu_seqlen_ke": ends}, plain)
    check_same("indexer_topk", ragged | {"topk": 5, "cu_seqlen_ks": starts, "cu_seqlen_ke": ends}, plain)
    paged = CALLS["paged_mqa_logits"]()
    lengths, plain_lengths = torch.tensor([[2**32 + 3], [-(2**63)], [5]]), torch.tensor([[40], [-5], [5]])
    check_same("paged_mqa_logits", paged | {"context_lens": lengths}, {"context_lens": plain_lengths})
