"""Logger of the project: only warnings unless GDN_LOG is set; each decision is logged once."""

import logging
from collections.abc import Hashable

LOGGER = logging.getLogger("gdn")

_told: set[Hashable] = set()
_handler: logging.Handler | None = None
_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}


def configure(mode: str) -> None:
    """Applies GDN_LOG: info and debug write to stderr; off leaves warnings to the application's own logging."""
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
    """Logs a message the first time that it (or its key) occurs after the switches were read."""
    key = message if key is None else key
    if key in _told:
        return
    if len(_told) > 10_000:  # bounds the memory of a process with ever new shapes
        _told.clear()
    _told.add(key)
    LOGGER.log(level, message)


def debug(message: str) -> None:
    LOGGER.debug(message)
