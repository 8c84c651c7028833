"""Random weights with the scales of a trained model, for runs without a checkpoint."""

import torch
from torch import nn


def fill_randomly(model: nn.Module, seed: int = 0) -> None:
    """Fills every parameter of a module of `gdn.layers` with random values that keep signals near 1.

    Matrices have the deviation (number of inputs) ** -0.5, gains of the norms are near 1, decays are between 0.2 and nearly 1
    per token, as in trained models.

    Parameters
    ----------
    model : Module
        `HybridModel` or one of its layers, on any device; each parameter is drawn there.
    seed : int
        Seed of the generator. The same seed gives other numbers on another kind of device.
    """
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            generator, last = generators[device], name.rpartition(".")[2]
            if last == "A_log":
                parameter.uniform_(1.0, 16.0, generator=generator).log_()
            elif last == "dt_bias":
                parameter.normal_(-4.0, 1.0, generator=generator)
            elif last == "norm_weight":
                parameter.normal_(1.0, 0.1, generator=generator)
            elif parameter.dim() == 1:  # gains less 1
                parameter.normal_(0.0, 0.1, generator=generator)
            elif last == "embed_tokens":
                parameter.normal_(0.0, 1.0, generator=generator)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
