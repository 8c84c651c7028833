"""A caller's default device and default dtype."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gdn.core import constants
from gdn.runtime import env


@contextmanager
def defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Calls seen before, and constants kept, are forgotten: what a first call makes is made under these defaults."""
    before = torch.get_default_dtype()
    _forget()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(before)
        _forget()


def _forget() -> None:
    env.reload()
    for build in (constants._build_offsets, constants._build_zeros):
        build.cache_clear()
