"""Public operator `fused_gdn_gating`: decay and write strength from the raw gates."""

import torch
from torch import Tensor

from gdn.core import check
from gdn.core.call import NEW, launch, new, operator, prepare
from gdn.core.check import FLOAT_DTYPES, bad_value
from gdn.core.modes import is_empty
from gdn.core.tensors import dtypes_of
from gdn.ops.layer_step import reference
from gdn.ops.layer_step.problem import GatingParams, GatingProblem
from gdn.runtime.registry import Backend


@operator(reference.fused_gdn_gating, returns=lambda _: (NEW, NEW), varies=("a", "b"))
def fused_gdn_gating(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    *,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Decay and write strength from the raw gates, per value head.

        g = -exp(A_log) * softplus(a + dt_bias);   beta_output = sigmoid(b)

    with softplus(x) = log1p(exp(beta * x)) / beta where beta * x <= threshold, else x. Natural logarithms; computed in float32
    (float64 where `a` is float64).

    Parameters
    ----------
    A_log, a, b, dt_bias : Tensor [HV], Tensor [..., HV], Tensor [..., HV], Tensor [HV]
        Logarithm of the decay rate, raw decay gate, raw write strength, bias of the decay gate; any float dtypes and strides.
    beta, threshold : float
        Sharpness of the softplus, > 0, and value of beta * x above which the softplus is x.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    g, beta_output : Tensor [..., HV]
        Natural logarithm of the decay, and write strength: new, contiguous, float32 (float64 where `a` is float64).

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched.

    References
    ----------
    .. [1] The parameters of the decay are Mamba2's, as in `chunk_gated_delta_rule`.
    .. [2] The arguments are those of ``fused_gdn_gating`` in vLLM.
    """
    check.tensor("a", a, dtypes=FLOAT_DTYPES)
    if a.dim() == 0:
        bad_value("a", "shape [..., HV]", "shape []")
    check.tensor("b", b, shape=a.shape, dtypes=FLOAT_DTYPES, device=a.device)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        check.tensor(name, x, shape=a.shape[-1:], dtypes=FLOAT_DTYPES, device=a.device)
    if beta <= 0:
        bad_value("beta", "a number > 0", beta)
    heads = a.shape[-1]
    given = dtypes_of(a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    problem = GatingProblem(num_heads=heads, **given, num_tokens=a.numel() // max(heads, 1))
    prepared = prepare(problem, a.device, backend)
    dtypes = (torch.float64 if x.dtype == torch.float64 else torch.float32 for x in (a, b))
    g, beta_output = (new(dtype, a.device, *a.shape) for dtype in dtypes)
    if not is_empty(*a.shape):
        a, b = a.reshape(-1, heads), b.reshape(-1, heads)
        params = GatingParams(A_log, a, b, dt_bias, g.view(-1, heads), beta_output.view(-1, heads), beta, threshold)
        launch(prepared, params, (g, beta_output))
    return g, beta_output
