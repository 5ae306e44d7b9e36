"""Runs with the real aggregator: its loop, store, workers and lease in virtual time, whatever happens to them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from ops.faults.kinds import Fault, FaultKind
from ops.virtual.plan import CrashPoint, Point
from tests.sim import real_hub
from tests.sim.packed import packed_plan, short_plan
from tests.sim.storms import night
from tests.sim.test_packed import LIMIT_S, check_that_shards_agree
from tests.sim.test_rogues import check_the_honest

#: Seeds to a test, and tests.
AT_A_TIME, PARTS = 4, 16
#: Of the changes of the disk of a short run, so many are the last one of a life, each so many after the one before.
CRASHES, EVERY = 24, 4


def check(seed: int) -> None:
    """Runs one seed; what fails names it."""
    try:
        simulation = real_hub.run(packed_plan(seed), LIMIT_S)
        check_the_honest(simulation)
        check_that_shards_agree(simulation)
    except AssertionError as err:
        raise AssertionError(f"seed {seed}: {err}") from err


@pytest.mark.rotating(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_is_packed_into_a_few_seconds_every_invariant_holds(part: int) -> None:
    for seed in range(part * AT_A_TIME, (part + 1) * AT_A_TIME):
        check(seed)


@pytest.mark.rotating(8)
@pytest.mark.parametrize("number", range(CRASHES))
@pytest.mark.parametrize("process", ["aggregator", "standby-1"])
def test_a_process_may_die_before_any_change_of_its_disk(process: str, number: int) -> None:
    at, restart_s = 1 + EVERY * number, (0.05, 1.2)[number % 2]
    crash = CrashPoint(process=process, point=Point.PERSIST, number=at, restart_s=restart_s)
    died = real_hub.run(replace(short_plan(number), crash_points=(crash,)), LIMIT_S)
    assert any(name == "crashed" for _, _, name, _ in died.trace)


@pytest.mark.rotating(8)
@pytest.mark.parametrize("seed", range(16))
def test_what_was_flushed_is_there_when_power_comes_back(seed: int) -> None:
    outage = Fault(kind=FaultKind.OUTAGE, targets=("redis",), at_s=0.6 + 0.2 * seed, for_s=0.5)
    real_hub.run(replace(short_plan(seed), faults=(outage,)), LIMIT_S)


# --- two faults that there were ---------------------------------------------------------------------------------------


def test_nobody_leads_before_who_could_object_was_heard() -> None:
    """A lease was taken by the older store, which the broker had heard for a moment longer."""
    for seed in (5, 7):
        real_hub.run(night(seed), LIMIT_S)


@pytest.mark.full("the same with other times")
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 6, *range(8, 13)])
def test_after_any_night_the_newer_store_leads(seed: int) -> None:
    real_hub.run(night(seed), LIMIT_S)


def test_what_leaders_took_with_them_goes_again_at_once_however_many_they_were() -> None:
    """An island took each of them for a journey in vain, and waited twice as long after each."""
    for seed in (5, 10):
        plan = replace(short_plan(seed, steps=100), merge_s=(1.0, 3.0), calm_after_s=40.0)
        stormy = real_hub.run(plan, LIMIT_S, real_hub.Doomed)
        assert sum(name == "leads" for _, _, name, _ in stormy.trace) > 12
        assert stormy.queue.now_s < plan.calm_after_s + 14.0


# --- the simulation itself --------------------------------------------------------------------------------------------


def turns(seed: int) -> str:
    """Returns a digest of all that happened in a run."""
    digest = hashlib.sha256()
    with real_hub.RealHub(packed_plan(seed)) as hub:
        hub.virtual.on_turn = lambda at_s, who, count: digest.update(f"{at_s!r} {who} {count}".encode())
        hub.run(LIMIT_S)
        digest.update(repr(hub.trace).encode())
    return digest.hexdigest()


@pytest.mark.full("two processes import everything anew")
def test_a_seed_is_the_same_run_in_every_process() -> None:
    said = "from tests.sim.test_real_hub import turns; print(turns(10))"
    runs = {
        subprocess.run(
            [sys.executable, "-c", said],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(runs) == 1
    assert len(runs.pop()) > 60


def test_a_crash_is_made_of_many_changes() -> None:
    """The points above are what they seem: writes, flushes and renamings of one commit pass one by one."""
    with real_hub.RealHub(short_plan()) as hub:
        changes: Counter[str] = Counter()
        disk = hub.posts["aggregator"].machine.disk
        disk.before = lambda change: changes.update([change])
        assert hub.run(LIMIT_S)
    assert set(changes) >= {"open", "write", "fsync", "replace", "mkdir", "unlink"}
    assert sum(changes.values()) > EVERY * CRASHES, changes
