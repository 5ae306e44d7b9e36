"""What the aggregator tells others: the report and the records for Redis, also before anything has happened."""

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Note, Received, RunSaved
from aggregator.process.telemetry import NoteLog
from aggregator.rounds.core import Aggregator
from aggregator.state.summary import Traffic, fragments, refusals, report, totals
from broker.routing.directory import UNKNOWN
from broker.wire import messages as m
from broker.wire.fragments import Kind, TensorSpec
from tests.aggregator_hand import beat

#: What a heartbeat says of two fragments before any version is there.
NOTHING_HELD = {"versions": (-1, -1), "overwritten_tokens": (0, 0)}
TENSORS = tuple(TensorSpec(name=f"w{i}", shape=(4, 5), dtype="float32", kind=Kind.RDA) for i in range(2))


def received(message, sender="island-0", incarnation=1):
    envelope = m.Envelope(
        run_id="demo", sender=sender, incarnation=incarnation, sequence=1, to="aggregator", message=message
    )
    return Received(envelope=envelope)


def joined():
    """A core that an island has joined."""
    made = Aggregator(AggregatorConfig(run_id="demo", fragments=2, sync_interval=2, total_tokens=1000), now_s=0.0)
    made.start(0.0)
    made.handle(RunSaved(serial=1), 0.0)
    join = m.Join(nonce="n1", island_id="", hint="", tensors=TENSORS, tokens_per_step=10)
    made.handle(received(join, "join:n1", 0), 0.1)
    return made


def test_an_island_is_reported_over_all_its_lives():
    made, traffic = joined(), Traffic()
    for incarnation, up, down in ((1, 5, 50), (1, 7, 70), (2, 3, 30)):
        traffic.observe(received(beat(4, bytes_up=up, bytes_down=down), incarnation=incarnation).envelope)
    made.handle(received(beat(4, **NOTHING_HELD, sync_share=0.002)), 0.2)
    counted = {"inner_steps": 4, "tokens": 40, "sync_share": 0.002, "bytes_up": 10, "bytes_down": 100}
    assert report(made.run, traffic)["islands"]["island-0"] == counted | {"incarnations": 1}


def test_totals_add_up_and_know_the_target():
    made = joined()
    made.handle(received(beat(4, **NOTHING_HELD, loss=3.0)), 0.2)
    found = totals(made.run, 0.3)
    assert (found.trained_tokens, found.in_flight_tokens, found.progress, found.loss) == (40, 40, 0.04, 3.0)
    assert fragments(made.run, {}, 0.0, 0.3) == []  # nothing is published before all of version 0 is there


def test_refusals_of_strangers_stand_under_one_name():
    made = joined()
    made.handle(received(m.Nothing(round_id=1, fragment_id=0), sender="ghost"), 0.2)
    made.handle(received(beat(4, **NOTHING_HELD), incarnation=9), 0.2)
    made.handle(received(beat(4, **NOTHING_HELD, tokens=41)), 0.2)
    assert refusals(made.run) == {"island-0": {"implausible": 1, "unknown_island": 1}, UNKNOWN: {"unknown_island": 1}}


def test_complaints_about_names_without_end_take_no_memory_without_end(monkeypatch):
    monkeypatch.setattr("aggregator.process.telemetry.MOST_COMPLAINTS", 3)
    notes = NoteLog()

    def told(name):
        return notes.write(Note(name="contribution.refused", fields={"island": name, "reason": "stale"})) is not None

    assert [told(name) for name in "abcabc"] == [True] * 3 + [False] * 3
    assert told("d")
    assert not told("c")
    assert told("a")  # forgotten, and told of once more


def test_a_repeated_complaint_is_logged_now_and_then_and_each_round_once(caplog):
    caplog.set_level("INFO")
    notes = NoteLog()
    refusal = Note(name="contribution.refused", fields={"island": "a", "reason": "stale"})
    assert [notes.write(refusal) is not None for _ in range(12)] == [n in (0, 9) for n in range(12)]
    assert notes.write(Note(name="round.opened", fields={"round": 1})) is None
    committed = Note(name="version.committed", fields={"round": 1, "contributions": [{}]})
    assert notes.write(committed) == {"round": 1}
    assert [r.getMessage().split()[0] for r in caplog.records] == ["contribution.refused"] * 2 + ["version.committed"]
