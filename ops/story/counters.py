"""Counts the tokens and bytes of each island over all its lives, from the tape. Pure.

An island's heartbeat counts steps and tokens from where its life began, and bytes from zero. So the tokens of a run are
no sum of newest heartbeats: what a life trained and did not hand over is trained, and lost. The aggregator's own books
(:class:`aggregator.ledger.ledger.Ledger`) are kept here a second time, from what a tape has of lives, so that a page
and a report count alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aggregator.ledger.ledger import PAST, Ledger
from aggregator.ledger.lives import Life
from aggregator.state.summary import Sent

Line = Mapping[str, Any]


class Counters:
    """Follows the counters of islands, line by line."""

    def __init__(self) -> None:
        self._books = Ledger({})
        self._before: tuple[str, Life, int, int] | None = None  # the counters before the last message
        self._handed_over: dict[str, dict[int, tuple[int, int]]] = {}  # island -> fragment -> step and tokens
        self._sent: dict[str, Sent] = {}

    def begin(self, line: Line) -> None:
        """Restores the counters from the first line of an aggregator's life."""
        if line["config"].get("shard", 0):
            return  # shard 0 speaks for all
        self._books = Ledger({})
        for commit in line["commits"]:
            self._recall(commit["ledger"])
        self._books.recall((line.get("record") or {}).get("lives", {}))

    def _recall(self, kept: Line) -> None:
        """Takes over the lives in one fragment's slice of the books."""
        found: dict[str, dict[str, Any]] = {}
        for island, (row, *_) in kept.get("past", {}).items():
            found[island] = {PAST: row}
        for island, lives in kept.get("accounts", {}).items():
            found.setdefault(island, {}).update({life: row["life"] for life, row in lives.items()})
        self._books.recall(found)

    def joined(self, island: str, incarnation: int, start_step: int) -> None:
        """Begins a life of an island, at the step that it goes on from."""
        if incarnation <= self._books.past(island).upto:
            return  # told by another shard, late
        lives = self._books.lives().get(island, {}).values()
        known = {life.start_step: life.start_tokens for life in lives}  # where one began that handed nothing over
        known |= dict(self._handed_over.pop(island, {}).values())
        self._books.begin(island, incarnation, start_step, known.get(start_step, self._tokens_at(island, start_step)))

    def _tokens_at(self, island: str, step: int) -> int:
        """Returns the token counter at a step, where no hand-over tells: steps are taken for equally long."""
        life = self._books.last_life(island) if island in self._books.lives() else None
        if life is None or not life.last_step:
            return 0
        return round(life.last_tokens * step / life.last_step)

    def heard(self, line: Line) -> None:
        """Takes a received message."""
        self._before = None
        island, incarnation, body = line["sender"], line.get("incarnation", 1), line["body"]
        match line["kind"]:
            case "heartbeat":
                self._sent.setdefault(island, Sent()).take(
                    incarnation, body.get("bytes_up", 0), body.get("bytes_down", 0)
                )
                self._report(island, incarnation, body["inner_step"], body["tokens"])
            case "leave":
                self._report(island, incarnation, body["inner_step"], body["tokens"])
            case "contribution":
                end = body["steps"]["to_step"], body["steps"]["to_tokens"]
                self._handed_over.setdefault(island, {})[body["fragment_id"]] = end
            case _:
                pass

    def _report(self, island: str, incarnation: int, step: int, tokens: int) -> None:
        if incarnation <= self._books.past(island).upto:
            return
        if not self._books.knows(island, incarnation):  # how it began is not on the tape, or not any more
            self._books.begin(island, incarnation, 0, 0)
        life = self._books.life(island, incarnation)
        self._before = island, life, life.last_step, life.last_tokens
        self._books.report(island, incarnation, step, tokens)

    def refused(self, sender: str) -> None:
        """Takes back the claims of this sender's last message, which was refused."""
        if self._before is not None and self._before[0] == sender:
            _, life, step, tokens = self._before
            life.last_step, life.last_tokens = step, tokens

    def tokens(self, island: str) -> int:
        """Returns the tokens that all lives of an island have trained."""
        return self._books.trained(island)[1] if island in self._books.lives() else 0

    def sent(self, island: str) -> tuple[int, int]:
        """Returns the bytes that all processes of an island have sent and received."""
        return self._sent[island].total if island in self._sent else (0, 0)
