"""vLLM on the kernels of `gdn`: the Gated DeltaNet layers of Qwen3-Next, Qwen3.5 and models that use the same layer.

`GDN_VLLM=1 vllm serve MODEL` switches it on in every process of an engine, through the entry point `vllm.general_plugins`;
`gdn.integrations.vllm.enable()` before an engine is made does the same from Python. Everything between the two projections of a
layer runs by `fused_gdn_decode` and `fused_gdn_prefill` on vLLM's own pages: one-token rows, drafts, prompts and mixed batches,
with states for the prefix cache, in captured and piecewise graphs, on each rank of a tensor parallel group. With `GDN_REPLAY`
decode is by replay: a block then holds a ring too, and a sequence takes one block in a cache group whatever its drafts. Decode
steps of Qwen4Exp's sparse attention run by `paged_indexer_topk` and `sparse_attention`.
"""

import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

import gdn
from gdn.integrations import _handle, _hosts, vllm_qsa
from gdn.integrations._calls import Calls, unserved_machine
from gdn.integrations._handle import Handle
from gdn.integrations._points import Point, Undo, Unreplaced
from gdn.integrations._vllm_graphs import part_graphs
from gdn.integrations._vllm_layer import Layers, layer_class
from gdn.integrations._vllm_pages import sizes_point
from gdn.integrations._vllm_replay import Replay, page_in
from gdn.integrations._vllm_rows import backend_class
from gdn.runtime import env, log

_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_NAME = "QwenGatedDeltaNetAttention"
_BATCHES = "vllm.v1.attention.backends.gdn_attn"
SWITCH = "GDN_VLLM"


def enable(*, strict: bool = False, allow_reference: bool = False) -> Handle:
    """Makes engines that are built from now on run their Gated DeltaNet layers on gdn.

    Sets GDN_VLLM for processes that the engine starts, until it is disabled.

    Parameters
    ----------
    strict : bool
        Raise where the host's signatures are not the recorded ones, and for a layer that would be left to the host.
    allow_reference : bool
        Serve on the CPU too. For tests.

    Returns
    -------
    Handle
        Its `disable` acts on engines that are built later: a layer keeps the class that it was built of. In its report
        "calls" are layers, and the notes have the seconds of enabling and of the kernels' warm-up.

    Raises
    ------
    ValueError
        If it is enabled with other options.
    RuntimeError
        With strict, if something cannot be replaced.
    """
    said: list[str] = []

    def tell(text: str) -> None:
        log.once(f"vllm: {text}", level=logging.INFO)
        said.append(text)

    def points() -> list[Point]:
        sparse = [] if unserved_machine(allow_reference) else vllm_qsa.points()
        replay = Replay()
        return [_point(strict, tell, replay), _replay_point(replay), *sparse]

    begin = time.perf_counter()
    handle = _handle.enable_by_switch(SWITCH, _hosts.VLLM, points, strict=strict, allow_reference=allow_reference)
    if not handle.notes:  # a new one
        said.append(f"enabled in {time.perf_counter() - begin:.1f} s")
        handle.notes = said  # and what an engine's start adds
    return handle


def plugin() -> None:
    """Entry point of `vllm.general_plugins`: does nothing unless GDN_VLLM is set."""
    chosen = env.current().vllm
    if chosen != "0":
        enable(strict=chosen == "strict")


def _point(strict: bool, tell: Callable[[str], None], replay: Replay) -> Point:
    def install(calls: Calls) -> Undo:
        host = importlib.import_module(_LAYER)
        registry = importlib.import_module("vllm.model_executor.custom_op")
        sizes = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
        context = importlib.import_module("vllm.forward_context")
        layers = Layers(calls, strict, tell, replay)
        ours = layer_class(host, context, sizes.is_conv_state_dim_first, layers)
        foreign = registry.op_registry_oot.get(_NAME)
        if foreign is not None:
            raise Unreplaced(f"{foreign.__module__}.{foreign.__qualname__} is registered in its place already")
        join_graphs = part_graphs(calls, SWITCH, gdn.__version__)
        host.QwenGatedDeltaNetAttention.register_oot(ours, name=_NAME)

        def undo() -> str | None:
            left = (join_graphs(), _unregister(registry, ours))
            return "; ".join(reason for reason in left if reason is not None) or None

        return undo

    names = (*_hosts.VLLM.functions, *_hosts.VLLM.classes)
    guards = tuple(name for name in names if not name.startswith(vllm_qsa.OPS) and name not in _hosts.VLLM_REPLAY)
    return Point(f"{_LAYER}.{_NAME}", guards, install)


def _replay_point(replay: Replay) -> Point:
    """What layers need of the host to decode by replay: the size of its blocks, and a builder of metadata of their own."""
    sizes = sizes_point(page_in)

    def install(calls: Calls) -> Undo:
        undo = sizes.install(calls)
        replay.backend = backend_class(importlib.import_module(_BATCHES))
        return undo

    return Point(sizes.path, sizes.guards, install)


def _unregister(registry: Any, ours: type) -> str | None:
    if registry.op_registry_oot.get(_NAME) is not ours:
        return "registered since by someone else, left alone"
    del registry.op_registry_oot[_NAME]
    return None
