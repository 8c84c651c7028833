"""Caches: shapes and layouts that the operators take, bytes per token and per sequence, and copies of all layers."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.layers import GDNStateCache, HybridCaches, IndexerCache, KVCache
from tests.layers.small import small_config

LAYERS = ("linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention")
CONFIG = small_config(num_hidden_layers=5, layer_types=LAYERS, index_kv_heads=2)


def test_states() -> None:
    cache = GDNStateCache(CONFIG, 6, num_spec=2, dtype=torch.bfloat16)
    conv, ssm = cache.conv_states, cache.ssm_states
    assert len(conv) == len(ssm) == 3
    assert (conv[0].shape, conv[0].dtype, conv[0].stride(1)) == ((6, 32, 5), torch.bfloat16, 1)  # channels are adjacent
    assert (ssm[0].shape, ssm[0].dtype) == ((6, 2, 8, 8), torch.float32)
    assert cache.bytes_per_slot == 3 * (32 * 5 * 2 + 2 * 8 * 8 * 4)
    assert cache.bytes_per_sequence == 3 * cache.bytes_per_slot
    assert cache.nbytes == 6 * cache.bytes_per_slot
    with pytest.raises(TypeError, match="state_dtype: expected torch.float32 or torch.bfloat16, got torch.float16"):
        GDNStateCache(CONFIG, 6, state_dtype=torch.float16)


def test_keys_and_values() -> None:
    cache = KVCache(CONFIG, 5, 16)
    assert [tensor.shape for layer in cache.kv for tensor in layer] == [(5, 16, 1, 16)] * 4
    assert cache.bytes_per_token == 2 * 2 * 16 * 2 and cache.nbytes == 5 * 16 * cache.bytes_per_token
    for keys, values in cache.kv:  # compilers copy arguments that share memory, and one operator writes both
        assert keys.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...], torch.dtype, float]] = {
    "bf16": ({}, {}, (5, 16, 2, 16), torch.bfloat16, 64.0),
    "FP8 with scales": ({}, {"use_fp8": True}, (5, 16, 2, 20), torch.uint8, 40.0),
    "compressed": ({"index_ratio": 4}, {}, (5, 4, 2, 16), torch.bfloat16, 16.0),
    "compressed, e4m3": ({"index_ratio": 4}, {"use_fp8": True}, (5, 4, 2, 16), torch.float8_e4m3fn, 8.0),
}


@pytest.mark.parametrize("form", FORMS)
def test_indexer_keys(form: str) -> None:
    changes, options, shape, dtype, token_bytes = FORMS[form]
    config = small_config(num_hidden_layers=5, layer_types=LAYERS, index_kv_heads=2, **changes)
    cache = IndexerCache(config, 5, 16, 3, num_spec=1, **options)
    assert [(layer.shape, layer.dtype) for layer in cache.keys] == [(shape, dtype)] * 2
    assert cache.bytes_per_token == 2 * token_bytes
    if changes:
        assert [ring.shape for ring in cache.rings] == [(3, 8, 2, 16)] * 2  # 4 + 1 draft, rounded up to groups of 4
        assert cache.bytes_per_sequence == 2 * 8 * 2 * 16 * 2
    else:
        assert cache.rings == (None, None) and cache.bytes_per_sequence == 0
    key = torch.randn(3, 2, 16, dtype=torch.bfloat16)
    gdn.write_indexer_cache(key, cache.keys[1], torch.tensor([0, 1, -1]))  # the operators take the pages
    assert cache.keys[1].view(torch.uint8).any() and not cache.keys[0].view(torch.uint8).any()


def test_the_ring_has_room_for_a_group_and_the_drafts() -> None:
    for num_spec, size in ((0, 4), (1, 8), (4, 8), (5, 12)):
        cache = IndexerCache(small_config(index_ratio=4), 1, 16, 1, num_spec=num_spec)
        assert cache.rings[0].shape[1] == size


def test_the_switch_chooses_fp8(switch: Any) -> None:
    assert IndexerCache(CONFIG, 1, 16, 1).keys[0].dtype == torch.bfloat16
    switch(VLLM_QSA_USE_FP8_INDEXER="1")
    assert IndexerCache(CONFIG, 1, 16, 1).keys[0].dtype == torch.uint8


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("ratio", [1, 4])
def test_copies_are_of_all_layers_and_nothing_else(use_fp8: bool, ratio: int) -> None:
    config = small_config(num_hidden_layers=5, layer_types=LAYERS, index_ratio=ratio)
    caches = HybridCaches(config, 4, 16, 2, num_spec=1, use_fp8_indexer=use_fp8)
    buffers = [caches.gdn._conv, caches.gdn._ssm, caches.kv._keys, caches.kv._values, caches.indexer._pages]
    for place, buffer in enumerate(buffers):
        buffer.view(torch.uint8).random_(generator=torch.Generator().manual_seed(place))
    before = {buffer: buffer.view(torch.uint8).clone() for buffer in buffers}
    caches.gdn.copy_slot(3, 0)
    caches.copy_block(3, 0)
    for buffer in buffers:
        now, was = buffer.view(torch.uint8), before[buffer]
        assert torch.equal(now[:, 0], was[:, 3])
        assert torch.equal(now[:, 1:], was[:, 1:])


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)), "deepcopy": copy.deepcopy, "torch.save": saved_and_loaded,
}  # fmt: skip


def views(caches: HybridCaches) -> list[torch.Tensor]:
    """What the layers get."""
    rings = [ring for ring in caches.indexer.rings if ring is not None]
    pairs = [tensor for layer in caches.kv.kv for tensor in layer]
    return [*caches.gdn.conv_states, *caches.gdn.ssm_states, *pairs, *caches.indexer.keys, *rings]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_has_its_own_memory_in_the_same_layout(way: str, form: str) -> None:
    """A slot or block that is copied in the copy is seen by its layers, and by no other's."""
    changes, options, *_ = FORMS[form]
    config = small_config(num_hidden_layers=5, layer_types=LAYERS, **changes)
    caches = HybridCaches(config, 4, 16, 2, num_spec=1, use_fp8_indexer=options.get("use_fp8", False))
    for place, view in enumerate(views(caches)):
        view.copy_(torch.randint(0, 99, view.shape, generator=torch.Generator().manual_seed(place)).to(view.dtype))
    before = [view.clone() for view in views(caches)]
    made = COPIES[way](caches)
    assert [(one.shape, one.stride(), one.dtype) for one in views(made)] == [
        (one.shape, one.stride(), one.dtype) for one in views(caches)
    ]
    assert all(torch.equal(new.float(), old.float()) for new, old in zip(views(made), before, strict=True))
    made.copy_block(3, 0)
    made.gdn.copy_slot(3, 0)
    made.indexer.copy_ring(1, 0)
    for new, old in zip(views(made), before, strict=True):
        assert torch.equal(new[0].float(), old[1 if len(old) == 2 else 3].float())
    assert all(torch.equal(now.float(), old.float()) for now, old in zip(views(caches), before, strict=True))


@pytest.mark.parametrize("way", ["made", *COPIES])
@pytest.mark.parametrize("form", FORMS)
def test_caches_of_inference_mode_are_written_outside_of_it_too(form: str, way: str) -> None:
    changes, options, *_ = FORMS[form]
    config = small_config(num_hidden_layers=5, layer_types=LAYERS, **changes)
    with torch.inference_mode():
        caches = HybridCaches(config, 4, 16, 2, num_spec=1, use_fp8_indexer=options.get("use_fp8", False), replay=True)
        caches.gdn.copy_slot(1, 0)
        caches = COPIES[way](caches) if way in COPIES else caches
    for view in (*views(caches), *caches.gdn.rings):
        assert not view.is_inference()
        view.zero_()
    caches.copy_block(3, 0)
    caches.gdn.copy_slot(1, 0)
    caches.indexer.copy_ring(1, 0)


def test_a_shallow_copy_is_the_same_memory() -> None:
    cache = GDNStateCache(CONFIG, 4)
    other = copy.copy(cache)
    other.ssm_states[0][2] = 1.0
    cache.copy_slot(2, 3)
    assert other.ssm_states[0][3].unique().tolist() == [1.0]


def test_all_caches_report_their_bytes() -> None:
    caches = HybridCaches(small_config(index_ratio=4), 4, 16, 2, num_checkpoints=1, num_spec=1, null_slot=0)
    assert caches.gdn.num_slots == 1 + 2 * 2 + 1
    assert caches.bytes_per_token == 2 * 16 * 2 + 16 * 2 / 4
    assert caches.bytes_per_sequence == 2 * caches.gdn.bytes_per_slot + 8 * 16 * 2
    total = 4 * 16 * caches.bytes_per_token + 6 * caches.gdn.bytes_per_slot + 2 * 8 * 16 * 2
    assert caches.nbytes == total


BAD: dict[str, tuple[Any, str]] = {
    "ratio": (
        lambda: HybridCaches(small_config(index_ratio=4), 4, 20, 2),
        "block_size: expected a multiple of 4 . index_ratio = 16",
    ),
    "a block that no operator writes": (lambda: KVCache(CONFIG, 4, 17), "block_size: expected a multiple of 4, got 17"),
    "blocks in words": (lambda: HybridCaches(CONFIG, "4", 16, 2), "num_blocks: expected an int, got str"),
    "half a block": (lambda: KVCache(CONFIG, 1.5, 16), "num_blocks: expected an int, got float"),
    "blocks": (lambda: KVCache(CONFIG, -1, 16), "num_blocks: expected at least 0, got -1"),
    "drafts": (lambda: HybridCaches(CONFIG, 4, 16, 2, num_spec=-1), "num_spec: expected at least 0, got -1"),
    "null slot": (lambda: GDNStateCache(CONFIG, 4, null_slot=-2), "null_slot: expected at least -1, got -2"),
    "unknown": (lambda: HybridCaches(CONFIG, 4, 16, 2, kind=1), "unexpected keyword argument 'kind'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make()
