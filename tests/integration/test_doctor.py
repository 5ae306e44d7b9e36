"""The doctor against real brokers, keys and a real Redis."""

import asyncio
import contextlib
import functools
import io
import json
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import zmq

from broker.transport.keys import client_keys, new_pair, write_allow_list, write_pair
from broker.wire.identity import Identity, KeyRole
from broker.wire.messages import PROTOCOL_VERSION
from ops import cli
from ops.doctor import broker_probe, command
from ops.findings import broker_findings
from ops.findings.finding import failure
from ops.link_proxy.proxy import Proxy
from ops.links.condition import LinkCondition
from ops.links.wiring import Door, Wire, Wiring
from ops.processes import redis_server
from ops.processes.child_process import tied
from ops.processes.cluster import free_ports, wait_until_listening

WAIT_S = 60.0
NOWHERE = "redis://127.0.0.1:1"


@contextlib.contextmanager
def running(command, port):
    with subprocess.Popen(tied(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert wait_until_listening(port, alive=lambda: process.poll() is None)
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def a_broker(*flags, protocol=None):
    """A broker process; ``protocol``: of another release, which speaks that version."""
    port = free_ports(2)
    start = [sys.executable, "-m", "ops"]
    if protocol is not None:
        code = "import sys, broker.wire.frames as c; c.PROTOCOL_VERSION = int(sys.argv.pop(1)); from ops import cli"
        start = [sys.executable, "-c", f"{code}; sys.exit(cli.main())", str(protocol)]
    with running([*start, "broker", "--run", "demo", "--port", str(port), "--redis-url", NOWHERE, *flags], port + 1):
        yield f"tcp://127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def no_run_of_ours(monkeypatch):
    for name in ("ATOLL_BROKER", "ATOLL_KEY", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)


def doctor(*flags, skip=("python", "jax", "files", "disk", "redis")):
    """Exit status, and (subject, verdict, seen) of each finding."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = cli.main(["doctor", "--json", *flags, *(["--skip", *skip] if skip else [])])
    report = json.loads(out.getvalue())
    assert (status, report["ok"]) in ((0, True), (1, False))
    return status, [(each["subject"], each["verdict"], each["seen"]) for each in report["findings"]]


def verdicts(found):
    return [(subject, verdict) for subject, verdict, _ in found]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    hub = tmp_path_factory.mktemp("keys")
    broker, paris, rome = (
        new_pair(Identity(role=role, name=name))
        for role, name in ((KeyRole.BROKER, "broker"), (KeyRole.ISLAND, "paris"), (KeyRole.ISLAND, "rome"))
    )
    for pair in (broker, paris):
        write_pair(hub, pair)
    write_allow_list(hub / "allowed.keys", {paris.public: paris.identity})
    away = tmp_path_factory.mktemp("away")  # Rome, whose key nobody has allowed
    write_pair(away, rome)
    (away / "broker.public").write_text((hub / "broker.public").read_text())
    other = tmp_path_factory.mktemp("other")  # Paris, with the public key of another broker
    write_pair(other, paris)
    write_pair(other, new_pair(Identity(role=KeyRole.BROKER, name="broker")))
    return {"hub": hub, "away": away, "other": other}


@pytest.fixture(scope="module")
def keyed(keys):
    with a_broker("--key", str(keys["hub"] / "broker.secret")) as address:
        yield address


@pytest.fixture(scope="module")
def plain():
    with a_broker() as address:
        yield address


MEASURED = [(subject, "ok") for subject in ("broker", "version", "round trip", "bandwidth", "clock")]


def test_the_way_to_a_broker_with_keys_is_measured_and_nobody_joins(keyed, keys):
    status, found = doctor("--broker", keyed, "--key", str(keys["hub"] / "island-paris.secret"), "--run", "demo")
    assert status == 0, found
    assert verdicts(found) == [("keys", "ok"), *MEASURED]
    (bandwidth,) = [seen for subject, _, seen in found if subject == "bandwidth"]
    assert "bit/s up" in bandwidth
    assert "not measured" not in bandwidth


def test_the_measured_way_is_the_one_there_is(plain):
    """Through a link of known delays and rates; nothing is asked of a machine that is busy but to be no faster."""
    port, first = int(plain.rpartition(":")[2]), free_ports(2)
    doors = tuple(Door(listen=first + i, host="127.0.0.1", port=port + i) for i in range(2))
    base = LinkCondition.of(up_delay_ms=30, down_delay_ms=20, up_mbit=20, down_mbit=60)

    async def scenario():
        wiring = Wiring(wires={"way": Wire(doors=doors, condition=base)})
        async with asyncio.timeout(WAIT_S), Proxy(wiring):
            with zmq.Context() as context:
                look = functools.partial(broker_probe.look_at, keys=None, run="", context=context)
                return await asyncio.to_thread(look, f"tcp://127.0.0.1:{first}")

    seen = asyncio.run(scenario())
    assert (seen.control, seen.bulk, seen.run, seen.protocol) == (
        broker_findings.PortState.OPEN,
        broker_findings.PortState.OPEN,
        "demo",
        PROTOCOL_VERSION,
    )
    assert 0.05 <= min(seen.link.round_trips_s) < 0.5
    assert 4e6 < seen.link.up_bits_per_s < 24e6
    assert 12e6 < seen.link.down_bits_per_s < 72e6
    assert abs(seen.link.clock_offset_s) < min(seen.link.round_trips_s)  # of one clock, over unequal ways


def test_the_run_of_a_broker_is_found_or_found_to_be_another(plain):
    assert doctor("--broker", plain)[0] == 0
    status, found = doctor("--broker", plain, "--run", "other")
    assert status == 1
    assert ("broker", "failure", "it serves the run demo, not other") in found


@pytest.mark.parametrize(
    ("place", "name", "seen"),
    [
        (None, None, "takes connections with keys only"),
        ("away", "island-rome", "does not have this key on its allow list"),
        ("other", "island-paris", "has another key than the one in broker.public"),
    ],
)
def test_a_handshake_that_fails_is_told_apart(keyed, keys, place, name, seen):
    flags = [] if place is None else ["--key", str(keys[place] / f"{name}.secret")]
    status, found = doctor("--broker", keyed, *flags)
    assert status == 1
    subject, verdict, said = found[-1]
    assert (subject, verdict) == ("keys", "failure")
    assert seen in said


def test_a_broker_that_is_busy_in_the_handshake_is_not_taken_for_another(keys, monkeypatch):
    monkeypatch.setattr(broker_probe, "OPEN_WITHIN_S", 1.0)
    monkeypatch.setattr(broker_probe, "BUSY_WITHIN_S", 0.2)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\x01" + bytes(31)
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stack:

        def greet():
            with contextlib.suppress(OSError):
                while True:
                    connection = stack.enter_context(listening.accept()[0])
                    connection.sendall(greeting)

        threading.Thread(target=greet, daemon=True).start()
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        own = client_keys(keys["hub"] / "island-paris.secret", KeyRole.ISLAND)
        with zmq.Context() as context:
            seen = broker_probe.look_at(address, keys=own, run="", context=context)
        listening.shutdown(socket.SHUT_RDWR)
    assert (seen.control, seen.why) == (broker_findings.PortState.SILENT, "it did not end the handshake")


def test_a_key_where_none_is_wanted_and_one_that_others_may_read(plain, keys, tmp_path):
    status, found = doctor("--broker", plain, "--key", str(keys["hub"] / "island-paris.secret"))
    assert status == 1
    assert "takes connections without keys only" in found[-1][2]
    loose = tmp_path / "island-paris.secret"
    loose.write_text((keys["hub"] / "island-paris.secret").read_text())
    loose.chmod(0o644)
    status, found = doctor("--broker", plain, "--key", str(loose))
    assert status == 1
    assert verdicts(found) == [("keys", "failure")]


def test_a_broker_of_another_protocol_is_told_by_its_version():
    with a_broker(protocol=6) as address:
        status, found = doctor("--broker", address)
    assert status == 1
    assert verdicts(found) == [("broker", "ok"), ("version", "failure")]
    assert "the broker speaks protocol 6" in found[-1][2]


def test_nobody_there_a_stranger_and_one_who_says_nothing():
    nobody = f"tcp://127.0.0.1:{free_ports(2)}"
    status, found = doctor("--broker", nobody)
    assert status == 1
    assert "cannot be reached" in found[0][2]
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def say():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                        connection.recv(4096)

        threading.Thread(target=say, daemon=True).start()
        status, found = doctor("--broker", f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        listening.shutdown(socket.SHUT_RDWR)
    assert status == 1
    assert "is no broker" in found[0][2]


def test_this_machine_with_its_jax_and_redis_is_looked_at(tmp_path):
    port = free_ports(1)
    server = redis_server.server(port=port, directory=tmp_path)
    with running(server.command, port):
        status, found = doctor("--redis", server.url, "--dir", str(tmp_path / "new" / "store"), skip=())
    assert [subject for subject, *_ in found] == ["Python", "open files", "disk", "Redis", "clock", "JAX"]
    assert {subject for subject, verdict, _ in found if verdict == "failure"} <= {"disk"}, found  # which may be full
    assert status == int(("disk", "failure") in verdicts(found))
    assert not (tmp_path / "new").exists()
    (jax,) = [seen for subject, _, seen in found if subject == "JAX"]
    assert " on " in jax or "within" in jax  # on a machine that has much else to do


def test_a_redis_that_was_named_and_is_away_is_a_failure():
    status, found = doctor("--redis", NOWHERE, skip=("python", "jax", "files", "disk"))
    assert status == 1
    assert verdicts(found) == [("Redis", "failure")]


def test_a_probe_that_hangs_or_fails_is_a_finding(monkeypatch):
    release = threading.Event()
    hanging = command._Probe("disk", lambda: release.wait(WAIT_S) and [], 0.05).result()
    release.set()
    assert [(each.subject, each.verdict) for each in hanging] == [("disk", "failure")]

    def fails():
        raise RuntimeError("unforeseen")

    (found,) = command._Probe("disk", fails, 5.0).result()
    assert found == failure("disk", "the probe itself failed: RuntimeError: unforeseen", found.cure)


@pytest.mark.parametrize(("clock_s", "offset_s"), [(999.75, 0.0), (1000.75, 1.0), (0.0, None)])
def test_a_clock_that_shows_the_same_to_the_last_bit_is_compared_too(monkeypatch, clock_s, offset_s):
    asking = SimpleNamespace(ask=lambda within_s: (0.5, SimpleNamespace(clock_s=clock_s)))
    monkeypatch.setattr(broker_probe, "time", SimpleNamespace(time=lambda: 1000.0, monotonic=time.monotonic))
    monkeypatch.setattr(broker_probe, "_rate", lambda *_, **__: 0.0)
    assert broker_probe._link(asking).clock_offset_s == offset_s
