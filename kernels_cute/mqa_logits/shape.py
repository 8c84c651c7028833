"""Sizes of the logits kernels that the choice of a configuration needs."""

from typing import NamedTuple

from kernels_cute.mqa_logits.orders import KEY_ROWS

PARTS = 32  # of the ragged items that are dealt in runs, one a lane
PITCH = KEY_ROWS + 8  # words between rows of scores: four rows of eight keys then lie in 32 different banks
PAGED_QUERY_STAGES = 2


def score_words(store_width: int, queries: int) -> int:
    """Words of shared memory that both warpgroups' scores of one tile take; at least one, as a field of a struct."""
    return queries * PITCH if store_width == 32 else 1


class Registers(NamedTuple):
    """Registers of a thread. What all threads of a block ask for stays within what it got at launch, else it would hang."""

    launch: int  # an equal part of the multiprocessor's
    copy: int
    math: int
    least_stages: int  # of keys, in a default configuration


# By (math warpgroups, blocks side by side). A default is the first whose registers and tiles fit.
REGISTERS = {(1, 2): Registers(128, 56, 200, 3), (2, 1): Registers(168, 56, 224, 4)}


class DraftColumns(NamedTuple):
    """Layout of a sequence's drafts as columns."""

    lanes_per_query: int  # of a quad
    groups: int  # of 4 / lanes_per_query drafts, in one pass
    passes: int  # over a sequence's keys
    columns: int  # queries x heads (odd numbers of a key head's rounded up) of one pass
