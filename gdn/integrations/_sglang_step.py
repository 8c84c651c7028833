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
from gdn.integrations._kept import Served, bound
from gdn.integrations._sglang_kernel import unserved_slots
from gdn.runtime import guards

Tensor = torch.Tensor
NULL_SLOT = -1
LARGEST_HEAD_DIM = 256
ACTIVATIONS = (None, "silu", "swish")


def rows_of(mixed_qkv: Any) -> Tensor:
    """The rows that the projections made."""
    rows: Tensor = mixed_qkv[0] if isinstance(mixed_qkv, tuple) else mixed_qkv
    return rows


def refusal(layer: Any, cache: Any, mixed_qkv: Any, *, known: Served | None = None, allow_reference: bool = False) -> str | None:
    """Why a decode step is left to the host; None where it is served.

    Parameters
    ----------
    layer : RadixLinearAttention
    cache : MambaPool.State
        The pools of this layer.
    mixed_qkv : Tensor or (Tensor, Tensor)
        As the backend gets it.
    known : Served, optional
        What the last served steps of the layer were like; a step like them is not asked again.
    allow_reference : bool
        Serve on the CPU too.
    """
    if cache.replayssm_d is not None:
        return "ReplaySSM keeps the states"
    rows = rows_of(mixed_qkv)
    if known is not None and known(rows, cache.temporal):
        return None
    reason = _refusal(layer, cache, rows, allow_reference)
    return reason if known is None else known.judge(reason, rows, cache.temporal)


def _refusal(layer: Any, cache: Any, rows: Tensor, allow_reference: bool) -> str | None:
    """What of a step is the same for all with tensors like these."""
    k, v = layer.head_k_dim, layer.head_v_dim
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
    heads, dim = layer.num_v_heads, layer.head_v_dim
    if not isinstance(mixed_qkv, tuple):
        return fused(layer, cache, mixed_qkv, a, b, slots).view(1, -1, heads, dim)
    qkvz, ba = mixed_qkv
    o = fused(layer, cache, qkvz, None, ba, slots).view(1, -1, heads, dim)
    return o, guards.view_of(qkvz, (qkvz.shape[0], heads, dim), (qkvz.stride(0), dim, 1), qkvz.shape[1] - layer.v_dim)


def fused(layer: Any, cache: Any, rows: Tensor, a: Tensor | None, b: Tensor, slots: Tensor) -> Tensor:
    """The operator on the pools of a layer. a: None where rows have z too, and b has a."""
    count = rows.shape[0]
    if slots.shape[0] != count:
        slots = slots[:count]
    layout = "flat" if a is not None else "merged"
    operator = _decode(layer.num_k_heads, layer.head_k_dim, layer.head_v_dim, layer.activation, layout)
    result: Tensor = operator(
        rows, None, b, a, cache.conv[0], layer.conv_weights, layer.A_log, layer.dt_bias, None, cache.temporal, slots, layer.bias
    )
    return result


@functools.lru_cache(maxsize=64, typed=True)
def _decode(num_k_heads: int, head_k_dim: int, head_v_dim: int, activation: str | None, layout: str) -> Callable[..., Any]:
    """The operator of layers with these sizes, for tensors alone. layout: of the projections."""
    return bound(
        gdn.fused_gdn_decode, num_k_heads=num_k_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim, activation=activation,
        projection_layout=layout, state_v_first=True, null_slot=NULL_SLOT,
    )  # fmt: skip
