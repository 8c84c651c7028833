"""Dense causal attention in torch: its flash kernel, or matrix products and a softmax.

torch chooses between its kernels by version and by flags of the process, and its kernels read memory that they have not checked.
So the kernel is chosen here:

    flash   bfloat16 or float16 on a GPU, head dim up to 256, scale above 0. It reads 16 bytes at a time: addresses and strides of
            q, keys and values are multiples of 16 bytes. What is not is copied, q with the usual warning; another head dim than a
            multiple of 8 is padded by a copy.
    plain   everything else, in float32 (float64 for float64), a part of the queries at a time. It needs nothing.

A negative scale turns flash's largest score into the smallest one, and its exponentials overflow.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gdn.core.tensors import aligned

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_MOST_FLASH_DIM = 256
_FLASH_MULTIPLE = 8  # of a head dim
_SCORE_BYTES = 2**28  # of scores at a time, in the plain form


def refusal(q: Tensor, scale: float) -> str | None:
    """The reason why flash does not serve queries [..., D]; None where it does."""
    if q.device.type != "cuda":
        return f"requires a GPU, got {q.device.type}"
    if q.dtype not in _FLASH_DTYPES:
        return f"requires bfloat16 or float16, got {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] > _MOST_FLASH_DIM:
        return f"requires head_dim up to {_MOST_FLASH_DIM}, got {q.shape[-1]}"
    if not scale > 0:
        return f"requires a scale above 0, got {scale}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "requires a torch that was built with it"
    return None


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of sequences of equal lengths, whose queries are their last tokens.

    Parameters
    ----------
    q : Tensor [sequences, query_len, heads, D]
        Queries, any strides; query t sees the keys up to seq_len - query_len + t.
    keys, values : Tensor [sequences, seq_len, kv_heads, D]
        In the dtype of q; kv_heads divides heads, and seq_len is at least query_len, which is at least 1.
    scale : float
        Factor of the products.

    Returns
    -------
    o : Tensor [sequences, query_len, heads, D]
        In the dtype of q.
    lse : Tensor [sequences, query_len, heads]
        Natural logarithm of the sum of exponentials, float32 (float64 for float64).
    """
    form = _plain if refusal(q, scale) is not None else _flash
    return form(q, keys, values, scale)


def _flash(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    dim = q.shape[-1]
    missing = -dim % _FLASH_MULTIPLE
    if missing:
        q, keys, values = (pad(x, (0, missing)) for x in (q, keys, values))
    q, keys, values = aligned("q", q), aligned("keys", keys), aligned("values", values)
    # Flash's causal mask ends at the last query and the last key, whatever their numbers are.
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), 0.0, True, False, scale=scale
    )[:2]
    return o.transpose(1, 2)[..., :dim], lse.mT


def _plain(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    count, query_len, heads, _ = q.shape
    seq_len, kv_heads = keys.shape[1:3]
    keys, values = (x.to(dtype).transpose(1, 2) for x in (keys, values))  # [sequences, kv_heads, seq_len, D]
    o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(q.shape[:3], dtype=dtype)
    position = torch.arange(seq_len, device=q.device)
    step = max(1, _SCORE_BYTES // (dtype.itemsize * count * heads * seq_len))
    for low in range(0, query_len, step):
        rows = slice(low, min(low + step, query_len))
        part = q[:, rows].to(dtype).unflatten(2, (kv_heads, -1)).movedim(1, 3)  # [sequences, kv_heads, group, rows, D]
        own = torch.arange(rows.start, rows.stop, device=q.device) + (seq_len - query_len)
        scores = (part.flatten(2, 3) @ keys.mT).unflatten(2, part.shape[2:4]).mul_(scale)
        scores = scores.masked_fill_(position > own[:, None], -torch.inf)
        sums = scores.logsumexp(-1)
        shares = scores.sub_(sums[..., None]).exp_()
        found = (shares.flatten(2, 3) @ values).unflatten(2, part.shape[2:4])
        o[:, rows] = found.movedim(3, 1).flatten(2, 3)
        lse[:, rows] = sums.flatten(1, 2).mT
    return o, lse
