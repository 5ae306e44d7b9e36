"""Metrics of real processes, as they were scraped over HTTP while runs trained."""

import socket

import pytest

from tests.live_views import Scrape
from tests.local_run import NUMPY_TASK, ops

pytestmark = pytest.mark.timeout(240)


def test_the_figures_of_broker_aggregator_and_islands_grow_and_balance(plain):
    """That they grow is what the recording waited for."""
    first = plain.seen["first"]
    names = ["broker", "aggregator", "island-0", "island-1"]
    assert plain.seen["ports"] == {name: first + k for k, name in enumerate(names)}
    assert f"metrics of aggregator at http://127.0.0.1:{first + 1}/metrics" in plain.err
    after = {name: Scrape(text) for name, text in plain.seen["metrics"].items()}
    hub = after["aggregator"]
    names = ("trained_tokens_total", "merged_tokens_total", "in_flight_tokens")
    trained, merged, in_flight = (hub.one(f"atoll_aggregator_{name}") for name in names)
    assert trained == pytest.approx(merged + in_flight + sum(hub.all("atoll_aggregator_wasted_tokens")), abs=0.01)
    assert trained == sum(hub.all("atoll_aggregator_island_tokens_total"))
    assert hub.one("atoll_aggregator_phase", phase="running") == 1
    assert hub.one("atoll_aggregator_leader") == 1
    assert hub.all("atoll_aggregator_island_state", state="alive") == [1, 1]
    assert hub.one("atoll_aggregator_store_free_bytes") > 0
    assert 0 < hub.one("atoll_aggregator_round_seconds") <= hub.one("atoll_aggregator_round_interval_seconds")
    assert after["broker"].all("atoll_broker_island_state", state="alive") == [1, 1]
    assert after["broker"].one("atoll_broker_redis_connected") == 1
    versions = after["island-0"].all("atoll_island_fragment_version")
    assert len(versions) == len(hub.all("atoll_aggregator_fragment_version"))


def test_the_second_life_of_a_killed_island_is_counted_and_serves_its_own(watched):
    hub, island = (Scrape(watched.seen["metrics"][name]) for name in ("aggregator", "island-1"))
    assert hub.one("atoll_aggregator_island_lives_total", island="island-1") == 2
    assert island.one("atoll_island_incarnation") == 2


def test_a_port_of_metrics_that_is_taken_is_refused_before_anything_starts(watched):
    status, said, exists = watched.seen["other"]
    first = watched.seen["first"]
    assert (status, exists) == (2, False)
    assert f"metrics = {first}: it or another one up to {first + 3} is in use" in said


@pytest.mark.parametrize("process", ["broker", "aggregator", "island"])
def test_a_daemon_whose_port_of_metrics_is_taken_ends_with_the_cure(tmp_path, process):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = {
            "broker": ["--port", "0"],
            "aggregator": ["--store", tmp_path / "store"],
            "island": ["--task", NUMPY_TASK],
        }
        done = ops(process, "--run", "demo", *flags[process], "--metrics-port", port, within_s=50)
    assert done.returncode == 2
    assert f"metrics_port = {port}: cannot be listened on at 127.0.0.1 (Address already in use)" in done.stderr
