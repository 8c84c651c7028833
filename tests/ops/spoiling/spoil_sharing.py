"""Spoilings of memory that two arguments share, disjoint or not, and of the forms in place."""

import random

import torch

from tests.ops.spoiling import memory
from tests.ops.spoiling.call import Call
from tests.ops.spoiling.spoiling import Spoiled, lead_dims, put, spoiling

Tensor = torch.Tensor


def other_tensors(call: Call, path: str) -> list[str]:
    base = path.split("[")[0]
    return [other for other, x in call.tensors().items() if other.split("[")[0] != base and x.numel()]


@spoiling("overlaps another argument")
def _overlap(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    """The written tensor starts where the last 16 bytes of another argument are."""
    tensor, others = call.get(path), other_tensors(call, path)
    if not isinstance(tensor, Tensor) or not tensor.numel() or not others:
        return None
    other = rng.choice(others)
    first, second = memory.overlapping(call.get(other), tensor)
    if other == "x" and first.data_ptr() == second.data_ptr():
        return None  # in place
    return Spoiled(call.with_values({other: first, path: second}), names={other})


@spoiling("is another argument")
def _same_memory(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    """The very tensor that another argument is (out=v, out=q), where shape and dtype allow it."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return None
    like = [
        other
        for other in other_tensors(call, path)
        if call.get(other).shape == tensor.shape and call.get(other).dtype == tensor.dtype and other != "x"
    ]
    if not like:
        return None
    other = rng.choice(like)
    return put(call, path, call.get(other), names={other})


@spoiling("adjacent to another argument")
def _adjacent(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    """One buffer, disjoint: the written tensor follows another argument."""
    tensor, others = call.get(path), other_tensors(call, path)
    if not isinstance(tensor, Tensor) or not tensor.numel() or not others:
        return None
    other = rng.choice(others)
    first, second = memory.adjacent(call.get(other), tensor)
    return Spoiled(call.with_values({other: first, path: second}), is_exact=False)


@spoiling("interleaved with another argument")
def _interleaved(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    """One buffer, disjoint: a row of the written tensor, a row of another argument, and so on."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or tensor.dim() < 2 or not tensor.numel():
        return None
    lead = lead_dims(call, path)
    like = [
        other for other in other_tensors(call, path)
        if call.get(other).dim() > lead and call.get(other).shape[:lead] == tensor.shape[:lead]
        and (lead == lead_dims(call, other) or tensor.shape[0] == 1)
    ]  # fmt: skip
    if not like:
        return None
    other = rng.choice(like)
    first, second = memory.side_by_side(call.get(other), tensor, lead=lead)
    return Spoiled(call.with_values({other: first, path: second}), is_exact=False)


@spoiling("one page buffer for both pools")
def _one_page(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Windows and states as the two parts of a page, as engines keep them."""
    windows = "conv_state" if "conv_state" in call.arguments else "conv_states"
    other = windows if path == "ssm_state" else "ssm_state"
    first, second = call.get(other), call.get(path)
    if first.shape[0] != second.shape[0]:
        return None
    left, right = memory.side_by_side(first, second, lead=1)
    return Spoiled(call.with_values({other: left, path: right}), is_exact=False)


@spoiling("one tensor for two read-only arguments")
def _twice(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor):
        return None
    like = [
        other for other in other_tensors(call, path)
        if other not in WRITTEN and call.dims[other] == call.dims[path] and call.get(other).shape == tensor.shape
        and call.get(other).dtype == tensor.dtype
    ]  # fmt: skip
    if not like:
        return None
    other = rng.choice(like)
    return Spoiled(
        call.with_values({other: tensor}), model=call.with_values({other: tensor.clone()}), names={other}, is_exact=False
    )


@spoiling("overlaps a read-only argument")
def _overlap_read(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    """Two inputs share a part of their memory, as views of one projection may."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return None
    like = [other for other in other_tensors(call, path) if other not in WRITTEN and call.get(other).dtype == tensor.dtype]
    if not tensor.is_floating_point():
        like = [other for other in like if call.dims[other] == call.dims[path]]
    if not like:
        return None
    other = rng.choice(like)
    first, second = memory.overlapping(call.get(other), tensor)
    model = call.with_values({other: first.clone(), path: second.clone()})
    return Spoiled(call.with_values({other: first, path: second}), model=model, is_exact=False)


# Arguments that some operator writes.
WRITTEN = {
    "out", "initial_state", "conv_state", "conv_states", "ssm_state", "checkpoint_states", "checkpoint_windows",
    "intermediate_states", "cache", "v_cache", "ring", "state_tokens", "num_accepted_tokens",
}  # fmt: skip


@spoiling("in place on x")
def _in_place(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """out=x, exactly the same memory: allowed where the operator says so."""
    x = call.get("x")
    if not x.numel() or x.stride(-1) != 1 and x.dim() == 2:
        return None
    given = x.clone(memory_format=torch.preserve_format)
    model = call.with_values({"x": x.clone(), "out": torch.zeros_like(x, memory_format=torch.contiguous_format)})
    return Spoiled(call.with_values({"x": given, "out": given}), model=model)


@spoiling("in place on an equal view of x")
def _in_place_view(call: Call, path: str, _: random.Random) -> Spoiled | None:
    spoiled = _in_place(call, path, _)
    if spoiled is not None:
        spoiled.call = spoiled.call.with_values({"out": spoiled.call.get("x").view_as(spoiled.call.get("x"))})
    return spoiled


@spoiling("in place on an x whose last dim is not contiguous")
def _in_place_strided(call: Call, path: str, _: random.Random) -> Spoiled | None:
    x = call.get("x")
    if x.dim() != 2 or x.shape[0] < 2 or x.shape[1] < 2:
        return None
    strided = memory.last_strided(x)
    return Spoiled(call.with_values({"x": strided, "out": strided}), names={"x"})


@spoiling("one row further than x")
def _one_row_on(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """x and out are rows 0..n and 1..n + 1 of one tensor."""
    x = call.get("x")
    if x.shape[0] < 2:
        return None
    rows = torch.cat([x, x[-1:]])
    return Spoiled(call.with_values({"x": rows[:-1], "out": rows[1:]}), names={"x"})


@spoiling("x in the other memory order")
def _other_order(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """out has x's memory, but other strides."""
    x = call.get("x")
    if x.shape[-1] != x.shape[-2] or x.shape[-1] < 2:
        return None
    x = x.clone(memory_format=torch.contiguous_format)
    return Spoiled(call.with_values({"x": x, "out": x.mT}), names={"x"})
