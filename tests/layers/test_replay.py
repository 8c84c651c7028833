"""Replay decode in the layers: the engine against itself without, what the caches and the allocator hold, and the metadata."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.cli.demo.engine import Engine
from gdn.layers import CacheAllocator, GDNMetadataBuilder, HybridCaches
from gdn.layers.caches import GDNStateCache
from gdn.runtime import env
from tests.cli.test_demo_engine import TOLERANCE, Recorder, make_engine, make_model, make_prompts, one_pass
from tests.layers.small import small_config


def life_of(engine: Engine, steps: int) -> list[list[int]]:
    """Greedy tokens of prompts, decode, drafts, a fork, a preempted stream, a kept prefix, and prompts next to live streams."""
    prompts = make_prompts((70, 5, 73))
    prompts[2][:70] = prompts[0]
    engine.prefill(prompts[:2], chunk=64)
    engine.decode(steps)
    for step in range(steps if engine.sizes.num_spec else 0):
        best = engine.streams[0].tokens[-1:] * (step % 3)  # sometimes what comes next
        engine.verify([best, engine.streams[1].tokens[-2:]])
    engine.fork(engine.streams[0])
    preempted = engine.streams[1]
    engine.finish(preempted)
    engine.prefill([preempted.tokens])  # computed again
    engine.prefill(prompts[2:])  # hits the prefix of 64 tokens
    engine.decode(2 * steps)
    found = [list(stream.tokens) for stream in engine.streams]
    engine.finish()
    return found


@pytest.mark.parametrize(
    ("num_spec", "steps", "lives"), [(2, 3, 1), *(pytest.param(num_spec, 12, 2, marks=pytest.mark.cover) for num_spec in (0, 2))]
)
def test_the_engine_generates_what_it_does_without(
    num_spec: int, steps: int, lives: int, switch: Callable[..., env.Switches]
) -> None:
    model, tokens = make_model("dense, experts"), []
    for value in ("0", "1"):
        switch(GDN_REPLAY=value)
        engine = make_engine(model, num_spec=num_spec, num_checkpoints=2)
        assert engine.caches.gdn.has_replay == (value == "1")
        assert engine.caches.gdn.slots_per_sequence == (1 if value == "1" else 1 + num_spec)
        tokens.append([life_of(engine, steps) for _ in range(lives)])  # the second on slots that were used
    assert tokens[0] == tokens[1]


def caches_of(**changes: Any) -> HybridCaches:
    options: dict[str, Any] = {"num_blocks": 8, "block_size": 64, "max_num_sequences": 3, "num_checkpoints": 2, "replay": True}
    return HybridCaches(small_config(), **{**options, **changes})


def test_sizes_of_the_caches() -> None:
    config = small_config()
    caches = caches_of(num_spec=3, null_slot=0)
    rows, width, fold_every = gdn.ring_shape(
        config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim,
        num_spec=3,
    )  # fmt: skip
    states, layers = caches.gdn, config.num_linear_layers
    assert (states.num_slots, states.num_rings, states.fold_every) == (1 + 3 + 2, 1 + 3, fold_every)
    assert [ring.shape for ring in states.rings] == [(4, rows, width)] * layers and states.rings[0].dtype == torch.float32
    assert [one.fold_phase for one in states.replay if one is not None] == [layer % fold_every for layer in range(layers)]
    assert states.bytes_per_sequence == states.bytes_per_slot + layers * rows * width * 4
    without = caches_of(num_spec=3, null_slot=0, replay=False).gdn
    assert (without.num_slots, without.num_rings, without.rings, without.state_tokens) == (1 + 3 * 4 + 2, 0, (), None)
    assert without.replay == (None,) * layers and without.bytes_per_sequence == 4 * without.bytes_per_slot
    assert without.bytes_per_slot == states.bytes_per_slot


@pytest.mark.parametrize("value", ["auto", "0", "1"])
def test_the_switch_and_the_argument(value: str, switch: Callable[..., env.Switches]) -> None:
    switch(GDN_REPLAY=value)
    assert GDNStateCache(small_config(), 3, num_spec=1).has_replay == (value == "1")  # auto: no kernel takes a ring yet
    assert caches_of(replay=None).gdn.has_replay == (value == "1")
    assert GDNStateCache(small_config(), 3, replay=True).has_replay
    assert not GDNStateCache(small_config(), 3, replay=False).has_replay


def test_a_copy_takes_the_count_and_the_entries() -> None:
    states = caches_of().gdn
    assert states.state_tokens is not None
    states.state_tokens.copy_(torch.arange(5))
    for ring in states.rings:
        ring.copy_(torch.arange(3.0)[:, None, None].expand(ring.shape))
    states.copy_slot(1, 2)
    assert states.state_tokens.tolist() == [0, 1, 1, 3, 4] and bool((states.rings[0][2] == 1).all())
    states.copy_slot(4, 0)  # a checkpoint
    assert states.state_tokens.tolist() == [4, 1, 1, 3, 4] and bool((states.rings[0][0] == 0).all())
    states.copy_slot(1, 3, ssm=False)
    assert states.state_tokens.tolist() == [4, 1, 1, 3, 4]


def test_sequences_get_slots_with_a_ring_and_checkpoints_others_first() -> None:
    allocator = CacheAllocator(caches_of())
    first = allocator.add(64)
    kept = [allocator.checkpoint(first, 64) for _ in range(3)]
    assert first.state_slots == (0,) and [one.slot for one in kept] == [4, 3, 2]  # the last one in a slot with a ring
    allocator.keep(kept[0], [1] * 64)
    allocator.keep(kept[2], [2] * 64)
    others = [allocator.add(1), allocator.add(1)]
    assert [one.state_slots for one in others] == [(1,), (2,)]
    assert kept[0].is_live and not kept[2].is_live  # what had a ring went


def build(builder: GDNMetadataBuilder, *rows: tuple[int, int, int], **options: Any) -> Any:
    queries, lengths, slots = zip(*rows, strict=True)
    return builder.build(queries, lengths, [[slot] for slot in slots], **options)


def test_metadata() -> None:
    builder = GDNMetadataBuilder("cpu", num_spec=2, max_num_sequences=4, replay=True)
    decode = build(builder, (1, 9, 3), (0, 4, 1), (1, 30, 5))
    assert decode.num_computed_tokens.tolist() == [8, 29] and decode.prefill_written_slots is None
    padded = build(builder, (1, 9, 3), (1, 30, 5), pad_to=4)
    assert padded.num_computed_tokens.tolist() == [8, 29, 0, 0]
    spec = build(builder, (3, 12, 3), (2, 22, 5), num_draft_tokens=[2, 1], num_accepted_tokens=[1, 3], pad_to=3)
    assert spec.num_computed_tokens.tolist() == [9, 20, 0] and spec.spec_state_indices_tensor.tolist() == [3, 5, -1]

    mixed = build(
        builder, (1, 9, 3), (64, 64, 1), (70, 100, 5), checkpoint_offsets=[[0], [64], [64]], checkpoint_slots=[[0], [8], [9]],
        num_accepted_tokens=[1, 1, 2], num_draft_tokens=[-1, -1, -1],
    )  # fmt: skip
    assert mixed.num_computed_tokens.tolist() == [8] and mixed.prefill_query_start_loc.tolist() == [0, 64, 134]
    assert mixed.prefill_slots.tolist() == [5] and mixed.prefill_computed_tokens.tolist() == [30]
    assert mixed.prefill_accepted_tokens.tolist() == [2]
    assert mixed.prefill_written_slots.tolist() == [1, 5, 8, 9] and mixed.prefill_seq_lens.tolist() == [64, 100, 64, 94]

    beside = build(builder, (3, 12, 3), (40, 40, 1), num_draft_tokens=[2, -1])
    assert beside.num_computed_tokens.tolist() == [9] and beside.prefill_slots is None
    assert beside.prefill_written_slots.tolist() == [1] and beside.prefill_seq_lens.tolist() == [40]
    with pytest.raises(ValueError, match="^num_accepted_tokens: expected 1 to 3"):
        build(builder, (5, 9, 3), num_draft_tokens=[-1], num_accepted_tokens=[4])


@pytest.mark.parametrize("num_spec", [0, 2])
def test_padded_steps_equal_one_pass(num_spec: int) -> None:
    """Batches of fixed shape, with a null slot of 0, over a fold of every stream: logits of decode, and of accepted drafts."""
    engine = make_engine(make_model("dense, experts", null_slot=0), num_spec=num_spec, use_graphs=True, null_slot=0, replay=True)
    prompts = make_prompts((5, 3, 18))
    engine.prefill(prompts)
    seen = Recorder(engine)
    engine.decode(9)
    if num_spec:
        engine.verify([[1, 2], [], [3]])
        for stream in engine.streams:
            seen.seen[id(stream)][-1] = seen.seen[id(stream)][-1][: stream.accepted]
    copy = engine.fork(engine.streams[2])
    engine.decode(2)
    sequences = [stream.tokens[: stream.num_computed] for stream in engine.streams]
    wanted = one_pass(make_model("dense, experts"), sequences)
    for stream, prompt, whole in zip(engine.streams, [*prompts, sequences[2][:-2]], wanted, strict=True):
        assert seen.error(stream, whole, len(prompt)) <= TOLERANCE
    assert engine.streams[3] is copy and copy.tokens == engine.streams[2].tokens
