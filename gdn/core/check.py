"""Checks of arguments that every operator needs, imported as `check`: `check.tensor("q", q, ...)`.

A check reads metadata only: no launch, no wait for the device, no allocation, so that an error leaves everything unchanged.
Its message names the argument, what was expected and what came: "name: expected X, got Y". `gdn.core.values` checks the
values in tensors.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from gdn.core.modes import is_empty

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


def not_negative(argument: str, value: float) -> None:
    if value < 0:
        bad_value(argument, "a number >= 0", value)


def at_least(argument: str, value: int | None, minimum: int = 0) -> None:
    if value is not None and value < minimum:
        bad_value(argument, f"an int >= {minimum}", value)


def one_of(argument: str, value: object, accepted: Sequence[str | None]) -> None:
    """Checks that a value is one of the accepted words (or None, where it is listed)."""
    if value not in accepted:
        *others, last = map(repr, accepted)
        bad_value(argument, f"{', '.join(others)} or {last}", repr(value))


def null_slot(null_slot: int) -> None:
    if not -1 <= null_slot < 2**31:
        bad_value("null_slot", "an int >= -1 that fits int32", null_slot)


def max_seqlen(max_seqlen: int | None) -> None:
    if max_seqlen is not None and max_seqlen < 0:
        bad_value("max_seqlen", "an int >= 0 or None", max_seqlen)


def layout(argument: str, value: object) -> None:
    """Raises TypeError unless the value is a strided tensor."""
    if not isinstance(value, torch.Tensor):
        bad_type(argument, "a torch.Tensor", type(value).__name__)
    if value.layout != torch.strided or value.is_nested:
        bad_type(argument, "a dense tensor", "a nested tensor" if value.is_nested else str(value.layout))


def tensor(
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
    layout(argument, value)
    assert isinstance(value, torch.Tensor)
    if dtypes is not None and value.dtype not in dtypes:
        bad_type(argument, "dtype " + " or ".join(dtype_name(dtype) for dtype in dtypes), value.dtype)
    if shape is not None:
        # A size that a compiler keeps symbolic is compared when the program runs.
        pairs = [(h, w) for h, w in zip(value.shape, shape, strict=False) if isinstance(h, int) and isinstance(w, int)]
        if value.dim() != len(shape) or any(have != want for have, want in pairs):
            wanted = ", ".join("*" if s is None else str(s) for s in shape)
            bad_value(argument, f"shape [{wanted}]", f"shape {list(value.shape)}")
    if device is not None and value.device != device:
        bad_value(argument, f"a tensor on {device}", f"a tensor on {value.device}")
    if last_contiguous and value.dim() and value.shape[-1] > 1 and value.stride(-1) != 1:
        bad_value(argument, "a contiguous last dimension (stride 1)", f"strides {value.stride()}")


def optional(argument: str, value: object, **wanted: Any) -> None:
    """Checks a tensor where it is given."""
    if value is not None:
        tensor(argument, value, **wanted)


def out(out: Tensor | None, shape: Sequence[int | str], dtype: torch.dtype, device: torch.device) -> None:
    """Checks `out`, where it is given: this shape and dtype, last dimension contiguous."""
    optional("out", out, shape=shape, dtypes=(dtype,), device=device, last_contiguous=True)


def is_less(size: int, least: int) -> bool:
    """Whether a size is known to be too small. One that a compiler keeps symbolic is compared when the program runs."""
    return isinstance(size, int) and isinstance(least, int) and size < least


def offsets(name: str, offsets: Tensor | None, device: torch.device, otherwise: int) -> int:
    """Checks token offsets [N + 1]; returns N, or `otherwise` without offsets."""
    if offsets is None:
        return otherwise
    tensor(name, offsets, shape=("N + 1",), dtypes=INDEX_DTYPES, device=device)
    if is_empty(offsets.shape[0]):
        bad_value(name, "at least one offset", "shape [0]")
    return offsets.shape[0] - 1


def indices(
    name: str, indices: Tensor, num_sequences: int, device: torch.device, *, ranks: tuple[int, ...], has_offsets: bool = True
) -> None:
    """Checks slots [>= N], or [>= N, columns] where ranks allow it.

    has_offsets: offsets say how many sequences there are, so rows after the N-th are ignored. Without them there are N rows:
    more would be a mistake that nothing else shows.
    """
    tensor(name, indices, dtypes=INDEX_DTYPES, device=device)
    rows = ">= N" if has_offsets else "N"
    wanted = " or ".join({1: f"[{rows}]", 2: f"[{rows}, columns >= 1]"}[rank] for rank in ranks)
    is_wrong = indices.dim() not in ranks or is_less(indices.shape[0], num_sequences) or is_empty(*indices.shape[1:])
    if is_wrong or (not has_offsets and is_less(num_sequences, indices.shape[0])):
        bad_value(name, f"shape {wanted} with N = {num_sequences}", f"shape {list(indices.shape)}")


def per_sequence(
    name: str, value: Tensor | None, num_sequences: int, device: torch.device, dtypes: tuple[torch.dtype, ...], *,
    has_offsets: bool = True,
) -> None:  # fmt: skip
    """One value per sequence, [>= N], or None. has_offsets: as for `indices`."""
    if value is None:
        return
    rows = ">= N" if has_offsets else "N"
    tensor(name, value, shape=(rows,), dtypes=dtypes, device=device)
    if is_less(value.shape[0], num_sequences) or (not has_offsets and is_less(num_sequences, value.shape[0])):
        bad_value(name, f"shape [{rows}] with N = {num_sequences}", f"shape {list(value.shape)}")


def windows(name: str, pool: Tensor, dim: int, columns: int, device: torch.device, *, slots: str = "slots") -> None:
    """Slots of a convolution's windows, [slots, dim, >= columns]. slots: word for the first dimension."""
    tensor(name, pool, shape=(slots, dim, f"columns >= {columns}"), dtypes=FLOAT_DTYPES, device=device)
    if is_less(pool.shape[2], columns):
        bad_value(name, f"shape [{slots}, {dim}, columns >= {columns}]", f"shape {list(pool.shape)}")


def absent(arguments: Mapping[str, Tensor | None], when: str) -> None:
    """Raises ValueError for a tensor that may not be given. when: the condition, as the message has it after None."""
    for name, value in arguments.items():
        if value is not None:
            bad_value(name, f"None {when}", "a tensor")


def needs_checkpoints(name: str, kept: Tensor | None, offsets: Tensor | None) -> None:
    """Raises ValueError for a tensor that takes checkpoints where there are none."""
    if kept is not None and offsets is None:
        bad_value(name, "None without checkpoint_offsets", "a tensor")


def checkpoints(
    offsets: Tensor | None, slots: Tensor | None, pool: tuple[str, Tensor | None], num_sequences: int, *,
    has_offsets: bool = True,
) -> None:  # fmt: skip
    """Checks checkpoint_offsets and checkpoint_slots [>= N, C]. pool: name and value of the argument that they require.

    has_offsets: token offsets are given, as for `indices`.
    """
    if (offsets is None) != (slots is None):
        missing = "checkpoint_offsets" if offsets is None else "checkpoint_slots"
        bad_value(missing, "checkpoint_offsets and checkpoint_slots together", "None")
    if offsets is None or slots is None:
        return
    name, required = pool
    if required is None:
        bad_value("checkpoint_offsets", f"None without {name}", "a tensor")
    indices("checkpoint_offsets", offsets, num_sequences, required.device, ranks=(2,), has_offsets=has_offsets)
    tensor("checkpoint_slots", slots, shape=offsets.shape, dtypes=INDEX_DTYPES, device=required.device)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in problems: torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")
