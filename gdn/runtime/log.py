"""The logger of the project: silent but for warnings unless GDN_LOG asks, and each decision is told once."""

import logging
from collections.abc import Hashable

LOGGER = logging.getLogger("gdn")

_told: set[Hashable] = set()
_handler: logging.Handler | None = None
_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}


def configure(mode: str) -> None:
    """Applies GDN_LOG: info and debug write to stderr; off leaves warnings to whatever the application set up."""
    global _handler
    _told.clear()
    level = _LEVELS.get(mode)
    if level is None:
        if _handler is not None:
            LOGGER.removeHandler(_handler)
            LOGGER.setLevel(logging.NOTSET)
            _handler = None
        return
    if _handler is None:
        _handler = logging.StreamHandler()
        _handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        LOGGER.addHandler(_handler)
    LOGGER.setLevel(level)


def once(message: str, level: int = logging.INFO, key: Hashable = None) -> None:
    """Logs a message the first time that it (or its key) occurs since the switches were read."""
    key = message if key is None else key
    if key in _told:
        return
    if len(_told) > 10_000:  # a process that meets endless shapes must not grow for its log's sake
        _told.clear()
    _told.add(key)
    LOGGER.log(level, message)


def debug(message: str) -> None:
    LOGGER.debug(message)
