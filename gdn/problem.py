"""One frozen dataclass per operator: what a kernel is compiled for, and what it is tuned for.

Every field says of which keys it is a part:

- `field(metadata=TUNES)`: static, and changes which tiles are best: heads, dims, layouts, dtypes of the large tensors. Part of
  the compile key and of the tune key.
- `field(metadata=COMPILES)`: static, and the best tiles do not depend on it: dtypes of indices, gates and weights, masks, flags.
  Part of the compile key alone; whether tiles are legal with it is for the kernel's `fits` to say.
- `size()`: a count that varies from call to call. It chooses a configuration and never appears in compiled code.
- `hint()`: what the host happens to know of the values of a call's tensors, as a number; 0: nothing. It may choose a
  configuration, and is part of no key.

Everything is plain Python, so problems pickle, hash, compare and print; dtypes are torch's names without the `torch.` prefix
("bfloat16", "float8_e4m3fn").

Imports nothing of this project but the description of a device.
"""

import functools
from dataclasses import field, fields
from typing import Any, ClassVar

from gdn.device import DeviceSpec

Tensor = Any  # in Params a torch.Tensor, or in a kernel its DSL's tensor: this leaf imports neither
DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int64": 8, "int32": 4, "bool": 1,
}  # fmt: skip

TUNES: dict[str, bool] = {"tunes": True}
COMPILES: dict[str, bool] = {"tunes": False}


def size() -> Any:
    """A dataclass field that is a size: it chooses among tuned entries, and is no part of the compile key."""
    return field(metadata={"size": True})


def hint() -> Any:
    """A dataclass field that is a hint: part of neither the compile key nor the tune key, nor of a table's sizes."""
    return field(default=0, kw_only=True, metadata={"hint": True})


@functools.cache
def _names(problem: type, kind: str | None) -> tuple[str, ...]:
    """The names of its fields that are sizes, hints, or neither. Kept: a call of new sizes asks several times."""
    return tuple(f.name for f in fields(problem) if next((k for k in ("size", "hint") if f.metadata.get(k)), None) == kind)


def _text(values: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())


class Problem:
    """Common behaviour of the problem dataclasses."""

    op: ClassVar[str]  # the operator's name in the registry, the tables and GDN_BACKEND_<OP>

    def __init_subclass__(cls, op: str | None = None) -> None:
        """op: given by the problem of an operator (`class ChunkProblem(DeltaRuleProblem, op="chunk")`)."""
        if op is not None:
            cls.op = op

    def static_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _names(type(self), None)}  # type: ignore[arg-type]

    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _names(type(self), "size")}  # type: ignore[arg-type]

    def hints(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _names(type(self), "hint")}  # type: ignore[arg-type]

    def static_key(self) -> str:
        """Stable text form of the static fields: the compile key."""
        return _text(self.static_fields())

    @classmethod
    @functools.cache
    def tune_names(cls) -> tuple[str, ...]:
        """The names of the fields of the tune key. TypeError where a static field does not say whether it is one."""
        every = fields(cls)  # type: ignore[arg-type]
        undecided = [f.name for f in every if not {"size", "hint", "tunes"} & f.metadata.keys()]
        if undecided:
            kinds = "metadata=TUNES, metadata=COMPILES, size() or hint()"
            raise TypeError(f"{cls.__name__}: expected {kinds} on every field, got none on {', '.join(undecided)}")
        return tuple(f.name for f in every if f.metadata.get("tunes"))

    def tune_fields(self) -> dict[str, Any]:
        """The static fields that change which tiles are best."""
        return {name: getattr(self, name) for name in self.tune_names()}

    def tune_key(self) -> str:
        """Stable text form of these: problems of one tune key share the entries of a tuned table."""
        return _text(self.tune_fields())

    def flops(self) -> int:
        """Useful floating-point operations of the algorithm, for rooflines; 0: the operator moves data."""
        return 0

    def bytes_moved(self) -> int:
        """Fewest bytes through device memory: every input read once, every output written once."""
        raise NotImplementedError

    def notes(self, device: DeviceSpec) -> tuple[str, ...]:
        """What `gdn explain` and `gdn.explain` say of a call, beyond which kernel runs."""
        return ()

    def traffic(self, device: DeviceSpec) -> str:
        """Bytes that a call moves, and the time that copying as many takes, in words."""
        moved = self.bytes_moved()
        return f"{moved / 1e6:.4g} MB, floor {moved / device.copy_gbps / 1e3:.4g} us on {device.key}"


def dtype_bytes(dtype: str | None) -> int:
    return 0 if dtype is None else DTYPE_BYTES[dtype]
