"""The check of a run's invariants (design, section 10) from its files: ``atoll chaos --check RUN_DIR``.

It reads the ledgers, stores and tapes of a run, of ``chaos`` or ``up``, during it or after it, and the aggregator's
report. What must hold is in :mod:`ops.invariants`; what can only be seen while a run goes on is checked in virtual time
(:mod:`ops.virtual.invariants`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aggregator.rounds.recovery import lineages
from aggregator.store.commit_file import Damaged
from aggregator.store.layout import fragment_ids, read_newest
from aggregator.store.ledger_file import read_rows
from aggregator.store.tape import read_lines
from broker.wire.errors import Unavailable
from ops.chaos.recording import ledger_files, tape_files
from ops.invariants import (
    Contents,
    Epochs,
    Key,
    MergedRanges,
    balanced,
    durable_before,
    grows,
    has_reason,
    weights_fit,
)

Line = Mapping[str, Any]
#: The lines of files, by their names.
Files = Mapping[str, Sequence[Line]]
#: A fragment version, its digest, and the books that were committed with it.
Books = tuple[int, str, Line]

#: Violations that a check quotes; it counts all.
MOST_QUOTED = 5


@dataclass(slots=True)
class Check:
    """One invariant, and what does not hold of it.

    Attributes:
        invariant: Its number in section 10.
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
        """Whether all that was looked at fits."""
        return not self.violations

    def fact(self, wrong: str, where: str = "") -> None:
        """Counts one fact, and what a predicate says is wrong with it."""
        self.looked_at += 1
        if wrong:
            self.violations += 1
            if len(self.examples) < MOST_QUOTED:
                self.examples.append(f"{where}: {wrong}" if where else wrong)


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
    report = _report_of(run_dir)
    published = published_versions(tapes)
    rows = main_ledger(ledgers)
    begun = {(each.fragment_id, each.version): each for each in lineages(rows)}
    given_up = {(p, version) for (p, _), each in begun.items() for version in each.given_up}
    merged = [row for row in rows if _key(row) not in given_up]
    return [
        *(versions_grow(f"{name}: versions grow", ledger, published) for name, ledger in ledgers.items()),
        no_gap(merged, begun),
        one_content(ledgers, rows, tapes),
        merged_once(merged),
        weights_add_up(rows),
        nothing_lost(ledgers, published.keys() - given_up, tapes),
        durable_first(tapes),
        epochs_grow(rows, tapes),
        *(books_agree(name, newest_books(store), merged) for name, store in stores.items()),
        books_balance(report),
        refusals_have_reasons(tapes, report),
    ]


# --- files ------------------------------------------------------------------------------------------------------


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


def published_versions(tapes: Files) -> dict[Key, str]:
    """Returns (fragment, version) -> digest of what aggregators say they have published."""
    return {
        (note["fragment"], note["version"]): note["digest"]
        for lines in tapes.values()
        for note in _notes(lines, "version.committed")
    }


def main_ledger(ledgers: Files) -> list[Line]:
    """Returns one row per (fragment, version) over all ledgers, in the order of fragments and versions.

    Where two differ the later epoch's stands: the other was never published, or :func:`one_content` says so.
    """
    rows: dict[Key, Line] = {}
    for ledger in ledgers.values():
        for row in ledger:
            known = rows.setdefault(_key(row), row)
            if row["epoch"] >= known["epoch"]:
                rows[_key(row)] = row
    return [rows[key] for key in sorted(rows)]


def _key(row: Line) -> Key:
    return row["fragment_id"], row["fragment_version"]


def _notes(lines: Iterable[Line], name: str) -> Iterator[Line]:
    return (line["fields"] for line in lines if line.get("note") == name)


# --- the checks -------------------------------------------------------------------------------------------------


def versions_grow(name: str, rows: Iterable[Line], published: Mapping[Key, str]) -> Check:
    """Each fragment's versions grow in a ledger; only what was never published is written again.

    They need not follow each other: a store that was away gets the newest versions, and no others (:func:`no_gap`).
    """
    check = Check(1, name)
    written: dict[Key, str] = {}
    newest: dict[int, int] = {}
    for row in rows:
        (p, version), digest = _key(row), row["digest"]
        again = written.get((p, version))
        # A tail that nobody saw may be dropped, and its place taken.
        unseen = again is not None and published.get((p, version)) != again
        check.fact("" if unseen else grows(f"fragment {p}", newest.get(p, -1), version))
        newest[p], written[p, version] = version, digest
    return check


def no_gap(rows: Iterable[Line], begun: Collection[Key] = ()) -> Check:
    """From version 0 on, all ledgers together have every version of every fragment that was not given up.

    The first version of a new lineage, which is in ``begun``, follows whatever was kept.
    """
    check = Check(1, "no version is missing")
    newest: dict[int, int] = {}
    for row in rows:
        p, version = _key(row)
        before = newest.get(p, -1)
        follows = version == before + 1 or (p, version) in begun
        check.fact("" if follows else f"fragment {p} goes from version {before} to {version}")
        newest[p] = version
    return check


def one_content(ledgers: Files, rows: Iterable[Line], tapes: Files) -> Check:
    """A (fragment, version) that was published names one byte string; one epoch never gives a version two contents.

    A leader that lost its lease may hold a tail that was never published: then a later epoch has taken its place.
    """
    check = Check(1, "a version names one content")
    published, in_epoch = Contents(), Contents()
    for name, lines in tapes.items():
        for note in _notes(lines, "version.committed"):
            check.fact(published.name((note["fragment"], note["version"]), note["digest"]), name)
    for row in rows:
        check.fact(published.name(_key(row), row["digest"]), "the ledgers")
    for name, ledger in ledgers.items():
        for row in ledger:
            check.fact(in_epoch.name((*_key(row), row["epoch"]), row["digest"]), name)
    return check


def merged_once(rows: Iterable[Line]) -> Check:
    """Each range of an island's steps is merged at most once per fragment, whichever of its lives sent it."""
    check = Check(2, "each range is merged at most once")
    ranges = MergedRanges()
    for row in rows:
        for each in row["contributions"]:
            key, steps = (each["island_id"], row["fragment_id"]), each["steps"]
            check.fact(ranges.merge(key, steps["from_step"], steps["to_step"]), f"version {row['fragment_version']}")
    return check


def weights_add_up(rows: Iterable[Line]) -> Check:
    """The merge weights of a version add up to at most 1, and none is negative."""
    check = Check(2, "merge weights add up to at most 1")
    for row in rows:
        check.fact(weights_fit(_key(row), [each["merge_weight"] for each in row["contributions"]]))
    return check


def nothing_lost(ledgers: Files, published: Collection[Key], tapes: Files) -> Check:
    """Whatever was published, or an island says it has, is still in a ledger: nothing merged is lost."""
    check = Check(3, "nothing that was published is lost")
    durable = {_key(row) for rows in ledgers.values() for row in rows}
    for p, version in published:
        lost = f"version {version} of fragment {p} was published and is in no ledger"
        check.fact("" if (p, version) in durable else lost)
    newest: dict[int, int] = defaultdict(lambda: -1)
    for p, version in durable:
        newest[p] = max(newest[p], version)
    for name, lines in tapes.items():
        for line in lines:
            if line.get("kind") == "heartbeat":
                for p, version in enumerate(line["body"]["versions"]):
                    check.fact(durable_before((p, version), newest[p], f"at {line['sender']}"), name)
    return check


def durable_first(tapes: Files) -> Check:
    """On every tape a version is durable before it is published.

    Where lines are missing, which a killed process still had in memory or a full disk refused, nothing can be said.
    """
    check = Check(3, "nothing is published before it is durable")
    for name, lines in tapes.items():
        durable: dict[int, int] = {}
        whole = True
        for line in lines:
            if "gap" in line:
                whole = False
            elif "tape" in line:
                durable = {commit["fragment_id"]: commit["fragment_version"] for commit in line["commits"]}
                whole = True
            elif line.get("event") == "persisted":
                p = line["fragment_id"]
                durable[p] = max(line["fragment_version"], durable.get(p, -1))
            elif line.get("note") == "version.committed":
                p, version = line["fields"]["fragment"], line["fields"]["version"]
                wrong = durable_before((p, version), durable.get(p, -1), "published")
                check.fact(wrong if whole else "", name)
    return check


def epochs_grow(rows: Iterable[Line], tapes: Files) -> Check:
    """Every life that publishes has an epoch of its own in its shard, above those before; versions follow suit."""
    check = Check(5, "epochs grow, and each has one publisher")
    newest: dict[int, int] = {}
    for row in rows:
        (p, version), epoch = _key(row), row["epoch"]
        check.fact(grows(f"the epoch of fragment {p}, version {version},", newest.get(p, 0), epoch, or_stays=True))
        newest[p] = epoch
    epochs = Epochs()
    for name, lines in tapes.items():
        shard, epoch, before, lives, waits = 0, 0, 0, 0, True
        for line in [*lines, {"note": "aggregator.started", "fields": {"epoch": math.inf}}]:  # and the last life's end
            if "tape" in line:
                shard = line.get("config", {}).get("shard", 0)
            elif line.get("note") == "aggregator.started":
                check.fact("" if waits else grows("the epoch of a life", before, epoch), name)
                before, epoch, lives, waits = max(before, epoch), line["fields"]["epoch"], lives + 1, False
            elif line.get("note") == "store.behind":
                waits = True  # with a lost store its number is gone too; it publishes nothing
            elif line.get("note") == "version.committed" and epoch:
                check.fact(epochs.speak(shard, epoch, f"{name}, life {lives}"))
    return check


def books_agree(store: str, books: Mapping[int, Books | str], rows: Iterable[Line]) -> Check:
    """The books in a store's newest commits say of every island what the ledger says: the same merged tokens."""
    check = Check(4, f"{store}: the books in the commits agree with the ledger")
    by_fragment: dict[int, list[Line]] = defaultdict(list)
    for row in rows:
        by_fragment[row["fragment_id"]].append(row)
    for p, found in books.items():
        if isinstance(found, str):
            check.fact(f"fragment {p}: {found}")
            continue
        version, digest, of_fragment = found
        if any(row["fragment_version"] == version and row["digest"] != digest for row in by_fragment[p]):
            continue  # the tail of a leader that lost its lease: never published, and dropped when it comes back
        merged: Counter[str] = Counter()
        for row in by_fragment[p]:
            if row["fragment_version"] <= version:
                for each in row["contributions"]:
                    merged[each["island_id"]] += each["steps"]["to_tokens"] - each["steps"]["from_tokens"]
        booked = Counter({island: tokens for island, (_, tokens, _) in of_fragment.get("past", {}).items()})
        for island, lives in of_fragment.get("accounts", {}).items():
            booked[island] += sum(life["merged_tokens"] for life in lives.values())
        for island in sorted({*booked, *merged}):
            has, should = booked[island], merged[island]
            differ = f"fragment {p}: {island} has {has} merged tokens booked, the ledger {should}"
            check.fact("" if has == should else differ)
    return check


def books_balance(report: Line | None) -> Check:
    """trained = merged + wasted + in flight, and the islands have trained it."""
    check = Check(4, "trained = merged + wasted + in flight")
    if report is not None:
        tokens = report["tokens"]
        trained = tokens["trained"]
        check.fact(balanced(trained, tokens["merged"], tokens["wasted"].values(), tokens["in_flight"]))
        of_islands = sum(each["tokens"] for each in report["islands"].values())
        check.fact("" if trained == of_islands else f"{trained} trained, by islands {of_islands}")
    return check


def refusals_have_reasons(tapes: Files, report: Line | None) -> Check:
    """Every refusal says which of the reasons it has."""
    check = Check(8, "every refusal has a reason")
    for name, lines in tapes.items():
        for line in lines:
            note = str(line.get("note", ""))
            if note.endswith((".refused", ".retry")):
                check.fact(has_reason(note, line["fields"].get("reason")), name)
            elif note == "round.closed":
                check.fact("" if line["fields"].get("reason") else "a round closed for no reason", name)
    for reason in (report or {}).get("refusals", {}):
        check.fact(has_reason("the report counts refusals", reason))
    return check


# --- what it says -----------------------------------------------------------------------------------------------


def as_json(checks: Iterable[Check]) -> list[dict[str, Any]]:
    """Returns checks ready for ``json.dumps``."""
    return [{**dataclasses.asdict(check), "holds": check.holds} for check in checks]


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns what :func:`as_json` made of checks as text."""
    lines = []
    for row in rows:
        verdict = "holds" if row["holds"] else f"VIOLATED {row['violations']} times"
        lines.append(f"  {row['invariant']:2}  {row['name']}: {verdict} ({row['looked_at']:,} facts)")
        lines += [f"        {each}" for each in row["examples"]]
    return "\n".join(lines)
