"""Rows: the points of one moment, as every sink takes them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Points that belong to one step.

    Attributes:
        stream: Rows of one stream come in the order of their steps, each step once: ``fleet``,
            ``evaluation``, ``rounds``.
        step: Tokens trained: the axis on which runs of unlike fleets compare.
        at: Seconds since 1970.
        values: Name of each point -> its value, without what is not finite. ``STREAM/tokens`` is among them, and
            equals ``step``: by it a sink knows the row again.
    """

    stream: str
    step: int
    at: float
    values: Mapping[str, float]


def row(stream: str, step: int, at: float, values: Mapping[str, float | None]) -> Row:
    """Returns a row of the values that are known and finite, with its marker, which comes last."""
    known = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
    known.pop(marker(stream), None)
    return Row(stream=stream, step=step, at=at, values=known | {marker(stream): float(step)})


def marker(stream: str) -> str:
    """Returns the name of the point that every row of a stream has."""
    return f"{stream}/tokens"
