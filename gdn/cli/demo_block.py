"""One Qwen3-Next-shaped block composed of public operators: a GDN layer, and the indexer of a QSA layer.

`Block` owns random weights and the serving-style caches (conv pool, state pool, indexer pages); `prefill` and `decode`
yield one `Call` per operator, in the order a model runs them. A Call names the arguments and, once run, holds the result,
so that the caller decides what to time and what to compare.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import gdn
from gdn.models import ModelShape

# The operators of each phase, in order.
PREFILL = (
    "fused_qkvzba_split_reshape_cat", "causal_conv1d_fn", "chunk_gated_delta_rule", "rms_norm_gated", "prepare_indexer",
    "gather_indexer_cache", "mqa_logits", "topk_indices",
)  # fmt: skip
DECODE = (
    "fused_qkvzba_split_reshape_cat", "causal_conv1d_update", "fused_recurrent_gated_delta_rule", "rms_norm_gated",
    "prepare_indexer", "paged_mqa_logits", "topk_indices",
)  # fmt: skip
NULL_SLOT = 0  # the serving engines' convention: slot and page 0 are never used
PAGE_SIZE = 64


@dataclass
class Call:
    """One operator call: `operator(**arguments)`; `mutated` names the arguments that it updates in place."""

    phase: str
    operator: str
    arguments: dict[str, Any]
    mutated: tuple[str, ...] = ()
    floor_bytes: int = 0  # fewest bytes through device memory
    floor_flops: int = 0  # arithmetic on tensor cores, at the rate of `flops_dtype`
    flops_dtype: str = "bfloat16"
    limit: float = 1e-2  # largest accepted error
    result: Any = field(default=None, repr=False)

    def run(self) -> Any:
        self.result = getattr(gdn, self.operator)(**self.arguments)
        return self.result


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class Block:
    """Weights, pools and metadata of one block for a batch of sequences of the given prompt lengths (tokens)."""

    def __init__(
        self, model: ModelShape, lengths: list[int], decode_steps: int, *, fp8_indexer: bool, device: torch.device, seed: int = 0
    ) -> None:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        self.model, self.lengths, self.device, self.fp8 = model, lengths, device, fp8_indexer
        heads, value_heads, key_dim, value_dim = model.num_k_heads, model.num_v_heads, model.head_k_dim, model.head_v_dim
        hidden, index_dim = model.hidden_size, model.index_head_dim

        def normal(*shape: int, scale: float = 1.0, to: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(device=device, dtype=to)

        self._normal = normal
        # In FP8 prepare_indexer folds the scale of the scores into the weights.
        self._scale: dict[str, Any] = {} if fp8_indexer else {"scale": index_dim**-0.5}
        self.in_proj_qkvz = normal(2 * heads * key_dim + 2 * value_heads * value_dim, hidden, scale=hidden**-0.5)
        self.in_proj_ba = normal(2 * value_heads, hidden, scale=hidden**-0.5)
        index_width = (model.index_num_heads + 1) * index_dim + model.index_num_heads
        self.index_proj = normal(index_width, hidden, scale=hidden**-0.5)
        self.conv_weight = normal(model.conv_dim, model.conv_width, scale=0.5)
        self.A_log = torch.rand(value_heads, generator=generator).mul(15).add(1).log().to(device)
        self.dt_bias = normal(value_heads, scale=0.5, to=torch.float32) - 4.0  # decays near 1, as trained models have
        self.norm_weight = 1 + normal(value_dim, scale=0.1, to=torch.float32)
        self.q_norm, self.k_norm = (normal(index_dim, scale=0.1, to=torch.float32) for _ in range(2))

        count, longest = len(lengths), max(lengths) + decode_steps
        half = model.index_rotary_dim // 2
        angles = torch.arange(longest)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device=device, dtype=torch.float32)

        # Every sequence owns one state slot (shuffled, slot 0 unused) and as many indexer pages as it will need.
        self.slots = (torch.randperm(count, generator=generator) + 1).to(device=device, dtype=torch.int32)
        self.conv_states = normal(count + 1, model.conv_dim, model.conv_width - 1, scale=0.5)
        self.states = normal(count + 1, value_heads, value_dim, key_dim, scale=0.1, to=torch.float32)
        pages = [-(-(length + decode_steps) // PAGE_SIZE) for length in lengths]
        order = (torch.randperm(sum(pages), generator=generator) + 1).tolist()
        rows = [[order.pop() for _ in range(needed)] + [0] * (max(pages) - needed) for needed in pages]
        self.block_tables = torch.tensor(rows, dtype=torch.int32, device=device)
        shape = (sum(pages) + 1, PAGE_SIZE, 1, index_dim + 4 * fp8_indexer)
        self.cache = torch.zeros(shape, dtype=torch.uint8 if fp8_indexer else torch.bfloat16, device=device)
        self.context = torch.zeros(count, dtype=torch.int32)

    def _split(self, phase: str, hidden: torch.Tensor) -> Call:
        model = self.model
        qkvz, ba = hidden @ self.in_proj_qkvz.T, hidden @ self.in_proj_ba.T
        arguments = dict(
            mixed_qkvz=qkvz, mixed_ba=ba, num_heads_qk=model.num_k_heads, num_heads_v=model.num_v_heads,
            head_qk=model.head_k_dim, head_v=model.head_v_dim,
        )  # fmt: skip
        return Call(phase, "fused_qkvzba_split_reshape_cat", arguments, floor_bytes=2 * _bytes(qkvz, ba), limit=0.0)

    def _qkv_views(self, mixed_qkv: torch.Tensor) -> dict[str, torch.Tensor]:
        """q, k, v as strided views of the convolution's output, as one packed batch."""
        key_heads = (self.model.num_k_heads, self.model.head_k_dim)
        heads = (key_heads, key_heads, (self.model.num_v_heads, self.model.head_v_dim))
        parts = mixed_qkv.split([count * dim for count, dim in heads], dim=-1)
        return {name: part[None].unflatten(2, shape) for name, part, shape in zip("qkv", parts, heads, strict=True)}

    def _gate_arguments(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
        return dict(
            g=a[None], beta=b[None], use_gate_in_kernel=True, A_log=self.A_log, dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, state_v_first=True, null_slot=NULL_SLOT,
            initial_state=self.states,
        )  # fmt: skip

    def _norm(self, phase: str, o: torch.Tensor, z: torch.Tensor) -> Call:
        arguments = dict(x=o.reshape_as(z), z=z, weight=self.norm_weight)
        return Call(phase, "rms_norm_gated", arguments, floor_bytes=_bytes(o, z, o))

    def _prepare_indexer(self, phase: str, hidden: torch.Tensor, positions: torch.Tensor) -> Call:
        model = self.model
        heads, dim = model.index_num_heads, model.index_head_dim
        q, k, weights = (hidden @ self.index_proj.T).split([heads * dim, dim, heads], dim=-1)
        sequence = self._token_sequences.long()
        page = self.block_tables[sequence, positions // PAGE_SIZE].long()
        arguments = dict(
            q=q.view(-1, heads, dim), k=k, weights=weights, positions=positions, cos_sin=self.cos_sin, q_norm=self.q_norm,
            k_norm=self.k_norm, cache=self.cache, slot_mapping=page * PAGE_SIZE + positions % PAGE_SIZE,
            rotary_dim=model.index_rotary_dim, fp8=self.fp8,
        )  # fmt: skip
        floor, limit = 2 * _bytes(q, k, weights), 5e-2 if self.fp8 else 1e-2
        return Call(phase, "prepare_indexer", arguments, ("cache",), floor, limit=limit)

    def _topk(self, phase: str, logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> Call:
        arguments = dict(logits=logits, k=self.model.index_topk, row_starts=starts, row_ends=ends)
        written = 4 * logits.shape[0] * self.model.index_topk
        visible = int((ends - starts).clamp(min=0).sum())
        return Call(phase, "topk_indices", arguments, floor_bytes=visible * logits.element_size() + written, limit=0.0)

    def prefill(self) -> Iterator[Call]:
        """The prompts of all sequences as one ragged batch: every second one continues a cached state."""
        model, device = self.model, self.device
        phase, tokens, count = "prefill", sum(self.lengths), len(self.lengths)
        cu_seqlens = torch.tensor([0, *self.lengths]).cumsum(0).to(device=device, dtype=torch.int32)
        self._token_sequences = torch.arange(count).repeat_interleave(torch.tensor(self.lengths)).to(device)
        positions = torch.cat([torch.arange(length) for length in self.lengths]).to(device)
        has_initial_state = (torch.arange(count) % 2 == 1).to(device)
        hidden = self._normal(tokens, model.hidden_size)

        yield (split := self._split(phase, hidden))
        mixed_qkv, z, b, a = split.result
        conv = dict(
            x=mixed_qkv, weight=self.conv_weight, conv_states=self.conv_states, query_start_loc=cu_seqlens,
            cache_indices=self.slots, has_initial_state=has_initial_state, null_slot=NULL_SLOT,
        )  # fmt: skip
        yield (call := Call(phase, "causal_conv1d_fn", conv, ("conv_states",), floor_bytes=2 * _bytes(mixed_qkv)))
        views = self._qkv_views(call.result)
        chunk = views | self._gate_arguments(a, b) | dict(output_final_state=True, cu_seqlens=cu_seqlens)
        chunk |= dict(state_indices=self.slots, has_initial_state=has_initial_state)
        floor = _bytes(views["q"], views["k"], views["v"], views["v"], a, b) + 2 * count * _bytes(self.states[0])
        key_dim, value_dim = model.head_k_dim, model.head_v_dim
        flops = tokens * model.num_v_heads * (2 * 64 * (2 * key_dim + 2 * value_dim) + 6 * key_dim * value_dim)
        yield (call := Call(phase, "chunk_gated_delta_rule", chunk, ("initial_state",), floor, flops, limit=3e-2))
        yield self._norm(phase, call.result[0], z)

        yield (prepared := self._prepare_indexer(phase, hidden, positions))
        q, weights = prepared.result
        gather = dict(cache=self.cache, block_tables=self.block_tables, cu_seqlens=cu_seqlens)
        row_bytes = self.cache.shape[-1] * self.cache.element_size()
        yield (gathered := Call(phase, "gather_indexer_cache", gather, floor_bytes=2 * tokens * row_bytes, limit=0.0))
        k, k_scale = gathered.result
        starts = cu_seqlens[:-1][self._token_sequences].contiguous()
        ends = (starts + positions + 1).int()
        logits = self._scale | dict(q=q, k=k, weights=weights, cu_seqlen_ks=starts, cu_seqlen_ke=ends, k_scale=k_scale)
        floor, dtype = _bytes(q, k) + 4 * tokens * tokens, "float8_e4m3fn" if self.fp8 else "bfloat16"
        flops = 2 * int((positions + 1).sum()) * model.index_num_heads * model.index_head_dim
        yield (call := Call(phase, "mqa_logits", logits, (), floor, flops, dtype, limit=1e-5))
        yield self._topk(phase, call.result, starts, ends)
        self.context = torch.tensor(self.lengths, dtype=torch.int32)

    def decode(self) -> Iterator[Call]:
        """One token for every sequence, from and to the pools that prefill filled."""
        model, device = self.model, self.device
        phase, count = "decode", len(self.lengths)
        self._token_sequences = torch.arange(count, device=device)
        positions = self.context.long().to(device)
        self.context = self.context + 1
        context_lens = self.context.to(device)
        hidden = self._normal(count, model.hidden_size)

        yield (split := self._split(phase, hidden))
        mixed_qkv, z, b, a = split.result
        conv = dict(x=mixed_qkv, conv_state=self.conv_states, weight=self.conv_weight)
        conv |= dict(conv_state_indices=self.slots, null_slot=NULL_SLOT)
        floor = 2 * _bytes(mixed_qkv) + 2 * count * _bytes(self.conv_states[0])
        yield (call := Call(phase, "causal_conv1d_update", conv, ("conv_state",), floor_bytes=floor))
        cu_seqlens = torch.arange(count + 1, dtype=torch.int32, device=device)
        recurrent = self._qkv_views(call.result) | self._gate_arguments(a, b)
        recurrent |= dict(cu_seqlens=cu_seqlens, ssm_state_indices=self.slots)
        floor = _bytes(mixed_qkv, z, a, b) + 2 * count * _bytes(self.states[0])
        yield (call := Call(phase, "fused_recurrent_gated_delta_rule", recurrent, ("initial_state",), floor))
        yield self._norm(phase, call.result[0], z)

        yield (prepared := self._prepare_indexer(phase, hidden, positions))
        q, weights = prepared.result
        longest = int(self.context.max())
        logits = self._scale | dict(
            q=q[:, None], cache=self.cache, weights=weights, context_lens=context_lens, block_tables=self.block_tables,
            max_context_len=longest,
        )  # fmt: skip
        keys = int(self.context.sum())
        floor = keys * self.cache.shape[-1] * self.cache.element_size() + 4 * count * longest
        yield (call := Call(phase, "paged_mqa_logits", logits, floor_bytes=floor, limit=1e-5))
        yield self._topk(phase, call.result, torch.zeros_like(context_lens), context_lens)
