"""Indices beyond 32 bits: the references compare each in its own width.

Here are offsets and lengths that public functions refuse before, and ranges. Null slots, accepted counts, skipped tokens and late
checkpoints beyond 32 bits are rows of tests/ops/spoiling.
"""

from typing import Any

import pytest
import torch

from gdn.testing.compare import same_bits
from tests.reference.calls import CALLS, randn
from tests.references import reference


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


@pytest.mark.parametrize("offset", [-(2**32) + 64, -(2**63)])
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "causal_conv1d_fn", "fused_gdn_prefill"])
def test_a_negative_offset_makes_no_checkpoint(name: str, offset: int) -> None:
    arguments = CALLS[name]()
    if name == "causal_conv1d_fn":
        arguments |= {"x": randn(70, arguments["x"].shape[1]), "query_start_loc": torch.tensor([0, 66, 70])}
    arguments["checkpoint_slots"] = torch.tensor([[3], [4]])
    none = torch.zeros(2, 1, dtype=torch.int64)
    spoilt = none.clone()
    spoilt[0] = offset
    check_same(name, arguments | {"checkpoint_offsets": spoilt}, {"checkpoint_offsets": none})


def test_ranges_and_lengths_are_clamped_in_their_own_width() -> None:
    ragged = CALLS["mqa_logits"]()
    starts, ends = torch.tensor([-(2**40), 2**40, 0, 3, 2**32, 0]), torch.tensor([2**40, 3, -(2**33), 2**33 + 2, 2**32 + 9, 20])
    plain = {"cu_seqlen_ks": torch.tensor([0, 20, 0, 3, 20, 0]), "cu_seqlen_ke": torch.tensor([20, 20, 0, 20, 20, 20])}
    check_same("mqa_logits", ragged | {"cu_seqlen_ks": starts, "cu_seqlen_ke": ends}, plain)
    check_same("indexer_topk", ragged | {"topk": 5, "cu_seqlen_ks": starts, "cu_seqlen_ke": ends}, plain)
    paged = CALLS["paged_mqa_logits"]()
    lengths, plain_lengths = torch.tensor([[2**32 + 3], [-(2**63)], [5]]), torch.tensor([[40], [-5], [5]])
    check_same("paged_mqa_logits", paged | {"context_lens": lengths}, {"context_lens": plain_lengths})
