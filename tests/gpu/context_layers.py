"""Steps of layers at the sizes of Qwen3-Next-80B, over ranks and on one GPU alone."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn.layers import AttentionMetadataBuilder, GatedDeltaNet, GDNMetadataBuilder, HybridConfig, SparseAttention
from gdn.layers.named import NAMED
from gdn.layers.random_weights import fill_randomly
from tests.gpu.context_inputs import state_error

CONFIG = NAMED["qwen3-next-80b"]
ATTENTION_FORMS: tuple[dict[str, int], ...] = ({}, {"index_n_heads": 4, "index_ratio": 4})
BLOCK, BLOCKS = 64, 80
# Strong decay: a prompt and a short one, then a decode row of the first and the next chunk of the second. Weak decay: parts short
# enough that the states before them count.
STEPS = {False: (([3000, 100], [3000, 100]), ([1, 2000], [3001, 2100])), True: (([500, 260], [500, 260]), ([1, 640], [501, 900]))}
DELTA_NET_EXCHANGES = 4  # the convolution's and the operator's, of two steps


class Step(NamedTuple):
    """Results of a step of a Gated DeltaNet layer on a rank."""

    rows: Tensor  # places of the rank's rows in the step
    output: Tensor
    windows: Tensor
    states: Tensor


def delta_net_steps(
    group: Any, is_weak: bool, within: Callable[[], AbstractContextManager[Any]] = nullcontext, device: str = "cuda"
) -> list[Step]:
    """Two steps of a layer on a rank, or of the whole without a group. within: around a rank's calls."""
    layer = GatedDeltaNet(CONFIG, cp_group=group, device=device, dtype=torch.bfloat16)
    fill_randomly(layer, 1)
    if is_weak:
        layer.A_log.data = torch.linspace(-9, -5, layer.num_v_heads, device=device)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())

    def random(*shape: int, seed: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(seed))

    windows = random(4, 3, layer.conv_dim, seed=3).bfloat16().mT
    states = random(4, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim, seed=4)
    found = []
    for queries, lengths in STEPS[is_weak]:
        metadata = GDNMetadataBuilder(device, cp_rank=rank, cp_size=size).build(queries, lengths, [2, 1])
        assert (metadata.parts is None) == (size == 1)
        hidden = random(sum(queries), layer.hidden_size, seed=lengths[1]).bfloat16()
        rows = torch.arange(sum(queries), device=device)
        if metadata.parts is not None:
            rows = metadata.parts.take(rows, rank)
        hidden = hidden[rows]
        with nullcontext() if group is None else within():
            output = layer(hidden, metadata, windows, states)
        found.append(Step(rows, output, windows.clone(), states.clone()))
    return found


def step_errors(found: Step, wanted: Step) -> tuple[float, float]:
    """Relative errors of a rank's outputs, and of the windows and states, of a head the largest."""
    return (
        _relative(found.output, wanted.output[found.rows]),
        max(state_error(found.states, wanted.states), _relative(found.windows, wanted.windows)),
    )


def attention_step(group: Any, fields: dict[str, int], device: str = "cuda") -> Tensor:
    """A step of an attention layer, whose output is the same on all ranks: a long prompt, a short one, a decode row."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    config = HybridConfig(**{**vars(CONFIG), **fields})
    layer = SparseAttention(config, cp_group=group, device=device, dtype=torch.bfloat16)
    fill_randomly(layer, 1)
    queries, lengths = [5000, 300, 1], [5000, 300, 77]
    builder = AttentionMetadataBuilder(
        device, block_size=BLOCK, max_seq_len=BLOCK * BLOCKS, index_ratio=config.index_ratio, cp_rank=rank, cp_size=size,
        deal_longer_than=1000,
    )  # fmt: skip
    tables = torch.randperm(3 * BLOCKS, generator=torch.Generator().manual_seed(1)).view(3, -1)
    metadata = builder.build(queries, lengths, tables, [1, 2, 3])
    assert (metadata.dealt is None) == (size == 1)
    generator = torch.Generator(device).manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    kv = random(2, 3 * BLOCKS, BLOCK, config.num_key_value_heads, config.head_dim)
    keys = random(3 * BLOCKS, BLOCK // config.index_ratio, config.index_kv_heads, config.index_head_dim)
    ring = random(4, 4, config.index_kv_heads, config.index_head_dim) if config.index_ratio > 1 else None
    hidden = random(sum(queries), config.hidden_size)
    positions = torch.cat([torch.arange(n - q, n) for q, n in zip(queries, lengths, strict=True)]).to(device)
    output: Tensor = layer(hidden, positions, metadata, (kv[0], kv[1]), keys, ring)
    return output


def row_errors(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Relative error of the middle row, and of all but a hundredth.

    Keys of blocks of other sizes may be rounded differently, so a few rows select another position of nearly equal score.
    """
    errors = (found - wanted).float().norm(dim=1) / wanted.float().norm(dim=1)
    return float(errors.median()), float(errors.quantile(0.99))


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).float().norm() / wanted.float().norm().clamp(min=1e-9))
