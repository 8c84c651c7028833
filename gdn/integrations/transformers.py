"""Transformers on the kernels of `gdn`: `enable(model)`, then use the model as before.

Served are the Gated DeltaNet layers of Qwen3-Next, Qwen3.5 (dense and MoE) and Qwen4Exp, in inference: `generate`, dynamic and
static caches, beams, left padding, packed rows with `cu_seq_lens_q`, and `torch.compile`. What is not served runs the host's own
code, and the report says how often and why; most often it is a call that autograd records (`model.eval()` does not turn that
off, `torch.inference_mode()` does).
"""

import weakref
from typing import Any

from torch import nn

from gdn.integrations import Handle, _handle, _hosts
from gdn.integrations._transformers import points

LEVELS = ("layers", "functions")


def enable(
    model: nn.Module | None = None, level: str | None = None, *, strict: bool = False, allow_reference: bool = False
) -> Handle:
    """Lets Transformers run its Gated DeltaNet layers on the kernels of `gdn`.

    Parameters
    ----------
    model : Module, optional
        A model of Transformers, or a module that holds one. Its Gated DeltaNet layers get another `forward`, an attribute of each
        layer, in which one operator does everything between the projections, on the cache's own tensors. It also gets a hook that
        keeps packed sequences apart where `position_ids` restart and `cu_seq_lens_q` is not given: Transformers would mix them
        without a word. The hook reads the positions, so such a call waits for the device once; with a cache, where packed
        sequences cannot be continued, it raises ValueError, and in a compiled or captured call an assertion on the device fails.
    level : {"layers", "functions"}, optional
        "layers" needs a model; None = "layers" with a model, else "functions". "functions" replaces functions of the modeling
        modules instead, for all models of the process: for layers that subclass or copy those of Transformers. It is slower.
    strict : bool
        Raise where the host's code is not as recorded, or was replaced by someone else. Nothing is replaced then.
    allow_reference : bool
        Serve tensors on the CPU, by the plain-torch reference, on any machine. For tests.

    Returns
    -------
    Handle
        `disable()` puts the host's own code back, `report()` lists the replaced points and counts calls.

    Raises
    ------
    TypeError, ValueError
        If level does not fit model, or the model has no Gated DeltaNet layer of Transformers.
    RuntimeError
        With strict.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module or None, got {type(model).__name__}")
    expected = LEVELS[model is None]
    if level is not None and level not in LEVELS:
        raise ValueError(f"level: expected one of {', '.join(LEVELS)}, got {level!r}")
    if level is not None and level != expected:
        raise ValueError(f"level: expected {expected!r} {'without' if model is None else 'with'} a model, got {level!r}")
    options: dict[str, Any] = {"strict": strict, "allow_reference": allow_reference, "options": {"level": expected}}
    if model is None:
        return _handle.enable(_hosts.TRANSFORMERS, points.of_functions(), **options)
    found = points.of_model(model)
    if not found:
        kinds = ", ".join(kind for kind, _, _ in _hosts.TRANSFORMERS_MODELS)
        raise ValueError(f"model: expected one with Gated DeltaNet layers of {kinds}, got {type(model).__name__}")
    return _handle.enable(_hosts.TRANSFORMERS, found, scope=weakref.ref(model), **options)
