"""A run in virtual time whose ledger is a real file: closed and dropped in segments, all its readers say the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from aggregator.interface import events as agg
from aggregator.interface.config import AggregatorConfig
from aggregator.store.ledger_file import LedgerFile, dropped_before, read_rows
from aggregator.store.segments import closed_of, segments_of
from aggregator.store.tape import Tape, event_line, note_line, start_line
from ops.chaos import verify
from ops.inspect.explain import explain
from ops.inspect.replay import replay_all
from ops.inspect.tapes import ledgers_in, tapes_in
from ops.story.absence import Target
from ops.virtual import failover
from ops.virtual.aggregator import SimAggregator
from ops.virtual.failover import Station
from ops.virtual.plan import CrashPoint, IslandPlan, Point, SimulationPlan
from ops.virtual.queue import LinkModel
from ops.virtual.simulation import Simulation

SEGMENT_BYTES, KEEP = 3000, 4
PLAN = SimulationPlan(
    seed=5,
    islands=tuple(IslandPlan(island_id=f"island-{i}", step_time_s=0.02) for i in range(3)),
    config=AggregatorConfig(islands=3, total_tokens=120_000, fragments=2, sync_interval=8, tape=Path("events.jsonl")),
    link=LinkModel(delay_s=(0.001, 0.02), loss=0.02, duplication=0.05),
    tokens_per_step=100,
    calm_after_s=10.0,
    crash_points=tuple(
        CrashPoint(process="aggregator", point=point, number=number, restart_s=0.3)
        for point, number in ((Point.PERSISTED, 20), (Point.PERSIST, 45), (Point.PERSISTED, 60))
    ),
)


class Filed(SimAggregator):
    """Writes its tape and its ledger into the directory of a run."""

    run_dir = Path()
    segment_bytes = keep = 0
    largest = 0

    def __init__(self, simulation: Simulation, station: Station, life: int, epoch: int | None) -> None:
        super().__init__(simulation, station, life, epoch)
        (self.run_dir / "store").mkdir(parents=True, exist_ok=True)
        self.tape = Tape(self.run_dir / "events.jsonl")
        self.path = self.run_dir / "store" / "ledger.jsonl"
        self.ledger = LedgerFile(self.path, self.segment_bytes, self.keep)
        self.ledger.complete(self.disk.commits.values())
        self.put(start_line(station.config, self.clock.now_s, self.disk.record, self.disk.commits))

    def put(self, line: Mapping[str, Any]) -> None:
        self.tape.write(line)
        self.tape.flush()

    def feed(self, event: agg.Event) -> None:
        self.put(event_line(_without_payload(event), self.clock.now_s))
        super().feed(event)

    def perform(self, actions: list[agg.Action]) -> None:
        for action in actions:
            if isinstance(action, agg.Note):
                self.put(note_line(action, self.clock.now_s))
        super().perform(actions)

    def done(self, event: agg.Persisted | agg.RunSaved) -> None:
        if isinstance(event, agg.Persisted):
            self.ledger.owe(self.disk.commits[event.fragment_id])
            self.ledger.settle()
            self.ledger._rotation.tidy()  # in virtual time nobody waits for a machine that is busy
            Filed.largest = max(Filed.largest, sum(each.stat().st_size for each in segments_of(self.path).values()))
        super().done(event)

    def kill(self) -> None:
        self.tape.close()
        self.ledger.close()
        super().kill()


def _without_payload(event: agg.Event) -> agg.Event:
    """Returns an event as a tape has it: in virtual time a payload is a name."""
    message = event.envelope.message if isinstance(event, agg.Received) else None
    if message is None or not getattr(message, "payload", ()):
        return event
    return replace(event, envelope=replace(event.envelope, message=replace(message, payload=())))


def made(run_dir: Path, monkeypatch: pytest.MonkeyPatch, **settings: int) -> Path:
    monkeypatch.setattr(Filed, "run_dir", run_dir)
    monkeypatch.setattr(Filed, "largest", 0)
    for name in ("segment_bytes", "keep"):
        monkeypatch.setattr(Filed, name, settings.get(name, 0))
    monkeypatch.setattr(failover, "SimAggregator", Filed)
    simulation = Simulation(PLAN)
    assert simulation.run(300.0)
    assert isinstance(simulation.aggregator, Filed)
    assert sum(name == "crashed" for _, _, name, _ in simulation.trace) == 3
    simulation.aggregator.tape.close()
    simulation.aggregator.ledger.close()
    return run_dir


def replayed(run_dir: Path) -> tuple[dict[str, Any], Any]:
    (found,), covered = replay_all(tapes_in(run_dir), ledgers=ledgers_in(run_dir))
    return asdict(found) | {"tape": ""}, covered


def checked(run_dir: Path) -> list[dict[str, Any]]:
    return verify.as_json(verify.verify(run_dir))


def test_all_readers_say_the_same_of_one_file_of_segments_and_of_what_is_left_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = made(tmp_path / "plain", monkeypatch)
    whole = made(tmp_path / "whole", monkeypatch, segment_bytes=SEGMENT_BYTES)
    rows = list(read_rows(plain / "store" / "ledger.jsonl"))
    assert len(closed_of(whole / "store" / "ledger.jsonl")) > 2 * KEEP
    assert list(read_rows(whole / "store" / "ledger.jsonl")) == rows
    assert replayed(whole) == replayed(plain)
    assert checked(whole) == checked(plain)
    assert all(check["holds"] for check in checked(plain)), checked(plain)

    bounded = made(tmp_path / "bounded", monkeypatch, segment_bytes=SEGMENT_BYTES, keep=KEEP)
    path = bounded / "store" / "ledger.jsonl"
    assert (bounded / "events.jsonl").read_bytes() == (plain / "events.jsonl").read_bytes()  # nothing that is decided
    assert len(closed_of(path)) == KEEP
    assert Filed.largest < (KEEP + 2) * 1.5 * SEGMENT_BYTES < len(json.dumps(rows)) / 2
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
