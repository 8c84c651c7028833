"""Checks and copies of tensors that every operator needs.

A check reads metadata only: no launch, no wait for the device, no allocation, so that an error leaves everything unchanged.
Its message names the argument, what was expected and what came: "name: expected X, got Y". `gdn.ops._values` checks the
values in tensors. Copies are made after a kernel has been chosen; the reference takes the tensors of the caller.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from gdn.ops._modes import address, has_memory, is_empty, is_tracing
from gdn.runtime import log

Tensor = torch.Tensor

ALIGNMENT = 16  # bytes: the widest load or store of a thread, and the unit of bulk copies

FP8 = torch.float8_e4m3fn
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of the indexer and of attention
INDEX_DTYPES = (torch.int32, torch.int64)

CONV_ACTIVATIONS = ("silu", "swish", None)
GATE_ACTIVATIONS = ("silu", "swish", "sigmoid")


def bad_value(argument: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{argument}: expected {expected}, got {got}")


def bad_type(argument: str, expected: str, got: object) -> NoReturn:
    raise TypeError(f"{argument}: expected {expected}, got {got}")


def check_not_negative(argument: str, value: float) -> None:
    if value < 0:
        bad_value(argument, "a number >= 0", value)


def check_at_least(argument: str, value: int, minimum: int = 0) -> None:
    if value < minimum:
        bad_value(argument, f"an int >= {minimum}", value)


def check_one_of(argument: str, value: object, accepted: Sequence[str | None]) -> None:
    """Checks that a value is one of the accepted words (or None, where it is listed)."""
    if value not in accepted:
        *others, last = map(repr, accepted)
        bad_value(argument, f"{', '.join(others)} or {last}", repr(value))


def check_null_slot(null_slot: int) -> None:
    if not -1 <= null_slot < 2**31:
        bad_value("null_slot", "an int >= -1 that fits int32", null_slot)


def check_layout(argument: str, value: object) -> None:
    """Raises TypeError unless the value is a strided tensor."""
    if not isinstance(value, torch.Tensor):
        bad_type(argument, "a torch.Tensor", type(value).__name__)
    if value.layout != torch.strided or value.is_nested:
        bad_type(argument, "a dense tensor", "a nested tensor" if value.is_nested else str(value.layout))


def check_tensor(
    argument: str,
    value: object,
    *,
    shape: Sequence[int | str | None] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
    last_contiguous: bool = False,
) -> None:
    """Raises TypeError for a non-tensor or a wrong dtype, ValueError for a wrong shape, device or last stride.

    shape: an int must match, a str names a free dimension in the message, None is free.
    """
    check_layout(argument, value)
    assert isinstance(value, torch.Tensor)
    if dtypes is not None and value.dtype not in dtypes:
        bad_type(argument, "dtype " + " or ".join(dtype_name(dtype) for dtype in dtypes), value.dtype)
    if shape is not None:
        fits = value.dim() == len(shape)
        if fits:
            for have, want in zip(value.shape, shape, strict=True):
                # A size that a compiler keeps symbolic is compared when the program runs.
                if isinstance(want, int) and isinstance(have, int) and have != want:
                    fits = False
                    break
        if not fits:
            wanted = ", ".join("*" if s is None else str(s) for s in shape)
            bad_value(argument, f"shape [{wanted}]", f"shape {list(value.shape)}")
    if device is not None and value.device != device:
        bad_value(argument, f"a tensor on {device}", f"a tensor on {value.device}")
    if last_contiguous and value.dim() and value.shape[-1] > 1 and value.stride(-1) != 1:
        bad_value(argument, "a contiguous last dimension (stride 1)", f"strides {value.stride()}")


def check_out(out: Tensor | None, shape: Sequence[int | str], dtype: torch.dtype, device: torch.device) -> None:
    """Checks `out`, where it is given: this shape and dtype, last dimension contiguous."""
    if out is not None:
        check_tensor("out", out, shape=shape, dtypes=(dtype,), device=device, last_contiguous=True)


def is_less(size: int, least: int) -> bool:
    """Whether a size is known to be too small. One that a compiler keeps symbolic is compared when the program runs."""
    return isinstance(size, int) and isinstance(least, int) and size < least


def check_offsets(name: str, offsets: Tensor, device: torch.device) -> None:
    """Token offsets [N + 1]."""
    check_tensor(name, offsets, shape=("N + 1",), dtypes=INDEX_DTYPES, device=device)
    if is_empty(offsets.shape[0]):
        bad_value(name, "at least one offset", "shape [0]")


def check_indices(name: str, indices: Tensor, num_sequences: int, device: torch.device, *, ranks: tuple[int, ...]) -> None:
    """Slots [>= N], or [>= N, columns] where ranks allow it."""
    check_tensor(name, indices, dtypes=INDEX_DTYPES, device=device)
    wanted = " or ".join({1: "[>= N]", 2: "[>= N, columns >= 1]"}[rank] for rank in ranks)
    if indices.dim() not in ranks or is_less(indices.shape[0], num_sequences) or is_empty(*indices.shape[1:]):
        bad_value(name, f"shape {wanted} with N = {num_sequences}", f"shape {list(indices.shape)}")


def check_per_sequence(
    name: str, value: Tensor, num_sequences: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    """One value per sequence, [>= N]."""
    check_tensor(name, value, shape=(">= N",), dtypes=dtypes, device=device)
    if is_less(value.shape[0], num_sequences):
        bad_value(name, f"shape [>= N] with N = {num_sequences}", f"shape {list(value.shape)}")


def check_checkpoints(offsets: Tensor | None, slots: Tensor | None, pool: tuple[str, Tensor | None], num_sequences: int) -> None:
    """Checks checkpoint_offsets and checkpoint_slots [>= N, C]. pool: name and value of the argument that they require."""
    if (offsets is None) != (slots is None):
        missing = "checkpoint_offsets" if offsets is None else "checkpoint_slots"
        bad_value(missing, "checkpoint_offsets and checkpoint_slots together", "None")
    if offsets is None or slots is None:
        return
    name, required = pool
    if required is None:
        bad_value("checkpoint_offsets", f"None without {name}", "a tensor")
    check_indices("checkpoint_offsets", offsets, num_sequences, required.device, ranks=(2,))
    check_tensor("checkpoint_slots", slots, shape=offsets.shape, dtypes=INDEX_DTYPES, device=required.device)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in problems: torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtypes_of(**tensors: Tensor | None) -> dict[str, Any]:
    """Fields `<name>_dtype` of a problem; None where a tensor is left out."""
    return {f"{name}_dtype": None if x is None else dtype_name(x.dtype) for name, x in tensors.items()}


def as_int32(x: Tensor) -> Tensor:
    """x in int32, saturated: a value that does not fit int32 stays outside of every range."""
    return x if x.dtype == torch.int32 else x.clamp(-(2**31), 2**31 - 1).to(torch.int32)


def contiguous_int32(x: Tensor) -> Tensor:
    return as_int32(x).contiguous()


def as_int64(x: Tensor) -> Tensor:
    return x.to(torch.int64)


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Counts in an index dtype, saturated."""
    return as_int32(x) if dtype == torch.int32 else x.to(dtype)


def common_dtype(*indices: Tensor | None) -> torch.dtype:
    """Dtype in which all slots of a call are compared: int64 where one of them is int64."""
    return torch.int64 if any(x is not None and x.dtype == torch.int64 for x in indices) else torch.int32


def is_aligned(x: Tensor, size: int = ALIGNMENT) -> bool:
    """Whether the last dimension is contiguous and every row starts at a multiple of `size` bytes."""
    if x.shape[-1] > 1 and x.stride(-1) != 1 or address(x) % size:
        return False
    element = x.element_size()
    # Strides of dimensions with one entry are never used.
    return all(x.shape[i] <= 1 or x.stride(i) * element % size == 0 for i in range(x.dim() - 1))


def aligned(name: str, x: Tensor, size: int = ALIGNMENT) -> Tensor:
    """x, or a contiguous copy, logged once, where its rows do not start at multiples of `size` bytes."""
    if is_aligned(x, size):
        return x
    return copied(name, x, f"its rows are not contiguous or do not start at multiples of {size} bytes")


def contiguous_last(name: str, x: Tensor) -> Tensor:
    """x, or a contiguous copy, logged once, where its last dimension is not contiguous."""
    if x.shape[-1] <= 1 or x.stride(-1) == 1:
        return x
    return copied(name, x, "its last dimension is not contiguous")


def contiguous(name: str, x: Tensor) -> Tensor:
    """x, or a copy, logged once, where it is not contiguous as a whole or its address is not a multiple of 16 bytes."""
    if x.is_contiguous() and address(x) % ALIGNMENT == 0:
        return x
    return copied(name, x, "it is not contiguous or its address is not a multiple of 16 bytes")


def copied(name: str, x: Tensor, why: str) -> Tensor:
    """A contiguous copy, logged once."""
    log_copy(name, x, why)
    return x.clone(memory_format=torch.contiguous_format)


def log_copy(name: str, x: Tensor, why: str) -> None:
    """Warns once that an argument is copied; never while a compiler traces, since the reference may run in the end."""
    if not is_tracing():
        message = f"{name}: copied, because {why} (shape {list(x.shape)}, strides {x.stride()})"
        log.once(message, logging.WARNING, key=("copied", name))


def optional(function: Callable[[Tensor], Tensor], x: Tensor | None) -> Tensor | None:
    """function(x), or None where the argument was left out."""
    return None if x is None else function(x)


def constant(x: Tensor) -> Tensor:
    """A weight, bias or state that is only read: contiguous, with an address that is a multiple of 16 bytes.

    Copied silently where it is not: it is small, or new in every call.
    """
    x = x.contiguous()
    return x.clone() if address(x) % ALIGNMENT else x


def target(out: Tensor) -> Tensor:
    """The tensor that a kernel writes for `out`: itself where its rows are aligned, else a new one to copy from."""
    return out if is_aligned(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)


def even_offsets(batch: int, length: int, device: torch.device) -> Tensor:
    """[batch + 1] int32: 0, length, 2 * length, ..."""
    return _kept(_build_offsets, batch, length, device)


def zeros(count: int, device: torch.device) -> Tensor:
    """[count] float32."""
    return _kept(_build_zeros, count, device)


def row_indices(count: int, device: torch.device) -> Tensor:
    """[count] int32: 0, 1, 2, ..."""
    return even_offsets(count, 1, device)[:count]


@functools.lru_cache(maxsize=1024)
def _build_offsets(batch: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


@functools.lru_cache(maxsize=64)
def _build_zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.float32, device=device)


def _kept(build: Any, *arguments: Any) -> Tensor:
    """A constant on the device that comes last in the arguments, kept between calls.

    During graph capture the constant is built as part of the graph: memory that belongs to a graph, with contents that exist
    only after a replay, must not reach other calls. The same holds for a tensor without memory.
    """
    if not has_memory() or (arguments[-1].type == "cuda" and torch.cuda.is_current_stream_capturing()):
        build = build.__wrapped__
    return build(*arguments)  # type: ignore[no-any-return]
