"""Sizes of the deal of work tiles to clusters, see scheduler.py."""

SORTED = 256  # sequences at most: a byte names one
RECORDS = 8
RECORD_BYTES = 32


def load_slots(paired: bool) -> int:
    """Return how many clusters' loads a lane of the gate warp keeps. No SM90 device has more than 144 multiprocessors."""
    return 3 if paired else 5


def max_scheduled_clusters(paired: bool) -> int:
    return 32 * load_slots(paired)
