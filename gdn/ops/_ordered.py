"""Backend that a combined operator orders for its parts."""

import contextlib
from collections.abc import Iterator

from gdn import runtime
from gdn.runtime import env, registry


@contextlib.contextmanager
def ordered(backend: str | None, op: str) -> Iterator[str | None]:
    """Yields the backend for the parts: the argument, or GDN_BACKEND_<OP> of the combined operator, which the parts report."""
    own = env.current().backend_of.get(op, "auto")
    is_switch = backend is None and own != "auto"
    with runtime.ordering(registry.operator(op).switch if is_switch else None):
        yield own if is_switch else backend
