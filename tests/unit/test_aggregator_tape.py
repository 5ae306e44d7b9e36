"""The event tape: what is written comes back, and a failing disk costs lines and nothing else."""

import json
import os

import pytest

from aggregator.config import AggregatorConfig
from aggregator.core import Aggregator
from aggregator.events import (
    Commit,
    Computed,
    Flaw,
    Persisted,
    PersistFailed,
    Received,
    RunSaved,
    RunSaveFailed,
    Stop,
    Tick,
)
from aggregator.store.tape import Tape, event_line, read_event, read_lines, read_start, start_line
from broker.routing.resending import Carried
from broker.wire import messages as m
from broker.wire.errors import ConfigError
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.ranges import StepRange

TENSORS = tuple(TensorSpec(name=f"w{i}", shape=(4, 5), dtype="float32", kind=Kind.RDA) for i in range(2))


def envelope(message, sender="a", incarnation=1):
    return m.Envelope(
        run_id="demo", sender=sender, incarnation=incarnation, sequence=7, to="aggregator", message=message
    )


def contribution(data=b"\0" * 80):
    return m.Contribution(
        round_id=3,
        fragment_id=1,
        steps=StepRange(from_step=4, to_step=6, from_tokens=40, to_tokens=60),
        trained_on=(m.TrainedOn(fragment_version=1, steps=2),),
        payload=(m.Encoded(codec=m.Codec.F32, shape=(4, 5), checksum=2**64 - 1, data=data),),
    )


def join(nonce="n1"):
    return m.Join(nonce=nonce, island_id="", hint="host", tensors=TENSORS, tokens_per_step=10)


EVENTS = [
    Received(envelope=envelope(join(), sender="join:n1", incarnation=0)),
    Received(
        envelope=envelope(contribution(b"")),
        flaw=Flaw(reason=m.Reason.CHECKSUM, detail="bytes differ"),
        payload_bytes=80,
    ),
    Received(envelope=envelope(m.Nothing(round_id=3, fragment_id=1)), carried=Carried(2**40, 7, 3)),
    Computed(fragment_id=1, fragment_version=2, digest="ab"),
    Persisted(fragment_id=1, fragment_version=2),
    PersistFailed(fragment_id=1, fragment_version=2, detail="disk full"),
    RunSaved(serial=4),
    RunSaveFailed(serial=4, detail="disk full"),
    Tick(),
    Stop(),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_comes_back_from_its_line(event):
    line = json.loads(json.dumps(event_line(event, 1.25)))
    assert line["now_s"] == 1.25
    assert read_event(line) == event


def test_payloads_are_on_the_tape_by_checksum_only():
    text = json.dumps(event_line(Received(envelope=envelope(contribution(b"x" * 80)), payload_bytes=80), 0.0))
    assert "xxxx" not in text
    assert json.loads(text)["buffers"] == [["f32", [4, 5], 2**64 - 1]]


def lead(core):
    """Starts a core and lets it lead."""
    actions = core.start(0.0)
    return actions + core.handle(RunSaved(serial=1), 0.0)


def test_a_core_made_from_a_first_line_decides_as_the_first_one_did(tmp_path):
    config = AggregatorConfig(run_id="demo", store=tmp_path, fragments=2, sync_interval=2)
    first = Aggregator(config, now_s=0.0)
    lead(first)
    record = next(a.record for a in first.handle(EVENTS[0], 0.5) if type(a).__name__ == "SaveRun")
    merged = m.Merged(
        island_id="island-0",
        incarnation=1,
        steps=StepRange(from_step=0, to_step=2, from_tokens=0, to_tokens=20),
        staleness=0.5,
        token_weight=200.0,
        staleness_weight=0.8,
        merge_weight=0.8,
        fresh=True,
    )
    commits = {
        p: Commit(
            fragment_id=p,
            fragment_version=4 + p,
            epoch=1,
            digest="ab",
            round_id=9,
            contributions=(merged,),
            ledger=first.run.ledger.slice(p),
        )
        for p in range(2)
    }
    line = json.loads(json.dumps(start_line(config, 10.0, record, commits)))
    played, live = Aggregator(**read_start(line)), Aggregator(config, now_s=10.0, record=record, commits=commits)
    assert played.run.versions == live.run.versions == (4, 5)
    assert played.run.epoch == live.run.epoch == 2
    assert lead(played) == lead(live)
    assert played.handle(EVENTS[0], 11.0) == live.handle(EVENTS[0], 11.0)
    assert played.run.fragments == live.run.fragments


def test_a_tape_of_another_format_is_refused_with_a_cure():
    with pytest.raises(ConfigError, match="tape = 99"):
        Aggregator(**read_start({"tape": 99}))


# --- the file -----------------------------------------------------------------------------------------------------


def test_lines_of_several_lives_stand_one_behind_the_other(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    for life in range(2):
        tape = Tape(path)
        tape.write({"life": life})
        tape.close()
    assert list(read_lines(path)) == [{"life": 0}, {"life": 1}]


def test_a_line_that_a_crash_cut_short_spoils_no_other(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"n": 1}\n{"n": 2, "half')
    tape = Tape(path)
    tape.write({"n": 3})
    tape.close()
    assert list(read_lines(path)) == [{"n": 1}, {"n": 3}]


def test_a_failing_disk_costs_lines_which_are_counted_and_reported_once(tmp_path, monkeypatch, caplog):
    path = tmp_path / "events.jsonl"
    tape = Tape(path)
    tape.write({"n": 1})
    tape.flush()
    write = os.write

    def half(fd, data):
        if len(data) > 4:
            return write(fd, data[:4])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        for n in (2, 3):
            tape.write({"n": n})
            tape.write({"n": n})
            tape.flush()
    assert tape.dropped == 4
    tape.write({"n": 4})
    tape.close()
    assert list(read_lines(path)) == [{"n": 1}, {"gap": 4}, {"n": 4}]
    assert [r.getMessage().split()[0] for r in caplog.records] == ["tape.failing"]


def test_lines_beyond_what_may_wait_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr("aggregator.store.tape.MAX_WAITING", 2)
    tape = Tape(tmp_path / "events.jsonl")
    for n in range(5):
        tape.write({"n": n})
    assert tape.dropped == 3
    tape.close()
    assert list(read_lines(tmp_path / "events.jsonl")) == [{"n": 0}, {"n": 1}, {"gap": 3}]


def test_a_gap_stands_where_lines_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("aggregator.store.tape.MAX_WAITING", 2)
    tape = Tape(tmp_path / "events.jsonl")
    for n in range(4):
        tape.write({"n": n})
    with monkeypatch.context() as patch:
        patch.setattr(Tape, "_append", fails)
        tape.flush()
        for n in range(4, 7):
            tape.write({"n": n})
        tape.flush()
    tape.write({"n": 7})
    tape.close()
    assert (list(read_lines(tmp_path / "events.jsonl")), tape.dropped) == ([{"gap": 7}, {"n": 7}], 7)


def fails(*_):
    raise OSError(28, "No space left on device")


def test_a_tape_that_cannot_be_opened_is_named_with_a_cure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"tape = '.*events\.jsonl'"):
        Tape(tmp_path / "file" / "events.jsonl")
