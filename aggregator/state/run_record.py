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


class RunRecord:
    """Writes the run record as :meth:`aggregator.state.run.Run.save` asks for it, one at a time.

    The next one has all that was asked for meanwhile: a record is as long as the fleet is large, and islands may join
    by the hundred.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._given_serial = 0  # of the newest one that was given to be written
        self._is_writing = False  # that one

    def write(self) -> None:
        """Has the record written, if that was asked for; to be called when an event has been dealt with."""
        run = self._run
        if self._given_serial == run.saved_serial or (self._is_writing and not run.finished):
            return
        self._is_writing, self._given_serial = True, run.saved_serial
        run.emit(SaveRun(serial=run.saved_serial, record=_record(run)))
        if run.config.shards > 1 and not run.config.shard:
            _remember_roster(run)

    def written(self, serial: int) -> None:
        """Takes note that the record of that serial is durable, and those before it."""
        self._run.durable_serial = max(self._run.durable_serial, serial)
        self._is_writing = self._is_writing and serial < self._given_serial

    def failed(self) -> None:
        """Takes note that the record that was being written could not be: the next one may be."""
        self._is_writing = False


def _record(run: Run) -> dict[str, Any]:
    return {
        "run_id": run.config.run_id,
        SETTINGS: recorded(run.config),
        "epoch": run.epoch,
        "serial": run.saved_serial,
        "shard": [run.config.shard, run.config.shards],
        "manifest": None if run.manifest is None else manifest_to_rows(run.manifest),
        **({"inputs": run.inputs} if run.inputs else {}),
        "last_round_id": run.last_round_id,
        "ended": run.phase is Phase.ENDED,
        "phase": str(run.decided),
        "seeding": [run.seeding_id, *(run.seeder or ("", 0))],
        "planted": sorted(run.planted_digests.items()),
        "roster": list(run.roster_at),
        "told": [str(run.told_phase), run.config.total_tokens],
        "foundings": [founding.row() for founding in run.foundings],
        "quarantine": run.quarantine.record(run.now_s),
        **run.members.record(),
        "lives": run.ledger.counters(),
        "shares": run.data.saving(run.saved_serial),
    }


def _remember_roster(run: Run) -> None:
    """Keeps the roster of the record just ordered; other shards hear of it once that is durable."""
    island_id, incarnation = run.seeder or ("", 0)
    roster = Roster(
        to_shard=0,
        epoch=run.epoch,
        serial=run.saved_serial,
        phase=run.decided,
        seeding_id=run.seeding_id,
        seeder=island_id,
        seeder_incarnation=incarnation,
        fragments=() if run.manifest is None else run.manifest.fragments,
        recipe=None if run.manifest is None else recipe_of(run.config),
        members=run.members.enrolled(),
        tenures=run.data.tenures(),
    )
    if [replace(each, serial=0) for each in run.rosters[-2:]] == [replace(roster, serial=0)] * 2:
        run.rosters.pop()  # a disk that fails is asked again and again: the first and the last of these will do
    run.rosters.append(roster)


def restore(run: Run, record: Mapping[str, Any], commits: Mapping[int, Commit]) -> None:
    """Goes on from the store of an earlier life; a version 0 that is not whole was never published."""
    run.epoch = max(run.epoch, record["epoch"] + 1)
    run.foundings = foundings_of(record)
    run.members.restore(record, run.now_s)
    if record.get("ended"):
        run.members.reopen()  # if it goes on, it is for whoever comes then
    run.quarantine.restore(record.get("quarantine", {}), run.now_s)
    last_round_id = max([record["last_round_id"], *(c.round_id for c in commits.values())])
    run.last_round_id = last_round_id + ROUND_IDS_PER_LIFE
    slices = {p: commit.ledger.get("data", {}) for p, commit in commits.items()}
    run.data.restore(record.get("shares", {}), slices, run.epoch)
    at_epoch, at_serial = record.get("roster", (0, 0))
    run.roster_at = at_epoch, at_serial
    told_phase, told_target = record.get("told", (Phase.SEEDING, 0))
    if told_target == run.config.total_tokens:  # else an operator has another end in mind
        run.told_phase = Phase(told_phase)  # shard 0 may have ended, and tell nobody any more
    run.seeding_id = record.get("seeding", [0])[0]
    if record["manifest"] is None:
        return
    run.adopt_manifest(manifest_from_rows(record["manifest"]), recipe_of(settle(run.config, "")))
    run.inputs = dict(record.get("inputs", {}))
    run.planted = bool(commits)
    run.never_began = Phase(record.get("phase", Phase.RUNNING)) is Phase.SEEDING
    alone = run.config.shards == 1  # else shard 0 has written down when it was whole
    every = set(commits) == set(run.fragments)
    run.planted_digests = dict(record.get("planted", ()))
    whole = every and _whole(commits, run.planted_digests)
    run.began = whole if alone else Phase(record["phase"]) is not Phase.SEEDING
    if run.config.shard and not run.began:
        _restore_seeds(run, record, commits)
    elif every and run.began:
        _restore_versions(run, commits)
        assert run.pacer is not None
        if isinstance(run.pacer, Pacer):
            run.interval.steps = max(run.fragments[p].interval for p in run.moving)
            run.pacer.change_interval(run.interval.steps, run.now_s)
        run.pacer.resume({p: commit.round_id for p, commit in commits.items()})
        run.ledger.recall(record.get("lives", {}))
        run.phase = Phase.RUNNING
        target = run.config.total_tokens
        if record.get("ended") and target and run.ledger.counted_tokens() >= target:
            run.phase = Phase.ENDED  # which an operator takes back with a higher target
    for member in run.members:
        if member.begun and not run.ledger.knows(member.island_id, member.incarnation):
            run.ledger.begin(member.island_id, member.incarnation, *member.start)
        if member.left:
            run.ledger.end(member.island_id)
        elif member.begun:
            _recall_claims(run, member)


def _restore_versions(run: Run, commits: Mapping[int, Commit]) -> None:
    """Restores each fragment's newest version and books, and what directions have shown."""
    for p, commit in commits.items():
        fragment = run.fragments[p]
        fragment.version, fragment.digest = commit.fragment_version, commit.digest
        fragment.contributions = commit.contributions
        if p in run.moving:
            run.ledger.restore(p, commit.ledger)
            fragment.interval = commit.ledger.get("interval", run.interval.recipe_steps)
            if "norms" in commit.ledger:
                fragment.norms = FragmentNorms.restored(commit.ledger["norms"])
            if commit.ledger.get("rule", {}).get("merge") == run.config.merge:
                fragment.rule_state = json.dumps(commit.ledger["rule"]["state"])
    run.trust.restore(commit.ledger["trust"] for commit in commits.values() if "trust" in commit.ledger)
    run.course.restore(commit.ledger["course"] for commit in commits.values() if "course" in commit.ledger)


def _recall_claims(run: Run, member: Member) -> None:
    """Restores the claims of an island that is in the run."""
    life = run.ledger.life(member.island_id, member.incarnation)
    amount, counters = run.tokens_per_step(member), (life.last_step, life.last_tokens)
    run.claims.recall(member.island_id, *counters, amount, life.doubted_tokens, run.now_s)


def _restore_seeds(run: Run, record: Mapping[str, Any], commits: Mapping[int, Commit]) -> None:
    """Restores the durable seeds of the last attempt at version 0: shard 0 may count on them."""
    _, island_id, incarnation = record["seeding"]
    run.seeder = (island_id, incarnation) if island_id else None
    for p, commit in commits.items():
        if commit.round_id == run.seeding_id:
            fragment = run.fragments[p]
            fragment.version, fragment.digest = commit.fragment_version, commit.digest


def _whole(commits: Mapping[int, Commit], planted: Mapping[int, str]) -> bool:
    """Returns True if all commits are of a version 0 from one island, or one is of a later version.

    Those of version 0 share an id, or are what the record of the run's beginning names: a standby keeps what it has of
    an earlier attempt, under that one's id, where the same island supplied the same bytes again.
    """
    if any(c.fragment_version > 0 for c in commits.values()):
        return True  # which proves it published
    return len({c.round_id for c in commits.values()}) == 1 or {p: c.digest for p, c in commits.items()} == planted
