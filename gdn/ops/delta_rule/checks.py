"""Chunk and recurrent operator: checks of their arguments, and the packed tokens that kernels take.

Checks of intermediate_states, the caller's tensor that takes the state after every token.

It is written in place, so nothing of it may be copied: its strides must be those that kernels take.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn.core import check, values
from gdn.core.call import make, new
from gdn.core.check import FLOAT_DTYPES, INDEX_DTYPES, bad_type, bad_value, dtype_name
from gdn.core.constants import even_offsets, zeros
from gdn.core.modes import address
from gdn.core.tensors import ALIGNMENT, as_int64, copied, described, dtypes_of, log_copy
from gdn.ops.delta_rule.reference import largest_chunk_operand

TOKEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Packed = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
STATE_DTYPES = (torch.float32, torch.bfloat16)


class Tokens(NamedTuple):
    """Token arguments of a call, under their public names."""

    q: Tensor  # [B, T, Hq, K]
    k: Tensor  # [B, T, Hk, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor | None  # [B, T, HS]
    beta: Tensor | None  # [B, T, HS]
    cu_seqlens: Tensor | None  # [N + 1]
    use_gate: bool  # use_gate_in_kernel
    A_log: Tensor | None  # [HS]
    dt_bias: Tensor | None  # [HS]
    use_beta_sigmoid: bool  # use_beta_sigmoid_in_kernel


class States(NamedTuple):
    """Arguments of `chunk_gated_delta_rule` about states, under their public names."""

    initial_state: Tensor | None
    state_indices: Tensor | None  # [>= N]
    has_initial_state: Tensor | None  # [>= N]
    final_state_indices: Tensor | None  # [>= N]
    checkpoint_offsets: Tensor | None  # [>= N, C]
    checkpoint_slots: Tensor | None  # [>= N, C]
    state_v_first: bool
    null_slot: int
    checkpoint_states: Tensor | None = None  # [rows, HS, K, V] or V first; None: checkpoints go to the pool


@dataclass(slots=True)
class Sizes:
    """Checked shapes of a call."""

    batch: int
    length: int  # tokens of one batch row; all tokens where the call is packed
    num_sequences: int
    num_q_heads: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    @property
    def num_heads(self) -> int:
        """Heads of o, g, beta and the state (HS)."""
        return max(self.num_q_heads, self.num_v_heads)

    @property
    def num_tokens(self) -> int:
        return self.batch * self.length

    def fields(self) -> dict[str, Any]:
        """Fields that every problem of this family has."""
        names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "num_tokens", "num_sequences")
        return {name: getattr(self, name) for name in names}

    def state_shape(self, state_v_first: bool) -> tuple[int, int, int]:
        inner = (self.head_v_dim, self.head_k_dim) if state_v_first else (self.head_k_dim, self.head_v_dim)
        return (self.num_heads, *inner)


def check_tokens(tokens: Tokens, null_slot: int, out: Tensor | None) -> Sizes:
    """Checks all arguments except states and indices."""
    q, k, v, cu_seqlens = tokens.q, tokens.k, tokens.v, tokens.cu_seqlens
    check.tensor("q", q, shape=("B", "T", "Hq", "K"), dtypes=TOKEN_DTYPES)
    batch, length, num_q_heads, k_dim = q.shape
    device, dtypes = q.device, (q.dtype,)
    check.tensor("k", k, shape=(batch, length, "Hk", k_dim), dtypes=dtypes, device=device)
    check.tensor("v", v, shape=(batch, length, "HV", "V"), dtypes=dtypes, device=device)
    num_k_heads, num_v_heads, v_dim = k.shape[2], v.shape[2], v.shape[3]
    if not (num_q_heads and num_k_heads and num_v_heads and k_dim and v_dim):
        bad_value("q, k, v", "at least one head and one element per head", f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}")
    is_gva = num_q_heads == num_k_heads and num_v_heads % num_k_heads == 0
    is_gqa = num_k_heads == num_v_heads and num_q_heads % num_k_heads == 0
    if not (is_gva or is_gqa):
        expected = "GVA heads (Hq = Hk, HV a multiple of Hk) or GQA heads (Hk = HV, Hq a multiple of Hk)"
        bad_value("q, k, v", expected, f"Hq={num_q_heads}, Hk={num_k_heads}, HV={num_v_heads}")
    heads = max(num_q_heads, num_v_heads)
    _check_gates(tokens, (batch, length, heads))
    check.null_slot(null_slot)

    num_sequences = check.offsets("cu_seqlens", cu_seqlens, device, otherwise=batch)
    if cu_seqlens is not None and batch != 1:
        bad_value("q", "shape [1, T, Hq, K] with cu_seqlens", f"shape {list(q.shape)}")
    check.out(out, (batch, length, heads, v_dim), q.dtype, device)
    if out is not None and batch > 1 and length > 1 and isinstance(length, int) and out.stride(0) != length * out.stride(1):
        bad_value("out", "batch rows that follow each other (stride(0) == T * stride(1))", f"strides {out.stride()}")
    return Sizes(batch, length, num_sequences, num_q_heads, num_k_heads, num_v_heads, k_dim, v_dim)


def _check_gates(tokens: Tokens, shape: tuple[int, int, int]) -> None:
    """Checks g and beta [B, T, HS] and the parameters of the raw gate."""
    device, heads = tokens.q.device, shape[2]
    for name, gate in (("g", tokens.g), ("beta", tokens.beta)):
        check.optional(name, gate, shape=shape, dtypes=FLOAT_DTYPES, device=device)
    if tokens.use_gate:
        if tokens.g is None:
            bad_value("g", "the raw gate a with use_gate_in_kernel=True", "None")
        check.tensor("A_log", tokens.A_log, shape=(heads,), dtypes=FLOAT_DTYPES, device=device)
        check.optional("dt_bias", tokens.dt_bias, shape=(heads,), dtypes=FLOAT_DTYPES, device=device)
    elif tokens.A_log is not None or tokens.dt_bias is not None:
        bad_type("A_log, dt_bias", "None without use_gate_in_kernel=True", "a tensor")
    if tokens.use_beta_sigmoid and tokens.beta is None:
        bad_value("beta", "the raw b with use_beta_sigmoid_in_kernel=True", "None")


def check_states(
    states: States, sizes: Sizes, q: Tensor, indices_name: str = "state_indices", *, has_offsets: bool = True
) -> None:
    """Checks the states of prefill. indices_name: the public name of state_indices. has_offsets: cu_seqlens is given."""
    count, device = sizes.num_sequences, q.device
    if states.state_indices is not None:
        check.indices(indices_name, states.state_indices, count, device, ranks=(1,), has_offsets=has_offsets)
        check_pool("initial_state", states.initial_state, sizes, states.state_v_first, q)
    elif states.initial_state is not None:
        check_state("initial_state", states.initial_state, sizes, states.state_v_first, q)
    mask = states.has_initial_state
    check.per_sequence("has_initial_state", mask, count, device, (torch.bool,), has_offsets=has_offsets)
    if states.final_state_indices is not None:
        if states.state_indices is None:
            bad_value("final_state_indices", f"None without {indices_name}", "a tensor")
        check.indices("final_state_indices", states.final_state_indices, count, device, ranks=(1,), has_offsets=has_offsets)
    pool, kept = (indices_name, states.state_indices), states.checkpoint_states
    if kept is not None:
        pool = ("checkpoint_states", kept)
        check_pool("checkpoint_states", kept, sizes, states.state_v_first, q, num_slots="rows")
    check.checkpoints(states.checkpoint_offsets, states.checkpoint_slots, pool, count, has_offsets=has_offsets)
    check.needs_checkpoints("checkpoint_states", kept, states.checkpoint_offsets)


def check_state_values(states: States, tokens: Tokens, sizes: Sizes, indices_name: str = "state_indices") -> None:
    """Checks the values of the offsets, decays, slots and checkpoints of prefill."""
    bounds = values.token_bounds("cu_seqlens", tokens.cu_seqlens, sizes.batch, sizes.length, tokens.q.device)
    offsets, slots, kept = states.checkpoint_offsets, states.checkpoint_slots, (states.checkpoint_states,)
    if states.state_indices is None or states.initial_state is None:
        check_decays(tokens, bounds)
        values.check_checkpoints(offsets, slots, kept, bounds, bounds.diff() > 0, states.null_slot)
        return
    in_pool = states.checkpoint_states is None
    touched = values.prefill_slots(
        indices_name, bounds, states.state_indices, states.null_slot, has_initial_state=states.has_initial_state,
        final_indices=states.final_state_indices, checkpoint_offsets=offsets if in_pool else None,
        checkpoint_slots=slots if in_pool else None,
    )  # fmt: skip
    check_decays(tokens, bounds, touched.is_live)
    values.check_checkpoints(offsets, slots, kept, bounds, touched.is_live, states.null_slot)
    values.check_touched(touched, states.initial_state, states.null_slot)


def check_decays(tokens: Tokens, bounds: Tensor, is_live: Tensor | None = None) -> None:
    """Checks that no log decay is positive, where g is one. is_live [N]: False = padding, whose g may be anything."""
    if tokens.g is not None and not tokens.use_gate:
        values.check_log_decays("g", tokens.g, bounds, is_live)


def check_float16_range(states: States, tokens: Tokens, scale: float | None, use_qk_l2norm: bool, names: str = "q, k, v") -> None:
    """Checks that what the chunk form rounds to float16 inside of a chunk fits it: kernels would go on with infinities.

    Called with GDN_VALIDATE=1 only: it computes the whole call in float32. names: of the arguments, for the message. Head dims
    above 128 go token by token in float32.
    """
    if max(tokens.k.shape[3], tokens.v.shape[3]) > 128:
        return
    largest = largest_chunk_operand(
        tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta, scale, states.initial_state, use_qk_l2norm, tokens.cu_seqlens,
        state_v_first=states.state_v_first, use_gate_in_kernel=tokens.use_gate, A_log=tokens.A_log, dt_bias=tokens.dt_bias,
        use_beta_sigmoid_in_kernel=tokens.use_beta_sigmoid, state_indices=states.state_indices,
        has_initial_state=states.has_initial_state, null_slot=states.null_slot,
    )  # fmt: skip
    refuse_beyond_float16(names, largest)


def refuse_beyond_float16(names: str, largest: tuple[float, str]) -> None:
    """Raises ValueError where the largest operand of the chunk form, a size and its name, does not fit float16.

    names: of the arguments.
    """
    most, (size, what) = torch.finfo(torch.float16).max, largest
    if size > most:
        expected = f"float16 values that stay within {most:.0f} inside of a chunk (bfloat16 has the range)"
        bad_value(names, expected, f"{what} of {size:.6g}")


def check_state(name: str, state: Tensor, sizes: Sizes, state_v_first: bool, q: Tensor) -> None:
    """Checks one state per sequence that is only read."""
    shape = (sizes.num_sequences, *sizes.state_shape(state_v_first))
    check.tensor(name, state, shape=shape, dtypes=state_dtypes_of(q), device=q.device)


def check_pool(name: str, pool: object, sizes: Sizes, state_v_first: bool, q: Tensor, num_slots: int | str = "slots") -> None:
    """Checks states that are updated in place: nothing may be copied, so their strides must be those that kernels take."""
    if pool is None:
        bad_value(name, "the state pool that the indices refer to", "None")
    assert isinstance(pool, Tensor)
    shape = sizes.state_shape(state_v_first)
    check.tensor(name, pool, shape=(num_slots, *shape), dtypes=state_dtypes_of(q), device=q.device)
    slot_stride = pool.stride(0)
    many = pool.shape[0] > 1 if isinstance(pool.shape[0], int) else True
    check_inner(name, pool, shape, overlaps=many and slot_stride < shape[0] * shape[1] * shape[2])
    size = pool.element_size()
    if (many and slot_stride * size % ALIGNMENT) or address(pool) % ALIGNMENT:
        expected = f"a slot stride and an address that are multiples of {ALIGNMENT} bytes"
        bad_value(name, expected, f"a slot stride of {slot_stride * size} bytes at address {address(pool):#x}")


def check_inner(name: str, states: Tensor, shape: tuple[int, int, int], *, overlaps: bool = False) -> None:
    """Checks that the inner three dimensions of states are contiguous. overlaps: whether slots were found to overlap."""
    _, rows, columns = shape
    strides = zip(states.stride()[-3:], (rows * columns, columns, 1), shape, strict=True)
    if overlaps or not all(stride == wanted or size == 1 for stride, wanted, size in strides):
        bad_value(name, "contiguous inner three dims and slots that do not overlap", f"strides {states.stride()}")


def state_dtypes_of(q: Tensor) -> tuple[torch.dtype, ...]:
    return (*STATE_DTYPES, torch.float64) if q.dtype == torch.float64 else STATE_DTYPES


def static_fields(
    sizes: Sizes, tokens: Tokens, initial_state: Tensor | None, index_dtype: torch.dtype | None, state_v_first: bool
) -> dict[str, Any]:
    """Fields of DeltaRuleProblem that follow from tensors, and the sizes."""
    cu_seqlens, state = tokens.cu_seqlens, initial_state
    return {
        "num_q_heads": sizes.num_q_heads,
        **sizes.fields(),
        "dtype": dtype_name(tokens.q.dtype),
        "state_dtype": "float32" if state is None else dtype_name(state.dtype),
        **dtypes_of(gate=tokens.g, beta=tokens.beta),
        "cu_seqlens_dtype": "int32" if cu_seqlens is None else dtype_name(cu_seqlens.dtype),
        "index_dtype": None if index_dtype is None else dtype_name(index_dtype),
        "has_initial_state": state is not None,
        "state_v_first": state_v_first,
        "use_gate": tokens.use_gate,
        "use_beta_sigmoid": tokens.use_beta_sigmoid,
    }


def pack(sizes: Sizes, tokens: Tokens, *, by_descriptor: bool) -> tuple[Packed, Tensor]:
    """First seven Params of a launch, and the offsets [N + 1] of the sequences.

    q, k, v [1, L, heads, D]; g, beta [1, L, HS]; A_log and dt_bias (zeros where the caller gave none) in float32, None without
    the raw gate. by_descriptor: kernels read q, k and v by bulk tensor copies, see `described`.
    """
    device = tokens.q.device
    A_log = dt_bias = None
    if tokens.use_gate:
        assert tokens.A_log is not None  # checked
        A_log, no_bias = make(_float32, tokens.A_log), functools.partial(zeros, sizes.num_heads, device)
        dt_bias = make(no_bias) if tokens.dt_bias is None else make(_float32, tokens.dt_bias)
    cu_seqlens = tokens.cu_seqlens
    if cu_seqlens is None:
        cu_seqlens = make(functools.partial(even_offsets, sizes.batch, sizes.length, device))
    q, k, v = (_packed_rows(name, x) for name, x in (("q", tokens.q), ("k", tokens.k), ("v", tokens.v)))
    if by_descriptor:
        q, k, v = described("q", q), described("k", k), described("v", v)
    g, beta = (None if x is None else _one_row(x) for x in (tokens.g, tokens.beta))
    return (q, k, v, g, beta, A_log, dt_bias), cu_seqlens.contiguous()


def new_state(sizes: Sizes, q: Tensor, state_v_first: bool) -> Tensor:
    """A new final state [N, HS, K, V] (or V first)."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return new(dtype, q.device, sizes.num_sequences, *sizes.state_shape(state_v_first))


def _float32(x: Tensor) -> Tensor:
    return x.float().contiguous()


def widened(indices: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Indices in the call's dtype, which is their own or wider."""
    return indices if indices is None or indices.dtype == dtype else make(as_int64, indices)


def _one_row(x: Tensor) -> Tensor:
    """[B, T, ...] -> [1, B * T, ...]. One row stays the same tensor: even a view costs the host a microsecond or two."""
    return x if x.shape[0] == 1 else x.flatten(0, 1)[None]


def _packed_rows(name: str, x: Tensor) -> Tensor:
    """[B, T, heads, D] -> [1, B * T, heads, D]: no copy where address and strides are multiples of 16 bytes."""
    packed = _one_row(x)
    if not (packed.shape[3] == 1 or packed.stride(3) == 1) or not _rows_are_aligned(packed):
        why = "its last dimension is not contiguous, or its address or strides are not multiples of 16 bytes"
        return copied(name, packed, why)
    if address(packed) != address(x):
        log_copy(name, x, "its batch rows are not evenly spaced")
    return packed


def _rows_are_aligned(x: Tensor, is_written: bool = False) -> bool:
    """Whether the address, and the token and head strides of x [1, L, heads, D], are multiples of 16 bytes.

    Strides need only 8 where the head size itself is not a multiple of 16. Reads never use strides of dimensions with one entry.
    Those of writes are not 0 either: they go into descriptors of bulk tensor copies.
    """
    size = x.element_size()
    access = ALIGNMENT if x.shape[-1] * size % ALIGNMENT == 0 else ALIGNMENT // 2
    strides = [x.stride(dim) for dim in (1, 2) if is_written or x.shape[dim] != 1]
    if is_written and 0 in strides:
        return False
    return address(x) % ALIGNMENT == 0 and all(stride * size % access == 0 for stride in strides)


def output(sizes: Sizes, v: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result o [B, T, HS, V], and the tensor [1, B * T, HS, V] that the kernel writes.

    The second is o itself or a view of it, except where `out` is not aligned: `finish` then copies back.
    """
    shape = (sizes.batch, sizes.length, sizes.num_heads, sizes.head_v_dim)
    o = new(v.dtype, v.device, *shape) if out is None else out
    written = o if sizes.batch == 1 else o.view(1, sizes.num_tokens, *shape[2:])
    if out is not None and not _rows_are_aligned(written, is_written=True):
        written = torch.empty(written.shape, dtype=v.dtype, device=v.device)
    return o, written


def finish(o: Tensor, written: Tensor) -> Tensor:
    """o, with the result copied into it where `output` had to take another tensor."""
    return o if address(written) == address(o) else o.copy_(written.view(o.shape))


def pass_through(initial_state: Tensor | None, has_initial_state: Tensor | None, final_state: Tensor | None) -> None:
    """Fills the new final state of sequences without tokens: the state that they started from."""
    if final_state is None:
        return
    if initial_state is None:
        final_state.zero_()
        return
    final_state.copy_(initial_state)
    if has_initial_state is not None:
        final_state.masked_fill_(~has_initial_state[: final_state.shape[0]].view(-1, 1, 1, 1), 0)


def check_intermediate(
    states: Tensor | None, rows: Tensor | None, sizes: Sizes, state_v_first: bool, tokens: Tensor, *,
    starts: tuple[str, Tensor | None], unused: dict[str, Tensor | None], has_offsets: bool,
) -> None:  # fmt: skip
    """Checks intermediate_states [rows, T_max, HS, K, V] (or V first) and intermediate_indices [>= N].

    starts: name and value of the slots to start from, which must be 1-D. unused: arguments that must be left out.
    """
    if (states is None) != (rows is None):
        missing = "intermediate_states" if states is None else "intermediate_indices"
        bad_value(missing, "intermediate_states and intermediate_indices together", "None")
    if states is None or rows is None:
        return
    name, slots = starts
    if slots is None or slots.dim() != 1:
        got = "None" if slots is None else f"shape {list(slots.shape)}"
        bad_value(name, "1-D slots to start from, with intermediate_states", got)
    check.absent(unused, "with intermediate_states")
    shape, device = sizes.state_shape(state_v_first), tokens.device
    check.tensor("intermediate_states", states, shape=("rows", "T_max", *shape), dtypes=state_dtypes_of(tokens), device=device)
    check_inner("intermediate_states", states, shape)
    size = states.element_size()
    strides = [states.stride(dim) for dim in (0, 1) if not (isinstance(states.shape[dim], int) and states.shape[dim] == 1)]
    if any(stride * size % ALIGNMENT for stride in strides) or address(states) % ALIGNMENT:
        expected = f"strides of rows and tokens, and an address, that are multiples of {ALIGNMENT} bytes"
        bad_value("intermediate_states", expected, f"strides {states.stride()} at address {address(states):#x}")
    check.per_sequence(
        "intermediate_indices", rows, sizes.num_sequences, device, INDEX_DTYPES, has_offsets=has_offsets
    )  # fmt: skip


def check_intermediate_values(states: Tensor | None, rows: Tensor | None, is_live: Tensor, null_slot: int) -> None:
    """Checks that the rows of live sequences exist and belong to one sequence each."""
    if states is not None and rows is not None:
        values.check_touched(values.own_rows("intermediate_indices", rows, is_live, null_slot), states, null_slot)
