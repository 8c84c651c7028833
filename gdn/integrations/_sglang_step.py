"""A decode step of one of SGLang's Gated DeltaNet layers as one operator, from its projections to the input of its norm.

The norm and the output gate are in SGLang's model, so the operator runs without them. The backend gets the rows in two forms:

    mixed_qkv, a, b                         rows before the convolution, and the raw gates
    (projected_qkvz, projected_ba), _, _    what the two projections return; z is returned beside the result

Nothing of SGLang is imported: backend, layer and batch are taken as they are, by the names of their attributes.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

import gdn
from gdn.integrations._calls import unserved
from gdn.integrations._kept import bound
from gdn.integrations._sglang_kernel import unserved_slots

Tensor = torch.Tensor
NULL_SLOT = -1
LARGEST_HEAD_DIM = 256
ACTIVATIONS = (None, "silu", "swish")


def rows_of(mixed_qkv: Any) -> Tensor:
    """The rows that the projections made."""
    rows: Tensor = mixed_qkv[0] if isinstance(mixed_qkv, tuple) else mixed_qkv
    return rows


def refusal(layer: Any, cache: Any, mixed_qkv: Any, *, allow_reference: bool = False) -> str | None:
    """Why a decode step is left to the host; None where it is served.

    Parameters
    ----------
    layer : RadixLinearAttention
    cache : MambaPool.State
        The pools of this layer.
    mixed_qkv : Tensor or (Tensor, Tensor)
        As the backend gets it.
    allow_reference : bool
        Serve on the CPU too.
    """
    if cache.replayssm_d is not None:
        return "ReplaySSM keeps the states"
    rows, k, v = rows_of(mixed_qkv), layer.head_k_dim, layer.head_v_dim
    reason = unserved(rows, (layer.A_log, layer.dt_bias), allow_reference) or unserved_slots(cache.temporal)
    if reason is not None:
        return reason
    if k % 32 or v % 32 or max(k, v) > LARGEST_HEAD_DIM or layer.head_q_dim != k:
        return f"the head dims are {layer.head_q_dim}, {k} and {v}, served are multiples of 32 up to {LARGEST_HEAD_DIM}"
    if layer.num_q_heads != layer.num_k_heads or layer.num_v_heads % layer.num_k_heads:
        return f"there are {layer.num_q_heads}, {layer.num_k_heads} and {layer.num_v_heads} heads"
    if not isinstance(layer.conv_weights, Tensor) or not 2 <= layer.conv_weights.shape[1] <= 4:
        return "the filter is not one of width 2 to 4"
    return None if layer.activation in ACTIVATIONS else f"the activation is {layer.activation}"


def step(layer: Any, cache: Any, mixed_qkv: Any, a: Tensor, b: Tensor, slots: Tensor) -> Any:
    """The result [1, rows, HV, V] of a served step, with z [rows, HV, V] beside it where both projections came."""
    rows, z = mixed_qkv, None
    if isinstance(mixed_qkv, tuple):
        qkvz, ba = mixed_qkv
        heads, width = layer.num_v_heads, layer.v_dim
        rows, z = qkvz.split_with_sizes((qkvz.shape[1] - width, width), 1)
        b, a = ba.split_with_sizes((heads, ba.shape[1] - heads), 1)
        z = z.view(-1, heads, layer.head_v_dim)
    o = fused(layer, cache, rows, a, b, slots)
    o = o.view(1, -1, layer.num_v_heads, layer.head_v_dim)
    return o if z is None else (o, z)


def fused(layer: Any, cache: Any, rows: Tensor, a: Tensor, b: Tensor, slots: Tensor) -> Tensor:
    """The operator on the pools of a layer."""
    count = rows.shape[0]
    if slots.shape[0] != count:
        slots = slots[:count]
    operator = _decode(layer.num_k_heads, layer.head_k_dim, layer.head_v_dim, layer.activation)
    result: Tensor = operator(
        rows, None, b, a, cache.conv[0], layer.conv_weights, layer.A_log, layer.dt_bias, None, cache.temporal, slots, layer.bias
    )
    return result


@functools.lru_cache(maxsize=64, typed=True)
def _decode(num_k_heads: int, head_k_dim: int, head_v_dim: int, activation: str | None) -> Callable[..., Any]:
    """The operator of layers with these sizes, for tensors alone."""
    return bound(
        gdn.fused_gdn_decode, num_k_heads=num_k_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim, activation=activation,
        state_v_first=True, null_slot=NULL_SLOT,
    )  # fmt: skip
