"""One frozen dataclass per operator: what a kernel is compiled for, and what it is tuned for.

Every field says of which keys it is a part:

- `field(metadata=TUNES)`: static, and changes which tiles are best: heads, dims, layouts, dtypes of the large tensors. Part of
  the compile key and of the tune key.
- `field(metadata=COMPILES)`: static, and the best tiles do not depend on it: dtypes of indices, gates and weights, masks, flags.
  Part of the compile key alone; whether tiles are legal with it is for the kernel's `fits` to say.
- `size()`: a count that varies from call to call. It chooses a configuration and never appears in compiled code.

Everything is plain Python, so problems pickle, hash, compare and print; dtypes are torch's names without the `torch.` prefix
("bfloat16", "float8_e4m3fn").

Leaf module: imports nothing of this project.
"""

import functools
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1,
    "int64": 8, "int32": 4, "bool": 1,
}  # fmt: skip


TUNES: dict[str, bool] = {"tunes": True}
COMPILES: dict[str, bool] = {"tunes": False}


def size() -> Any:
    """A dataclass field that is a size: it chooses among tuned entries, and is no part of the compile key."""
    return field(metadata={"size": True})


@functools.cache
def _names(problem: type, sizes: bool) -> tuple[str, ...]:
    """The names of its fields that are sizes, or of the others. Kept: a call of new sizes asks several times."""
    return tuple(f.name for f in fields(problem) if bool(f.metadata.get("size")) == sizes)


@functools.cache
def _tune_names(problem: type) -> tuple[str, ...]:
    """The names of its fields that are part of the tune key."""
    undecided = [f.name for f in fields(problem) if not {"size", "tunes"} & f.metadata.keys()]
    if undecided:
        kinds = "metadata=TUNES, metadata=COMPILES or size()"
        raise TypeError(f"{problem.__name__}: expected {kinds} on every field, got none on {', '.join(undecided)}")
    return tuple(f.name for f in fields(problem) if f.metadata.get("tunes"))


def _text(values: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())


class Problem:
    """Common behaviour of the problem dataclasses."""

    op: ClassVar[str]  # the operator's name in the registry, the tables and GDN_BACKEND_<OP>

    def static_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _names(type(self), False)}  # type: ignore[arg-type]

    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _names(type(self), True)}  # type: ignore[arg-type]

    def static_key(self) -> str:
        """Stable text form of the static fields: the compile key."""
        return _text(self.static_fields())

    @classmethod
    def tune_names(cls) -> tuple[str, ...]:
        """The names of the fields of the tune key. TypeError where a static field does not say whether it is one."""
        return _tune_names(cls)  # type: ignore[arg-type]

    def tune_fields(self) -> dict[str, Any]:
        """The static fields that change which tiles are best."""
        return {name: getattr(self, name) for name in self.tune_names()}

    def tune_key(self) -> str:
        """Stable text form of these: problems of one tune key share the entries of a tuned table."""
        return _text(self.tune_fields())

    def flops(self) -> int:
        """Useful floating-point operations of the algorithm, for rooflines."""
        raise NotImplementedError

    def bytes_moved(self) -> int:
        """Fewest bytes through device memory: every input read once, every output written once."""
        raise NotImplementedError


@dataclass(frozen=True)
class DeltaRuleProblem(Problem):
    """What the chunk and the recurrent operator share.

    State heads: with GVA (num_v_heads = r * num_k_heads, num_q_heads = num_k_heads) there is one state per value head;
    with GQA (num_q_heads = r * num_k_heads, num_v_heads = num_k_heads) one per query head. So
    `num_state_heads = max(num_q_heads, num_v_heads)`, and state head s reads q head `s // (num_state_heads // num_q_heads)`,
    k head `s // (num_state_heads // num_k_heads)`, v head `s // (num_state_heads // num_v_heads)`.
    """

    num_q_heads: int = field(metadata=TUNES)
    num_k_heads: int = field(metadata=TUNES)
    num_v_heads: int = field(metadata=TUNES)
    head_k_dim: int = field(metadata=TUNES)
    head_v_dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)  # of q, k, v and o: bfloat16 | float16 (float32, float64 on the reference)
    state_dtype: str = field(metadata=TUNES)  # of initial_state / the pool: float32 | bfloat16; float32 where no state is given
    gate_dtype: str | None = field(metadata=COMPILES)  # of g (or raw a); None = no decay
    beta_dtype: str | None = field(metadata=COMPILES)  # of beta (or raw b); None = beta is 1
    cu_seqlens_dtype: str = field(metadata=COMPILES)  # int32 | int64
    # of state_indices and final_state_indices; None = initial_state is one row per sequence
    index_dtype: str | None = field(metadata=COMPILES)
    state_v_first: bool = field(metadata=TUNES)  # state is [.., V, K] instead of [.., K, V]
    use_qk_l2norm: bool = field(metadata=COMPILES)
    use_gate: bool = field(metadata=COMPILES)  # g is raw a: decay = exp(-exp(A_log) * softplus(a + dt_bias))
    use_beta_sigmoid: bool = field(metadata=COMPILES)  # beta is raw b
    has_initial_state: bool = field(metadata=COMPILES)  # an initial_state tensor is given; False = all states start from zero
    has_final_state: bool = field(metadata=COMPILES)  # a state is written: into final_state (new tensor) or the pool
    has_final_indices: bool = field(metadata=COMPILES)  # final_state_indices given: the write slots

    @property
    def num_state_heads(self) -> int:
        return max(self.num_q_heads, self.num_v_heads)

    @property
    def pooled(self) -> bool:
        return self.index_dtype is not None

    def _token_bytes(self) -> int:
        """Bytes of one token of q, k, v, o, g and beta."""
        heads = (self.num_q_heads + self.num_k_heads) * self.head_k_dim
        heads += (self.num_v_heads + self.num_state_heads) * self.head_v_dim
        gates = sum(DTYPE_BYTES[d] for d in (self.gate_dtype, self.beta_dtype) if d is not None)
        return heads * DTYPE_BYTES[self.dtype] + gates * self.num_state_heads

    def _state_bytes(self, dtype: str) -> int:
        return self.num_state_heads * self.head_k_dim * self.head_v_dim * DTYPE_BYTES[dtype]


def unserved_dtypes(problem: DeltaRuleProblem) -> str | None:
    """In a refusal's words, what kernels of 16-bit tokens cannot take; None: nothing."""
    if problem.dtype not in ("bfloat16", "float16"):
        return f"requires q, k, v of bfloat16 or float16, got {problem.dtype}"
    if problem.state_dtype not in ("float32", "bfloat16"):
        return f"requires a state of float32 or bfloat16, got {problem.state_dtype}"
    for name, dtype in (("g", problem.gate_dtype), ("beta", problem.beta_dtype)):
        if dtype is not None and dtype not in ("float32", "bfloat16", "float16"):
            return f"requires {name} of float32, bfloat16 or float16, got {dtype}"
    return None


@dataclass(frozen=True)
class ChunkProblem(DeltaRuleProblem):
    """`gdn.chunk_gated_delta_rule` on packed tokens.

    launch(compiled, q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, has_initial_state, final_state,
           final_state_indices, cu_seqlens, checkpoint_offsets, checkpoint_slots, out, workspace, scale, null_slot)
        q [1, L, Hq, K], k [1, L, Hk, K], v [1, L, HV, V]   strided, last dim contiguous, base and strides multiples of 16
            bytes (strides of 8 bytes where a head is no multiple of 16)
        g, beta [1, L, HS] any strides or None; A_log, dt_bias [HS] float32 contiguous or None
        initial_state [slots or N, HS, K, V] (or V first), slot stride any multiple of 16 bytes, or None
        state_indices [>= N] any stride or None; has_initial_state [>= N] bool or None (None = all True)
        final_state: the pool itself when pooled, else a new [N, HS, ...] float32 tensor, or None (nothing is written)
        final_state_indices [>= N] or None (= state_indices); cu_seqlens [N + 1]; out [1, L, HS, V], last dim contiguous
        workspace: uint8 of workspace_bytes(problem, config), 256-byte aligned, contents undefined; None where that is 0
        scale float, null_slot int: runtime scalars
    Every row of out is written: rows of padding sequences and rows at or beyond cu_seqlens[N] are zero.
    """

    op: ClassVar[str] = "chunk"

    has_mask: bool = field(metadata=COMPILES)  # has_initial_state given
    has_checkpoints: bool = field(metadata=COMPILES)  # checkpoint_offsets / checkpoint_slots given
    num_tokens: int = size()
    num_sequences: int = size()

    def flops(self) -> int:
        # The chunk form at 64 tokens: K K^T, Q K^T (per state head), the two 64-wide products, and three with the state.
        k, v = self.head_k_dim, self.head_v_dim
        per_token = 2 * 64 * (2 * k + 2 * v) + 2 * 3 * k * v
        return self.num_tokens * self.num_state_heads * per_token

    def bytes_moved(self) -> int:
        states = self.num_sequences * self.has_initial_state * self._state_bytes(self.state_dtype)
        final_dtype = self.state_dtype if self.pooled else "float32"
        states += self.num_sequences * self.has_final_state * self._state_bytes(final_dtype)
        return self.num_tokens * self._token_bytes() + states


@dataclass(frozen=True)
class RecurrentProblem(DeltaRuleProblem):
    """`gdn.fused_recurrent_gated_delta_rule` on packed ragged tokens.

    launch(compiled, q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, num_accepted_tokens, final_state,
           final_state_indices, cu_seqlens, parent_token, rounding_seed, out, scale, null_slot)
        as ChunkProblem's, and: state_indices [>= N] or, with write_every_token, [>= N, columns] (any strides);
        num_accepted_tokens [>= N] int32 or None; final_state_indices of the rank of state_indices;
        parent_token [L] int32 or None; rounding_seed int64 [1] or None.
    Without write_every_token only the state after the last token is stored. With it (2-D indices) the state is read from
    column num_accepted_tokens - 1 (column 0 without), and the state after token i goes to column i (tokens beyond the last
    column are not stored). A sequence without tokens touches nothing. Every row of out is written, padding with zeros.
    """

    op: ClassVar[str] = "recurrent"

    write_every_token: bool = field(metadata=TUNES)  # 2-D indices
    has_accepted: bool = field(metadata=COMPILES)  # num_accepted_tokens given
    has_parent: bool = field(metadata=TUNES)  # tree drafts
    has_rounding: bool = field(metadata=COMPILES)  # stochastic rounding of a bf16 state
    num_tokens: int = size()
    num_sequences: int = size()

    def flops(self) -> int:
        return self.num_tokens * self.num_state_heads * 6 * self.head_k_dim * self.head_v_dim

    def bytes_moved(self) -> int:
        reads = self.num_sequences * self.has_initial_state
        writes = self.num_tokens if self.write_every_token else self.num_sequences
        final_dtype = self.state_dtype if self.pooled else "float32"
        states = reads * self._state_bytes(self.state_dtype)
        states += writes * self.has_final_state * self._state_bytes(final_dtype)
        return self.num_tokens * self._token_bytes() + states


@dataclass(frozen=True)
class LogitsProblem(Problem):
    """What ragged and paged indexer logits share: score = scale * sum_h w[h] * act(q[h] . k[h // group]) (* k_scale)."""

    num_heads: int = field(metadata=TUNES)
    num_kv_heads: int = field(metadata=TUNES)
    head_dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)  # of q: float8_e4m3fn | bfloat16; keys are of the same kind
    has_k_scale: bool = field(metadata=COMPILES)  # keys carry one float32 scale per (row, kv head)
    weights_dtype: str | None = field(metadata=COMPILES)  # None = weights are 1
    relu: bool = field(metadata=COMPILES)
    clean: bool = field(metadata=COMPILES)  # write -inf outside a row's range (False: unspecified there)
    out_dtype: str = field(metadata=TUNES)  # float32 | bfloat16

    def _key_bytes(self) -> int:
        return self.num_kv_heads * (self.head_dim * DTYPE_BYTES[self.dtype] + 4 * self.has_k_scale)

    def _query_bytes(self) -> int:
        weights = DTYPE_BYTES[self.weights_dtype] if self.weights_dtype is not None else 0
        return self.num_heads * (self.head_dim * DTYPE_BYTES[self.dtype] + weights)


@dataclass(frozen=True)
class MqaLogitsProblem(LogitsProblem):
    """`gdn.mqa_logits`: ragged prefill.

    launch(compiled, q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out, scale, least=0)
        q [M, H, D] contiguous; k [Nk, kv_heads, D] contiguous; k_scale [Nk, kv_heads] float32 or None
        weights [M, H], any row stride, last dim contiguous, or None; cu_seqlen_ks, cu_seqlen_ke [M] int32
        out [M, W], last dim contiguous, row stride any: W = Nk, or with packed W = max_seqlen_k and column 0 is key ks[i]
    A range is clamped to [0, Nk]; ks >= ke is empty. Of a row of at most `least` keys nothing need be scored (0 = every row);
    only without `clean`.
    """

    op: ClassVar[str] = "mqa_logits"

    packed: bool = field(metadata=COMPILES)  # out columns are relative to ks[i]
    num_queries: int = size()
    num_keys: int = size()
    num_columns: int = size()

    def flops(self) -> int:
        return 2 * self.num_queries * min(self.num_keys, self.num_columns) * self.num_heads * self.head_dim

    def bytes_moved(self) -> int:
        written = self.num_queries * self.num_columns * DTYPE_BYTES[self.out_dtype]
        return self.num_queries * self._query_bytes() + self.num_keys * self._key_bytes() + written


@dataclass(frozen=True)
class PagedMqaLogitsProblem(LogitsProblem):
    """`gdn.paged_mqa_logits`: decode from cache pages.

    launch(compiled, q, cache, weights, context_lens, block_tables, out, scale, least=0)
        q [B, next_n, H, D] contiguous
        cache: with has_k_scale uint8 [pages, page_size * kv_heads * (D + 4)] (values of the whole page first, then its
            float32 scales), else dtype [pages, page_size * kv_heads * D]; last dim contiguous, page stride any multiple
            of 16 bytes
        weights [B * next_n, H] or None; context_lens int32 [B], or [B, next_n] with per_draft_lengths
        block_tables int32 [B, max_pages], any row stride; out [B * next_n, max_context_len], last dim contiguous
    With one length per sequence, draft i sees context_len - next_n + 1 + i keys. Lengths are clamped to
    [0, min(max_context_len, max_pages * page_size)]. least: as above.
    """

    op: ClassVar[str] = "paged_mqa_logits"

    page_size: int = field(metadata=TUNES)
    next_n: int = field(metadata=TUNES)
    per_draft_lengths: bool = field(metadata=COMPILES)
    batch: int = size()
    max_context_len: int = size()

    def flops(self) -> int:
        """As if every context were max_context_len long."""
        return 2 * self.batch * self.next_n * self.max_context_len * self.num_heads * self.head_dim

    def bytes_moved(self) -> int:
        """As if every context were max_context_len long."""
        scores = self.next_n * self.max_context_len * DTYPE_BYTES[self.out_dtype]
        return self.batch * (self.next_n * self._query_bytes() + self.max_context_len * self._key_bytes() + scores)


@dataclass(frozen=True)
class TopkProblem(Problem):
    """`gdn.topk_indices`.

    launch(compiled, logits, row_starts, row_ends, out, list_short=0, num_keys=-1, drafts=1)
        logits [rows, n] any row stride, last dim contiguous; row_starts, row_ends [rows] any stride, any values, or None
        out int32 [rows, k], any row stride, last dim contiguous
        list_short: 1 = a row of at most k columns lists them all, and none of its logits is read
        num_keys: not -1, with both bounds = they are ranges of so many keys, and column 0 is the first key of each
        drafts: not 1, without row_starts = row_ends [rows / drafts] are those of the last of so many rows, and each row before
            it has one column less
    Every entry of out is written. Only a row's own range is read.
    """

    op: ClassVar[str] = "topk"

    dtype: str = field(metadata=TUNES)  # of logits: float32 | bfloat16 (others on the reference)
    starts_dtype: str | None = field(metadata=COMPILES)  # int32 | int64; None = rows start at column 0
    ends_dtype: str | None = field(metadata=COMPILES)  # int32 | int64; None = rows end with the last column
    sorted_by: str = field(metadata=TUNES)  # index | score
    k: int = size()  # a count like the others: it compiles nothing anew
    num_rows: int = size()
    num_columns: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        """As if every row were num_columns long."""
        return self.num_rows * (self.num_columns * DTYPE_BYTES[self.dtype] + 4 * self.k)


def _bytes(dtype: str | None) -> int:
    return 0 if dtype is None else DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class ConvolutionProblem(Problem):
    """What prefill and decode of the causal depthwise convolution share; see spec of the two below.

    A pool of windows has its channels contiguous in memory and every other stride a multiple of 16 bytes
    (`state_channels_contiguous`: neighbouring channels are read together), or any strides.
    """

    dim: int = field(metadata=TUNES)
    width: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)  # of x and out: bfloat16 | float16
    weight_dtype: str = field(metadata=COMPILES)
    bias_dtype: str | None = field(metadata=COMPILES)
    silu: bool = field(metadata=COMPILES)
    state_dtype: str | None = field(metadata=TUNES)  # None = no pool: start from zeros, keep nothing
    state_channels_contiguous: bool = field(metadata=TUNES)
    cu_seqlens_dtype: str | None = field(metadata=COMPILES)  # int32 | int64; None = every row of x is a sequence (decode only)
    # of the slot indices; None = the slot of a sequence is its number, and none is padding
    index_dtype: str | None = field(metadata=COMPILES)

    def _filter_bytes(self) -> int:
        return self.dim * (self.width * DTYPE_BYTES[self.weight_dtype] + _bytes(self.bias_dtype))

    def _window_bytes(self) -> int:
        return self.dim * (self.width - 1) * _bytes(self.state_dtype)


@dataclass(frozen=True)
class Conv1dProblem(ConvolutionProblem):
    """`gdn.causal_conv1d_fn`: packed prompts.

    launch(compiled, x, weight, bias, conv_states, cu_seqlens, cache_indices, has_initial_state, checkpoint_offsets,
           checkpoint_slots, out, null_slot)
        x, out [L, dim]: last dim contiguous, base and row strides multiples of 16 bytes; dim a multiple of 8
        weight [dim, width], bias [dim] or None: contiguous, bases multiples of 16 bytes
        conv_states [slots, dim, >= width - 1] or None; cu_seqlens [N + 1]; cache_indices [>= N] any stride, or None
        has_initial_state [>= N] uint8 (the bool tensor viewed as bytes) contiguous, or None (= all True)
        checkpoint_offsets, checkpoint_slots [>= N, C] of checkpoint_dtype, any strides, or None
    Every row of out is written: rows of padding sequences and rows at or beyond cu_seqlens[N] are zero. The slot of a
    sequence is read before it is written; a checkpoint is written after the sequence's own slot.
    """

    op: ClassVar[str] = "conv1d"

    has_mask: bool = field(metadata=COMPILES)  # has_initial_state given
    checkpoint_dtype: str | None = field(metadata=COMPILES)  # int32 | int64; None = no checkpoints
    num_tokens: int = size()
    num_sequences: int = size()

    def flops(self) -> int:
        return 2 * self.num_tokens * self.dim * self.width

    def bytes_moved(self) -> int:
        rows = 2 * self.num_tokens * self.dim * DTYPE_BYTES[self.dtype]
        return rows + self._filter_bytes() + 2 * self.num_sequences * self._window_bytes()


@dataclass(frozen=True)
class Conv1dUpdateProblem(ConvolutionProblem):
    """`gdn.causal_conv1d_update`: one decode step.

    launch(compiled, x, weight, bias, conv_state, state_indices, num_accepted_tokens, cu_seqlens, parent_token, out,
           null_slot)
        x, out, weight, bias, conv_state as in Conv1dProblem; x may have more rows than cu_seqlens[N]: zero in out
        state_indices [>= N], or [>= N, columns] with has_columns, any strides, or None
        num_accepted_tokens [>= N] int32 any stride, or None; parent_token [L] int32 contiguous or None
        cu_seqlens [N + 1], or None: one row per sequence
    """

    op: ClassVar[str] = "conv1d_update"

    has_columns: bool = field(metadata=TUNES)  # 2-D indices: drafts
    has_accepted: bool = field(metadata=COMPILES)  # num_accepted_tokens given
    has_parent: bool = field(metadata=TUNES)  # drafts are a tree
    num_tokens: int = size()
    num_sequences: int = size()

    @property
    def keeps_every_input(self) -> bool:
        """The slot takes the shifted window and all inputs of the step, not the last width - 1 columns."""
        return self.has_columns or self.has_accepted

    def flops(self) -> int:
        return 2 * self.num_tokens * self.dim * self.width

    def bytes_moved(self) -> int:
        rows = 2 * self.num_tokens * self.dim * DTYPE_BYTES[self.dtype]
        if self.has_parent:
            windows = (self.num_sequences + self.num_tokens) * self._window_bytes()
        elif self.keeps_every_input:
            columns = self.num_sequences * (2 * self.width - 3) + self.num_tokens
            windows = columns * self.dim * _bytes(self.state_dtype)
        else:
            windows = 2 * self.num_sequences * self._window_bytes()
        return rows + self._filter_bytes() + windows


@dataclass(frozen=True)
class SplitProblem(Problem):
    """`gdn.fused_qkvzba_split_reshape_cat`: interleaved projections, taken apart.

    launch(compiled, mixed_qkvz, mixed_ba, mixed_qkv, z, b, a)
        mixed_qkvz [L, H * (2 * K + 2 * r * V)]: last dim contiguous, base and row stride multiples of the access: 16
            bytes where K and V are multiples of 8, else 8 bytes
        mixed_ba [L, 2 * HV]: last dim contiguous
        mixed_qkv [L, 2 * H * K + HV * V], z [L, HV * V], b, a [L, HV]: new, contiguous
    """

    op: ClassVar[str] = "split"

    num_k_heads: int = field(metadata=TUNES)
    num_v_heads: int = field(metadata=TUNES)
    head_k_dim: int = field(metadata=TUNES)
    head_v_dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)
    ba_dtype: str = field(metadata=COMPILES)
    num_tokens: int = size()

    @property
    def row_elements(self) -> int:
        """Of one row of mixed_qkvz."""
        return 2 * (self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim)

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        row = self.row_elements * DTYPE_BYTES[self.dtype] + 2 * self.num_v_heads * DTYPE_BYTES[self.ba_dtype]
        return 2 * self.num_tokens * row


@dataclass(frozen=True)
class GatingProblem(Problem):
    """`gdn.fused_gdn_gating`.

    launch(compiled, A_log, a, b, dt_bias, g, beta_output, beta, threshold)
        A_log, dt_bias [HV] any stride; a, b [L, HV] any strides; g, beta_output [L, HV] float32 contiguous
        beta, threshold: of the softplus, float
    """

    op: ClassVar[str] = "gating"

    num_heads: int = field(metadata=TUNES)
    a_dtype: str = field(metadata=TUNES)
    b_dtype: str = field(metadata=TUNES)
    A_log_dtype: str = field(metadata=COMPILES)
    dt_bias_dtype: str = field(metadata=COMPILES)
    num_tokens: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        return self.num_tokens * self.num_heads * (DTYPE_BYTES[self.a_dtype] + DTYPE_BYTES[self.b_dtype] + 8)


@dataclass(frozen=True)
class RmsNormGatedProblem(Problem):
    """`gdn.rms_norm_gated`.

    launch(compiled, x, z, weight, out, eps)
        x, z [L, HV, V]: last dim contiguous, bases and strides multiples of 8 elements where V is one, else of 4
        weight [V] contiguous, base as x; out [L, HV, V] contiguous
    """

    op: ClassVar[str] = "rms_norm_gated"

    num_heads: int = field(metadata=TUNES)
    head_dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)  # of x and out
    z_dtype: str = field(metadata=TUNES)
    weight_dtype: str = field(metadata=COMPILES)
    sigmoid: bool = field(metadata=COMPILES)  # the gate: sigmoid(z), else silu(z)
    num_tokens: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        per_element = 2 * DTYPE_BYTES[self.dtype] + DTYPE_BYTES[self.z_dtype]
        return self.num_tokens * self.num_heads * self.head_dim * per_element


@dataclass(frozen=True)
class GdnDecodeProblem(Problem):
    """`gdn.fused_gdn_decode`: everything of a decode step between the projections.

    launch(compiled, mixed_qkv, z, b, a, conv_state, conv_weight, conv_bias, A_log, dt_bias, norm_weight, ssm_state,
           state_indices, num_accepted_tokens, cu_seqlens, rounding_seed, out, scale, eps, null_slot)
        mixed_qkv [L, 2 * H * K + HV * V], or interleaved [L, H * (2 * K + 2 * r * V)]: last dim contiguous, base and row
            stride multiples of 16 bytes
        z [L, HV, V], last dim contiguous; a [L, HV]; b [L, HV], or interleaved [L, 2 * HV] with a and z None: any strides
        conv_state [slots, 2 * H * K + HV * V, columns], updated in place; conv_weight [.., width], conv_bias [..] or None:
            contiguous, bases multiples of 16 bytes
        A_log, dt_bias [HV], norm_weight [V]: any stride
        ssm_state [slots, HV, K, V] (or V first), updated in place; slot stride any multiple of 16 bytes
        state_indices [>= N], or [>= N, columns] with has_columns, any strides
        num_accepted_tokens [>= N] int32 any stride, or None; cu_seqlens [N + 1], or None: one token per sequence
        rounding_seed int64 [1] or None; out [L, HV, V], last dim contiguous; scale, eps float, null_slot int
    Rules of slots and windows as in RecurrentProblem and Conv1dUpdateProblem; a sequence one of whose two slots to read
    is null is padding: nothing of it is read or written. Every row of out is written.
    """

    op: ClassVar[str] = "gdn_decode"

    num_k_heads: int = field(metadata=TUNES)
    num_v_heads: int = field(metadata=TUNES)
    head_k_dim: int = field(metadata=TUNES)
    head_v_dim: int = field(metadata=TUNES)
    width: int = field(metadata=TUNES)  # of the convolution
    dtype: str = field(metadata=TUNES)  # of mixed_qkv and out: bfloat16 | float16
    z_dtype: str | None = field(metadata=COMPILES)  # None = interleaved
    a_dtype: str | None = field(metadata=COMPILES)  # None = interleaved
    b_dtype: str = field(metadata=COMPILES)
    weight_dtype: str = field(metadata=COMPILES)
    bias_dtype: str | None = field(metadata=COMPILES)
    A_log_dtype: str = field(metadata=COMPILES)
    dt_bias_dtype: str = field(metadata=COMPILES)
    norm_dtype: str = field(metadata=COMPILES)
    conv_dtype: str = field(metadata=COMPILES)  # of the windows
    conv_channels_contiguous: bool = field(metadata=TUNES)  # as ConvolutionProblem.state_channels_contiguous
    state_dtype: str = field(metadata=TUNES)  # float32 | bfloat16
    state_v_first: bool = field(metadata=TUNES)
    index_dtype: str = field(metadata=COMPILES)
    cu_seqlens_dtype: str | None = field(metadata=COMPILES)  # None = one token per sequence
    interleaved: bool = field(metadata=TUNES)
    silu: bool = field(metadata=COMPILES)  # after the convolution
    gate_sigmoid: bool = field(metadata=COMPILES)  # the norm's gate: sigmoid(z), else silu(z)
    has_columns: bool = field(metadata=TUNES)  # 2-D indices: drafts
    has_accepted: bool = field(metadata=COMPILES)  # num_accepted_tokens given
    has_rounding: bool = field(metadata=COMPILES)  # stochastic rounding of a bf16 state
    num_tokens: int = size()
    num_sequences: int = size()

    @property
    def dim(self) -> int:
        """Channels of the convolution."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    def flops(self) -> int:
        return self.num_tokens * (self.num_v_heads * 6 * self.head_k_dim * self.head_v_dim + 2 * self.dim * self.width)

    def bytes_moved(self) -> int:
        values = self.num_v_heads * self.head_v_dim
        state = values * self.head_k_dim * DTYPE_BYTES[self.state_dtype]
        states = self.num_sequences + (self.num_tokens if self.has_columns else self.num_sequences)
        columns = 2 * self.num_sequences * (self.width - 1)
        if self.has_columns:
            columns = self.num_sequences * (2 * self.width - 3) + self.num_tokens
        gates = self.num_v_heads * (DTYPE_BYTES[self.b_dtype] + DTYPE_BYTES[self.a_dtype or self.b_dtype])
        row = (self.dim + values) * DTYPE_BYTES[self.dtype] + values * DTYPE_BYTES[self.z_dtype or self.dtype] + gates
        filters = self.dim * (self.width * DTYPE_BYTES[self.weight_dtype] + _bytes(self.bias_dtype))
        return states * state + columns * self.dim * DTYPE_BYTES[self.conv_dtype] + self.num_tokens * row + filters


@dataclass(frozen=True)
class QuantizeFp8Problem(Problem):
    """`gdn.quantize_fp8`.

    launch(compiled, x, x_fp8, scale)
        x [L, G, group]: last dim contiguous, base and strides multiples of 16 bytes
        x_fp8 [L, G, group] float8_e4m3fn, scale [L, G] float32: new, contiguous
    """

    op: ClassVar[str] = "quantize_fp8"

    num_groups: int = field(metadata=TUNES)  # G
    group_dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)
    num_tokens: int = size()  # L

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        return self.num_tokens * self.num_groups * (self.group_dim * (DTYPE_BYTES[self.dtype] + 1) + 4)


@dataclass(frozen=True)
class IndexerCacheProblem(Problem):
    """What the writers and the reader of the indexer's cache share.

    cache: as PagedMqaLogitsProblem's, [pages, elements of a page]; uint8 pages hold e4m3 values and one float32 scale per
    (row, key head). The page size follows from the elements of a page: it compiles nothing anew.
    """

    num_kv_heads: int = field(metadata=TUNES)  # 0: no keys and no cache (the query alone is prepared)
    head_dim: int = field(metadata=TUNES)
    cache_dtype: str | None = field(metadata=TUNES)  # uint8 (scaled e4m3) | float8_e4m3fn | bfloat16; None without keys

    @property
    def scaled(self) -> bool:
        return self.cache_dtype == "uint8"

    def _cache_row_bytes(self) -> int:
        """Of one key row of all key heads."""
        return self.num_kv_heads * (self.head_dim * _bytes(self.cache_dtype) + 4 * self.scaled)


@dataclass(frozen=True)
class WriteIndexerCacheProblem(IndexerCacheProblem):
    """`gdn.write_indexer_cache`.

    launch(compiled, k, cache, slot_mapping)
        k [L, kv_heads, D]: last dim contiguous, base and strides multiples of 16 bytes; slot_mapping [L] any stride
    A negative slot writes nothing.
    """

    op: ClassVar[str] = "write_indexer_cache"

    dtype: str = field(metadata=TUNES)  # of k: bfloat16 | float16
    slot_dtype: str = field(metadata=COMPILES)  # int32 | int64
    num_tokens: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        row = self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.num_tokens * (row + self._cache_row_bytes() + DTYPE_BYTES[self.slot_dtype])


@dataclass(frozen=True)
class RotatedKeysProblem(IndexerCacheProblem):
    """What `prepare_indexer` and `compress_indexer_keys` share: norm and RoPE in float32, one rounding to the input's dtype."""

    rotary_dim: int = field(metadata=TUNES)
    zero_centred: bool = field(metadata=COMPILES)  # gain 1 + weight, else weight
    dtype: str = field(metadata=TUNES)  # of q (raw_k): bfloat16 | float16
    position_dtype: str = field(metadata=COMPILES)  # int32 | int64
    cos_sin_dtype: str = field(metadata=COMPILES)
    k_norm_dtype: str | None = field(metadata=COMPILES)
    slot_dtype: str | None = field(metadata=COMPILES)  # of slot_mapping


@dataclass(frozen=True)
class PrepareIndexerProblem(RotatedKeysProblem):
    """`gdn.prepare_indexer`.

    launch(compiled, q, k, weights, positions, cos_sin, q_norm, k_norm, cache, slot_mapping, q_out, weights_out, eps)
        q [L, H, D], k [L, kv_heads, D] or None: last dim contiguous, bases and strides multiples of 16 bytes
        weights [L, H] any strides, or None; positions, slot_mapping [L] any stride
        cos_sin [max_positions, rotary_dim]: rows as those of q; q_norm, k_norm [D]: contiguous, bases multiples of 16 bytes
        cache [pages, elements of a page] or None
        q_out [L, H, D] of q_out_dtype, weights_out [L, H] float32 or None: new, contiguous
    k, k_norm, cache and slot_mapping are None where num_kv_heads is 0; weights_out is None where weights are not folded.
    Positions are clamped to the rows of cos_sin; a negative slot writes nothing.
    """

    op: ClassVar[str] = "prepare_indexer"

    num_heads: int = field(metadata=TUNES)
    k_dtype: str | None = field(metadata=COMPILES)
    weights_dtype: str | None = field(metadata=COMPILES)
    q_norm_dtype: str = field(metadata=COMPILES)
    q_out_dtype: str = field(metadata=TUNES)  # float8_e4m3fn, or dtype
    folds_weights: bool = field(metadata=COMPILES)  # q is quantised with scales, which go into weights_out
    num_tokens: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        query = self.num_heads * self.head_dim * (DTYPE_BYTES[self.dtype] + DTYPE_BYTES[self.q_out_dtype])
        weights = self.num_heads * self.folds_weights * (_bytes(self.weights_dtype) + 4)
        keys = self.num_kv_heads * self.head_dim * _bytes(self.k_dtype) + self._cache_row_bytes()
        rest = self.rotary_dim * DTYPE_BYTES[self.cos_sin_dtype] + DTYPE_BYTES[self.position_dtype] + _bytes(self.slot_dtype)
        return self.num_tokens * (query + weights + keys + rest)


@dataclass(frozen=True)
class CompressIndexerKeysProblem(RotatedKeysProblem):
    """`gdn.compress_indexer_keys`.

    launch(compiled, raw_k, ring, cache, positions, cos_sin, k_norm, ring_slots, slot_mapping, eps, null_slot)
        raw_k [L, kv_heads, D], ring [sequences, size, kv_heads, D]: last dim contiguous, bases and strides multiples of 16
            bytes; the rest as PrepareIndexerProblem's; ring_slots [L] any stride; null_slot int
    Ring rows are read before the same call overwrites them.
    """

    op: ClassVar[str] = "compress_indexer_keys"

    ratio: int = field(metadata=TUNES)
    ring_slot_dtype: str = field(metadata=COMPILES)
    ring_aligned: bool = field(metadata=TUNES)  # rows of the ring start at multiples of 16 bytes
    num_tokens: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        """As if every token were stored in the ring: of a long prompt few are."""
        raw = 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        rest = DTYPE_BYTES[self.position_dtype] + _bytes(self.slot_dtype) + DTYPE_BYTES[self.ring_slot_dtype]
        group = self._cache_row_bytes() + self.rotary_dim * DTYPE_BYTES[self.cos_sin_dtype]
        return self.num_tokens * (raw + rest) + self.num_tokens // self.ratio * group


@dataclass(frozen=True)
class GatherIndexerCacheProblem(IndexerCacheProblem):
    """`gdn.gather_indexer_cache`.

    launch(compiled, cache, block_tables, cu_seqlens, k, k_scale)
        cache [pages >= 1, elements of a page]; block_tables [N >= 1, max_pages >= 1] int32 any strides; cu_seqlens [N + 1]
            any stride
        k [rows, kv_heads * D] of the cache's kind of value, k_scale [rows, kv_heads] float32 or None: new, contiguous
    Every row is written: those at or beyond cu_seqlens[N] with zeros. Page numbers are clamped to the cache.
    """

    op: ClassVar[str] = "gather_indexer_cache"

    cu_seqlens_dtype: str = field(metadata=COMPILES)
    num_rows: int = size()
    num_sequences: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        return 2 * self.num_rows * self._cache_row_bytes()


@dataclass(frozen=True)
class ExpandTopkGroupsProblem(Problem):
    """`gdn.expand_topk_groups`.

    launch(compiled, group_indices, positions, out)
        group_indices [L, k] any strides; positions [L] any stride
        out int32 [L, k * ratio + ratio - 1], any row stride, last dim contiguous
    Every entry of out is written.
    """

    op: ClassVar[str] = "expand_topk_groups"

    ratio: int = field(metadata=TUNES)
    group_dtype: str = field(metadata=TUNES)  # int32 | int64
    position_dtype: str = field(metadata=COMPILES)
    num_tokens: int = size()
    k: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        listed = self.k * self.ratio + self.ratio - 1
        return self.num_tokens * (self.k * DTYPE_BYTES[self.group_dtype] + 4 * listed + DTYPE_BYTES[self.position_dtype])
