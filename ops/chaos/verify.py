"""The check of a run's invariants (reference.md, 10) from files: ``atoll chaos --check RUN_DIR``.

It reads the ledgers, stores and tapes of a run, of ``chaos`` or ``up``, during it or after it, and the aggregator's
report. What must hold is in :mod:`ops.faults.invariants`; what can only be seen while a run goes on is checked in
virtual time (:mod:`ops.virtual.invariants`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from aggregator.interface.leader_notes import AggregatorStarted, MessageRefused, StoreFallenBehind
from aggregator.interface.notes import (
    ContributionRefused,
    ContributionRetry,
    JoinRefused,
    RoundClosed,
    VersionCommitted,
)
from aggregator.interface.reading_notes import note_in
from aggregator.ledger.ledger import merged_by_island
from aggregator.rounds.recovery import MOST_VERSION, Lineage, lineages
from aggregator.state.records import Carried
from aggregator.store.commit_file import Damaged
from aggregator.store.layout import fragment_ids, read_newest
from aggregator.store.ledger_file import head_of, newest_dropped, read_rows
from aggregator.store.tape import read_lines
from broker.base.errors import Unavailable
from ops.faults.checks import Check, Files, Line, data_checks
from ops.faults.invariants import (
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
from ops.inspect.dropped import gone_of
from ops.inspect.tapes import ledgers_in, tapes_in

#: A fragment version, its digest, and the books that were committed with it.
Books = tuple[int, str, Line]


def verify(run_dir: Path) -> list[Check]:
    """Checks all invariants by the files of a run directory.

    Raises:
        Unavailable: It is no run directory, or cannot be read.
    """
    paths = ledgers_in(run_dir)
    if not paths:
        raise Unavailable(f"{run_dir} holds no ledger of a run; name the directory of one", definite=True)
    stores = {str(path.parent.relative_to(run_dir)): path.parent for path in paths}
    ledgers = {name: Again(partial(read_rows, store / "ledger.jsonl")) for name, store in stores.items()}
    tapes = {str(path.relative_to(run_dir)): Again(partial(read_lines, path)) for path in sorted(tapes_in(run_dir))}
    published, heads, dropped = published_versions(tapes), main_ledger(ledgers), newest_dropped(paths)
    begun = {(each.fragment_id, each.version): each for each in lineages(heads, dropped)}
    given_up = {(p, version) for (p, _), each in begun.items() for version in each.given_up} - ancestors(heads, begun)
    rows = Again(partial(standing, ledgers, heads))
    merged = Again(lambda: (row for row in rows if _key(row) not in given_up))
    walk = _Walk(heads, dropped)
    for name, lines in tapes.items():
        walk.tape(name, lines)
    walk.claimed()
    walk.published(published.keys() - given_up)
    walk.heads(heads, begun, given_up)
    walk.rows(rows, given_up)
    growth = [walk.ledger(name, ledger, published) for name, ledger in ledgers.items()]
    walk.report(_report_of(run_dir))
    went_behind = {p for (p, _), each in begun.items() if p in dropped and each.kept < dropped[p].version}
    books = [books_agree(name, newest_books(store), merged, dropped, went_behind) for name, store in stores.items()]
    return [
        *growth,
        *(walk.gap, walk.content, walk.once, *data_checks(tapes, merged), walk.weights, walk.lost, walk.durable),
        walk.epochs,
        *books,
        *(walk.balance, walk.reasons),
    ]


def left_out(run_dir: Path) -> list[str]:
    """Returns a sentence for each tape and ledger that is not whole: the rest was not checked."""
    said = [(path.relative_to(run_dir), gone_of(path)) for path in sorted(tapes_in(run_dir))]
    said += [(path.relative_to(run_dir), gone_of(path, "ledger")) for path in ledgers_in(run_dir)]
    return [f"{name}: {gone.sentence()}: what they told is not checked" for name, gone in said if gone is not None]


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
    """Returns (fragment, version) -> digest of the versions that aggregators noted as published."""
    return {
        (note.fragment, note.version): note.digest
        for lines in tapes.values()
        for line in lines
        if isinstance(note := note_in(line), VersionCommitted)
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Again:
    """Lines read from a file anew at each iteration; none stays in memory."""

    read: Callable[[], Iterable[Line]]

    def __iter__(self) -> Iterator[Line]:
        """Reads them from the beginning."""
        return iter(self.read())


def main_ledger(ledgers: Files) -> list[Line]:
    """Returns the head of one row per (fragment, version) over all ledgers, in this order.

    Where two differ the later epoch's stands: the other was never published, or the check of contents says so.
    """
    heads: dict[Key, Line] = {}
    for ledger in ledgers.values():
        for row in ledger:
            known = heads.get(_key(row))
            if known is None or row["epoch"] >= known["epoch"]:
                heads[_key(row)] = head_of(row)
    return [heads[key] for key in sorted(heads)]


def standing(ledgers: Files, heads: Iterable[Line]) -> Iterator[Line]:
    """Yields the rows whose heads stand, one for each, in no order."""
    open_ = {_key(head): (head["epoch"], head["digest"]) for head in heads}
    for ledger in ledgers.values():
        for row in ledger:
            if open_.get(_key(row)) == (row["epoch"], row["digest"]):
                del open_[_key(row)]
                yield row


def ancestors(rows: Iterable[Line], begun: Mapping[Key, Lineage]) -> set[Key]:
    """Returns the versions from which the newest ones were made.

    Versions that a lineage gave up may be among them: a later one went back to a snapshot of theirs.
    """
    newest: dict[int, int] = {}
    for row in rows:
        newest[row["fragment_id"]] = max(row["fragment_version"], newest.get(row["fragment_id"], -1))
    found: set[Key] = set()
    for p, version in newest.items():
        while version >= 0:
            found.add((p, version))
            version = begun[p, version].kept if (p, version) in begun else version - 1
    return found


def _key(row: Line) -> Key:
    return row["fragment_id"], row["fragment_version"]


# --- the checks -------------------------------------------------------------------------------------------------


class _Walk:
    """The checks of one run, filled by walking through its tapes, and then its ledgers.

    Args:
        heads: Heads of the rows of all ledgers (:func:`main_ledger`).
        dropped: Fragment -> the newest version whose line was dropped.
    """

    def __init__(self, heads: Iterable[Line], dropped: Mapping[int, Carried]) -> None:
        self.gap = Check(1, "no version is missing")
        self.content = Check(1, "a version names one content")
        self.once = Check(2, "each range is merged at most once")
        self.weights = Check(2, "merge weights add up to at most 1")
        self.lost = Check(3, "nothing that was published is lost")
        self.durable = Check(3, "nothing is published before it is durable")
        self.epochs = Check(5, "epochs grow, and each has one publisher")
        self.balance = Check(4, "trained = merged + wasted + in flight")
        self.reasons = Check(8, "every refusal has a reason")
        self._dropped = {p: each.version for p, each in dropped.items()}
        self._kept = {_key(head) for head in heads}
        self._newest: dict[int, int] = defaultdict(lambda: -1, self._dropped)
        for p, version in self._kept:
            self._newest[p] = max(self._newest[p], version)
        self._heard: set[str] = set()
        self._claims: dict[tuple[int, str], list[str]] = defaultdict(list)
        self._contents, self._in_epoch = Contents(), Contents()
        self._ranges, self._speakers = MergedRanges(), Epochs()

    def tape(self, name: str, lines: Iterable[Line]) -> None:
        """Checks the events and decisions of an aggregator, life by life.

        Where lines are missing, which a killed process still had in memory, a full disk refused, or were in a segment
        that is gone, nothing is said of what was durable when. Each life has an epoch above those before; one whose
        store was lost has any, and publishes nothing.
        """
        shard, epoch, before, lives, waits = 0, 0, 0, 0, True
        durable: dict[int, int] = {}
        whole = True
        for line in chain(
            lines, [{"note": AggregatorStarted.name, "fields": {"epoch": math.inf, "phase": ""}}]
        ):  # the last life's end
            if line.get("missing"):
                whole, epoch, waits = False, 0, True
                shard = (line.get("life") or {}).get("config", {}).get("shard", shard)
            elif "gap" in line:
                whole = False
            elif "tape" in line:
                shard = line.get("config", {}).get("shard", 0)
                durable = {commit["fragment_id"]: commit["fragment_version"] for commit in line["commits"]}
                whole = True
            elif line.get("event") == "persisted":
                durable[line["fragment_id"]] = max(line["fragment_version"], durable.get(line["fragment_id"], -1))
            elif line.get("kind") == "heartbeat":
                self._hear(name, line["sender"], line["body"]["versions"])
            match note_in(line):
                case AggregatorStarted(epoch=started):
                    self.epochs.fact("" if waits else grows("the epoch of a life", before, epoch), name)
                    before, epoch, lives, waits = max(before, epoch), started, lives + 1, False
                case StoreFallenBehind():
                    waits = True
                case VersionCommitted(fragment=p, version=version, digest=digest):
                    key = p, version
                    self.content.fact(self._contents.name(key, digest), name)
                    self.durable.fact(durable_before(key, durable.get(p, -1), "published") if whole else "", name)
                    if epoch:
                        self.epochs.fact(self._speakers.speak(shard, epoch, f"{name}, life {lives}"))
                case RoundClosed(reason=reason):
                    self.reasons.fact("" if reason else "a round closed for no reason", name)
                case (ContributionRefused() | ContributionRetry() | MessageRefused() | JoinRefused()) as refused:
                    self.reasons.fact(has_reason(refused.name, refused.reason), name)
                case _:
                    pass

    def _hear(self, tape: str, island: str, versions: Sequence[int]) -> None:
        self._heard.add(island)
        for p, version in enumerate(versions):
            said = durable_before((p, version), self._newest[p], f"at {island}")
            if not said:
                self.lost.fact("")
            elif version <= MOST_VERSION:
                self._claims[p, island].append(f"{tape}: {said}")

    def claimed(self) -> None:
        """Checks what islands claim to hold beyond all ledgers.

        One island may lie: an island that most others contradict is not believed, as by an aggregator
        (:class:`aggregator.rounds.recovery.Peers`).
        """
        claiming = Counter(p for p, _ in self._claims)
        for (p, _), sentences in self._claims.items():
            for said in sentences if 2 * claiming[p] >= len(self._heard) else ():
                self.lost.fact(said)

    def published(self, keys: Iterable[Key]) -> None:
        """Checks that versions that were published, and not given up since, are in a ledger."""
        for p, version in keys:
            lost = f"version {version} of fragment {p} was published and is in no ledger"
            self.lost.fact("" if (p, version) in self._kept or version <= self._dropped.get(p, -1) else lost)

    def heads(self, heads: Iterable[Line], begun: Collection[Key], given_up: Collection[Key]) -> None:
        """Checks that contents are those published, epochs follow versions, and no version is missing.

        The first version of a new lineage, which is in ``begun``, follows whatever was kept; so do those behind lines
        that were dropped.
        """
        epochs: dict[int, int] = {}
        newest = dict(self._dropped)
        for head in heads:
            key, epoch = _key(head), head["epoch"]
            p, version = key
            self.content.fact(self._contents.name(key, head["digest"]), "the ledgers")
            what = f"the epoch of fragment {p}, version {version},"
            self.epochs.fact(grows(what, epochs.get(p, 0), epoch, or_stays=True))
            epochs[p] = epoch
            if key in given_up or version <= self._dropped.get(p, -1):
                continue
            before = newest.get(p, -1)
            follows = version == before + 1 or key in begun
            self.gap.fact("" if follows else f"fragment {p} goes from version {before} to {version}")
            newest[p] = version

    def rows(self, rows: Iterable[Line], given_up: Collection[Key]) -> None:
        """Checks the weights of each version, and that no range of steps is merged twice.

        Versions that were given up do not count. It does not matter which life of an island sent a range.
        """
        for row in rows:
            key = _key(row)
            self.weights.fact(weights_fit(key, [each["merge_weight"] for each in row["contributions"]]))
            for each in row["contributions"] if key not in given_up else ():
                a, b = each["steps"]["from_step"], each["steps"]["to_step"]
                self.once.fact(self._ranges.merge((each["island_id"], key[0]), a, b), f"version {key[1]}")

    def ledger(self, name: str, rows: Iterable[Line], published: Mapping[Key, str]) -> Check:
        """Checks a store's ledger by itself: versions grow, and only unpublished ones are written again.

        Versions need not follow each other: a store that was away gets the newest versions, and no others. One epoch
        never gives a version two contents; of a tail that was never published, a later epoch may take the place.
        """
        check = Check(1, f"{name}: versions grow")
        written: dict[Key, str] = {}
        newest: dict[int, int] = {}
        for row in rows:
            key, digest = _key(row), row["digest"]
            unseen = key in written and published.get(key) != written[key]
            check.fact("" if unseen else grows(f"fragment {key[0]}", newest.get(key[0], -1), key[1]))
            self.content.fact(self._in_epoch.name((*key, row["epoch"]), digest), name)
            newest[key[0]], written[key] = key[1], digest
        return check

    def report(self, report: Line | None) -> None:
        """Checks the sums of the aggregator's own report, and that its refusals have reasons."""
        if report is None:
            return
        tokens = report["tokens"]
        trained = tokens["trained"]
        self.balance.fact(balanced(trained, tokens["merged"], tokens["wasted"].values(), tokens["in_flight"]))
        of_islands = sum(each["tokens"] for each in report["islands"].values())
        self.balance.fact("" if trained == of_islands else f"{trained} trained, by islands {of_islands}")
        for reason in report.get("refusals", {}):
            self.reasons.fact(has_reason("the report counts refusals", reason))


def books_agree(
    store: str,
    books: Mapping[int, Books | str],
    rows: Iterable[Line],
    dropped: Mapping[int, Carried] | None = None,
    went_behind: Collection[int] = (),
) -> Check:
    """Checks that the books in a store's newest commits give each island the ledger's merged tokens.

    Args:
        store: Its name.
        books: Books of its newest commits.
        rows: Rows of the versions that were not given up.
        dropped: Fragment -> the newest version whose line was dropped, with what had been merged by then.
        went_behind: Fragments that went back to a version before that one: nobody knows the sums any more.
    """
    check = Check(4, f"{store}: the books in the commits agree with the ledger")
    dropped = dropped or {}
    merged = {p: Counter(dropped[p].merged if p in dropped else None) for p in books}
    unpublished: set[int] = set()  # the tail of a leader that lost its lease: it is dropped when that one comes back
    for row in rows:
        p, version = _key(row)
        found = books.get(p)
        if found is None or isinstance(found, str) or version > found[0]:
            continue
        if p in dropped and version <= dropped[p].version:  # another store's ledger reaches further back
            continue
        if version == found[0] and row["digest"] != found[1]:
            unpublished.add(p)
        for each in row["contributions"]:
            merged[p][each["island_id"]] += each["steps"]["to_tokens"] - each["steps"]["from_tokens"]
    for p, found in books.items():
        if isinstance(found, str):
            check.fact(f"fragment {p}: {found}")
        elif p in unpublished or p in went_behind:
            continue
        elif p not in dropped or (dropped[p].merged is not None and found[0] >= dropped[p].version):
            booked = merged_by_island(found[2])
            for island in sorted({*booked, *merged[p]}):
                has, should = booked[island], merged[p][island]
                differ = f"fragment {p}: {island} has {has} merged tokens booked, the ledger {should}"
                check.fact("" if has == should else differ)
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
