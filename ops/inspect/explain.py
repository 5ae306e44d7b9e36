"""``atoll explain``: lists the contributions of a version, and why other islands are not in it.

The ledger of the store has who is in it. The event tape alone has why the others are not: without one, or for the last
moments before a crash, that part of the answer is missing, and the answer says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from aggregator.rounds.recovery import Lineage, lineages
from aggregator.store.ledger_file import read_rows
from aggregator.store.segments import is_tape
from aggregator.store.tape import read_lines
from broker.wire.errors import ConfigError, Unavailable
from ops import curve
from ops.evaluation.curve_file import read_points
from ops.inspect.absence import Absence, RoundStory, Storyteller, Target
from ops.inspect.dropped import gone_of
from ops.text import PLAIN_WIDTH

#: An aggregator's tape, in the directory of its run or in its own.
TAPE = "events.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """One contribution in a version.

    Attributes:
        steps: Inner steps [from, to) that it brought.
        share: Its merge weight: share of the step after staleness; the sum over a version is at most 1.
        staleness: In versions.
        fresh: It answered this very round; otherwise it had come too late for an earlier one, and was held.
    """

    island: str
    incarnation: int
    steps: tuple[int, int]
    tokens: int
    share: float
    token_weight: float
    staleness: float
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One version, or one round that led to none.

    Attributes:
        version: None if the round was cancelled.
        closed: Why the round closed when it did; empty if it is not known.
        took_s: From its opening to its closing; None if it is not known.
        absent: The other islands known then; None if the tape does not tell of this round.
        lineage: The new lineage that the version begins, or that gave it up; None for any other version.
        gone: What of the tape is gone and would have told more, in words; empty: nothing.
    """

    fragment: int
    version: int | None
    round_id: int
    epoch: int | None
    digest: str
    flush: bool
    closed: str
    took_s: float | None
    contributors: tuple[Contributor, ...]
    absent: tuple[Absence, ...] | None
    lineage: Lineage | None = None
    gone: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll explain``."""
    parser.add_argument(
        "version",
        metavar="VERSION",
        help="FRAGMENT:VERSION, such as 3:41; or FRAGMENT, for its newest version; or round:ID",
    )
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="directory of a run, or a store by itself")
    parser.add_argument("--tape", type=Path, metavar="FILE", help="event tape (default: events.jsonl in RUN_DIR)")
    parser.add_argument("--json", action="store_true", help="print the explanation as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the explanation; returns the exit code.

    Raises:
        ConfigError: ``VERSION`` cannot be read, or there is no run in the directory.
        Unavailable: There is no such version, or a file cannot be read.
    """
    target = target_of(args.version)
    tapes = tapes_in(args.directory) if args.tape is None else [args.tape]
    ledgers = ledgers_in(args.directory)
    if not ledgers and not any(map(is_tape, tapes)):
        raise ConfigError("RUN_DIR", str(args.directory), "must be the directory of a run or a store, with a ledger")
    if args.tape is not None and not is_tape(args.tape):
        raise ConfigError("tape", str(args.tape), "must be an event tape (`aggregator --tape FILE` writes one)")
    try:
        found = explain(target, ledgers=ledgers, tapes=tapes)
    except OSError as err:
        raise Unavailable(f"cannot read {err.filename}: {err.strerror}", definite=True) from err
    if found is None:
        raise Unavailable(f"{args.directory} knows no {args.version}: {_newest(ledgers)}", definite=True)
    judged = None
    if found.version is not None:
        judged = curve.first_with(read_points(args.directory), found.fragment, found.version)
    if args.json:
        print(json.dumps(asdict(found) | {"evaluated": None if judged is None else judged.to_json()}), flush=True)
    else:
        print(render(found) + ("" if judged is None else f"\nfirst {curve.sentence(judged)}"), flush=True)
    return 0


def target_of(text: str) -> Target:
    """Returns which version ``text`` names; raises ConfigError if it names none."""
    kind, colon, rest = text.partition(":")
    try:
        if kind == "round":
            return Target(round_id=int(rest))
        return Target(fragment=int(kind), version=int(rest) if colon else None)
    except ValueError:
        cure = "must be FRAGMENT:VERSION such as 3:41, FRAGMENT for its newest, or round:ID"
        raise ConfigError("VERSION", text, cure) from None


def explain(target: Target, *, ledgers: Sequence[Path], tapes: Sequence[Path]) -> Explanation | None:
    """Returns what is known of a version; None if there is no such version, or round.

    Every file is read once, line by line; of none more than the wanted round is kept.

    Args:
        target: Which version or round.
        ledgers: Of the stores of the run: beside the leader's those of its standbys, which may have led.
        tapes: Likewise.

    Raises:
        OSError: One cannot be read.
    """
    row: Mapping[str, Any] | None = None
    for ledger in ledgers:
        for each in read_rows(ledger):
            newer = row is None or each["fragment_version"] >= row["fragment_version"]
            if _fits(each, target) and newer:
                row = each  # of several the last one: a version 0 may have been seeded anew
    if row is not None and row["contributions"]:  # the newest one by the ledger is what the tape is asked about
        target = Target(round_id=row["round_id"])
    story = None
    for tape in tapes:
        teller = Storyteller(target)
        for line in read_lines(tape):
            teller.take(line)
        found = teller.found
        # Rounds of two leaders may share an id, where one of them was cut off: the version tells them apart.
        if found is not None and (row is None or found.committed.get("digest") == row["digest"]):
            story = found
    if row is None and story is None:
        return None
    if row is None:
        assert story is not None
        gone = _gone_from(tapes) if story.beheaded else ""
        return dataclasses.replace(_explanation(_as_row(story), story), gone=gone)
    lineage = _lineage_of(row["fragment_id"], row["fragment_version"], ledgers)
    gone = _gone_from(tapes) if story is None or story.beheaded else ""
    return dataclasses.replace(_explanation(row, story), lineage=lineage, gone=gone)


def _gone_from(tapes: Sequence[Path]) -> str:
    """Says what is gone of the tapes of a run; an empty text if they are whole."""
    found = [(tape, gone_of(tape)) for tape in tapes]
    several = len(tapes) > 1
    said = [f"{tape}: {gone.sentence()}" if several else gone.sentence() for tape, gone in found if gone is not None]
    return "; ".join(said)


def _lineage_of(p: int, version: int, ledgers: Sequence[Path]) -> Lineage | None:
    """Returns the new lineage of a fragment that begins with a version, or went back behind it."""
    rows = {
        row["fragment_version"]: {key: row[key] for key in ("fragment_id", "fragment_version", "digest")}
        | {"contributions": bool(row["contributions"])}
        for ledger in ledgers
        for row in read_rows(ledger)
        if row["fragment_id"] == p
    }
    for each in lineages(rows[version] for version in sorted(rows)):
        if version == each.version or version in each.given_up:
            return each
    return None


def _fits(row: Mapping[str, Any], target: Target) -> bool:
    if target.round_id is not None:
        return bool(row.get("round_id") == target.round_id and row.get("contributions"))
    return row.get("fragment_id") == target.fragment and target.version in (None, row.get("fragment_version"))


def _explanation(row: Mapping[str, Any], story: RoundStory | None) -> Explanation:
    """Returns what the line of a ledger says, and the story that a tape tells of its round, if any does."""
    contributors = tuple(
        Contributor(
            island=each["island_id"],
            incarnation=each["incarnation"],
            steps=(each["steps"]["from_step"], each["steps"]["to_step"]),
            tokens=each["steps"]["to_tokens"] - each["steps"]["from_tokens"],
            share=each["merge_weight"],
            token_weight=each["token_weight"],
            staleness=each["staleness"],
            fresh=each["fresh"],
        )
        for each in row["contributions"]
    )
    took_s = None
    if story is not None and story.closed_at_s is not None:
        took_s = round(story.closed_at_s - story.opened_at_s, 4)
    return Explanation(
        fragment=row["fragment_id"],
        version=row["fragment_version"],
        round_id=row["round_id"],
        epoch=row["epoch"],
        digest=row["digest"],
        flush=story is not None and story.flush,
        closed="" if story is None else story.reason,
        took_s=took_s,
        contributors=contributors,
        absent=None if story is None else tuple(story.absences()),
    )


def _as_row(story: RoundStory) -> dict[str, Any]:
    """Returns what the tape alone has of a version, as a ledger would have it."""
    return {
        "fragment_id": story.fragment,
        "fragment_version": story.version,
        "round_id": story.round_id,
        "epoch": None,
        "digest": story.committed.get("digest", ""),
        "contributions": [
            {
                **each,
                "island_id": each["island"],
                "steps": {
                    "from_step": each["steps"][0],
                    "to_step": each["steps"][1],
                    "from_tokens": 0,
                    "to_tokens": each["tokens"],
                },
            }
            for each in story.committed.get("contributions", ())
        ],
    }


def tapes_in(run_dir: Path) -> list[Path]:
    """Returns the event tapes in a run directory: the aggregator's, and those of standbys that led."""
    folders = {found.parent for found in run_dir.glob("*/events*.jsonl*")}
    return [each for each in (run_dir / TAPE, *(folder / TAPE for folder in sorted(folders))) if is_tape(each)]


def ledgers_in(directory: Path) -> list[Path]:
    """Returns the ledgers in a run directory, or the one of a store."""
    places = (directory / "ledger.jsonl", directory / "store" / "ledger.jsonl", *directory.glob("*/store/ledger.jsonl"))
    return [each for each in places if each.is_file()]


def _newest(ledgers: Sequence[Path]) -> str:
    """Says which versions there are."""
    newest: dict[int, int] = {}
    for ledger in ledgers:
        for row in read_rows(ledger):
            newest[row["fragment_id"]] = max(row["fragment_version"], newest.get(row["fragment_id"], -1))
    if not newest:
        return "no version was made yet"
    return "the newest are " + " ".join(f"{p}:{version}" for p, version in sorted(newest.items()))


# --- output -----------------------------------------------------------------------------------------------------


def render(found: Explanation) -> str:
    """Returns the explanation as text for people."""
    lines = [_headline(found)]
    if found.lineage is not None and found.lineage.version != found.version:
        again = f"which is version {found.lineage.kept} again"
        lines.append(f"it was given up: a new lineage began with version {found.lineage.version}, {again}")
    if found.closed:
        took = "" if found.took_s is None else f" {found.took_s:.2f} s after its opening"
        lines.append(
            f"round {found.round_id}{', the flush at the end,' if found.flush else ''} closed{took}: {found.closed}"
        )
    if found.contributors:
        rows = [
            (
                each.island,
                f"{each.steps[0]}-{each.steps[1]}",
                f"{each.tokens:,}",
                f"{each.share:.1%}",
                f"{each.staleness:.2f}",
                "fresh" if each.fresh else "held: it came too late for an earlier round",
            )
            for each in sorted(found.contributors, key=lambda each: (each.island, each.steps))
        ]
        lines += ["", _table(("in it", "steps", "tokens", "weight", "staleness", ""), rows, numbers=(1, 2, 3, 4))]
    if found.absent:
        lines += ["", _table(("not in it", "why", ""), [(each.island, each.why, each.detail) for each in found.absent])]
    elif found.absent is not None:
        lines += ["", "every island that was known is in it"]
    elif found.contributors:
        lines += ["", "why others are not in it is not known: the event tape does not tell of this round"]
    if found.gone:
        partly = "; islands that it had not heard since then are not listed" if found.absent is not None else ""
        lines += ["", f"{found.gone}{partly}"]
    return "\n".join(lines)


def _headline(found: Explanation) -> str:
    if found.version is None:
        return f"round {found.round_id} of fragment {found.fragment} led to no version"
    name = f"version {found.version} of fragment {found.fragment}"
    if found.version == 0:
        return f"{name} is the beginning: the parameters of one island, merged with nothing; digest {found.digest}"
    if found.lineage is not None and found.lineage.version == found.version:
        what = f"{name} begins a new lineage: it is version {found.lineage.kept} under a number that nobody had seen"
        lost = ", ".join(map(str, found.lineage.given_up))
        return f"{what}; given up: {lost or 'nothing'}; digest {found.digest}"
    islands = len({each.island for each in found.contributors})
    tokens = sum(each.tokens for each in found.contributors)
    return f"{name}: {islands} islands, {tokens:,} tokens; digest {found.digest}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    width = PLAIN_WIDTH if not os.isatty(1) else None
    Console(file=text, width=width, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
