"""What every replaced point shares: refusals of any call, and counters."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

MOST_REASONS = 100  # counted apart; bounds the memory where a host makes ever new reasons
_OTHER = "other reasons"
_OTHER_GPU = "the GPU is not SM90"
_WIDE = (torch.float32, torch.float64)


class Refused(ValueError):
    """A function of an adapter was called directly, outside of its host, with what this project does not serve."""


class Calls:
    """Counters of one replaced point.

    Calls that torch.compile traced, or that a CUDA graph replays, are counted when they are traced or captured at most.
    """

    def __init__(self, allow_reference: bool = False) -> None:
        self.allow_reference = allow_reference
        self.active = True  # False once the point is disabled: what still reaches the replacement runs the original
        self.served = 0
        self.left: dict[str, int] = {}

    def serves(self, reason: str | None) -> bool:
        """Counts a call that `reason` leaves to the host, or that is served where there is none; returns which."""
        if torch.compiler.is_compiling():  # a counter would become a guard of the compiled function
            return reason is None
        if reason is None:
            self.served += 1
            return True
        if reason not in self.left and len(self.left) >= MOST_REASONS:
            reason = _OTHER
        self.left[reason] = self.left.get(reason, 0) + 1
        return False


def unserved(
    tokens: torch.Tensor, differentiable: Iterable[torch.Tensor | None] = (), allow_reference: bool = False
) -> str | None:
    """Why no adapter serves a call with these tokens; None where nothing speaks against it.

    Parameters
    ----------
    tokens : Tensor
        The activations; their device and dtype decide.
    differentiable : iterable of Tensor or None
        Inputs and parameters of the step, which autograd might want gradients of.
    allow_reference : bool
        Serve tensors on the CPU too, by the plain-torch reference. For tests.
    """
    if tokens.is_cuda:  # the type of a device is a string, which takes as long to make as all of this
        if not _is_sm90(tokens.device.index):
            return _OTHER_GPU
        if tokens.dtype in _WIDE:
            return f"the tokens are {short_name(tokens.dtype)}, which has no kernel"
    elif not (tokens.is_cpu and allow_reference):
        return f"the tokens are on {tokens.device.type}"
    if torch.is_grad_enabled():
        if tokens.requires_grad or any(one is not None and one.requires_grad for one in differentiable):
            return "autograd needs gradients, which this project does not record"
    return None


def unserved_device(device: torch.device, allow_reference: bool = False) -> str | None:
    """Why no adapter serves a layer whose parameters are on this device; None also for meta, which says nothing yet."""
    if device.type == "cuda":
        return None if _is_sm90(device.index) else _OTHER_GPU
    return None if allow_reference or device.type == "meta" else f"its parameters are on {device.type}"


def unserved_state(state: torch.Tensor | None) -> str | None:
    """Why no adapter serves recurrent states of this dtype; None for float32, bfloat16 and no state."""
    if state is None or state.dtype in (torch.float32, torch.bfloat16):
        return None
    return f"the states are {short_name(state.dtype)}"


def refused_by(refusal: Callable[..., str | None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function that an adapter offers for import: a call that is not served raises Refused.

    refusal: see `asking`. Called directly, the function serves the CPU too. What it wraps (`inspect.unwrap`) is the function
    without the check, for a replaced point, which has asked already.
    """

    def decorate(serve: Callable[P, R]) -> Callable[P, R]:
        ask = asking(refusal, serve)

        @functools.wraps(serve)
        def direct(*args: P.args, **kwargs: P.kwargs) -> R:
            if reason := ask(*args, **kwargs, allow_reference=True):
                raise Refused(f"{serve.__name__}: {reason}")
            return serve(*args, **kwargs)

        return direct

    return decorate


def asking(refusal: Callable[..., str | None], serve: Callable[..., Any]) -> Callable[..., str | None]:
    """A function that takes the arguments of `serve`, and `allow_reference`, and returns what `refusal` says of them.

    `refusal` gets only the arguments that it names. Keywords that `serve` collects by `**` come to it as one mapping. A parameter
    that `serve` lacks must have a default.

    The function is generated from the signature, as an operator's public function is. To bind the arguments in each call would
    cost more than the refusal itself. They are passed by position, since a call with many of them is 1 us slower by keyword.
    """
    empty = inspect.Parameter.empty
    taken = [one.replace(default=empty, annotation=empty) for one in inspect.signature(serve).parameters.values()]
    taken.append(inspect.Parameter("allow_reference", inspect.Parameter.KEYWORD_ONLY))
    parameters = str(inspect.Signature(sorted(taken, key=lambda one: one.kind)))[1:-1]
    read = inspect.signature(refusal).parameters
    passed = ", ".join(f"{name}={name}" if one.kind is one.KEYWORD_ONLY else name for name, one in read.items())
    space = {name: one.default for name, one in read.items() if one.default is not empty}
    space["_refusal"] = refusal.func if isinstance(refusal, functools.partial) else refusal  # its arguments are defaults here
    ask: Any = eval(f"lambda {parameters}: _refusal({passed})", space)
    ask.__name__ = ask.__qualname__ = serve.__name__  # for a TypeError
    ask.__defaults__, ask.__kwdefaults__ = serve.__defaults__, {**(serve.__kwdefaults__ or {}), "allow_reference": False}
    return ask  # type: ignore[no-any-return]


def serve_or_leave(
    calls: Calls, original: Callable[..., Any], refusal: Callable[..., str | None], serve: Callable[..., Any]
) -> Callable[..., Any]:
    """The function that takes the place of `original`.

    `refusal` takes the host's arguments and `allow_reference`; `serve` takes the host's arguments.
    """

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if calls.active and calls.serves(refusal(*args, **kwargs, allow_reference=calls.allow_reference)):
            return serve(*args, **kwargs)
        return original(*args, **kwargs)

    return replacement


def short_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def _is_sm90(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) == (9, 0)


def unserved_machine(allow_reference: bool) -> str | None:
    """Why nothing is replaced on this machine; None where it has an SM90 GPU, or the reference is allowed.

    Asks the driver's management library: CUDA must not start in a process that an engine may still fork.
    """
    if allow_reference:
        return None
    found = _capabilities()
    if not found:
        return "this machine has no GPU that the driver names"
    return None if (9, 0) in found else "this machine has no SM90 GPU"


def _capabilities() -> list[tuple[int, int]]:
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except ImportError:
        return []
    except nvml.NVMLError:
        return []
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [(major, minor) for major, minor in map(nvml.nvmlDeviceGetCudaComputeCapability, handles)]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()
