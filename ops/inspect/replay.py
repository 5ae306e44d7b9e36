"""``atoll replay``: plays an event tape into the same core again, and compares the decisions.

A tape records what the aggregator was told and what it decided. The same events give the same decisions; with
``--record-payloads`` during the run they give the same bytes. So a tape that agrees with its replay proves that what
is in the ledger is what the rules say, and one that does not names the line where they part. What a tape does not tell,
nobody can check: it is counted, said, and no success unless ``--allow-missing`` says that it may be
(:class:`ops.inspect.replay_result.Coverage`). What the rule of segments dropped is said too, and is no failure: lives
that are whole are checked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggregator.daemon import ENVIRONMENT
from aggregator.rounds.recovery import lineages
from aggregator.state.records import check_ledger_line
from aggregator.store.ledger_file import dropped_before, head_of, is_of_segment, newest_dropped, read_rows
from aggregator.store.segments import is_tape, segments_of
from aggregator.store.tape import numbered_lines
from broker.base.errors import ConfigError, Unavailable, cure_of
from broker.wire.schema import Unfit
from ops.inspect.dropped import Gone, gone_of
from ops.inspect.replay_core import Replay
from ops.inspect.replay_result import Counts, Coverage, Difference, Key, PartReason, fingerprint
from ops.inspect.tapes import ledgers_in, tapes_in

if TYPE_CHECKING:
    from ops.inspect.rederivation import Rederivation

PROGRESS_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of replaying one tape.

    Attributes:
        tape: The file.
        counts: Counts of what was played.
        derived: Versions whose bytes were derived again and agree; None if nothing was recorded.
        alone: Versions whose round is not on the tape, and whose recording agrees with the ledger.
        unrecorded: Versions without a recording, beside others that have one.
        unclaimed: Recordings of rounds that led to no version, as a crash leaves them.
        ledger_rows: Lines of the ledger that agree with the tape; None if there is no ledger beside it.
        gone: Segments of the tape that are not there any more; None if it is whole.
        tells_from: Fragment -> the oldest version that the tape names.
        difference: The first one; None if all agree.
    """

    tape: str
    counts: Counts
    derived: int | None
    alone: int
    unrecorded: int
    unclaimed: int
    ledger_rows: int | None
    gone: Gone | None
    tells_from: Mapping[int, int]
    difference: Difference | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll replay``."""
    parser.add_argument("tape", type=Path, metavar="RUN_DIR|TAPE", help="directory of a run, or its events.jsonl")
    parser.add_argument(
        "--allow-missing", action="store_true", help="succeed though some versions cannot be checked, as after a crash"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.epilog = f"""{parser.epilog}

exit status:
  0  everything was checked and agrees; with --allow-missing, everything that is there. Segments that the
     setting tape_segments dropped are said to be gone, and are no failure where a life is left that is whole
  1  something differs, and a line says where; or something is missing; or a file cannot be read
  2  there is no tape"""


def run(args: argparse.Namespace) -> int:
    """Replays, prints the result, and returns the exit code.

    Raises:
        ConfigError: There is no tape, or it has a format or settings that this program does not know.
        Unavailable: A file cannot be read.
    """
    tapes = tapes_in(args.tape) if args.tape.is_dir() else [args.tape]
    if not tapes or not is_tape(tapes[0]):
        raise ConfigError("RUN_DIR|TAPE", str(args.tape), "must be the directory of a run, or an event tape (--tape)")
    ledgers = ledgers_in(args.tape) if args.tape.is_dir() else []
    try:
        found, covered = replay_all(tapes, ledgers=ledgers)
    except OSError as err:
        what = f"cannot read {err.filename or tapes[0]}: {err.strerror}; {cure_of(err)}"
        raise Unavailable(what, definite=True) from err
    same = all(each.difference is None for each in found)
    missing = covered.empty or not (covered.complete or args.allow_missing)
    if args.json:
        verdict: dict[str, Any] = {"same": same, "complete": covered.complete, "coverage": covered.to_json()}
        print(json.dumps(verdict | {"tapes": [asdict(each) for each in found]}), flush=True)
    else:
        print("\n\n".join([*map(render, found), _verdict(covered, same=same, missing=missing)]), flush=True)
    return 0 if same and not missing else 1


def replay_all(tapes: Sequence[Path], *, ledgers: Sequence[Path] = ()) -> tuple[list[Replayed], Coverage]:
    """Plays the tapes of one run, each against the ledger and the payloads beside it.

    Args:
        tapes: Tapes of all aggregators that led.
        ledgers: Ledgers of their stores.

    Raises:
        OSError: A file cannot be read.
    """
    rows = {path: _rows_in(path) for path in ledgers} if len(ledgers) > 1 else {}
    every = {key: row for of_one in rows.values() for key, row in of_one.items()}
    first_ones = lineages((every[key] for key in sorted(every)), newest_dropped(rows))
    begun = {(each.fragment_id, each.version) for each in first_ones}
    found, seen = [], []
    for tape in tapes:
        beside, ledger = tape.with_suffix(".payloads"), tape.parent / "store" / "ledger.jsonl"
        elsewhere = set().union(*(of_one for path, of_one in rows.items() if path != ledger))
        own = ledger if ledger in ledgers else None
        recorded = beside if beside.is_dir() else None
        replayed, of_it = replay(tape, payloads=recorded, ledger=own, elsewhere=elsewhere, begun=begun)
        found.append(replayed)
        seen.append(of_it)
    return found, Coverage.added(seen)


def _rows_in(ledger: Path) -> dict[Key, dict[str, Any]]:
    """Returns version -> the fields of its line that tell where a lineage begins."""
    return {(row["fragment_id"], row["fragment_version"]): head_of(row) for row in read_rows(ledger)}


def replay(
    tape: Path,
    *,
    payloads: Path | None = None,
    ledger: Path | None = None,
    elsewhere: Collection[Key] = (),
    begun: Collection[Key] = (),
) -> tuple[Replayed, Coverage]:
    """Plays a tape, one line in memory at a time.

    Args:
        tape: The file.
        payloads: Directory of its recorded rounds; None: only decisions are compared.
        ledger: The ledger of the same store, held against the tape; none, or none yet: it is left out.
        elsewhere: Versions that other ledgers of the run have.
        begun: Versions with which lineages begin, by all ledgers: a standby may have come later.

    Raises:
        OSError: A file cannot be read.
    """
    check: Rederivation | None = None
    if payloads is not None:
        for name, value in ENVIRONMENT.items():  # the aggregator's own, so that the arithmetic is the same
            os.environ.setdefault(name, value)
        from ops.inspect import rederivation  # with payloads only: it loads the numeric libraries

        check = rederivation.Rederivation(payloads)
    played, progress = Replay(check), _Progress(tape)
    difference = None
    for number, line in numbered_lines(tape):
        difference = played.take(number, line)
        if difference is not None:
            break
        progress.at(number)
    held = _Ledger(played, check)
    if difference is None and ledger is not None and is_tape(ledger):
        difference = held.against(ledger, elsewhere, begun)
    elif difference is None and check is not None:
        check.unclaimed = len(check.rounds_left())
    replayed = Replayed(
        tape=str(tape),
        counts=played.counts,
        derived=None if check is None else check.derived,
        alone=0 if check is None else check.alone,
        unrecorded=0 if check is None else check.unrecorded,
        unclaimed=0 if check is None else check.unclaimed,
        ledger_rows=held.rows,
        gone=gone_of(tape),
        tells_from=played.tells_from(),
        difference=difference,
    )
    covered = Coverage(
        checked=set(played.durable),
        unchecked=held.alone | played.unchecked,
        missing_lines=played.counts.missing + played.counts.torn + played.missing_lines,
        missing_recordings=played.missing_recordings + (replayed.unclaimed if held.rows is None else 0),
        lives=played.counts.lives,
    )
    return replayed, covered


def misweighted(row: Mapping[str, Any]) -> str:
    """Returns how the weights in a ledger line contradict each other; an empty text if they fit."""
    contributions = row["contributions"]
    total = math.fsum(each["token_weight"] for each in contributions)
    for each in contributions:
        share = each["token_weight"] / total if total else 0.0
        weight = share * each["staleness_weight"]
        if not math.isclose(each["merge_weight"], weight, rel_tol=1e-9, abs_tol=1e-12):
            return f"{each['island_id']} has merge weight {each['merge_weight']!r}, its other weights give {weight!r}"
    return ""


def skipped_versions(known: Iterable[Key], lineages: Iterable[Key]) -> list[Key]:
    """Returns the versions that are missing below ones that are known: each is made from the one before.

    Args:
        known: All that anybody knows of.
        lineages: The first versions of new lineages, which were made from none.
    """
    versions, begun = set(known), set(lineages)
    before = {(p, version - 1) for p, version in versions - begun if version > 0}
    return sorted(before - versions)


class _Ledger:
    """A ledger held against a played tape, and against recordings that the tape does not explain.

    Attributes:
        rows: Lines that the tape confirms; None before there was a ledger.
        alone: Versions that only the ledger tells of, and why they were not derived.
    """

    def __init__(self, played: Replay, check: Rederivation | None) -> None:
        self.rows: int | None = None
        self.alone: dict[Key, PartReason] = {}
        self._played = played
        self._check = check

    def against(self, ledger: Path, elsewhere: Collection[Key], begun: Collection[Key]) -> Difference | None:
        """Reads the ledger; returns the first line contradicted or missing, or the first such recording."""
        played, self.rows = self._played, 0
        left = frozenset() if self._check is None else self._check.rounds_left()
        recorded: dict[int, dict[str, Any]] = {}
        digests, seen, first_ones = dict(played.digests), set(elsewhere), set(begun)
        tells_from = played.tells_from()
        dropped = {p: each.version for p, each in dropped_before(ledger).items()}
        bytes_known = {(p, digest) for (p, _), digest in digests.items()}
        for number, row in numbered_lines(ledger):
            if row is None or is_of_segment(row):
                continue  # torn, or its version is missing below
            try:
                check_ledger_line(row)
            except Unfit as err:
                return self._difference(f"line {number} of {ledger} is nothing that an aggregator writes: {err}", row)
            key = row["fragment_id"], row["fragment_version"]
            seen.add(key)
            played.heard_of(row)
            of_known = (key[0], row["digest"]) in bytes_known or key[0] in dropped
            if key[1] > 0 and not row["contributions"] and of_known:
                first_ones.add(key)
            bytes_known.add((key[0], row["digest"]))
            said = f"line {number} of {ledger}: version {key[1]} of fragment {key[0]}"
            expected = played.fingerprints.get(key)
            if expected is not None and fingerprint(row) not in expected:
                return self._difference(f"{said} is not what the tape says", row)
            if expected is None and played.digests.get(key, row["digest"]) != row["digest"]:
                return self._difference(f"{said} has another digest than the tape says", row)
            digests[key] = row["digest"]
            wrong = misweighted(row) if expected is None else ""
            if wrong:
                return self._difference(f"{said}: {wrong}", row)
            self.rows += expected is not None
            if key not in played.durable and key not in played.unchecked:
                before = played.gone and key[1] < tells_from.get(key[0], math.inf)
                self.alone[key] = PartReason.DROPPED if before else PartReason.NO_TAPE
            if row["round_id"] in left and row["epoch"] in played.epochs and row["contributions"]:
                recorded[row["round_id"]] = row
        for p, version in sorted(played.durable - played.given_up - seen):
            if version > dropped.get(p, -1):
                what = f"{ledger} has no line for version {version} of fragment {p}, which was durable"
                return self._difference(what)
        ours = {p for p, _ in {*digests, *played.unchecked}}  # those of other shards are held against their own
        named = {key for key in (seen | played.unchecked.keys()) - played.given_up if key[0] in ours}
        for p, version in sorted({*skipped_versions(named, first_ones), *(named - seen)} - played.durable):
            if version <= dropped.get(p, -1):
                continue
            if not played.failover:
                what = f"{ledger} has no line for version {version} of fragment {p}, which later ones were made from"
                return self._difference(what)
            self.alone[p, version] = PartReason.NOWHERE  # to a store that was away only the newest versions are sent
        for round_id in sorted(left):
            assert self._check is not None
            wrong = self._check.left_over(round_id, recorded.get(round_id), digests)
            if wrong:
                return self._difference(wrong)
        return None

    def _difference(self, what: str, row: dict[str, Any] | None = None) -> Difference:
        return Difference(line=0, life=self._played.counts.lives, what=what, on_tape=None, replayed=row)


def render(replayed: Replayed) -> str:
    """Returns the result as text for people."""
    counts, found = replayed.counts, replayed.difference
    same = "the same" if found is None else "the same until then"
    lines = [f"{replayed.tape}: {_many(counts.lives, 'life', 'lives')} of the aggregator", ""]
    lines.append(f"  decisions  {counts.decisions:,} after {counts.events:,} events: {same}")
    lines.append(f"  versions   {counts.versions:,} derived from the tape")
    if replayed.derived is None:
        lines.append("  bytes      not checked: no payloads were recorded (--record-payloads)")
    else:
        left = f"; {replayed.unrecorded:,} were not recorded" if replayed.unrecorded else ""
        alone = f"; {replayed.alone:,} whose rounds are not on the tape" if replayed.alone else ""
        lines.append(f"  bytes      {replayed.derived:,} merged versions: {same}{alone}{left}")
    if replayed.ledger_rows is not None:
        lines.append(f"  ledger     {replayed.ledger_rows:,} lines: {same}")
    if counts.missing:
        lost = f"{counts.missing:,} lines were lost to a full disk, {counts.skipped:,} behind them cannot be followed"
        lines.append(f"  missing    {lost}")
    if counts.torn:
        lines.append(f"  torn       {_many(counts.torn, 'line was', 'lines were')} cut short")
    if replayed.gone is not None:
        lines.append(f"  gone       {replayed.gone.sentence()}")
        oldest = " ".join(f"{p}:{version}" for p, version in sorted(replayed.tells_from.items()))
        lines.append(f"             the oldest versions that it names: {oldest or 'none'}")
        if counts.beheaded:
            lines.append(f"             {counts.beheaded:,} lines of that life cannot be followed")
    if found is None:
        return "\n".join(lines)
    place = f"line {found.line:,}, life {found.life}: " if found.line else ""
    lines += ["", f"DIFFERENCE at {place}{found.what}" if place else f"DIFFERENCE: {found.what}"]
    for label, value in (("on the tape", found.on_tape), ("replayed", found.replayed)):
        if value is not None:
            text = json.dumps(value)
            lines.append(f"  {label}: {text if len(text) <= 1000 else text[:1000] + ' ...'}")
    return "\n".join(lines)


def _verdict(covered: Coverage, *, same: bool, missing: bool) -> str:
    """Returns the verdict on all tapes."""
    said = covered.sentence()
    if not same:
        return f"{said}\nthe replay DIFFERS"
    if covered.empty:
        return f"{said}\nNOTHING was checked"
    if missing:
        cure = "look for the rest, or take what is there with --allow-missing"
        return f"{said}\nINCOMPLETE: what was checked agrees; {cure}"
    return f"{said}\nthe replay agrees with {'the tape' if covered.complete else 'what is there of the tape'}"


def _many(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


class _Progress:
    """Prints progress on a terminal every few seconds: a tape of days takes minutes."""

    def __init__(self, tape: Path) -> None:
        self._bytes = sum(each.stat().st_size for each in segments_of(tape).values() if each.exists())
        self._began_s = self._told_s = time.monotonic()

    def at(self, number: int) -> None:
        """Notes that line ``number`` was played."""
        if number % 1000 or not sys.stderr.isatty():
            return
        now_s = time.monotonic()
        if now_s - self._told_s >= PROGRESS_EVERY_S:
            self._told_s = now_s
            rate = number / (now_s - self._began_s)
            print(f"atoll: {number:,} lines of {self._bytes / 1e6:,.0f} MB, {rate:,.0f} per second", file=sys.stderr)
