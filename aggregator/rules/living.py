"""Keeps the set of islands that live, with a deadline for each. Pure.

A member that is silent for too long is dead, though nothing is heard of it: so each that lives has a deadline. It moves
with every message, and is looked at only when it comes first.
"""

from __future__ import annotations

from collections.abc import Callable

from aggregator.rules.deadlines import ROUNDING_S, Deadlines


class Living:
    """The names of those that live.

    Args:
        lives: Whether one lives at a time, exactly.
        dies_at_s: When one that lives is dead if it stays silent, give or take the rounding of a sum.
    """

    def __init__(self, lives: Callable[[str, float], bool], dies_at_s: Callable[[str], float]) -> None:
        self._lives = lives
        self._dies_at_s = dies_at_s
        self._known: set[str] = set()  # those of whom it ever was asked
        self._unseen: set[str] = set()  # that have changed since
        self._living: set[str] = set()
        self._ids: frozenset[str] | None = None  # the same, made when it is asked for
        self._deaths = Deadlines()  # of those that live: not before that
        self._asked_at_s = float("-inf")

    def changed(self, name: str) -> None:
        """Somebody is new, was heard, or has come or gone."""
        self._unseen.add(name)

    def ids(self, now_s: float) -> frozenset[str]:
        """Returns who lives at a time; the same object as long as it is the same."""
        self._look(now_s)
        if self._ids is None:
            self._ids = frozenset(self._living)
        return self._ids

    def next_death_s(self, now_s: float) -> float | None:
        """Returns when the next of them would be dead if it stayed silent; None if nobody lives."""
        self._look(now_s)
        while (first := self._deaths.first()) is not None:
            at_s, name = first
            dies_at_s = self._dies_at_s(name)
            if dies_at_s <= at_s:
                return dies_at_s
            self._deaths.put(name, dies_at_s)  # it was heard since
        return None

    def _look(self, now_s: float) -> None:
        if now_s < self._asked_at_s:  # of an earlier moment: some may have lived then
            self._unseen |= self._known
        self._asked_at_s = now_s
        self._unseen.update(self._deaths.due(now_s + ROUNDING_S))
        for name in self._unseen:
            self._look_at(name, now_s)
        self._unseen.clear()

    def _look_at(self, name: str, now_s: float) -> None:
        self._known.add(name)
        lives = self._lives(name, now_s)
        if lives != (name in self._living):
            (self._living.add if lives else self._living.remove)(name)
            self._ids = None
        if not lives:
            self._deaths.drop(name)
            return
        known_s, dies_at_s = self._deaths.get(name), self._dies_at_s(name)
        if known_s is None or dies_at_s < known_s:  # one that is too early costs a look
            self._deaths.put(name, dies_at_s)
