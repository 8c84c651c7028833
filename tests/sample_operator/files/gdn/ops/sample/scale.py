"""Public operator `sample_scale`: rows times a gain."""

from typing import Any

import torch
from torch import Tensor

from gdn.core import check
from gdn.core.call import launch, make, operator, prepare
from gdn.core.check import FLOAT_DTYPES, bad_value, dtype_name
from gdn.core.modes import is_empty
from gdn.core.tensors import aligned, constant, contiguous_last, dtypes_of
from gdn.ops.sample import reference
from gdn.ops.sample.problem import SampleScaleParams, SampleScaleProblem
from gdn.runtime.registry import Backend


@operator(reference.sample_scale, varies=("x", "weight"), contiguous=("x",))
def sample_scale(x: Tensor, weight: Tensor, factor: float = 1.0, *, backend: Backend | None = None) -> Tensor:
    """Rows times a gain: factor * x * weight, over the last dimension, computed in float32 (float64 where `x` is float64).

    Parameters
    ----------
    x : Tensor [..., D]
        Rows, any float dtype and strides. A last dimension that is not contiguous is copied, logged once.
    weight : Tensor [D]
        Gain of each column, any float dtype.
    factor : float
        Gain of all columns, finite.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    Tensor [..., D]
        New contiguous tensor in the dtype of `x`.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched.

    References
    ----------
    .. [1] J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", arXiv:1607.06450: the gain without the norm.

    Examples
    --------
    >>> import torch, gdn
    >>> gdn.sample_scale(torch.ones(1, 2), torch.tensor([1.0, 3.0]), 2.0)
    tensor([[2., 6.]])
    """
    check.tensor("x", x, dtypes=FLOAT_DTYPES)
    if x.dim() == 0:
        bad_value("x", "shape [..., D]", "shape []")
    check.tensor("weight", weight, shape=x.shape[-1:], dtypes=FLOAT_DTYPES, device=x.device)
    dim, read = x.shape[-1], contiguous_last("x", x)
    dtypes: dict[str, Any] = {"dtype": dtype_name(x.dtype), **dtypes_of(weight=weight)}
    problem = SampleScaleProblem(dim, **dtypes, num_tokens=x.numel() // max(dim, 1))
    prepared = prepare(problem, x.device, backend)
    out = make(_like, x)
    if not is_empty(*x.shape):
        params = SampleScaleParams(aligned("x", read.reshape(-1, dim)), constant(weight), out.view(-1, dim), factor)
        launch(prepared, params, (out,), aligned=(x, weight))
    return out


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
