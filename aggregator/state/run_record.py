"""The run record: all of a run that is in no commit, written, and read back into a run. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aggregator.interface.events import Commit, SaveRun
from aggregator.rules.outliers import FragmentNorms
from aggregator.rules.pacing import Pacer
from aggregator.rules.recipes import settle
from aggregator.state.founding import foundings_of
from aggregator.state.members import Member
from aggregator.state.records import manifest_from_rows, manifest_to_rows
from aggregator.state.run import Run
from aggregator.state.run_settings import SETTINGS, recorded
from broker.wire.messages import Phase, Roster, recipe_of

#: Added to round ids at a restart: an answer to a round before it must not count as fresh after it.
ROUND_IDS_PER_LIFE = 1_000_000


def write(run: Run) -> None:
    """Has the record written, if that was asked for; to be called when an event has been dealt with."""
    if not run.record.take(last=run.finished):
        return
    run.emit(SaveRun(serial=run.record.saved_serial, record=_record(run)))
    if run.config.shards > 1 and not run.config.shard:
        _remember_roster(run)


def _record(run: Run) -> dict[str, Any]:
    return {
        "run_id": run.config.run_id,
        SETTINGS: recorded(run.config),
        "epoch": run.epoch,
        "serial": run.record.saved_serial,
        "shard": [run.config.shard, run.config.shards],
        "manifest": None if run.model.manifest is None else manifest_to_rows(run.model.manifest),
        **({"inputs": run.origin.inputs} if run.origin.inputs else {}),
        "last_round_id": run.schedule.last_round_id,
        "ended": run.phase is Phase.ENDED,
        "phase": str(run.decided),
        "seeding": [run.origin.seeding_id, *(run.origin.seeder or ("", 0))],
        "planted": sorted(run.origin.digests.items()),
        "roster": list(run.other_shards.roster_at),
        "told": [str(run.other_shards.told_phase), run.config.total_tokens],
        "foundings": [founding.row() for founding in run.record.foundings],
        "quarantine": run.fleet.quarantine.record(run.now_s),
        **run.fleet.members.record(),
        "lives": run.books.ledger.counters(),
        "shares": run.books.data.saving(run.record.saved_serial),
    }


def _remember_roster(run: Run) -> None:
    """Keeps the roster of the record just ordered; other shards hear of it once that is durable."""
    island_id, incarnation = run.origin.seeder or ("", 0)
    roster = Roster(
        to_shard=0,
        epoch=run.epoch,
        serial=run.record.saved_serial,
        phase=run.decided,
        seeding_id=run.origin.seeding_id,
        seeder=island_id,
        seeder_incarnation=incarnation,
        fragments=() if run.model.manifest is None else run.model.manifest.fragments,
        recipe=None if run.model.manifest is None else recipe_of(run.config),
        members=run.fleet.members.enrolled(),
        tenures=run.books.data.tenures(),
    )
    rosters = run.other_shards.rosters
    if [replace(each, serial=0) for each in rosters[-2:]] == [replace(roster, serial=0)] * 2:
        rosters.pop()  # a disk that fails is asked again and again: the first and the last of these will do
    rosters.append(roster)


def restore(run: Run, record: Mapping[str, Any], commits: Mapping[int, Commit]) -> None:
    """Goes on from the store of an earlier life; a version 0 that is not whole was never published."""
    run.epoch = max(run.epoch, record["epoch"] + 1)
    run.record.foundings = foundings_of(record)
    run.fleet.members.restore(record, run.now_s)
    if record.get("ended"):
        run.fleet.members.reopen()  # if it goes on, it is for whoever comes then
    run.fleet.quarantine.restore(record.get("quarantine", {}), run.now_s)
    last_round_id = max([record["last_round_id"], *(c.round_id for c in commits.values())])
    run.schedule.last_round_id = last_round_id + ROUND_IDS_PER_LIFE
    slices = {p: commit.ledger.get("data", {}) for p, commit in commits.items()}
    run.books.data.restore(record.get("shares", {}), slices, run.epoch)
    at_epoch, at_serial = record.get("roster", (0, 0))
    run.other_shards.roster_at = at_epoch, at_serial
    told_phase, told_target = record.get("told", (Phase.SEEDING, 0))
    if told_target == run.config.total_tokens:  # else an operator has another end in mind
        run.other_shards.told_phase = Phase(told_phase)  # shard 0 may have ended, and tell nobody any more
    run.origin.seeding_id = record.get("seeding", [0])[0]
    if record["manifest"] is None:
        return
    run.adopt_manifest(manifest_from_rows(record["manifest"]), recipe_of(settle(run.config, "")))
    run.origin.inputs = dict(record.get("inputs", {}))
    run.origin.planted = bool(commits)
    run.origin.never_began = Phase(record.get("phase", Phase.RUNNING)) is Phase.SEEDING
    alone = run.config.shards == 1  # else shard 0 has written down when it was whole
    every = set(commits) == set(run.model.fragments)
    run.origin.digests = dict(record.get("planted", ()))
    whole = every and _whole(commits, run.origin.digests)
    run.origin.began = whole if alone else Phase(record["phase"]) is not Phase.SEEDING
    if run.config.shard and not run.origin.began:
        _restore_seeds(run, record, commits)
    elif every and run.origin.began:
        _restore_versions(run, commits)
        schedule, fragments = run.schedule, run.model.fragments
        assert schedule.pacer is not None
        if isinstance(schedule.pacer, Pacer):
            longest = max(fragments[p].interval for p in run.model.moving)
            schedule.set_interval(longest or schedule.interval.recipe_steps, run.now_s)
        schedule.pacer.resume({p: commit.round_id for p, commit in commits.items()})
        run.books.ledger.recall(record.get("lives", {}))
        run.phase = Phase.RUNNING
        target = run.config.total_tokens
        if record.get("ended") and target and run.books.ledger.counted_tokens() >= target:
            run.phase = Phase.ENDED  # which an operator takes back with a higher target
    for member in run.fleet.members:
        if member.begun and not run.books.ledger.knows(member.island_id, member.incarnation):
            run.books.ledger.begin(member.island_id, member.incarnation, *member.start)
        if member.left:
            run.books.ledger.end(member.island_id)
        elif member.begun:
            _recall_claims(run, member)


def _restore_versions(run: Run, commits: Mapping[int, Commit]) -> None:
    """Restores each fragment's newest version and books, and what directions have shown."""
    for p, commit in commits.items():
        fragment = run.model.fragments[p]
        fragment.version, fragment.digest = commit.fragment_version, commit.digest
        fragment.contributions = commit.contributions
        if p in run.model.moving:
            run.books.ledger.restore(p, commit.ledger)
            fragment.interval = commit.ledger.get("interval", 0)
            if "norms" in commit.ledger:
                fragment.norms = FragmentNorms.restored(commit.ledger["norms"])
            if commit.ledger.get("rule", {}).get("merge") == run.config.merge:
                fragment.rule_state = json.dumps(commit.ledger["rule"]["state"])
    run.books.trust.restore(commit.ledger["trust"] for commit in commits.values() if "trust" in commit.ledger)
    run.books.course.restore(commit.ledger["course"] for commit in commits.values() if "course" in commit.ledger)


def _recall_claims(run: Run, member: Member) -> None:
    """Restores the claims of an island that is in the run."""
    life = run.books.ledger.life(member.island_id, member.incarnation)
    amount, counters = run.books.tokens_per_step(member.island_id), (life.last_step, life.last_tokens)
    run.fleet.claims.recall(member.island_id, *counters, amount, life.doubted_tokens, run.now_s)


def _restore_seeds(run: Run, record: Mapping[str, Any], commits: Mapping[int, Commit]) -> None:
    """Restores the durable seeds of the last attempt at version 0: shard 0 may count on them."""
    _, island_id, incarnation = record["seeding"]
    run.origin.seeder = (island_id, incarnation) if island_id else None
    for p, commit in commits.items():
        if commit.round_id == run.origin.seeding_id:
            fragment = run.model.fragments[p]
            fragment.version, fragment.digest = commit.fragment_version, commit.digest


def _whole(commits: Mapping[int, Commit], planted: Mapping[int, str]) -> bool:
    """Returns True if all commits are of a version 0 from one island, or one is of a later version.

    Those of version 0 share an id, or are what the record of the run's beginning names: a standby keeps what it has of
    an earlier attempt, under that one's id, where the same island supplied the same bytes again.
    """
    if any(c.fragment_version > 0 for c in commits.values()):
        return True  # which proves it published
    return len({c.round_id for c in commits.values()}) == 1 or {p: c.digest for p, c in commits.items()} == planted
