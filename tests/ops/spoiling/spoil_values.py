"""Spoilings of what a value is: another type, no tensor, another dtype or device, another shape."""

import random
import warnings
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from tests.ops.spoiling.call import Call
from tests.ops.spoiling.spoiling import SPOILINGS, Instead, Spoiled, Spoiling, as_bytes, family, leading, on_tensor, put, spoiling

Tensor = torch.Tensor

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
    return lambda call, path, _: put(call, path, value) if path in call.arguments or "[" not in path else None


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
    return put(call, path, "reference")


@on_tensor("its values as a list")
def _as_list(x: Tensor) -> Any:
    return x.float().tolist() if x.is_floating_point() else x.tolist()


@on_tensor("a numpy array")
def _as_array(x: Tensor) -> Any:
    return x.float().numpy() if x.is_floating_point() else x.contiguous().numpy()


for _name in ("None", "1.0", "a str", "a Fraction"):
    on_tensor(f"{_name} instead")(lambda x, value=VALUES[_name]: Instead(value))


@on_tensor("sparse COO")
def _as_coo(x: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(size=x.shape, dtype=x.dtype, check_invariants=False)


@on_tensor("sparse CSR")
def _as_csr(x: Tensor) -> Tensor | None:
    if x.dim() != 2 or x.dtype == torch.float8_e4m3fn:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR support is in beta
        return x.contiguous().to_sparse_csr()


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
            return put(call, path, value, names=family(call, path))

        SPOILINGS[f"dtype {str(dtype).removeprefix('torch.')}"] = spoil


_register_dtypes()


@spoiling("the other index dtype")
def _other_index(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor):
        return None
    return put(call, path, tensor.to(torch.int32 if tensor.dtype == torch.int64 else torch.int64))


@spoiling("another 16-bit dtype")
def _other_half(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or path in call.alone:
        return None
    other = torch.float16 if tensor.dtype != torch.float16 else torch.bfloat16
    return put(call, path, tensor.float().to(other), names=family(call, path))


@spoiling("on the meta device")
def _on_meta(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or len(call.dims) < 2:
        return None
    return put(call, path, tensor.to("meta"), names=set(call.dims))


@spoiling("two dims more")
def _more_dims(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or path in call.alone:
        return None
    return put(call, path, tensor[None, None], names=family(call, path))


@spoiling("0-d")
def _zero_d(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return None
    return put(call, path, tensor.reshape(-1)[0], names=family(call, path))


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
        value = torch.cat([as_bytes(tensor), as_bytes(tensor.narrow(i, 0, 1))], dim=i).view(tensor.dtype)
    else:
        least = call.sizes.get(name.removesuffix("+"), tensor.shape[i]) if name.endswith("+") else tensor.shape[i]
        value = tensor.narrow(i, 0, least - 1)
    others = set(call.dims) if path == leading(call) else {leading(call)}  # others are compared with the leading one
    return put(call, path, value, names=_sharing(call, path, name) | others)


@spoiling("one shorter")
def _shorter(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    return _resized(call, path, rng, longer=False)


@spoiling("one longer")
def _longer(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    return _resized(call, path, rng, longer=True)
