"""Metric families as plain values, named after Prometheus' conventions. Pure.

A counter only grows while its process lives, and is served as ``NAME_total``. What may fall again is a gauge. Units are
base units and stand at the end of a name: seconds, bytes, tokens, or ratio for a part of 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """The type of a metric, as Prometheus calls it."""

    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric with all its samples.

    Attributes:
        name: As it is served; of a counter with ``_total``.
        help: What it counts, in one sentence.
        labels: Names of the labels, in the order of the samples' values.
        samples: Values of the labels -> value; empty while there is nothing to tell.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    samples: Mapping[tuple[str, ...], float]


#: One value; or values of the labels -> value: a text where there is one label, else a tuple.
Values = float | None | Mapping[Any, float | None]


class Families:
    """The families of one process, whose samples share a prefix and some labels.

    Args:
        prefix: Of every name, such as ``atoll_broker``.
        **shared: Labels of every sample.
    """

    def __init__(self, prefix: str, **shared: str) -> None:
        self._prefix, self._shared = prefix, shared
        self.all: list[Family] = []

    def gauge(self, name: str, help: str, values: Values, *labels: str) -> None:
        """Adds what may rise and fall.

        Args:
            name: Without the prefix.
            help: One sentence.
            values: One value; or value of the label -> value, with several labels by tuples. None is left out.
            *labels: Their names.
        """
        self._add(Kind.GAUGE, name, help, values, labels)

    def counter(self, name: str, help: str, values: Values, *labels: str) -> None:
        """Adds values that only grow; ``name`` comes without ``_total``, all else as for :meth:`gauge`."""
        self._add(Kind.COUNTER, f"{name}_total", help, values, labels)

    def state(self, name: str, help: str, found: Mapping[str, str] | str, states: type[StrEnum], *labels: str) -> None:
        """Adds a gauge that is 1 in the state that something is in, and 0 in each other one.

        Args:
            name: Also that of the label which names the state, after its last underscore.
            help: One sentence.
            found: The state; or value of the label -> state.
            states: All that there are.
            *labels: Name of the label, if there is one.
        """
        own = found if isinstance(found, Mapping) else {"": found}
        values = {
            ((key, state) if labels else (state,)): float(state == is_in)
            for key, is_in in own.items()
            for state in states
        }
        self._add(Kind.GAUGE, name, help, values, (*labels, name.rpartition("_")[2]))

    def _add(self, kind: Kind, name: str, help: str, values: Values, labels: tuple[str, ...]) -> None:
        shared = tuple(self._shared.values())
        by_label = values if isinstance(values, Mapping) else {(): values}
        samples = {
            (*shared, *(key if isinstance(key, tuple) else (key,))): float(value)
            for key, value in by_label.items()
            if value is not None
        }
        family = Family(
            name=f"{self._prefix}_{name}", kind=kind, help=help, labels=(*self._shared, *labels), samples=samples
        )
        self.all.append(family)
