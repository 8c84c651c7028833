"""Random weights with the scales of a trained model, for runs without a checkpoint."""

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from gdn.layers.config import HybridConfig
from gdn.layers.loading import table, to_transformers
from gdn.layers.model import HybridModel


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
            _draw(name, parameter, generators[device])


class RandomTensors(Mapping[str, Tensor]):
    """A checkpoint of random tensors, each drawn when it is looked up, the same on every rank.

    Parameters
    ----------
    config : HybridConfig
        Configuration of the whole model.
    seed : int
        The same seed gives other numbers on another kind of device.
    device, dtype : torch.device, torch.dtype
        Device and dtype of the tensors. The decay parameters of Gated DeltaNet are float32.
    """

    def __init__(
        self, config: HybridConfig, seed: int = 0, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self._device, self._seed = torch.device(device), seed
        shapes = to_transformers(dict(HybridModel(config, device="meta", dtype=dtype).named_parameters()), config)
        self._shapes = {name.removeprefix("model."): one for name, one in shapes.items()}
        self._parameter = {tensor: name for name, parts in table(config).items() for tensor, _ in parts}

    def __getitem__(self, name: str) -> Tensor:
        drawn = torch.empty_like(self._shapes[name], device=self._device)
        seed = zlib.crc32(f"{self._seed} {name}".encode())  # 32 bits: a CPU's generator takes no more
        _draw(self._parameter[name], drawn, torch.Generator(self._device).manual_seed(seed))
        return drawn

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _draw(name: str, values: Tensor, generator: torch.Generator) -> None:
    """Fills a parameter of this name, or a tensor that it is made of."""
    last = name.rpartition(".")[2]
    if last == "A_log":
        values.uniform_(1.0, 16.0, generator=generator).log_()
    elif last == "dt_bias":
        values.normal_(-4.0, 1.0, generator=generator)
    elif last == "norm_weight":
        values.normal_(1.0, 0.1, generator=generator)
    elif values.dim() == 1 or last.endswith("layer_scale"):  # gains less 1
        values.normal_(0.0, 0.1, generator=generator)
    elif last == "embed_tokens":
        values.normal_(0.0, 1.0, generator=generator)
    else:
        values.normal_(0.0, values.shape[-1] ** -0.5, generator=generator)
