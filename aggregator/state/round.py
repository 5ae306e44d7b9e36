"""One round of one fragment: islands asked, answers received, and the rule for closing.

It collects answers until it is decided: with the last one that is waited for, with a quorum of fresh ones and the wait
that begins then (``quorum_met_at_s``), or at its timeout (:mod:`aggregator.rules.quorum`).

A contribution that arrives for an earlier round is *held*: it takes part in the next round of its fragment without
counting towards the quorum. One that came unasked waits in the same way, and counts. A contribution is admitted before
it comes here (:mod:`aggregator.ledger.refusals`).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from operator import attrgetter

from aggregator.interface.merge_rule import Question
from aggregator.rules.outliers import Offer
from aggregator.rules.quorum import Decision, RoundView, Waits, decide, effective_quorum
from aggregator.rules.trust import Agreement
from broker.wire.messages import UNASKED, Merged

_MERGE_ORDER = attrgetter("island_id", "incarnation", "steps.from_step")


@dataclass(slots=True)
class Round:
    """An open round; see the module's docstring."""

    round_id: int
    fragment_id: int
    opened_at_s: float
    asked: frozenset[str]
    flush: bool = False
    answered: set[str] = field(default_factory=set)  #: asked islands that contributed or said "nothing"
    contributions: list[Offer] = field(default_factory=list)
    quorum_met_at_s: float | None = None
    waiting_bytes: int = 0  #: of the contributions
    changed: bool = True  #: since it was looked at last
    merged: tuple[Merged, ...] = ()  #: what is being merged, once closed
    closed_because: str = ""
    trust: dict[str, float] = field(default_factory=dict)  #: by which islands were weighed; empty: by tokens alone
    question: Question | None = None  #: to a merge rule of one's own, once closed
    momentum_cosine: float | None = None  #: of the merge and the momentum before it
    agreement: Agreement | None = None  #: that of the islands in it, once it is merged
    missing: list[str] = field(default_factory=list)  #: who was waited for when it closed
    _fresh: set[str] = field(default_factory=set)  #: islands with a contribution to this very round
    _held: set[str] = field(default_factory=set)  #: islands with an earlier one alone
    _of_island: dict[str, list[Offer]] = field(default_factory=dict)
    _asked_of: frozenset[str] | None = None  #: of whom it was asked last who owes an answer
    _owing: set[str] = field(default_factory=set)  #: and who that is

    def offer(self, contribution: Offer) -> bool:
        """Adds a contribution; returns True if it is fresh: it answers this very round."""
        island_id, fresh = contribution.island_id, self.is_fresh(contribution)
        self.contributions.append(contribution)
        self._of_island.setdefault(island_id, []).append(contribution)
        self.waiting_bytes += contribution.payload_bytes
        self.changed = True
        if fresh:
            self._fresh.add(island_id)
            self._held.discard(island_id)
            self.answer_nothing(island_id)
        elif island_id not in self._fresh:
            self._held.add(island_id)
        return fresh

    def answer_nothing(self, island_id: str) -> None:
        """Notes that an island hands nothing over in this round."""
        self.answered.add(island_id)
        self._owing.discard(island_id)
        self.changed = True

    def excuse(self, island_id: str) -> None:
        """Stops waiting for an island's answer; if it comes all the same, it is taken like any other."""
        self.asked -= {island_id}
        self._owing.discard(island_id)
        self.changed = True

    def is_fresh(self, contribution: Offer) -> bool:
        """Returns True if a contribution answers this very round.

        One that was handed over unasked is for the round that takes it in: its island has nothing else to say. Only in
        a flush everybody is asked what is left after it.
        """
        return contribution.round_id == self.round_id or (contribution.round_id == UNASKED and not self.flush)

    def owing(self, responsive: frozenset[str]) -> Set[str]:
        """Returns asked, responsive islands without an answer yet; a repeated call costs nothing."""
        if self._asked_of is not responsive:
            self._asked_of, self._owing = responsive, set(self.asked & responsive) - self.answered
        return self._owing

    def look(self, now_s: float, responsive: frozenset[str], live: int, waits: Waits) -> Decision:
        """Returns whether the round closes now, and when to ask again; remembers when the quorum was met."""
        view = self._view(now_s, responsive, live, waits)
        self.quorum_met_at_s, self.changed = view.quorum_met_at_s, False
        return decide(now_s, view, live, waits)

    def peek(self, now_s: float, responsive: frozenset[str], live: int, waits: Waits) -> Decision:
        """Returns what :meth:`look` would, without remembering."""
        return decide(now_s, self._view(now_s, responsive, live, waits), live, waits)

    def _view(self, now_s: float, responsive: frozenset[str], live: int, waits: Waits) -> RoundView:
        """Returns the facts that decide; the quorum is met now if it is and was not before."""
        met_at_s = self.quorum_met_at_s
        if met_at_s is None and len(self._fresh) >= effective_quorum(waits.quorum, live):
            met_at_s = now_s
        return RoundView(
            opened_at_s=self.opened_at_s,
            fresh=self._fresh,
            held=self._held,
            owing=self.owing(responsive),
            quorum_met_at_s=met_at_s,
            flush=self.flush,
        )

    def release(self) -> None:
        """Drops the contributions, whose bytes are in the new version."""
        self.contributions.clear()
        self._of_island.clear()
        self.waiting_bytes = 0

    def of(self, island_id: str) -> list[Offer]:
        """The contributions of one island."""
        return self._of_island.get(island_id, [])

    def in_merge_order(self) -> list[Offer]:
        """The contributions by island and step: float addition is not associative, so the order is fixed."""
        return sorted(self.contributions, key=_MERGE_ORDER)
