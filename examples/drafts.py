"""Speculative decoding: verify drafts in one call, then go on from the state after the last accepted one."""

from typing import Any

import torch

import gdn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, DIM, DRAFTS = 4, 64, 3

torch.manual_seed(0)
pool = torch.zeros(16, HEADS, DIM, DIM, device=DEVICE)
slots = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 1]], dtype=torch.int32, device=DEVICE)  # a slot a token, of both sequences
cu_seqlens = torch.tensor([0, 1 + DRAFTS, 2 * (1 + DRAFTS)], dtype=torch.int32, device=DEVICE)
q, k, v = torch.randn(3, 1, 2 * (1 + DRAFTS), HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
g, beta = -torch.rand(1, 2 * (1 + DRAFTS), HEADS, device=DEVICE), torch.rand(1, 2 * (1 + DRAFTS), HEADS, device=DEVICE)

# Each sequence's last token and its three drafts. The state after token i goes to column i of the sequence's slots.
options: dict[str, Any] = {"initial_state": pool, "use_qk_l2norm_in_kernel": True}
accepted = torch.tensor([1, 1], dtype=torch.int32, device=DEVICE)  # in the step before: both states are in column 0
verified, _ = gdn.fused_recurrent_gated_delta_rule(
    q, k, v, g, beta, cu_seqlens=cu_seqlens, ssm_state_indices=slots, num_accepted_tokens=accepted, **options
)

# The target model keeps two tokens of the first sequence and all four of the second. Nothing is rolled back: the next step reads
# the state after the last token that was kept.
accepted = torch.tensor([2, 4], dtype=torch.int32, device=DEVICE)
kept = [pool[3 + 1].clone(), pool[1].clone()]
q, k, v = torch.randn(3, 1, 2, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
g, beta = -torch.rand(1, 2, HEADS, device=DEVICE), torch.rand(1, 2, HEADS, device=DEVICE)
one_each = torch.arange(3, dtype=torch.int32, device=DEVICE)
following, _ = gdn.fused_recurrent_gated_delta_rule(
    q, k, v, g, beta, cu_seqlens=one_each, ssm_state_indices=slots, num_accepted_tokens=accepted, **options
)

expected, _ = gdn.fused_recurrent_gated_delta_rule(
    q, k, v, g, beta, cu_seqlens=one_each, initial_state=torch.stack(kept), use_qk_l2norm_in_kernel=True
)
print(f"verified {verified.shape[1]} tokens; the next step is off by {(following - expected).abs().max().item():.1e} at most")
