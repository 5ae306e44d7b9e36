"""The event tape: what is written comes back, and a failing disk costs lines and nothing else."""

import json
import logging
import os

import pytest

from aggregator.interface import events as agg
from aggregator.interface.events import Received
from aggregator.interface.leader_notes import LeaseBack
from aggregator.interface.notes import ContributionRefused, Merging, RecipeSettled, RoundOpened, VersionCommitted
from aggregator.interface.reading_notes import read_note
from aggregator.rounds.core import Aggregator
from aggregator.store.tape import Tape, event_line, note_line, read_event, read_lines, read_start
from broker.base.errors import ConfigError
from broker.routing.resending import Carried
from broker.wire import messages as m
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


EVENTS = [
    Received(
        envelope=envelope(
            m.Join(nonce="n1", island_id="", hint="host", tensors=TENSORS, tokens_per_step=10), "join:n1", incarnation=0
        )
    ),
    Received(
        envelope=envelope(contribution(b"")),
        flaw=agg.Flaw(reason=m.Reason.CHECKSUM, detail="bytes differ"),
        payload_bytes=80,
    ),
    Received(envelope=envelope(m.Nothing(round_id=3, fragment_id=1)), carried=Carried(2**40, 7, 3)),
    agg.PersistFailed(fragment_id=1, fragment_version=2, detail="disk full"),
    agg.Tick(),
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


def test_a_tape_of_another_format_is_refused_with_a_cure():
    with pytest.raises(ConfigError, match="tape = 99"):
        Aggregator(**read_start({"tape": 99}))


# --- the file -----------------------------------------------------------------------------------------------------


def test_lines_of_several_lives_stand_one_behind_the_other_and_one_that_a_crash_cut_short_spoils_no_other(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    for life in range(2):
        tape = Tape(path)
        tape.write({"life": life})
        tape.close()
    with path.open("a") as file:
        file.write('{"life": 1, "half')
    tape = Tape(path)
    tape.write({"life": 2})
    tape.close()
    assert list(read_lines(path)) == [{"life": 0}, {"life": 1}, {"life": 2}]


def no_space(*_):
    raise OSError(28, "No space left on device")


def test_a_failing_disk_costs_lines_which_are_counted_and_reported_once(tmp_path, monkeypatch, caplog):
    path = tmp_path / "events.jsonl"
    tape = Tape(path)
    tape.write({"n": 1})
    tape.flush()
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:4]) if len(data) > 4 else no_space())
        for n in (2, 3):
            tape.write({"n": n})
            tape.write({"n": n})
            tape.flush()
    assert tape.dropped == 4
    tape.write({"n": 4})
    tape.close()
    assert list(read_lines(path)) == [{"n": 1}, {"gap": 4}, {"n": 4}]
    complaints = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert [r.getMessage().split()[0] for r in complaints] == ["tape.failing"]


def test_a_gap_stands_where_lines_are_missing_beyond_what_may_wait_or_in_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("aggregator.store.tape.MAX_WAITING", 2)
    path = tmp_path / "events.jsonl"
    tape = Tape(path)
    for n in range(5):
        tape.write({"n": n})
    assert tape.dropped == 3
    tape.flush()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        for n in range(5, 8):
            tape.write({"n": n})
        tape.flush()
    tape.write({"n": 8})
    tape.close()
    assert (list(read_lines(path)), tape.dropped) == ([{"n": 0}, {"n": 1}, {"gap": 3}, {"gap": 3}, {"n": 8}], 6)


def test_a_tape_that_cannot_be_opened_is_named_with_a_cure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"tape = '.*events\.jsonl'"):
        Tape(tmp_path / "file" / "events.jsonl")


def test_what_a_note_says_is_read_back_by_its_class():
    merging = Merging(
        trust=0.5,
        island="a",
        incarnation=1,
        steps=(0, 4),
        tokens=40,
        staleness=0.0,
        token_weight=1.0,
        merge_weight=1.0,
        fresh=True,
    )
    written = [
        RecipeSettled(digest="d", inner_optimizer="adamw", table={"merge": "mean", "inputs": {"init": "f"}}),
        ContributionRefused(island="a", fragment=1, from_step=0, to_step=4, reason="stale"),
        ContributionRefused(island="a", fragment=1, reason="outlier", detail="too long"),
        VersionCommitted(fragment=0, version=1, round=1, islands=1, live=2, missing=[], contributions=[merging]),
        LeaseBack(),
    ]
    lines = [json.loads(json.dumps(note_line(each, 1.0))) for each in written]
    read = [read_note(line["note"], line["fields"]) for line in lines]
    assert [note_line(each, 1.0) for each in read] == [note_line(each, 1.0) for each in written]
    assert "from_step" not in lines[2]["fields"]
    assert "agreement" not in lines[3]["fields"]["contributions"][0]


def test_a_note_of_another_release_is_read_as_far_as_it_is_known():
    assert read_note("round.opened", {"round": 1, "fragment": 0, "colour": "red"}) == RoundOpened(round=1, fragment=0)
    assert read_note("round.opened", {"fragment": 0}) is None
    assert read_note("round.painted", {}) is None
