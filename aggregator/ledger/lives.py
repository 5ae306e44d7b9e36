"""Accounts of an island's lives on each fragment; the earliest lives are one sum.

Records with their own arithmetic and their form as plain data; when what is entered is for
:mod:`aggregator.ledger.ledger`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from broker.wire.messages import FASTEST_STEP_S, Reason
from broker.wire.ranges import IntervalSet, StepRange

#: Refused ranges of an account whose reason is still told to an island that missed it; more than are ever outstanding.
REASONS_REMEMBERED = 32
#: Intervals kept of one island on one fragment: they stand in every commit. Where there
#: are more, the lowest gaps count as filled: what belongs there was dropped or lost, or is far too old by now.
MOST_INTERVALS = 32
#: No training loop runs faster than this, not even one that does nothing. Counters that grow faster are lies, which
#: could end a run or overflow a sum.
STEPS_PER_S, STEPS_AT_ONCE = round(1 / FASTEST_STEP_S), 100_000


@dataclass(slots=True)
class Account:
    """One life of one island on one fragment."""

    merged: IntervalSet = field(default_factory=IntervalSet)
    refused: IntervalSet = field(default_factory=IntervalSet)
    merged_tokens: int = 0
    merged_to: tuple[int, int] = (0, 0)  #: the furthest merged step, and the token counter there
    wasted_tokens: Counter[str] = field(default_factory=Counter)
    waiting: dict[tuple[int, int], StepRange] = field(default_factory=dict)  #: arrived, not merged yet
    why: dict[tuple[int, int], Reason] = field(default_factory=dict)  #: of the latest refusals, for who asks again
    forgotten_tokens: int | None = None  #: before what came first to a new lineage, with no known fate; None: none came

    @property
    def spent_tokens(self) -> int:
        """Tokens whose fate is sealed: merged or wasted."""
        return self.merged_tokens + sum(self.wasted_tokens.values())

    @property
    def known_tokens(self) -> int:
        """Tokens that arrived or were dropped: spent, or waiting to be."""
        return self.spent_tokens + sum(r.tokens for r in self.waiting.values())

    @property
    def handed_over(self) -> tuple[int, int]:
        """The furthest step that arrived here for good, and the token counter there."""
        return max([self.merged_to, *((r.to_step, r.to_tokens) for r in self.waiting.values())])

    def merge(self, steps: StepRange) -> None:
        """Moves waiting tokens to the merged ones."""
        del self.waiting[(steps.from_step, steps.to_step)]
        self.merged.add(steps.from_step, steps.to_step)
        self.merged.close_gaps(MOST_INTERVALS, self._waits)  # with keep = 0 each adoption drops steps, and leaves one
        self.merged_tokens += steps.tokens
        self.merged_to = max(self.merged_to, (steps.to_step, steps.to_tokens))

    def refuse(self, steps: StepRange, cause: Reason) -> None:
        """Counts waiting or newly arrived steps as wasted."""
        self.waiting.pop((steps.from_step, steps.to_step), None)
        self.refused.add(steps.from_step, steps.to_step)
        self.refused.close_gaps(MOST_INTERVALS, self._waits)
        self.why[(steps.from_step, steps.to_step)] = cause
        if len(self.why) > REASONS_REMEMBERED:
            del self.why[next(iter(self.why))]
        self.wasted_tokens[cause] += steps.tokens

    def why_refused(self, from_step: int, to_step: int) -> Reason:
        """Why a refused range was refused, as long as that is remembered."""
        return self.why.get((from_step, to_step), Reason.OVERLAP)

    def overlaps(self, steps: StepRange) -> bool:
        """Whether any of these steps arrived before, whatever became of them."""
        return (
            self.merged.overlaps(steps.from_step, steps.to_step)
            or self.refused.overlaps(steps.from_step, steps.to_step)
            or self._waits(steps.from_step, steps.to_step)
        )

    def _waits(self, from_step: int, to_step: int) -> bool:
        """Whether any of these steps arrived, and are neither merged nor refused yet."""
        return any(a < to_step and from_step < b for a, b in self.waiting)

    def record(self) -> dict[str, Any]:
        """Returns it as plain data, without what waits and why something was refused."""
        return {
            "merged": list(map(list, self.merged)),
            "merged_tokens": self.merged_tokens,
            "merged_to": list(self.merged_to),
            "refused": list(map(list, self.refused)),
            "wasted": {str(k): v for k, v in self.wasted_tokens.items()},
            **({} if self.forgotten_tokens is None else {"forgotten": self.forgotten_tokens}),
        }

    @classmethod
    def restored(cls, record: Mapping[str, Any]) -> Account:
        """Reads :meth:`record` back."""
        return cls(
            merged=IntervalSet((a, b) for a, b in record["merged"]),
            refused=IntervalSet((a, b) for a, b in record["refused"]),
            merged_tokens=record["merged_tokens"],
            merged_to=tuple(record["merged_to"]),
            wasted_tokens=Counter(record["wasted"]),
            forgotten_tokens=record.get("forgotten"),
        )


@dataclass(slots=True)
class Life:
    """One incarnation of an island: where its counters began, how far it has reported, and its accounts."""

    start_step: int
    start_tokens: int
    last_step: int
    last_tokens: int
    accounts: dict[int, Account]
    ended: bool = False
    doubted_tokens: int = (
        0  #: of those it reported, which do not count towards the end (:mod:`aggregator.rules.claims`)
    )

    @property
    def trained_tokens(self) -> int:
        """Tokens this life has reported."""
        return self.last_tokens - self.start_tokens

    def most_steps(self, since_s: float) -> int:
        """Returns the highest inner step that it can have reached ``since_s`` after its last report."""
        return self.last_step + STEPS_AT_ONCE + int(max(0.0, since_s) * STEPS_PER_S)

    def trained_tokens_by(self, step: int, tokens: int) -> int:
        """Tokens this life will have reported once these counters are (:meth:`.ledger.Ledger.report`)."""
        return (max(tokens, self.last_tokens) if step > self.last_step else self.last_tokens) - self.start_tokens

    @property
    def settled(self) -> bool:
        """True when every token that the island has reported was merged or refused, on every fragment."""
        return all(account.spent_tokens >= self.trained_tokens for account in self.accounts.values())

    @property
    def row(self) -> list[Any]:
        """Its counters, and whether it has ended, as plain data."""
        row = [self.start_step, self.start_tokens, self.last_step, self.last_tokens, self.ended]
        return [*row, self.doubted_tokens] if self.doubted_tokens else row


@dataclass(slots=True)
class Past:
    """The lives of an island up to one, all of which have ended with nothing on its way, as sums.

    Attributes:
        upto: Incarnation of the last one.
        steps: Inner steps that they reported.
        tokens: Tokens likewise.
        doubted_tokens: Of these, those that do not count towards the end.
        handed_over: The furthest step that arrived of them for good, and the token counter there.
        merged_tokens: By fragment.
        wasted_tokens: Likewise, by cause.
    """

    upto: int = 0
    steps: int = 0
    tokens: int = 0
    doubted_tokens: int = 0
    handed_over: tuple[int, int] = (0, 0)
    merged_tokens: Counter[int] = field(default_factory=Counter)
    wasted_tokens: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    @property
    def row(self) -> list[int]:
        """Returns the part that concerns all fragments, as plain data."""
        row = [self.upto, self.steps, self.tokens, *self.handed_over]
        return [*row, self.doubted_tokens] if self.doubted_tokens else row

    def take(self, life: Life) -> None:
        """Adds what became of a life's tokens."""
        for p, account in life.accounts.items():
            self.take_account(p, account)

    def take_account(self, p: int, account: Account) -> None:
        """Adds what became of a life's tokens on one fragment."""
        self.merged_tokens[p] += account.merged_tokens
        self.wasted_tokens[p] += account.wasted_tokens
