"""Argument checks shared by the public operators: every message names the argument, what was expected and what came."""

from collections.abc import Sequence
from typing import NoReturn

import torch


def bad_value(argument: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{argument}: expected {expected}, got {got}")


def bad_type(argument: str, expected: str, got: object) -> NoReturn:
    raise TypeError(f"{argument}: expected {expected}, got {got}")


def check_not_negative(argument: str, value: float) -> None:
    if value < 0:
        bad_value(argument, "a number of at least 0", value)


def check_at_least(argument: str, value: int, minimum: int = 0) -> None:
    if value < minimum:
        bad_value(argument, f"an int >= {minimum}", value)


def check_layout(argument: str, value: object) -> None:
    """Raises TypeError for what is no strided tensor."""
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
        bad_type(argument, "dtype " + " or ".join(str(d).removeprefix("torch.") for d in dtypes), value.dtype)
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


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16", the form problems use."""
    return str(dtype).removeprefix("torch.")
