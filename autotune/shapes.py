"""The problems worth tuning and measuring: per operator, named shapes as serving engines call them.

Delta rule: raw gates and the norm inside the kernel, q, k, v as slices of the convolution's output, a float32 pool with V
first and int32 slots, as the demo and the engines have them. A tuned entry serves other gates, indices and flags too
(`Problem.tune_fields`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gdn.cli.explain import example
from gdn.models import QWEN3_NEXT_80B
from gdn.problems import ChunkProblem, MqaLogitsProblem, PagedMqaLogitsProblem, Problem, RecurrentProblem, TopkProblem


@dataclass(frozen=True)
class Shape:
    """A problem, and what its sizes leave open."""

    name: str
    problem: Problem
    lengths: tuple[int, ...] = ()  # tokens of each sequence (chunk, recurrent, conv1d, conv1d_update, gdn_decode)
    ranges: str = "causal"  # of keys, as gdn.testing.inputs_logits names them (mqa_logits)

    @property
    def op(self) -> str:
        return self.problem.op


_RAGGED = (37, 4000, 511, 2048, 7, 6001, 1200, 2580)


def _chunk(heads: tuple[int, int], lengths: Sequence[int], label: str, head_dim: int = 128) -> Shape:
    num_k_heads, num_v_heads = heads
    problem = ChunkProblem(
        num_q_heads=num_k_heads,
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        head_k_dim=head_dim,
        head_v_dim=head_dim,
        dtype="bfloat16",
        state_dtype="float32",
        gate_dtype="bfloat16",
        beta_dtype="bfloat16",
        cu_seqlens_dtype="int32",
        index_dtype="int32",
        state_v_first=True,
        use_qk_l2norm=True,
        use_gate=True,
        use_beta_sigmoid=True,
        has_initial_state=True,
        has_final_state=True,
        has_final_indices=False,
        has_mask=True,
        has_checkpoints=False,
        num_tokens=sum(lengths),
        num_sequences=len(lengths),
    )
    return Shape(f"{num_k_heads}/{num_v_heads} {label}", problem, lengths=tuple(lengths))


def _published(head_dim: int, heads: int, lengths: Sequence[int], label: str) -> Shape:
    """A shape of the table that FLA is usually compared on: as many key as value heads."""
    return replace(_chunk((heads, heads), lengths, "", head_dim), name=f"published {label} x {heads} x {head_dim}")


def _padded(batch: int, tokens: int, heads: int, head_dim: int) -> Shape:
    return _published(head_dim, heads, [tokens] * batch, f"{batch} x {tokens}")


def _packed(lengths: Sequence[int], heads: int, head_dim: int, label: str = "") -> Shape:
    return _published(head_dim, heads, lengths, f"packed {len(lengths)}, {sum(lengths)}{label}")


def _recurrent(heads: tuple[int, int], batch: int, state_dtype: str = "float32", drafts: int = 0) -> Shape:
    num_k_heads, num_v_heads = heads
    tokens = 1 + drafts
    problem = RecurrentProblem(
        num_q_heads=num_k_heads,
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        head_k_dim=128,
        head_v_dim=128,
        dtype="bfloat16",
        state_dtype=state_dtype,
        gate_dtype="bfloat16",
        beta_dtype="bfloat16",
        cu_seqlens_dtype="int32",
        index_dtype="int32",
        state_v_first=True,
        use_qk_l2norm=True,
        use_gate=True,
        use_beta_sigmoid=True,
        has_initial_state=True,
        has_final_state=True,
        has_final_indices=False,
        write_every_token=drafts > 0,
        has_accepted=drafts > 0,
        has_parent=False,
        has_rounding=False,
        num_tokens=batch * tokens,
        num_sequences=batch,
    )
    steps = f", {tokens} tokens each" if drafts else ""
    kind = {"float32": "f32", "bfloat16": "bf16"}[state_dtype]
    return Shape(f"{num_k_heads}/{num_v_heads} batch {batch} {kind}{steps}", problem, lengths=(tokens,) * batch)


_FP8_LOGITS = MqaLogitsProblem(
    num_heads=64,
    num_kv_heads=1,
    head_dim=128,
    dtype="float8_e4m3fn",
    has_k_scale=True,
    weights_dtype="float32",
    relu=True,
    clean=True,
    out_dtype="float32",
    packed=False,
    num_queries=4096,
    num_keys=32768,
    num_columns=32768,
)


def _ragged(
    num_queries: int,
    num_keys: int,
    num_heads: int,
    ranges: str = "causal",
    bf16: bool = False,
    weights: bool = True,
    clean: bool = True,
) -> Shape:
    """weights: without, as against the keys of groups, there are no scales of keys either. clean: False as in indexer_topk."""
    problem = replace(_FP8_LOGITS, num_heads=num_heads, num_queries=num_queries, num_keys=num_keys, num_columns=num_keys)
    if bf16:
        problem = replace(problem, dtype="bfloat16", has_k_scale=False, weights_dtype="bfloat16")
    if not weights:
        problem = replace(problem, has_k_scale=False, weights_dtype=None)
    problem = replace(problem, clean=clean)
    kind = ("bf16" if bf16 else "fp8") + ("" if weights else ", no weights") + ("" if clean else ", not clean")
    return Shape(f"{num_queries} x {num_keys}, {num_heads} heads, {kind}, {ranges}", problem, ranges=ranges)


def _paged(batch: int, context: int, num_heads: int, next_n: int = 1, bf16: bool = False) -> Shape:
    problem = PagedMqaLogitsProblem(
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=128,
        dtype="bfloat16" if bf16 else "float8_e4m3fn",
        has_k_scale=not bf16,
        weights_dtype="bfloat16" if bf16 else "float32",
        relu=True,
        clean=True,
        out_dtype="float32",
        page_size=64,
        next_n=next_n,
        per_draft_lengths=False,
        batch=batch,
        max_context_len=context,
    )
    kind = "bf16" if bf16 else "fp8"
    return Shape(f"batch {batch}, context {context}, {num_heads} heads, next_n {next_n}, {kind}", problem)


def _topk(num_rows: int, num_columns: int, k: int = 2048, dtype: str = "float32", starts: bool = True) -> Shape:
    """starts: without, rows begin at column 0, as those of paged logits do."""
    bound = "int32" if starts else None
    problem = TopkProblem(dtype, bound, "int32", "index", k=k, num_rows=num_rows, num_columns=num_columns)
    kind = {"float32": "f32", "bfloat16": "bf16"}[dtype] + ("" if starts else ", no starts")
    return Shape(f"{num_rows} x {num_columns}, k {k}, {kind}", problem)


def _example(op: str, heads: tuple[int, int], **changes: Any) -> Any:
    """A step's problem as a serving stack calls it, less these fields."""
    num_k_heads, num_v_heads = heads
    problem: Any = example(op, replace(QWEN3_NEXT_80B, num_k_heads=num_k_heads, num_v_heads=num_v_heads), fp8=True)
    return replace(problem, **changes)


def _conv1d(heads: tuple[int, int], lengths: Sequence[int], label: str) -> Shape:
    problem = _example("conv1d", heads, num_tokens=sum(lengths), num_sequences=len(lengths))
    return Shape(f"{heads[0]}/{heads[1]} {label}", problem, lengths=tuple(lengths))


def _conv1d_update(heads: tuple[int, int], batch: int, drafts: int = 0, tree: bool = False) -> Shape:
    tokens = 1 + drafts
    problem = _example(
        "conv1d_update",
        heads,
        cu_seqlens_dtype="int32" if drafts else None,
        has_columns=drafts > 0,
        has_accepted=drafts > 0,
        has_parent=tree,
        num_tokens=batch * tokens,
        num_sequences=batch,
    )
    steps = f", {tokens} tokens each" + (", a tree" if tree else "") if drafts else ""
    return Shape(f"{heads[0]}/{heads[1]} batch {batch}{steps}", problem, lengths=(tokens,) * batch)


def _decode(heads: tuple[int, int], batch: int, state_dtype: str = "float32", drafts: int = 0) -> Shape:
    tokens = 1 + drafts
    problem = _example(
        "gdn_decode",
        heads,
        state_dtype=state_dtype,
        cu_seqlens_dtype="int32" if drafts else None,
        has_columns=drafts > 0,
        has_accepted=drafts > 0,
        num_tokens=batch * tokens,
        num_sequences=batch,
    )
    steps = f", {tokens} tokens each" if drafts else ""
    kind = {"float32": "f32", "bfloat16": "bf16"}[state_dtype]
    return Shape(f"{heads[0]}/{heads[1]} batch {batch} {kind}{steps}", problem, lengths=(tokens,) * batch)


def _split(heads: tuple[int, int], num_tokens: int) -> Shape:
    return Shape(f"{heads[0]}/{heads[1]} {num_tokens}", _example("split", heads, num_tokens=num_tokens))


def _gating(num_heads: int, num_tokens: int) -> Shape:
    return Shape(f"{num_tokens} x {num_heads}", _example("gating", (num_heads, num_heads), num_tokens=num_tokens))


def _norm(num_tokens: int, num_heads: int, strided: bool = False) -> Shape:
    """strided: the gate is a slice of its projection; otherwise all rows lie behind each other, and are of one head."""
    heads, rows = (num_heads, num_tokens) if strided else (1, num_tokens * num_heads)
    problem = _example("rms_norm_gated", (num_heads, num_heads), num_heads=heads, num_tokens=rows)
    return Shape(f"{num_tokens} x {num_heads} x 128" + (", gate in its projection" if strided else ""), problem)


def _prepare(num_tokens: int, num_heads: int = 16, fp8: bool = True) -> Shape:
    problem: Any = example("prepare_indexer", replace(QWEN3_NEXT_80B, index_num_heads=num_heads), fp8=fp8)
    kind = "fp8" if fp8 else "bf16"
    return Shape(f"{num_tokens} x {num_heads} heads, {kind}", replace(problem, num_tokens=num_tokens))


def _quantize(num_rows: int) -> Shape:
    return Shape(f"{num_rows} x 128", _example("quantize_fp8", (16, 32), num_tokens=num_rows))


def _write(num_tokens: int) -> Shape:
    return Shape(f"{num_tokens} tokens, fp8", _example("write_indexer_cache", (16, 32), num_tokens=num_tokens))


def _gather(lengths: Sequence[int], label: str) -> Shape:
    problem = _example("gather_indexer_cache", (16, 32), num_rows=sum(lengths), num_sequences=len(lengths))
    return Shape(f"{label}, fp8", problem, lengths=tuple(lengths))


def _compress(lengths: Sequence[int], label: str) -> Shape:
    return Shape(label, _example("compress_indexer_keys", (16, 32), num_tokens=sum(lengths)), lengths=tuple(lengths))


def _expand(num_tokens: int) -> Shape:
    return Shape(f"{num_tokens} x 512 groups", _example("expand_topk_groups", (16, 32), num_tokens=num_tokens))


_SHAPES: dict[str, tuple[Shape, ...]] = {
    "chunk": (
        _chunk((16, 32), [1024], "1024"),
        _chunk((16, 32), [4096], "4096"),
        _chunk((16, 32), [8192], "8192"),
        _chunk((16, 32), [32768], "32768"),
        _chunk((16, 32), [1024] * 8, "8 x 1024"),
        _chunk((16, 32), _RAGGED, "ragged 16384"),
        _chunk((4, 8), [8192], "8192"),
        _chunk((4, 8), [32768], "32768"),
        _chunk((4, 8), [4096] * 4, "4 x 4096"),
        _chunk((4, 8), (12000, 100, 3000, 1000), "ragged 16100"),
        _chunk((2, 4), [32768], "32768"),
        _chunk((16, 64), [8192], "8192"),
    ),
    "recurrent": (
        *(_recurrent((16, 32), batch) for batch in (1, 8, 32, 128, 512)),
        *(_recurrent((16, 32), batch, "bfloat16") for batch in (128, 512)),
        *(_recurrent((4, 8), batch) for batch in (1, 128)),
        *(_recurrent((16, 32), batch, drafts=3) for batch in (32, 128)),
    ),
    "mqa_logits": (
        _ragged(2048, 8192, 64, "full"),
        _ragged(4096, 32768, 64),
        _ragged(4096, 32768, 32),
        _ragged(4096, 32768, 16),
        _ragged(8192, 8192, 64),
        _ragged(1024, 131072, 64),
        _ragged(8192, 8192, 16, bf16=True),
        _ragged(4096, 32768, 16, bf16=True),
        _ragged(4096, 8192, 4, weights=False),
    ),
    "paged_mqa_logits": (
        _paged(32, 8192, 64),
        _paged(64, 32768, 64),
        _paged(64, 65536, 64),
        _paged(64, 32768, 32),
        _paged(128, 8192, 64, next_n=2),
        _paged(1, 131072, 64),
        _paged(64, 32768, 16),
        _paged(64, 32768, 16, bf16=True),
    ),
    "topk": (
        _topk(4096, 8192),
        _topk(4096, 8192, 512),
        _topk(4096, 32768),
        _topk(64, 65536),
        _topk(64, 131072),
        _topk(1024, 131072),
        _topk(4096, 32768, dtype="bfloat16"),
    ),
    "conv1d": (
        _conv1d((16, 32), [8192], "8192"),
        _conv1d((16, 32), [1024] * 8, "8 x 1024"),
        _conv1d((16, 32), [64] * 128, "128 x 64"),
        _conv1d((16, 32), [1024], "1024"),
        _conv1d((4, 8), [8192], "8192"),
    ),
    "conv1d_update": (
        *(_conv1d_update((16, 32), batch) for batch in (1, 32, 128, 512)),
        _conv1d_update((16, 32), 128, drafts=3),
        _conv1d_update((16, 32), 128, drafts=3, tree=True),
    ),
    "gdn_decode": (
        *(_decode((16, 32), batch) for batch in (1, 8, 32, 128, 512)),
        *(_decode((16, 32), batch, "bfloat16") for batch in (128, 512)),
        *(_decode((4, 8), batch) for batch in (1, 8, 32, 128)),
        *(_decode((16, 32), batch, drafts=3) for batch in (32, 128)),
    ),
    "split": (_split((16, 32), 8192), _split((16, 32), 128), _split((4, 8), 8192)),
    "gating": (_gating(32, 8192), _gating(32, 128)),
    "rms_norm_gated": (_norm(8192, 32), _norm(128, 32), _norm(8192, 32, strided=True), _norm(128, 32, strided=True)),
    "prepare_indexer": (
        *(_prepare(tokens) for tokens in (1, 64, 4096, 8192)),
        _prepare(8192, 64),
        _prepare(8192, fp8=False),
    ),
    "quantize_fp8": (_quantize(16), _quantize(64 * 16), _quantize(8192 * 16)),
    "write_indexer_cache": (_write(1), _write(64), _write(8192)),
    "gather_indexer_cache": (_gather([64], "64"), _gather([8192], "8192"), _gather([32768] * 4, "4 x 32768")),
    "compress_indexer_keys": (_compress([1] * 64, "64 x 1"), _compress([4] * 64, "64 x 4"), _compress([8192], "8192")),
    "expand_topk_groups": (_expand(1), _expand(64), _expand(4096), _expand(8192)),
}


# Tuned, and measured where they are named: they would make the README's table long.
_TUNED_TOO: dict[str, tuple[Shape, ...]] = {
    "topk": (_topk(64, 65536, starts=False), _topk(64, 131072, starts=False)),
    "mqa_logits": (
        _ragged(4096, 32768, 8),
        *(_ragged(queries, 32768, heads, clean=False) for heads in (16, 64) for queries in (2048, 4096)),
    ),
    "recurrent": (
        *(_recurrent((16, 32), batch, "bfloat16") for batch in (1, 8, 32)),
        *(_recurrent((4, 8), batch) for batch in (8, 32, 512)),
        *(_recurrent((4, 8), batch, "bfloat16") for batch in (1, 8, 32, 128, 512)),
        _recurrent((16, 32), 8, drafts=3),
        *(_recurrent((16, 32), batch, "bfloat16", drafts=3) for batch in (32, 128)),
        _recurrent((4, 8), 32, drafts=3),
    ),
}


# Measured, not tuned: a long prompt of many heads, calls too short to matter alone, the table of 27 shapes that others publish, a
# cache as large as that of 64 heads.
_MEASURED_ONLY: dict[str, tuple[Shape, ...]] = {
    "chunk": (
        _chunk((16, 64), [32768], "32768"),
        *(_chunk((16, 32), [tokens], f"short {tokens}") for tokens in (1, 16, 64, 128, 256, 512)),
        *(_chunk((16, 32), [tokens] * 64, f"short 64 x {tokens}") for tokens in (16, 64, 128)),
        _padded(1, 63, 1, 64), _padded(2, 500, 3, 60), _padded(2, 1000, 3, 64), _padded(3, 1024, 4, 100),
        _padded(4, 1024, 4, 128), _padded(2, 1500, 4, 128), _padded(4, 2048, 8, 64), _padded(8, 512, 8, 64),
        _padded(16, 512, 8, 64), _padded(32, 256, 8, 64), _padded(64, 128, 8, 64), _padded(8, 512, 8, 128),
        _padded(16, 256, 8, 128), _padded(32, 128, 8, 128), _padded(64, 64, 8, 128),
        _packed((15,), 4, 60), _packed((256, 244, 500), 4, 64), _packed((333, 333, 334), 4, 64, " even"),
        _packed((15, 85, 200, 900, 800), 4, 100), _packed((8192,), 4, 60), _packed((512,) * 8, 4, 64),
        _packed((512,) * 16, 4, 64), _packed((256,) * 32, 4, 64), _packed((128,) * 64, 4, 64), _packed((128,) * 32, 4, 128),
        _packed((104,) * 64, 4, 128), _packed((36,) * 128, 4, 64),
    ),
    "paged_mqa_logits": (_paged(64, 65536, 16),),
}  # fmt: skip


def operators() -> list[str]:
    return list(_SHAPES)


def shapes(op: str, pattern: str = "", measured: bool = False, tuned: bool = False) -> list[Shape]:
    """The shapes of an operator whose name contains pattern, of those that are both tuned and in the README's table.

    measured, tuned: also those that are only measured, only tuned.

    ValueError where there is no such operator or shape.
    """
    if op not in _SHAPES:
        raise ValueError(f"op: expected one of {', '.join(_SHAPES)}, got {op!r}")
    known = [*_SHAPES[op], *(_TUNED_TOO.get(op, ()) if tuned else ()), *(_MEASURED_ONLY.get(op, ()) if measured else ())]
    found = [shape for shape in known if pattern in shape.name]
    if not found:
        raise ValueError(f"shapes: expected part of one of {[shape.name for shape in known]}, got {pattern!r}")
    return found
