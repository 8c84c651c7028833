"""Calls to draw, by family: an operator's forms that share compiled kernels. Lengths, layouts and values come from the seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gdn.runtime import registry
from tests.described import plain
from tests.fuzz import chosen
from tests.gpu import (
    attention,
    calls,
    cases,
    chunk,
    replay_slots,
    test_attention,
    test_chunk_summary,
    test_gdn_decode,
    test_gdn_prefill,
    test_indexer_steps,
    test_mqa_logits,
    test_recurrent,
    test_steps,
)
from tests.ops import drawn_attention

Tensor = torch.Tensor
Arguments = dict[str, Any]
Draw = Callable[[random.Random, torch.device], Arguments]
Judge = Callable[[Arguments, Sequence[Tensor]], str | None]  # arguments, results -> what is wrong
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Family:
    function: str  # public function of gdn; without an op, of tests.fuzz.chosen
    op: str  # in the registry: of its kernels; empty where no kernel is named
    draw: Draw
    tolerance: float  # relative error of a row next to the reference; 0 = the same bits
    is_selection: bool = False  # the result is a set of indices, of scores that round differently
    judge: Judge | None = None  # instead of the reference

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(registry.operator(self.op).modules) if self.op else ("chosen",)


def lengths(rng: random.Random, most: int = 8, longest: int = 150) -> list[int]:
    """Tokens of some sequences: empty, single, around a chunk, long."""
    kinds = (lambda: 0, lambda: 1, lambda: rng.randint(1, 9), lambda: rng.randint(62, 66), lambda: rng.randint(10, longest))
    return [min(longest, rng.choices(kinds, (1, 3, 3, 2, 3))[0]()) for _ in range(rng.randint(1, most))]


def _seed(rng: random.Random) -> int:
    return rng.randrange(2**31)


def _chunk(problem: Any) -> Draw:
    def draw(rng: random.Random, device: torch.device) -> Arguments:
        own = lengths(rng)
        padding = [n for n in range(len(own)) if rng.random() < 0.1]
        options = {"lengths": own, "seed": _seed(rng), "null_sequences": padding, "padded_tokens": rng.choice([0, 7])}
        return chunk.arguments_of(problem, device, **options)

    return draw


def _recurrent(problem: Any, longest: int) -> Draw:
    def draw(rng: random.Random, device: torch.device) -> Arguments:
        own = [rng.randint(0, longest) for _ in range(rng.randint(1, 12))]
        padding = [n for n in range(len(own)) if rng.random() < 0.1]
        changes = {"lengths": own, "seed": _seed(rng), "null_sequences": padding, "padded_tokens": rng.choice([0, 7])}
        return test_recurrent.arguments_of(problem, device, **changes)

    return draw


def _summary(rng: random.Random, device: torch.device) -> Arguments:
    return test_chunk_summary.make(test_chunk_summary.problem_of(), device, lengths=lengths(rng), seed=_seed(rng))


def _decode(**fields: Any) -> Draw:
    def draw(rng: random.Random, device: torch.device) -> Arguments:
        most = 1 if fields.get("offsets_dtype", F32) is None else 1 + (fields.get("spec") or 0)
        own = tuple(rng.randint(min(1, most) if most == 1 else 0, most) for _ in range(rng.randint(1, 9)))
        case = test_gdn_decode.Case(lengths=own, **fields)
        return test_gdn_decode.make(case, device, _seed(rng))[0]

    return draw


def _prefill(**fields: Any) -> Draw:
    def draw(rng: random.Random, device: torch.device) -> Arguments:
        case = test_gdn_prefill.Case(lengths=tuple(lengths(rng)), **fields)
        return test_gdn_prefill.make(case, device, _seed(rng))

    return draw


def _conv(**fields: Any) -> Draw:
    def draw(rng: random.Random, device: torch.device) -> Arguments:
        case = test_steps.Case(lengths=tuple(lengths(rng)), padding=rng.choice([0, 3]), **fields)
        return test_steps.prefill(case, device, mask=rng.random() < 0.5, dead=())

    return draw


def _update(**fields: Any) -> Draw:
    spec = fields.pop("spec", None)

    def draw(rng: random.Random, device: torch.device) -> Arguments:
        own = tuple(rng.randint(0, 1 + (spec or 0)) for _ in range(rng.randint(6, 12)))
        case = test_steps.Case(lengths=own, padding=rng.choice([0, 3]), **fields)
        return test_steps.decode(case, device, spec=spec, accepted=spec is not None)

    return draw


def _rows(make: Callable[..., Arguments], *rows: int) -> Draw:
    return lambda rng, device: make(device, seed=_seed(rng), rows=rng.choice(rows))


def _mqa(variant: str) -> Draw:
    def draw(rng: random.Random, device: torch.device) -> Arguments:
        rows, keys = rng.choice([1, 7, 67, 130]), rng.choice([64, 65, 300, 1000])
        ranges = rng.choice(test_mqa_logits.RANGES)
        return calls.mqa(device, variant, rows, keys, seed=_seed(rng) % 2**20, ranges=ranges)

    return draw


def _paged(variant: str) -> Draw:
    def draw(rng: random.Random, device: torch.device) -> Arguments:
        batch, most = rng.choice([1, 3, 6]), rng.choice([64, 300, 900])
        own = [rng.choice([0, 1, 63, 64, most, rng.randint(0, most)]) for _ in range(batch)]
        return calls.paged(device, variant, own, most)

    return draw


def _topk(rng: random.Random, device: torch.device) -> Arguments:
    source = torch.Generator(device).manual_seed(_seed(rng))
    rows, columns = rng.choice([1, 5, 40]), rng.choice([1, 63, 600, 3000])
    logits = torch.randn(rows, columns, device=device, generator=source)
    if rng.random() < 0.5:
        logits = (logits * 4).round() / 4  # many equal scores
    return {"logits": logits, "k": rng.choice([1, 64, 512])}


def _ragged_topk(rng: random.Random, device: torch.device) -> Arguments:
    arguments = _mqa("h16-fp8-unclean")(rng, device)
    del arguments["out_dtype"]
    return arguments | {"topk": rng.choice([1, 64, 256]), "workspace_bytes": rng.choice([None, 4 * 1000 * 9])}


def _paged_topk(rng: random.Random, device: torch.device) -> Arguments:
    arguments = _paged("h64-fp8-p64")(rng, device)
    del arguments["out_dtype"]
    return arguments | {"topk": rng.choice([1, 64, 256])}


def _attention(dense: bool, longest: int, variant: attention.Variant) -> Draw:
    """longest: new tokens of a sequence; up to 8 take the kernel of decode."""

    def draw(rng: random.Random, device: torch.device) -> Arguments:
        new = [rng.choice([0, 1, 1, rng.randint(1, longest)]) for _ in range(rng.randint(1, 6))]
        if longest > 8:
            new[0] = rng.randint(9, longest)
        own = [count + rng.choice([0, 0, rng.randint(0, 200)]) for count in new]
        inputs = attention.make_inputs(variant, own, new, rng.choice([16, 32]), dense=dense, seed=_seed(rng))
        if not dense:
            arguments = {name: x for name, x in inputs.arguments.items() if x is not None}
            return arguments | {"max_query_len": longest, "return_lse": True}
        arguments = test_attention.dense(inputs, rng.random() < 0.7)
        return arguments | {"return_lse": rng.random() < 0.5}

    return draw


def _prepare(**fields: Any) -> Draw:
    def draw(rng: random.Random, device: torch.device) -> Arguments:
        arguments = test_indexer_steps.call_of(test_indexer_steps.Case(tokens=rng.choice([1, 2, 37, 130]), **fields))
        arguments["positions"].clamp_(max=arguments["cos_sin"].shape[0] - 1)
        return arguments

    return draw


def _write(rng: random.Random, device: torch.device) -> Arguments:
    tokens = rng.choice([0, 1, 37, 150])
    cache = test_indexer_steps.make_cache(tokens // 20 + 9, 20, None, 128, torch.uint8)
    slots = test_indexer_steps.slots_of(tokens, cache.shape[0] * 20, _seed(rng), torch.int64)
    return {"k": test_indexer_steps.normal(tokens, 128, seed=_seed(rng), device=device), "cache": cache, "slot_mapping": slots}


def _gather(rng: random.Random, device: torch.device) -> Arguments:
    own = lengths(rng)
    rows = sum(own) + rng.choice([0, 5])  # without a number of rows the operator reads the offsets, which capture forbids
    return test_indexer_steps.gather_call(own, None, 128, torch.uint8, 64) | {"num_rows": rows}


def _compress(rng: random.Random, device: torch.device) -> Arguments:
    runs = [test_indexer_steps.Run(slot, rng.randint(0, 20), rng.randint(1, 12)) for slot in range(1, rng.randint(2, 5))]
    return test_indexer_steps.compress_call(runs, 4, 8, None, 128, torch.uint8, BF16, seed=_seed(rng) % 1000)


def _expand(rng: random.Random, device: torch.device) -> Arguments:
    rows, k = rng.choice([0, 1, 7, 70]), rng.choice([1, 40, 512])
    source = torch.Generator().manual_seed(_seed(rng))
    groups = torch.randint(-1, 10**6, (rows, k), generator=source, dtype=torch.int32).to(device)
    return {"group_indices": groups, "positions": torch.randint(0, 10**6, (rows,), generator=source).to(device), "ratio": 4}


def _fold(**fields: Any) -> Draw:
    def draw(rng: random.Random, device: torch.device) -> Arguments:
        scene = replay_slots.Fold(sequences=rng.randint(5, 40), layers=rng.choice([1, 3]), seed=_seed(rng), **fields)
        return {name: x for name, x in scene.arguments(device).items() if x is not None}

    return draw


def _accept(rng: random.Random, device: torch.device) -> Arguments:
    own = tuple(rng.randint(0, 8) for _ in range(rng.randint(4, 30)))
    return replay_slots.Trees(lengths=own, seed=_seed(rng)).arguments(device)


def _form(operator: str, is_long: bool = False) -> Draw:
    def draw(rng: random.Random, device: torch.device) -> Arguments:
        arguments = drawn_attention.draw(_seed(rng), device, operator, few_variants=True, is_long=is_long).arguments
        arguments.pop("backend", None)
        return arguments

    return draw


def _judge_form(operator: str) -> Judge:
    """Next to float64: torch computes prefill rows of the reference too."""

    def judge(arguments: Arguments, found: Sequence[Tensor]) -> str | None:
        if "out" in arguments:
            arguments = arguments | {"out": found[0]}
        new, own = arguments["query_start_loc"].diff().tolist(), arguments["seq_lens"].tolist()
        drawn = drawn_attention.Drawn(0, operator, arguments, list(zip(new, own, strict=True)), "")
        return drawn_attention.fault(drawn, found[0], found[1] if arguments["return_lse"] else None)

    return judge


_CHUNKS = {"pool": cases.MAIN_CHUNK, "raw gates": next(p for p in cases.chunk_problems() if p.use_gate and p.pooled)}
_LONG_WORDS = {"chunk": "chunk_gated_delta_rule", "recurrent": "fused_recurrent_gated_delta_rule"}
_GATED = attention.Variant(16, 2, has_gate=True)

FAMILIES: dict[str, Family] = {
    **{f"chunk, {name}": Family(_LONG_WORDS["chunk"], "chunk", _chunk(one), 2e-2) for name, one in _CHUNKS.items()},
    "chunk summary": Family("chunk_summary", "chunk_summary", _summary, 2e-2),
    "recurrent": Family(_LONG_WORDS["recurrent"], "recurrent", _recurrent(cases.MAIN_RECURRENT, 3), 8e-3),
    "recurrent, drafts": Family(_LONG_WORDS["recurrent"], "recurrent", _recurrent(cases.MAIN_SPECULATIVE, 4), 8e-3),
    "decode": Family("fused_gdn_decode", "gdn_decode", _decode(offsets_dtype=None, padding=0), 2e-2),
    "decode, drafts": Family("fused_gdn_decode", "gdn_decode", _decode(spec=3, layout="interleaved"), 2e-2),
    "decode, merged": Family("fused_gdn_decode", "gdn_decode", _decode(spec=2, layout="merged"), 2e-2),
    "prefill, merged": Family("fused_gdn_prefill", "gdn_prefill", _prefill(layout="merged"), 2e-2),
    "prefill": Family("fused_gdn_prefill", "gdn_prefill", _prefill(), 2e-2),
    "prefill, interleaved": Family("fused_gdn_prefill", "gdn_prefill", _prefill(layout="interleaved", v_first=False), 2e-2),
    "conv": Family("causal_conv1d_fn", "conv1d", _conv(), 1e-2),
    "conv, columns": Family("causal_conv1d_fn", "conv1d", _conv(order="columns", index_dtype=torch.int64), 1e-2),
    "update": Family("causal_conv1d_update", "conv1d_update", _update(), 1e-2),
    "update, drafts": Family("causal_conv1d_update", "conv1d_update", _update(spec=4), 1e-2),
    "fold": Family("fold_states", "fold_states", _fold(), 1e-5),
    "fold, elsewhere": Family("fold_states", "fold_states", _fold(has_final=True, state_dtype=BF16), 8e-3),
    "accepted trees": Family("accept_draft_tree", "accept_draft_tree", _accept, 0.0),
    "gating": Family("fused_gdn_gating", "gating", _rows(calls.gating, 0, 1, 9, 130), 1e-5),
    "split": Family("fused_qkvzba_split_reshape_cat", "split", _rows(calls.split, 0, 1, 7, 66), 0.0),
    "norm": Family("rms_norm_gated", "rms_norm_gated", _rows(calls.norm, 0, 1, 7, 66), 8e-3),
    "add norm": Family("add_rms_norm", "add_rms_norm", _rows(calls.add_norm, 0, 1, 7, 66), 8e-3),
    "first norm": Family("add_rms_norm", "add_rms_norm", _rows(calls.first_norm, 0, 1, 7, 66), 8e-3),
    "logits, fp8": Family("mqa_logits", "mqa_logits", _mqa("h64-fp8"), 5e-3),
    "logits, bfloat16": Family("mqa_logits", "mqa_logits", _mqa("h16-bf16"), 5e-3),
    "paged logits": Family("paged_mqa_logits", "paged_mqa_logits", _paged("h64-fp8-p64"), 5e-3),
    "paged logits, drafts": Family("paged_mqa_logits", "paged_mqa_logits", _paged("h4-cast-p272-n2"), 5e-3),
    "top-k": Family("topk_indices", "topk", _topk, 0.0),
    "ragged top-k": Family("indexer_topk", "mqa_logits", _ragged_topk, 0.0, is_selection=True),
    "paged top-k": Family("paged_indexer_topk", "paged_mqa_logits", _paged_topk, 0.0, is_selection=True),
    "sparse decode": Family("sparse_attention", "sparse_attention_decode", _attention(False, 8, _GATED), 2e-2),
    "sparse prefill": Family("sparse_attention", "sparse_attention_prefill", _attention(False, 90, _GATED), 2e-2),
    "dense decode": Family("attention", "sparse_attention_decode", _attention(True, 8, attention.Variant(16, 2)), 2e-2),
    "dense prefill": Family("attention", "attention_prefill", _attention(True, 90, attention.Variant(16, 2)), 2e-2),
    "prepare": Family("prepare_indexer", "prepare_indexer", _prepare(), 2e-2),
    "prepare, bfloat16": Family("prepare_indexer", "prepare_indexer", _prepare(cache_dtype=BF16, values=True), 2e-2),
    "quantize": Family("quantize_fp8", "quantize_fp8", _rows(calls.quantized, 0, 1, 9, 200), 0.0),
    "write": Family("write_indexer_cache", "write_indexer_cache", _write, 0.0),
    "gather": Family("gather_indexer_cache", "gather_indexer_cache", _gather, 0.0),
    "compress": Family("compress_indexer_keys", "compress_indexer_keys", _compress, 2e-2),
    "expand": Family("expand_topk_groups", "expand_topk_groups", _expand, 0.0),
    **{f"{name}, any form": Family(name, "", _form(name), 0.0, judge=_judge_form(name)) for name in drawn_attention.OPERATORS},
    "attention, long contexts": Family("attention", "", _form("attention", is_long=True), 0.0, judge=_judge_form("attention")),
    **{
        f"model, {form}": Family("engine", "", partial(chosen.draw_engine, form), 0.2)
        for form in ("token-wise", "compressed", "dense")
    },
}


def _plain(op: str) -> Family:
    """For an operator that has no family above: its plain form."""

    def draw(rng: random.Random, device: torch.device) -> Arguments:
        return plain.on_device(op, device, rng.choice([3, 9, 66]), _seed(rng))

    return Family(registry.operator(op).functions[0], op, draw, 8e-3)


_MISSING = {one.name for one in registry.with_kernels()} - {family.op for family in FAMILIES.values()}
FAMILIES |= {op: _plain(op) for op in sorted(_MISSING)}
