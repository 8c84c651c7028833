"""`python -m benchmarks.host_cost`: CPU microseconds of an eager call with out= and, for the delta rule, a pool.

The time is from the call until its return; the device runs later. Without a Hopper GPU the compiled functions are replaced
by an empty one of tvm-ffi and the tensors are on the CPU: all that Python and tvm-ffi do is measured, the launch itself is
not. Each operator is called with the same metadata again and again (`repeated`) and with a length never seen (`first`:
checks, problem and choice of tiles; kernels are compiled and loaded before).
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

import gdn
from autotune import shapes
from autotune.console import JsonFile, keep
from gdn.cli.plain import run_alone
from gdn.device import H100
from gdn.ops.delta_rule import inputs
from gdn.ops.indexer import inputs as inputs_logits
from gdn.runtime import compiled, devices, env, prepare, registry, toolchain

Call = Callable[[], object]

_CALLS_BETWEEN_SYNCS = 50  # a full queue of launches would make the host wait for the device


@dataclass(frozen=True)
class HostCost:
    op: str
    backend: str
    repeated_us: float  # median of calls whose metadata was seen before
    repeated_least_us: float
    first_us: float  # median of calls whose token or key count is new
    launch_us: float  # median of the kernel module's launch alone, which repeated_us includes


class _Same(Mapping[str, Any]):
    """Functions of a compiled kernel: the same one under every name; once, where all are asked for."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getitem__(self, name: str) -> Any:
        return self._function

    def __iter__(self) -> Iterator[str]:
        return iter(("every",))

    def __len__(self) -> int:
        return 1


@contextlib.contextmanager
def without_device(kernel: Callable[..., Any] | None = None) -> Iterator[None]:
    """Presents the CPU as an H100 whose kernels do nothing: what they should have written is never read.

    kernel: in the place of every compiled function; None = a function of tvm-ffi.
    """
    import tvm_ffi

    functions = _Same(tvm_ffi.get_global_func("testing.nop") if kernel is None else kernel)
    with as_an_h100(mock.patch.object(compiled, "get", lambda op, backend, *key: compiled.Compiled(functions, key[1], key[2]))):
        yield


@contextlib.contextmanager
def as_an_h100(*more: AbstractContextManager[Any]) -> Iterator[None]:
    """Presents the CPU as an H100 whose values nobody reads. more: patches for as long, which keep kernels from running."""
    for operator in registry.OPERATORS.values():
        getattr(gdn, operator.functions[0])  # loads its module
    readers = [
        module
        for name, module in sys.modules.items()
        if name.startswith(("gdn.core.", "gdn.ops.")) and hasattr(module, "reads_values")
    ]
    with (
        contextlib.ExitStack() as patches,
        mock.patch.object(devices, "describe", lambda device: (H100, "no device")),
        mock.patch.object(toolchain, "missing", lambda backend: None),
    ):
        for patch in (*more, *(mock.patch.object(module, "reads_values", lambda device: False) for module in readers)):
            patches.enter_context(patch)
        env.reload()
        try:
            yield
        finally:
            env.reload()  # forgets what was chosen and loaded


# Operators that a model calls in every layer, with kernels in both DSLs; their repeated calls skip the checks. Each has the
# sizes of a small call with a number of more tokens or columns: the host's work does not depend on sizes, and small ones keep
# the device ahead of the host.
_SIZES: dict[str, Callable[[int], dict[str, int]]] = {
    "chunk": lambda extra: {"num_tokens": 511 + extra, "num_sequences": 2},
    "recurrent": lambda extra: {"num_tokens": 32 + extra, "num_sequences": 32},
    "mqa_logits": lambda extra: {"num_queries": 128, "num_keys": 256 + extra, "num_columns": 256 + extra},
    "paged_mqa_logits": lambda extra: {"batch": 8, "max_context_len": 256 + extra},
}
OPERATORS = tuple(_SIZES)


def problem_of(op: str, extra: int = 0) -> Any:
    """A small problem of the operator: the tuner's shape that moves the fewest bytes, made smaller."""
    smallest: Any = min((shape.problem for shape in shapes.shapes(op)), key=lambda problem: problem.bytes_moved())
    return replace(smallest, **_SIZES[op](extra))


def call_of(op: str, device: torch.device, backend: str | None, extra: int = 0) -> Call:
    """One eager call of the public operator on small inputs."""
    problem, dtype = problem_of(op, extra), torch.float32
    if op == "mqa_logits":
        arguments: dict[str, Any] = vars(inputs_logits.make_mqa_inputs(problem, device))
        shape: tuple[int, ...] = (problem.num_queries, problem.num_columns)
    elif op == "paged_mqa_logits":
        arguments = inputs_logits.make_paged_inputs(problem, device).arguments()
        shape = (problem.batch * problem.next_n, problem.max_context_len)
    else:
        make: Any = {"chunk": inputs.chunk_inputs, "recurrent": inputs.recurrent_inputs}[op]
        arguments = make(problem, device, strided=True)
        shape, dtype = (1, problem.num_tokens, problem.num_state_heads, problem.head_v_dim), torch.bfloat16
    out = torch.empty(shape, dtype=dtype, device=device)
    return partial(getattr(gdn, registry.operator(op).functions[0]), **arguments, out=out, backend=backend)


def times_us(calls: list[Call], device: torch.device) -> list[float]:
    """Microseconds of each call on the host, until it returns."""
    found = []
    for i, call in enumerate(calls):
        if i % _CALLS_BETWEEN_SYNCS == 0 and device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - start) / 1e3)
    return found


def _launch_us(op: str, device: torch.device, backend: str | None, call: Call) -> float:
    """Cost of the kernel's launch alone: the tensors of a call, launched again."""
    problem = problem_of(op)
    handed: list[Any] = []
    prepared = prepare(problem, device, backend)
    assert prepared.launch is not None
    spied = replace(prepared, launch=lambda *tensors: handed.append(tensors))
    env.reload()  # no plan of this call: it must come through prepare
    with mock.patch("gdn.runtime.prepare", lambda *_: spied):
        call()
    env.reload()
    launch, tensors = prepared.launch, handed[0]
    return statistics.median(times_us([lambda: launch(*tensors)] * 1000, device))


def measure(op: str, device: torch.device, backend: str | None = None, repeats: int = 2000, news: int = 50) -> HostCost:
    problem = problem_of(op)
    prepared = prepare(problem, device, backend)
    if prepared.launch is None:
        raise ValueError(f"{op}: no kernel serves it here: {prepared.choice}")
    call = call_of(op, device, backend)
    launch_us = _launch_us(op, device, backend, call)
    for _ in range(20):
        call()
    repeated = times_us([call] * repeats, device)
    fresh = [call_of(op, device, backend, extra) for extra in range(1, 1 + news)]
    for one in fresh:  # another size may take other tiles, and those must be compiled
        one()
    env.reload()  # forgets what was chosen, keeps what was compiled
    call()  # reads the tables
    first = times_us(fresh, device)
    return HostCost(op, prepared.backend, statistics.median(repeated), min(repeated), statistics.median(first), launch_us)


def main(
    op: Annotated[str | None, typer.Argument(help=f"One of {', '.join(OPERATORS)}; all if left out.")] = None,
    backend: Annotated[str | None, typer.Option(help="tilelang or cute; what a call takes if left out.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure what an eager call costs the host."""
    if op not in (None, *OPERATORS):
        raise ValueError(f"op: expected one of {', '.join(OPERATORS)}, got {op!r}")
    has_device = torch.cuda.is_available() and devices.spec(torch.device("cuda")) is not None
    device = torch.device("cuda", torch.cuda.current_device()) if has_device else torch.device("cpu")
    with contextlib.nullcontext() if has_device else without_device():
        rows = [measure(name, device, backend) for name in ([op] if op is not None else OPERATORS)]
    title = torch.cuda.get_device_name() if has_device else "no GPU: the launch itself is not in these figures"
    table = Table("operator", "backend", "repeated, us", "least, us", "of it launch, us", "first, us", title=title)
    for row in rows:
        figures = (row.repeated_us, row.repeated_least_us, row.launch_us, row.first_us)
        table.add_row(row.op, row.backend, *(f"{figure:.1f}" for figure in figures))
    Console().print(table)
    keep(json_file, {"device": title, "torch": str(torch.__version__), "rows": [vars(row) for row in rows]})


if __name__ == "__main__":
    run_alone(main, "python -m benchmarks.host_cost")
