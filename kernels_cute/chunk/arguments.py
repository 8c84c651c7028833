"""Arguments of the chunk kernels on the device: the operator's Params, and the bulk copies of its token tensors."""

from typing import Any, NamedTuple

from gdn.problems import ChunkParams
from kernels_cute.common.memory import without_batch

NUM_PARAMS = len(ChunkParams._fields)
_PER_TOKEN = ("q", "k", "v", "g", "beta", "out")


class TokenCopies(NamedTuple):
    """Bulk copies between token tensors and shared memory: the atom of each, and its tensor [tokens, D, heads]."""

    q_atom: Any
    q: Any
    k_atom: Any
    k: Any
    v_atom: Any
    v: Any
    out_atom: Any = None  # None where the kernel writes no outputs
    out: Any = None


def packed_params(values: tuple[Any, ...]) -> tuple[ChunkParams, tuple[Any, ...]]:
    """The Params among a launch's values, with token tensors [tokens, ...] instead of [1, tokens, ...]; and what follows them."""
    params = ChunkParams(*values[:NUM_PARAMS])
    present = [name for name in _PER_TOKEN if getattr(params, name) is not None]
    tensors = without_batch(*[getattr(params, name) for name in present])
    return params._replace(**dict(zip(present, tensors, strict=True))), values[NUM_PARAMS:]
