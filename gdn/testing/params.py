"""Arguments of a launch from those of the public operator."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Kind = TypeVar("Kind")  # of Params


def params_of(kind: Callable[..., Kind], arguments: Mapping[str, Any], **own: Any) -> Kind:
    """Params of a launch: `own`, and from the operator's arguments the fields of the same name; None where neither has one."""
    return kind(**{name: own.get(name, arguments.get(name)) for name in kind._fields})  # type: ignore[attr-defined]
