"""Checks of the arguments that the fused decode and the fused prefill step share: projections and parameters of a layer."""

from typing import NamedTuple

from torch import Tensor

from gdn.core import check
from gdn.core.check import CONV_ACTIVATIONS, FLOAT_DTYPES, GATE_ACTIVATIONS, bad_value
from gdn.ops.delta_rule.checks import TOKEN_DTYPES


class Layer(NamedTuple):
    """Parameters of a layer between its projections, under their public names."""

    conv_weight: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    norm_weight: Tensor | None
    activation: str | None
    gate_activation: str
    eps: float


def check_projections(
    mixed_qkv: Tensor,
    z: Tensor | None,
    b: Tensor | None,
    a: Tensor | None,
    A_log: Tensor,
    dims: tuple[int, int, int],
    layout: str,
    layouts: tuple[str, ...],
    has_norm: bool,
) -> int:
    """Checks the projections; returns the number of value heads.

    dims: H, K and V. layouts: those of the operator. has_norm: whether z is used.
    """
    num_k_heads, head_k_dim, head_v_dim = dims
    for name, value in {"num_k_heads": num_k_heads, "head_k_dim": head_k_dim, "head_v_dim": head_v_dim}.items():
        check.at_least(name, value, 1)
    check.one_of("projection_layout", layout, layouts)
    check.tensor("mixed_qkv", mixed_qkv, dtypes=TOKEN_DTYPES)
    device, dtypes = mixed_qkv.device, FLOAT_DTYPES
    check.tensor("A_log", A_log, shape=("HV",), dtypes=dtypes, device=device)
    heads = A_log.shape[0]
    if heads == 0 or heads % num_k_heads:
        bad_value("A_log", f"shape [HV] with HV a multiple of num_k_heads = {num_k_heads}", f"shape {list(A_log.shape)}")
    values = heads * head_v_dim
    channels = 2 * num_k_heads * head_k_dim + values
    width = channels if layout == "flat" else channels + values
    if layout == "concatenated":
        width += 2 * heads
    is_whole = layout == "concatenated"
    check.tensor("mixed_qkv", mixed_qkv, shape=("tokens", f">= {width}" if is_whole else width))
    if is_whole and check.is_less(mixed_qkv.shape[1], width):
        bad_value("mixed_qkv", f"shape [tokens, >= {width}]", f"shape {list(mixed_qkv.shape)}")
    length = mixed_qkv.shape[0]
    separate: dict[str, tuple[int, ...]] = {}
    if layout == "flat":
        separate = {"b": (length, heads), "a": (length, heads)}
        if has_norm:
            separate["z"] = (length, heads, head_v_dim)
    elif not is_whole:
        separate = {"b": (length, 2 * heads)}
    for name, tensor in (("z", z), ("b", b), ("a", a)):
        if name in separate:
            check.tensor(name, tensor, shape=separate[name], dtypes=dtypes, device=device)
        elif tensor is not None:
            is_unused = layout == "flat"  # z without the norm
            bad_value(name, "None without norm_weight" if is_unused else f"None with projection_layout={layout!r}", "a tensor")
    return heads


def check_layer(layer: Layer, mixed_qkv: Tensor, heads: int, dims: tuple[int, int, int]) -> int:
    """Checks the parameters; returns the number of channels of the convolution. dims: H, K and V."""
    device, floats = mixed_qkv.device, FLOAT_DTYPES
    num_k_heads, head_k_dim, head_v_dim = dims
    check.tensor("dt_bias", layer.dt_bias, shape=(heads,), dtypes=floats, device=device)
    check.optional("norm_weight", layer.norm_weight, shape=(head_v_dim,), dtypes=floats, device=device)
    channels = 2 * num_k_heads * head_k_dim + heads * head_v_dim
    weight = layer.conv_weight
    check.tensor("conv_weight", weight, shape=(channels, "w >= 2"), dtypes=floats, device=device)
    if weight.shape[1] < 2:
        bad_value("conv_weight", f"shape [{channels}, w >= 2]", f"shape {list(weight.shape)}")
    check.optional("conv_bias", layer.conv_bias, shape=(channels,), dtypes=floats, device=device)
    check.one_of("activation", layer.activation, CONV_ACTIVATIONS)
    check.one_of("gate_activation", layer.gate_activation, GATE_ACTIVATIONS)
    check.not_negative("eps", layer.eps)
    return channels
