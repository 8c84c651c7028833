"""Public operator `fused_qkvzba_split_reshape_cat`: splits interleaved input projections."""

from typing import Any

from torch import Tensor

from gdn.core import check
from gdn.core.call import NEW, launch, new, operator, prepare
from gdn.core.check import FLOAT_DTYPES, bad_value, dtype_name
from gdn.core.modes import is_empty
from gdn.core.tensors import ALIGNMENT, aligned
from gdn.ops.layer_step import reference
from gdn.ops.layer_step.problem import SplitParams, SplitProblem
from gdn.runtime.registry import Backend


@operator(
    reference.fused_qkvzba_split_reshape_cat, returns=lambda _: (NEW, NEW, NEW, NEW), varies=("mixed_qkvz", "mixed_ba"),
    contiguous=("mixed_qkvz", "mixed_ba"),
)  # fmt: skip
def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
    *,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split projections that are interleaved per key-head group.

    With r = HV / Hqk, the columns of the projections are

        mixed_qkvz [L, Hqk * (2 * K + 2 * r * V)], each group [q (K) | k (K) | v (r * V) | z (r * V)]
        mixed_ba   [L, 2 * HV],                    each group [b (r) | a (r)]

    Parameters
    ----------
    mixed_qkvz : Tensor [L, Hqk * (2 * K + 2 * r * V)]
        Projection of q, k, v and z; any float dtype and row stride. A last dimension that is not contiguous is copied, logged
        once.
    mixed_ba : Tensor [L, 2 * HV]
        Projection of b and a; any float dtype and row stride, last dimension as for `mixed_qkvz`.
    num_heads_qk, num_heads_v, head_qk, head_v : int
        Hqk heads of q and of k; HV heads of v and z, a multiple of Hqk; their head dimensions K and V.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    mixed_qkv : Tensor [L, 2 * Hqk * K + HV * V]
        [all q heads | all k heads | all v heads]. All four results are new and contiguous.
    z, b, a : Tensor [L, HV, V], Tensor [L, HV], Tensor [L, HV]
        Input of the output gate, raw write strength and raw decay gate.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched.

    References
    ----------
    .. [1] Qwen3-Next model card, https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct (the layout of the projections).
    .. [2] The arguments are those of ``fused_qkvzba_split_reshape_cat`` in vLLM.
    """
    sizes: dict[str, Any] = {"num_heads_qk": num_heads_qk, "num_heads_v": num_heads_v, "head_qk": head_qk, "head_v": head_v}
    for name, value in sizes.items():
        check.at_least(name, value, 1)
    if num_heads_v % num_heads_qk:
        bad_value("num_heads_v", f"a multiple of num_heads_qk = {num_heads_qk}", num_heads_v)
    width = 2 * num_heads_qk * head_qk + 2 * num_heads_v * head_v
    check.tensor("mixed_qkvz", mixed_qkvz, shape=("L", width), dtypes=FLOAT_DTYPES)
    length, device = mixed_qkvz.shape[0], mixed_qkvz.device
    check.tensor("mixed_ba", mixed_ba, shape=(length, 2 * num_heads_v), dtypes=FLOAT_DTYPES, device=device)
    heads: dict[str, Any] = {"num_k_heads": num_heads_qk, "num_v_heads": num_heads_v, "head_k_dim": head_qk, "head_v_dim": head_v}
    problem = SplitProblem(**heads, dtype=dtype_name(mixed_qkvz.dtype), ba_dtype=dtype_name(mixed_ba.dtype), num_tokens=length)
    prepared = prepare(problem, device, backend)

    mixed_qkv = new(mixed_qkvz.dtype, device, length, 2 * num_heads_qk * head_qk + num_heads_v * head_v)
    rows = new(mixed_qkvz.dtype, device, length, num_heads_v * head_v)
    z = rows.view(length, num_heads_v, head_v)
    b, a = (new(mixed_ba.dtype, device, length, num_heads_v) for _ in range(2))
    if not is_empty(length):
        access = 8 if head_qk % 8 or head_v % 8 else ALIGNMENT
        params = SplitParams(aligned("mixed_qkvz", mixed_qkvz, access), mixed_ba, mixed_qkv, rows, b, a)
        launch(prepared, params, (mixed_qkv, z, b, a), aligned=(mixed_qkvz,))
    return mixed_qkv, z, b, a
