"""The step between the projections by one operator after the other, where the fused operators have no kernel for its head dims.

    fused_qkvzba_split_reshape_cat (interleaved projections; merged ones are views)
    causal_conv1d_update or causal_conv1d_fn
    fused_recurrent_gated_delta_rule or chunk_gated_delta_rule, with the gates and the L2 norm in them
    rms_norm_gated

A value head of V = m * K is m heads of K here: its rows of the state [V, K] are independent of each other and share q, k and the
gates. States and values are views then, with the slices as heads.
"""

from dataclasses import dataclass
from typing import Any

import torch

import gdn

Tensor = torch.Tensor
LARGEST = 256  # head dim of the keys
LARGEST_WITH_CHECKPOINTS = 128
LARGEST_VALUES = 1024


def refusal(head_k_dim: int, head_v_dim: int, channels: int, stores_checkpoints: bool) -> str | None:
    """Why head dims are left to the host; None where the fused operators or those of this file have a kernel."""
    most = LARGEST_WITH_CHECKPOINTS if stores_checkpoints else LARGEST
    dims = f"its head dims are {head_k_dim} and {head_v_dim}"
    if head_k_dim % 4 or not 4 <= head_k_dim <= LARGEST or head_v_dim % head_k_dim or head_v_dim > LARGEST_VALUES:
        return f"{dims}, served are key dims in multiples of 4 up to {LARGEST}, value dims in multiples of theirs"
    if head_k_dim > most:
        return f"{dims}, with prefix caching served are key dims up to {LARGEST_WITH_CHECKPOINTS}"
    if channels % 8:
        return f"its convolution has {channels} channels, served are multiples of 8"
    return None


def fuses_decode(head_k_dim: int, head_v_dim: int) -> bool:
    """Whether `fused_gdn_decode` has a kernel."""
    return head_k_dim % 32 == 0 and head_v_dim % 32 == 0 and max(head_k_dim, head_v_dim) <= 256


def fuses_prefill(head_k_dim: int, head_v_dim: int) -> bool:
    """Whether `fused_gdn_prefill` has a kernel."""
    return head_k_dim == head_v_dim and head_k_dim % 8 == 0 and head_k_dim <= 128


@dataclass(frozen=True)
class Parts:
    """The step operators of one layer; its methods take the arguments of the fused ones.

    options: those of `fused_gdn_decode` and `fused_gdn_prefill` that a layer gives in every call.
    """

    options: dict[str, Any]

    def decode(self, *tensors: Tensor | None, out: Tensor | None, conv_bias: Tensor | None, **batch: Any) -> Tensor:
        """As `fused_gdn_decode`. tensors: its positional arguments."""
        mixed_qkv, z, b, a, windows, weight, A_log, dt_bias, gain, states, slots = self._taken(tensors)
        options = self.options
        bounds, accepted = batch.get("query_start_loc"), batch.get("num_accepted_tokens")
        mixed = gdn.causal_conv1d_update(
            mixed_qkv, windows, weight, conv_bias, options["activation"], conv_state_indices=slots,
            num_accepted_tokens=accepted, query_start_loc=bounds, null_slot=options["null_slot"],
            out=mixed_qkv.new_empty(mixed_qkv.shape), backend=options["backend"],
        )  # fmt: skip
        if bounds is None:  # a token of each row
            bounds = torch.arange(len(mixed_qkv) + 1, dtype=torch.int32, device=mixed_qkv.device)
        q, k, v = self._heads(mixed)
        o, _ = gdn.fused_recurrent_gated_delta_rule(
            q, k, v, self._sliced(a), self._sliced(b), initial_state=self._states(states), inplace_final_state=True,
            cu_seqlens=bounds, ssm_state_indices=slots, num_accepted_tokens=accepted, **self._rule(A_log, dt_bias),
        )  # fmt: skip
        return self._normed(o, z, gain, out)

    def prefill(self, *tensors: Tensor | None, out: Tensor | None, conv_bias: Tensor | None, **batch: Any) -> Tensor:
        """As `fused_gdn_prefill`. tensors: its positional arguments."""
        mixed_qkv, z, b, a, windows, weight, A_log, dt_bias, gain, states, slots = self._taken(tensors)
        options = self.options
        bounds, longest = batch.pop("query_start_loc"), batch.pop("max_seqlen", None)
        mixed = gdn.causal_conv1d_fn(
            mixed_qkv, weight, conv_bias, conv_states=windows, query_start_loc=bounds, cache_indices=slots,
            activation=options["activation"], null_slot=options["null_slot"], backend=options["backend"], **batch,
        )  # fmt: skip
        q, k, v = self._heads(mixed)
        o, _ = gdn.chunk_gated_delta_rule(
            q, k, v, self._sliced(a), self._sliced(b), initial_state=self._states(states), cu_seqlens=bounds,
            state_indices=slots, max_seqlen=longest, **self._rule(A_log, dt_bias), **batch,
        )  # fmt: skip
        return self._normed(o, z, gain, out)

    def _taken(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """The positional arguments, with projections taken apart."""
        options, mixed_qkv, z, b, a = self.options, *tensors[:4]
        heads, K, V = len(tensors[6]), options["head_k_dim"], options["head_v_dim"]
        if options["projection_layout"] == "interleaved":
            mixed_qkv, z, b, a = gdn.fused_qkvzba_split_reshape_cat(
                mixed_qkv, b, options["num_k_heads"], heads, K, V, backend=options["backend"]
            )
        else:
            mixed_qkv, z = mixed_qkv.split_with_sizes((mixed_qkv.shape[1] - heads * V, heads * V), 1)
            (b, a), z = b.split_with_sizes((heads, heads), 1), z.unflatten(1, (heads, V))
        return (mixed_qkv, z, b, a, *tensors[4:])

    @property
    def _slices(self) -> int:
        return int(self.options["head_v_dim"] // self.options["head_k_dim"])

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        H, K = self.options["num_k_heads"], self.options["head_k_dim"]
        q, k, v = mixed.split([H * K, H * K, mixed.shape[1] - 2 * H * K], dim=-1)
        return q.unflatten(-1, (H, K))[None], k.unflatten(-1, (H, K))[None], v.unflatten(-1, (-1, K))[None]

    def _sliced(self, gate: Tensor) -> Tensor:
        """A gate of each slice of a head: [1, tokens, heads * slices]."""
        return (gate if self._slices == 1 else gate.repeat_interleave(self._slices, -1))[None]

    def _states(self, states: Tensor) -> Tensor:
        slots, heads, values, K = states.shape
        return states if self._slices == 1 else states.view(slots, heads * self._slices, values // self._slices, K)

    def _rule(self, A_log: Tensor, dt_bias: Tensor) -> dict[str, Any]:
        if self._slices > 1:
            A_log, dt_bias = (x.repeat_interleave(self._slices) for x in (A_log, dt_bias))
        return {
            "A_log": A_log, "dt_bias": dt_bias, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
            "use_qk_l2norm_in_kernel": True, "state_v_first": True, "null_slot": self.options["null_slot"],
            "backend": self.options["backend"],
        }  # fmt: skip

    def _normed(self, o: Tensor, z: Tensor, gain: Tensor, out: Tensor | None) -> Tensor:
        options, V = self.options, self.options["head_v_dim"]
        o = o[0].reshape(o.shape[1], -1, V)
        result = gdn.rms_norm_gated(
            o, z, gain, options["eps"], options["gate_activation"], backend=options["backend"]
        ).flatten(1)  # fmt: skip
        return result if out is None else out.copy_(result)
