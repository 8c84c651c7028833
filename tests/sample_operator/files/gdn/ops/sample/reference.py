"""The sample operator in plain torch."""

import torch

from gdn.reference_modes import compute_dtype, inference_only

Tensor = torch.Tensor


@inference_only
def sample_scale(x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    """factor * x * weight, contiguous, in the dtype of x."""
    dtype = compute_dtype(x)
    return (factor * x.to(dtype) * weight.to(dtype)).to(x.dtype).contiguous()
