"""The indexer's selection, of scores or with them: calls, what their arguments may be, their results."""

import torch

from tests.described import Described
from tests.described.indexer import CACHE_DTYPES
from tests.described.logits import PAGED, RAGGED, paged, ragged
from tests.ops.spoiling.call import Call, Draw
from tests.ops.spoiling.kinds import COUNT, INDEX, INDEX_OUT, INPUT, MATRIX, OPTIONAL_COUNT, SHARED_INPUTS
from tests.ops.spoiling.verdict import SAME, VALUE


def topk_indices(draw: Draw) -> Call:
    call = Call("topk_indices")
    rows, columns, k = draw.tokens(0, 1, 3, 5), draw.pick(20, 0, 1, 6), draw.pick(3, 0, 1, 8)
    call.give("logits", draw.rows(draw.floats(rows, columns, dtype=draw.any_float()), lead=1), "M ~")
    call.arguments["k"] = k
    if draw.maybe(0.7):
        call.give("row_starts", draw.indices([draw.random.randint(0, columns) for _ in range(rows)]), "M")
    if draw.maybe(0.7):
        call.give("row_ends", draw.indices([draw.random.randint(0, columns + 2) for _ in range(rows)]), "M")
    if draw.maybe():
        call.arguments["sorted_by"] = draw.pick("index", "score")
    _picked(draw, call, rows, k)
    return call


def indexer_topk(draw: Draw) -> Call:
    call = ragged(draw, "indexer_topk")
    rows, keys = call.arguments["q"].shape[0], call.arguments["k"].shape[0]
    call.arguments["topk"] = draw.pick(3, 1, 8)
    if draw.maybe(0.4):
        call.arguments["workspace_bytes"] = draw.pick(4, 12, 1000) * (keys + 1)
    if draw.maybe(0.3):
        call.arguments["max_seqlen_k"] = keys
    _picked(draw, call, rows, call.arguments["topk"], "topk")
    return call


def paged_indexer_topk(draw: Draw) -> Call:
    call, addressed = paged(draw, "paged_indexer_topk", CACHE_DTYPES)
    rows = call.arguments["q"].shape[:2].numel()
    call.arguments["topk"] = draw.pick(3, 1, 8)
    if draw.maybe(0.4):
        call.arguments["workspace_bytes"] = 4 * 3 * addressed * draw.pick(1, 10)
    if draw.maybe(0.3):
        call.arguments["max_context_len"] = addressed
    _picked(draw, call, rows, call.arguments["topk"], "topk", rows_dim="rows")
    return call


def _picked(draw: Draw, call: Call, rows: int, k: int, name: str = "k", rows_dim: str = "M") -> None:
    """out of a selection."""
    if draw.maybe(0.5):
        out = torch.full((rows, k), 77, dtype=torch.int32)
        call.give("out", draw.rows(out, lead=1), f"{rows_dim} k")
        call.ties |= {"k": (name,), "M": ("q", "logits")}


CALLS = {
    "topk_indices": Described(topk_indices, (("M k", -1),), {
        "logits": INPUT | MATRIX,
        "k": COUNT,
        "row_starts": INDEX | SHARED_INPUTS,
        "row_ends": INDEX | {"ends of 2**33 + 1": SAME, "empty as -2**33 + 1": SAME},
        "out": INDEX_OUT,
    }),
    "indexer_topk": Described(indexer_topk, (("M k", -1),), RAGGED | {
        "topk": COUNT,
        "workspace_bytes": OPTIONAL_COUNT | {"less than one row": VALUE},
        "out": INDEX_OUT,
    }),
    "paged_indexer_topk": Described(paged_indexer_topk, (("rows k", -1),), PAGED | {
        "topk": COUNT,
        "workspace_bytes": OPTIONAL_COUNT | {"less than one row": VALUE},
        "max_context_len": OPTIONAL_COUNT,
        "out": INDEX_OUT,
    }),
}  # fmt: skip
