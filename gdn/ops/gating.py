"""Public operator: decay and write strength from the raw gates."""

import torch

from gdn.ops._call import NEW, operator, prepare, run_reference
from gdn.ops._checks import bad_value, check_tensor, dtype_name
from gdn.ops._delta_rule import FLOAT_DTYPES
from gdn.ops._modes import is_empty
from gdn.problems import GatingParams, GatingProblem
from gdn.reference import steps as reference

Tensor = torch.Tensor


@operator(reference=reference.fused_gdn_gating, returns=lambda _: (NEW, NEW))
def fused_gdn_gating(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) * softplus(a + dt_bias) and beta_output = sigmoid(b), per value head.

    softplus(x) = log1p(exp(beta * x)) / beta where beta * x <= threshold, else x. Natural logarithm.

    Arguments: A_log, dt_bias [HV]; a, b [..., HV] of one shape; any float dtypes, any strides.
    Returns (g, beta_output), float32, contiguous, of the shape of a and b. (float64 where a is float64.)
    backend: as in chunk_gated_delta_rule. Raises TypeError or ValueError, naming the argument.
    """
    check_tensor("a", a, dtypes=FLOAT_DTYPES)
    if a.dim() == 0:
        bad_value("a", "shape [..., HV]", "shape []")
    check_tensor("b", b, shape=a.shape, dtypes=FLOAT_DTYPES, device=a.device)
    check_tensor("A_log", A_log, shape=a.shape[-1:], dtypes=FLOAT_DTYPES, device=a.device)
    check_tensor("dt_bias", dt_bias, shape=a.shape[-1:], dtypes=FLOAT_DTYPES, device=a.device)
    if beta <= 0:
        bad_value("beta", "a number > 0", beta)
    heads = a.shape[-1]
    problem = GatingProblem(
        num_heads=heads,
        a_dtype=dtype_name(a.dtype),
        b_dtype=dtype_name(b.dtype),
        A_log_dtype=dtype_name(A_log.dtype),
        dt_bias_dtype=dtype_name(dt_bias.dtype),
        num_tokens=a.numel() // max(heads, 1),
    )
    prepared = prepare(problem, a.device, backend)
    if prepared.launch is None:
        run_reference()
    g, beta_output = (torch.empty(x.shape, dtype=_result_dtype(x), device=a.device) for x in (a, b))
    if not is_empty(*a.shape):
        params = GatingParams(
            A_log=A_log,
            a=a.reshape(-1, heads),
            b=b.reshape(-1, heads),
            dt_bias=dt_bias,
            g=g.view(-1, heads),
            beta_output=beta_output.view(-1, heads),
            beta=beta,
            threshold=threshold,
        )
        prepared.launch(params)
    return g, beta_output


def _result_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
