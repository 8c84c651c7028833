"""Parts of a checkpoint's tensors that a tensor-parallel rank takes, and the order of their rows in the parameter.

whole            all of it, on every rank
vector           the same, as a vector
rows             an equal share of dimension 0
columns          an equal share of dimension 1: the outputs of the ranks are summands
kv_heads         key or value heads of attention, by rows; with fewer heads than ranks, neighbouring ranks hold the same head
qkv              q, k and v heads of Gated DeltaNet, by rows: an equal share of each of the three
conv             the same for the filter of the convolution, [channels, 1, w] in a checkpoint
qkvz, ba         projections of Gated DeltaNet per key-head group, [q | k | v | z] and [b | a]: an equal share of the groups,
                 put into the order [all q | all k | all v | all z], [all b | all a]
expert_rows      [experts, 2 * intermediate, hidden]: an equal share of both halves of dimension 1
expert_columns   [experts, hidden, intermediate]: an equal share of dimension 2
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gdn.layers.config import HybridConfig


@dataclass(frozen=True)
class Rank:
    """A rank of a model: the whole model's configuration, the rank's number and the number of ranks."""

    config: HybridConfig
    rank: int
    size: int

    def share(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's equal share of a dimension."""
        return tensor.chunk(self.size, dim)[self.rank] if self.size > 1 else tensor


@dataclass(frozen=True)
class Cut:
    """One way to take a tensor.

    Attributes
    ----------
    take : callable
        Tensor of the checkpoint, rank -> this rank's part of the parameter.
    give : callable
        The way back, for a whole model.
    rows : callable
        Rank, name of the tensor -> rows of the whole tensor, the same in the parameter; None where any number will do.
    """

    take: Callable[[Tensor, Rank], Tensor]
    give: Callable[[Tensor, Rank], Tensor] = lambda tensor, _: tensor
    rows: Callable[[Rank, str], int | None] = lambda rank, tensor: _rows(rank.config, tensor)


def _rows(config: HybridConfig, tensor: str) -> int | None:
    """Rows of a whole tensor, by the end of its name."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    value_heads, value_dim = config.linear_num_value_heads, config.linear_value_dim
    attention = {
        "q_proj": heads * dim * (2 if config.attn_output_gate else 1),
        "k_proj": kv_heads * dim,
        "v_proj": kv_heads * dim,
    }
    linear = {
        "in_proj_qkvz": config.conv_dim + value_dim, "in_proj_ba": 2 * value_heads, "in_proj_qkv": config.conv_dim,
        "in_proj_z": value_dim, "in_proj_b": value_heads, "in_proj_a": value_heads, "conv1d": config.conv_dim,
    }  # fmt: skip
    path = tensor.removesuffix(".weight").split(".")
    if path[-1] in ("gate_proj", "up_proj"):
        return config.shared_expert_intermediate_size if "shared_expert" in path else config.intermediate_size
    own = {"A_log": value_heads, "dt_bias": value_heads}
    return (attention | linear | own).get(path[-1])


def _take_kv_heads(tensor: Tensor, rank: Rank) -> Tensor:
    heads = rank.config.num_key_value_heads
    if heads >= rank.size:
        return rank.share(tensor)
    return tensor.chunk(heads)[rank.rank * heads // rank.size]


def _take_qkv(tensor: Tensor, rank: Rank) -> Tensor:
    config = rank.config
    key_dim = config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([rank.share(part) for part in tensor.split([key_dim, key_dim, config.linear_value_dim])])


def _sizes(config: HybridConfig, cut: str) -> list[int]:
    """Rows of the parts of one key-head group."""
    values = config.linear_num_value_heads // config.linear_num_key_heads
    if cut == "ba":
        return [values, values]
    return [config.linear_key_head_dim] * 2 + [values * config.linear_value_head_dim] * 2


def _take_groups(cut: str) -> Callable[[Tensor, Rank], Tensor]:
    def take(tensor: Tensor, rank: Rank) -> Tensor:
        groups = rank.share(tensor.unflatten(0, (rank.config.linear_num_key_heads, -1)))
        return torch.cat([part.flatten(0, 1) for part in groups.split(_sizes(rank.config, cut), dim=1)])

    return take


def _give_groups(cut: str) -> Callable[[Tensor, Rank], Tensor]:
    def give(tensor: Tensor, rank: Rank) -> Tensor:
        heads = rank.config.linear_num_key_heads
        parts = tensor.split([heads * size for size in _sizes(rank.config, cut)])
        return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)

    return give


def _take_expert_rows(tensor: Tensor, rank: Rank) -> Tensor:
    if rank.size == 1:  # the largest tensors: no second one in memory
        return tensor
    return torch.cat([rank.share(half, 1) for half in tensor.chunk(2, dim=1)], dim=1)


CUTS = {
    "whole": Cut(lambda tensor, _: tensor),
    "vector": Cut(lambda tensor, _: tensor.reshape(-1), lambda tensor, _: tensor.reshape(1, 1, -1), lambda *_: None),
    "rows": Cut(lambda tensor, rank: rank.share(tensor)),
    "columns": Cut(lambda tensor, rank: rank.share(tensor, 1)),
    "kv_heads": Cut(_take_kv_heads),
    "qkv": Cut(_take_qkv),
    "conv": Cut(lambda tensor, rank: _take_qkv(tensor.squeeze(1), rank), lambda tensor, _: tensor.unsqueeze(1)),
    "qkvz": Cut(_take_groups("qkvz"), _give_groups("qkvz")),
    "ba": Cut(_take_groups("ba"), _give_groups("ba")),
    "expert_rows": Cut(_take_expert_rows),
    "expert_columns": Cut(lambda tensor, rank: rank.share(tensor, 2)),
}
