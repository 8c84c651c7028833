"""Backend that a combined operator orders for its parts."""

import contextlib
from collections.abc import Iterator
from typing import cast

from gdn import runtime
from gdn.runtime import env, registry
from gdn.runtime.registry import Backend


@contextlib.contextmanager
def ordered(backend: Backend | None, op: str) -> Iterator[Backend | None]:
    """Yields the backend for the parts: the argument, or GDN_BACKEND_<OP> of the combined operator, which the parts report."""
    own = env.current().backend_of.get(op, "auto")
    is_switch = backend is None and own != "auto"
    with runtime.ordering(registry.operator(op).switch if is_switch else None):
        yield cast(Backend, own) if is_switch else backend
