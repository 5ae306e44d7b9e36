"""The invariants of the design (section 10), each a check of what a run has written: ledgers, tapes, books, report.

Pure: rows and lines in, a :class:`Check` out; :mod:`ops.chaos.verify` reads them. What an invariant says about islands
and memory while they run cannot be seen in files; virtual time checks that (:mod:`ops.virtual.invariants`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.wire.messages import Reason
from broker.wire.ranges import IntervalSet

Line = Mapping[str, Any]
Key = tuple[int, int]
#: A fragment version, its digest, and the books that were committed with it.
Books = tuple[int, str, Mapping[str, Any]]

#: Violations that a check quotes; it counts all.
MOST_QUOTED = 5


@dataclass(slots=True)
class Check:
    """One invariant, and what does not hold of it.

    Attributes:
        name: What should hold.
        invariant: Its number in section 10.
        looked_at: Facts that were checked.
        violations: The first few that do not fit.
        count: How many do not.
    """

    name: str
    invariant: int
    looked_at: int = 0
    violations: list[str] = field(default_factory=list)
    count: int = 0

    @property
    def holds(self) -> bool:
        """Whether all that was looked at fits."""
        return not self.count

    def require(self, holds: bool, what: str) -> None:
        """Looks at one fact."""
        self.looked_at += 1
        if not holds:
            self.count += 1
            if len(self.violations) < MOST_QUOTED:
                self.violations.append(what)


def published_versions(tapes: Mapping[str, Sequence[Line]]) -> dict[Key, str]:
    """Returns (fragment, version) -> digest of what aggregators say they have published."""
    return {
        (note["fragment"], note["version"]): note["digest"]
        for lines in tapes.values()
        for note in _notes(lines, "version.committed")
    }


def main_ledger(ledgers: Mapping[str, Sequence[Line]]) -> list[Line]:
    """Returns one row per (fragment, version) over all ledgers, in the order of fragments and versions.

    Where two differ the later epoch's stands: the other was never published, or :func:`one_content` says so.
    """
    rows: dict[Key, Line] = {}
    for ledger in ledgers.values():
        for row in ledger:
            key = row["fragment_id"], row["fragment_version"]
            if key not in rows or row["epoch"] >= rows[key]["epoch"]:
                rows[key] = row
    return [rows[key] for key in sorted(rows)]


def versions_grow(name: str, rows: Iterable[Line], published: Mapping[Key, str]) -> Check:
    """Each fragment's versions grow in a ledger; only what was never published is written again.

    They need not follow each other: a store that was away gets the newest versions, and no others (:func:`no_gap`).
    """
    check = Check(name, 1)
    written: dict[Key, str] = {}
    newest: dict[int, int] = {}
    for row in rows:
        p, version, digest = row["fragment_id"], row["fragment_version"], row["digest"]
        before = newest.get(p, -1)
        again = written.get((p, version))
        if again is not None and published.get((p, version)) != again:
            before = version - 1  # a tail that nobody saw was dropped, and its place taken
        check.require(version > before, f"fragment {p} goes from version {before} to {version}")
        newest[p], written[p, version] = version, digest
    return check


def no_gap(rows: Iterable[Line], begun: Collection[Key] = ()) -> Check:
    """From version 0 on, all ledgers together have every version of every fragment.

    Args:
        rows: Without those that were given up.
        begun: First versions of new lineages, which follow whatever was kept.
    """
    check = Check("no version is missing", 1)
    newest: dict[int, int] = {}
    for row in rows:
        p, version = row["fragment_id"], row["fragment_version"]
        before = newest.get(p, -1)
        fits = version == before + 1 or (p, version) in begun
        check.require(fits, f"fragment {p} goes from version {before} to {version}")
        newest[p] = version
    return check


def one_content(ledgers: Mapping[str, Sequence[Line]], tapes: Mapping[str, Sequence[Line]]) -> Check:
    """A (fragment, version) that was published names one byte string; one epoch never gives a version two contents.

    A leader that lost its lease may hold a tail that was never published: then a later epoch has taken its place.
    """
    check = Check("a version names one content", 1)
    known: dict[Key, str] = {}
    for name, lines in tapes.items():
        for note in _notes(lines, "version.committed"):
            key = note["fragment"], note["version"]
            same = known.setdefault(key, note["digest"]) == note["digest"]
            check.require(same, f"{name}: version {key[1]} of fragment {key[0]} was published with two contents")
    for row in main_ledger(ledgers):
        key = row["fragment_id"], row["fragment_version"]
        same = known.get(key, row["digest"]) == row["digest"]
        check.require(
            same, f"version {key[1]} of fragment {key[0]} has another content in the ledger than was published"
        )
    in_epoch: dict[tuple[int, int, int], str] = {}
    for name, rows in ledgers.items():
        for row in rows:
            id_ = row["fragment_id"], row["fragment_version"], row["epoch"]
            same = in_epoch.setdefault(id_, row["digest"]) == row["digest"]
            what = f"version {id_[1]} of fragment {id_[0]}, epoch {id_[2]}"
            check.require(same, f"{name}: {what}, has another content than elsewhere")
    return check


def merged_once(rows: Iterable[Line]) -> Check:
    """Each range of an island's steps is merged at most once per fragment, whichever of its lives sent it."""
    check = Check("each range is merged at most once", 2)
    seen: dict[tuple[str, int], IntervalSet] = defaultdict(IntervalSet)
    for row in rows:
        p = row["fragment_id"]
        for each in row["contributions"]:
            a, b = each["steps"]["from_step"], each["steps"]["to_step"]
            of = seen[each["island_id"], p]
            twice = a >= b or of.overlaps(a, b)
            what = f"fragment {p}: steps [{a}, {b}) of {each['island_id']} are merged twice"
            check.require(not twice, f"{what}, again in version {row['fragment_version']}")
            if not twice:
                of.add(a, b)
    return check


def weights_fit(rows: Iterable[Line]) -> Check:
    """The merge weights of a version add up to at most 1, and none is negative."""
    check = Check("merge weights add up to at most 1", 2)
    for row in rows:
        weights = [each["merge_weight"] for each in row["contributions"]]
        what = f"fragment {row['fragment_id']} version {row['fragment_version']}: weights {weights}"
        check.require(all(w >= 0 for w in weights) and sum(weights) <= 1 + 1e-9, what)
    return check


def nothing_lost(
    ledgers: Mapping[str, Sequence[Line]], published: Mapping[Key, str], tapes: Mapping[str, Sequence[Line]]
) -> Check:
    """Whatever was published, or an island says it has, is still in a ledger: nothing merged is lost."""
    check = Check("nothing that was published is lost", 3)
    durable = {(row["fragment_id"], row["fragment_version"]) for rows in ledgers.values() for row in rows}
    for p, version in published:
        check.require((p, version) in durable, f"version {version} of fragment {p} was published and is in no ledger")
    newest: dict[int, int] = defaultdict(lambda: -1)
    for p, version in durable:
        newest[p] = max(newest[p], version)
    for lines in tapes.values():
        for line in lines:
            if line.get("kind") != "heartbeat":
                continue
            for p, version in enumerate(line["body"]["versions"]):
                ahead = version > newest[p]
                check.require(not ahead, f"{line['sender']} has version {version} of fragment {p}: no ledger has")
    return check


def durable_first(tapes: Mapping[str, Sequence[Line]]) -> Check:
    """On every tape a version is durable before it is published, and before any island says it has it."""
    check = Check("nothing is published before it is durable", 3)
    for name, lines in tapes.items():
        durable: dict[int, int] = {}
        whole = True  # lines that a killed process still had in memory, or a full disk refused, are missing
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
                note = line["fields"]
                p, version = note["fragment"], note["version"]
                known = durable.get(p, -1)
                check.require(
                    not whole or version <= known, f"{name}: version {version} of {p} is published, {known} is durable"
                )
    return check


def epochs_grow(rows: Iterable[Line], tapes: Mapping[str, Sequence[Line]]) -> Check:
    """Every life that publishes has an epoch of its own in its shard, above those before; versions follow suit."""
    check = Check("epochs grow, and each has one publisher", 5)
    newest: dict[int, int] = {}
    for row in rows:
        p, epoch = row["fragment_id"], row["epoch"]
        what = f"fragment {p} version {row['fragment_version']}: epoch {epoch} after {newest.get(p)}"
        check.require(epoch >= newest.get(p, epoch), what)
        newest[p] = epoch
    publisher: dict[tuple[int, int], str] = {}
    for name, lines in tapes.items():
        shard, epoch, before, lives, waits = 0, 0, 0, 0, True
        for line in [*lines, {"note": "aggregator.started", "fields": {"epoch": math.inf}}]:  # and the last life's end
            if "tape" in line:
                shard = line.get("config", {}).get("shard", 0)
            elif line.get("note") == "aggregator.started":
                check.require(waits or epoch > before, f"{name}: a life starts with epoch {epoch} after {before}")
                before, epoch, lives, waits = max(before, epoch), line["fields"]["epoch"], lives + 1, False
            elif line.get("note") == "store.behind":
                waits = True  # with a lost store its number is gone too; it publishes nothing
            elif line.get("note") == "version.committed" and epoch:
                who = f"{name}, life {lives}"
                other = publisher.setdefault((shard, epoch), who)
                check.require(other == who, f"epoch {epoch} of shard {shard}: {other} and {who}")
    return check


def books_agree(store: str, books: Mapping[int, Books | str], rows: Iterable[Line]) -> Check:
    """The books in a store's newest commits say of every island what the ledger says: the same merged tokens.

    Args:
        store: Its name.
        books: Fragment -> version, digest and books of its newest commit, or why that cannot be read.
        rows: The ledger.
    """
    check = Check(f"{store}: the books in the commits agree with the ledger", 4)
    merged: Counter[tuple[int, int, str]] = Counter()
    digests: dict[Key, str] = {}
    for row in rows:
        digests[row["fragment_id"], row["fragment_version"]] = row["digest"]
        for each in row["contributions"]:
            tokens = each["steps"]["to_tokens"] - each["steps"]["from_tokens"]
            merged[row["fragment_id"], row["fragment_version"], each["island_id"]] += tokens
    for p, found in books.items():
        if isinstance(found, str):
            check.require(False, f"fragment {p}: {found}")
            continue
        version, digest, of_fragment = found
        if digests.get((p, version), digest) != digest:
            continue  # the tail of a leader that lost its lease: never published, and dropped when it comes back
        by_island: Counter[str] = Counter()
        for (fragment, at, island), tokens in merged.items():
            if fragment == p and at <= version:
                by_island[island] += tokens
        accounts = of_fragment.get("accounts", {})
        booked = Counter({island: tokens for island, (_, tokens, _) in of_fragment.get("past", {}).items()})
        for island, lives in accounts.items():
            booked[island] += sum(life["merged_tokens"] for life in lives.values())
        for island in sorted({*booked, *by_island}):
            has, should = booked[island], by_island[island]
            check.require(has == should, f"fragment {p}: {island} has {has} merged tokens booked, the ledger {should}")
    return check


def books_balance(report: Line | None) -> Check:
    """trained = merged + wasted + in flight."""
    check = Check("trained = merged + wasted + in flight", 4)
    if report is not None:
        tokens = report["tokens"]
        parts = tokens["merged"] + sum(tokens["wasted"].values()) + tokens["in_flight"]
        check.require(tokens["trained"] == parts, f"{tokens['trained']} trained, {parts} accounted for")
        check.require(tokens["in_flight"] >= 0 <= tokens["merged"], f"tokens below zero: {tokens}")
        of_islands = sum(each["tokens"] for each in report["islands"].values())
        check.require(tokens["trained"] == of_islands, f"{tokens['trained']} trained, by islands {of_islands}")
    return check


def refusals_have_reasons(tapes: Mapping[str, Sequence[Line]], report: Line | None) -> Check:
    """Every refusal says which of the reasons it has."""
    check = Check("every refusal has a reason", 8)
    known = set(Reason)
    for name, lines in tapes.items():
        for line in lines:
            note = str(line.get("note", ""))
            if note.endswith((".refused", ".retry")):
                reason = line["fields"].get("reason")
                check.require(reason in known, f"{name}: {note} for {reason!r}")
            elif note == "round.closed":
                check.require(bool(line["fields"].get("reason")), f"{name}: a round closed for no reason")
    for reason in (report or {}).get("refusals", {}):
        check.require(reason in known, f"the report counts refusals for {reason!r}")
    return check


def _notes(lines: Iterable[Line], name: str) -> Iterator[Line]:
    return (line["fields"] for line in lines if line.get("note") == name)
