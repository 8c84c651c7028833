"""Arrays of the host: checked inputs of the metadata builders, and their way to the device without a wait."""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gdn.ops.delta_rule.problem import tells

Array = NDArray[Any]
Ints = Sequence[int] | Tensor | Array


def refuse(name: str, expected: str, got: object) -> NoReturn:
    """Raises ValueError naming the argument, what was expected and what came."""
    raise ValueError(f"{name}: expected {expected}, got {got}")


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ValueError, named after the argument, where the value is not one of the allowed ones."""
    if value not in allowed:
        refuse(name, f"one of {', '.join(map(repr, allowed))}", repr(value))


def longest_told(longest: int, num_sequences: int, num_tokens: int) -> int | None:
    """The tokens of the longest sequence as `max_seqlen` of a call; None where they tell nothing, so that the call is like others
    of its sizes."""
    return longest if longest and tells(longest, num_sequences, num_tokens) else None


def at_least(name: str, value: Any, least: int) -> None:
    """Raises TypeError or ValueError, named after the argument, unless the value is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        refuse(name, f"at least {least}", value)


def positive(name: str, value: Any) -> None:
    """Raises TypeError or ValueError, named after the argument, unless the value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not 0 < float(value) < math.inf:
        refuse(name, "a finite number above 0", value)


def check_rank(cp_rank: int, cp_size: int) -> None:
    """Raises TypeError or ValueError, named after the argument, where `cp_rank` is no rank of `cp_size`."""
    at_least("cp_size", cp_size, 1)
    at_least("cp_rank", cp_rank, 0)
    if cp_rank >= cp_size:
        refuse("cp_rank", f"0 to {cp_size - 1} (cp_size - 1)", cp_rank)


def as_array(name: str, values: Any, rows: int | None = None, ranks: tuple[int, ...] = (1,)) -> Array:
    """Integers (or flags) of the host as an int64 array. Tensors on another device are refused: reading them would wait.

    Raises TypeError or ValueError named after the argument.
    """
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            raise TypeError(f"{name}: expected values on the host, got a tensor on {values.device}")
        values = values.numpy()
    found = np.asarray(values)
    if not found.size and found.dtype.kind == "f":  # an empty list
        found = found.astype(np.int64)
    if found.dtype.kind not in "iub":
        raise TypeError(f"{name}: expected integers, got {found.dtype}")
    if found.ndim == 1 and not found.size and 1 not in ranks:
        found = found.reshape(0, 0)
    if found.ndim not in ranks:
        refuse(name, f"{' or '.join(map(str, ranks))} dimensions", f"shape {list(found.shape)}")
    if rows is not None and found.shape[0] != rows:
        refuse(name, f"{rows} rows", f"shape {list(found.shape)}")
    if found.dtype == np.uint64 and (beyond := found > np.iinfo(np.int64).max).any():
        refuse(name, "numbers that fit int64", found[beyond][0])
    return found.astype(np.int64)


def as_indices(name: str, values: Any, rows: int | None = None, ranks: tuple[int, ...] = (1,)) -> Array:
    """Indices: integers that fit int32, their dtype on the device."""
    found = as_array(name, values, rows, ranks)
    if (beyond := found != found.astype(np.int32)).any():
        refuse(name, "numbers that fit int32", found[beyond][0])
    return found


def as_lengths(name: str, values: Any, rows: int | None = None, *, summed: bool = False) -> Array:
    """Lengths: integers, none of them negative or beyond int32. summed: nor is their sum, where offsets follow from them."""
    found = as_array(name, values, rows)
    if are_beyond(found):
        expected = "no negative length" if (found < 0).any() else "numbers that fit int32"
        refuse(name, expected, found.tolist())
    if summed and (total := int(found.sum())) > np.iinfo(np.int32).max:
        refuse(name, "a sum that fits int32", total)
    return found


def as_steps(query_lens: Ints, seq_lens: Ints) -> tuple[Array, Array]:
    """New tokens of each row of a step, and all its tokens; no sequence is shorter than its new tokens."""
    queries = as_lengths("query_lens", query_lens, summed=True)
    lengths = as_lengths("seq_lens", seq_lens, queries.shape[0])
    if (lengths < queries).any():
        refuse("seq_lens", "no sequence shorter than its new tokens", lengths.tolist())
    return queries, lengths


def check_padding(rows: int, pad_to: int, most: int) -> None:
    """Raises TypeError or ValueError where a batch of so many rows cannot be padded to `pad_to`. most: max_num_sequences."""
    at_least("pad_to", pad_to, 0)
    if not rows <= pad_to <= most:
        refuse("pad_to", f"{rows} (rows) to {most} (max_num_sequences)", pad_to)


def as_tokens(name: str, values: Any, vocab_size: int | None = None) -> list[int]:
    """Token ids of one sequence as Python ints.

    Parameters
    ----------
    name : str
        Argument that an error is named after.
    values : iterable of int, or array or CPU tensor [tokens] of an integer dtype
        Tokens; integers of NumPy, and CPU tensors of one integer, count as ints. Flags and other numbers do not.
    vocab_size : int, optional
        Number of tokens of the model; None = any int64.

    Raises
    ------
    TypeError
        A token is no integer, or lies on another device: reading it would wait.
    ValueError
        A token is outside of the vocabulary, or the array has not one dimension.
    """
    if isinstance(values, Tensor | np.ndarray):
        if str(values.dtype) in ("torch.bool", "bool"):
            raise TypeError(f"{name}: expected integers, got {values.dtype}")
        tokens: list[int] = as_array(name, values).tolist()
    else:
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise TypeError(f"{name}: expected integers, got {type(values).__name__}")
        tokens = list(values)
        if set(map(type, tokens)) - {int}:
            tokens = [_as_token(f"{name}[{place}]", token) for place, token in enumerate(tokens)]
    lowest, highest = (-(2**63), 2**63 - 1) if vocab_size is None else (0, vocab_size - 1)
    if tokens and not (lowest <= min(tokens) and max(tokens) <= highest):
        place = next(place for place, token in enumerate(tokens) if not lowest <= token <= highest)
        expected = "a number that fits int64" if vocab_size is None else f"a token of 0 to {highest} (vocab_size - 1)"
        refuse(f"{name}[{place}]", expected, tokens[place])
    return tokens


def _as_token(name: str, token: Any) -> int:
    if isinstance(token, Tensor):
        is_integer = token.dim() == 0 and token.dtype != torch.bool and not (token.is_floating_point() or token.is_complex())
        if not is_integer or token.device.type != "cpu":
            got = f"a tensor of {token.dtype}, shape {list(token.shape)}, on {token.device}"
            raise TypeError(f"{name}: expected an int, got {got}")
        return int(token)
    at_least(name, token, -(2**63))
    return int(token)


def are_beyond(values: Array) -> bool:
    """Whether one of the values [int64] is negative or does not fit int32. One reduction: a negative one is large unsigned."""
    return bool(values.view(np.uint64).max(initial=0) > np.iinfo(np.int32).max)


def check_own_slots(names: Sequence[str], slots: Sequence[Array], rows: Sequence[Array]) -> None:
    """Raises ValueError where two live sequences, or two columns of one, have the same slot.

    names, slots, rows: of each argument its name, the slots of it that are in use [n], and the row of each [n].
    """
    every = np.concatenate(slots)
    order = np.argsort(every, kind="stable")
    same = np.flatnonzero(every[order][1:] == every[order][:-1])
    if same.size:
        pair = order[same[0] : same[0] + 2]
        name = np.repeat(np.array(names), [len(one) for one in slots])[pair[1]]
        where = " and ".join(map(str, np.concatenate(rows)[pair].tolist()))
        refuse(str(name), "a slot of its own for each state of the live sequences", f"slot {every[pair[0]]} in rows {where}")


def to_device(values: Array, device: torch.device) -> Tensor:
    """New tensor on the device. On CUDA the copy runs from pinned memory, which torch keeps until the copy is done."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone().to(device)


class PersistentBuffers:
    """Named device tensors that keep their address from batch to batch, as captured graphs need it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    def write(self, name: str, values: Array, rows: int, fill: int | bool, *, most: int) -> Tensor:
        """View of the first `rows` rows of a buffer of `most` rows: the values, then rows of `fill`."""
        padded = np.full((rows, *values.shape[1:]), fill, values.dtype)
        padded[: values.shape[0]] = values
        host = torch.from_numpy(padded)
        buffer = self._tensors.get(name)
        if buffer is None:
            with torch.inference_mode(False):  # else no later batch could be written outside of inference mode
                buffer = torch.empty((most, *padded.shape[1:]), dtype=host.dtype, device=self._device)
            self._tensors[name] = buffer
        view = buffer[:rows]
        view.copy_(host.pin_memory() if self._device.type == "cuda" else host, non_blocking=True)
        return view

    def constant(self, name: str, values: Array) -> Tensor:
        """Buffer whose values never change, made at the first call."""
        if name not in self._tensors:
            self._tensors[name] = to_device(values, self._device)
        return self._tensors[name]
