"""The invariants of a run's files and data, with the violations found.

Where data go out in blocks, all batches are one sequence that goes through one pass over the data after the other. So
if each batch is merged at most once, and batches are given out in order, no sample was seen twice before all of its
pass were given out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aggregator.interface.notes import BlockEnded, BlockGiven
from aggregator.interface.reading_notes import note_in
from broker.wire.messages import OWN_PASS
from ops.faults.invariants import InOrder, MergedRanges

Line = Mapping[str, Any]
#: The lines of files, by their names; they are read anew each time, so that no file has to fit into memory.
Files = Mapping[str, Iterable[Line]]

#: Violations that a check quotes; it counts all.
MOST_QUOTED = 5


@dataclass(slots=True)
class Check:
    """One invariant with its violations.

    Attributes:
        invariant: Its number in reference.md, section 10.
        name: What should hold.
        looked_at: Facts that were checked.
        violations: How many of them do not fit.
        examples: The first few of these, in words.
    """

    invariant: int
    name: str
    looked_at: int = 0
    violations: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether no fact that was looked at violates the invariant."""
        return not self.violations

    def fact(self, wrong: str, where: str = "") -> None:
        """Counts one checked fact, and its violation if there is one."""
        self.looked_at += 1
        if wrong:
            self.violations += 1
            if len(self.examples) < MOST_QUOTED:
                self.examples.append(f"{where}: {wrong}" if where else wrong)


def data_checks(tapes: Files, rows: Iterable[Line]) -> list[Check]:
    """Returns the checks of a run's data.

    Args:
        tapes: Of all aggregators: what was given to whom.
        rows: Of the ledger, one for each version that was not given up.
    """
    noted = (note_in(line) for lines in tapes.values() for line in lines)
    sizes = {each.block: each.batch_tokens for each in noted if isinstance(each, BlockGiven)}
    usual = next(iter(sizes.values()), 1)  # of a block that a dropped segment told of
    once = Check(2, "each batch is merged at most once into a fragment")
    ranges, own, furthest, merged = MergedRanges(), 0, 0, set[tuple[int, int]]()
    for row in rows:
        p = row["fragment_id"]
        for each in row["contributions"]:
            for d in each.get("data", ()):
                a, b = d["from_batch"], d["to_batch"]
                shared = bool(sizes) and a < OWN_PASS
                # Batches of islands may differ in size: places in the data that they share are tokens, where known.
                size = max(1, sizes.get(d["share"], usual)) if shared else 1
                found = ranges.merge((p, 0) if shared else (p, d["share"]), size * a, size * b)
                once.fact(found, f"fragment {p}, version {row['fragment_version']}")
                if a >= OWN_PASS:
                    own += 1
                else:
                    furthest = max(furthest, b)
                    merged.add((a, b))
    if not sizes:
        return [once]
    order = Check(2, f"data go out in order, merged up to batch {furthest:,}; {own} ranges are of other passes")
    for name, lines in tapes.items():
        _follow(name, lines, order)
    return [once, order]


def _follow(name: str, lines: Iterable[Line], order: Check) -> None:
    """Checks that batches were given out in order, and lost ones again before any new ones."""
    dealt: InOrder | None = None
    for line in lines:
        if "missing" in line or "gap" in line:
            dealt = None  # what is missing may have been about blocks
        elif "tape" in line:
            shares = (line.get("record") or {}).get("shares") or {}
            dealt = InOrder(shares.get("end", 0), shares.get("left", ()))
        if dealt is None:
            continue
        match note_in(line):
            case BlockEnded() as note:
                dealt.end_block(note.reached, note.to_batch, note.batch_tokens)
            case BlockGiven() as note:
                order.fact(dealt.give(note.from_batch, note.to_batch, note.batch_tokens), name)
            case _:
                pass
