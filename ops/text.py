"""Numbers as text: durations, sizes, widths, and what JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: Where lines are cut when the output is no terminal, which is nowhere: ``grep`` shows lines, and viewers wrap them.
PLAIN_WIDTH = 100_000


def age(seconds: float) -> str:
    """Returns a duration in the two largest units that matter."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = divmod(int(seconds), 60)[0], int(seconds) // 3600
    if hours:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min {int(seconds) % 60:02d} s"


def finite(value: Any, *, digits: int | None = None) -> Any:
    """Returns data that JSON can hold: None for NaN and infinity, floats rounded to ``digits`` if given."""
    match value:
        case float():
            if not math.isfinite(value):
                return None
            return value if digits is None else round(value, digits)
        case Mapping():
            return {str(key): finite(each, digits=digits) for key, each in value.items()}
        case list() | tuple():
            return [finite(each, digits=digits) for each in value]
        case _:
            return value


def ordinal(number: int) -> str:
    """Returns a number as in "the 3rd time"."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def size(nbytes: int) -> str:
    """Returns bytes with a decimal unit."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
