"""Steps in which nothing happens: no sequence, no new token, padding alone; and models that they are given to."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gdn.layers import (
    AttentionMetadataBuilder,
    GDNMetadataBuilder,
    HybridCaches,
    HybridConfig,
    HybridModel,
    Indexer,
    SparseAttention,
    StepMetadata,
)
from gdn.layers.random_weights import fill_randomly
from gdn.testing.compare import same_bits
from tests.layers.small import small_config

BLOCK_SIZE, NUM_SPEC = 16, 1

_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
VARIANTS: dict[str, dict[str, Any]] = {
    "token-wise keys": {},
    "compressed keys": dict(index_ratio=4),
    "no indexer": dict(index_topk=0),
    "no indexer, no gate": dict(index_topk=0, attn_output_gate=False),
    "experts": _EXPERTS,
    "hyper": dict(residual="hyper", hc_count=2, hc_lowrank=8),
}
# Variant, whether its indexer is in FP8, whether caches have a block and a slot.
CASES = [(variant, False, has_pages) for variant in VARIANTS for has_pages in (True, False)]
CASES += [("token-wise keys", True, True), ("compressed keys", True, True)]


@dataclass(frozen=True)
class Step:
    rows: int  # all of them padding
    metadata: Any


def _built(config: HybridConfig, device: torch.device | str, drafts: list[int] | None, *rows: Any, **padding: int) -> Any:
    """Metadata of the package's builders. rows: query lengths, lengths, state slots, blocks, sequence slots."""
    queries, lengths, states, blocks, slots = rows
    options: dict[str, Any] = {"num_draft_tokens": drafts, "num_accepted_tokens": None if drafts is None else [1] * len(drafts)}
    pad_to = {name: padding[name] for name in ("pad_to",) if name in padding}
    of_states = GDNMetadataBuilder(device, num_spec=NUM_SPEC, max_num_sequences=4)
    of_attention = AttentionMetadataBuilder(
        device, block_size=BLOCK_SIZE, max_seq_len=64, index_ratio=config.index_ratio, max_num_sequences=4, max_query_len=2
    )
    return StepMetadata(
        of_states.build(queries, lengths, states, **options, **pad_to),
        of_attention.build(queries, lengths, blocks, slots, **padding),
    )


def _stated(device: torch.device | str, lengths: list[int], rows: int, **fields: Any) -> Any:
    """Metadata of an engine of its own: sequences without new tokens, and rows of padding."""

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    count = len(lengths)
    attention = SimpleNamespace(
        query_start_loc=ints([0] * (count + 1)), seq_lens=ints(lengths), block_tables=ints([[0, 0]] * count).reshape(count, 2),
        slot_mapping=ints([-1] * rows, torch.int64), sequence_slots=ints([0] * count), num_actual_tokens=0, **fields,
    )  # fmt: skip
    return StepMetadata(GDNMetadataBuilder(device).build([], [], []), attention)  # type: ignore[arg-type]


def steps(config: HybridConfig, device: torch.device | str) -> dict[str, Step]:
    """Steps by name."""
    nobody: tuple[Any, ...] = ([], [], [], [], [])
    idle: tuple[Any, ...] = ([0, 0], [5, 0], [[0, 1], [2, 3]], [[1], []], [0, 1])
    host: dict[str, Any] = {"max_query_len": 0, "max_seq_len": 0, "seq_lens_host": (), "query_lens_host": ()}
    on_device: dict[str, Any] = {"max_query_len": 1, "max_seq_len": 32, "seq_lens_host": None, "query_lens_host": None}
    long: dict[str, Any] = {"max_query_len": 20, "max_seq_len": 20, "seq_lens_host": (5, 0), "query_lens_host": (0, 0)}
    return {
        "nobody": Step(0, _built(config, device, None, *nobody)),
        "no new token": Step(0, _built(config, device, None, *idle)),
        "no draft": Step(0, _built(config, device, [0, 1], *idle)),
        "captured, nobody": Step(3, _built(config, device, None, *nobody, pad_to=3, pad_query_len=1)),
        "captured, no row": Step(0, _built(config, device, None, *nobody, pad_to=0, pad_query_len=1)),
        "captured, no draft": Step(6, _built(config, device, [0, 1], *idle, pad_to=3, pad_query_len=2)),
        "padding of nobody": Step(2, _stated(device, [], 2, **host)),
        "padding of nobody, lengths on the device": Step(2, _stated(device, [], 2, **on_device)),
        "padding of a prompt's step": Step(2, _stated(device, [5, 0], 2, **long)),
    }


def tensors(caches: HybridCaches) -> Iterator[Tensor]:
    """Everything that layers may write."""
    yield from (*caches.gdn.conv_states, *caches.gdn.ssm_states)
    yield from (x for pair in caches.kv.kv for x in pair)
    yield from (x for x in (*caches.indexer.keys, *caches.indexer.rings) if x is not None)


def stale(caches: HybridCaches) -> HybridCaches:
    """The caches, full of what earlier sequences left."""
    for n, x in enumerate(tensors(caches)):
        source = torch.Generator().manual_seed(n)
        if x.dtype == torch.uint8:
            x.copy_(torch.randint(0, 120, x.shape, generator=source, dtype=torch.uint8))
        else:
            x.copy_(torch.randn(x.shape, generator=source).to(x.dtype))
    return caches


class Idle:
    """A model, and caches of which nothing may change."""

    def __init__(self, variant: str, device: torch.device | str, dtype: torch.dtype, *, use_fp8: bool, **sizes: Any) -> None:
        self.config = small_config(**{"intermediate_size": 16, **sizes, **VARIANTS[variant]})
        self.device, self.dtype, self.use_fp8 = device, dtype, use_fp8
        self.model = HybridModel(self.config, device=device, dtype=dtype)
        for layer in self.model.modules():
            if isinstance(layer, Indexer):
                layer.use_fp8 = use_fp8
        fill_randomly(self.model)

    def caches(self, *, has_pages: bool) -> HybridCaches:
        """New caches; without pages they have no block and no slot."""
        return stale(
            HybridCaches(
                self.config,
                4 if has_pages else 0,
                BLOCK_SIZE,
                2 if has_pages else 0,
                num_spec=NUM_SPEC,
                use_fp8_indexer=self.use_fp8,
                dtype=self.dtype,
                device=self.device,
            )  # fmt: skip
        )

    def check(self, step: Step, caches: HybridCaches) -> None:
        """Runs the model and each of its layers: shapes, zeros in padding, not a bit of the caches."""
        before = [x.clone() for x in tensors(caches)]
        hidden, rows = self.config.hidden_size, step.rows
        ids = torch.zeros(rows, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            output = self.model(ids, ids, step.metadata, caches)
            logits = self.model.compute_logits(output)
            assert output.shape == (rows, hidden) and output.dtype == self.dtype
            assert logits.shape == (rows, self.config.vocab_size) and self.model.greedy_tokens(logits).shape == (rows,)
            for layer in self.model.layers:
                streams = self.model.hyper_connection_mixer.split(output) if self.config.residual == "hyper" else output
                found, residual = layer(streams, None, ids, step.metadata, caches)
                assert found.shape == streams.shape and (residual is None or residual.shape == streams.shape)
                assert layer.mlp(output).shape == (rows, hidden)
                mixed = layer._mix(torch.full_like(output, torch.nan), ids, step.metadata, caches)
                assert mixed.shape == (rows, hidden) and not mixed.any(), "rows of padding are not zero"
            attention = self.model.layers[1].self_attn
            assert isinstance(attention, SparseAttention)
            if attention.indexer is not None:
                cache, ring = caches.indexer.keys[0], caches.indexer.rings[0]
                selected = attention.indexer(output, ids, step.metadata.attention, cache, ring)
                assert selected is None or selected.shape == (rows, attention.indexer.num_selected)
        assert all(same_bits(one, other) for one, other in zip(tensors(caches), before, strict=True)), "a cache was written"
