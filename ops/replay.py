"""``atoll replay``: plays the event tape of a run into the same core again, and compares every decision and version.

A tape records what the aggregator was told and what it decided. The same events give the same decisions; with
``--record-payloads`` during the run they give the same bytes. So a tape that agrees with its replay proves that what
is in the ledger is what the rules say, and one that does not names the line where they part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from aggregator.daemon import ENVIRONMENT
from aggregator.replay import Counts, Difference, Replay, fingerprint
from aggregator.tape import numbered_lines
from broker.errors import ConfigError, Unavailable
from ops.explain import tapes_in

PROGRESS_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came of a replay.

    Attributes:
        tape: The file.
        counts: What was played.
        derived: Versions whose bytes were derived again and agree; None if nothing was recorded.
        unrecorded: Versions without a recording, beside others that have one.
        ledger_rows: Lines of the ledger that agree with the tape; None if there is no ledger beside it.
        difference: The first one; None if all agree.
    """

    tape: str
    counts: Counts
    derived: int | None
    unrecorded: int
    ledger_rows: int | None
    difference: Difference | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll replay``."""
    parser.add_argument("tape", type=Path, metavar="RUN_DIR|TAPE", help="directory of a run, or its events.jsonl")
    parser.add_argument(
        "--payloads", type=Path, metavar="DIR", help="recorded payloads (default: TAPE's .payloads beside it, if any)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.epilog = f"""{parser.epilog}

exit status:
  0  everything that is on the tape agrees; what is missing from it is said
  1  something differs, and a line says where; or a file cannot be read
  2  there is no tape"""


def run(args: argparse.Namespace) -> int:
    """Replays, says what came of it, and returns the exit code.

    Raises:
        ConfigError: There is no tape, or it has a format or settings that this program does not know.
        Unavailable: A file cannot be read.
    """
    tapes = tapes_in(args.tape) if args.tape.is_dir() else [args.tape]
    if not tapes or not tapes[0].is_file():
        raise ConfigError("RUN_DIR|TAPE", str(args.tape), "must be the directory of a run, or an event tape (--tape)")
    if args.payloads is not None and not args.payloads.is_dir():
        cure = "must be a directory of recorded rounds (--record-payloads)"
        raise ConfigError("payloads", str(args.payloads), cure)
    found = []
    for tape in tapes:
        payloads = args.payloads if args.payloads is not None else tape.with_suffix(".payloads")
        ledger = tape.parent / "store" / "ledger.jsonl" if args.tape.is_dir() else None
        try:
            found.append(replay(tape, payloads=payloads if payloads.is_dir() else None, ledger=ledger))
        except OSError as err:
            raise Unavailable(f"cannot read {err.filename or tape}: {err.strerror}", definite=True) from err
    same = all(each.difference is None for each in found)
    if args.json:
        print(json.dumps({"same": same, "tapes": [asdict(each) for each in found]}), flush=True)
    else:
        print("\n\n".join(map(render, found)), flush=True)
    return 0 if same else 1


def replay(tape: Path, *, payloads: Path | None = None, ledger: Path | None = None) -> Replayed:
    """Plays a tape, one line in memory at a time.

    Args:
        tape: The file.
        payloads: Directory of its recorded rounds; None: only decisions are compared.
        ledger: The ledger of the same store, held against the tape; none, or none yet: it is left out.

    Raises:
        OSError: A file cannot be read.
    """
    check = None
    if payloads is not None:
        for name, value in ENVIRONMENT.items():  # the aggregator's own, so that the arithmetic is the same
            os.environ.setdefault(name, value)
        from aggregator.rederivation import Rederivation  # with payloads only: it loads the numeric libraries

        check = Rederivation(payloads)
    played, progress = Replay(check), _Progress(tape)
    difference = None
    for number, line in numbered_lines(tape):
        difference = played.take(number, line)
        if difference is not None:
            break
        progress.at(number)
    rows = None
    if difference is None and ledger is not None and ledger.is_file():
        rows, difference = _held_against(ledger, played)
    return Replayed(
        tape=str(tape),
        counts=played.counts,
        derived=None if check is None else check.derived,
        unrecorded=0 if check is None else check.unrecorded,
        ledger_rows=rows,
        difference=difference,
    )


def _held_against(ledger: Path, played: Replay) -> tuple[int, Difference | None]:
    """Returns how many lines of a ledger the tape confirms, and the first that it contradicts or that is missing."""
    confirmed, seen = 0, set()
    for number, row in numbered_lines(ledger):
        key = None if row is None else (row.get("fragment_id"), row.get("fragment_version"))
        seen.add(key)
        expected = played.fingerprints.get(key) if key is not None else None  # type: ignore[arg-type]
        if row is None or expected is None:
            continue  # torn, or of a moment that is not on the tape
        if fingerprint(row) not in expected:
            what = f"line {number} of {ledger}: version {key[1]} of fragment {key[0]} is not what the tape says"  # type: ignore[index]
            return confirmed, Difference(line=0, life=played.counts.lives, what=what, on_tape=None, replayed=row)
        confirmed += 1
    for p, version in sorted(played.durable - seen):
        what = f"{ledger} has no line for version {version} of fragment {p}, which was durable"
        return confirmed, Difference(line=0, life=played.counts.lives, what=what)
    return confirmed, None


def render(replayed: Replayed) -> str:
    """Returns the result as text for people."""
    counts, found = replayed.counts, replayed.difference
    same = "the same" if found is None else "the same until then"
    lines = [f"{replayed.tape}: {_many(counts.lives, 'life', 'lives')} of the aggregator", ""]
    lines.append(f"  decisions  {counts.decisions:,} after {counts.events:,} events: {same}")
    parts = [f"{counts.versions:,} derived from the tape"]
    if counts.unwitnessed:
        parts.append(f"{counts.unwitnessed:,} not on it (made in the last moments before a crash, or elsewhere)")
    lines.append(f"  versions   {'; '.join(parts)}")
    if replayed.derived is None:
        lines.append("  bytes      not checked: no payloads were recorded (--record-payloads)")
    else:
        left = f"; {replayed.unrecorded:,} were not recorded" if replayed.unrecorded else ""
        lines.append(f"  bytes      {replayed.derived:,} merged versions: {same}{left}")
    if replayed.ledger_rows is not None:
        lines.append(f"  ledger     {replayed.ledger_rows:,} lines: {same}")
    if counts.missing:
        lost = f"{counts.missing:,} lines were lost to a full disk, {counts.skipped:,} behind them cannot be followed"
        lines.append(f"  missing    {lost}")
    if found is None:
        return "\n".join([*lines, "", "the replay agrees with the tape"])
    place = f"line {found.line:,}, life {found.life}: " if found.line else ""
    lines += ["", f"DIFFERENCE at {place}{found.what}" if place else f"DIFFERENCE: {found.what}"]
    for label, value in (("on the tape", found.on_tape), ("replayed", found.replayed)):
        if value is not None:
            text = json.dumps(value)
            lines.append(f"  {label}: {text if len(text) <= 1000 else text[:1000] + ' ...'}")
    return "\n".join(lines)


def _many(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


class _Progress:
    """A line on a terminal every few seconds: a tape of days takes minutes."""

    def __init__(self, tape: Path) -> None:
        self._bytes = max(1, tape.stat().st_size)
        self._began_s = self._told_s = time.monotonic()

    def at(self, number: int) -> None:
        """Line ``number`` was played."""
        if number % 1000 or not sys.stderr.isatty():
            return
        now_s = time.monotonic()
        if now_s - self._told_s >= PROGRESS_EVERY_S:
            self._told_s = now_s
            rate = number / (now_s - self._began_s)
            print(f"atoll: {number:,} lines of {self._bytes / 1e6:,.0f} MB, {rate:,.0f} per second", file=sys.stderr)
