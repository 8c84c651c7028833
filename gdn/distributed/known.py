"""Parts that were checked before: a call like an earlier one skips the checks and the choice of kernels.

Only calls whose values are not checked: on GPUs, without ``GDN_VALIDATE``. Such ranks make no agreement either.
"""

from typing import Any

import torch
from torch import Tensor

from gdn.core import modes
from gdn.core.call import reads_values
from gdn.core.memo import Kept, Likeness
from gdn.runtime import env, is_explaining

Tensors = tuple[Tensor | None, ...]
_PLAIN = frozenset({bool, int, float, str, type(None)})  # types of flags whose equal values of one type are the same


class Known(Kept):
    """Results of checks, by the flags of a call and the metadata of its tensors."""

    _LIMIT = 512

    def find(self, tensors: Tensors, flags: tuple[Any, ...]) -> Any:
        """The result that is kept of a call like this one, or None."""
        if torch.compiler.is_compiling() or env.current() is not self._switches or is_explaining():
            return None
        try:
            entries = self._found.get((flags, *map(type, flags)), ())
        except TypeError:  # an unhashable flag: the checks name it
            return None
        return next((made for likeness, made in entries if likeness.holds(tensors)), None)

    def keep(
        self, tensors: Tensors, flags: tuple[Any, ...], made: Any, written: list[Tensor | None], aligned: list[Tensor | None]
    ) -> None:
        """Keeps the result of a call's checks for calls like it. written, aligned: as for `Likeness`."""
        switches, given = env.current(), [x for x in tensors if x is not None]
        if torch.compiler.is_compiling() or is_explaining() or not modes.has_memory() or modes.lack_memory(given):
            return
        if reads_values(given[0].device) or not _PLAIN.issuperset(map(type, flags)):
            return
        if len({id(x) for x in given}) < len(given):  # a guard takes no tensor twice
            return
        self._add((flags, *map(type, flags)), (Likeness(tensors, aligned, written), made), switches)
