"""Metric families as plain values, named after Prometheus' conventions. Pure.

A counter only grows while its process lives, and is served as ``NAME_total``. What may fall again is a gauge. Units are
base units and stand at the end of a name: seconds, bytes, tokens, or ratio for a part of 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric with all its samples."""

    name: str  # as it is served; only that of a counter ends with ``_total``
    help: str  # one sentence
    labels: tuple[str, ...]  # names, in the order of the samples' values
    samples: Mapping[tuple[str, ...], float]  # values of the labels -> value; empty while there is nothing to tell


#: One value; or values of the labels -> value: a text where there is one label, else a tuple.
Values = float | None | Mapping[Any, float | None]


class Families:
    """The families of one process, whose samples share a prefix like ``atoll_broker`` and some labels."""

    def __init__(self, prefix: str, **shared: str) -> None:
        self._prefix, self._shared = prefix, shared
        self.all: list[Family] = []

    def gauge(self, name: str, help: str, values: Values, *labels: str) -> None:
        """Adds a gauge: one value, or one for each value of the label (a tuple of several).

        Values of None are left out; ``name`` comes without the prefix.
        """
        self._add(name, help, values, labels)

    def counter(self, name: str, help: str, values: Values, *labels: str) -> None:
        """Adds values that only grow; ``name`` comes without ``_total``, all else as for :meth:`gauge`."""
        self._add(f"{name}_total", help, values, labels)

    def state(self, name: str, help: str, found: Mapping[str, str] | str, states: type[StrEnum], *labels: str) -> None:
        """Adds a gauge that is 1 in the state that something is in, and 0 in each other one.

        The label that names the state is what follows the last underscore of ``name``.
        """
        own = found if isinstance(found, Mapping) else {"": found}
        values = {
            ((key, state) if labels else (state,)): float(state == is_in)
            for key, is_in in own.items()
            for state in states
        }
        self._add(name, help, values, (*labels, name.rpartition("_")[2]))

    def _add(self, name: str, help: str, values: Values, labels: tuple[str, ...]) -> None:
        shared = tuple(self._shared.values())
        by_label = values if isinstance(values, Mapping) else {(): values}
        samples = {
            (*shared, *(key if isinstance(key, tuple) else (key,))): float(value)
            for key, value in by_label.items()
            if value is not None
        }
        name, labels = f"{self._prefix}_{name}", (*self._shared, *labels)
        self.all.append(Family(name=name, help=help, labels=labels, samples=samples))
