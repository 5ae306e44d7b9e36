"""A run whose ledger is closed and dropped in segments while its aggregator is killed: all its readers say the same."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from aggregator.interface.config import AggregatorConfig
from aggregator.store.ledger_file import dropped_before, read_rows
from aggregator.store.segments import closed_of, segments_of
from ops.chaos import verify
from ops.inspect.explain import explain
from ops.inspect.replay import replay_all
from ops.inspect.tapes import ledgers_in, tapes_in
from ops.story.absence import Target
from ops.virtual.plan import IslandPlan, SimulationPlan
from tests.frozen.taped_runs import keep
from tests.sim.counting import finish, simulation_of
from tests.sim.faults import kills

SEGMENT_BYTES, KEEP = 3000, 2
PLAN = SimulationPlan(
    seed=5,
    islands=tuple(IslandPlan(island_id=f"island-{i}", step_time_s=0.02) for i in range(3)),
    config=AggregatorConfig(
        islands=3, total_tokens=50_000, fragments=2, sync_interval=8, tape=Path("events.jsonl"), tape_segment_mb=0
    ),
    faults=kills("aggregator", 1.5, 2.3, 3.1, for_s=0.3),
)


def made(run_dir: Path, **settings: Any) -> Path:
    with simulation_of(replace(PLAN, config=replace(PLAN.config, **settings))) as simulation:
        keep(finish(simulation), run_dir)
        assert simulation.aggregator.lives == 4
    return run_dir


def replayed(run_dir: Path) -> tuple[dict[str, Any], Any]:
    (found,), covered = replay_all(tapes_in(run_dir), ledgers=ledgers_in(run_dir))
    return asdict(found) | {"tape": ""}, covered


def checked(run_dir: Path) -> list[dict[str, Any]]:
    return verify.as_json(verify.verify(run_dir))


def test_all_readers_say_the_same_of_one_file_of_segments_and_of_what_is_left(tmp_path: Path) -> None:
    plain = made(tmp_path / "plain")
    whole = made(tmp_path / "whole", tape_segment_mb=3e-6 * SEGMENT_BYTES, tape_segments=0)
    rows = list(read_rows(plain / "store" / "ledger.jsonl"))
    assert len(closed_of(whole / "store" / "ledger.jsonl")) > 2 * KEEP
    assert list(read_rows(whole / "store" / "ledger.jsonl")) == rows
    assert replayed(whole) == replayed(plain)
    assert checked(whole) == checked(plain)
    assert all(check["holds"] for check in checked(plain)), checked(plain)

    bounded = made(tmp_path / "bounded", tape_segment_mb=3e-6 * SEGMENT_BYTES, tape_segments=KEEP)
    path = bounded / "store" / "ledger.jsonl"
    assert replayed(bounded)[0]["difference"] is None
    for each in segments_of(bounded / "events.jsonl").values():  # its tape is bounded as well: that of before has more
        each.unlink()
    shutil.copy(plain / "events.jsonl", bounded)
    assert len(closed_of(path)) == KEEP
    dropped = dropped_before(path)
    left = [row for row in rows if row["fragment_version"] > dropped[row["fragment_id"]].version]
    assert list(read_rows(path)) == left
    found, covered = replayed(bounded)
    assert found["difference"] is None
    assert covered == replayed(plain)[1]
    assert found["ledger_rows"] < replayed(plain)[0]["ledger_rows"]
    assert all(check["holds"] for check in checked(bounded)), checked(bounded)
    for row in (*left[::7], rows[3]):
        target = Target(fragment=row["fragment_id"], version=row["fragment_version"])
        told = [explain(target, ledgers=ledgers_in(each), tapes=tapes_in(each)) for each in (plain, bounded)]
        assert told[0] is not None
        assert told[1] is not None
        assert (told[0].digest, told[0].absent) == (told[1].digest, told[1].absent)
        assert told[0] == told[1] or row is rows[3]  # of a dropped line the tape has most
