"""What the launch of a TileLang kernel needs. Imports no DSL: a process that finds its kernels compiled never imports one."""

from typing import Any


def arguments(*values: Any) -> list[Any]:
    """The arguments of a call: those that are not None."""
    return [value for value in values if value is not None]


def as_line(x: Any) -> Any:
    """The tensor [rows, columns] as one line, from its first element to its last: `versions.matrix_type` says where."""
    return x.as_strided((max(0, (x.shape[0] - 1) * x.stride(0) + x.shape[1]),), (1,))  # nothing of no rows
