"""vLLM's cache of compiled graphs, which tells engines with the adapter from those without it.

vLLM keeps a graph by its configuration, its environment and its version, and looks at the source files that were traced only once
it has found one. A graph made without the adapter calls the host's operator, one made with it calls ours, whose layers and
projections differ: a process that takes the other's graph computes wrong numbers, or runs without gdn and says nothing.
"""

import functools
from typing import Any

from gdn.integrations import _hosts
from gdn.integrations._calls import Calls
from gdn.integrations._points import Undo, replace, resolve


def part_graphs(calls: Calls, name: str, value: str) -> Undo:
    """Adds an entry to what the host's cache is keyed by, for as long as the adapter is enabled.

    name: of the entry. value: changes with whatever may change a graph.
    """
    original = resolve(_hosts.VLLM_GRAPHS)[2]

    @functools.wraps(original)
    def keyed() -> dict[str, Any]:
        found: dict[str, Any] = original()
        return found | {name: value} if calls.active else found

    return replace(original, keyed, (_hosts.VLLM_GRAPHS,))
