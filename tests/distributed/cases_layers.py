"""Cases of the layers. Every rank computes the whole by itself too, from the same seed, and compares."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
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
    """Checks that values differ by at most 1e-5 of the largest one."""
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


def delta_net_refuses(group: Any) -> None:
    """Rows or metadata that are another rank's, on all ranks and on one alone: all raise, and no pool is written."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    layer = filled(GatedDeltaNet(small_config(), cp_group=group, dtype=torch.float32), 1)
    pools = [torch.zeros(SLOTS, layer.conv_dim, 3), torch.zeros(SLOTS, layer.num_v_heads, 8, 8)]
    own = GDNMetadataBuilder("cpu", cp_rank=rank, cp_size=size).build([1, 64 * size], [9, 64 * size], [2, 1])
    first = GDNMetadataBuilder("cpu", cp_rank=0, cp_size=size).build([1, 64 * size], [9, 64 * size], [2, 1])
    hidden = torch.ones(1 + 64 * size, layer.hidden_size)
    is_last, least = rank == size - 1, "at least " if rank == size - 1 else ""
    wrong = "cp_group: expected ranks that all accept their arguments, got an error on rank "
    # The last rank takes the rows after its own for padding, so it learns of them from the others.
    text = (
        wrong + ", ".join(map(str, range(size - 1)))
        if is_last
        else f"hidden_states: expected 65 rows (this rank's), got {64 * size + 1}"
    )
    raises(ValueError, text, layer, hidden, own, *pools)
    raises(ValueError, f"hidden_states: expected {least}65 rows (this rank's), got 33", layer, hidden[:33], own, *pools)
    text = f"hidden_states: expected {least}65 rows (this rank's), got 64" if rank == 1 else wrong + "1"
    raises(ValueError, text, layer, hidden[: 64 if rank == 1 else 65], own, *pools)
    ranks = ", ".join(map(str, range(1, size)))
    text = (
        f"metadata: expected rows parted for rank {rank} (this one, of cp_group), got for rank 0" if rank else f"{wrong}{ranks}"
    )
    raises(ValueError, text, layer, hidden[:65], first, *pools)
    alone = GDNMetadataBuilder("cpu").build([1, 64 * size], [9, 64 * size], [2, 1])
    text = "cp_group: expected ranks whose calls have the same parted rows"
    raises(ValueError, text, layer, hidden[: 65 if rank else None], own if rank else alone, *pools)
    assert not any(pool.any() for pool in pools)
    layer(hidden[:65], own, *pools)
    assert all(pool.any() for pool in pools)


def attention_refuses(group: Any) -> None:
    """The same of dealt rows."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    config = small_config(index_topk=0)
    layer = filled(SparseAttention(config, cp_group=group, dtype=torch.float32), 1)
    kv = torch.zeros(2, 10, 16, config.num_key_value_heads, config.head_dim)

    def metadata(of_rank: int, ranks: int = size) -> Any:
        builder = AttentionMetadataBuilder(
            "cpu", block_size=16, max_seq_len=160, cp_rank=of_rank, cp_size=ranks, deal_longer_than=40
        )
        return builder.build([90], [90], [list(range(6))], [1])

    def call(rows: int, of: Any) -> Tensor:
        output: Tensor = layer(torch.ones(rows, config.hidden_size), torch.arange(rows), of, (kv[0], kv[1]))
        return output

    others, ranks = (
        "cp_group: expected ranks that all accept their arguments, got an error on rank ",
        ", ".join(map(str, range(1, size))),
    )
    text = f"metadata: expected rows dealt for rank {rank} (this one, of cp_group), got for rank 0" if rank else others + ranks
    raises(ValueError, text, call, 90, metadata(0))
    raises(ValueError, "hidden_states: expected 90 rows (those of all ranks), got 45", call, 45, metadata(rank))
    raises(
        ValueError,
        "hidden_states: expected 90 rows" if rank == 1 else others + "1",
        call,
        45 if rank == 1 else 90,
        metadata(rank),
    )
    text = "cp_group: expected ranks whose calls have the same dealt rows"
    raises(ValueError, text, call, 90, metadata(rank) if rank else metadata(0, 1))
    assert not kv.any()
    call(90, metadata(rank))
    assert kv.any()


def model_refuses(group: Any) -> None:
    """A model with the metadata of the first rank on all, and with too few rows."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    config = HybridConfig(**_MODEL | {"index_topk": 0})
    one = HybridModel(config, cp_group=group, dtype=torch.float32)
    load(one, RandomTensors(config, 5), config)
    server = Server(one, config, 4, 192, is_packaged=True, cp=(0, size))
    text = "metadata: expected rows parted for rank" if rank else "cp_group: expected ranks that all accept"
    raises(ValueError, text, server.step, [[1] * 100, [2] * 40, [], []])
    step = SimpleNamespace(gdn=GDNMetadataBuilder("cpu", cp_rank=rank, cp_size=size).build([100], [100], [1]))
    raises(ValueError, "input_ids: expected at least 100 rows", one, *[torch.zeros(99, dtype=torch.int64)] * 2, step, None)


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
    "Gated DeltaNet, refusals": delta_net_refuses,
    "attention, refusals": attention_refuses,
    "model, refusals": model_refuses,
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
