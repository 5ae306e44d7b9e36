"""The missing segments of a tape or ledger (:mod:`aggregator.store.segments`), in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from aggregator.store.segments import header_of, opened, segments_of

_LIFE = b'{"tape":'


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The missing segments of a tape or ledger, and what is lost with them.

    Attributes:
        segments: Their numbers.
        lines: Their lines, as far as known.
        by_rule: The setting ``tape_segments`` dropped them; else they were lost.
        since_s: Time of the first line left, in seconds since 1970; 0: unknown.
        life: Number of the life whose beginning is lost; 0: none.
        epoch: Epoch of that life.
        file: ``tape`` or ``ledger``.
    """

    segments: tuple[int, ...]
    lines: int
    by_rule: bool
    since_s: float
    life: int = 0
    epoch: int = 0
    file: str = "tape"

    def sentence(self) -> str:
        """Returns the loss as a sentence."""
        first, last = self.segments[0], self.segments[-1]
        which = f"segment {first}" if first == last else f"segments {first} to {last}"
        if len(self.segments) != last - first + 1:
            which = "segments " + ", ".join(map(str, self.segments))
        lines = f" ({self.lines:,} lines)" if self.lines else ""
        why = "dropped by the rule tape_segments" if self.by_rule else "missing, and no rule dropped them"
        said = [f"{which} of the {self.file}{lines} {'are' if first != last else 'is'} {why}"]
        if self.since_s:
            since = datetime.fromtimestamp(self.since_s, UTC).isoformat(sep=" ", timespec="seconds")
            said.append(f"it tells from {since.replace('+00:00', ' UTC')} on")
        if self.life:
            said.append(f"life {self.life} of the aggregator (epoch {self.epoch}) has lost its beginning")
        return "; ".join(said)


def gone_of(tape: Path, file: str = "tape") -> Gone | None:
    """Returns the missing segments of a tape or a ledger (``file``); None if whole, or not there.

    Raises:
        OSError: It cannot be read.
    """
    for again in (True, True, False):
        try:
            return _gone_of(tape, file)
        except FileNotFoundError:  # compressed, closed or dropped in this moment
            if not again:
                raise
    return None


def gone_from(tapes: Sequence[Path]) -> str:
    """Names the missing segments of a run's tapes; empty if they are whole. Raises as :func:`gone_of`."""
    found = [(tape, gone_of(tape)) for tape in tapes]
    several = len(tapes) > 1
    said = [f"{tape}: {gone.sentence()}" if several else gone.sentence() for tape, gone in found if gone is not None]
    return "; ".join(said)


def _gone_of(tape: Path, file: str) -> Gone | None:
    there = segments_of(tape)
    newest = max(there, default=0)
    lost = sorted(set(range(1, newest)) - there.keys())
    if not lost:
        return None
    first = there[max(number for number in there if number - 1 in lost)]  # from there on it is whole
    header = header_of(first)
    with opened(first) as read:
        read.readline()
        begins = read.read(len(_LIFE)) == _LIFE
    epoch = int((header.life or {}).get("epoch", 0))
    beheaded = header.life is not None and not begins
    return Gone(
        segments=tuple(lost),
        lines=header.lines if lost[-1] == len(lost) else 0,
        by_rule=lost[-1] == len(lost) <= header_of(there[newest]).dropped,  # it drops the oldest
        since_s=header.time_s,
        life=header.lives if beheaded else 0,
        epoch=epoch if beheaded else 0,
        file=file,
    )
