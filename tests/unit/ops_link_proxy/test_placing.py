"""Places of links in a run: doors for each client, a link to Redis, orders, files."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from broker.base.errors import ConfigError
from ops.link_proxy import control_server as desk
from ops.link_proxy.placing import Links, place, ways
from ops.links import region
from ops.links.wiring import Wiring
from ops.processes.child_process import ProcessSpec

CLIENTS = ("aggregator", "island-0", "island-1")


def test_each_client_with_a_link_enters_every_broker_by_doors_of_its_own():
    described = region.parse('[link."island-*"]\ndelay_ms = 4\n', source="x")
    brokers = ["tcp://127.0.0.1:7001", "tcp://[::1]:8001"]
    known = ways(CLIENTS, brokers, redis_clients=["broker"], redis_url="redis://127.0.0.1:7")
    links = place(described, known, find_ports={8: 9000}.get, run_dir=Path("/run"))
    doors = [door for wire in links.wiring.wires.values() for door in wire.doors]
    assert [door.listen for door in doors] == list(range(9000, 9008))
    hosts = [("127.0.0.1", 7001), ("127.0.0.1", 7002), ("::1", 8001), ("::1", 8002)]
    assert [(door.host, door.port) for door in doors] == 2 * hosts
    specs = [ProcessSpec(name=name, command=["x"], environment={"A": "1"}) for name in ("broker", *CLIENTS)]
    assert [spec.environment for spec in links.reroute(specs)] == [
        {"A": "1"},
        {"A": "1"},
        {"A": "1", "ATOLL_BROKER": "tcp://127.0.0.1:9000,tcp://127.0.0.1:9002"},
        {"A": "1", "ATOLL_BROKER": "tcp://127.0.0.1:9004,tcp://127.0.0.1:9006"},
    ]


def test_a_link_to_redis_has_one_door_and_is_meant_by_its_own_name_alone():
    described = region.parse('[link."*.redis"]\npartition = true\n[link."broker*"]\n', source="x")
    known = ways(["broker-9"], ["tcp://127.0.0.1:7001"], redis_clients=["broker"], redis_url="redis://me:pw@host:99/3")
    assert known["broker.redis"] == [("host", 99)]
    links = place(described, known, find_ports={3: 9000}.get, run_dir=Path("/run"))
    cut = {name: wire.condition.partitioned for name, wire in links.wiring.wires.items()}
    assert cut == {"broker-9": False, "broker.redis": True}
    environment = {"REDIS_URL": "redis://me:pw@host:99/3"}
    specs = [ProcessSpec(name=name, command=["x"], environment=environment) for name in ("broker", "broker-9")]
    assert [spec.environment["REDIS_URL"] for spec in links.reroute(specs)] == [
        "redis://me:pw@127.0.0.1:9002/3",
        "redis://me:pw@host:99/3",
    ]


def test_an_order_to_clear_means_all_links_if_it_names_none():
    cleared = []
    carriers = {
        name: SimpleNamespace(clear=partial(cleared.append, name)) for name in ("aggregator", "aggregator.redis")
    }
    assert desk.answer(carriers, b'{"do": "clear", "link": "*"}')["links"] == cleared == ["aggregator"]
    assert desk.answer(carriers, b'{"do": "clear"}')["links"] == ["aggregator", "aggregator.redis"] == cleared[1:]


@pytest.mark.parametrize("url", ["unix:///run/redis.sock", "rediss://host:99"])
def test_a_redis_that_no_proxy_can_stand_in_for_has_no_links(url):
    known = ways(CLIENTS, ["tcp://127.0.0.1:7001"], redis_clients=["broker"], redis_url=url)
    assert set(known) == set(CLIENTS)
    with pytest.raises(ConfigError, match="means no link of this run"):
        region.conditions(region.parse('[link."*.redis"]\n', source="x"), list(known))


def test_the_links_process_finds_its_files_in_the_run_directory():
    links = Links(wiring=Wiring(wires={}), run_dir=Path("/run"))
    spec = links.process(["python", "links"], {})
    assert spec.command == ["python", "links", "--plan", "/run/links.json", "--control", "/run/links.sock"]
    assert spec.stop_order == 1  # after its clients
