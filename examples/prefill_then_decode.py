"""Prefill two prompts into a pool of states, decode from it, and compare with one prefill over all tokens."""

from typing import Any

import torch

import gdn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEY_HEADS, VALUE_HEADS, DIM = 2, 4, 64
PROMPTS, STEPS = (70, 33), 4

torch.manual_seed(0)
options: dict[str, Any] = {
    "use_gate_in_kernel": True,  # g and beta are the layer's raw a and b
    "use_beta_sigmoid_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "A_log": torch.zeros(VALUE_HEADS, device=DEVICE),
    "dt_bias": torch.zeros(VALUE_HEADS, device=DEVICE),
}


def projections(tokens: int) -> list[torch.Tensor]:
    """What a layer projects for one sequence: q, k, v, a and b, each [1, tokens, heads, dim] or [1, tokens, heads]."""
    shapes = [(KEY_HEADS, DIM), (KEY_HEADS, DIM), (VALUE_HEADS, DIM), (VALUE_HEADS,), (VALUE_HEADS,)]
    return [torch.randn(1, tokens, *shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]


def packed(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The sequences one after the other, as an engine passes a ragged batch."""
    return [torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)]


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    """cu_seqlens: where each sequence begins, and the end of the last."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)


pool = torch.randn(8, VALUE_HEADS, DIM, DIM, device=DEVICE)  # a slot still holds the state of the sequence before
slots = torch.tensor([5, 2], dtype=torch.int32, device=DEVICE)
sequences = [projections(length + STEPS) for length in PROMPTS]

prompts = packed([[x[:, :length] for x in sequence] for sequence, length in zip(sequences, PROMPTS, strict=True)])
is_continued = torch.zeros(2, dtype=torch.bool, device=DEVICE)  # both prompts start from zero
gdn.chunk_gated_delta_rule(
    *prompts, initial_state=pool, state_indices=slots, has_initial_state=is_continued, cu_seqlens=offsets(PROMPTS), **options
)

one_each = offsets((1, 1))
for step in range(STEPS):
    tokens = [
        [x[:, length + step : length + step + 1] for x in sequence] for sequence, length in zip(sequences, PROMPTS, strict=True)
    ]
    out, _ = gdn.fused_recurrent_gated_delta_rule(
        *packed(tokens), initial_state=pool, ssm_state_indices=slots, cu_seqlens=one_each, **options
    )

whole_lengths = tuple(length + STEPS for length in PROMPTS)
whole, states = gdn.chunk_gated_delta_rule(
    *packed(sequences), cu_seqlens=offsets(whole_lengths), output_final_state=True, **options
)
assert states is not None
last = offsets(whole_lengths)[1:] - 1
print(f"last token: off by {(out[0] - whole[0, last.long()]).abs().max().item():.1e} at most")
print(f"states: off by {(pool[slots.long()] - states).abs().max().item():.1e} at most, of {states.abs().max().item():.1f}")
