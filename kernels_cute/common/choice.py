"""What the choice of a CuTe kernel, and its launch, need: dtypes that are served, spaces of configurations. Imports no DSL: a
process that finds its kernels compiled imports this and no more.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from gdn.device import DeviceSpec

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
HALF_DTYPES, INDEX_DTYPES = ("bfloat16", "float16"), ("int32", "int64")
ACCESS_BYTES = 16  # the widest load and store


def unserved(tensors: Mapping[tuple[str, ...], Mapping[str, str | None]]) -> str | None:
    """Reason of a refusal: the first tensor (not None) of no allowed dtype. tensors: allowed dtypes -> dtypes by name."""
    for allowed, dtypes in tensors.items():
        for name, dtype in dtypes.items():
            if dtype is not None and dtype not in allowed:
                return f"requires {name} of {', '.join(allowed[:-1])} or {allowed[-1]}, got {dtype}"
    return None


def long_ring(ring_rows: int, device: DeviceSpec) -> str:
    """Return the reason of the refusal of a ring that is too long for shared memory."""
    most = device.shared_bytes_per_block
    return f"requires a ring of which a head fits in {most} bytes of shared memory, got {ring_rows} rows"


def launch(compiled: Any, params: Any) -> None:
    """Launches a kernel of one entry."""
    launch_with(compiled.functions, params)


def launch_with(functions: Mapping[str, Callable[..., Any]], params: Any) -> None:
    """Launch the kernel of one entry for an operator that has the entry among its own. functions: the entry alone."""
    (function,) = functions.values()
    function(*params)


def no_workspace(problem: Any, config: Any) -> int:
    return 0


def space(
    config_type: Callable[..., Any],
    allows: Callable[[Any, Any], bool] = lambda problem, config: True,
    **choices: Sequence[int],
) -> tuple[Callable[..., Any], ...]:
    """fits and configs of the runtime's contract, for a configuration whose fields have few values each.

    choices: values of each field of a configuration; allows: what else decides whether one fits.
    """

    def fits(problem: Any, config: Any, device: Any) -> bool:
        return all(getattr(config, name) in values for name, values in choices.items()) and allows(problem, config)

    def configs(problem: Any, device: Any) -> list[Any]:
        every = [config_type(*values) for values in product(*choices.values())]
        return [config for config in every if fits(problem, config, device)]

    return fits, configs


def by_load(config: Callable[[int, int], Any], wanted: int, device: Any, rows: Sequence[int] = (4, 2), load: int = 1024) -> Any:
    """Configuration (threads of a block, rows of a thread): the most rows that leave every SM `load` of the wanted threads, one a
    row and element, then blocks small enough to reach every SM."""
    for count in rows:
        if wanted >= count * load * device.num_sms:
            return config(128, count)
    return config(128 if wanted >= 256 * device.num_sms else 32, 1)
