"""Rotary position embedding, neox style: dimension i is rotated with dimension i + rotary_dim / 2."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gdn.core import values
from gdn.core.call import reads_values
from gdn.layers.config import HybridConfig
from gdn.layers.host_arrays import refuse


def cos_sin_table(rotary_dim: int, theta: float, positions: int, device: torch.device | str | None = None) -> Tensor:
    """Cosines and sines of every position, float32 [positions, rotary_dim]: the cosines, then the sines."""
    # Frequencies from the CPU: at position 2**18 a difference in their last bit is a difference of 0.03 in the angle.
    frequencies = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim)
    steps = torch.arange(positions, dtype=torch.float32, device=device)
    angles = steps[:, None] * frequencies.to(steps.device)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def apply_rotary(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotates the first dimensions of every head, in float32 inside.

    Parameters
    ----------
    x : Tensor [tokens, heads, D]
        Heads, any float dtype.
    cos_sin : Tensor [tokens, rotary_dim] of float32
        Row of the table for the position of each token.

    Returns
    -------
    Tensor [tokens, heads, D]
        In the dtype of `x`; dimensions from rotary_dim on are unchanged.
    """
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], dim=-1)


class RotaryEmbedding(nn.Module):
    """Table of cosines and sines, shared by all layers of a model; float32 whatever dtype the model is moved to.

    Parameters
    ----------
    config : HybridConfig
        Gives the rotated dimensions, the base of the frequencies and the number of positions.
    device : torch.device
        Device of the table.

    Attributes
    ----------
    cos_sin : Tensor [max_position_embeddings, rotary_dim] of float32
        The cosines, then the sines.
    """

    cos_sin: Tensor

    def __init__(self, config: HybridConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._shape = (config.rotary_dim, config.rope_theta, config.max_position_embeddings)
        self.register_buffer("cos_sin", cos_sin_table(*self._shape, device), persistent=False)

    def check_length(self, max_seq_len: int) -> None:
        """Raises ValueError where sequences may be longer than the table, whose last row the kernels take for later positions.

        max_seq_len: `AttentionMetadata.max_seq_len`, known on the host.
        """
        rows = self.cos_sin.shape[0]
        if max_seq_len > rows:
            refuse("max_seq_len", f"at most {rows} tokens of a sequence (max_position_embeddings)", max_seq_len)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates heads [tokens, heads, D] to their positions [tokens].

        Positions without a row in the table are refused on the CPU, by value; on a GPU with ``GDN_VALIDATE=1``.
        """
        if reads_values(positions.device):
            values.check_rope_positions("positions", positions, self.cos_sin.shape[0])
        return apply_rotary(x, self.cos_sin[positions])

    if TYPE_CHECKING:
        __call__ = forward

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "RotaryEmbedding":
        was = self.cos_sin
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos_sin is not was:  # another dtype or device, or memory without contents (`to_empty`)
            self.cos_sin = cos_sin_table(*self._shape, self.cos_sin.device)
        return self
