"""Argument checks shared by the public operators: every message names the argument, what was expected and what came."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import NoReturn

import torch


def bad_value(argument: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{argument}: expected {expected}, got {got}")


def bad_type(argument: str, expected: str, got: object) -> NoReturn:
    raise TypeError(f"{argument}: expected {expected}, got {got}")


def check_number(argument: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        bad_type(argument, "a number", type(value).__name__)
    try:
        number = float(value)
    except OverflowError:  # an int or a fraction that no float holds
        number = math.inf
    if not math.isfinite(number):
        bad_value(argument, "a finite number", number)
    return number


def check_eps(argument: str, value: object) -> float:
    number = check_number(argument, value)
    if number < 0:
        bad_value(argument, "a number of at least 0", number)
    return number


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
    if not isinstance(value, torch.Tensor):
        bad_type(argument, "a torch.Tensor", type(value).__name__)
    if dtypes is not None and value.dtype not in dtypes:
        bad_type(argument, "dtype " + " or ".join(str(d).removeprefix("torch.") for d in dtypes), value.dtype)
    if shape is not None:
        fits = value.dim() == len(shape)
        if fits:
            for have, want in zip(value.shape, shape, strict=True):
                if isinstance(want, int) and have != want:
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
