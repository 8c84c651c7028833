"""A step of several operators as a module, and its inputs."""

import torch

import gdn

INT32 = torch.int32


class Step(torch.nn.Module):
    """Convolution in place, recurrence over a pool, and the indexer from the cache write to the selection."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(32, 4, generator=generator))
        self.norm = torch.nn.Parameter(torch.randn(16, generator=generator))
        self.register_buffer("cos_sin", torch.randn(64, 8, generator=generator))

    def forward(
        self, x: torch.Tensor, conv_states: torch.Tensor, pool: torch.Tensor, cache: torch.Tensor, keys: torch.Tensor,
        positions: torch.Tensor, slots: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        x = x * 2
        y = gdn.causal_conv1d_fn(x, self.weight, conv_states=conv_states, cache_indices=slots, out=x)
        heads = y.view(1, -1, 2, 16)
        o, _ = gdn.chunk_gated_delta_rule(
            heads, heads, heads, initial_state=pool, state_indices=slots, use_qk_l2norm_in_kernel=True
        )
        q, weights = gdn.prepare_indexer(
            heads[0], keys, None, positions, self.cos_sin, self.norm, self.norm, cache, positions, rotary_dim=8
        )
        tables, tokens = torch.tensor([[0, 1]], dtype=INT32), positions.shape[0]
        k, k_scale = gdn.gather_indexer_cache(cache, tables, torch.tensor([0, 8]), num_rows=8)
        starts = torch.zeros(tokens, dtype=INT32)
        logits = gdn.mqa_logits(q, k, weights, starts, positions.int() + 1, k_scale=k_scale)
        return o, logits, gdn.topk_indices(logits, 4)


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    cache = torch.zeros(4, 16, 20, dtype=torch.uint8)
    slots = torch.tensor([1], dtype=INT32)
    return normal(8, 32), normal(3, 32, 3), normal(3, 2, 16, 16), cache, normal(8, 16), torch.arange(8), slots
