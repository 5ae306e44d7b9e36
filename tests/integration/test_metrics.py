"""Metrics of real processes: they are scraped over HTTP while a run trains, and the figures grow and balance."""

import json
import socket
from contextlib import suppress
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ops.processes.cluster import free_ports
from tests.local_run import NUMPY_TASK, Up, ops, wait_for

pytestmark = pytest.mark.timeout(240)

# Samples that grow while a run trains. Some exist only once an island has joined, or its first work is merged.
GROWING = (
    ("broker", "atoll_broker_received_messages_total", {}),
    ("broker", "atoll_broker_sent_bytes_total", {}),
    ("aggregator", "atoll_aggregator_versions_total", {}),
    ("aggregator", "atoll_aggregator_contributors_total", {}),
    ("aggregator", "atoll_aggregator_merged_tokens_total", {}),
    ("aggregator", "atoll_aggregator_island_tokens_total", {"island": "island-1"}),
    ("aggregator", "process_cpu_seconds_total", {}),
    ("island-0", "atoll_island_steps_total", {}),
    ("island-0", "atoll_island_contributions_total", {"fate": "merged"}),
    ("island-1", "atoll_island_sent_bytes_total", {}),
)


class Scrape:
    """The samples of one process at one moment."""

    def __init__(self, port):
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        self.samples = [each for family in text_string_to_metric_families(text) for each in family.samples]

    def all(self, name, **labels):
        return [
            each.value
            for each in self.samples
            if each.name == name and all(each.labels[key] == value for key, value in labels.items())
        ]

    def one(self, name, **labels):
        (value,) = self.all(name, **labels)
        return value


def scrape(port):
    with suppress(URLError, ConnectionError):  # it starts
        return Scrape(port)


def test_broker_aggregator_and_islands_are_scraped_while_a_run_trains(tmp_path):
    first = free_ports(4)
    run_dir = tmp_path / "run"
    with Up(run_dir, "--islands", "2", "--tokens", "0", "--metrics", first) as up:
        up.wait_for_progress()
        targets = json.loads((run_dir / "metrics.json").read_text())
        ports = {each["labels"]["process"]: int(each["targets"][0].rpartition(":")[2]) for each in targets}
        names = ["broker", "aggregator", "island-0", "island-1"]
        assert ports == {name: first + k for k, name in enumerate(names)}
        assert f"metrics of aggregator at http://127.0.0.1:{first + 1}/metrics" in up.err

        def value(process, name, labels):
            found = scrape(ports[process])
            return found is not None and found.all(name, **labels)

        for process, name, labels in GROWING:
            what = f"{name} of {process}"
            (old,) = wait_for(lambda of=(process, name, labels): value(*of), what, evidence=lambda: up.err)
            grown = wait_for(
                lambda of=(process, name, labels), old=old: [each for each in value(*of) or () if each != old],
                f"change of {what} from {old}",
                evidence=lambda: up.err,
            )
            assert grown > [old], what
        up.wait_for_progress(versions=3)
        after = {name: Scrape(port) for name, port in ports.items()}

        hub = after["aggregator"]
        trained = hub.one("atoll_aggregator_trained_tokens_total")
        merged, in_flight = (
            hub.one("atoll_aggregator_merged_tokens_total"),
            hub.one("atoll_aggregator_in_flight_tokens"),
        )
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
        assert min(versions) > 0

        up.kill("island-1")
        wait_for(
            lambda: Scrape(ports["aggregator"]).one("atoll_aggregator_island_lives_total", island="island-1") == 2,
            "second life of island-1",
        )

        def second_life():
            found = scrape(ports["island-1"])
            return found is not None and found.one("atoll_island_incarnation") == 2

        wait_for(second_life, "metrics of the second life", within_s=60)


def test_a_standby_is_known_to_be_in_sync_and_says_when_it_leads(tmp_path):
    first = free_ports(5)
    with Up(tmp_path / "run", "--islands", "2", "--tokens", "0", "--standbys", "1", "--metrics", first) as up:
        up.wait_for_progress()
        leader, standby = first + 1, first + 2

        def in_sync():
            found = scrape(leader)
            return found is not None and found.all("atoll_aggregator_standby_in_sync") == [1]

        wait_for(in_sync, "standby in sync", evidence=lambda: up.err)
        assert Scrape(leader).one("atoll_aggregator_standbys_in_sync") == 1
        waits = Scrape(standby)
        assert waits.one("atoll_aggregator_leader") == 0
        assert waits.one("atoll_aggregator_store_free_bytes") > 0
        assert waits.all("atoll_aggregator_trained_tokens_total") == []
        with up.nobody_restarts():
            up.kill("aggregator")
            wait_for(lambda: Scrape(standby).one("atoll_aggregator_leader") == 1, "takeover", evidence=lambda: up.err)
        assert Scrape(standby).one("atoll_aggregator_epoch") > 1


def test_a_port_of_metrics_that_is_taken_is_refused_before_anything_starts(tmp_path):
    first = free_ports(4)
    with Up(tmp_path / "one", "--islands", "2", "--tokens", "0", "--metrics", first) as up:
        wait_for(lambda: scrape(first), "metrics of the broker", evidence=lambda: up.err)
        with Up(tmp_path / "other", "--islands", "2", "--metrics", first) as other:
            assert other.wait() == 2
            assert f"metrics = {first}: it or another one up to {first + 3} is in use" in other.err
            assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("process", ["broker", "aggregator", "island"])
def test_a_daemon_whose_port_of_metrics_is_taken_ends_with_the_cure(tmp_path, process):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = {
            "broker": ["--port", "0"],
            "aggregator": ["--store", tmp_path / "store"],
            "island": ["--task", NUMPY_TASK],
        }
        done = ops(process, *flags[process], "--metrics-port", port, within_s=50)
    assert done.returncode == 2
    assert f"metrics_port = {port}: cannot be listened on at 127.0.0.1 (Address already in use)" in done.stderr
