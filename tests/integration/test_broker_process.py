"""The broker as a process: a real Redis that comes, goes and hangs, the addresses where it listens, and its end."""

import contextlib
import os
import re
import signal
import socket
from dataclasses import replace

import pytest
import zmq

from broker.base.errors import ConfigError
from broker.wire import messages as m
from tests.aggregator_hand import beat
from tests.broker_bench import RUN, config, in_redis, on_a_broker
from tests.local_run import Process, wait_for

# --- Redis ----------------------------------------------------------------------------------------------------------


def test_membership_and_refusals_reach_redis_and_come_back_after_it_was_away(redis):
    async def use(bench):
        aggregator, island = await bench.aggregator(), await bench.client("a")
        await island.send(beat(3))  # no Redis yet: routing does not care
        await aggregator.receive(m.Heartbeat)
        await island.send(beat(4), run="other")
        await island.receive(m.Refused)
        redis.start()
        found, _ = await in_redis(redis.url, lambda s: "a" in s.members and s.refusals.get("broker:hub"), "a in Redis")
        assert found.members["a"]["inner_step"] == 3
        assert found.refusals["broker:hub"] == {"a": {"wrong_run": 1}}
        assert found.brokers["hub"]["peers"] == 1
        redis.stop()
        await island.send(beat(5))
        await aggregator.receive(m.Heartbeat)  # nobody waited for Redis
        redis.start()  # empty
        found, _ = await in_redis(redis.url, lambda s: "a" in s.members, "a in Redis again")
        assert found.members["a"]["inner_step"] == 5
        await island.send(m.Leave(inner_step=6, tokens=60, reason="done"))
        await in_redis(redis.url, lambda s: s.members["a"]["left"], "the farewell")

    on_a_broker(config(redis_url=redis.url), use)


def test_a_redis_that_hangs_delays_nobody(redis):
    redis.start()

    async def use(bench):
        aggregator, island = await bench.aggregator(), await bench.client("a")
        await island.send(beat(0))
        await in_redis(redis.url, lambda s: "a" in s.members, "a in Redis")
        redis.process.send_signal(signal.SIGSTOP)
        for step in range(1, 200):
            await island.send(beat(step))
            while (await aggregator.receive(m.Heartbeat)).message.inner_step != step:
                pass

    on_a_broker(config(redis_url=redis.url), use)


# --- the process ----------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_named_with_a_cure():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port = {port}"):
            on_a_broker(config(port=port), None)


def test_a_unix_socket_that_is_taken_or_cannot_be_made_is_named_with_a_cure(tmp_path):
    taken = f"@{tmp_path.name}-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(f"\0{taken[1:]}")
        holder.listen()
        with pytest.raises(ConfigError, match=rf"ipc = '{taken}': a process listens there already"):
            on_a_broker(config(ipc=taken), None)
    with pytest.raises(ConfigError, match=r"No such file or directory.*or @NAME"):
        on_a_broker(config(ipc=str(tmp_path / "away" / "hub")), None)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=r"file': is a file, and no socket"):
        on_a_broker(config(ipc=str(tmp_path / "file")), None)
    assert (tmp_path / "file").read_text() == "kept"
    with pytest.raises(ConfigError, match=r"ipc = .*1 to 102 bytes"):
        config(ipc="/" + 102 * "x")


def _has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", pytest.param("[::1]", marks=needs_ipv6)])
def test_a_host_may_be_a_wildcard_or_a_name_or_stand_in_brackets(host):
    async def use(bench):
        there = host if host.startswith("[") else "127.0.0.1"
        address = f"tcp://{there}:{bench.listening.bulk_port - 1}"
        bench.listening = replace(bench.listening, address=address)
        aggregator = await bench.aggregator()
        assert (await aggregator.attach()).versions == (-1,)

    on_a_broker(config(host=host, insecure=True), use)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_broker_cleanly_even_if_redis_hangs(number, redis, tmp_path):
    redis.start()
    with Process(tmp_path / "broker", "broker", "--run", RUN, "--port", 0, REDIS_URL=redis.url) as broker:
        wait_for(lambda: "broker.ready" in broker.err, "a broker that listens")
        assert f"run={RUN}" in broker.err
        redis.process.send_signal(signal.SIGSTOP)
        broker.signal(number)
        assert broker.wait() == 0, broker.err
        assert "broker.ended" in broker.err
        assert "Traceback" not in broker.err


NOWHERE = "redis://127.0.0.1:1"


MANY = pytest.mark.full("thousands of connections")


def flood(stack, broker, connections):
    """Opens connections that say nothing, and asks the broker something at each of its addresses."""
    address = re.search(r"address=tcp://([0-9.]+):(\d+)", broker.err).groups()
    for _ in range(connections):
        stack.enter_context(socket.create_connection(address))
    for where in [f"tcp://{':'.join(address)}", *re.findall(r"ipc://[^ ]+", broker.err)]:
        dealer = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.DEALER))
        dealer.linger, dealer.rcvtimeo = 0, 20_000
        dealer.connect(where)
        dealer.send(b"no message")
        assert dealer.recv(), where  # that it is refused


@pytest.mark.parametrize(
    ("open_files", "connections", "ipc"), [(256, 300, False), pytest.param(4096, 2400, True, marks=MANY)]
)
def test_more_connections_than_open_files_end_no_broker_and_keep_nobody_out(tmp_path, open_files, connections, ipc):
    at = ["--run", RUN, "--port", 0, *(["--ipc", tmp_path / "hub"] if ipc else [])]
    with (
        contextlib.ExitStack() as stack,
        Process(tmp_path / "broker", "broker", *at, open_files=open_files, REDIS_URL=NOWHERE) as broker,
    ):
        wait_for(lambda: "broker.ready" in broker.err, "a broker that listens")
        flood(stack, broker, connections)
        wait_for(lambda: "there are open files for" in broker.err, "a connection that was ended")
        broker.signal(signal.SIGTERM)
        assert broker.wait() == 0, broker.err


@pytest.mark.parametrize(
    ("open_files", "flags", "complaint"),
    [
        (40, [], r"open files = 40: leaves room for \d+ connections"),
        (
            1024,
            ["--ipc", "@atoll-test"],
            "ipc = '@atoll-test': needs 4,096 open files, and may have 1,024",
        ),
    ],
)
def test_a_broker_that_has_too_few_open_files_does_not_begin(tmp_path, open_files, flags, complaint):
    at = ("broker", "--run", RUN, "--port", 0, *flags)
    with Process(tmp_path / "broker", *at, open_files=open_files, REDIS_URL=NOWHERE) as broker:
        assert broker.wait() == 2
        assert re.search(complaint, broker.err)
