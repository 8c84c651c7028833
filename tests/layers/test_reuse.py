"""Kept prefixes and forks with the operators: convolution and delta rule of one layer, against one pass."""

from typing import Any

import pytest
import torch

import gdn
from gdn.layers import CacheAllocator, CachedSequence, GDNMetadata, GDNMetadataBuilder, HybridCaches
from tests.layers.small import small_config

CONFIG = small_config()
GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(CONFIG.conv_dim, CONFIG.linear_conv_kernel_dim, generator=GENERATOR)
A_LOG, DT_BIAS = torch.randn(2, CONFIG.linear_num_value_heads, generator=GENERATOR)
INPUTS = torch.randn(200, CONFIG.conv_dim + 2 * CONFIG.linear_num_value_heads, generator=GENERATOR)  # of token ids
PROMPT = list(range(170))
NUM_SPEC = 1


class Layer:
    """Steps of one layer on the caches, with metadata by the builder."""

    def __init__(self) -> None:
        self.caches = HybridCaches(CONFIG, 16, 48, 3, num_checkpoints=2, num_spec=NUM_SPEC, dtype=torch.float32)
        for buffer in (self.caches.gdn._conv, self.caches.gdn._ssm):
            buffer.normal_(generator=GENERATOR)  # left by earlier owners
        self.allocator = CacheAllocator(self.caches)
        self.builder = GDNMetadataBuilder("cpu", num_spec=NUM_SPEC)

    def metadata(self, sequence: CachedSequence, first: int, count: int, **options: Any) -> GDNMetadata:
        return self.builder.build([count], [first + count], [sequence.state_slots], **options)

    def prefill(self, metadata: GDNMetadata, tokens: list[int]) -> torch.Tensor:
        mixed_qkv, gates = self.inputs(tokens)
        shared = {
            "has_initial_state": metadata.has_initial_state,
            "checkpoint_offsets": metadata.checkpoint_offsets,
            "checkpoint_slots": metadata.checkpoint_slots,
        }
        starts, slots = metadata.non_spec_query_start_loc, metadata.non_spec_state_indices_tensor
        states = self.caches.gdn
        mixed_qkv = gdn.causal_conv1d_fn(
            mixed_qkv, WEIGHT, conv_states=states.conv_states[0], query_start_loc=starts, cache_indices=slots, **shared
        )
        o, _ = gdn.chunk_gated_delta_rule(
            *heads(mixed_qkv), **gates, **shared, initial_state=states.ssm_states[0], cu_seqlens=starts, state_indices=slots
        )
        return o[0]

    def verify(self, metadata: GDNMetadata, tokens: list[int]) -> torch.Tensor:
        mixed_qkv, gates = self.inputs(tokens)
        slots, starts = metadata.spec_state_indices_tensor, metadata.spec_query_start_loc
        states, accepted = self.caches.gdn, {"num_accepted_tokens": metadata.num_accepted_tokens}
        mixed_qkv = gdn.causal_conv1d_update(
            mixed_qkv, states.conv_states[0], WEIGHT, conv_state_indices=slots, query_start_loc=starts, **accepted
        )
        o, _ = gdn.fused_recurrent_gated_delta_rule(
            *heads(mixed_qkv), **gates, **accepted, initial_state=states.ssm_states[0], cu_seqlens=starts, ssm_state_indices=slots
        )
        return o[0]

    @staticmethod
    def inputs(tokens: list[int]) -> tuple[torch.Tensor, dict[str, Any]]:
        mixed_qkv, a, b = INPUTS[tokens].split([CONFIG.conv_dim, *[CONFIG.linear_num_value_heads] * 2], dim=-1)
        gates = {"g": a[None], "beta": b[None], "A_log": A_LOG, "dt_bias": DT_BIAS}
        flags = ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel", "state_v_first")
        return mixed_qkv.contiguous(), gates | dict.fromkeys(flags, True)


def heads(mixed_qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    keys, values = CONFIG.linear_num_key_heads, CONFIG.linear_num_value_heads
    widths = [keys * CONFIG.linear_key_head_dim] * 2 + [values * CONFIG.linear_value_head_dim]
    counts = (keys, keys, values)
    return tuple(part.unflatten(-1, (count, -1)) for part, count in zip(mixed_qkv[None].split(widths, -1), counts, strict=True))


def one_pass(tokens: list[int]) -> torch.Tensor:
    layer = Layer()
    return layer.prefill(layer.metadata(layer.allocator.add(len(tokens)), 0, len(tokens)), tokens)


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("prefix", [64, 128])
def test_a_prompt_continues_from_a_kept_prefix(prefix: int) -> None:
    layer = Layer()
    first = layer.allocator.add_prompt(PROMPT)
    checkpoint = layer.allocator.checkpoint(first, prefix)
    kept = {"checkpoint_offsets": [[prefix]], "checkpoint_slots": [[checkpoint.slot]]}
    assert_same(layer.prefill(layer.metadata(first, 0, len(PROMPT), **kept), PROMPT), one_pass(PROMPT))
    layer.allocator.keep(checkpoint, PROMPT[:prefix])
    layer.allocator.free(first)

    other = PROMPT[: prefix + 3] + [190, 191, 192]
    second = layer.allocator.add_prompt(other)
    assert second.num_cached_tokens == prefix
    rest = layer.prefill(layer.metadata(second, prefix, len(other) - prefix), other[prefix:])
    assert_same(rest, one_pass(other)[prefix:])


@pytest.mark.parametrize("accepted", [1, 2])
def test_a_fork_continues_where_the_other_is(accepted: int) -> None:
    """The fork follows a speculative step, whichever of its states is the current one."""
    layer = Layer()
    sequence = layer.allocator.add(70)
    layer.prefill(layer.metadata(sequence, 0, 70), PROMPT[:70])
    layer.allocator.extend(sequence, 2)
    layer.verify(layer.metadata(sequence, 70, 2, num_draft_tokens=[1]), PROMPT[70:72])
    length = 70 + accepted
    layer.allocator.truncate(sequence, length)
    fork = layer.allocator.fork(sequence)
    for one, new in ((fork, [180, 181]), (sequence, [190, 191])):
        layer.allocator.extend(one, 2)
        state = {"num_draft_tokens": [1], "num_accepted_tokens": [accepted]}
        assert_same(layer.verify(layer.metadata(one, length, 2, **state), new), one_pass(PROMPT[:length] + new)[length:])
