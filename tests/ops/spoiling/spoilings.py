"""The kinds of spoiling: each turns a good call and one of its arguments into the call to make, where it applies.

A spoiling says nothing about what must happen: that is the table's part. It knows two things that the judge needs: which
arguments an error may name (a size that two tensors share may be held against either), and which call an accepted one must
equal (the good call, unless the spoiling gives another model).
"""

import contextlib
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from tests.ops.spoiling import memory
from tests.ops.spoiling.call import Call

Tensor = torch.Tensor


@dataclass
class Spoiled:
    call: Call
    names: set[str] = field(default_factory=set)  # arguments that an error may name besides the spoilt one
    model: Call | None = None  # the call whose results an accepted one must have; None = the good one
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    is_exact: bool = True  # results equal bit for bit; else within the rounding of a sum in another order


Spoiling = Callable[[Call, str, random.Random], Spoiled | None]  # None: does not apply to this call
SPOILINGS: dict[str, Spoiling] = {}


def spoiling(name: str) -> Callable[[Spoiling], Spoiling]:
    def register(function: Spoiling) -> Spoiling:
        if name in SPOILINGS:
            raise ValueError(f"two spoilings are named {name!r}")
        SPOILINGS[name] = function
        return function

    return register


def _leading(call: Call) -> str:
    """The tensor that the others are compared with in dtype, device and size: the first that is no index."""
    names = [path for path, x in call.tensors().items() if x.is_floating_point() and path in call.dims]
    return names[0] if names else next(iter(call.dims))


def _family(call: Call, path: str) -> set[str]:
    """Arguments that a wrong dtype or device of this one may be held against."""
    return set(call.dims) if path == _leading(call) else {path, _leading(call)}


def _put(call: Call, path: str, value: Any, **rest: Any) -> Spoiled:
    return Spoiled(call.with_values({path: value}), **rest)


@dataclass(frozen=True)
class Instead:
    """A value to put in a tensor's place; None is one too."""

    value: Any


def _on_tensor(name: str, *, is_layout: bool = False) -> Callable[[Callable[[Tensor], Any]], Spoiling]:
    """Registers a spoiling that replaces a tensor by something made of it (None: does not apply).

    is_layout: the values stay, and torch may sum them in another order."""

    def register(make: Callable[[Tensor], Any]) -> Spoiling:
        @spoiling(name)
        def spoil(call: Call, path: str, _: random.Random) -> Spoiled | None:
            tensor = call.get(path)
            if not isinstance(tensor, Tensor):
                return None
            value = make(tensor)
            if isinstance(value, Instead):
                return _put(call, path, value.value)
            return None if value is None else _put(call, path, value, is_exact=not is_layout)

        return spoil

    return register


# ------------------------------------------------------------------------------------------------- values instead of a value

VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "0": 0,
    "1": 1,
    "-1": -1,
    "-2": -2,
    "1.0": 1.0,
    "-1.0": -1.0,
    "-2**40": -(2**40),
    "nan": float("nan"),
    "inf": float("inf"),
    "10**400": 10**400,
    "1j": 1j,
    "a str": "1",
    "an empty str": "",
    "an unknown word": "gelu",
    "a word in capitals": "SILU",
    "a list": [1],
    "a dict": {"silu": 1},
    "an object": object(),
    "a Fraction": Fraction(1, 2),
    "a Decimal": Decimal("0.5"),
    "a numpy bool": np.bool_(True),
    "a numpy array of one": np.array(1.0),
    "a 0-d tensor": torch.tensor(1.0),
    "a tensor of one": torch.tensor([1.0]),
    "torch.float16": torch.float16,
    "torch.int32": torch.int32,
    "'float32'": "float32",
}


def _replaced(value: Any) -> Spoiling:
    return lambda call, path, _: _put(call, path, value) if path in call.arguments or "[" not in path else None


for _name, _value in VALUES.items():
    SPOILINGS[_name] = _replaced(_value)


def _register_numbers() -> None:
    for name, given, plain in (
        ("a numpy float32", np.float32(0.5), 0.5),
        ("a numpy float64", np.float64(0.5), 0.5),
        ("a numpy int", np.int64(2), 2.0),
        ("an int", 2, 2.0),
    ):

        def spoil(call: Call, path: str, _: random.Random, given: Any = given, plain: Any = plain) -> Spoiled:
            return Spoiled(call.with_values({path: given}), model=call.with_values({path: plain}))

        SPOILINGS[name] = spoil


_register_numbers()


@spoiling("'reference'")
def _reference(call: Call, path: str, _: random.Random) -> Spoiled:
    return _put(call, path, "reference")


# ------------------------------------------------------------------------------------------------------ no tensor at all


@_on_tensor("its values as a list")
def _as_list(x: Tensor) -> Any:
    return x.float().tolist() if x.is_floating_point() else x.tolist()


@_on_tensor("a numpy array")
def _as_array(x: Tensor) -> Any:
    return x.float().numpy() if x.is_floating_point() else x.contiguous().numpy()


for _name in ("None", "1.0", "a str", "a Fraction"):
    _on_tensor(f"{_name} instead")(lambda x, value=VALUES[_name]: Instead(value))


@_on_tensor("sparse COO")
def _as_coo(x: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(size=x.shape, dtype=x.dtype, check_invariants=False)


@_on_tensor("sparse CSR")
def _as_csr(x: Tensor) -> Tensor | None:
    if x.dim() != 2 or x.dtype == torch.float8_e4m3fn:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR support is in beta
        return x.contiguous().to_sparse_csr()


# ------------------------------------------------------------------------------------------------------- dtype and device


def _register_dtypes() -> None:
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.complex64, torch.int64, torch.int32, torch.int16,
        torch.uint8, torch.bool,
    ):  # fmt: skip

        def spoil(call: Call, path: str, _: random.Random, dtype: torch.dtype = dtype) -> Spoiled | None:
            tensor = call.get(path)
            if not isinstance(tensor, Tensor) or tensor.dtype == dtype:
                return None
            value = tensor.to(torch.float32).to(dtype) if tensor.dtype == torch.float8_e4m3fn else tensor.to(dtype)
            return _put(call, path, value, names=_family(call, path))

        SPOILINGS[f"dtype {str(dtype).removeprefix('torch.')}"] = spoil


_register_dtypes()


@spoiling("the other index dtype")
def _other_index(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor):
        return None
    return _put(call, path, tensor.to(torch.int32 if tensor.dtype == torch.int64 else torch.int64))


@spoiling("another 16-bit dtype")
def _other_half(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return None
    other = torch.float16 if tensor.dtype != torch.float16 else torch.bfloat16
    return _put(call, path, tensor.float().to(other), names=_family(call, path))


@spoiling("on the meta device")
def _on_meta(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or len(call.dims) < 2:
        return None
    return _put(call, path, tensor.to("meta"), names=set(call.dims))


# ------------------------------------------------------------------------------------------------------------------ shape


@spoiling("two dims more")
def _more_dims(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    return _put(call, path, tensor[None, None], names=_family(call, path)) if isinstance(tensor, Tensor) else None


@spoiling("0-d")
def _zero_d(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return None
    return _put(call, path, tensor.reshape(-1)[0], names=_family(call, path))


def _sharing(call: Call, path: str, name: str) -> set[str]:
    """Other arguments that a size is held against: tensors with a dimension of that name, flags that fix it."""
    plain = name.removesuffix("+")
    tensors = {other for other, dims in call.dims.items() if other != path and {plain, plain + "+"} & set(dims)}
    present = {tie for tie in call.ties.get(plain, ()) if tie in call.arguments or tie in call.dims}
    return tensors | present


def _resized(call: Call, path: str, rng: random.Random, *, longer: bool) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor):
        return None
    choices = []
    for i, name in enumerate(call.dims[path]):
        if name == "~" or tensor.shape[i] == 0 or (longer and name.endswith("+")):
            continue
        if not name.endswith("+") and not _sharing(call, path, name) - {path} and path not in call.ties.get(name, ()):
            continue  # nothing else has this size: it is free
        choices.append(i)
    if not choices:
        return None
    i = rng.choice(choices)
    name = call.dims[path][i]
    if longer:
        value = torch.cat([_bytes(tensor), _bytes(tensor.narrow(i, 0, 1))], dim=i).view(tensor.dtype)
    else:
        least = call.sizes.get(name.removesuffix("+"), tensor.shape[i]) if name.endswith("+") else tensor.shape[i]
        value = tensor.narrow(i, 0, least - 1)
    others = set(call.dims) if path == _leading(call) else {_leading(call)}  # others are compared with the leading one
    return _put(call, path, value, names=_sharing(call, path, name) | others)


def _bytes(x: Tensor) -> Tensor:
    """FP8 as bytes: torch joins no FP8 on every device."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


@spoiling("one shorter")
def _shorter(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    return _resized(call, path, rng, longer=False)


@spoiling("one longer")
def _longer(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    return _resized(call, path, rng, longer=True)


# ------------------------------------------------------------------------------------------------------------------ layout


def _lead(call: Call, path: str) -> int:
    """Leading dims that count rows."""
    return 2 if call.dims[path][:2] in (("B", "T"), ("B", "next")) else 1


@spoiling("last dim not contiguous")
def _last_strided(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or tensor.dim() == 0 or not tensor.numel() or tensor.shape[-1] < 2:
        return None
    if call.operator == "causal_conv1d_update" and path == "x" and tensor.dim() == 3:
        return None  # [B, dim, T] is taken by its strides
    strided = memory.last_strided(tensor)
    return _put(call, path, strided, is_exact=False) if strided.stride(-1) != 1 else None


@_on_tensor("misaligned base", is_layout=True)
def _shifted(x: Tensor) -> Tensor | None:
    return memory.shifted(x) if x.numel() and x.element_size() < memory.ALIGNMENT else None


@spoiling("misaligned rows")
def _odd_rows(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or tensor.dim() < 2 or not tensor.numel():
        return None
    lead = _lead(call, path)
    rows = tensor.shape[:lead].numel()
    return _put(call, path, memory.odd_rows(tensor, lead), is_exact=False) if rows > 1 else None


@spoiling("reversed in memory order")
def _permuted(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """All dims in the opposite order in memory."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or tensor.dim() < 2 or tensor.numel() < 2:
        return None
    order = list(range(tensor.dim()))[::-1]
    value = tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(order)
    return None if value.is_contiguous() else _put(call, path, value, is_exact=False)


@spoiling("rows of one element each")
def _expanded(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Stride 0 along the first dim: every row is the first one."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or tensor.dim() < 1 or tensor.shape[0] < 2:
        return None
    value = tensor[:1].expand(tensor.shape)
    model = call.with_values({path: value.clone(memory_format=torch.contiguous_format)})
    return _put(call, path, value, model=model, is_exact=False)


@spoiling("all rows in one place")
def _stride_zero(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Stride 0 along the first dim that has two entries, of a tensor that is written."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return None
    for i, size in enumerate(tensor.shape):
        if size > 1:
            return _put(call, path, tensor.narrow(i, 0, 1).clone().expand(tensor.shape))
    return None


@spoiling("overlapping rows")
def _overlapping_rows(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Neighbours along the first long dim share memory, at multiples of 16 bytes."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return None
    value = tensor.flatten(0, 1) if _lead(call, path) == 2 and tensor.is_contiguous() else tensor
    if value.shape[0] < 2:
        return None
    inner = value[0].numel() * tensor.element_size()
    step = (inner - 1) // memory.ALIGNMENT * memory.ALIGNMENT // tensor.element_size()
    if step < 1:
        return None
    squeezed = memory.squeezed_rows(value, step)
    if value is not tensor:
        strides = squeezed.stride()
        squeezed = squeezed.as_strided(tensor.shape, (tensor.shape[1] * strides[0], *strides))
    return _put(call, path, squeezed)


@spoiling("part of a larger tensor")
def _part(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Some rows before and after, so that the address stays a multiple of 16 bytes."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or tensor.dim() < 1 or not tensor.numel():
        return None
    before = memory.ALIGNMENT // math.gcd(memory.ALIGNMENT, tensor[0].numel() * tensor.element_size())
    rows = _bytes(tensor)
    larger = torch.cat([rows[:1].expand(before, *rows.shape[1:]), rows, rows[:1]]).view(tensor.dtype)
    return _put(call, path, larger[before:-1], is_exact=False)


# ------------------------------------------------------------------------------------------------------- shared memory


def _others(call: Call, path: str) -> list[str]:
    base = path.split("[")[0]
    return [other for other, x in call.tensors().items() if other.split("[")[0] != base and x.numel()]


@spoiling("overlaps another argument")
def _overlap(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    """The written tensor starts where the last 16 bytes of another argument are."""
    tensor, others = call.get(path), _others(call, path)
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
        for other in _others(call, path)
        if call.get(other).shape == tensor.shape and call.get(other).dtype == tensor.dtype and other != "x"
    ]
    if not like:
        return None
    other = rng.choice(like)
    return _put(call, path, call.get(other), names={other})


@spoiling("adjacent to another argument")
def _adjacent(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    """One buffer, disjoint: the written tensor follows another argument."""
    tensor, others = call.get(path), _others(call, path)
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
    lead = _lead(call, path)
    like = [
        other for other in _others(call, path)
        if call.get(other).dim() > lead and call.get(other).shape[:lead] == tensor.shape[:lead]
        and (lead == _lead(call, other) or tensor.shape[0] == 1)
    ]  # fmt: skip
    if not like:
        return None
    other = rng.choice(like)
    first, second = memory.side_by_side(call.get(other), tensor, lead=lead)
    return Spoiled(call.with_values({other: first, path: second}), is_exact=False)


@spoiling("one page buffer for both pools")
def _one_page(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """conv_state and ssm_state as the two parts of a page, as engines keep them."""
    other = {"ssm_state": "conv_state", "conv_state": "ssm_state"}[path]
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
        other for other in _others(call, path)
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
    like = [other for other in _others(call, path) if other not in WRITTEN and call.get(other).dtype == tensor.dtype]
    if not tensor.is_floating_point():
        like = [other for other in like if call.dims[other] == call.dims[path]]
    if not like:
        return None
    other = rng.choice(like)
    first, second = memory.overlapping(call.get(other), tensor)
    model = call.with_values({other: first.clone(), path: second.clone()})
    return Spoiled(call.with_values({other: first, path: second}), model=model, is_exact=False)


# Arguments that some operator writes.
WRITTEN = {"out", "initial_state", "conv_state", "conv_states", "ssm_state", "cache", "ring"}


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


# -------------------------------------------------------------------------------------------- how torch marks tensors


def _marked(name: str, mark: Callable[[Tensor], Tensor], *, floats_only: bool) -> None:
    def spoil(call: Call, path: str, _: random.Random) -> Spoiled | None:
        tensor = call.get(path)
        if not isinstance(tensor, Tensor) or (floats_only and not tensor.is_floating_point()):
            return None
        return _put(call, path, mark(tensor))

    SPOILINGS[name] = spoil


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _result_of_a_graph(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x.detach().requires_grad_().clone()


def _parameter(x: Tensor) -> Tensor:
    return torch.nn.Parameter(x.detach())


def _inference_tensor(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone(memory_format=torch.contiguous_format)


_marked("requires grad, a leaf", _leaf, floats_only=True)
_marked("requires grad, computed", _result_of_a_graph, floats_only=True)
_marked("an nn.Parameter", _parameter, floats_only=True)
_marked("an inference tensor", _inference_tensor, floats_only=False)


# ------------------------------------------------------------------------------------------------------- the whole call


@spoiling("nothing")
def _nothing(call: Call, path: str, _: random.Random) -> Spoiled:
    return Spoiled(call)


@spoiling("inside autocast to bfloat16")
def _autocast(call: Call, path: str, _: random.Random) -> Spoiled:
    return Spoiled(call, around=lambda: torch.autocast("cpu", torch.bfloat16))


@spoiling("inside autocast to float16")
def _autocast_half(call: Call, path: str, _: random.Random) -> Spoiled:
    return Spoiled(call, around=lambda: torch.autocast("cpu", torch.float16))


@spoiling("inside inference_mode")
def _inference_mode(call: Call, path: str, _: random.Random) -> Spoiled:
    return Spoiled(call, around=torch.inference_mode)


@spoiling("inside inference_mode, with its tensors")
def _inference_tensors(call: Call, path: str, _: random.Random) -> Spoiled:
    with torch.inference_mode():
        values = {path: x.clone(memory_format=torch.preserve_format) for path, x in call.tensors().items()}
    return Spoiled(call.with_values(values), around=torch.inference_mode, is_exact=False)


@spoiling("every float tensor requires grad")
def _all_grad(call: Call, path: str, _: random.Random) -> Spoiled:
    floats = {path: x for path, x in call.tensors().items() if x.is_floating_point()}
    return Spoiled(call.with_values({path: _result_of_a_graph(x) for path, x in floats.items()}), is_exact=False)


@spoiling("torch's default dtype is float64")
def _default_dtype(call: Call, path: str, _: random.Random) -> Spoiled:
    @contextlib.contextmanager
    def around() -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    return Spoiled(call, around=around)
