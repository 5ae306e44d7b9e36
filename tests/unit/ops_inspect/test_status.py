"""Status from what stands in Redis, and how it is shown."""

import argparse
import io
import json
import os

import pytest
from rich.console import Console

from broker.base.errors import ConfigError, Unavailable
from broker.registry.reporter import MembersSeen
from broker.routing.liveness import Liveness
from broker.wire.messages import Envelope
from broker.wire.records import LeaseView, Snapshot
from ops.inspect import status as command
from ops.inspect.status_view import headline, render, to_json
from ops.run_directory import claim, in_use
from ops.story.run_status import status_of, stopped
from ops.text import PLAIN_WIDTH, size
from tests.aggregator_hand import beat

NOW_S = 1_000_000.0


def member(**changes):
    values = {"incarnation": 1, "inner_step": 10, "tokens": 5120, "loss": 3.25, "step_time_s": 0.2}
    values |= {"sync_share": 0.004, "bytes_up": 2_500_000, "bytes_down": 999, "stopped": False, "left": False}
    return values | changes


FRAGMENT = {"version": 4, "merged_tokens": 4096, "contributors": ["a", "b"]}
TOTALS = {
    "phase": "running",
    "trained_tokens": 20_480,
    "merged_tokens": 16_384,
    "in_flight_tokens": 4000,
    "target_tokens": 40_960,
    "progress": 0.5,
    "loss": 3.25,
    "model_version": 4,
    "wasted_tokens": {"stale": 96},
    "rounds": {"2": 4},
}
LIMITS = {"suspect_after_s": 2.0, "dead_after_s": 6.0}


def snapshot(**changes):
    values = {
        "run_id": "demo",
        "now_s": NOW_S,
        "heard_at_s": {"b": NOW_S - 0.3, "a": NOW_S - 3.0, "c": NOW_S - 60.0, "d": NOW_S - 4000.0},
        "members": {"a": member(), "b": member(loss=None), "c": member(loss=float("nan")), "d": member(left=True)},
        "fragments": {1: FRAGMENT | {"epoch": 1, "digest": "ab", "committed_at": NOW_S - 12.5}},
        "totals": [TOTALS],
        "brokers": {"hub:7001": LIMITS | {"written_at": NOW_S - 0.4}},
        "refusals": {
            "broker:hub:7001": {"a": {"queue_full": 2}, "(unknown)": {"malformed": 7}},
            "aggregator": {"a": {"queue_full": 1, "stale": 1}},
        },
        "leases": {},
    }
    return Snapshot(**(values | changes))


def with_totals(**changes):
    return status_of(snapshot(totals=[TOTALS | changes]), NOW_S)


def shown(what):
    out = io.StringIO()
    Console(file=out, width=PLAIN_WIDTH, highlight=False).print(render(what))
    return out.getvalue()


def test_states_follow_from_the_time_since_an_island_was_heard():
    found = status_of(snapshot(), NOW_S)
    states = {"a": Liveness.SUSPECT, "b": Liveness.ALIVE, "c": Liveness.DEAD, "d": Liveness.LEFT}
    assert {name: each.state for name, each in found.islands.items()} == states
    assert found.islands["a"].last_seen_s == pytest.approx(3.0)
    assert found.totals["islands"] == {"alive": 1, "suspect": 1, "dead": 1, "left": 1}


def test_refusals_of_broker_and_aggregator_are_added_up():
    found = status_of(snapshot(), NOW_S)
    assert found.islands["a"].refusals == {"queue_full": 3, "stale": 1}
    assert found.islands["b"].refusals == {}
    assert found.totals["refusals"] == {"malformed": 7, "queue_full": 3, "stale": 1}


def test_json_has_the_documented_keys_and_is_strict():
    document = to_json(status_of(snapshot(), NOW_S))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert set(document) == {"islands", "fragments", "totals", "brokers", "shards", "evaluation"}
    assert document["evaluation"] is None
    a = document["islands"]["a"]
    assert set(a) >= {"state", "inner_step", "tokens", "loss", "step_time_s", "last_seen_s", "refusals"}
    assert a["state"] == "suspect"
    assert document["islands"]["c"]["loss"] is None  # was not a number
    assert document["fragments"]["1"] == FRAGMENT | {"age_s": 12.5}
    assert document["totals"]["trained_tokens"] == 20_480


EVERYTHING = """\
run demo: 1 alive, 1 suspect, 1 dead, 1 left; running 50% of 40,960 tokens; trained 20,480 = merged 16,384 + wasted 96 \
+ in flight 4,000; loss 3.2500; agreement 0.31, 0.42 of successive moves; refused malformed 7, queue_full 3, stale 1
H is 60 for now: merging takes 0.3 s a round.
A journey takes 13 of 41 steps, which costs about 3% of the loss of a small model.
evaluated at 12,000 tokens: loss 1.500, accuracy 0.750

island state step tokens loss step time last seen sync up down sends optimizer refused
a suspect 10 5,120 3.2500 0.200 s 3.0 s 0.40% 2.5 MB 999 B - - queue_full 3, stale 1
b alive 10 5,120 - 0.200 s 0.3 s 0.40% 2.5 MB 999 B - -
c revoked 10 5,120 3.2500 0.200 s 1 min 00 s 0.40% 2.5 MB 999 B - -
d left 10 5,120 3.2500 0.200 s 1 h 06 min 0.40% 2.5 MB 999 B - -

fragment version age merged tokens contributors
1 4 12.5 s 4,096 a, b

shard leader epoch renewed in sync standbys heard
0 hub:7 2 14.0 s - -

broker state last wrote islands
one silent 7.5 s 1
two alive 0.2 s 1

b is quarantined for 1 min 12 s more, after outlier, for the 3rd time in a row: its contributions are refused, rounds \
do not wait for it.

c agrees 0.05 of 0.30 usual; weighs 20% of its tokens' worth.

e weighs 50% of its tokens' worth, for now: it is new.

The aggregator (hub:7) last renewed its lease 14.0 s ago: it has ended or lost Redis."""


def test_the_text_has_all_that_there_is_to_say_and_of_a_plain_run_no_more():
    metrics = {"metrics": {"accuracy": 0.75, "loss": 1.5}, "better": {"loss": "min"}, "failed": {}}
    point = {"tokens": 12_000, "versions": [3, 4], "model": "ab12", "at": 1_800_000_000.0, "seconds": 0.25, **metrics}
    interval = {"steps": 60, "because": "merging takes 0.3 s a round"}
    journey = {"steps": 12.8, "of": 41, "cost": 0.027}
    kept_out = {"b": {"for_s": 72.0, "reason": "outlier", "times": 3}}
    directions = {"agreement": 0.31, "momentum_cosine": 0.42}
    directions["trust"] = {
        "c": {"trust": 0.2, "agreement": 0.05, "usual": 0.3, "new": False},
        "e": {"trust": 0.5, "agreement": None, "usual": None, "new": True},
    }
    brokers = {"one": LIMITS | {"written_at": NOW_S - 7.5}, "two": LIMITS | {"written_at": NOW_S - 0.2}}
    of_one = {"a": member(broker="one"), "c": member(broker="one", revoked=True)}  # c is dead
    found = status_of(
        snapshot(
            brokers=brokers,
            members=of_one | {"b": member(broker="two", loss=None), "d": member(left=True)},
            totals=[TOTALS | {"interval": interval, "journey": journey, "quarantined": kept_out} | directions],
            evaluation=point,
            **leases(14.0),
        ),
        NOW_S,
    )
    assert "\n".join(" ".join(line.split()) for line in shown(found).splitlines()) == EVERYTHING
    assert (found.broker_is_silent, found.broker_age_s) == (False, pytest.approx(0.2))
    document = to_json(found)
    assert (document["totals"]["interval"], document["totals"]["quarantined"]) == (interval, kept_out)
    assert {name: document["totals"][name] for name in directions} == directions
    assert (document["evaluation"], document["brokers"]["one"]["silent"]) == (point, True)
    plain = shown(status_of(snapshot(totals=[TOTALS | {"interval": {}, "journey": {}}], **leases(0.4)), NOW_S))
    assert not [
        word
        for word in ("for now", "journey", "evaluated", "quarantined", "agree", "silent", "last renewed", "\x1b")
        if word in plain
    ]


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (10**13, "10.0 TB")]
)
def test_size_is_short(nbytes, text):
    assert size(nbytes) == text


def checked(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def leases(*renewed_ago_s):
    views = [LeaseView(holder=f"hub:{7 + n}", epoch=2, age_s=age_s) for n, age_s in enumerate(renewed_ago_s)]
    return {"leases": dict(enumerate(views))}


def written(*ago_s):
    return {"brokers": {f"broker-{n}": {"written_at": NOW_S - each} for n, each in enumerate(ago_s)}}


@pytest.fixture
def check(monkeypatch, capsys):
    """Runs the check against a snapshot; returns its exit status, and its one line."""

    def call(words, found):
        async def fetch(url, run_id):
            return status_of(snapshot(**found), NOW_S)

        monkeypatch.setattr(command, "_fetch", fetch)
        code = checked(*words.split())
        said = capsys.readouterr()
        assert (said.out == "") == (code != 0)
        line = said.out + said.err
        assert line.count("\n") == 1
        return code, line.strip()

    return call


@pytest.mark.parametrize(
    ("words", "found", "code"),
    [
        ("--leader", leases(9.9), 0),
        ("--leader", leases(-3.0), 0),  # a clock was set back
        ("--leader", leases(10.1), 1),
        ("--leader 3", leases(4.0), 1),
        ("--leader", leases(0.4, 60.0), 1),
        ("--leader 100", leases(0.4, 60.0), 0),
        ("--leader", {"heard_at_s": {}, "members": {}, "fragments": {}, "totals": [], "refusals": {}}, 1),
        ("--broker", written(9.9), 0),
        ("--broker", written(10.1), 1),
        ("--broker 3", written(4.0), 1),
        ("--broker", written(3600.0, 1.0), 0),
        ("--broker", written(), 1),
    ],
)
def test_a_health_check_fails_where_nobody_spoke_within_its_limit(check, words, found, code):
    assert check(words, found)[0] == code


def test_a_health_check_names_the_run_who_it_was_and_the_limit(check):
    assert check("--leader", leases(0.4))[1] == "run demo is led by hub:7, which renewed its lease 0.4 s ago"
    shard = "atoll: shard 1 of run demo has no leader: aggregator hub:8 renewed its lease 1 min 00 s ago"
    assert check("--leader", leases(0.4, 60.0))[1] == f"{shard}, the limit is 10.0 s"
    broker = "atoll: run demo has no broker: the last one wrote to Redis 10.1 s ago, the limit is 10.0 s"
    assert check("--broker", written(10.1))[1] == broker


def test_a_run_whose_processes_are_gone_is_stopped_and_not_running():
    status = stopped(status_of(snapshot(), NOW_S + 3600))
    text = shown(status)
    assert headline(status).startswith("run demo: 4 islands; stopped 50% of 40,960 tokens")
    assert "No process of this run is alive: up --resume goes on with it, or hub --run-dir." in text
    assert "dead" not in text
    assert "lost Redis" not in text
    assert to_json(status)["totals"]["phase"] == "stopped"
    ended = with_totals(phase="ended")
    assert stopped(ended) == ended


def test_of_a_run_that_has_ended_the_newest_evaluation_is_that_of_its_directory(tmp_path):
    line = {"tokens": 130, "versions": [1], "model": "x", "at": 1.0, "seconds": 0.1, "metrics": {"mc/acc": 0.5}}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "config.toml").write_text('[run]\nrun_id = "demo"\n')
    status = command._as_left(status_of(snapshot(), NOW_S), argparse.Namespace(run_dir=tmp_path))
    assert "evaluated at 130 tokens: mc/acc 0.500" in shown(status)


def test_a_run_that_has_ended_lost_nothing_with_its_broker():
    ended = status_of(snapshot(totals=[TOTALS | {"phase": "ended"}]), NOW_S + 3600)
    assert ended.broker_is_silent
    assert "lost Redis" not in shown(ended)


def test_a_broker_reports_who_has_no_key_any_more_and_who_has_one_again():
    seen = MembersSeen(max_islands=2)
    seen.observe(Envelope(run_id="demo", sender="paris", incarnation=1, sequence=1, to="", message=beat(4)), 1.0)
    seen.written(seen.due(1.0, everything=True), 1.0)
    told = []
    for allowed in ({"rome"}, {"rome"}, {"paris"}):
        seen.allow(allowed.__contains__)
        told.append([each.revoked for each in seen.due(2.0, everything=False)])
        seen.written(seen.due(2.0, everything=False), 2.0)
    assert told == [[True], [], [False]]


def test_what_is_no_lease_under_its_name_is_said():
    with pytest.raises(Unavailable, match=r"is no lease: .* delete that key"):
        LeaseView.of({"holder": "a", "epoch": "many", "renewed_at": "1"}, 2.0)
    assert LeaseView.of({}, 2.0) == LeaseView()


@pytest.mark.parametrize("flag", ["--leader", "--broker"])
@pytest.mark.parametrize(
    ("word", "cure"),
    [("0", "above 0"), ("nan", "above 0"), ("--json", "leave out --json and --watch"), ("--watch", "leave out --json")],
)
def test_a_check_refuses_what_it_cannot_do(flag, word, cure):
    with pytest.raises(ConfigError, match=cure):
        checked(flag, word)


def test_a_directory_is_in_use_while_somebody_holds_it(tmp_path):
    assert not in_use(tmp_path)
    lock = claim(tmp_path)
    assert in_use(tmp_path)
    os.close(lock)
    assert not in_use(tmp_path)


@pytest.mark.parametrize("other", [{}, {"tokens": "many"}, {"tokens": 5}, []])
def test_what_is_no_evaluation_is_not_told(other):
    assert status_of(snapshot(evaluation=other), NOW_S).evaluation is None


def test_an_island_has_what_all_its_lives_trained_and_sent():
    found = with_totals(earlier={"a": {"tokens": 1000, "bytes_up": 5, "bytes_down": 1}})
    a = found.islands["a"]
    assert (a.tokens, a.bytes_up, a.bytes_down, a.inner_step) == (6120, 2_500_005, 1000, 10)
    assert found.islands["b"].tokens == 5120
    assert "earlier" not in to_json(found)["totals"]
