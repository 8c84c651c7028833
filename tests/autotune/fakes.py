"""Tasks for the worker pool: importable by name, as spawned processes need them."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from autotune import workers


def task(kind: str) -> str:
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "exit":
        os._exit(3)
    if kind == "hang":
        time.sleep(600)
    if kind == "raise":
        raise ValueError("bad tile")
    if kind == "broken":
        raise workers.Broken("unfit")
    return f"done {os.getpid() if kind == 'pid' else kind}"


def die_at_start(function: Callable[..., Any], connection: Any) -> None:
    """In the place of a worker's loop."""
    os._exit(4)
