"""Indexer top-k by a sampled bound: most scores are made and forgotten.

    sample    logits of one key in sixteen give each row a bound that k of its scores reach, but hardly twice as many
    sift      logits of all keys; those from the bound on go to the row's lists, with their columns (about a tenth)
    select    the k largest of the lists, if these are sure to hold them
    again     rows whose lists are not: all of their scores, and the selection from these; no row as a rule

The result is exactly what the whole scores give. A bound that was wrong costs time: too few scores have reached it, or more than
the lists hold. Crowds of equal scores cost that too. No value comes back to the host: the launches of "again" come always, as a
rule with ranges that are all empty.

The workspace holds the sample's scores, then the lists, then the scores of "again"; beside it stand the sampled keys and a few
words a row.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from gdn import runtime
from gdn.ops._checks import dtype_name
from gdn.ops._logits_checks import FP8, aligned, kernel_weights, kernel_weights_dtype
from gdn.ops.mqa_logits import score_rows
from gdn.problems import IndexerSiftProblem, MqaLogitsProblem
from gdn.runtime import env

SAMPLED, HEADER = IndexerSiftProblem.sampled, IndexerSiftProblem.header_words
WARPS, LIST_ENTRIES, MOST_KEYS = IndexerSiftProblem.warps, IndexerSiftProblem.list_entries, IndexerSiftProblem.most_keys
# Of queries, at a time. With fewer than 64 so many blocks work on a row that it has no list for all of them; and what a step
# costs whatever its size, its launches and its kernels' first and last items, is more than so few rows save.
LEAST_TILES = 96
TILE_COLUMNS = 512  # queries x heads


@dataclass(frozen=True)
class Room:
    """What a row takes, from k alone."""

    rank: int  # of the sampled score that is the bound
    entries: int  # of the larger lists
    listed: int  # keys: a row of at most so many is listed whole, without a sample

    @property
    def row_words(self) -> int:
        return HEADER + 3 * self.entries


def room_for(k: int) -> Room | None:
    """None where the lists are too small for k.

    The number of the k largest scores that are in a sample of independent ones has deviation sqrt(k / 16) at most: a rank five of
    them higher is below the k-th score but once in millions. What a warp lists deviates by the sample's chance and its own.
    """
    expected = k / SAMPLED
    rank = math.ceil(expected + 5 * math.sqrt(expected) + 4)
    of_warp = SAMPLED * rank / WARPS
    deviation = math.sqrt(SAMPLED * rank + of_warp)
    entries = max(640, math.ceil((of_warp + 6 * deviation + 16) * WARPS / 64) * 64)
    if SAMPLED * (rank + 4.8 * math.sqrt(rank)) > LIST_ENTRIES:
        return None
    # Of a row that is listed whole a warp has a quarter of the keys, and up to 32 more by where it begins and ends.
    return Room(rank, entries, min(entries - 384, LIST_ENTRIES))


@dataclass(frozen=True)
class Steps:
    """How a call's rows pass through the workspace."""

    room: Room
    rows: int  # at a time
    scored: int  # rows whose scores are made again at a time


def steps_for(num_rows: int, num_keys: int, num_heads: int, k: int, budget: int) -> Steps | None:
    """None where whole scores serve better, or must: too few keys or rows for a sample to pay, or too small a workspace."""
    room = room_for(k)
    if room is None or k < 1 or not max(16384, 8 * k) <= num_keys <= MOST_KEYS:
        return None
    least = LEAST_TILES * TILE_COLUMNS // num_heads
    most = budget // (4 * room.row_words)
    if min(most, num_rows) < least:
        return None
    parts = -(-num_rows // most)
    rows = min(-(-num_rows // (parts * 128)) * 128, num_rows)
    if rows > most:
        rows = most // 128 * 128
    last = num_rows % rows or rows
    if rows < least or last < least:
        return None
    return Steps(room, rows, min(rows, budget // (4 * num_keys)))


@dataclass(frozen=True)
class Plan:
    steps: Steps
    launch: Any


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    topk: int,
    k_scale: torch.Tensor | None,
    relu: bool,
    budget: int,
    backend: str | None,
) -> Plan | None:
    """None = by whole scores. Of checked arguments; from shapes, dtypes and switches only."""
    num_rows, num_heads, head_dim = q.shape
    num_keys = k.shape[0]
    switches = env.current()
    served = q.dtype == FP8 and head_dim == 128 and num_heads in (8, 16, 32) and backend in (None, "cute")
    if not served or (k.dim() == 3 and k.shape[1] != 1) or switches.tuned == "strict":
        return None
    steps = steps_for(num_rows, num_keys, num_heads, topk, budget)
    if steps is None:
        return None
    static: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": 1,
        "head_dim": head_dim,
        "dtype": dtype_name(q.dtype),
        "has_k_scale": k_scale is not None,
        "weights_dtype": kernel_weights_dtype(weights),
        "relu": relu,
        "clean": False,
        "out_dtype": "float32",
    }
    scored = MqaLogitsProblem(
        **static, packed=False, num_queries=steps.scored, num_keys=num_keys, num_columns=num_keys
    )  # fmt: skip
    logits = runtime.prepare(scored, q.device, backend)
    if logits.backend != "cute":
        return None
    sift = runtime.prepare(IndexerSiftProblem(**static, num_queries=steps.rows, num_keys=num_keys, k=topk), q.device)
    # A ReLU as a sum keeps NaN, as a maximum it does not.
    if sift.launch is None or sift.config.relu_sum != logits.config.relu_sum:
        return None
    return Plan(steps, sift.launch)


def run(
    found: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    starts: torch.Tensor,
    ends: torch.Tensor,
    topk: int,
    k_scale: torch.Tensor | None,
    scale: float,
    relu: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """`indexer_topk` of checked arguments; starts and ends as int32."""
    steps, launch, device = found.steps, found.launch, q.device
    room, num_rows, num_keys = steps.room, q.shape[0], k.shape[0]
    samples = -(-num_keys // SAMPLED)
    q = aligned(q)
    k = aligned(k if k.dim() == 3 else k[:, None])
    weights = kernel_weights(weights) if weights is not None else None
    sampled_k, sampled_scale = torch.empty_like(k[:samples]), None
    if k_scale is not None:
        k_scale = aligned(k_scale if k_scale.dim() == 2 else k_scale[:, None])
        sampled_scale = torch.empty_like(k_scale[:samples])
    workspace = torch.empty(max(steps.rows * room.row_words, steps.scored * num_keys), dtype=torch.float32, device=device)
    bounds = torch.empty(4, steps.rows, dtype=torch.int32, device=device)
    if out is None:
        out = torch.empty(num_rows, topk, dtype=torch.int32, device=device)

    def scores(rows: slice, keys: torch.Tensor, scales: torch.Tensor | None, ranges: torch.Tensor, into: torch.Tensor) -> None:
        of_rows = weights[rows] if weights is not None else None
        score_rows(q[rows], keys, of_rows, ranges[0], ranges[1], scales, scale, relu, None, False, torch.float32, into, "cute")

    for low in range(0, num_rows, steps.rows):
        rows = slice(low, min(low + steps.rows, num_rows))
        count = rows.stop - low
        lists = workspace[: count * room.row_words].view(count, room.row_words)
        sampled, again = bounds[:2, :count], bounds[2:, :count]
        own, least = (starts[rows], ends[rows]), max(room.listed, topk)
        launch("sample", k, k_scale, *own, sampled_k, sampled_scale, *sampled, least)
        scores(rows, sampled_k, sampled_scale, sampled, lists[:, HEADER : HEADER + samples])
        words = lists.view(torch.int32)
        launch("bound", words, *sampled, room.rank)
        of_rows = weights[rows] if weights is not None else None
        launch("sift", q[rows], k, k_scale, of_rows, *own, words, scale, topk)
        launch("select", words, *own, out[rows], *again, num_keys)
        for first in range(0, count, steps.scored):
            part = slice(first, min(first + steps.scored, count))
            of_call = slice(low + part.start, low + part.stop)
            whole = workspace[: (part.stop - first) * num_keys].view(part.stop - first, num_keys)
            scores(of_call, k, k_scale, again[:, part], whole)
            launch("again", whole, *again[:, part], out[of_call])
    return out
