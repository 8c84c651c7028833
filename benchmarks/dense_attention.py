"""Torch's dense attention as a peer of sparse prefill: the last tokens of each sequence see all positions up to their own."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def ways(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Every way to call torch for the arguments of `gdn.sparse_attention`, whose selected positions it leaves out, by name.

    Backend by backend, with torch's own object for the mask and with a matrix in the dtype of the queries, and with the heads of
    keys shared or repeated. Contiguous keys and values, and the matrix, are made here: a call is attention alone. The result is
    [tokens, heads, D]. A call raises RuntimeError where the backend refuses it.

    Raises
    ------
    ValueError
        Where sequences differ in their lengths.
    """
    from torch.nn.attention.bias import causal_lower_right  # it loads torch's compiler, which takes a second

    q, keys, values = operands(arguments)
    count, length = q.shape[2], keys.shape[2]
    matrix = torch.full((count, length), -torch.inf, dtype=q.dtype, device=q.device).triu_(length - count + 1)
    group = q.shape[1] // keys.shape[1]
    repeated = tuple(x.repeat_interleave(group, dim=1) for x in (keys, values)) if group > 1 else None
    for name, backend in BACKENDS.items():
        for mask_name, mask in (("causal_lower_right", causal_lower_right(count, length)), ("explicit mask", matrix)):
            yield f"{name}, {mask_name}", _call(backend, q, (keys, values), mask)
            if repeated is not None:
                yield f"{name}, {mask_name}, repeated heads", _call(backend, q, repeated, mask)


def operands(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, heads, new tokens, D], keys and values [N, key heads, length, D], contiguous, from the paged call's arguments."""
    lengths, counts = set(arguments["seq_lens"].tolist()), set(arguments["query_start_loc"].diff().tolist())
    if len(lengths) != 1 or len(counts) != 1:
        raise ValueError(f"seq_lens: expected sequences of one length and one number of new tokens, got {lengths}, {counts}")
    length, tables = lengths.pop(), arguments["block_tables"].long()
    keys, values = (cache[tables].flatten(1, 2)[:, :length].transpose(1, 2).contiguous() for cache in arguments["kv_cache"])
    q = arguments["q"].unflatten(0, (len(tables), -1)).transpose(1, 2).contiguous()
    return q, keys, values


def _call(backend: SDPBackend, q: Tensor, pair: tuple[Tensor, ...], mask: Any) -> Callable[[], Tensor]:
    keys, values = pair
    shares = keys.shape[1] != q.shape[1]

    def call() -> Tensor:
        with sdpa_kernel(backend):
            out: Tensor = scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=shares)
        return out.transpose(1, 2).flatten(0, 1)

    return call
