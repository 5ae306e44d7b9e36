"""Checks a run directory, of ``chaos`` or of ``up``, during the run or after it: ``atoll chaos --check RUN_DIR``.

Shell: it reads ledgers, tapes, stores and the report; what must hold of them is in :mod:`ops.chaos.invariants`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aggregator.rounds.recovery import lineages
from aggregator.store.commit_file import Damaged
from aggregator.store.layout import fragment_ids, read_newest
from aggregator.store.ledger_file import read_rows
from aggregator.store.tape import read_lines
from broker.wire.errors import Unavailable
from ops.chaos.invariants import (
    Books,
    Check,
    Line,
    books_agree,
    books_balance,
    durable_first,
    epochs_grow,
    main_ledger,
    merged_once,
    no_gap,
    nothing_lost,
    one_content,
    published_versions,
    refusals_have_reasons,
    versions_grow,
    weights_fit,
)
from ops.chaos.tapes import tape_files
from ops.chaos.watching import ledger_files


def verify(run_dir: Path) -> list[Check]:
    """Checks everything that a run directory tells.

    Raises:
        Unavailable: It is no run directory, or cannot be read.
    """
    paths = ledger_files(run_dir)
    if not paths:
        raise Unavailable(f"{run_dir} holds no ledger of a run; name the directory of one", definite=True)
    stores = {str(path.parent.relative_to(run_dir)): path.parent for path in paths}
    ledgers = {name: list(read_rows(store / "ledger.jsonl")) for name, store in stores.items()}
    tapes = {str(path.relative_to(run_dir)): list(read_lines(path)) for path in tape_files(run_dir)}
    published = published_versions(tapes)
    everything = main_ledger(ledgers)
    begun = {(each.fragment_id, each.version): each for each in lineages(everything)}
    given_up = {(p, version) for (p, _), each in begun.items() for version in each.given_up}
    merged = [row for row in everything if (row["fragment_id"], row["fragment_version"]) not in given_up]
    return [
        *(versions_grow(f"{name}: versions grow", rows, published) for name, rows in ledgers.items()),
        no_gap(merged, begun),
        one_content(ledgers, tapes),
        merged_once(merged),
        weights_fit(everything),
        nothing_lost(ledgers, {key: digest for key, digest in published.items() if key not in given_up}, tapes),
        durable_first(tapes),
        epochs_grow(everything, tapes),
        *(books_agree(name, newest_books(store), merged) for name, store in stores.items()),
        books_balance(_report_of(run_dir)),
        refusals_have_reasons(tapes, _report_of(run_dir)),
    ]


def newest_books(store: Path) -> dict[int, Books | str]:
    """Returns fragment -> version, digest and books of its newest whole commit, or what is wrong with it."""
    books: dict[int, Books | str] = {}
    for p in fragment_ids(store):
        try:
            commit, _ = read_newest(store, p)
        except (Damaged, Unavailable) as err:
            books[p] = str(err)
        else:
            books[p] = commit.fragment_version, commit.digest, commit.ledger
    return books


def _report_of(run_dir: Path) -> Line | None:
    """The aggregator's own report; None while there is none."""
    try:
        report = json.loads((run_dir / "aggregator-report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) else None


def as_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Returns checks ready for ``json.dumps``."""
    return [
        {
            "invariant": check.invariant,
            "name": check.name,
            "holds": check.holds,
            "looked_at": check.looked_at,
            "violations": check.count,
            "examples": check.violations,
        }
        for check in checks
    ]


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns what :func:`as_json` made of checks as text."""
    lines = []
    for row in rows:
        verdict = "holds" if row["holds"] else f"VIOLATED {row['violations']} times"
        lines.append(f"  {row['invariant']:2}  {row['name']}: {verdict} ({row['looked_at']:,} facts)")
        lines += [f"        {each}" for each in row["examples"]]
    return "\n".join(lines)
