"""What the aggregator tells others: the report and the records for Redis, also before anything has happened."""

from aggregator.interface.notes import ContributionRefused, RoundOpened, VersionCommitted
from aggregator.process.telemetry import NoteLog
from aggregator.state.summary import Sent, Traffic, fragments, refusals, report, totals
from broker.routing.directory import UNKNOWN
from broker.wire import messages as m
from tests.aggregator_hand import Desk, beat


def joined():
    """A core that an island has joined."""
    made = Desk(fragments=2, total_tokens=1000)
    made.join("a")
    return made


def test_an_island_is_reported_over_all_its_lives():
    made, traffic = joined(), Traffic()
    for incarnation, up, down in ((1, 5, 50), (1, 7, 70), (2, 3, 30)):
        said = beat(4, bytes_up=up, bytes_down=down)
        traffic.observe(
            m.Envelope(run_id="demo", sender="a", incarnation=incarnation, sequence=1, to="aggregator", message=said)
        )
    made.beat("a", 4, sync_share=0.002)
    counted = {"inner_steps": 4, "tokens": 40, "sync_share": 0.002, "bytes_up": 10, "bytes_down": 100}
    assert report(made.core.run, traffic)["islands"]["a"] == counted | {"incarnations": 1}


def test_bytes_are_those_of_all_processes_of_an_island_also_of_those_before_a_restart_of_the_aggregator():
    def heard(traffic, incarnation, up, down):
        said = beat(4, bytes_up=up, bytes_down=down)
        traffic.observe(
            m.Envelope(run_id="demo", sender="a", incarnation=incarnation, sequence=1, to="aggregator", message=said)
        )

    traffic = Traffic()
    heard(traffic, 1, 9, 90)
    heard(traffic, 1, 2, 20)  # another process goes on with this life
    assert traffic.of("a").total == (11, 110)
    heard(traffic, 2, 4, 40)
    heard(traffic, 1, 3, 30)  # late
    assert traffic.of("a") == Sent(incarnation=2, newest=(4, 40), before=(11, 110))
    again = Traffic()
    heard(again, 3, 1, 10)
    again.recall({"a": traffic.of("a"), "b": Sent(newest=(1, 1))})
    assert again.of("a").total == (16, 160)
    heard(again, 3, 2, 20)
    assert again.of("a").total == (17, 170)
    assert again.of("b").total == (1, 1)


def test_what_a_killed_life_trained_and_sent_stands_beside_the_counters_of_the_next():
    made, traffic = joined(), Traffic()
    made.beat("a", 4)  # nothing of it is handed over
    made.join("a")
    made.beat("a", 1)
    traffic.recall({"a": Sent(incarnation=2, newest=(3, 30), before=(5, 50))})
    found = totals(made.core.run, 0.3, traffic)
    assert found.trained_tokens == 50
    assert found.earlier == {"a": {"tokens": 40, "bytes_up": 5, "bytes_down": 50}}


def test_totals_add_up_and_know_the_target():
    made = joined()
    made.beat("a", 4, loss=3.0)
    found = totals(made.core.run, 0.3)
    assert (found.trained_tokens, found.in_flight_tokens, found.progress, found.loss) == (40, 40, 0.04, 3.0)
    assert fragments(made.core.run, {}, 0.0, 0.3) == []  # nothing is published before all of version 0 is there


def test_refusals_of_strangers_stand_under_one_name():
    made = joined()
    made.nothing("ghost", round_id=1)
    made.say("a", beat(4), incarnation=9)
    made.beat("a", 4, tokens=41)
    known = {"implausible": 1, "unknown_island": 1}
    assert refusals(made.core.run) == {"a": known, UNKNOWN: {"unknown_island": 1}}


def test_complaints_about_names_without_end_take_no_memory_without_end(monkeypatch):
    monkeypatch.setattr("aggregator.process.telemetry.MOST_COMPLAINTS", 3)
    notes = NoteLog()

    def told(name):
        return notes.write(ContributionRefused(island=name, fragment=0, reason="stale")) is not None

    assert [told(name) for name in "abcabc"] == [True] * 3 + [False] * 3
    assert told("d")
    assert not told("c")
    assert told("a")  # forgotten, and told of once more


def test_a_repeated_complaint_is_logged_now_and_then_and_each_round_once(caplog):
    caplog.set_level("INFO")
    notes = NoteLog()
    refusal = ContributionRefused(island="a", fragment=0, reason="stale")
    assert [notes.write(refusal) is not None for _ in range(12)] == [n in (0, 9) for n in range(12)]
    assert notes.write(RoundOpened(round=1, fragment=0)) is None
    committed = VersionCommitted(fragment=0, version=1, round=1, islands=0, live=0, contributions=[])
    assert notes.write(committed) == {name: each for name, each in committed.fields.items() if name != "contributions"}
    assert [r.getMessage().split()[0] for r in caplog.records] == ["contribution.refused"] * 2 + ["version.committed"]
