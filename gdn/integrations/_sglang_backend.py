"""Points of SGLang's Gated DeltaNet backend around its kernel objects: the convolutions, a whole decode step, and its start.

Each acts only where SGLang's command line chose ours, which the kernel objects of the backend's dispatcher tell (`is_of_gdn`).
"""

import functools
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gdn.integrations import _sglang_step as step
from gdn.integrations import _sglang_warm_up as warm
from gdn.integrations import sglang_convolution as convolution
from gdn.integrations._calls import Calls, asking
from gdn.integrations._hosts import SGLANG_BACKEND, SGLANG_CONVOLUTIONS, SGLANG_RUNNER
from gdn.integrations._kept import ServedOf
from gdn.integrations._points import Point, Undo, Unreplaced, replace, resolve
from gdn.integrations._sglang_kernel import LARGEST_HEAD_DIM_OF_SNAPSHOTS, Serving, unserved_slots
from gdn.runtime import log

_HALVES = (torch.bfloat16, torch.float16)
_KERNELS = {"decode": "decode_kernel", "extend": "extend_kernel", "verify": "verify_kernel"}
_BASE = "sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase"
_LAYER = "sglang.srt.layers.radix_linear_attention.RadixLinearAttention"
_POOL = "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool"

phases: set[str] = set()  # those that ours run in any engine of this process: the convolutions, which know no engine, ask for it


def points(strict: bool) -> list[Point]:
    """The points, besides the dispatcher's own."""
    prompts, update = SGLANG_CONVOLUTIONS
    taken: set[str] = set()  # convolutions that are ours now
    return [
        _convolution(prompts, {"extend"}, convolution.prompts_refusal, convolution.prompts, strict, taken),
        _convolution(update, {"decode", "verify"}, convolution.update_refusal, convolution.update, strict, taken),
        _decode_step(),
        _start(lambda: prompts in taken),
    ]


def _convolution(
    path: str, where: set[str], refusal: Callable[..., str | None], serve: Callable[..., Any], strict: bool, taken: set[str]
) -> Point:
    """A function that the module of the backend holds, and calls by this name. Other backends hold it too, and keep it.

    taken gets the path while the function is replaced.
    """
    name, definition, ask = path.rpartition(".")[2], SGLANG_CONVOLUTIONS[path], asking(refusal, serve)

    def install(calls: Calls) -> Undo:
        original = resolve(path)[2]
        if original is not resolve(definition)[2]:
            raise Unreplaced(f"it is not {definition}")
        serving = Serving(calls, strict)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if calls.active and not phases.isdisjoint(where):
                reason = ask(*args, **kwargs, allow_reference=calls.allow_reference)
                # Trees are the host's by design, and no reason to stop an engine.
                if calls.serves(reason) if reason == convolution.TREE else serving.serves(name, reason):
                    return serve(*args, **kwargs)
            return original(*args, **kwargs)

        undo = replace(original, replacement, (path,))
        taken.add(path)

        def stop() -> str | None:
            taken.discard(path)
            return undo()

        return stop

    return Point(path, (definition,), install)


def _decode_step() -> Point:
    """A decode step as one operator. What it does not serve goes on to the kernel object, which may."""

    def install(calls: Calls) -> Undo:
        path = f"{SGLANG_BACKEND}.forward_decode"
        original, known = resolve(path)[2], ServedOf()

        @functools.wraps(original)
        def forward_decode(self: Any, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any) -> Any:
            if calls.active and _is_ours(self.kernel_dispatcher.decode_kernel):
                cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
                allowed = calls.allow_reference
                if calls.serves(step.refusal(layer, cache, mixed_qkv, known=known(layer), allow_reference=allowed)):
                    slots = self.forward_metadata.mamba_cache_indices
                    result = step.step(layer, cache, mixed_qkv, a, b, slots)
                    self._track_mamba_state_decode(forward_batch, cache.conv[0], cache.temporal, slots, layer.layer_id)
                    return result
            return original(self, layer, forward_batch, mixed_qkv, a, b, **kwargs)

        return replace(original, forward_decode, (path,))

    guards = (f"{SGLANG_BACKEND}.forward_decode", f"{_BASE}._track_mamba_state_decode", f"{_POOL}.mamba2_layer_cache", _LAYER)
    return Point(f"{SGLANG_BACKEND}.forward_decode", (*guards, SGLANG_BACKEND), install)


def _start(convolves_prompts: Callable[[], bool]) -> Point:
    """The construction of a backend, after which every kernel is loaded that its layers reach; graphs are captured later.

    convolves_prompts: whether the convolution of prompts is ours, which the pools' layout depends on.
    """

    def install(calls: Calls) -> Undo:
        path = f"{SGLANG_BACKEND}.__init__"
        original = resolve(path)[2]
        changed: weakref.WeakSet[Any] = weakref.WeakSet()

        @functools.wraps(original)
        def construct(self: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
            original(self, model_runner, *args, **kwargs)
            chosen = tuple(name for name, kernel in _KERNELS.items() if _is_ours(getattr(self.kernel_dispatcher, kernel)))
            if not calls.active or not chosen:
                return
            calls.serves(None)
            cache = model_runner.req_to_token_pool.mamba_pool.mamba_cache
            forms = warm.forms(model_runner.model, cache, model_runner.dtype)
            begin = time.perf_counter()
            compiled = warm.warm_up(forms, chosen)
            took = f"{time.perf_counter() - begin:.1f} s, {compiled} compiled"
            log.once(f"sglang: kernels of {', '.join(chosen)} are loaded ({took})", logging.INFO)
            # Multi-item scoring leaves the rule to the host, which reads slots as if they were adjacent.
            serves_prompts = "extend" in chosen and convolves_prompts() and not self.enable_mis
            if serves_prompts and all(takes_strided(form, cache, calls.allow_reference) for form in forms):
                self.requires_contiguous_prefill_state = False
                changed.add(self)

        undo = replace(original, construct, (path,))

        def stop() -> str | None:
            for backend in changed:
                vars(backend).pop("requires_contiguous_prefill_state", None)
            return undo()

        return stop

    return Point(f"{SGLANG_BACKEND}.__init__", (f"{SGLANG_BACKEND}.__init__", SGLANG_BACKEND, SGLANG_RUNNER, _LAYER), install)


def takes_strided(form: warm.Form, cache: Any, allow_reference: bool) -> bool:
    """Whether every prompt of such layers is served, on pools whose slots are apart: the host's kernels drop writes to such.

    Prompts that leave snapshots for the prefix cache are among them. Only then need the host not copy the slots before and after.
    """
    if form.token_dtype not in _HALVES and not allow_reference:
        return False
    if form.head_k_dim != form.head_v_dim or form.head_k_dim % 4 or form.head_k_dim > LARGEST_HEAD_DIM_OF_SNAPSHOTS:
        return False
    return form.channels % 8 == 0 and 2 <= form.width <= 4 and unserved_slots(cache.temporal[0]) is None


def _is_ours(kernel: Any) -> bool:
    return getattr(kernel, "is_of_gdn", False) is True
