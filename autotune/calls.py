"""Seeded calls of the operators that both DSLs serve, drawn over what users run: heads, layouts, dtypes, masks, flags, sizes.

The first of every operator are calls that once took the slower kernel, or that a README or an engine makes; the rest are random.
All run in a few milliseconds and 20 GB.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from autotune.shapes import Shape
from gdn.models import QWEN3_NEXT_80B
from gdn.ops.delta_rule import examples as delta_rule_examples
from gdn.ops.delta_rule.problem import ChunkProblem, DeltaRuleProblem, RecurrentProblem
from gdn.ops.indexer import examples as indexer_examples
from gdn.ops.indexer.problem import LogitsProblem, MqaLogitsProblem, PagedMqaLogitsProblem

OPERATORS = ("chunk", "recurrent", "mqa_logits", "paged_mqa_logits")

_CHUNK = delta_rule_examples.chunk(QWEN3_NEXT_80B).static_fields()  # the delta rule as serving engines call it
_RECURRENT = delta_rule_examples.recurrent(QWEN3_NEXT_80B).static_fields()
_DRAFTS: dict[str, Any] = {"write_every_token": True, "has_accepted": True}
_RAGGED, _PAGED = (
    example(replace(QWEN3_NEXT_80B, index_num_heads=64), fp8=True).static_fields()
    for example in (indexer_examples.mqa_logits, indexer_examples.paged_mqa_logits)
)
_BF16: dict[str, Any] = {"dtype": "bfloat16", "has_k_scale": False}


def calls(count: int, seed: int = 0) -> list[Shape]:
    """The same calls for the same seed, cycling through the operators; more calls of a seed begin with the fewer."""
    streams = [_distinct(_STREAMS[op](Random(f"{op} {seed}"))) for op in OPERATORS]
    in_turn = itertools.chain.from_iterable(zip(*streams, strict=True))
    return list(itertools.islice(in_turn, count))


def _distinct(shapes: Iterator[Shape]) -> Iterator[Shape]:
    seen = set()
    for shape in shapes:
        if shape.problem not in seen:
            seen.add(shape.problem)
            yield replace(shape, name=f"{len(seen)}: {shape.name}")


def _heads(num_k_heads: int, num_v_heads: int, num_q_heads: int | None = None) -> dict[str, int]:
    return {"num_q_heads": num_q_heads or num_k_heads, "num_k_heads": num_k_heads, "num_v_heads": num_v_heads}


def _dim(head_dim: int) -> dict[str, int]:
    return {"head_k_dim": head_dim, "head_v_dim": head_dim}


def _chunk_calls(random: Random) -> Iterator[Shape]:
    yield _chunk([8192], cu_seqlens_dtype="int64")
    yield _chunk([8192], state_v_first=False)
    yield _chunk([700, 3000, 1], **_heads(8, 24))
    yield _chunk([4096], **_heads(16, 48))
    yield _chunk([2048] * 4, index_dtype=None, has_mask=False, gate_dtype="float32", beta_dtype="float32", use_gate=False)
    yield _chunk([8192], **_dim(64))
    yield _chunk([3000], **_heads(4, 4, num_q_heads=32))
    yield _chunk([1024] * 8, dtype="float16", state_dtype="bfloat16", index_dtype="int64")
    while True:
        lengths, fields = _lengths(random, most=16384), _delta_rule_fields(random)
        fields["has_mask"] = fields["has_initial_state"] and random.random() < 0.6
        fields["has_checkpoints"] = fields["index_dtype"] is not None and random.random() < 0.15
        yield _chunk(lengths, **fields)


def _delta_rule_fields(random: Random) -> dict[str, Any]:
    heads = [_heads(*one) for one in ((16, 32), (4, 8), (2, 4), (16, 64), (8, 24), (16, 48), (8, 8), (16, 16), (32, 32))]
    heads += [_heads(4, 4, num_q_heads=16), _heads(2, 2, num_q_heads=8)]
    tiles = {
        **random.choice(heads), **_dim(random.choice([128, 128, 128, 64])),
        "dtype": random.choice(["bfloat16"] * 4 + ["float16"]), "state_dtype": random.choice(["float32"] * 3 + ["bfloat16"]),
        "state_v_first": random.random() < 0.6,
    }  # fmt: skip
    if random.random() < 0.5:  # as engines call, but for what no tile depends on
        tiles = {name: _CHUNK[name] for name in tiles} | random.choice(heads[:2])
    pooled = random.random() < 0.75
    gate = random.choice(["bfloat16"] * 3 + ["float32"] * 2 + [None])
    beta = random.choice(["bfloat16"] * 3 + ["float32"] * 2)
    return {
        **tiles, "gate_dtype": gate, "beta_dtype": beta, "cu_seqlens_dtype": random.choice(["int32", "int64"]),
        "index_dtype": random.choice(["int32", "int64"]) if pooled else None, "use_qk_l2norm": random.random() < 0.7,
        "use_gate": gate is not None and random.random() < 0.6, "use_beta_sigmoid": random.random() < 0.6,
        "has_initial_state": pooled or random.random() < 0.5, "has_final_state": pooled or random.random() < 0.7,
        "has_final_indices": pooled and random.random() < 0.2,
    }  # fmt: skip


def _lengths(random: Random, most: int) -> list[int]:
    """Lengths of 1 to 64 sequences, even or ragged, up to a number of tokens; often near lengths that a table knows."""
    if random.random() < 0.3:
        return random.choice([[1000], [4096], [8000], [16000], [1024] * 8, [4096] * 4])
    count = random.choice([1, 1, 1, 2, 4, 8, 16, 64])
    total = min(max(count, round(2 ** random.uniform(7, 14))), most)
    if random.random() < 0.5:
        return [total // count] * count
    cuts = sorted(random.sample(range(1, total), count - 1)) if total > count else list(range(1, count))
    return [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]


def _chunk(lengths: list[int], **changes: Any) -> Shape:
    problem = ChunkProblem(**{**_CHUNK, **changes}, num_tokens=sum(lengths), num_sequences=len(lengths))
    return Shape(_delta_rule_name(problem, len(set(lengths)) > 1), problem, lengths=tuple(lengths))


def _delta_rule_name(problem: ChunkProblem | RecurrentProblem, ragged: bool) -> str:
    grouped = problem.num_q_heads != problem.num_k_heads
    heads = f"{problem.num_q_heads}/{problem.num_k_heads} GQA" if grouped else f"{problem.num_k_heads}/{problem.num_v_heads}"
    state = f"{_short(problem.state_dtype)} {'V' if problem.state_v_first else 'K'}-first"
    tokens = f"{problem.num_tokens} in {problem.num_sequences}{' ragged' if ragged else ''}"
    return f"{heads} x {problem.head_k_dim} {_short(problem.dtype)}, {state}, {tokens}, {_flags(problem)}"


def _flags(problem: DeltaRuleProblem | LogitsProblem) -> str:
    """The fields that no tile depends on, where they are not what engines call with."""
    usual = {**_CHUNK, **_RECURRENT} if isinstance(problem, DeltaRuleProblem) else {**_RAGGED, **_PAGED}
    fields = {name: value for name, value in problem.static_fields().items() if name not in problem.tune_names()}
    if problem.dtype == "bfloat16":
        fields.pop("has_k_scale", None)  # never with these keys
    others = [f"{name} {_short(str(value))}" for name, value in fields.items() if value != usual[name]]
    return ", ".join(others) or "as engines call"


def _short(name: str) -> str:
    return {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "fp8"}.get(name, name)


def _recurrent_calls(random: Random) -> Iterator[Shape]:
    yield _recurrent(8, cu_seqlens_dtype="int64")  # README's own example
    yield _recurrent(128, state_v_first=False)
    yield _recurrent(32, index_dtype="int64", **_heads(16, 48))
    yield _recurrent(64, gate_dtype="float32", beta_dtype="float32", use_gate=False, **_heads(8, 24))
    yield _recurrent(32, tokens=4, **_DRAFTS)
    yield _recurrent(64, state_dtype="bfloat16", has_rounding=True)
    yield _recurrent(256, dtype="float16")
    yield _recurrent(16, tokens=6, has_parent=True, **_DRAFTS)
    while True:
        batch = random.choice([1, 8, 32, 128, 140, 512, round(2 ** random.uniform(0, 9)), round(2 ** random.uniform(0, 9))])
        fields = _recurrent_fields(random)
        yield _recurrent(min(batch, 512 // fields["tokens"]), **fields)


def _recurrent_fields(random: Random) -> dict[str, Any]:
    fields = _delta_rule_fields(random)
    drafts = fields["index_dtype"] is not None and random.random() < 0.3
    fields["tokens"] = random.choice([2, 4, 8]) if drafts else random.choice([1, 1, 1, 1, 2])
    fields["write_every_token"] = drafts
    fields["has_accepted"] = drafts and random.random() < 0.8
    fields["has_parent"] = drafts and random.random() < 0.3
    fields["has_rounding"] = fields["state_dtype"] == "bfloat16" and fields["has_final_state"] and random.random() < 0.4
    return fields


def _recurrent(batch: int, tokens: int = 1, **changes: Any) -> Shape:
    problem = RecurrentProblem(**{**_RECURRENT, **changes}, num_tokens=batch * tokens, num_sequences=batch)
    drafts = (", drafts" if problem.write_every_token else "") + (" in a tree" if problem.has_parent else "")
    return Shape(_delta_rule_name(problem, ragged=False) + drafts, problem, lengths=(tokens,) * batch)


def _mqa_logits_calls(random: Random) -> Iterator[Shape]:
    yield _ragged(4096, 32768, num_heads=16, **_BF16)  # bf16 with float32 weights: 1247 us by default, 681 with the other kernel
    yield _ragged(4096, 32768, num_heads=16, weights_dtype="bfloat16", **_BF16)
    yield _ragged(2048, 16384, num_heads=24)
    yield _ragged(2048, 16384, num_heads=48)
    yield _ragged(4096, 16384, num_heads=32, out_dtype="bfloat16")
    yield _ragged(1024, 65536, clean=False)
    yield _ragged(4096, 8192, "sequences", packed=True)
    yield _ragged(2048, 8192, num_heads=32, head_dim=64)
    while True:
        queries, keys = (round(2 ** random.uniform(low, high)) for low, high in ((7, 12.5), (11, 16)))
        if random.random() < 0.4:
            queries, keys = random.choice([(2048, 8192), (2048, 32768), (4096, 32768), (4000, 30000), (8192, 8192)])
        fields = _logits_fields(random)
        most = 4e9 / (max(fields["num_heads"], 16) / 16) / (2 if fields["dtype"] == "bfloat16" else 1) / 16
        keys = max(1024, min(keys, round(most / queries)))
        ranges = random.choice(["causal", "causal", "full", "sequences"])
        yield _ragged(min(queries, keys), keys, ranges, packed=random.random() < 0.2, **fields)


def _logits_fields(random: Random) -> dict[str, Any]:
    fp8, usual = random.random() < 0.65, random.random() < 0.5
    return {
        "num_heads": random.choice([16, 32, 64] if usual else [4, 8, 16, 24, 32, 48, 64]),
        "head_dim": 128 if usual else random.choice([128, 64]), "dtype": "float8_e4m3fn" if fp8 else "bfloat16",
        "has_k_scale": fp8 and random.random() < 0.85, "weights_dtype": random.choice(["float32", "float32", "bfloat16", None]),
        "relu": random.random() < 0.9, "clean": random.random() < 0.7,
        "out_dtype": "float32" if usual else random.choice(["float32", "bfloat16"]),
    }  # fmt: skip


def _ragged(num_queries: int, num_keys: int, ranges: str = "causal", **changes: Any) -> Shape:
    fields = {**_RAGGED, **changes}
    problem = MqaLogitsProblem(**fields, num_queries=num_queries, num_keys=num_keys, num_columns=num_keys)
    return Shape(f"{num_queries} x {num_keys}, {_logits_name(problem)}, {ranges}", problem, ranges=ranges)


def _logits_name(problem: LogitsProblem) -> str:
    kinds = f"{_short(problem.dtype)} to {_short(problem.out_dtype)}"
    return f"{problem.num_heads} heads x {problem.head_dim} {kinds}, {_flags(problem)}"


def _paged_mqa_logits_calls(random: Random) -> Iterator[Shape]:
    yield _paged(32, 8192, page_size=128)
    yield _paged(32, 8192, page_size=16)
    yield _paged(16, 16384, page_size=544)
    yield _paged(32, 8192, next_n=4)
    yield _paged(64, 16384, num_heads=16, weights_dtype="float32", **_BF16)
    yield _paged(64, 16384, num_heads=24)
    yield _paged(64, 16384, num_heads=48, clean=False)
    yield _paged(16, 32768, num_heads=32, out_dtype="bfloat16", per_draft_lengths=True, next_n=2)
    while True:
        batch, context = round(2 ** random.uniform(0, 7)), round(2 ** random.uniform(9, 16))
        if random.random() < 0.4:
            batch, context = random.choice([(1, 131072), (32, 8192), (64, 32768), (60, 30000), (128, 8192)])
        fields = _logits_fields(random)
        fields["page_size"] = random.choice([16, 64, 64, 64, 128, 544])
        fields["next_n"] = random.choice([1, 1, 1, 2, 4])
        fields["per_draft_lengths"] = random.random() < 0.2
        yield _paged(batch, min(context, (1 << 21) // batch), **fields)


def _paged(batch: int, context: int, **changes: Any) -> Shape:
    fields = {**_PAGED, **changes}
    problem = PagedMqaLogitsProblem(**fields, batch=batch, max_context_len=context)
    pages = f"batch {batch} of {context}, pages of {problem.page_size}, next_n {problem.next_n}"
    return Shape(f"{pages}, {_logits_name(problem)}", problem)


_STREAMS: dict[str, Callable[[Random], Iterator[Shape]]] = {
    "chunk": _chunk_calls, "recurrent": _recurrent_calls, "mqa_logits": _mqa_logits_calls,
    "paged_mqa_logits": _paged_mqa_logits_calls,
}  # fmt: skip
