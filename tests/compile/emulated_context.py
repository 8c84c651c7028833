"""The kernels of `kernels_cute.context` on the CPU: their own source, run by Python, a Python thread for each thread of a block.

The DSL is replaced by modules that compute at once: addresses are integers into tensors and shared memory, and every access is
checked against the ends of the tensor that it falls into, and against the alignment that it states. Numbers are Python's.
"""

import importlib
import itertools
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

FAMILY = "kernels_cute.context"
_MODULES = ("tiles", "chain", "parts_kernel", "total_kernel", "start_kernel")
_NAN = float("nan")


class Number(float):
    """A float32 register."""

    def bitcast(self, _: Any) -> "Number":
        return self


class Dtype:
    """Type of the DSL: its width, and the conversion."""

    def __init__(self, name: str, width: int, kind: Callable[[Any], Any]) -> None:
        self.name, self.width, self.kind = name, width, kind

    def __call__(self, value: Any) -> Any:
        return self.kind(value)


TYPES = {
    torch.float32: Dtype("Float32", 32, Number), torch.bfloat16: Dtype("BFloat16", 16, Number),
    torch.int32: Dtype("Int32", 32, int), torch.int64: Dtype("Int64", 64, int), torch.bool: Dtype("Boolean", 8, bool),
}  # fmt: skip


class Memory:
    """Regions of numbers at addresses, with gaps between them."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.regions: list[tuple[int, Callable[[int], Any], Callable[[int, Any], None]]] = []
        self.end = 1 << 20

    def add(self, size: int, read: Callable[[int], Any], write: Callable[[int, Any], None]) -> int:
        start = self.end
        self.starts.append(start)
        self.regions.append((size, read, write))
        self.end = (start + size + (1 << 12)) & ~255
        return start

    def at(self, address: int, size: int) -> tuple[int, Any, Any]:
        place = bisect_right(self.starts, address) - 1
        assert place >= 0, f"address {address:#x}"
        length, read, write = self.regions[place]
        within = address - self.starts[place]
        assert within + size <= length, f"{within + size - length} bytes beyond a tensor of {length}"
        assert address % size == 0, "misaligned"
        return within, read, write


class GlobalTensor:
    """A torch tensor in the memory of the device."""

    def __init__(self, memory: Memory, x: torch.Tensor) -> None:
        whole = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        size = x.element_size()

        def read(at: int) -> Any:
            return whole[at // size].item()

        def write(at: int, value: Any) -> None:
            whole[at // size] = value

        base = memory.add(whole.numel() * size, read, write)
        self.x, self.shape, self.stride, self.element_type = x, x.shape, x.stride(), TYPES[x.dtype]
        self.iterator = SimpleNamespace(toint=lambda: base + x.storage_offset() * size)

    def __getitem__(self, place: Any) -> Any:
        return self.x[place].item()

    def __setitem__(self, place: Any, value: Any) -> None:
        self.x[place] = value


class Registers(list[Any]):
    def fill(self, value: float) -> None:
        self[:] = [Number(value)] * len(self)

    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(place, value if isinstance(place, slice) else Number(value))


class Device:
    """The emulated machine: one block at a time."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.local = threading.local()
        self.shared: dict[str, int] = {}
        self.barrier, self.warps = threading.Barrier(1), [threading.Barrier(1)]
        self.lock = threading.Lock()

    def begin_block(self, threads: int) -> None:
        self.shared, self.barrier = {}, threading.Barrier(threads)
        self.warps = [threading.Barrier(32) for _ in range(threads // 32)]

    def allocate(self, fields: dict[str, int]) -> Any:
        with self.lock:
            for name, count in fields.items():
                if name not in self.shared:
                    values = [_NAN] * count
                    self.shared[name] = self.memory.add(
                        4 * count, lambda at, values=values: values[at // 4],
                        lambda at, value, values=values: values.__setitem__(at // 4, value),
                    )  # fmt: skip

        def pointer(base: int) -> Any:
            return SimpleNamespace(data_ptr=lambda: SimpleNamespace(toint=lambda: base))

        return SimpleNamespace(**{name: pointer(base) for name, base in self.shared.items()})

    def load(self, address: int, count: int, size: int = 4) -> list[Any]:
        within, read, _ = self.memory.at(address, count * size)
        return [Number(read(within + i * size)) for i in range(count)]

    def store(self, address: int, values: list[Any], size: int = 4) -> None:
        within, _, write = self.memory.at(address, len(values) * size)
        for i, value in enumerate(values):
            write(within + i * size, float(value))


class _Struct:
    """cute.struct: sizes alone."""

    def __call__(self, made: Any) -> dict[str, int]:
        return dict(made.__annotations__)

    Align = MemRange = None  # set below


class _Index:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, arguments: Any) -> Any:
        return self.function(*arguments)


def _modules(device: Device) -> dict[str, ModuleType]:
    """The modules that the family imports, as the emulation has them."""
    copies: dict[int, list[list[tuple[int, list[Any]]]]] = {}  # groups of copies on their way, by thread

    def thread() -> int:
        return int(device.local.thread)

    def waiting() -> list[list[tuple[int, list[Any]]]]:
        return copies.setdefault(device.local.number, [[]])

    def instruction(code: str, *gives: Any) -> Callable[..., Any]:
        if code.startswith("cp.async.cg"):
            return lambda target, source: waiting()[-1].append((target, device.load(source, 4)))
        assert code.startswith("fma.rn.f32")
        return lambda a, b, c: Number(a * b + c)

    def wait(pending: int) -> None:
        groups = waiting()  # the last one is still open
        while len(groups) - 1 > pending:
            for target, values in groups.pop(0):
                device.store(target, values)

    arch = SimpleNamespace(
        thread_idx=lambda: (thread(), 0, 0), block_idx=lambda: (device.local.block, 0, 0),
        sync_warp=lambda: device.warps[thread() // 32].wait(),
        sync_threads=lambda: device.barrier.wait(), cp_async_commit_group=lambda: waiting().append([]),
        cp_async_wait_group=wait,
    )  # fmt: skip
    struct = _Struct()
    struct.Align, struct.MemRange = _Index(lambda inner, _: inner), _Index(lambda _, count: count)  # type: ignore[assignment]
    types = {one.name: one for one in TYPES.values()}
    cute = {
        "jit": lambda f: f, "kernel": lambda f: f, "arch": arch, "struct": struct, "Tensor": Any,
        "AddressSpace": SimpleNamespace(gmem=0), "make_rmem_tensor": lambda count, _: Registers([_NAN] * count),
        "make_ptr": lambda dtype, address, space, assumed_align: (dtype, address, assumed_align), "sym_int64": lambda: None,
    }  # fmt: skip
    base = {
        **types, "Constexpr": Any, "const_expr": lambda x: x, "range": lambda *bounds, unroll=1: range(*bounds),
        "range_constexpr": range, "select_": lambda condition, a, b: a if condition else b, "max": max, "min": min,
        "utils": SimpleNamespace(SmemAllocator=lambda: SimpleNamespace(allocate=device.allocate)),
    }  # fmt: skip

    def load(source: Any, width: int, rX: Any, start: int, once: bool) -> None:
        dtype, address, align = source
        size = dtype.width // 8
        assert align == width * size
        rX[start : start + width] = device.load(address, width, size)

    def store(rX: Any, start: int, width: int, target: Any) -> None:
        dtype, address, align = target
        size = dtype.width // 8
        assert align == width * size
        device.store(address, rX[start : start + width], size)

    memory = {"load": load, "store": store, **dict.fromkeys(("fake", "unserved")), "FLOAT_DTYPES": (), "INDEX_DTYPES": ()}
    ptx = {
        "instruction": instruction, "load_four": lambda at: device.load(at, 4), "load_one": lambda at: device.load(at, 1)[0],
        "store_one": lambda at, value: device.store(at, [value]), "store_words": lambda at, values: device.store(at, values),
    }  # fmt: skip

    class Kernel:
        def __init_subclass__(cls, params: Any = None) -> None:
            cls.params = params  # type: ignore[attr-defined]

    build = {"Kernel": Kernel, "step": lambda *_, **__: (None,) * 5}

    def module(name: str, fields: dict[str, Any]) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(fields)
        return made

    common = "kernels_cute.common"
    made = {
        "cutlass": module("cutlass", base), "cutlass.cute": module("cutlass.cute", cute),
        f"{common}.memory": module("memory", memory), f"{common}.ptx": module("ptx", ptx),
        f"{common}.build": module("build", build),
    }  # fmt: skip
    made["cutlass"].cute = made["cutlass.cute"]  # type: ignore[attr-defined]
    own = {name: made[f"{common}.{name}"] for name in ("memory", "ptx", "build")}
    made[common] = module(common, own | {"choice": importlib.import_module(f"{common}.choice")})  # which imports no DSL
    return made


@contextmanager
def _family(device: Device) -> Iterator[dict[str, Any]]:
    """The family's modules, imported anew over the emulation."""
    names = [f"{FAMILY}.{name}" for name in _MODULES]
    with mock.patch.dict(sys.modules):
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(_modules(device))
        package = importlib.import_module(FAMILY)
        before = {name: vars(package).get(name) for name in _MODULES}
        try:
            yield {name: importlib.import_module(f"{FAMILY}.{name}") for name in _MODULES}
        finally:
            for name, module in before.items():
                vars(package).pop(name, None)
                if module is not None:
                    setattr(package, name, module)


def launch(problem: Any, params: Any) -> None:
    """Runs the kernel of an operator of the family; params: of CPU tensors, which it writes."""
    device = Device()
    name = problem.op.removeprefix("context_")
    with _family(device) as modules:
        kernel = getattr(modules[f"{name}_kernel"], f"_Context{name.capitalize()}")(problem, None)
        given = type(params)(*(GlobalTensor(device.memory, x) if isinstance(x, torch.Tensor) else x for x in params))
        number = itertools.count()
        for block in range(kernel.blocks(given)):
            _run_block(device, kernel, given, block, number)


def _run_block(device: Device, kernel: Any, params: Any, block: int, numbers: Iterator[int]) -> None:
    device.begin_block(kernel.threads)
    own = [next(numbers) for _ in range(kernel.threads)]

    def run(thread: int) -> None:
        device.local.thread, device.local.block, device.local.number = thread, block, own[thread]
        kernel.kernel(params)

    run_threads(run, kernel.threads, [device.barrier, *device.warps])


def run_threads(body: Callable[[int], None], count: int, barriers: Sequence[threading.Barrier]) -> None:
    """Runs body(0), body(1), ... at the same time; raises the first error of one, for which no other waits at a barrier."""
    failed: list[BaseException] = []

    def run(thread: int) -> None:
        try:
            body(thread)
        except BaseException as error:
            failed.append(error)
            for barrier in barriers:
                barrier.abort()

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if failed:
        raise next((error for error in failed if not isinstance(error, threading.BrokenBarrierError)), failed[0])
