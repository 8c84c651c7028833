"""The decode step with a ring against the one that stores a state for every draft, and the windows of draft trees."""

from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import same_bits

Tensor = torch.Tensor
H, HV, K, V, W = 2, 4, 6, 4, 4  # key heads, value heads, dims, width of the convolution
DIM, F64 = 2 * H * K + HV * V, torch.float64


class Layer:
    """Parameters of a layer, and calls of its decode step on pools of its own."""

    def __init__(self, most: int, *, norm: bool = True) -> None:
        self.generator, self.most = torch.Generator().manual_seed(most), most
        self.weights: dict[str, Any] = {
            "conv_weight": self.randn(DIM, W), "conv_bias": self.randn(DIM), "A_log": self.randn(HV), "dt_bias": self.randn(HV),
            "norm_weight": self.randn(V) if norm else None, "num_k_heads": H, "head_k_dim": K, "head_v_dim": V,
        }  # fmt: skip
        self.has_norm = norm
        self.slots = 12 * most
        self.pool = self.randn(self.slots, HV, K, V)
        self.windows = self.randn(self.slots, DIM, W - 2 + most)
        self.rows, self.width, self.fold_every = 2 + 2 * most, -(-(H * K + HV * (V + 1)) // 4) * 4, 3
        self.ring = torch.full((self.slots, self.rows, self.width), torch.nan, dtype=F64)
        self.state_tokens = torch.zeros(self.slots, dtype=torch.int32)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=F64)

    def draw(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.generator))

    def projections(self, tokens: int) -> dict[str, Any]:
        z = self.randn(tokens, HV, V) if self.has_norm else None
        return {"mixed_qkv": self.randn(tokens, DIM), "z": z, "b": self.randn(tokens, HV), "a": self.randn(tokens, HV)}

    def replay(self, tokens: Tensor) -> dict[str, Any]:
        return {
            "ring": self.ring, "state_tokens": self.state_tokens, "num_computed_tokens": tokens, "fold_every": self.fold_every,
            "fold_phase": 1,
        }  # fmt: skip


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("most", [1, 4])
def test_the_fused_step_equals_the_one_with_a_state_for_every_draft(most: int, norm: bool) -> None:
    ours, count = Layer(most, norm=norm), 3
    pool, windows = ours.pool.clone(), ours.windows.clone()
    tables = torch.arange(count * most, dtype=torch.int32).view(count, most) + 2
    slots, tokens = tables[:, 0].clone(), torch.tensor([0, 5, 100], dtype=torch.int32)
    ours.state_tokens[slots] = tokens
    accepted = torch.ones(count, dtype=torch.int32)
    for _ in range(15):
        lengths = [1 if most == 1 else ours.draw(most + 1) for _ in range(count)]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        given = ours.projections(int(offsets[-1])) | ours.weights | {"query_start_loc": offsets}
        both = {} if most == 1 else {"num_accepted_tokens": accepted}
        theirs: dict[str, Any] = {"conv_state": windows, "ssm_state": pool, "state_indices": slots if most == 1 else tables}
        own: dict[str, Any] = {"conv_state": ours.windows, "ssm_state": ours.pool, "state_indices": slots}
        want = gdn.fused_gdn_decode(**given, **theirs, **both)
        got = gdn.fused_gdn_decode(**given, **own, **both, **ours.replay(tokens))
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        assert same_bits(ours.windows, windows)
        for n, length in enumerate(lengths):
            if length:
                accepted[n] = 1 + ours.draw(length)
                tokens[n] += accepted[n]
    own = {"num_k_heads": H, "fold_every": 3, "fold_phase": 1, "num_accepted_tokens": accepted}
    gdn.fold_states(ours.pool, slots, ours.ring, ours.state_tokens, tokens, **own)
    current = tables.long().gather(1, (accepted.long() - 1)[:, None])[:, 0]
    torch.testing.assert_close(ours.pool[slots], pool[current], rtol=1e-9, atol=1e-12)


def test_padding_of_the_fused_step() -> None:
    """Padded rows of a captured graph: zero rows, whatever their counts."""
    layer = Layer(2)
    slots, offsets = torch.tensor([3, -1, -1]), torch.tensor([0, 2, 2, 2])
    tokens, accepted = torch.tensor([4, -9, 2**30]), torch.tensor([1, 0, 77])
    layer.state_tokens[3] = 4
    given = layer.projections(4) | layer.weights
    for name in ("mixed_qkv", "z", "b", "a"):
        given[name][2:] = torch.nan
    before = [x.clone() for x in (layer.pool, layer.ring, layer.windows)]
    o = gdn.fused_gdn_decode(
        **given, conv_state=layer.windows, ssm_state=layer.pool, state_indices=slots, query_start_loc=offsets,
        num_accepted_tokens=accepted, **layer.replay(tokens),
    )  # fmt: skip
    assert bool((o[2:] == 0).all()) and bool((o[:2] != 0).all())
    for x, y in zip(before, (layer.pool, layer.ring, layer.windows), strict=True):
        assert same_bits(x[:3], y[:3]) and same_bits(x[4:], y[4:])


def test_trees_in_one_slot_follow_the_accepted_path() -> None:
    """Convolution and recurrence with 1-D indices, then accept_draft_tree, against a window and a state of every node."""
    layer, most, count = Layer(5), 5, 2
    pool, windows = layer.pool.clone(), torch.zeros(layer.slots, DIM, W - 1, dtype=F64)
    tables = torch.arange(count * most, dtype=torch.int32).view(count, most) + 1
    slots, tokens, accepted = tables[:, 0].clone(), torch.tensor([7, 2], dtype=torch.int32), torch.ones(count, dtype=torch.int32)
    nodes = torch.ones(count, dtype=torch.int32)
    layer.state_tokens[slots] = tokens
    windows[slots] = layer.windows[slots, :, : W - 1]
    for _ in range(10):
        lengths = [1 + layer.draw(most) for _ in range(count)]
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        parents = torch.tensor([layer.draw(i + 1) - 1 for length in lengths for i in range(length)], dtype=torch.int32)
        x = layer.randn(int(bounds[-1]), DIM)
        conv: dict[str, Any] = {"weight": layer.weights["conv_weight"], "query_start_loc": bounds, "parent_token": parents}
        theirs = gdn.causal_conv1d_update(x, windows, conv_state_indices=tables, num_accepted_tokens=nodes, **conv)
        y = gdn.causal_conv1d_update(x, layer.windows, conv_state_indices=slots, num_accepted_tokens=accepted, **conv)
        torch.testing.assert_close(y, theirs, rtol=0, atol=0)

        q, k, v = (
            part.unflatten(1, (-1, size))[None] for part, size in zip(y.split([H * K, H * K, HV * V], 1), (K, K, V), strict=True)
        )
        g = -torch.rand(1, len(x), HV, generator=layer.generator, dtype=F64)
        rule: dict[str, Any] = {"cu_seqlens": bounds, "parent_token": parents, "use_qk_l2norm_in_kernel": True}
        want, _ = gdn.fused_recurrent_gated_delta_rule(
            q, k, v, g, initial_state=pool, ssm_state_indices=tables, num_accepted_tokens=nodes, **rule
        )
        got, _ = gdn.fused_recurrent_gated_delta_rule(
            q,
            k,
            v,
            g,
            initial_state=layer.pool,
            ssm_state_indices=slots,
            num_accepted_tokens=accepted,
            **rule,
            **layer.replay(tokens),
        )
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)

        last = torch.tensor([layer.draw(length) for length in lengths], dtype=torch.int32)
        gdn.accept_draft_tree(
            layer.ring, layer.windows, slots, parents, last, tokens, accepted, query_start_loc=bounds, conv_width=W
        )
        nodes, tokens = last + 1, tokens + accepted
        window = torch.stack([layer.windows[slot, :, a - 1 : a - 1 + W - 1] for slot, a in zip(slots, accepted, strict=True)])
        chosen = tables.long().gather(1, (nodes.long() - 1)[:, None])[:, 0]
        assert torch.equal(window, windows[chosen])


def test_a_path_is_accepted_in_all_layers_at_once() -> None:
    """Whole rows and columns move, one after the other, in place; other slots, and null ones, stay."""
    generator = torch.Generator().manual_seed(0)
    ring, windows = torch.randn(3, 5, 8, 12, generator=generator), torch.randn(3, 5, 6, 9, generator=generator)
    before, before_windows = ring.clone(), windows.clone()
    counts = torch.tensor([1, 4, 2, 9], dtype=torch.int32)
    gdn.accept_draft_tree(
        ring, windows, torch.tensor([3, -1, 0, 1]), torch.tensor([-1, 0, 0, 2, -1, -1, 0], dtype=torch.int32),
        torch.tensor([3, 0, 1, 0], dtype=torch.int32), torch.tensor([6, 0, 2, 0]), counts,
        query_start_loc=torch.tensor([0, 4, 5, 7, 7]), conv_width=4,
    )  # fmt: skip
    want, want_windows = before.clone(), before_windows.clone()
    want[:, 3, 7], want[:, 3, 0] = before[:, 3, 0], before[:, 3, 1]  # nodes 0, 2, 3 of p = 6: rows 6, 0, 1 to 6, 7, 0
    want_windows[:, 3, :, 3], want_windows[:, 3, :, 4] = before_windows[:, 3, :, 4], before_windows[:, 3, :, 5]
    assert same_bits(ring, want) and same_bits(windows, want_windows)
    assert counts.tolist() == [3, 4, 2, 9]
