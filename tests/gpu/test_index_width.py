"""Indices that no int32 holds: what is padding stays padding, and nothing that their low halves name is read or written.

The calls are those of the other tests, and they are judged in the same way: outputs against the reference or the oracle, whole
pools, rings and caches bit for bit, with what surrounds them. Null indices become int64 values whose low
32 bits are a slot that exists, or one far outside.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import chunk_problem, recurrent_problem
from gdn.ops.delta_rule.problem import ChunkProblem, RecurrentProblem
from gdn.ops.indexer.inputs import make_mqa_inputs, make_paged_inputs
from gdn.testing.compare import same_bits
from tests.gpu import (
    cases,
    chunk,
    test_gdn_decode,
    test_indexer_steps,
    test_mqa_logits,
    test_paged_mqa_logits,
    test_recurrent,
    test_recurrent_tree,
    test_steps,
    test_topk,
)
from tests.gpu.chunk_forms import take
from tests.gpu.conftest import Force
from tests.gpu.delta_rule import Arguments, backends
from tests.gpu.twins import twin
from tests.references import reference

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
NULLS = (-(2**33) + 1, -(2**40), -(2**31) - 1, -(2**62) + 2)  # the low halves of three are slots 1, 0 and 2
MANY = 2**32 + 1  # its low half is 1
INT64: dict[str, Any] = {**cases.MAIN, "index_dtype": "int64"}


def widened(indices: Tensor, null_slot: int) -> Tensor:
    """The indices as int64 with their strides, NULLS cyclically for what is null."""
    wide = torch.empty_strided(indices.shape, indices.stride(), dtype=torch.int64, device=indices.device)
    wide.copy_(indices)
    null = wide <= null_slot
    values = torch.tensor(NULLS, device=indices.device).repeat(-(-int(null.sum()) // len(NULLS)))
    wide[null] = values[: int(null.sum())]
    return wide


def with_counts(arguments: dict[str, Any], sequence: int, count: int = MANY) -> None:
    """num_accepted_tokens of int64, beyond every column for one sequence."""
    counts = arguments["num_accepted_tokens"].long()
    counts[sequence] = count
    arguments["num_accepted_tokens"] = counts


# --- the fused decode --------------------------------------------------------------------------------------------------


def judge_decode(case: test_gdn_decode.Case, arguments: Arguments, ignored: list[int]) -> None:
    before = twin(arguments)
    gdn.fused_gdn_decode(**arguments, backend="cute")
    test_gdn_decode.judge(case, before, arguments, ignored)


DECODES = {
    "a token each": test_gdn_decode.Case(lengths=(1,) * 9, offsets_dtype=None),
    "lengths": test_gdn_decode.Case(v_first=False, state_dtype=torch.bfloat16),
    "drafts": test_gdn_decode.Case(spec=3),
    "drafts, K first": test_gdn_decode.Case(spec=3, v_first=False),
    "offsets of int64": test_gdn_decode.Case(spec=3, accepted=False, offsets_dtype=torch.int64),
}


@pytest.mark.parametrize("name", DECODES)
def test_fused_decode(name: str, device: torch.device) -> None:
    case = replace(DECODES[name], index_dtype=torch.int64)
    arguments, ignored = test_gdn_decode.make(case, device)
    arguments["state_indices"] = widened(arguments["state_indices"], test_gdn_decode.NULL)
    arguments["null_slot"] = -1
    judge_decode(case, arguments, ignored)


def test_fused_decode_with_more_columns_than_lanes(device: torch.device) -> None:
    """Columns that no lane of the warp holds: sequence 1 reads a null slot there, sequence 2 writes one."""
    case = test_gdn_decode.Case(lengths=(36, 1, 40), spec=39, index_dtype=torch.int64)
    arguments, ignored = test_gdn_decode.make(case, device)
    arguments["num_accepted_tokens"] = torch.tensor([38, 35, 1], dtype=torch.int32, device=device)
    indices = arguments["state_indices"]
    for n, column in ((0, 37), (2, 0)):
        slots = indices[n].tolist()
        arguments["ssm_state"][slots[column]] = torch.randn(arguments["ssm_state"].shape[1:], device=device)
        arguments["conv_state"][slots[0]] = torch.randn(arguments["conv_state"].shape[1:], device=device).to(torch.bfloat16)
    indices[1, 34], indices[2, 33], indices[2, 5] = NULLS[0], NULLS[3], NULLS[0]
    judge_decode(case, arguments, [36, *ignored])


@pytest.mark.parametrize("count", [MANY, -MANY, 2**40])
def test_fused_decode_with_counts_beyond_32_bits(count: int, device: torch.device) -> None:
    case = test_gdn_decode.Case(spec=3)
    arguments, ignored = test_gdn_decode.make(case, device)
    with_counts(arguments, 7, count)
    judge_decode(case, arguments, [sum(case.lengths[:7]), *ignored])


# --- the recurrent operator --------------------------------------------------------------------------------------------


RECURRENT = {
    "pool": recurrent_problem(**INT64, has_final_indices=True),
    "K first": recurrent_problem(**INT64 | {"state_v_first": False}, has_final_indices=True),
    "drafts": recurrent_problem(**INT64, write_every_token=True, has_accepted=True, has_final_indices=True),
    "drafts in place": recurrent_problem(**INT64, write_every_token=True, has_accepted=True),
    "columns": recurrent_problem(**INT64, write_every_token=True),
}


@pytest.mark.parametrize("backend", backends("recurrent"))
@pytest.mark.parametrize("lengths", [test_recurrent.LENGTHS, [1] * 6], ids=["ragged", "a token each"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_pool(
    name: str, lengths: list[int], backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem: RecurrentProblem = RECURRENT[name]
    options: dict[str, Any] = {"lengths": lengths, "null_slot": -1, "null_sequences": [3, 4]}
    if problem.write_every_token:
        options["num_columns"] = 3
    arguments = test_recurrent.arguments_of(problem, device, **options)
    if problem.write_every_token:
        arguments["ssm_state_indices"][2, 1] = -1  # a state that is not kept, where it is not read
    if problem.has_final_indices:
        arguments["final_state_indices"][0] = -1
    for field in ("ssm_state_indices", "final_state_indices"):
        if field in arguments:
            arguments[field] = widened(arguments[field], -1)
    live = test_recurrent.check(arguments, backend, monkeypatch).live
    assert live[0] and not live[3] and not live[4]


@pytest.mark.parametrize("backend", backends("recurrent"))
@pytest.mark.parametrize("count", [MANY, -MANY, 2**40])
def test_recurrent_with_counts_beyond_32_bits(
    count: int, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = test_recurrent.arguments_of(cases.MAIN_SPECULATIVE, device, null_sequences=[])
    with_counts(arguments, 2, count)
    live = test_recurrent.check(arguments, backend, monkeypatch).live
    assert live == [True, False, False, True, True, True]


@pytest.mark.parametrize("backend", backends("recurrent"))
@pytest.mark.parametrize("wide", ["ssm_state_indices", "final_state_indices"])
@pytest.mark.parametrize("problem", [RECURRENT["pool"], RECURRENT["drafts"]], ids=["pool", "drafts"])
def test_recurrent_with_indices_of_two_dtypes(
    problem: RecurrentProblem, wide: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = test_recurrent.arguments_of(problem, device, null_slot=-1)
    if wide == "final_state_indices":
        arguments[wide][0] = -1
    for field in ("ssm_state_indices", "final_state_indices"):
        arguments[field] = widened(arguments[field], -1) if field == wide else arguments[field].int()
    live = test_recurrent.check(arguments, backend, monkeypatch).live
    assert live[0] and not live[3]


@pytest.mark.parametrize("backend", backends("recurrent"))
def test_recurrent_tree_slots(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = recurrent_problem(**{**cases.MAIN, **test_recurrent_tree.TREE, "index_dtype": "int64"})
    arguments = test_recurrent_tree.arguments_of(problem, "binary", device, null_slot=-1)
    indices = arguments["ssm_state_indices"]
    assert int(arguments["num_accepted_tokens"][2]) == 3
    indices[2, 0] = indices[2, 4] = -1  # nodes whose states are not kept
    arguments["ssm_state_indices"] = widened(indices, -1)
    live = test_recurrent.check(arguments, backend, monkeypatch).live
    assert live[2] and not live[3]


# --- the chunk operator ------------------------------------------------------------------------------------------------

LENGTHS = [0, 63, 64, 65, 128, 700, 64, 257, 384]
CHUNK: dict[str, Any] = {**INT64, "has_mask": True, "has_final_indices": True, "has_checkpoints": True}


def widen_chunk(arguments: Arguments) -> Arguments:
    """Padding, a final state and checkpoints that are not stored, and an offset that no sequence reaches."""
    arguments["final_state_indices"][2] = -1
    arguments["checkpoint_slots"][5, 0] = arguments["checkpoint_slots"][7, 1] = -1
    for field in ("state_indices", "final_state_indices", "checkpoint_slots"):
        arguments[field] = widened(arguments[field], -1)
    offsets = arguments["checkpoint_offsets"].long()
    offsets[8, 0], offsets[4, 0] = 2**32 + 64, -(2**32) + 64
    arguments["checkpoint_offsets"] = offsets
    return arguments


def chunk_arguments(problem: ChunkProblem, device: torch.device) -> Arguments:
    return chunk.arguments_of(problem, device, lengths=LENGTHS, null_slot=-1, null_sequences=[1, 6])


@pytest.mark.parametrize("backend", backends("chunk"))
@pytest.mark.parametrize("segment", [0, 2])
@pytest.mark.parametrize("v_first", [True, False])
def test_chunk_pool(
    v_first: bool, segment: int, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(split_chunks=segment)
    problem = chunk_problem(**CHUNK | {"state_v_first": v_first})
    chunk.check(widen_chunk(chunk_arguments(problem, device)), chunk.by(backend), monkeypatch)


@pytest.mark.parametrize("backend", backends("chunk"))
def test_chunk_default_form(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = widen_chunk(chunk_arguments(chunk_problem(**CHUNK), device))
    chunk.check(arguments, chunk.by(backend), monkeypatch)


@pytest.mark.parametrize("form", ["both", "ring"])
def test_chunk_wide_form(form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force) -> None:
    take(form, force)
    arguments = widen_chunk(chunk_arguments(chunk_problem(**CHUNK), device))
    chunk.check(arguments, chunk.by("cute"), monkeypatch)


@pytest.mark.parametrize("dim", [60, 100])
def test_chunk_padded_head_dims(dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chunk_problem(**CHUNK | {"head_k_dim": dim, "head_v_dim": dim})
    chunk.check(widen_chunk(chunk_arguments(problem, device)), chunk.by("cute"), monkeypatch)


@pytest.mark.parametrize("backend", backends("chunk"))
@pytest.mark.parametrize("wide", ["state_indices", "final_state_indices", "checkpoint_slots"])
def test_chunk_with_indices_of_two_dtypes(
    wide: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, force: Force
) -> None:
    force(split_chunks=0)
    arguments = chunk_arguments(chunk_problem(**CHUNK), device)
    if wide == "final_state_indices":
        arguments[wide][2] = -1
    if wide == "checkpoint_slots":
        arguments[wide][5, 0] = arguments[wide][7, 1] = -1
    for field in ("state_indices", "final_state_indices", "checkpoint_slots"):
        arguments[field] = widened(arguments[field], -1) if field == wide else arguments[field].int()
    chunk.check(arguments, chunk.by(backend), monkeypatch)


# --- the convolutions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["channels", "columns"])
def test_prefill_windows(order: str, device: torch.device) -> None:
    case = test_steps.Case(order=order, index_dtype=torch.int64)
    dead = (0, 3, 6)
    arguments = test_steps.prefill(case, device, checkpoints=2, dead=dead)
    for field in ("cache_indices", "checkpoint_slots"):
        arguments[field] = widened(arguments[field], test_steps.NULL)
    offsets = arguments["checkpoint_offsets"].long()
    offsets[1, 0], offsets[5, 1], offsets[7, 1] = 2**32 + 1, -(2**32) + 2, 2**40 + 4
    arguments |= {"checkpoint_offsets": offsets, "null_slot": -1}
    test_steps.run("causal_conv1d_fn", "conv_states", arguments, test_steps.rows_of(case, dead))


@pytest.mark.parametrize("wide", ["cache_indices", "checkpoint_slots"])
def test_prefill_windows_with_indices_of_two_dtypes(wide: str, device: torch.device) -> None:
    case = test_steps.Case()
    arguments = test_steps.prefill(case, device, checkpoints=2)
    if wide == "cache_indices":
        arguments["checkpoint_slots"][arguments["checkpoint_slots"] == test_steps.NULL] = -1
    else:
        arguments["cache_indices"][arguments["cache_indices"] <= test_steps.NULL] = -1
    arguments[wide] = widened(arguments[wide], test_steps.NULL)
    arguments["null_slot"] = -1
    test_steps.run("causal_conv1d_fn", "conv_states", arguments, test_steps.rows_of(case, (3,)))


@pytest.mark.parametrize(("spec", "tree"), [(None, False), (4, False), (4, True)])
def test_decode_windows(spec: int | None, tree: bool, device: torch.device) -> None:
    case = test_steps.Case(lengths=test_steps.DECODE, index_dtype=torch.int64)
    arguments = test_steps.decode(case, device, spec, True, tree)
    if tree:
        arguments["conv_state_indices"][1, 3] = test_steps.NULL  # a node whose window is not kept
    arguments["conv_state_indices"] = widened(arguments["conv_state_indices"], test_steps.NULL)
    arguments["null_slot"] = -1
    dead = test_steps.dead_of(case, spec is not None)
    test_steps.run("causal_conv1d_update", "conv_state", arguments, test_steps.rows_of(case, dead))


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("count", [MANY, -MANY, 2**40])
def test_decode_windows_with_counts_beyond_32_bits(count: int, tree: bool, device: torch.device) -> None:
    case = test_steps.Case(lengths=test_steps.DECODE)
    arguments = test_steps.decode(case, device, 4, True, tree)
    with_counts(arguments, 0, count)
    test_steps.run("causal_conv1d_update", "conv_state", arguments, test_steps.rows_of(case, (0, 3, 5)))


# --- the indexer -------------------------------------------------------------------------------------------------------


def widened_rows(slots: Tensor) -> Tensor:
    """Rows to skip whose low halves are rows."""
    wide = widened(slots, -1)
    wide[3], wide[4] = -(2**33) + 5, -(2**40) + 6
    return wide


@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.bfloat16])
def test_write_indexer_cache(cache_dtype: torch.dtype, device: torch.device) -> None:
    cache = test_indexer_steps.make_cache(11, 20, None, 128, cache_dtype)
    k = test_indexer_steps.normal(37, 128, seed=1)
    slots = widened_rows(test_indexer_steps.slots_of(37, 220, 3, torch.int64))
    slots[5] = 2**33 + 7  # of no cache: the reference knows no such row
    skipped = slots.cpu().clone()
    skipped[5] = -1
    want = test_indexer_steps.on_cpu(cache)
    reference.write_indexer_cache(k.cpu(), want, skipped)
    gdn.write_indexer_cache(k, cache, slots, backend="cute")
    assert torch.equal(test_indexer_steps.memory_of(cache).cpu(), test_indexer_steps.memory_of(want))


@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.bfloat16])
def test_prepare_indexer(cache_dtype: torch.dtype, device: torch.device) -> None:
    """The bits of a call whose positions are clamped to the table and whose skipped rows are -1."""
    case = test_indexer_steps.Case(cache_dtype=cache_dtype)
    wide, narrow = test_indexer_steps.call_of(case), test_indexer_steps.call_of(case)
    wide["positions"] = positions = wide["positions"].clone()
    positions[:4] = torch.tensor([2**33 + 7, -(2**33) + 7, 2**40, -(2**31) - 1], device=device)
    narrow["positions"] = positions.clamp(0, wide["cos_sin"].shape[0] - 1)
    wide["slot_mapping"] = widened_rows(wide["slot_mapping"])
    narrow["slot_mapping"] = wide["slot_mapping"].clamp(min=-1)
    found, want = gdn.prepare_indexer(**wide, backend="cute"), gdn.prepare_indexer(**narrow, backend="cute")
    for one, other in zip(found, want, strict=True):
        assert same_bits(one, other)  # type: ignore[arg-type]
    found_cache, want_cache = (test_indexer_steps.memory_of(given["cache"]) for given in (wide, narrow))
    assert torch.equal(found_cache, want_cache)


@pytest.mark.parametrize("name", ["continued", "decode"])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, test_indexer_steps.FP8])
def test_compress_indexer_keys(cache_dtype: torch.dtype, name: str, device: torch.device) -> None:
    """Skipped tokens by their slot and by their position, of which one is what a neighbour's would be in 32 bits."""
    arguments = test_indexer_steps.compress_call(
        test_indexer_steps.RUNS[name], 4, 8, None, 128, cache_dtype, torch.bfloat16, index=torch.int64
    )
    arguments["ring_slots"] = widened(arguments["ring_slots"], -1)
    arguments["slot_mapping"] = widened(arguments["slot_mapping"], -1)
    positions = arguments["positions"]
    padding = (arguments["ring_slots"] < 0).nonzero().flatten().tolist()
    # In the place of padding, with its neighbour's slot: positions whose low halves continue the neighbour's run.
    for number, place in enumerate(padding[:-1]):
        if number % 2 == 0:
            arguments["ring_slots"][place] = arguments["ring_slots"][place - 1]
            positions[place] = positions[place - 1] + 1 + (2**33 if number % 4 else -(2**33))
    arguments["raw_k"].nan_to_num_(7.0)
    test_indexer_steps.check_compressed(arguments)


@pytest.mark.parametrize("index", ["groups", "positions", "both"])
@pytest.mark.parametrize("ratio", [4, 3])
def test_expand_topk_groups(ratio: int, index: str, device: torch.device) -> None:
    """A group or a position that no int32 holds is none."""
    groups = torch.randint(0, 10**6, (70, 513), generator=torch.Generator().manual_seed(ratio)).to(device)
    positions = torch.arange(70, device=device) * 7 - 2
    if index != "positions":
        values = [2**33 + 5, -(2**33) + 5, 2**40, -(2**40) + 1, 2**31, -(2**31) - 1, -(2**63), 2**63 - 1]
        groups[::3, 5:13] = torch.tensor(values, device=device)
    if index != "groups":
        values = [2**33 + 6, -(2**33) + 6, 2**40 + 1, -(2**40) + 1, 2**31 + 2, -(2**31) - 1]
        positions[10:16] = torch.tensor(values, device=device)
    narrow_groups = groups.where((groups >= 0) & (groups < 2**31), -1).int()
    narrow_positions = positions.where((positions >= 0) & (positions < 2**31), -1).int()
    want = reference.expand_topk_groups(narrow_groups, narrow_positions, ratio=ratio)
    assert torch.equal(reference.expand_topk_groups(groups, positions, ratio=ratio), want)
    assert torch.equal(gdn.expand_topk_groups(groups, positions, ratio=ratio, backend="cute"), want)


# --- logits and top-k --------------------------------------------------------------------------------------------------

FAR = [2**33 + 5, -(2**33) + 5, 2**40, -(2**40) + 5, 2**31 + 5, -(2**31) - 5, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("backend", test_topk.BACKENDS)
@pytest.mark.parametrize("sorted_by", ["index", "score"])
def test_topk_bounds(sorted_by: str, backend: str, device: torch.device) -> None:
    """Every pair of a far start and a far end, and far ones with near ones."""
    bounds = torch.tensor([*FAR, 0, 7, 900], device=device)
    starts, ends = (x.flatten() for x in torch.meshgrid(bounds, bounds, indexing="ij"))
    values = torch.randn(len(starts), 900, device=device, generator=test_topk.generator(2))
    for k in (7, 512):
        test_topk.check(test_topk.between_guards(values), k, starts, ends, sorted_by, backend)


@pytest.mark.parametrize("backend", test_mqa_logits.BACKENDS)
@pytest.mark.parametrize("variant", ["h64-fp8", "h16-kv2-fp8-packed"])
def test_mqa_logits_ranges(variant: str, backend: str, device: torch.device) -> None:
    """Ranges of int64 give the bits of the same ranges clamped to the keys."""
    problem = test_mqa_logits.problem_of(variant, 67, 1000)
    inputs = make_mqa_inputs(problem, device, ranges="full", poison=False)
    bounds = torch.tensor([*FAR, 0, 7, 900], device=device)
    starts, ends = (x.flatten()[5:72] for x in torch.meshgrid(bounds, bounds, indexing="ij"))
    found, want = test_mqa_logits.poisoned(problem)[0], test_mqa_logits.poisoned(problem)[0]
    test_mqa_logits.run(problem, replace(inputs, cu_seqlen_ks=starts, cu_seqlen_ke=ends), backend, found)
    near = replace(inputs, cu_seqlen_ks=starts.clamp(0, 1000).int(), cu_seqlen_ke=ends.clamp(0, 1000).int())
    test_mqa_logits.run(problem, near, backend, want)
    assert same_bits(found, want)
    assert test_mqa_logits.error_of(problem, near, found) is None


@pytest.mark.parametrize("backend", test_paged_mqa_logits.BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("variant", ["h64-fp8-p64", "h16-fp8-p16-n4", "h64-fp8-p64-n2", "h6-fp8-p272-n5"])
def test_paged_mqa_logits_lengths(variant: str, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """The most negative lengths are empty for every draft, and those beyond the columns are all of them."""
    problem = test_paged_mqa_logits.problem_of(variant, 12, 300)
    far = FAR if dtype == torch.int64 else [-(2**31), -(2**31) + 1, -(2**31) + 2, 2**31 - 1, -5, 301, -1, 2**31 - 2]
    lengths = torch.tensor([*far, 0, 7, 299, 300], dtype=dtype, device=device)
    near = lengths.clamp(0, 300 + problem.next_n).int()  # draft i of n sees n - 1 - i keys less
    if problem.per_draft_lengths:
        lengths, near = (x[:, None].expand(-1, problem.next_n).contiguous() for x in (lengths, near.clamp(max=300)))
    inputs = make_paged_inputs(problem, device)
    found, want = test_paged_mqa_logits.poisoned(problem)[0], test_paged_mqa_logits.poisoned(problem)[0]
    test_paged_mqa_logits.run(problem, replace(inputs, context_lens=lengths), backend, found)
    test_paged_mqa_logits.run(problem, replace(inputs, context_lens=near), backend, want)
    assert same_bits(found, want)
    empty = (lengths.reshape(12, -1) <= 0).all(dim=1)
    assert bool((found.reshape(12, -1)[empty] == -torch.inf).all())
    assert test_paged_mqa_logits.error_of(problem, replace(inputs, context_lens=near), found) is None
