"""A stand-in for vLLM around one Gated DeltaNet layer: the layer's attributes, pages as vLLM plans them, and its metadata.

`Host.recurrence` is a float64 loop over tokens, which says what a step must return and leave in the pages.
`Host.expected` runs it over the whole of a sequence.
"""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

Tensor = torch.Tensor
H, HV, K, V, WIDTH = 2, 4, 32, 32, 4
CHANNELS = 2 * H * K + HV * V


@dataclass
class Sequence:
    """A sequence: the projected rows of its accepted tokens, its blocks, and how many drafts of its last step were accepted."""

    blocks: list[int]
    qkvz: Tensor = field(default_factory=lambda: torch.zeros(0, CHANNELS + HV * V))
    ba: Tensor = field(default_factory=lambda: torch.zeros(0, 2 * HV))
    accepted: int = 1


class Host:
    """One layer and its pages.

    Parameters
    ----------
    num_spec : int
        Drafts of a sequence; it then owns 1 + num_spec blocks.
    interleaved, dim_first : bool
        Layout of the projections, and of the windows in a page.
    state_dtype : dtype
        float32 or bfloat16.
    dims : (int, int)
        Head dims of the keys and of the values.
    """

    def __init__(
        self, seed: int, *, num_spec: int, interleaved: bool, dim_first: bool, state_dtype: torch.dtype = torch.float32,
        dims: tuple[int, int] = (K, V),
    ) -> None:  # fmt: skip
        self.K, self.V = dims
        self.channels = 2 * H * self.K + HV * self.V
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.num_spec, self.interleaved, self.dim_first = num_spec, interleaved, dim_first
        self.layer = SimpleNamespace(
            tp_size=1, num_k_heads=H, num_v_heads=HV, head_k_dim=self.K, head_v_dim=self.V,
            key_dim=H * self.K, value_dim=HV * self.V,
            layer_norm_epsilon=1e-6, activation="silu", gqa_interleaved_layout=interleaved,
            conv1d=SimpleNamespace(weight=self.normal(self.channels, 1, WIDTH), bias=None),
            A_log=self.normal(HV), dt_bias=self.normal(HV),
            norm=SimpleNamespace(weight=1 + self.normal(self.V) / 4, activation=self.random.choice(["silu", "sigmoid"])),
            split_ba=lambda ba: ba.chunk(2, dim=-1),
        )  # fmt: skip
        self.num_blocks = 40
        self.free = list(range(1, self.num_blocks))
        self.random.shuffle(self.free)
        self.layer.kv_cache = self._pages(state_dtype)
        self.pages = self.layer.kv_cache[0].untyped_storage()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _pages(self, state_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Windows and states as views of one buffer of bytes; a page is longer than both. What nobody wrote is not a number."""
        columns = WIDTH - 1 + self.num_spec
        window, state = 4 * columns * self.channels, HV * self.V * self.K * state_dtype.itemsize
        page = -(-(window + state) // 512) * 512 + 1024
        memory = torch.full((self.num_blocks * page,), 0xFF, dtype=torch.uint8)
        order = (self.channels, columns) if self.dim_first else (columns, self.channels)
        windows = memory.view(torch.float32).as_strided((self.num_blocks, *order), (page // 4, order[1], 1), 0)
        size = state_dtype.itemsize
        states = memory.view(state_dtype).as_strided(
            (self.num_blocks, HV, self.V, self.K), (page // size, self.V * self.K, self.K, 1), window // size
        )
        windows[0], states[0] = 0, 0
        return windows, states

    def new(self) -> Sequence:
        blocks = [self.free.pop() for _ in range(1 + self.num_spec)]
        return Sequence(blocks, torch.zeros(0, self.channels + HV * self.V))

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Projected rows of new tokens, in the flat order."""
        return self.normal(count, self.channels + HV * self.V), self.normal(count, 2 * HV)

    # --- what a step must return -------------------------------------------------------------------------------------------

    def expected(self, own: Sequence, new: int) -> tuple[Tensor, Tensor, Tensor]:
        """Results [new, HV, V] of the last tokens of a sequence, the states after each of them, and the last window."""
        results, states, line = self.recurrence(own.qkvz, own.ba, *self.nothing())
        return results[-new:], states, line[-(WIDTH - 1) :]

    def nothing(self) -> tuple[Tensor, Tensor]:
        """State and window of a sequence without tokens."""
        return torch.zeros(HV, self.V, self.K).double(), torch.zeros(WIDTH - 1, self.channels).double()

    def recurrence(self, qkvz: Tensor, ba: Tensor, state: Tensor, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Results of the tokens that follow a state and a window, the states after each, and the line of inputs they end."""
        layer = self.layer
        line = torch.cat([window, qkvz[:, : self.channels].double()])
        weight = layer.conv1d.weight[:, 0].double().T
        mixed = functional.silu(torch.stack([(line[t : t + WIDTH] * weight).sum(0) for t in range(len(qkvz))]))
        q, k, v = mixed.split([H * self.K, H * self.K, HV * self.V], dim=-1)
        q, k = (functional.normalize(x.view(-1, H, self.K), dim=-1).repeat_interleave(HV // H, 1) for x in (q, k))
        v, z = v.view(-1, HV, self.V), qkvz[:, self.channels :].double().view(-1, HV, self.V)
        b, a = ba.double().chunk(2, dim=-1)
        decay = (-layer.A_log.double().exp() * functional.softplus(a + layer.dt_bias.double())).exp()
        results, states = [], []
        for t in range(len(qkvz)):
            state = state * decay[t, :, None, None]
            u = b[t].sigmoid()[:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state = state + u[:, :, None] * k[t][:, None]
            o = torch.einsum("hvk,hk->hv", state, q[t]) * self.K**-0.5
            o = o * (o.square().mean(-1, keepdim=True) + layer.layer_norm_epsilon).rsqrt() * layer.norm.weight.double()
            results.append(o * (z[t].sigmoid() if layer.norm.activation == "sigmoid" else functional.silu(z[t])))
            states.append(state)
        return torch.stack(results), torch.stack(states), line

    # --- a batch as vLLM hands it over ----------------------------------------------------------------------------------------

    def projected(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor]:
        """Rows in the layout of the projections."""
        if not self.interleaved:
            return qkvz, ba
        q, k, v, z = qkvz.split([H * self.K, H * self.K, HV * self.V, HV * self.V], dim=-1)
        group = [x.reshape(len(qkvz), H, -1) for x in (q, k, v, z)]
        b, a = (x.reshape(len(ba), H, -1) for x in ba.chunk(2, dim=-1))
        return torch.cat(group, dim=-1).flatten(1), torch.cat([b, a], dim=-1).flatten(1)

    def metadata(self, **known: Any) -> SimpleNamespace:
        """All attributes of the host's class; those of another kind of batch are None or 0."""
        counts = ("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens", "num_spec_decodes")
        names = (
            "checkpoint", "has_initial_state", "spec_query_start_loc", "non_spec_query_start_loc", "spec_state_indices_tensor",
            "non_spec_state_indices_tensor", "spec_sequence_masks", "spec_token_indx", "non_spec_token_indx",
            "num_accepted_tokens", "prefill_query_start_loc", "prefill_state_indices", "prefill_has_initial_state",
        )  # fmt: skip
        return SimpleNamespace(**(dict.fromkeys(counts, 0) | dict.fromkeys(names) | known))


def int32(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets(lengths: list[int]) -> Tensor:
    return int32([0, *lengths]).cumsum(0).int()
