"""The books of a run rolled back to a snapshot: later merges are wasted, as ``rolled_back``. Pure.

The model goes back, and nothing else does: tokens stay trained, steps and batches stay handed over, and each refusal
keeps its cause. So the books that go on are the newest ones, in which of each life only what the snapshot had merged is
still merged. A run that was rolled back before may go back to a snapshot of versions that it had given up then: what
these had merged is merged again. So the same order after a crash half-way gives the same books.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.wire.messages import Reason


def rolled_back(kept: Mapping[str, Any], newest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the books of one fragment, as they go on (the form of :meth:`.ledger.Ledger.slice`).

    Args:
        kept: As they were committed with the version that the fragment goes back to; its averages stand.
        newest: As they were committed last.
    """
    if not kept or not newest:  # it never moves, or had no books yet
        return dict(newest)
    accounts: Mapping[str, Mapping[str, Any]] = kept["accounts"]
    past: Mapping[str, Any] = kept.get("past", {})

    def of_past(island_id: str, upto: int) -> int:
        lives = accounts.get(island_id, {}).items()
        folded: int = sum(row["merged_tokens"] for incarnation, row in lives if int(incarnation) <= upto)
        return int(past[island_id][1]) + folded if island_id in past else folded

    def of_life(island_id: str, incarnation: str) -> int:
        row = accounts.get(island_id, {}).get(incarnation)
        return 0 if row is None else int(row["merged_tokens"])

    averages = {name: kept[name] for name in ("tally", "norms", "interval") if name in kept}
    newest = {name: value for name, value in newest.items() if name != "interval"}
    moved: dict[str, Any] = {}
    for island_id, lives in newest["accounts"].items():
        moved[island_id] = {}
        for incarnation, row in lives.items():
            merged, wasted = _moved(row["merged_tokens"], row["wasted"], of_life(island_id, incarnation))
            moved[island_id][incarnation] = {**row, "merged_tokens": merged, "wasted": wasted}
    folded: dict[str, Any] = {}
    for island_id, (row, tokens, causes) in newest.get("past", {}).items():
        merged, wasted = _moved(tokens, causes, of_past(island_id, row[0]))
        folded[island_id] = [row, merged, wasted]
    return {**newest, "accounts": moved, "past": folded, **averages}


def _moved(merged: int, wasted: Mapping[str, int], kept: int) -> tuple[int, dict[str, int]]:
    """Returns tokens that are still merged, and the others by cause."""
    causes = dict(wasted)
    ever = merged + causes.pop(str(Reason.ROLLED_BACK), 0)
    still = min(kept, ever)
    return still, causes | ({str(Reason.ROLLED_BACK): ever - still} if ever > still else {})
