"""Metrics as values: names after Prometheus' conventions, what labels say, and what a scrape of them looks like."""

import asyncio
import re
import shutil
import subprocess
import threading
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aggregator.rules.troubles import Troubles
from aggregator.state import summary
from aggregator.state.metrics import AggregatorSnapshot, leading_of
from aggregator.state.metrics import families_of as aggregator_families
from broker.base.errors import ConfigError
from broker.metrics.family import Families
from broker.metrics.serving import MetricsServer, NoAnswer, served
from broker.registry import reporter
from broker.routing.liveness import Liveness
from ops.processes.cluster import free_ports
from tests.aggregator_hand import Desk
from tests.metric_snapshots import ALL_FAMILIES, aggregator_snapshot, broker_snapshot, island_families, standing_by


def samples(families, name):
    """Value by labels, without those that all samples share."""
    (family,) = (each for each in families if each.name == name)
    common = {"run", "broker", "shard"} | ({"island"} if "atoll_island" in name else set())
    shared = len(common & set(family.labels))
    return {
        labels[shared:] if len(labels) > shared + 1 else "".join(labels[shared:]): value
        for labels, value in family.samples.items()
    }


def set_in(families, name):
    return {labels for labels, value in samples(families, name).items() if value}


def scraped(port):
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL_FAMILIES, ids=lambda each: each.name)
def test_names_and_helps_follow_the_conventions(family):
    assert re.fullmatch(r"atoll_(broker|aggregator|island)_[a-z_]+", family.name)
    assert re.fullmatch(r"[A-Z0-9].{10,}[a-z0-9]\.", family.help)
    assert family.labels[0] == "run"
    assert not set(family.labels) & {"job", "instance", "le", "quantile"}  # Prometheus' own
    for unit in ("ms", "millisecond", "minute", "kilobyte", "mib", "percent"):
        assert not re.search(rf"(_|\b){unit}(s|_|\b)", family.name)
    for quantity, unit in (("time", "_seconds"), ("memory", "_bytes"), ("share", "_ratio")):
        assert quantity not in family.name.split("_") or family.name.removesuffix("_total").endswith(unit)


def test_no_name_is_given_twice_every_sample_has_all_labels_and_each_unit_is_used():
    names = [each.name for each in ALL_FAMILIES]
    assert len(names) == len(set(names))
    for each in ALL_FAMILIES:
        assert all(len(labels) == len(each.labels) for labels in each.samples), each.name
    for unit in ("_seconds", "_bytes", "_ratio", "_tokens"):
        assert [name for name in names if name.removesuffix("_total").endswith(unit)], unit


def test_what_is_not_known_is_left_out_and_a_label_stands_behind_those_shared():
    own = Families("atoll_broker", run="demo")
    own.gauge("depth", "How deep it is.", {"a": 1, "b": None}, "place")
    own.counter("falls", "How often it fell.", None)
    own.state("stage", "Where it is.", {"a": Liveness.DEAD}, Liveness, "place")
    depth, falls, stage = own.all
    assert (depth.labels, dict(depth.samples)) == (("run", "place"), {("demo", "a"): 1.0})
    assert (falls.name, dict(falls.samples)) == ("atoll_broker_falls_total", {})
    assert stage.labels == ("run", "place", "stage")
    assert {labels[2] for labels, value in stage.samples.items() if value} == {"dead"}
    assert len(stage.samples) == len(Liveness)


# --- what they say ----------------------------------------------------------------------------------------------------


def test_a_broker_tells_who_was_refused_and_who_is_silent():
    found = reporter.families_of(broker_snapshot())
    assert samples(found, "atoll_broker_refused_messages_total") == {
        ("island-0", "stale"): 2.0,
        ("(joining)", "wrong_run"): 3.0,  # two processes with a nonce each are one series
    }
    assert set_in(found, "atoll_broker_island_state") == {
        ("island-0", "alive"),
        ("island-1", "dead"),
        ("island-2", "left"),
    }
    assert samples(found, "atoll_broker_island_heard_timestamp_seconds")["island-1"] == 1000.0 - 60.0
    assert samples(found, "atoll_broker_redis_connected") == {"": 1.0}


def test_an_aggregator_tells_tokens_that_balance_and_rounds_refusals_and_standbys():
    found = aggregator_families(aggregator_snapshot())
    (trained,) = samples(found, "atoll_aggregator_trained_tokens_total").values()
    parts = ("merged_tokens_total", "wasted_tokens", "in_flight_tokens")
    assert trained == sum(sum(samples(found, f"atoll_aggregator_{each}").values()) for each in parts) == 1000.0
    assert samples(found, "atoll_aggregator_rounds_total") == {"1": 2.0, "2": 5.0}
    assert samples(found, "atoll_aggregator_contributors_total") == {"": 12.0}
    assert samples(found, "atoll_aggregator_fragment_version_timestamp_seconds") == {"0": 995.0, "1": 993.0}
    refused = samples(found, "atoll_aggregator_refused_messages_total")
    assert refused["island-0", "not_finite"] == 0.0, "its growth from 0 would not be seen"
    assert refused["island-1", "not_finite"] == 1.0
    assert samples(found, "atoll_aggregator_standby_in_sync") == {"hub-2": 1.0, "hub-3": 0.0}
    assert samples(found, "atoll_aggregator_standbys_in_sync") == {"": 1.0}
    assert samples(found, "atoll_aggregator_island_loss") == {"island-0": 2.5}, "island-1 has not told a loss"
    assert samples(found, "atoll_aggregator_leader") == {"": 1.0}


@pytest.fixture
def desk():
    """After a round to which two islands contributed."""
    made = Desk()
    made.gather("a", "b")
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    made.offer("b", 0, 4)
    return made


def figures_of(desk, committed_at_s, *, began_s=0.0, now_s):
    leading = leading_of(
        desk.core.run,
        fragments=summary.fragments(desk.core.run, committed_at_s, began_s, now_s),
        totals=summary.totals(desk.core.run, now_s),
        refusals=summary.refusals(desk.core.run),
        standbys=None,
        now_s=now_s,
    )
    return aggregator_families(AggregatorSnapshot(run_id="demo", shard=0, leading=leading, wall_s=1000.0))


def test_the_figures_of_a_leader_come_from_its_core(desk):
    found = figures_of(desk, {0: desk.now_s}, now_s=desk.now_s + 2.0)
    assert samples(found, "atoll_aggregator_rounds_total") == {"2": 1.0}
    assert samples(found, "atoll_aggregator_fragment_version") == {"0": 1.0}
    assert samples(found, "atoll_aggregator_fragment_version_timestamp_seconds") == {"0": 998.0}
    tokens = {"a": 40.0, "b": 40.0}
    assert samples(found, "atoll_aggregator_island_tokens_total") == tokens
    assert samples(found, "atoll_aggregator_merged_tokens_total") == {"": sum(tokens.values())}
    assert not [each for each in found if each.name == "atoll_aggregator_standbys_in_sync" and each.samples]
    desk.tick(desk.now_s + 7.0)
    found = figures_of(desk, {}, now_s=desk.now_s)
    assert set_in(found, "atoll_aggregator_island_state") == {("a", "dead"), ("b", "dead")}


def test_the_directions_of_a_fleet_are_told_once_they_were_compared(desk):
    names = ("fleet_agreement", "momentum_cosine", "diverging", "island_agreement", "island_trust")

    def told():
        found = figures_of(desk, {}, now_s=desk.now_s)
        return [samples(found, f"atoll_aggregator_{name}") for name in names]

    assert told() == [{}, {}, {"": 0.0}, {}, {"a": 1.0, "b": 1.0}]
    desk.join("c")
    desk.beat("c", 0)
    desk.cosines, desk.momentum_cosine = lambda merge: (0.3, 0.3, 0.3), 0.5
    desk.open_round("a", "b", "c", step=8)
    for island_id in "abc":
        desk.offer(island_id, 4 if island_id != "c" else 0, 8)
    fleet, momentum, _, islands, trust = told()
    assert (fleet, momentum, set(trust.values())) == ({"": 0.3}, {"": 0.5}, {1.0})
    assert islands == dict.fromkeys("abc", pytest.approx(0.15, abs=0.01))


def test_counters_do_not_go_back_with_a_restart_but_wait_for_the_islands_and_versions_are_as_old_as_it(desk):
    desk.beat("a", 9)  # which no commit has
    tokens = "atoll_aggregator_island_tokens_total"
    assert samples(figures_of(desk, {}, now_s=desk.now_s), tokens) == {"a": 90.0, "b": 40.0}
    again = desk.restarted()
    for later_s in (50.0, 0.0):
        found = figures_of(again, {}, began_s=again.now_s, now_s=again.now_s + later_s)
        committed = samples(found, "atoll_aggregator_fragment_version_timestamp_seconds")
        assert committed == {"0": 1000.0 - later_s}
    assert samples(found, tokens) == samples(found, "atoll_aggregator_trained_tokens_total") == {}
    assert samples(found, "atoll_aggregator_merged_tokens_total") == {"": 80.0}
    again.beat("a", 9)
    again.beat("b", 4)
    found = figures_of(again, {}, now_s=again.now_s)
    assert samples(found, tokens) == {"a": 90.0, "b": 40.0}
    assert samples(found, "atoll_aggregator_trained_tokens_total") == {"": 130.0}


def test_a_standby_says_that_it_is_one_and_no_more():
    found = aggregator_families(standing_by())
    assert samples(found, "atoll_aggregator_leader") == {"": 0.0}
    assert {each.name for each in found if each.samples} == {"atoll_aggregator_leader"}


def test_an_island_tells_its_contributions_by_fate():
    found = island_families()
    assert samples(found, "atoll_island_contributions_total") == {"merged": 7.0, "refused": 1.0}
    assert samples(found, "atoll_island_refused_contributions_total") == {"stale": 1.0}
    assert samples(found, "atoll_island_unresolved_contributions") == {"": 1.0}
    assert samples(found, "atoll_island_fragment_version") == {"0": 3.0, "1": 4.0}
    assert samples(found, "atoll_island_broker_heard_timestamp_seconds") == {"": 999.5}


def test_a_trouble_is_known_by_its_name_while_it_lasts():
    troubles = Troubles()
    troubles.begin("store", "it is full", 1.0)
    assert "store" in troubles
    troubles.end("store", 2.0)
    assert "store" not in troubles


# --- how they are served --------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    opened = []

    def open_one(collect):
        opened.append(MetricsServer("127.0.0.1", free_ports(1), collect))
        return opened[-1].port

    yield open_one
    for each in opened:
        each.close()


def test_a_scrape_is_what_the_librarys_own_parser_reads(server):
    text = scraped(server(lambda: ALL_FAMILIES))
    read = {each.name: each for each in text_string_to_metric_families(text)}
    for family in ALL_FAMILIES:
        metric = read[family.name.removesuffix("_total")]
        kind = "counter" if family.name.endswith("_total") else "gauge"
        assert (metric.type, metric.documentation) == (kind, family.help)
        found = {tuple(each.labels[name] for name in family.labels): each.value for each in metric.samples}
        assert found == dict(family.samples)
        assert all(each.labels.keys() == set(family.labels) for each in metric.samples)
    assert read["process_resident_memory_bytes"].samples[0].value > 1e6


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Debian's package prometheus")
def test_promtool_finds_nothing_to_improve(server):
    text = scraped(server(lambda: ALL_FAMILIES))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_is_collected_before_somebody_asks_and_once_for_each_scrape(server):
    asked = []
    port = server(lambda: asked.append(1) or [])
    assert asked == []
    scraped(port)
    scraped(port)
    assert len(asked) == 2


def test_a_process_that_does_not_answer_fails_the_scrape_with_a_reason(server):
    def collect():
        raise NoAnswer("the process has not answered within 5 s")

    with pytest.raises(HTTPError) as caught:
        scraped(server(collect))
    assert caught.value.code == 503
    assert b"has not answered" in caught.value.read()


def test_a_port_that_is_taken_is_named_with_the_cure(server):
    port = server(list)
    with pytest.raises(ConfigError, match=r"metrics_port = \d+: cannot be listened on at 127.0.0.1 .*take another"):
        MetricsServer("127.0.0.1", port, list)


def test_figures_are_collected_in_the_event_loop_and_made_into_metrics_elsewhere():
    where = []

    def collect():
        where.append(threading.current_thread())
        return 3

    def families_of(figure):
        where.append(threading.current_thread())
        own = Families("atoll_broker", run="demo")
        own.gauge("depth", "How deep it is.", figure)
        return own.all

    async def run():
        port = free_ports(1)
        async with served("127.0.0.1", port, collect, families_of):
            return await asyncio.to_thread(scraped, port)

    assert 'atoll_broker_depth{run="demo"} 3.0' in asyncio.run(run())
    assert [each is threading.current_thread() for each in where] == [True, False]


def test_without_a_port_nothing_listens_and_nothing_is_asked():
    async def run():
        async with served("127.0.0.1", 0, lambda: pytest.fail("asked"), lambda _: []):
            return True

    assert asyncio.run(run())
