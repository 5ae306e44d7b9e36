"""The broker over real sockets, with a real Redis, and without one."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import xxhash
import zmq
import zmq.asyncio

from broker.config import BrokerConfig
from broker.gateway.arrivals import VERIFY_HERE_BYTES
from broker.registry.registry import Registry
from broker.server import serve
from broker.transport.endpoint import Endpoint
from broker.wire import messages as m
from broker.wire.codec import encode
from broker.wire.errors import ConfigError
from broker.wire.headers import seal
from broker.wire.messages import AGGREGATOR, BROKER, PROTOCOL_VERSION, Channel, Encoded, Envelope, Reason
from broker.wire.ranges import StepRange
from ops.processes import redis_server
from ops.processes.cluster import free_ports
from tests.aggregator_hand import beat

RUN = "demo"
WAIT_S = 40.0  # for anything that must happen; nothing here depends on how long it takes


def config(**changes):
    nowhere = f"redis://127.0.0.1:{free_ports(1)}"
    return BrokerConfig(
        **({"run_id": RUN, "port": 0, "name": "hub", "redis_url": nowhere, "report_interval_s": 0.05} | changes)
    )


# --- messages -------------------------------------------------------------------------------------------------------


def encoded(array):
    data = memoryview(np.ascontiguousarray(array)).cast("B")
    return Encoded(codec=m.Codec.F32, shape=array.shape, checksum=xxhash.xxh3_64_intdigest(data), data=data)


def contribution(array, from_step=0, fragment_id=0):
    steps = StepRange(from_step=from_step, to_step=from_step + 1, from_tokens=from_step, to_tokens=from_step + 1)
    trained_on = (m.TrainedOn(fragment_version=0, steps=1),)
    payload = (encoded(array),)
    return m.Contribution(round_id=1, fragment_id=fragment_id, steps=steps, trained_on=trained_on, payload=payload)


def version(array, fragment_version=1, epoch=1):
    return m.Version(
        epoch=epoch,
        fragment_id=0,
        fragment_version=fragment_version,
        digest="0" * 32,
        contributions=(),
        payload=(encoded(array),),
    )


# --- clients --------------------------------------------------------------------------------------------------------


class Client:
    """Both endpoints of one sender."""

    def __init__(self, stack, context, address, name, incarnation):
        self.name, self.incarnation = name, incarnation
        self.endpoints = {channel: Endpoint(context, address, channel) for channel in Channel}
        self.sequence = 0
        self._stack = stack

    async def open(self):
        for endpoint in self.endpoints.values():
            await self._stack.enter_async_context(endpoint)
            assert await endpoint.ready(WAIT_S)
        return self

    async def send(self, message, run=RUN):
        self.sequence += 1
        envelope = Envelope(
            run_id=run,
            sender=self.name,
            incarnation=self.incarnation,
            sequence=self.sequence,
            to=BROKER if isinstance(message, m.Want | m.Version | m.Attach | m.AttachBulk) else AGGREGATOR,
            message=message,
        )
        assert await self.endpoints[message.channel].send(envelope)

    async def reply(self, island, message):
        self.sequence += 1
        envelope = Envelope(
            run_id=RUN, sender=self.name, incarnation=0, sequence=self.sequence, to=island, message=message
        )
        assert await self.endpoints[message.channel].send(envelope)

    async def receive(self, kind, channel=None):
        """The next message of a kind; others are passed over."""
        ends_s = time.monotonic() + WAIT_S
        while True:
            envelope = await self.endpoints[channel or kind.channel].recv(0.5)
            if envelope is not None and isinstance(envelope.message, kind):
                return envelope
            assert time.monotonic() < ends_s, f"{self.name} received no {kind.__name__}"

    async def attach(self, versions=(-1,), epoch=1):
        await self.send(m.AttachBulk(shard=0, epoch=epoch, shards=1))
        await self.send(m.Attach(shard=0, epoch=epoch, versions=versions))
        return (await self.receive(m.Attached)).message


class Bench:
    """A broker that runs in this process, and its clients."""

    def __init__(self, stack, context, listening):
        self._stack, self.context = stack, context
        self.listening = listening

    async def client(self, name, incarnation=1):
        client = Client(self._stack, self.context, self.listening.address, name, incarnation)
        return await client.open()

    async def aggregator(self, **changes):
        aggregator = await self.client(AGGREGATOR, incarnation=0)
        await aggregator.attach(**changes)
        # The bulk port is another socket: a version that is kept shows that it has been heard there too.
        return aggregator

    def raw(self, channel):
        """A bare DEALER, for what no endpoint would send."""
        port = self.listening.bulk_port if channel is Channel.BULK else self.listening.control_port
        sock = self.context.socket(zmq.DEALER)
        sock.linger = 0
        self._stack.callback(sock.close)
        sock.connect(f"tcp://127.0.0.1:{port}")
        return sock


def on_a_broker(settings, use):
    """Runs ``use(bench)`` beside a broker with ``settings``, then ends the broker."""

    async def main():
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        broker = asyncio.create_task(serve(settings, stop=stop, ready=ready.set_result))
        context = zmq.asyncio.Context()
        try:
            async with contextlib.AsyncExitStack() as stack:
                await asyncio.wait([broker, ready], return_when=asyncio.FIRST_COMPLETED)
                if broker.done():
                    return await broker
                return await use(Bench(stack, context, ready.result()))
        finally:
            stop.set()
            await asyncio.wait([broker])
            context.term()
            broker.result()

    return asyncio.run(main())


async def refused(sock):
    """The refusal that a bare socket receives."""
    assert await sock.poll(1000 * WAIT_S), "no refusal came"
    header = msgpack.unpackb((await sock.recv_multipart())[0])
    assert header["kind"] == "refused"
    return header["body"]


async def until(condition, what):
    """Waits until the coroutine function ``condition`` returns something true, and returns it."""
    ends_s = time.monotonic() + WAIT_S
    while not (found := await condition()):
        assert time.monotonic() < ends_s, f"never came: {what}"
        await asyncio.sleep(0.01)
    return found


# --- routing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", ["tcp", "file", "abstract"])
def test_contributions_and_versions_pass_unchanged(carrier, tmp_path):
    async def use(bench):
        if carrier != "tcp":
            bench.listening = replace(bench.listening, address=bench.listening.ipc)
        aggregator, island = await bench.aggregator(), await bench.client("a")
        await island.send(beat(1))
        assert (await aggregator.receive(m.Heartbeat)).sender == "a"
        delta = np.random.default_rng(0).normal(size=(300, 1000)).astype(np.float32)
        await island.send(contribution(delta))
        got = (await aggregator.receive(m.Contribution)).message
        assert bytes(got.payload[0].data) == delta.tobytes()
        await island.send(m.Want(versions=(-1,)))
        await aggregator.send(version(delta + 1))
        got = (await island.receive(m.Version)).message
        assert bytes(got.payload[0].data) == (delta + 1).tobytes()
        assert (await aggregator.attach(versions=(1,))).versions == (1,)

    path = {"tcp": "", "file": str(tmp_path / "hub"), "abstract": f"@{tmp_path.name}-{os.getpid()}"}[carrier]
    with socket.socket(socket.AF_UNIX) as earlier:  # a broker that was killed leaves its file behind
        earlier.bind(str(tmp_path / "hub"))
    on_a_broker(config(ipc=path), use)


@pytest.mark.parametrize("elements", [4, VERIFY_HERE_BYTES // 4], ids=["small", "large"])
def test_a_damaged_version_is_not_kept_but_refused_so_that_it_is_published_again(elements):
    async def use(bench):
        island, aggregator = await bench.client("a"), await bench.aggregator()
        good = version(np.ones(elements, np.float32))
        (buffer,) = good.payload
        changed = bytearray(buffer.data)
        changed[5] ^= 1
        await island.send(m.Want(versions=(-1,)))
        await aggregator.send(dataclasses.replace(good, payload=(dataclasses.replace(buffer, data=changed),)))
        answer = (await aggregator.receive(m.Refused)).message
        assert (answer.kind, answer.sequence, answer.reason) == ("version", aggregator.sequence, Reason.CHECKSUM)
        assert (await aggregator.attach()).versions == (-1,)
        await aggregator.send(good)
        received = (await island.receive(m.Version)).message  # the first that comes, and none before it
        assert bytes(received.payload[0].data) == bytes(buffer.data)
        assert (await aggregator.attach()).versions == (1,)

    on_a_broker(config(), use)


def test_bulk_that_nobody_takes_holds_up_no_control_message():
    """The aggregator stops reading: contributions queue up to their limit, then come back; heartbeats still pass."""
    settings = config(max_header_bytes=1 << 16, max_message_bytes=8 << 20, peer_queue_bytes=8 << 20)

    async def use(bench):
        aggregator, island = await bench.aggregator(), await bench.client("a")
        await island.send(beat(0))
        await aggregator.receive(m.Heartbeat)
        delta = np.zeros(1 << 20, np.float32)  # 4 MiB: TCP's buffers hold few of them
        sent = 0

        async def push():
            nonlocal sent
            while True:
                sent += 1
                await island.send(contribution(delta, from_step=sent))

        async with asyncio.TaskGroup() as group:
            pushing = group.create_task(push())
            refusal = (await island.receive(m.Refused)).message
            assert (refusal.kind, refusal.reason) == ("contribution", Reason.QUEUE_FULL)
            await island.send(beat(7))
            while (await aggregator.receive(m.Heartbeat)).message.inner_step != 7:
                pass
            pushing.cancel()
        # It reads again: what waited arrives, in order.
        steps = [(await aggregator.receive(m.Contribution)).message.steps.from_step for _ in range(3)]
        assert steps == [1, 2, 3]

    on_a_broker(settings, use)


def test_an_aggregator_that_reconnects_gets_what_is_sent_to_it():
    async def use(bench):
        island = await bench.client("a")
        await island.send(beat(1))
        first = await bench.aggregator()
        for endpoint in first.endpoints.values():
            await endpoint.__aexit__(None, None, None)
            await endpoint.__aenter__()
            assert await endpoint.ready(WAIT_S)

        await island.send(contribution(np.ones(4, np.float32)))
        await first.attach()

        async def received():
            envelope = await first.endpoints[Channel.BULK].recv(0.5)
            if envelope is not None:
                return isinstance(envelope.message, m.Contribution)
            # The broker may not know yet that the old connection has ended, and hand the contribution to that, or even
            # read what the aggregator said over it after what it says over the new one. So aggregators attach again and
            # again, and islands send again what they hear nothing of.
            await first.attach()
            await island.send(contribution(np.ones(4, np.float32)))
            return False

        await until(received, "a contribution over the new connection")

    on_a_broker(config(), use)


# --- bad input ------------------------------------------------------------------------------------------------------


def frames_of(message, *, name="a", run=RUN):
    envelope = Envelope(run_id=run, sender=name, incarnation=1, sequence=5, to=AGGREGATOR, message=message)
    return encode(envelope)


def with_header(frames, **changes):
    """The frames with other values in the header, whose checksum is right."""
    header = msgpack.unpackb(frames[0])
    checksum = header.pop("checksum")
    return [seal(msgpack.packb(header | changes | {"checksum": checksum})), *frames[1:]]


def damaged(frames, at):
    header = bytearray(frames[0])
    header[at] ^= 0x10
    return [bytes(header), *frames[1:]]


BAD = {
    "noise": (Channel.CONTROL, [seal(b"\xc1 this is no msgpack" + bytes(8))], Reason.MALFORMED),
    "nothing": (Channel.BULK, [b""], Reason.CHECKSUM),
    "a damaged header": (Channel.CONTROL, damaged(frames_of(beat(1)), 100), Reason.CHECKSUM),
    "another protocol version": (
        Channel.CONTROL,
        with_header(frames_of(beat(1)), v=PROTOCOL_VERSION + 1),
        Reason.PROTOCOL_VERSION,
    ),
    "an unknown kind": (Channel.CONTROL, with_header(frames_of(beat(1)), kind="surprise"), Reason.UNKNOWN_KIND),
    "an unknown field": (Channel.CONTROL, with_header(frames_of(beat(1)), extra=1), Reason.MALFORMED),
    "another run": (Channel.CONTROL, frames_of(beat(1), run="other"), Reason.WRONG_RUN),
    "a header that is too large": (Channel.CONTROL, [b"x" * 100_000], Reason.OVERSIZE),
    "too much in all": (Channel.BULK, frames_of(beat(1)) + [b"x" * 200_000] * 2, Reason.OVERSIZE),
    "a missing buffer": (
        Channel.BULK,
        frames_of(contribution(np.ones(4, np.float32)))[:1],
        Reason.MALFORMED,
    ),
    "a short buffer": (
        Channel.BULK,
        [frames_of(contribution(np.ones(4, np.float32)))[0], b"short"],
        Reason.MALFORMED,
    ),
    "tensors on the control port": (
        Channel.CONTROL,
        frames_of(contribution(np.ones(4, np.float32))),
        Reason.WRONG_ROLE,
    ),
    "a heartbeat on the bulk port": (Channel.BULK, frames_of(beat(1)), Reason.WRONG_ROLE),
    "an island that poses as the broker": (
        Channel.CONTROL,
        frames_of(m.Attached(versions=()), name=BROKER),
        Reason.WRONG_ROLE,
    ),
    "an island that attaches": (
        Channel.CONTROL,
        frames_of(m.Attach(shard=0, epoch=9, versions=())),
        Reason.WRONG_ROLE,
    ),
    "an aggregator that did not attach": (
        Channel.BULK,
        with_header(frames_of(version(np.ones(4, np.float32)), name=AGGREGATOR), inc=0),
        Reason.NOT_LEADER,
    ),
}
SMALL = {"max_header_bytes": 1 << 16, "max_message_bytes": 300_000, "peer_queue_bytes": 300_000}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_with_its_reason_and_the_run_goes_on(what):
    channel, frames, reason = BAD[what]

    async def use(bench):
        aggregator, island = await bench.aggregator(), await bench.client("b")
        garbage = bench.raw(channel)
        await garbage.send_multipart(frames)
        body = await refused(garbage)
        assert body["reason"] == reason
        assert body["detail"]
        await island.send(beat(1))
        assert (await aggregator.receive(m.Heartbeat)).sender == "b"

    on_a_broker(config(**SMALL), use)


def test_a_frame_beyond_all_limits_costs_its_connection_only():
    async def use(bench):
        aggregator, island = await bench.aggregator(), await bench.client("b")
        garbage = bench.raw(Channel.CONTROL)
        events = garbage.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await garbage.send(b"x" * (8 << 20))
        assert await events.poll(1000 * WAIT_S), "the connection still stands"
        garbage.disable_monitor()
        events.close(linger=0)
        await island.send(beat(1))
        assert (await aggregator.receive(m.Heartbeat)).sender == "b"

    on_a_broker(config(**SMALL), use)


# --- Redis ----------------------------------------------------------------------------------------------------------


class Redis:
    """A server that can be started, again and empty, on one port."""

    def __init__(self, directory):
        self.found = redis_server.server(port=free_ports(1), directory=directory)
        self.process = None

    def start(self):
        self.process = subprocess.Popen(self.found.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self):
        if self.process is not None:
            self.process.kill()  # works on a suspended process too
            self.process.wait()
            self.process = None


@pytest.fixture
def redis(tmp_path):
    server = Redis(tmp_path)
    yield server
    server.stop()


async def in_redis(url, condition, what):
    """Waits until what stands in Redis about the run meets a condition; returns it."""
    registry = Registry(url, RUN)

    async def look():
        with contextlib.suppress(Exception):
            found = await registry.read()
            return found if condition(found) else None

    try:
        return await until(look, what)
    finally:
        await registry.aclose()


def test_membership_and_refusals_reach_redis_and_come_back_after_it_was_away(redis):
    async def use(bench):
        url = redis.found.url
        aggregator, island = await bench.aggregator(), await bench.client("a")
        await island.send(beat(3))  # no Redis yet: routing does not care
        await aggregator.receive(m.Heartbeat)
        await island.send(beat(4), run="other")
        await island.receive(m.Refused)
        redis.start()
        found = await in_redis(url, lambda s: "a" in s.members and s.refusals.get("broker:hub"), "a in Redis")
        assert found.members["a"]["inner_step"] == 3
        assert found.refusals["broker:hub"] == {"a": {"wrong_run": 1}}
        assert found.brokers["hub"]["peers"] == 1
        redis.stop()
        await island.send(beat(5))
        await aggregator.receive(m.Heartbeat)  # nobody waited for Redis
        redis.start()  # empty
        found = await in_redis(url, lambda s: "a" in s.members, "a in Redis again")
        assert found.members["a"]["inner_step"] == 5
        await island.send(m.Leave(inner_step=6, tokens=60, reason="done"))
        await in_redis(url, lambda s: s.members["a"]["left"], "the farewell")

    on_a_broker(config(redis_url=redis.found.url), use)


def test_a_redis_that_hangs_delays_nobody(redis):
    redis.start()

    async def use(bench):
        aggregator, island = await bench.aggregator(), await bench.client("a")
        await island.send(beat(0))
        await in_redis(redis.found.url, lambda s: "a" in s.members, "a in Redis")
        redis.process.send_signal(signal.SIGSTOP)
        for step in range(1, 200):
            await island.send(beat(step))
            while (await aggregator.receive(m.Heartbeat)).message.inner_step != step:
                pass

    on_a_broker(config(redis_url=redis.found.url), use)


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
        address = f"tcp://{there}:{bench.listening.control_port}"
        bench.listening = replace(bench.listening, address=address)
        aggregator = await bench.aggregator()
        assert (await aggregator.attach()).versions == (-1,)

    on_a_broker(config(host=host, insecure=True), use)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_broker_cleanly_even_if_redis_hangs(number, redis):
    redis.start()
    asyncio.run(in_redis(redis.found.url, lambda _: True, "Redis"))
    command = [sys.executable, "-m", "ops.cli", "broker", "--run", RUN, "--port", "0"]
    environment = {**os.environ, "REDIS_URL": redis.found.url, "ATOLL_LOG": "text"}
    broker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        line = broker.stderr.readline()
        assert "broker.ready" in line, line
        assert f"run={RUN}" in line
        redis.process.send_signal(signal.SIGSTOP)
        broker.send_signal(number)
        rest = broker.stderr.read()
        assert broker.wait(timeout=WAIT_S) == 0, rest
        assert "broker.ended" in rest
        assert "Traceback" not in rest
    finally:
        broker.kill()
        broker.wait()
        broker.stderr.close()


def test_bad_settings_end_the_process_with_their_cure():
    command = [sys.executable, "-m", "ops.cli", "broker", "--port", "70000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2
    assert done.stderr == "atoll: port = 70000: must be from 1 to 65534 (the bulk port is the next one), or 0\n"
