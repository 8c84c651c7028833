"""Random weights for the demo's models."""

import torch
from torch import nn


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Fills every parameter in place, so that activations keep their size from layer to layer.

    Projections are normal with a variance of 1 / fan-in, the gains of norms are near 1 (zero-centred ones near 0), and decays
    range from slow to fast. Values depend on the device and the seed.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[2]
        if kind in ("embed_tokens", "A_log", "dt_bias"):
            parameter.normal_(0.0, 1.0, generator=generator)
        elif kind == "norm_weight":
            parameter.normal_(1.0, 0.1, generator=generator)
        elif parameter.dim() == 1:
            parameter.normal_(0.0, 0.1, generator=generator)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
