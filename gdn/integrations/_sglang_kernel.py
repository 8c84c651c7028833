"""SGLang's kernel object for Gated DeltaNet on gdn's operators.

SGLang calls one method of it per kind of batch, on its own pools: states [slots, HV, V, K], slot -1 for padding. A call that is
not served goes to the kernel object that SGLang made itself, with its arguments untouched.

    method          operator                            states
    decode          fused_recurrent_gated_delta_rule    one token a row, slot updated in place
    packed_decode   the same, on views of the packed rows
    extend          chunk_gated_delta_rule              slot updated in place, snapshots for the prefix cache
    target_verify   fused_recurrent_gated_delta_rule    the pool stays, the state after every draft goes to SGLang's buffer

Nothing of SGLang is imported.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_compiling
from torch.cuda import is_current_stream_capturing

import gdn
from gdn.integrations import _indices as indices
from gdn.integrations._calls import Calls, unserved, unserved_state
from gdn.integrations._kept import UNALIGNED, Served, bound, never
from gdn.runtime.guards import Guard, maker
from gdn.runtime.streams import raw_stream

Tensor = torch.Tensor
CHUNK = 64  # tokens between two states that the host may ask for
NULL_SLOT = -1  # the host's padding
LARGEST_HEAD_DIM = 256
LARGEST_HEAD_DIM_OF_SNAPSHOTS = 128
_ALIGNMENT = 16  # bytes, of a slot


@dataclass(frozen=True)
class Serving:
    """Counters of the calls of all kernel objects, and whether a call that is left to the host is an error."""

    calls: Calls
    strict: bool = False

    def serves(self, method: str, reason: str | None) -> bool:
        """Counts a call; with strict, one that is not served raises RuntimeError."""
        if not self.calls.active:
            return False
        if reason is not None and self.strict:
            raise RuntimeError(f"gdn.integrations.sglang, strict: {method} would be left to the host: {reason}")
        return self.calls.serves(reason)


def refusal(tokens: Tensor, head_k_dim: int, head_v_dim: int, states: Tensor, *, allow_reference: bool = False) -> str | None:
    """Why a call of any method is left to the host; None where it is served.

    Parameters
    ----------
    tokens : Tensor
        Queries, or packed rows; device and dtype decide.
    head_k_dim, head_v_dim : int
        Of the layer.
    states : Tensor [slots, HV, V, K]
        The pool.
    allow_reference : bool
        Serve on the CPU too.
    """
    reason = unserved(tokens, allow_reference=allow_reference)
    if reason is not None:
        return reason
    if head_k_dim != head_v_dim or head_k_dim % 4 or head_k_dim > LARGEST_HEAD_DIM:
        return f"the head dims are {head_k_dim} and {head_v_dim}, served are equal multiples of 4 up to {LARGEST_HEAD_DIM}"
    return unserved_slots(states)


def unserved_slots(states: Tensor) -> str | None:
    """Why states [slots, HV, V, K] are no pool of ours; None where they are."""
    reason = unserved_state(states)
    if reason is not None:
        return reason
    slot, head, row, column = states.stride()
    _, _, rows, columns = states.shape
    size = states.element_size()
    if slot * size % _ALIGNMENT or column != 1 or row != columns or head != rows * columns:
        return f"the states have strides {states.stride()}, served are contiguous slots at multiples of {_ALIGNMENT} bytes"
    if states.storage_offset() * size % _ALIGNMENT:
        return f"the states begin at no multiple of {_ALIGNMENT} bytes"
    return None


def refusal_packed(
    mixed_qkv: Tensor, states: Tensor, head_v_dim: int, replay: Tensor | None, *, allow_reference: bool = False
) -> str | None:
    """As `refusal`, for packed_decode. replay: one of ReplaySSM's tensors, which the host gives all or none of."""
    if replay is not None:
        return "ReplaySSM keeps the states"
    return refusal(mixed_qkv, states.shape[-1], head_v_dim, states, allow_reference=allow_reference)


def refusal_extend(q: Tensor, v: Tensor, states: Tensor, inplace_update: bool, *, allow_reference: bool = False) -> str | None:
    """As `refusal`, for extend."""
    if not inplace_update:
        return "the states stay as they are (multi-item scoring)"
    return refusal(q, q.shape[-1], v.shape[-1], states, allow_reference=allow_reference)


def refusal_snapshots(snapshots: Tensor | None, head_dim: int) -> str | None:
    """Why an extend that stores states for the prefix cache in `snapshots` [rows, HV, V, K] is left to the host."""
    if snapshots is None:
        return None
    if head_dim > LARGEST_HEAD_DIM_OF_SNAPSHOTS:
        return f"snapshots of head dim {head_dim}, served are up to {LARGEST_HEAD_DIM_OF_SNAPSHOTS}"
    reason = unserved_slots(snapshots)
    return None if reason is None else f"snapshots: {reason}"


def refusal_verify(
    q: Tensor, v: Tensor, states: Tensor, kept: Tensor | None, parents: Tensor | None, rows: int, *, allow_reference: bool = False
) -> str | None:
    """As `refusal`, for target_verify of `rows` sequences. kept: the host's buffer of states; parents: of a tree's tokens."""
    if kept is None:
        return "no buffer takes the states"
    if kept.dtype != states.dtype and (reason := unserved_state(kept)) is not None:
        return reason
    strides, size = kept.stride(), kept.element_size()
    is_apart = strides[0] * size % _ALIGNMENT or strides[1] * size % _ALIGNMENT or kept.storage_offset() * size % _ALIGNMENT
    if is_apart or kept.shape[2:] != states.shape[1:] or strides[2:] != states.stride()[1:]:
        return f"the buffer of states has shape {list(kept.shape)} and strides {kept.stride()}"
    if parents is not None and (parents.shape[0] < rows or rows * parents.shape[1] != q.shape[1]):
        return f"the tree has parents {list(parents.shape)} of {q.shape[1]} tokens in {rows} sequences"
    return refusal(q, q.shape[-1], v.shape[-1], states, allow_reference=allow_reference)


def kernel_class(base: type) -> type:
    """The class of the kernel object. base: LinearAttnKernelBase of SGLang."""

    class GatedDeltaNetKernel(base):  # type: ignore[misc]
        is_of_gdn = True  # how the other points of the adapter know a dispatcher with ours
        supports_packed_decode = True
        supports_strided_target_verify_qkv = True
        supports_track_state_snapshot = True
        uses_state_checkpoints = False

        def __init__(self, host: Any, serving: Serving) -> None:
            """host: the kernel object that SGLang made for the same phase."""
            self._host, self._serving = host, serving
            self._decoded, self._extended, self._verified = (Served() for _ in range(3))
            self._packing = _NO_PACKING

        def decode(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **given: Any) -> Tensor:
            states, known, reason = given["ssm_states"], self._decoded, None
            if not known(q, v, states):
                allowed = self._serving.calls.allow_reference
                reason = known.judge(refusal(q, q.shape[-1], v.shape[-1], states, allow_reference=allowed), q, v, states)
            if not self._serving.serves("decode", reason):
                return self._host.decode(q, k, v, a, b, **given)  # type: ignore[no-any-return]
            return _recurrent(None)(  # type: ignore[no-any-return]
                q, k, v, a[None], b[None], states, given["query_start_loc"], given["cache_indices"],
                A_log=given["A_log"], dt_bias=given["dt_bias"],
            )[0]  # fmt: skip

        def packed_decode(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, **given: Any) -> Tensor:
            states, head_dim, calls = given["ssm_states"], given["head_v_dim"], self._serving.calls
            packing = self._packing
            # Whether the call is like the last one that was served: `Served` and `Serving.serves`, written out. Each function
            # takes as long as a few of the comparisons, and the views of the rows take most of the time that there is.
            if (
                not is_compiling()
                and packing.guard(mixed_qkv, states)
                and packing.head_dim == head_dim
                and packing.num_v_heads == given["num_v_heads"]
                and given.get("replayssm_d") is None
                and not states.data_ptr() & UNALIGNED
                and not is_grad_enabled()
                and calls.active
                and (packing.gpu is None or packing.stream == raw_stream(packing.gpu))
            ):
                calls.served += 1
            else:
                found = self._packing_of(mixed_qkv, given)
                if found is None:
                    return self._host.packed_decode(mixed_qkv, a, b, **given)  # type: ignore[no-any-return]
                packing = found
            q, k, v = mixed_qkv.view(1, -1, packing.heads, head_dim).split_with_sizes(packing.parts, 2)
            return _recurrent(given["scale"])(  # type: ignore[no-any-return]
                q, k, v, a[None], b[None], states, packing.offsets, given["cache_indices"],
                A_log=given["A_log"], dt_bias=given["dt_bias"],
            )[0]  # fmt: skip

        def _packing_of(self, mixed_qkv: Tensor, given: Mapping[str, Any]) -> "_Packing | None":
            """Of a call of packed_decode, which is judged and counted; None where it is left to the host."""
            states, head_dim, allowed = given["ssm_states"], given["head_v_dim"], self._serving.calls.allow_reference
            reason = refusal_packed(mixed_qkv, states, head_dim, given.get("replayssm_d"), allow_reference=allowed)
            if not self._serving.serves("packed_decode", reason):
                return None
            packing = _Packing.of(mixed_qkv, states, given["num_v_heads"], head_dim)
            # What a capture makes belongs to its graph.
            if not is_compiling() and (packing.gpu is None or not is_current_stream_capturing()):
                self._packing = packing
            return packing

        def extend(
            self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **given: Any
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            states, known, reason, in_place = given["ssm_states"], self._extended, None, given.get("inplace_update", True)
            snapshots = given.get("track_state")
            if not in_place or snapshots is not None or not known(q, v, states):
                allowed = self._serving.calls.allow_reference
                reason = known.judge(refusal_extend(q, v, states, in_place, allow_reference=allowed), q, v, states)
                reason = reason or refusal_snapshots(snapshots, q.shape[-1])
            if not self._serving.serves("extend", reason):
                return _extend_by_host(self._host, q, k, v, g, beta, given)
            return _extend(q, k, v, g, beta, given), None, None

        def target_verify(
            self, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **given: Any
        ) -> Tensor:
            states, offsets, known, reason = given["ssm_states"], given["query_start_loc"], self._verified, None
            kept, parents = given.get("intermediate_states_buffer"), given.get("retrieve_parent_token")
            if kept is None or parents is not None or kept.data_ptr() % _ALIGNMENT or not known(q, v, kept, states):
                rows, allowed = offsets.shape[0] - 1, self._serving.calls.allow_reference
                reason = refusal_verify(q, v, states, kept, parents, rows, allow_reference=allowed)
                if kept is not None:
                    reason = known.judge(reason, q, v, kept, states)
            if not self._serving.serves("target_verify", reason):
                return self._host.target_verify(  # type: ignore[no-any-return]
                    A_log=A_log, dt_bias=dt_bias, q=q, k=k, v=v, a=a, b=b, **given
                )
            tree = None if parents is None else _parents(parents[: offsets.shape[0] - 1])
            return _recurrent(None)(  # type: ignore[no-any-return]
                q, k, v, a[None], b[None], states, offsets, given["cache_indices"], A_log=A_log, dt_bias=dt_bias,
                parent_token=tree, intermediate_states=kept, intermediate_indices=given["intermediate_state_indices"],
            )[0]  # fmt: skip

    return GatedDeltaNetKernel


@functools.lru_cache(maxsize=64, typed=True)
def _recurrent(scale: float | None) -> Callable[..., Any]:
    """The rule of decode on the host's pool, for tensors alone."""
    return bound(
        gdn.fused_recurrent_gated_delta_rule, scale=scale, use_qk_l2norm_in_kernel=True, state_v_first=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=False, null_slot=NULL_SLOT,
    )  # fmt: skip


@functools.cache
def _chunk() -> Callable[..., Any]:
    """The rule of prompts on the host's pool, for tensors alone."""
    return bound(gdn.chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True, state_v_first=True, null_slot=NULL_SLOT)


@dataclass(frozen=True, slots=True)
class _Packing:
    """What packed_decode knows of a call that was served, for calls like it.

    guard: of its rows [rows, D] and states. heads, parts: of a row, together and of queries, keys and values. offsets: of the
    rows as packed sequences of one token; as rows of their own, the operator would have to make these in every call. They
    belong to a stream of a GPU; both None on the CPU.
    """

    guard: Guard
    num_v_heads: int
    head_dim: int
    heads: int
    parts: tuple[int, int, int]
    gpu: int | None
    stream: int | None
    offsets: Tensor | None

    @staticmethod
    def of(mixed_qkv: Tensor, states: Tensor, num_v_heads: int, head_dim: int) -> "_Packing":
        rows, width = mixed_qkv.shape
        heads, device = width // head_dim, mixed_qkv.device
        keys = (heads - num_v_heads) // 2
        guard = never if is_compiling() else maker()((mixed_qkv, states))
        stream = None if device.index is None else raw_stream(device.index)
        offsets = indices.rows(rows + 1, device)
        return _Packing(guard, num_v_heads, head_dim, heads, (keys, keys, num_v_heads), device.index, stream, offsets)


_NO_PACKING = _Packing(never, 0, 0, 0, (0, 0, 0), None, None, None)


def _parents(parents: Tensor) -> Tensor:
    """The host's parents [rows, T], which leave the first token's undefined, as those of the operator [rows * T]."""
    own = parents.to(torch.int32, copy=True)
    own[:, 0] = -1  # it continues the state of the pool
    return own.view(-1)


def _extend(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, given: Mapping[str, Any]) -> Tensor:
    states, slots, offsets = given["ssm_states"], given["cache_indices"], given["query_start_loc"]
    snapshots, chunks = given.get("track_state"), given.get("track_chunk_idx")
    options: dict[str, Any] = {}
    if snapshots is not None and chunks is not None:
        rows = offsets.shape[0] - 1
        _copy_starts(snapshots, chunks, states, slots, rows)
        options["checkpoint_offsets"] = (chunks[:rows].clamp(min=0) * CHUNK)[:, None]
        options["checkpoint_slots"] = indices.slots(rows, slots.device, slots.dtype)[:, None]
        options["checkpoint_states"] = snapshots
    output = given.get("output")
    if output is not None and output.dtype == v.dtype and output.shape == v.shape and output.stride(-1) == 1:
        options["out"] = output
    o, _ = _chunk()(q, k, v, g, beta, states, offsets, state_indices=slots, **options)
    return o  # type: ignore[no-any-return]


def _copy_starts(snapshots: Tensor, chunks: Tensor, states: Tensor, slots: Tensor, rows: int) -> None:
    """Puts the state before the call into the rows whose chunk is 0: the operator's offset 0 stores nothing.

    Which rows these are is known on the device alone, so that every row is written; rows of other chunks all read one slot, which
    the cache holds, and are overwritten by the operator or never read.
    """
    own = torch.where(chunks[:rows] == 0, slots[:rows], 0).clamp(min=0)
    if snapshots.dtype == states.dtype:
        torch.index_select(states, 0, own, out=snapshots[:rows])
    else:
        snapshots[:rows].copy_(states.index_select(0, own))


def _extend_by_host(
    host: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The host's own extend. Its kernel returns all states and knows no snapshots, which the host then reads: they are filled."""
    o, last, h = host.extend(q, k, v, g, beta, **given)
    snapshots, chunks = given.get("track_state"), given.get("track_chunk_idx")
    if snapshots is None or chunks is None or getattr(host, "supports_track_state_snapshot", False):
        return o, last, h
    offsets = given["query_start_loc"].long()
    counts = (offsets.diff() + CHUNK - 1) // CHUNK
    every = h.view(-1, *h.shape[-3:])
    rows = len(counts)
    place = (counts.cumsum(0) - counts + chunks[:rows].clamp(min=0)).clamp(max=len(every) - 1)
    snapshots[:rows].copy_(every.index_select(0, place))
    return o, last, h
