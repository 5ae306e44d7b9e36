"""The check of a run's data, from its files: no batch twice, and batches given out in order.

Where data go out in blocks, all batches are one sequence that goes through one pass over the data after the other. So
if each batch is merged at most once, and batches are given out in order, no sample was seen twice before all of its
pass were given out.
"""

from __future__ import annotations

from collections.abc import Iterable

from broker.wire.messages import OWN_PASS
from ops.chaos.checks import Check, Files, Line
from ops.invariants import InOrder, MergedRanges


def data_checks(tapes: Files, rows: Iterable[Line]) -> list[Check]:
    """Returns the checks of a run's data.

    Args:
        tapes: Of all aggregators: what was given to whom.
        rows: Of the ledger, one for each version that was not given up.
    """
    blocks = any(line.get("note") == "block.given" for lines in tapes.values() for line in lines)
    once = Check(2, "each batch is merged at most once into a fragment")
    ranges, own, furthest, merged = MergedRanges(), 0, 0, set[tuple[int, int]]()
    for row in rows:
        p = row["fragment_id"]
        for each in row["contributions"]:
            for d in each.get("data", ()):
                a, b = d["from_batch"], d["to_batch"]
                place = (p, 0) if blocks and a < OWN_PASS else (p, d["share"])
                once.fact(ranges.merge(place, a, b), f"fragment {p}, version {row['fragment_version']}")
                if a >= OWN_PASS:
                    own += 1
                else:
                    furthest = max(furthest, b)
                    merged.add((a, b))
    if not blocks:
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
        fields = line.get("fields", {})
        if dealt is None:
            continue
        if line.get("note") == "block.ended":
            dealt.end_block(fields["reached"], fields["to_batch"], fields["batch_tokens"])
        elif line.get("note") == "block.given":
            order.fact(dealt.give(fields["from_batch"], fields["to_batch"], fields["batch_tokens"]), name)
