"""``[[compare]]`` of an experiment: what is claimed, and of which cells. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from broker.process.settings import from_sources
from broker.wire.errors import ConfigError
from ops.lab.statistics import Kind


class Equal(StrEnum):
    """What the runs of a pair have in common."""

    TOKENS = "tokens"  # trained, by all islands together
    TIME = "time"  # virtual


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A claim about two kinds of cells of an experiment.

    Attributes:
        claim: In one sentence.
        candidate: Fields of a cell, which select it.
        baseline: The same of what it is compared with.
        kind: What is claimed.
        margin: Of candidate / baseline - 1: what still counts as equal, or has to be gained to count as better.
        by: Fields to list verdicts by. There is a verdict for each of their values, and for each value of any other
            field in which cells of the candidate differ.
        equal: What runs of a pair must have in common for a verdict.
        ignore: Fields in which candidate and baseline may differ: rates that were tuned for each.
        published: What was published for candidate / baseline - 1.
        source: Where.
        why: What is known of the reason where we differ from that.
        target: What the project set out to show, in the words that all claims of that target share; empty if none.
        seeds: How many are run for it, planned beforehand, whatever the interval and ``max_seeds``; 0: as many as the
            experiment says, and more while the interval is wider than the margin. It is judged by all that both have.
        looks: With how many seeds each the claim had been looked at, and was open, before that number was planned: the
            page tells what the seeds after the last look say alone.
    """

    claim: str
    candidate: Mapping[str, Any]
    baseline: Mapping[str, Any]
    kind: Kind
    margin: float = 0.0
    equal: Equal = Equal.TOKENS
    by: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    published: float | None = None
    source: str = ""
    why: str = ""
    target: str = ""
    seeds: int = 0
    looks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.claim.strip():
            raise ConfigError("claim", self.claim, "must say in a sentence what is claimed")
        for name in ("candidate", "baseline"):
            selection = getattr(self, name)
            if not selection:
                raise ConfigError(name, dict(selection), 'must select cells, as in { mode = "decoupled" }')
            for key, value in selection.items():
                if not isinstance(value, str | int | float | list):
                    raise ConfigError(f"{name}.{key}", value, "must be text, a number, true, false, or a list of these")
        if dict(self.candidate) == dict(self.baseline):
            raise ConfigError("baseline", dict(self.baseline), "selects the same cells as candidate; change one")
        if not 0 <= self.margin < 1:
            raise ConfigError("margin", self.margin, "is relative and must be from 0 to below 1; 0.01 is one percent")
        if self.kind is Kind.EQUAL and self.margin == 0:
            raise ConfigError("margin", self.margin, "must be above 0: no two runs are exactly equal")
        if self.looks and not self.seeds:
            raise ConfigError("looks", list(self.looks), "needs seeds, the number that was planned after them")
        if self.looks and any(b <= a for a, b in itertools.pairwise((0, *self.looks, self.seeds))):
            cure = f"must grow, from 1 to below seeds = {self.seeds} of the claim, which were planned after them"
            raise ConfigError("looks", list(self.looks), cure)
        for name in self.by:
            if name in self.ignore or name in self.candidate:
                raise ConfigError("by", name, "is fixed or ignored by the same comparison; leave it out of one of them")
        if self.published is not None and not self.source:
            raise ConfigError("source", self.source, "must say where the published figure stands")


def comparison_of(table: Mapping[str, Any]) -> Comparison:
    """Reads one ``[[compare]]`` table.

    Raises:
        ConfigError: An unknown key, a wrong type or value, or a missing key; it names the key, the value, the cure.
    """
    try:
        return from_sources(Comparison, table, where="compare")
    except ConfigError as err:
        claim = table.get("claim")
        of = f" (of the claim {claim!r})" if isinstance(claim, str) and err.field != "claim" else ""
        name = err.field if err.field.startswith("[compare]") else f"compare.{err.field}"
        raise ConfigError(name, err.value, f"{err.cure}{of}") from err
