"""What each adapter touches of its host. Data alone: nothing here imports a host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Host:
    """A host library.

    functions are dotted names of the functions and methods that an adapter replaces or calls, by the module that defines them;
    classes maps a class to the attributes that the adapter reads. tested is the version range in words, for messages only.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    tested: str
    functions: tuple[str, ...] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))


def _under(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


FLA = Host(
    name="fla",
    package="fla",
    distributions=("fla-core", "flash-linear-attention"),
    tested="0.6.0",
    functions=(
        *_under("fla.ops.gated_delta_rule", "chunk.chunk_gated_delta_rule", "fused_recurrent.fused_recurrent_gated_delta_rule"),
    ),
)

HOSTS: dict[str, Host] = {host.name: host for host in (FLA,)}
