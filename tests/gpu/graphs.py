"""A captured call against eager ones: what every operator and layer keeps to in a CUDA graph.

No call waits for the device, a replay allocates nothing and has the bits of an eager call with the same arguments, and a graph
needs nothing but its own pool and its arguments: whatever else is freed and written over between the capture and a replay.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gdn.testing.compare import same_bits
from tests.gpu.delta_rule import Arguments
from tests.gpu.twins import copy_of, twin, whole
from tests.gpu.waits import no_waits

Tensor = torch.Tensor
Change = Mapping[str, Any]  # new contents of arguments: tensors, or lists of numbers


def write_over_free_memory(device: torch.device) -> None:
    """Memory that was given back is full of NaN afterwards, in small blocks and in large ones."""
    gc.collect()
    torch.cuda.synchronize()
    for size in (512, 4096, 2**16, 2**20, 2**24):
        kept = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for _ in range(32)]
        del kept
    torch.cuda.synchronize()


def tensors(arguments: Arguments) -> Arguments:
    """Those arguments that are tensors: a change of all of them."""
    return {name: x for name, x in arguments.items() if isinstance(x, Tensor)}


def _listed(found: Any) -> list[Tensor]:
    return [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, _listed(found)


def check(
    function: Callable[..., Any],
    arguments: Arguments,
    pools: Sequence[str],
    changes: Sequence[Change | Callable[[], Change]],
    device: torch.device,
    *,
    times: int = 1,
    **options: Any,
) -> None:
    """Calls twice, which compiles and then learns the call, captures, and replays after each change.

    changes: contents, or what makes them as their turn comes. Before a replay a pool holds what it held at first, or what the
    change gives. times: replays in a row, one right after the other.
    """
    start = {name: copy_of(arguments[name]) for name in pools}
    live = twin(arguments)
    for _ in range(2):
        function(**live, **options)
    torch.cuda.synchronize()
    with no_waits():
        function(**live, **options)
    graph, results = captured(lambda: function(**live, **options))
    for number, change in enumerate(changes):
        contents = start | {name: _like(x, live[name]) for name, x in (change() if callable(change) else change).items()}
        for name, x in contents.items():
            live[name].copy_(x)
        if live.get("out") is not None:
            live["out"].fill_(torch.nan if live["out"].is_floating_point() else -77)
        write_over_free_memory(device)
        expected = twin(live)
        with no_waits():
            eager = _listed(function(**expected, **options))
        allocated = torch.cuda.memory_stats(device)["allocation.all.allocated"]
        with no_waits():
            for _ in range(times):
                for name in pools:
                    live[name].copy_(contents[name])
                graph.replay()
        assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == allocated
        assert len(results) == len(eager)
        for place, (one, other) in enumerate(zip(results, eager, strict=True)):
            assert same_bits(one, other), f"result {place} after change {number}"
        for name, x in tensors(live).items():
            assert same_bits(whole(x), whole(expected[name])), f"{name} after change {number}"


def _like(contents: Any, x: Tensor) -> Tensor:
    given = contents if isinstance(contents, Tensor) else torch.tensor(contents)
    return given.to(x.device, x.dtype).view(x.shape)
