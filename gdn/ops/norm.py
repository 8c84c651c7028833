"""Public operator: the gated RMS norm behind the recurrence."""

import torch

from gdn.ops import _library
from gdn.ops._checks import bad_value, check_tensor
from gdn.ops._delta_rule import FLOAT_DTYPES
from gdn.reference import steps as reference
from gdn.runtime import reference_only

Tensor = torch.Tensor


def rms_norm_gated(x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6, activation: str = "silu") -> Tensor:
    """x / sqrt(mean(x * x) + eps) * weight * activation(z), over the last dim, in float32.

    Arguments: x, z [..., V] of one shape, weight [V]; any float dtypes and strides; eps > 0 or 0; activation "silu" (or
    "swish") | "sigmoid". Returns a new tensor like x. Raises TypeError or ValueError, naming the argument.
    """
    if torch.compiler.is_compiling():
        return _library.norm(x, z, weight, eps, activation)  # type: ignore[no-any-return]
    check_tensor("x", x, dtypes=FLOAT_DTYPES)
    if x.dim() == 0:
        bad_value("x", "shape [..., V]", "shape []")
    check_tensor("z", z, shape=x.shape, dtypes=FLOAT_DTYPES, device=x.device)
    check_tensor("weight", weight, shape=x.shape[-1:], dtypes=FLOAT_DTYPES, device=x.device)
    check_gate_activation("activation", activation)
    reference_only("rms_norm_gated")
    return reference.rms_norm_gated(x, z, weight, eps, activation).contiguous()


def check_gate_activation(name: str, activation: object) -> None:
    if activation not in ("silu", "swish", "sigmoid"):
        bad_value(name, "'silu', 'swish' or 'sigmoid'", repr(activation))
