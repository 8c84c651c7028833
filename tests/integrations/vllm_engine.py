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

from gdn.integrations._vllm_rows import Counter

Tensor = torch.Tensor
Sized = list[Any] | tuple[Any, ...]
H, HV, K, V, WIDTH = 2, 4, 32, 32, 4
CHANNELS = 2 * H * K + HV * V


def layer(
    heads: tuple[int, int], dims: tuple[int, int], *, interleaved: bool, num_spec: int = 0, dtype: torch.dtype = torch.bfloat16,
    **dtypes: torch.dtype,
) -> SimpleNamespace:  # fmt: skip
    """What the adapter reads of vLLM's layer, with parameters of zeros. dtypes: of single parameters, by their names."""
    (k_heads, v_heads), (k_dim, v_dim) = heads, dims
    channels, dtypes = 2 * k_heads * k_dim + v_heads * v_dim, {"A_log": torch.float32} | dtypes

    def zeros(name: str, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtypes.get(name, dtype))

    bias = zeros("bias", channels) if "bias" in dtypes else None
    return SimpleNamespace(
        tp_size=1, num_k_heads=k_heads, num_v_heads=v_heads, head_k_dim=k_dim, head_v_dim=v_dim, key_dim=k_heads * k_dim,
        value_dim=v_heads * v_dim, layer_norm_epsilon=1e-6, activation="silu", gqa_interleaved_layout=interleaved,
        num_spec=num_spec, split_ba=lambda ba: ba.chunk(2, dim=-1),
        conv1d=SimpleNamespace(weight=zeros("weight", channels, 1, WIDTH), bias=bias),
        A_log=zeros("A_log", v_heads), dt_bias=zeros("dt_bias", v_heads),
        norm=SimpleNamespace(weight=zeros("norm", v_dim), activation="silu"),
    )  # fmt: skip


def as_module(layer: SimpleNamespace) -> torch.nn.Module:
    """The same as the host's layer is: its parameters are found by `__getattr__`."""
    made = torch.nn.Module()
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            made.register_parameter(name, torch.nn.Parameter(value.clone(), requires_grad=False))
        elif name == "bias":
            made.register_parameter(name, None)
        else:
            setattr(made, name, as_module(value) if isinstance(value, SimpleNamespace) else value)
    return made


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
        self.layer = layer((H, HV), dims, interleaved=interleaved, num_spec=num_spec, dtype=torch.float32)
        for parameter in (self.layer.conv1d.weight, self.layer.A_log, self.layer.dt_bias, self.layer.norm.weight):
            parameter.copy_(self.normal(*parameter.shape))
        self.layer.norm.weight.div_(4).add_(1)
        self.layer.norm.activation = self.random.choice(["silu", "sigmoid"])
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


class Metadata(SimpleNamespace):
    """As the host's class, it can be referred to weakly: so the adapter keeps what the layers of a step share."""


def metadata_of(**known: Any) -> Metadata:
    """All attributes of the host's class; those of another kind of batch are None or 0."""
    counts = ("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens", "num_spec_decodes")
    names = (
        "checkpoint", "has_initial_state", "spec_query_start_loc", "non_spec_query_start_loc", "spec_state_indices_tensor",
        "non_spec_state_indices_tensor", "spec_sequence_masks", "spec_token_indx", "non_spec_token_indx",
        "num_accepted_tokens", "prefill_query_start_loc", "prefill_state_indices", "prefill_has_initial_state",
    )  # fmt: skip
    return Metadata(**(dict.fromkeys(counts, 0) | dict.fromkeys(names) | known))


def batch(
    *, decode: int = 0, drafts: Sized = (), prompts: Sized = (), checkpoints: Sized = (), columns: int = 1
) -> SimpleNamespace:
    """Metadata of rows of one token, or of rows with drafts, and of prompts behind them; each has blocks of its own.

    drafts, prompts: tokens of each. checkpoints: where each row that has no drafts keeps its state, 0 for nowhere. columns:
    blocks of a sequence that drafts.
    """
    rows, begin, new = len(drafts) or decode, sum(drafts) or decode, len(prompts)
    table = 1 + torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    own = 1 + table.numel() + torch.arange(new, dtype=torch.int32)
    known: dict[str, Any] = {"num_actual_tokens": begin + sum(prompts)}
    if drafts:
        known |= {
            "num_spec_decodes": rows, "spec_sequence_masks": torch.ones(rows, dtype=torch.bool),
            "spec_state_indices_tensor": table, "spec_query_start_loc": offsets(drafts), "num_accepted_tokens": int32([1] * rows),
        }  # fmt: skip
    else:
        slots = torch.cat([table[:, 0], own]) if prompts else table[:, 0]
        known |= {"num_decodes": rows, "num_decode_tokens": rows, "non_spec_state_indices_tensor": slots}
    if prompts:
        known |= {
            "num_prefills": new, "prefill_query_start_loc": offsets(prompts), "prefill_state_indices": own,
            "prefill_has_initial_state": torch.zeros(new, dtype=torch.bool),
        }  # fmt: skip
    if drafts and prompts:
        tokens = torch.arange(known["num_actual_tokens"])
        known |= {"spec_token_indx": tokens[:begin], "non_spec_token_indx": tokens[begin:]}
    if checkpoints:
        places = int32(checkpoints)
        blocks = torch.where(places > 0, table.numel() + new + 1, 0).int()
        known["checkpoint"] = SimpleNamespace(checkpoint_offsets=places, state_indices=blocks)
    return metadata_of(**known)


def common(before: Sized, tokens: Sized) -> SimpleNamespace:
    """What the host's builder makes metadata of: committed and new tokens of each row."""
    computed, bounds = int32(before), offsets(tokens)
    lengths = computed + bounds.diff()
    return SimpleNamespace(
        num_reqs=len(tokens), query_start_loc_cpu=bounds, seq_lens=lengths, seq_lens_cpu_upper_bound=lengths,
        compute_num_computed_tokens=lambda: computed,
    )  # fmt: skip


def counted(counter: Counter, batch: SimpleNamespace) -> SimpleNamespace:
    """The batch with what the builder of layers that replay adds; its prompts go on."""
    drafting = 0 if batch.spec_sequence_masks is None else len(batch.spec_sequence_masks)
    rows = drafting + batch.num_decodes + batch.num_prefills
    drafts = int32([0] * drafting + [-1] * (rows - drafting))
    batch.gdn_replay = counter(batch, common([8] * rows, [1] * rows), int32([1] * rows), drafts)
    return batch


def int32(values: Sized) -> Tensor:
    return torch.tensor([*values], dtype=torch.int32)


def offsets(lengths: Sized) -> Tensor:
    return int32([0, *lengths]).cumsum(0).int()
