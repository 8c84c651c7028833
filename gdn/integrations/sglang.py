"""SGLang on the kernels of `gdn`: the Gated DeltaNet layers of Qwen3-Next, Qwen3.5 and models that use the same backend.

`GDN_SGLANG=1 python -m sglang.launch_server --linear-attn-backend gdn ...` switches it on in every process of an engine, through
the entry point `sglang.srt.plugins`; `gdn.integrations.sglang.enable()` before an engine is made does the same from Python.
Convolution and rule of Gated DeltaNet then run on SGLang's own pools: a decode step as one operator, prompts with snapshots for
the prefix cache, and the verification of drafts in chains and trees. Every kernel is loaded when a backend is made. The gates of
prompts, the norm, and the convolution of trees of drafts stay SGLang's.
"""

import importlib
import logging
from collections.abc import Callable
from typing import Any

from gdn.integrations import _handle, _hosts, _sglang_backend
from gdn.integrations._calls import Calls
from gdn.integrations._handle import Handle
from gdn.integrations._points import Point, Undo, Unreplaced
from gdn.integrations._sglang_kernel import Serving, kernel_class
from gdn.runtime import env, log

BACKEND = "gdn"  # of --linear-attn-backend
SWITCH = "GDN_SGLANG"
_LINEAR = "sglang.srt.layers.attention.linear"
_DISPATCHER = f"{_LINEAR}.gdn_backend.GDNKernelDispatcher"


def enable(*, strict: bool = False, allow_reference: bool = False) -> Handle:
    """Adds the choice `gdn` to SGLang's `--linear-attn-backend`; engines started with it from now on run on gdn.

    Sets GDN_SGLANG for processes that the engine starts, until it is disabled. Its hooks are applied at once.

    Parameters
    ----------
    strict : bool
        Raise where the host's signatures are not the recorded ones, and for a call that would be left to the host.
    allow_reference : bool
        Serve on the CPU too. For tests.

    Returns
    -------
    Handle
        Its `disable` takes the choice away and lets engines that run already continue on SGLang's own kernels, but for graphs
        that were captured before.

    Raises
    ------
    ValueError
        If it is enabled with other options.
    RuntimeError
        With strict, if nothing can be replaced.
    """
    return _enable(strict, allow_reference, apply_hooks=True)


def plugin() -> None:
    """Entry point of `sglang.srt.plugins`: does nothing unless GDN_SGLANG is set. SGLang applies the hooks later."""
    chosen = env.current().sglang
    if chosen != "0":
        _enable(chosen == "strict", False, apply_hooks=False)


def _enable(strict: bool, allow_reference: bool, *, apply_hooks: bool) -> Handle:
    def points() -> list[Point]:
        return [_dispatcher(strict, apply_hooks), *_sglang_backend.points(strict)]

    return _handle.enable_by_switch(SWITCH, _hosts.SGLANG, points, strict=strict, allow_reference=allow_reference)


class Hook:
    """Stands around the construction of SGLang's dispatcher, for ever: the host cannot take back a single hook.

    `serving` says whether it acts: None hands every call on with its arguments untouched.

    Parameters
    ----------
    host : module
        gdn_backend of SGLang.
    kernel : type
        Class of our kernel object.
    """

    def __init__(self, host: Any, kernel: type) -> None:
        self.host, self.kernel = host, kernel
        self.serving: Serving | None = None

    def __call__(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self.serving is None:
            original(*args, **kwargs)
        else:
            self._construct(self.serving, original, *args, **kwargs)

    def _construct(
        self,
        serving: Serving,
        original: Callable[..., None],
        dispatcher: Any,
        decode_backend: Any,
        prefill_backend: Any,
        verify_backend: Any = None,
    ) -> None:
        settings = self.host.get_exec()
        names, triton = settings.mamba, self.host.LinearAttnKernelBackend.TRITON
        base = names.linear_attn_backend
        decode = (names.linear_attn_decode_backend or base) == BACKEND and decode_backend.is_custom()
        prefill = (names.linear_attn_prefill_backend or base) == BACKEND and prefill_backend.is_custom()
        named = names.linear_attn_verify_backend
        verify = named == BACKEND if named is not None else decode  # the host's own rule for FlashInfer: as decode
        original(
            dispatcher,
            triton if decode else decode_backend,
            triton if prefill else prefill_backend,
            triton if verify else verify_backend,
        )
        chosen = [name for name, ours in (("decode", decode), ("extend", prefill), ("verify", verify)) if ours]
        if not chosen:
            return
        reason = refusal(settings.deterministic.enable_deterministic_inference, env.current().batch_invariant)
        if reason is not None:
            if serving.strict:
                raise RuntimeError(f"gdn.integrations.sglang, strict: {', '.join(chosen)} would be left to the host: {reason}")
            serving.calls.serves(reason)
            log.once(f"sglang: {', '.join(chosen)} left to the host: {reason}", logging.WARNING)
            return
        for name in chosen:
            setattr(dispatcher, f"{name}_kernel", self.kernel(getattr(dispatcher, f"{name}_kernel"), serving))
        _sglang_backend.phases.update(chosen)
        if decode:
            dispatcher.supports_packed_decode = True
        if verify:
            dispatcher.tree_verify_kernel = self.kernel(dispatcher.tree_verify_kernel, serving)
            dispatcher.verify_kernel_is_flashinfer = False
        log.once(f"sglang: {', '.join(chosen)} of Gated DeltaNet layers run on gdn's kernels", logging.INFO)


def refusal(is_deterministic: bool, is_batch_invariant: bool) -> str | None:
    """Why a dispatcher keeps the host's kernels; None where it gets ours."""
    if is_deterministic and not is_batch_invariant:
        return "deterministic inference is on, and GDN_BATCH_INVARIANT is not"
    return None


_hooks: dict[Any, Hook] = {}  # by registry of the host


def _dispatcher(strict: bool, apply_hooks: bool) -> Point:
    def install(calls: Calls) -> Undo:
        host = importlib.import_module(f"{_LINEAR}.gdn_backend")
        base = importlib.import_module(f"{_LINEAR}.kernels.kernel_backend").LinearAttnKernelBase
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        choices = importlib.import_module("sglang.srt.server_args").LINEAR_ATTN_KERNEL_BACKEND_CHOICES
        hook = _hooks.get(hooks.HookRegistry)
        if hook is None:
            hook = Hook(host, kernel_class(base))
            before = host.GDNKernelDispatcher.__init__
            hooks.HookRegistry.register(f"{_DISPATCHER}.__init__", hook, hooks.HookType.AROUND)
            if apply_hooks:
                hooks.HookRegistry.apply_hooks()
                if host.GDNKernelDispatcher.__init__ is before:
                    raise Unreplaced("SGLang did not apply the hook (it applied another hook of this method before)")
            _hooks[hooks.HookRegistry] = hook
        hook.serving = Serving(calls, strict)
        if BACKEND not in choices:
            choices.append(BACKEND)
        return lambda: _stop(hook, choices)

    guards = (*_hosts.SGLANG_KERNELS, _DISPATCHER)
    return Point(f"{_DISPATCHER}.__init__", guards, install)


def _stop(hook: Hook, choices: list[str]) -> str | None:
    hook.serving = None
    _sglang_backend.phases.clear()
    if BACKEND in choices:
        choices.remove(BACKEND)
    return None
