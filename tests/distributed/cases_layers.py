"""Cases of the layers. Every rank computes the whole by itself too, from the same seed, and compares."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gdn.layers import AttentionMetadataBuilder, GatedDeltaNet, GDNMetadataBuilder, HybridConfig, HybridModel, SparseAttention
from gdn.layers.loading import load
from gdn.layers.random_weights import RandomTensors
from gdn.runtime import env
from tests.distributed.cases_operators import raises
from tests.layers.serving import Server
from tests.layers.small import small_config

SLOTS = 9


@contextmanager
def dealing(threshold: int) -> Iterator[None]:
    """Context parallel attention of sequences longer than this."""
    names = {"VLLM_QSA_PREFILL_USE_CP": "1", "VLLM_DSA_USE_CONTEXT_PARALLEL_THRESHOLD": str(threshold)}
    os.environ.update(names)
    env.reload()
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
        env.reload()


def same(found: Tensor, wanted: Tensor) -> None:
    """Within 1e-5 of the largest value."""
    assert found.shape == wanted.shape and wanted.numel()
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max()), float((found - wanted).abs().max())


def filled(layer: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.copy_(
            torch.randn(parameter.shape, generator=generator) * (parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3)
        )
    return layer


def delta_net(group: Any) -> None:
    """A ragged prefill, then the next chunks of its prompts with a decode row and a new prompt; stale pools on every rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    config = small_config(linear_num_key_heads=2, linear_num_value_heads=4)
    alone, layer = (filled(GatedDeltaNet(config, cp_group=one, dtype=torch.float32), 1) for one in (None, group))
    generator = torch.Generator().manual_seed(2)
    pools = [torch.randn(SLOTS, alone.conv_dim, 3, generator=generator), torch.randn(SLOTS, 4, 8, 8, generator=generator)]
    own = [pool.clone() for pool in pools]
    builders = [GDNMetadataBuilder("cpu", cp_rank=one, cp_size=count) for one, count in ((0, 1), (rank, size))]
    steps = [([3, 200, 0, 70], [3, 200, 5, 70]), ([1, 150, 90], [4, 350, 160]), ([1, 9], [351, 9]), ([2, 1], [2, 1])]
    slots = [[4, 2, 8, 6], [4, 2, 6], [2, 4], [1, 0]]
    for (queries, lengths), places in zip(steps, slots, strict=True):
        whole, parted = (builder.build(queries, lengths, places) for builder in builders)
        hidden = torch.randn(sum(queries), layer.hidden_size, generator=generator)
        wanted = alone(hidden, whole, *pools)
        rows = parted.parts.take(torch.arange(sum(queries)), rank)
        found = layer(hidden[rows], parted, *own)
        assert found.shape == wanted[rows].shape
        torch.testing.assert_close(found, wanted[rows], rtol=1e-5, atol=1e-5)
        for one, other in zip(own, pools, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    checked = builders[1].build([130], [130], [2], checkpoint_offsets=[[64]], checkpoint_slots=[[6]])
    assert checked.parts is None and builders[1].build([1, 1], [5, 6], [1, 2]).parts is None
    foreign = GDNMetadataBuilder("cpu", cp_rank=0, cp_size=size + 1).build([200], [200], [1])
    wrong = f"metadata: expected rows parted over {size} ranks (cp_group's), got over {size + 1}"
    raises(ValueError, wrong, layer, hidden, foreign, *own)
    raises(TypeError, "cp_group: expected a torch.distributed.ProcessGroup, got int", GatedDeltaNet, config, cp_group=3)


def attention(group: Any, use_fp8: bool = False, **fields: Any) -> None:
    """A long prompt between short ones, then its next chunk with a decode row: some sequences are longer than the threshold."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    config = small_config(**{"num_attention_heads": 4, "num_key_value_heads": 2, **fields})
    ratio, block = config.index_ratio, 16
    options: dict[str, Any] = {"use_fp8_indexer": use_fp8, "dtype": torch.float32}
    alone, layer = (filled(SparseAttention(config, cp_group=one, **options), 1) for one in (None, group))
    generator = torch.Generator().manual_seed(3)

    def stale() -> dict[str, Any]:
        draw = torch.Generator().manual_seed(4)
        kv = torch.randn(2, 40, block, 2, config.head_dim, generator=draw)
        keys = torch.randn(40, block // ratio, config.index_kv_heads, config.index_head_dim, generator=draw)
        ring = torch.randn(5, 4, config.index_kv_heads, config.index_head_dim, generator=draw) if ratio > 1 else None
        if use_fp8:  # a scale after the values; compressed keys have none
            shape = (*keys.shape[:-1], config.index_head_dim + (4 if ratio == 1 else 0))
            keys = torch.zeros(shape, dtype=torch.uint8).view(torch.uint8 if ratio == 1 else torch.float8_e4m3fn)
        return {"kv_cache": (kv[0], kv[1]), "indexer_cache": keys if config.index_topk else None, "indexer_ring": ring}

    caches, own = stale(), stale()
    tables = torch.randperm(40, generator=generator).view(4, 10)
    options = {"block_size": block, "max_seq_len": 160, "index_ratio": ratio}
    builders = [AttentionMetadataBuilder("cpu", cp_rank=r, cp_size=s, **options) for r, s in ((0, 1), (rank, size))]
    steps = [([70, 20, 90, 0], [70, 20, 90, 0]), ([33, 1, 40, 12], [103, 21, 130, 12])]
    for queries, lengths in steps:
        positions = torch.cat([torch.arange(last - new, last) for new, last in zip(queries, lengths, strict=True)])
        hidden = torch.randn(sum(queries), config.hidden_size, generator=generator)
        with dealing(60):
            whole, dealt = (builder.build(queries, lengths, tables, [1, 2, 3, 4]) for builder in builders)
            wanted = alone(hidden, positions, whole, **caches)
            found = layer(hidden, positions, dealt, **own)
        same(found, wanted)
        assert whole.dealt is None and len(dealt.dealt.counts) == size and sum(dealt.dealt.counts) == sum(queries)
        longest, shortest = max(dealt.dealt.counts), min(dealt.dealt.counts)
        assert longest - shortest <= 2 * 20, "ranks of unequal work"
        for one, other in zip([*own["kv_cache"], own["indexer_cache"], own["indexer_ring"]],
                              [*caches["kv_cache"], caches["indexer_cache"], caches["indexer_ring"]], strict=True):  # fmt: skip
            if other is not None and other.element_size() == 1:
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            elif other is not None:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert builders[1].build(*steps[0], tables, [1, 2, 3, 4]).dealt is None, "without the switch"
    with dealing(90):
        assert builders[1].build(*steps[0], tables, [1, 2, 3, 4]).dealt is None, "nothing is longer"
        foreign = AttentionMetadataBuilder("cpu", cp_size=size + 1, **options).build([70], [95], tables[:1], [1])
    assert AttentionMetadataBuilder("cpu", cp_size=size, deal_longer_than=90, **options).build([70], [95], tables[:1], [1]).dealt
    wrong = f"metadata: expected rows dealt over {size} ranks"
    raises(ValueError, wrong, layer, hidden[:70], positions[:70], foreign, **own)


def model(group: Any, threshold: int, **fields: Any) -> None:
    """Prefill in chunks, decode rows among them, drafts, decode: logits, on every rank, of packed steps."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    config = HybridConfig(**_MODEL | fields)
    models = [HybridModel(config, cp_group=one, dtype=torch.float32) for one in (None, group)]
    for one in models:
        load(one, RandomTensors(config, 5), config)
    servers = [
        Server(one, config, 4, 192, num_spec=2, is_packaged=True, cp=cp)
        for one, cp in zip(models, ((0, 1), (rank, size)), strict=True)
    ]
    steps: list[tuple[list[int], dict[str, Any]]] = [
        ([100, 5, 1, 0], {}), ([80, 1, 1, 0], {}), ([1, 1, 1, 0], {}),
        ([3, 2, 1, 0], {"drafted": [True] * 4, "keep": [2, 1, 1, 0]}),
        ([1, 3, 2, 70], {"drafted": [True, True, True, False], "keep": [1, 2, 2, 70]}),
        ([1, 1, 1, 20], {"drafted": [True] * 3 + [False], "keep": [1, 1, 1, 20]}),
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(6)
    with dealing(threshold):
        for lengths, more in steps:
            rows = [torch.randint(61, (length,), generator=generator).tolist() for length in lengths]
            wanted, found = (torch.cat(server.step(rows, **more)) for server in servers)
            same(found, wanted)
            everywhere = [torch.empty_like(found) for _ in range(size)]
            dist.all_gather(everywhere, found.contiguous(), group=group)
            assert all(torch.equal(one, found) for one in everywhere), "the same bits on every rank"


_LAYERS = ("linear_attention", "full_attention", "linear_attention")
_MODEL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 3, "layer_types": _LAYERS, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 512,
}  # fmt: skip
_INDEXER = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 24}

CASES: dict[str, Callable[[Any], None]] = {
    "Gated DeltaNet": delta_net,
    "attention, an indexer": attention,
    "attention, a compressed indexer": partial(attention, index_ratio=4),
    "attention, an FP8 indexer": partial(attention, use_fp8=True),
    "attention, a compressed FP8 indexer": partial(attention, use_fp8=True, index_ratio=4),
    "attention, dense": partial(attention, index_topk=0),
    "model, experts": partial(model, threshold=40, **_INDEXER, **_EXPERTS),
    "model, streams and a compressed indexer": partial(
        model, threshold=40, **_INDEXER, residual="hyper", hc_count=2, hc_lowrank=4, index_ratio=4
    ),
    "model, attention whole": partial(model, threshold=1000, **_INDEXER, layer_scale=True),
}
