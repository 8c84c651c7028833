"""A budget of time as a user writes it."""

import re

_FORM = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)


def seconds(text: str) -> float:
    """Seconds of "8m", "90s", "1h30m", or of a plain number; ValueError for anything else, and for nothing."""
    found = _FORM.fullmatch(f"{text}s" if text.isdecimal() else text)
    total = 0 if found is None else sum(int(part or 0) * unit for part, unit in zip(found.groups(), (3600, 60, 1), strict=True))
    if not total:
        raise ValueError(f"budget: expected a time such as 8m, 90s or 1h30m, got {text!r}")
    return float(total)


def written(total_s: float) -> str:
    """Seconds as `seconds` reads them."""
    minutes, rest = divmod(max(0, round(total_s)), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{count}{unit}" for count, unit in ((hours, "h"), (minutes, "m"), (rest, "s")) if count]
    return "".join(parts) or "0s"
