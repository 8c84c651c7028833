"""Public operators `rms_norm_gated`, the norm after the recurrence, and `add_rms_norm`, the residual sum and its norm."""

from typing import Any

import torch
from torch import Tensor

from gdn.core import check
from gdn.core.call import NEW, launch, make, operator, prepare
from gdn.core.check import FLOAT_DTYPES, GATE_ACTIVATIONS, bad_value, dtype_name
from gdn.core.modes import is_empty
from gdn.core.tensors import ALIGNMENT, aligned, constant, contiguous_last, dtypes_of, given_of, optional
from gdn.ops.layer_step import reference
from gdn.ops.layer_step.problem import AddRmsNormParams, AddRmsNormProblem, RmsNormGatedParams, RmsNormGatedProblem
from gdn.runtime.registry import Backend


@operator(reference.rms_norm_gated, varies=("x", "z"), contiguous=("x", "z"))
def rms_norm_gated(
    x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6, activation: str = "silu", *, backend: Backend | None = None
) -> Tensor:
    """RMS norm with an output gate, over the last dimension.

        x / sqrt(mean(x * x) + eps) * weight * activation(z)

    computed in float32 (float64 where `x` is float64): the norm before the gate, with a plain gain.

    Parameters
    ----------
    x, z, weight : Tensor [..., V], Tensor [..., V], Tensor [V]
        Values to normalise, input of the gate and gain; any float dtypes and strides. A last dimension of x or z that is not
        contiguous is copied, logged once.
    eps, activation : float, {"silu", "swish", "sigmoid"}
        Added to the mean square, finite, >= 0; activation of `z`, where "swish" means SiLU.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    Tensor [..., V]
        New contiguous tensor in the dtype of `x`.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched.

    References
    ----------
    .. [1] B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    """
    check.tensor("x", x, dtypes=FLOAT_DTYPES)
    if x.dim() == 0:
        bad_value("x", "shape [..., V]", "shape []")
    check.tensor("z", z, shape=x.shape, dtypes=FLOAT_DTYPES, device=x.device)
    check.tensor("weight", weight, shape=x.shape[-1:], dtypes=FLOAT_DTYPES, device=x.device)
    check.not_negative("eps", eps)
    check.one_of("activation", activation, GATE_ACTIVATIONS)
    dim = x.shape[-1]
    # Contiguous tensors count as rows of one head: the number of heads is compiled in.
    heads = 1 if x.dim() < 3 or (x.is_contiguous() and z.is_contiguous()) else x.shape[-2]
    dtypes: dict[str, Any] = {"dtype": dtype_name(x.dtype), **dtypes_of(z=z, weight=weight)}
    sizes: dict[str, Any] = {"num_heads": heads, "head_dim": dim, "num_tokens": x.numel() // max(heads * dim, 1)}
    problem = RmsNormGatedProblem(**dtypes, sigmoid=activation == "sigmoid", **sizes)
    prepared = prepare(problem, x.device, backend)
    out = make(_like, x)
    if not is_empty(*x.shape):
        vector = 4 if dim % 8 else 8

        def rows(name: str, part: Tensor) -> Tensor:
            return aligned(name, part.reshape(-1, heads, dim), min(ALIGNMENT, vector * part.element_size()))

        params = RmsNormGatedParams(rows("x", x), rows("z", z), constant(weight), out.view(-1, heads, dim), eps)
        launch(prepared, params, (out,), aligned=(x, z, weight))
    return out


def _sums(arguments: dict[str, Any]) -> tuple[str, ...]:
    return NEW, "x" if arguments["residual"] is None else NEW


@operator(
    reference.add_rms_norm, returns=_sums, varies=("x", "residual"), contiguous=("residual",)
)  # x may be a result: the body copies what it reads
def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    layer_scale: Tensor | None = None,
    zero_centred: bool = True,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Residual sum, and its RMS norm, over the last dimension.

        s = residual + x * (1 + layer_scale);   normed = s / sqrt(mean(s * s) + eps) * (1 + weight)

    computed in float32 (float64 where `x` is float64); s is rounded to the dtype of `x`, once, before the norm.

    Parameters
    ----------
    x : Tensor [..., D]
        Output of a layer's part, any float dtype and strides. A last dimension that is not contiguous is copied, logged once,
        also of `residual`.
    residual : Tensor [..., D] or None
        Residual stream before the part, in the dtype of `x`; None before the first part: the norm is of `x`.
    weight : Tensor [D]
        Gain less 1, any float dtype.
    eps : float
        Added to the mean square, finite, >= 0.
    layer_scale : Tensor [D], optional
        Factor of `x` less 1, any float dtype; needs a residual. None = 0.
    zero_centred : bool
        False = the gain is `weight` itself.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    normed, s : Tensor [..., D]
        Input of the next part, and the residual stream after the sum: new contiguous tensors in the dtype of `x`. Without a
        residual s is `x` itself.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched.

    References
    ----------
    .. [1] B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    """
    check.tensor("x", x, dtypes=FLOAT_DTYPES)
    if x.dim() == 0:
        bad_value("x", "shape [..., D]", "shape []")
    if residual is not None:
        check.tensor("residual", residual, shape=x.shape, dtypes=(x.dtype,), device=x.device)
    check.tensor("weight", weight, shape=x.shape[-1:], dtypes=FLOAT_DTYPES, device=x.device)
    if layer_scale is not None:
        if residual is None:
            bad_value("layer_scale", "None without a residual", "a tensor")
        check.tensor("layer_scale", layer_scale, shape=x.shape[-1:], dtypes=FLOAT_DTYPES, device=x.device)
    check.not_negative("eps", eps)
    dim, read = x.shape[-1], contiguous_last("x", x)
    fields: dict[str, Any] = {"dtype": dtype_name(x.dtype), **dtypes_of(weight=weight, layer_scale=layer_scale)}
    fields |= given_of(residual=residual)
    problem = AddRmsNormProblem(dim, **fields, zero_centred=zero_centred, num_tokens=x.numel() // max(dim, 1))
    prepared = prepare(problem, x.device, backend)
    normed, total = make(_like, x), x if residual is None else make(_like, x)
    if not is_empty(*x.shape):
        others = None if residual is None else aligned("residual", residual.reshape(-1, dim))
        rows, target = aligned("x", read.reshape(-1, dim)), None if residual is None else total.view(-1, dim)
        scale = optional(constant, layer_scale)
        params = AddRmsNormParams(rows, others, constant(weight), scale, normed.view(-1, dim), target, eps)
        launch(prepared, params, (normed, total), aligned=(x, residual, weight, layer_scale))
    return normed, total


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)  # a shape as an argument costs the host twice as much
