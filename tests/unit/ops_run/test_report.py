"""The report: exactly the keys that were promised, from whatever the aggregator managed to write."""

import json
from dataclasses import replace

import pytest

from broker.routing.liveness import Liveness
from ops.run.report import RunFacts, build_report, is_balanced, last_seen, render
from ops.story.curve import Point
from ops.story.run_status import FragmentStatus, IslandStatus, Status

COUNTED = {
    "tokens": {"trained": 1000, "merged": 900, "in_flight": 40, "wasted": {"stale": 50, "island_lost": 10}},
    "versions": {10: 3, 2: 4},
    "rounds": {"2": 1, "4": 6},
    "participation": 0.93,
    "staleness_mean": 0.25,
    "islands": {
        "island-0": {"inner_steps": 10, "tokens": 700, "sync_share": 0.004, "bytes_up": 1_200_000, "bytes_down": 999},
        "far": {"inner_steps": 5, "tokens": 300, "sync_share": None, "bytes_up": 1, "bytes_down": 2, "incarnations": 3},
    },
    "phase": "ended",
    "refusals": {"stale": 2},
}
FACTS = RunFacts(
    run_id="demo",
    run_dir="/runs/demo",
    exit=0,
    wall_s=252.0,
    first_step_s=8.5,
    restarts={"island-0": 1, "broker": 2},
    loss_unit="nats per token",
)


def loss(value):
    return {"loss": {"value": value, "better": "min"}}


def test_the_report_has_the_keys_that_were_promised():
    report = build_report(COUNTED, FACTS, before=loss(5.5), after=loss(2.2))
    assert report["loss"] == {"before": 5.5, "after": 2.2, "unit": "nats per token"}
    assert report["metrics"] == {"loss": {"before": 5.5, "after": 2.2, "better": "min"}}
    assert report["tokens"] == COUNTED["tokens"]
    assert report["versions"] == {"2": 4, "10": 3}
    assert report["rounds"] == {"2": 1, "4": 6}
    assert (report["participation"], report["wall_s"], report["exit"]) == (0.93, 252.0, 0)
    of_an_island = {"inner_steps", "tokens", "sync_share", "bytes_up", "bytes_down", "restarts"}
    assert report["islands"]["far"].keys() == of_an_island
    assert report["evaluations"] == {}
    assert json.loads(json.dumps(report)) == report


def test_where_the_model_is_for_other_tools_is_said():
    facts = replace(FACTS, exported="/runs/demo/export")
    report = build_report(COUNTED, facts, before=loss(5.5), after=loss(2.2))
    assert report["exported"] == "/runs/demo/export"
    assert "its model for other tools: from_pretrained('/runs/demo/export')" in render(report)
    assert "from_pretrained" not in render(build_report(COUNTED, FACTS, before={}, after={}))


def test_an_aggregator_that_wrote_nothing_still_gives_a_report():
    facts = RunFacts(run_id="demo", run_dir="/r", exit=1, wall_s=3.0, note="broker ended with status 2")
    report = build_report(None, facts, before={}, after={})
    assert report["tokens"] == {"trained": None, "merged": None, "in_flight": None, "wasted": {}}
    assert (report["counted"], is_balanced(report)) == ("unknown", True)
    text = render(report)
    assert "  tokens        not known: " in text
    assert "run demo: broker ended with status 2, after 3.0 s" in text
    assert "not evaluated" in text


def test_the_counts_of_an_aggregator_that_left_none_are_those_that_redis_had_last():
    totals = {"phase": "running", "rounds": {"1": 3}, "participation": 0.5, "staleness_mean": 0.0, "recipe": {}}
    totals |= {"agreement": None, "momentum_cosine": None}
    totals |= {"refusals": {}, "troubles": ["for 3 s: its disk is full"], "wasted_tokens": {"stale": 159}}
    totals |= {"trained_tokens": 32_768, "merged_tokens": 32_609, "in_flight_tokens": 0}
    island = IslandStatus(
        state=Liveness.ALIVE, incarnation=2, inner_step=512, tokens=32_768, loss=None, step_time_s=None,
        last_seen_s=0.1, sync_share=None, bytes_up=5, bytes_down=6, refusals={},
    )  # fmt: skip
    fragments = {0: FragmentStatus(version=3, age_s=1.0, contributors=("a",), merged_tokens=32_609)}
    seen = Status(
        run_id="demo", islands={"a": island}, fragments=fragments, totals=totals, broker_age_s=0, broker_is_silent=False
    )
    facts = replace(FACTS, exit=1, as_seen=True, undone=("log-1 has not written the last figures",))
    report = build_report(last_seen(seen), facts, before={}, after={})
    assert (report["counted"], report["tokens"]["trained"], report["versions"]) == ("at least", 32_768, {"0": 3})
    assert report["agreement"] is None
    assert "directions" not in render(report)
    known = replace(seen, totals=totals | {"agreement": 0.31, "momentum_cosine": 0.42})
    directions = "  directions    agreement 0.31, 0.42 of successive moves\n"
    assert directions in render(build_report(last_seen(known), facts, before={}, after={}))
    text = render(report)
    assert (
        "  tokens        at least 32,768 trained = 32,609 merged (99.5%) + 159 wasted (stale 159) + 0 in flight" in text
    )
    assert "  trouble       for 3 s: its disk is full\n  trouble       log-1 has not written" in text
    assert last_seen(replace(seen, totals={})) is None


@pytest.mark.parametrize(
    ("restarts", "wasted", "counted"), [(0, {}, "all"), (1, {}, "at least"), (0, {"island_lost": 7}, "at least")]
)
def test_tokens_of_lives_that_were_killed_are_a_lower_bound(restarts, wasted, counted):
    source = {
        "tokens": {"trained": 1000, "merged": 1000 - sum(wasted.values()), "in_flight": 0, "wasted": wasted},
        "islands": {"island-0": {}},
    }
    report = build_report(source, replace(FACTS, restarts={"island-0": restarts}), before={}, after={})
    assert report["counted"] == counted
    assert ("at least 1,000 trained" in render(report)) == (counted == "at least")


def test_a_run_that_was_interrupted_says_how_to_go_on_with_it():
    facts = replace(FACTS, exit=130, note="interrupted by SIGINT", resume="atoll up --resume /runs/demo")
    report = build_report(COUNTED, facts, before={}, after={})
    assert render(report).endswith("\nto go on with it, and merge what is in flight: atoll up --resume /runs/demo")
    assert report["resume"] == facts.resume
    assert "to go on" not in render(build_report(COUNTED, FACTS, before={}, after={}))


def test_tokens_that_do_not_add_up_are_pointed_out():
    counted = {**COUNTED, "tokens": {**COUNTED["tokens"], "merged": 901}}
    report = build_report(counted, FACTS, before={}, after={})
    assert not is_balanced(report)
    assert "do not add up" in render(report)


@pytest.mark.parametrize(
    ("better", "values", "told"),
    [
        ("max", (0.128, 0.916), "0.128 -> 0.916 (better)"),
        ("max", (0.9, 0.4), "0.900 -> 0.400 (worse)"),
        ("max", (0.5, 0.5), "0.500 -> 0.500 (unchanged)"),
        ("min", (50.0, 20.0), "50.000 -> 20.000 (-60.0%)"),
        ("min", (-3.0, 1.0), "-3.000 -> 1.000 (worse)"),
        ("min", (0.00012, 0.0), "0.00012 -> 0.000 (-100.0%)"),
        ("", (1.0, 2.0), "1.000 -> 2.000"),
        ("max", (1.0, None), "1.000"),
        ("max", (None, None), "no number"),
    ],
)
def test_a_metric_is_told_with_its_name_and_whether_it_got_better(better, values, told):
    before, after = ({"accuracy": {"value": value, "better": better}} for value in values)
    report = build_report(COUNTED, FACTS, before=before, after=after)
    assert report["loss"] == {"before": None, "after": None, "unit": "nats per token"}
    assert report["metrics"]["accuracy"] == {"before": values[0], "after": values[1], "better": better}
    text = render(report)
    assert f"  accuracy      {told}\n" in text
    assert "loss" not in text


def test_the_text_says_what_people_ask_first():
    text = render(build_report(COUNTED, FACTS, before=loss(5.5), after=loss(2.2)))
    assert "run demo: finished, after 4 min 12 s" in text
    assert "5.500 -> 2.200 nats per token (-60.0%)" in text
    assert "1,000 trained = 900 merged (90.0%) + 60 wasted (island_lost 10, stale 50) + 40 in flight" in text
    assert "2 fragments at version 3 to 4" in text
    assert "7: 6 with 4, 1 with 2 contributors" in text
    assert "93% of the live islands in a version; mean staleness 0.25 versions" in text
    assert "broker 2" in text
    assert "island-0         10           700     0.40%     1.2 MB      999 B         1" in text


def test_a_curve_is_told_where_there_is_more_than_before_and_after():
    def point(tokens, value):
        metrics, better = {"loss": value}, {"loss": "min"}
        return Point(tokens=tokens, versions=(1,), model="m", at=0.0, seconds=0.0, metrics=metrics, better=better)

    points = [point(0, 5.5), point(500, 2.0), point(1000, 2.2)]
    report = build_report(COUNTED, FACTS, before=loss(5.5), after=loss(2.2), points=points)
    assert report["evaluations"]["count"] == 3
    assert report["evaluations"]["best"] == {"loss": {"value": 2.0, "tokens": 500}}
    told = "  curve         loss 5.500 at 0 -> 2.000 at 500 -> 2.200 at 1,000 tokens; best 2.000 at 500\n"
    assert told in render(report)
    short = build_report(COUNTED, FACTS, before=loss(5.5), after=loss(2.2), points=points[:1] + points[2:])
    assert "curve" not in render(short)
    of_no_side = [replace(each, better={}) for each in points[:2]]
    unevaluated = build_report(COUNTED, FACTS, before={}, after={}, points=of_no_side)
    assert unevaluated["evaluations"]["best"] == {}
    assert "held-out loss the last model was not evaluated" in render(unevaluated)
