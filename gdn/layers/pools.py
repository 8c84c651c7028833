"""Pools of numbered things with owners: blocks, state slots, sequence slots."""

import heapq
from collections.abc import Iterable


class CacheFullError(RuntimeError):
    """A cache has no room for what was asked for. Nothing was taken.

    Attributes
    ----------
    resource : str
        What ran out: "blocks", "state slots" or "sequence slots".
    needed, free : int
        Number that was asked for, and the number that was free.
    """

    def __init__(self, resource: str, needed: int, free: int) -> None:
        super().__init__(f"the cache is full: {needed} {resource} needed, {free} free")
        self.resource, self.needed, self.free = resource, needed, free

    def __reduce__(self) -> tuple[type["CacheFullError"], tuple[str, int, int]]:
        """What it is pickled as, on its way from one process to another."""
        return type(self), (self.resource, self.needed, self.free)


class Pool:
    """Ids from `first` up to `stop`, each free or with a number of owners. The smallest free ids are taken first.

    The ids of a pool that is filled again therefore do not depend on the order in which it was emptied.
    """

    def __init__(self, resource: str, first: int, stop: int) -> None:
        self.resource = resource
        self._free = list(range(first, stop))  # a sorted list is a heap
        self._owners: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Number of free ids."""
        return len(self._free)

    def saved(self) -> tuple[list[int], dict[int, int]]:
        """What `restore` takes."""
        return list(self._free), dict(self._owners)

    def restore(self, saved: tuple[list[int], dict[int, int]]) -> None:
        """Makes the pool what it was when it was saved."""
        free, owners = saved
        self._free[:] = free
        self._owners.clear()
        self._owners.update(owners)

    def owners(self, one: int) -> int:
        """Number of owners of an id."""
        return self._owners.get(one, 0)

    def num_free_below(self, stop: int | None) -> int:
        """Number of free ids below `stop`; None = of all."""
        return len(self._free) if stop is None else sum(one < stop for one in self._free)

    def take_last(self) -> int:
        """Takes the largest free id; raises `CacheFullError` where none is free."""
        if not self._free:
            raise CacheFullError(self.resource, 1, 0)
        last = max(self._free)
        self._free.remove(last)
        heapq.heapify(self._free)
        self._owners[last] = 1
        return last

    def take(self, count: int, below: int | None = None) -> list[int]:
        """Takes the `count` smallest free ids, in ascending order; raises `CacheFullError` and takes none if fewer are free.

        below: ids from it on do not count as free.
        """
        if (free := self.num_free_below(below)) < count:
            raise CacheFullError(self.resource, count, free)
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for one in taken:
            self._owners[one] = 1
        return taken

    def share(self, ids: Iterable[int]) -> None:
        """Adds an owner to each id; all of them have one already."""
        for one in ids:
            self._owners[one] += 1

    def release(self, ids: Iterable[int]) -> None:
        """Takes one owner from each id; an id without owners is free again."""
        for one in ids:
            left = self._owners[one] - 1
            if left:
                self._owners[one] = left
            else:
                del self._owners[one]
                heapq.heappush(self._free, one)
