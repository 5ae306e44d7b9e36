"""``atoll explain``: lists the contributions of a version, and why other islands are not in it.

The ledger of the store has who is in it. The event tape alone has why the others are not: without one, or for the last
moments before a crash, that part of the answer is missing, and the answer says so.

Where there is no directory, Redis has who is in the newest versions of each fragment, and who was waited for in vain;
a broker shows the same to an observer (:mod:`ops.inspect.source`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aggregator.interface.notes import Merging, VersionCommitted
from aggregator.rounds.recovery import Lineage, lineages
from aggregator.store.ledger_file import head_of, newest_dropped, read_rows
from aggregator.store.segments import is_tape
from aggregator.store.tape import read_lines
from broker.base.errors import ConfigError, Unavailable, cure_of
from broker.registry.registry import KEEP_VERSIONS, Registry
from broker.wire.messages import Reason
from broker.wire.records import KeptVersion
from ops.evaluation.curve_file import read_points
from ops.inspect.dropped import gone_from
from ops.inspect.explanation import Contributor, Explanation, render
from ops.inspect.source import BROKER_HELP, BROKER_METAVAR, RunReader, add_key_flags, observed_run
from ops.inspect.tapes import ledgers_in, tapes_in
from ops.story import curve
from ops.story.absence import RoundStory, Storyteller, Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll explain``."""
    parser.add_argument(
        "version",
        metavar="VERSION",
        help="FRAGMENT:VERSION, such as 3:41; or FRAGMENT, for its newest version; or round:ID",
    )
    directory_help = "directory of a run, or a store by itself (default: ask --broker or --redis)"
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", nargs="?", help=directory_help)
    parser.add_argument("--broker", metavar=BROKER_METAVAR, help=BROKER_HELP)
    add_key_flags(parser)
    parser.add_argument("--redis", metavar="URL", help=f"address of Redis; it has the last {KEEP_VERSIONS} versions")
    parser.add_argument("--run", metavar="TEXT", help="name of the run, with --redis; a broker knows its own")
    parser.add_argument("--tape", type=Path, metavar="FILE", help="event tape (default: events.jsonl in RUN_DIR)")
    parser.add_argument("--json", action="store_true", help="print the explanation as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the explanation; returns the exit code.

    Raises:
        ConfigError: ``VERSION`` cannot be read, there is no run in the directory, or nothing to ask.
        Unavailable: There is no such version, a file cannot be read, or nobody answers.
    """
    target = target_of(args.version)
    reader = _reader(args)
    if reader is not None:
        _print(asyncio.run(_explained(reader, target)), as_json=args.json)
        return 0
    tapes = tapes_in(args.directory) if args.tape is None else [args.tape]
    ledgers = ledgers_in(args.directory)
    if not ledgers and not any(map(is_tape, tapes)):
        raise ConfigError("RUN_DIR", str(args.directory), "must be the directory of a run or a store, with a ledger")
    if args.tape is not None and not is_tape(args.tape):
        raise ConfigError("tape", str(args.tape), "must be an event tape (`aggregator --tape FILE` writes one)")
    try:
        found = explain(target, ledgers=ledgers, tapes=tapes)
    except OSError as err:
        raise Unavailable(f"cannot read {err.filename}: {err.strerror}; {cure_of(err)}", definite=True) from err
    if found is None:
        raise Unavailable(f"{args.directory} knows no {args.version}: {_newest(ledgers)}", definite=True)
    judged = None
    if found.version is not None:
        judged = curve.first_with(read_points(args.directory), found.fragment, found.version)
    _print(found, judged, as_json=args.json)
    return 0


def _print(found: Explanation, judged: curve.Point | None = None, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(found) | {"evaluated": None if judged is None else judged.to_json()}), flush=True)
    else:
        print(render(found) + ("" if judged is None else f"\nfirst {curve.sentence(judged)}"), flush=True)


def _reader(args: argparse.Namespace) -> RunReader | None:
    """Returns the Redis or broker to ask; None if a directory is given."""
    observed = observed_run(args.broker, args)
    away = observed is not None or args.redis is not None
    if args.directory is None and not away:
        raise ConfigError("RUN_DIR", "", "is missing: name the directory of a run, or --broker, or --redis")
    if away and (args.directory is not None or args.tape is not None):
        given = str(args.directory or args.tape)
        raise ConfigError("broker" if observed is not None else "redis", given, "needs no RUN_DIR and no --tape")
    if observed is not None or args.redis is None:
        return observed
    if not args.run:
        raise ConfigError("run", None, "is missing: name the run that --redis is asked for")
    return Registry(args.redis, args.run, field="redis")


async def _explained(reader: RunReader, target: Target) -> Explanation:
    async with contextlib.aclosing(reader):
        return await explain_from(reader, target)


async def explain_from(reader: RunReader, target: Target) -> Explanation:
    """Returns the explanation of a version from Redis, read directly or through a broker.

    Raises:
        ConfigError: A round is asked for, which only a tape or ledger tells of.
        Unavailable: There is no such version, or no longer; or nobody answers.
    """
    if target.fragment is None:
        cure = "is known to the run's directory alone: name it, or ask for FRAGMENT:VERSION"
        raise ConfigError("VERSION", f"round:{target.round_id}", cure)
    kept = await reader.read_version(target.fragment, target.version)
    if kept.found is None:
        wanted = f"{target.fragment}" if target.version is None else f"{target.fragment}:{target.version}"
        known = f"of fragment {target.fragment} it has {kept.known[0]} to {kept.known[-1]}" if kept.known else ""
        known = known or f"it has no version of fragment {target.fragment} that anybody contributed to"
        cure = f"it keeps the last {KEEP_VERSIONS} of each fragment; the run's directory has all"
        raise Unavailable(f"Redis knows no version {wanted} of run {reader.run_id}: {known}; {cure}", definite=True)
    return _from_redis(kept)


def _from_redis(kept: KeptVersion) -> Explanation:
    """Returns a version's entry in Redis as an explanation.

    Raises:
        Unavailable: The entry is malformed.
    """
    assert kept.found is not None
    row = kept.found
    try:
        note = VersionCommitted.read(row)
        missing = frozenset(note.missing)
        story = RoundStory(
            round_id=note.round,
            fragment=note.fragment,
            opened_at_s=0.0,
            life=0,
            flush=False,
            asked=missing,
            unasked={},
            missing=missing,
            reason=note.reason,
            committed=note,
        )
        found = _explanation(None, story)
        return dataclasses.replace(found, epoch=row["epoch"], left_out=row["left_out"], from_redis=True)
    except (KeyError, TypeError, IndexError, AttributeError) as err:
        why = f"{type(err).__name__}: {err}"
        raise Unavailable(f"what Redis has of this version is not ours ({why})", definite=True) from err


def target_of(text: str) -> Target:
    """Returns the version or round that ``text`` names; raises ConfigError if it names none."""
    kind, colon, rest = text.partition(":")
    try:
        if kind == "round":
            return Target(round_id=int(rest))
        return Target(fragment=int(kind), version=int(rest) if colon else None)
    except ValueError:
        cure = "must be FRAGMENT:VERSION such as 3:41, FRAGMENT for its newest, or round:ID"
        raise ConfigError("VERSION", text, cure) from None


def explain(target: Target, *, ledgers: Sequence[Path], tapes: Sequence[Path]) -> Explanation | None:
    """Returns the explanation of a version or round; None if there is no such one.

    Every file is read once, line by line; of none more than the wanted round is kept.

    Args:
        target: Which version or round.
        ledgers: Ledgers of the run's stores: the leader's, and those of standbys, which may have led.
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
    went_back: set[tuple[int, int]] = set()
    for tape in tapes:
        teller = Storyteller(target)
        for line in read_lines(tape):
            teller.take(line)
        found, went_back = teller.found, went_back | teller.went_back
        # Rounds of two leaders may share an id, where one of them was cut off: the version tells them apart.
        if found is not None and (row is None or _digest_of(found) == row["digest"]):
            story = found
    if row is None and story is None:
        return None
    if row is None:
        gone = gone_from(tapes) if story is not None and story.beheaded else ""
        return dataclasses.replace(_explanation(None, story), gone=gone)
    lineage = _lineage_of(row["fragment_id"], row["fragment_version"], ledgers)
    gone = gone_from(tapes) if story is None or story.beheaded else ""
    by_order = lineage is not None and (lineage.fragment_id, lineage.version) in went_back
    cause = "" if lineage is None else str(Reason.ROLLED_BACK if by_order else Reason.STORE_LOST)
    return dataclasses.replace(_explanation(row, story), lineage=lineage, counted_as=cause, gone=gone)


def _lineage_of(p: int, version: int, ledgers: Sequence[Path]) -> Lineage | None:
    """Returns the new lineage of a fragment that begins with a version, or went back behind it."""
    rows = {
        row["fragment_version"]: head_of(row)
        for ledger in ledgers
        for row in read_rows(ledger)
        if row["fragment_id"] == p
    }
    for each in lineages((rows[version] for version in sorted(rows)), newest_dropped(ledgers)):
        if version == each.version or version in each.given_up:
            return each
    return None


def _fits(row: Mapping[str, Any], target: Target) -> bool:
    if target.round_id is not None:
        return bool(row.get("round_id") == target.round_id and row.get("contributions"))
    return row.get("fragment_id") == target.fragment and target.version in (None, row.get("fragment_version"))


def _digest_of(story: RoundStory) -> str:
    return "" if story.committed is None else story.committed.digest


def _explanation(row: Mapping[str, Any] | None, story: RoundStory | None) -> Explanation:
    """Returns an explanation from a ledger's line, a tape's round, or both."""
    note = None if story is None else story.committed
    noted = {each.key: each for each in (() if story is None else story.contributions)}
    merged = list(noted.values()) if row is None else [_merging(each) for each in row["contributions"]]
    contributors = tuple(
        Contributor(
            island=each.island,
            incarnation=each.incarnation,
            steps=each.steps,
            tokens=each.tokens,
            share=each.merge_weight,
            token_weight=each.token_weight,
            staleness=each.staleness,
            fresh=each.fresh,
            codec="" if story is None else story.codecs.get(each.key, ""),
            agreement=None if each.key not in noted else noted[each.key].agreement,
            trust=None if each.key not in noted else noted[each.key].trust,
            doubted="" if story is None else story.doubted.get(each.island, ""),
        )
        for each in merged
    )
    if row is None:
        assert story is not None
        row = {"fragment_id": story.fragment, "round_id": story.round_id, "epoch": None, "digest": _digest_of(story)}
        row["fragment_version"] = None if note is None else note.version
    return Explanation(
        fragment=row["fragment_id"],
        version=row["fragment_version"],
        round_id=row["round_id"],
        epoch=row["epoch"],
        digest=row["digest"],
        flush=story is not None and story.flush,
        closed="" if story is None else story.reason,
        took_s=None if story is None else story.took_s,
        contributors=contributors,
        absent=None if story is None else tuple(story.absences()),
        agreement=None if note is None else note.agreement,
        momentum_cosine=None if note is None else note.momentum_cosine,
    )


def _merging(each: Mapping[str, Any]) -> Merging:
    """Returns a contribution as a ledger has it."""
    steps = each["steps"]
    return Merging(
        island=each["island_id"],
        incarnation=each["incarnation"],
        steps=(steps["from_step"], steps["to_step"]),
        tokens=steps["to_tokens"] - steps["from_tokens"],
        staleness=each["staleness"],
        token_weight=each["token_weight"],
        merge_weight=each["merge_weight"],
        fresh=each["fresh"],
    )


def _newest(ledgers: Sequence[Path]) -> str:
    """Returns a sentence that names the newest versions."""
    newest: dict[int, int] = {}
    for ledger in ledgers:
        for row in read_rows(ledger):
            newest[row["fragment_id"]] = max(row["fragment_version"], newest.get(row["fragment_id"], -1))
    if not newest:
        return "no version was made yet"
    said = "the newest are " + " ".join(f"{p}:{version}" for p, version in sorted(newest.items()))
    gone = " ".join(f"{p}:{each.version}" for p, each in sorted(newest_dropped(ledgers).items()))
    return f"{said}; lines up to {gone} were dropped by the rule tape_segments" if gone else said
