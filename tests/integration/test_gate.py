"""A real broker with keys, real traffic, and people at its ports who should not be there."""

import asyncio
import contextlib
import functools
import random
import re
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import replace

import pytest
import zmq

from benchmarks.hostile import strangers
from broker.base.errors import ConfigError, Unavailable
from broker.gateway.config import BrokerConfig
from broker.registry.registry import Registry
from broker.transport import line
from broker.transport.endpoint import Endpoint
from broker.transport.keys import ALLOW_LIST, client_keys, new_pair, read_allow_list, write_allow_list
from broker.transport.sockets import SocketOptions
from broker.wire import messages as m
from broker.wire.frames import encode
from broker.wire.identity import Identity, KeyRole
from broker.wire.messages import AGGREGATOR, BROKER, Channel, Envelope, Reason
from ops.keys import make_missing
from tests import broker_bench
from tests.aggregator_hand import beat
from tests.broker_bench import WAIT_S, until
from tests.coroutines import given_by
from tests.local_run import Process, wait_for
from tests.tcp_relay import Relay

ISLANDS = ("paris", "rome")


def join(island_id):
    return m.Join(nonce="n", island_id=island_id, hint="", tensors=(), tokens_per_step=1)


class Bench:
    """A broker with keys; ``aggregator`` and ``paris`` are connected and their traffic flows."""

    def __init__(self, context, stack, listening, keys, registry, *, keyed):
        self.context, self.stack, self.listening, self.keys, self.registry = context, stack, listening, keys, registry
        self.run, self.keyed = registry.run_id, keyed
        self.step = self.sequence = 0
        self.heard = []

    async def client(self, stem, channel=Channel.CONTROL, **options):
        role = KeyRole.AGGREGATOR if stem == AGGREGATOR else KeyRole.ISLAND
        keys = client_keys(self.keys / f"{stem}.secret", role) if self.keyed else None
        endpoint = Endpoint(self.context, self.listening.address, channel, keys=keys, **options)
        await self.stack.enter_async_context(endpoint)
        assert await endpoint.ready(WAIT_S)
        return endpoint

    def dealer(self, channel=Channel.CONTROL, *, keys=None, port=None):
        sock = self.context.socket(zmq.DEALER)
        sock.linger = 0
        self.stack.callback(sock.close)
        if keys is not None:
            keys.apply(sock)
        sock.connect(f"tcp://127.0.0.1:{port or self.port(channel)}")
        return sock

    def port(self, channel=Channel.CONTROL):
        return self.listening.bulk_port if channel is Channel.BULK else self.listening.bulk_port - 1

    def envelope(self, sender, message, *, inc=1):
        self.sequence += 1
        to = BROKER if isinstance(message, m.Attach | m.Want) else AGGREGATOR
        return Envelope(run_id=self.run, sender=sender, incarnation=inc, sequence=self.sequence, to=to, message=message)

    async def send(self, endpoint, sender, message, *, inc=1):
        assert await endpoint.send(self.envelope(sender, message, inc=inc))

    async def receive(self, endpoint, kind):
        async with asyncio.timeout(WAIT_S):
            while True:
                envelope = await endpoint.recv(0.2)
                if envelope is not None:
                    self.heard.append(envelope.sender)
                    if isinstance(envelope.message, kind):
                        return envelope

    async def beat_passes(self):
        """A heartbeat of paris reaches the aggregator; returns the seconds it took."""
        self.step += 1
        began_s = time.monotonic()
        await self.send(self.aggregator, AGGREGATOR, m.Attach(shard=0, epoch=1, versions=(-1,)), inc=0)
        await self.receive(self.aggregator, m.Attached)
        await self.send(self.paris, "paris", beat(self.step))
        while (await self.receive(self.aggregator, m.Heartbeat)).message.inner_step != self.step:
            pass
        return time.monotonic() - began_s

    async def seen(self, field):
        """A field of what status would read; empty where nothing has come there yet."""
        try:
            return getattr(await self.registry.read(), field)
        except Unavailable:  # Redis is as busy as everybody else here
            return {}

    async def refusals(self):
        """Reason -> count, over all senders."""
        total = {}
        for source, by_sender in (await self.seen("refusals")).items():
            for reasons in by_sender.values() if source.startswith("broker:") else ():
                for reason, n in reasons.items():
                    total[reason] = total.get(reason, 0) + n
        return total

    async def silent_connections(self, at_least):
        async def counted():
            brokers = (await self.seen("brokers")).values()
            return sum(each["dropped"].get("silent_connection", 0) for each in brokers) >= at_least

        await until(counted, f"{at_least} silent connections")

    async def counted_more(self, before, what):
        async def counted():
            return sum((await self.refusals()).values()) > before

        await until(counted, f"a count of {what}")

    async def counted(self, reason, at_least=1):
        async def counted():
            return (await self.refusals()).get(reason, 0) >= at_least

        await until(counted, f"{at_least} times {reason}")


@pytest.fixture
def settings():
    return {}


@pytest.fixture
def on_a_broker(tmp_path, shared_server, settings):
    redis = shared_server.url
    keys = tmp_path / "keys"
    people = {BROKER: KeyRole.BROKER, AGGREGATOR: KeyRole.AGGREGATOR} | dict.fromkeys(ISLANDS, KeyRole.ISLAND)
    make_missing(keys, [Identity(role=role, name=name) for name, role in people.items()])
    name = f"run-{uuid.uuid4().hex}"  # counters of earlier runs stay in Redis
    usual = {"run_id": name, "port": 0, "ipc": str(tmp_path / "hub"), "redis_url": redis, "report_interval_s": 0.05}

    config = BrokerConfig(**(usual | {"key": keys / "broker.secret"} | settings))

    async def main(use, bare):
        async with contextlib.aclosing(Registry(redis, name)) as registry, contextlib.AsyncExitStack() as stack:
            bench = Bench(bare.context, stack, bare.listening, keys, registry, keyed=config.key is not None)
            bench.aggregator = await bench.client(AGGREGATOR)
            bench.paris = await bench.client("island-paris")
            await bench.beat_passes()
            await use(bench)
            await bench.beat_passes()
            assert set(bench.heard) <= {"paris", BROKER}

    return lambda use: broker_bench.on_a_broker(config, functools.partial(main, use))


@pytest.mark.parametrize(
    ("channel", "settings"),
    [(Channel.CONTROL, {}), (Channel.BULK, {"key": None})],
    ids=["control, keys", "bulk, no keys"],
)
@given_by("on_a_broker")
async def test_strangers_are_hung_up_and_counted_and_training_goes_on(bench, channel):
    async def visited(words, **manner):
        hung_up = await strangers.visit("127.0.0.1", bench.port(channel), words, **manner)
        await bench.beat_passes()
        return hung_up

    rng = random.Random(7)
    for reset in (False, True):
        await visited((), stay_s=0.0, reset=reset)
    await bench.silent_connections(2)
    assert await bench.refusals() == {}
    for name, kind in strangers.REFUSED.items():
        before = sum((await bench.refusals()).values())
        # Half a greeting is waited for; a wrong message is answered, as anybody's would be.
        stays = name == "ZMTP 3, half a greeting" or (name == "ZMTP 3, an id like a drawn one" and not bench.keyed)
        assert await visited(kind(rng), stay_s=0.5 if stays else WAIT_S) is not stays, name
        await bench.counted_more(before, name)
    for _ in range(3):
        for kind in (strangers.SILENT | strangers.MIXED).values():
            await visited(kind(rng), stay_s=0.0)
    rome = await bench.client("island-rome")
    await bench.send(rome, "join:n", join("rome"), inc=0)
    await bench.receive(bench.aggregator, m.Join)
    bench.heard.clear()


@pytest.fixture
def less_patient(monkeypatch):
    """Sockets wait for a handshake three seconds, and not ten."""
    apply = SocketOptions.apply

    def instead(options, sock, max_frame_bytes):
        apply(options, sock, max_frame_bytes)
        sock.set(zmq.HANDSHAKE_IVL, 3_000)

    monkeypatch.setattr(SocketOptions, "apply", instead)


@pytest.mark.usefixtures("less_patient")
@given_by("on_a_broker")
async def test_strangers_who_come_all_at_once_and_hold_on_hold_up_nobody(bench):
    host, half = "127.0.0.1", strangers.greeting()[:32]
    siege = asyncio.create_task(strangers.besiege(host, bench.port(), seconds=2.0, at_once=6, seed=3))
    holding = [strangers.visit(host, bench.port(each), (half,), stay_s=WAIT_S) for each in Channel for _ in range(8)]
    coming = asyncio.gather(*holding, siege)
    while not coming.done():
        assert await bench.beat_passes() < 10.0
        await asyncio.sleep(0.01)
    *hung_up, (_, besieged) = await coming
    assert all(hung_up)  # after HANDSHAKE_IVL
    assert besieged.total() > 20


def test_no_peer_can_name_the_routing_id_that_zeromq_draws_next(tmp_path):
    """Libzmq ends the process when it draws an id that a peer has named."""
    libc = "import ctypes; rand = ctypes.CDLL(None).rand; print(*[rand() ^ rand() << 31 & 1 << 31 for _ in range(8)])"
    drawn = subprocess.run([sys.executable, "-c", libc], capture_output=True, text=True, check=True, timeout=WAIT_S)
    with contextlib.ExitStack() as stack:
        nowhere = "redis://127.0.0.1:1"
        broker = stack.enter_context(Process(tmp_path, "broker", "--run", "r", "--port", 0, REDIS_URL=nowhere))
        port = int(wait_for(lambda: re.search(r"tcp://127.0.0.1:(\d+)", broker.err), "a broker that listens")[1])
        context = stack.enter_context(zmq.Context())
        for first in map(int, drawn.stdout.split()):
            for number in range(first, first + 6):
                named = strangers.ready(Socket_Type=b"DEALER", Identity=b"\0" + number.to_bytes(4, "big"))
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
                sock.sendall(strangers.greeting() + named)
                heard = b""
                while b"READY" not in heard:
                    heard += sock.recv(1 << 16)
        for _ in range(3):
            client = context.socket(zmq.DEALER)
            client.linger = 0
            stack.callback(client.close)
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(b"a message")
            assert client.poll(1000 * WAIT_S), broker.err  # it is refused: somebody is there
        assert broker.is_running()


@given_by("on_a_broker")
async def test_a_client_without_a_key_is_turned_away_and_counted(bench, monkeypatch):
    monkeypatch.setattr(line, "RENEW_AFTER_S", 0.2)
    for channel in Channel:
        before = sum((await bench.refusals()).values())
        stranger = Endpoint(bench.context, bench.listening.address, channel)
        async with stranger, asyncio.timeout(WAIT_S):
            # Where it has left before anybody could look, it may have been a mere knock; but it comes again.
            while sum((await bench.refusals()).values()) == before:
                assert not await stranger.ready(0.1)
        await bench.counted(Reason.MALFORMED)
        await bench.beat_passes()


@given_by("on_a_broker")
async def test_a_client_that_expects_another_broker_says_nothing_to_this_one(bench):
    right = client_keys(bench.keys / "island-rome.secret", KeyRole.ISLAND)
    other = new_pair(Identity(role=KeyRole.BROKER, name="broker"))
    stranger = bench.dealer(keys=type(right)(own=right.own, broker_public=other.public))
    await stranger.send_multipart(encode(bench.envelope("rome", beat(7))))
    await bench.counted(Reason.MALFORMED)
    await bench.beat_passes()


@given_by("on_a_broker")
async def test_a_key_is_good_for_its_own_id_only(bench):
    rome = await bench.client("island-rome")
    as_others = (
        ("paris", beat(99), 1),
        ("paris", beat(99), 2),  # as if paris had joined again
        (AGGREGATOR, m.Attach(shard=0, epoch=9, versions=(5,)), 0),
        ("join:n", join("paris"), 0),
        ("join:n", join(""), 0),
    )
    for sender, message, incarnation in as_others:
        await bench.send(rome, sender, message, inc=incarnation)
        refused = (await bench.receive(rome, m.Refused)).message
        assert refused.reason is Reason.WRONG_KEY
        assert "island rome" in refused.detail
        assert await bench.beat_passes() < WAIT_S  # the real paris is neither fenced nor cut off
    await bench.counted(Reason.WRONG_KEY, at_least=len(as_others))
    await bench.send(rome, "join:n", join("rome"), inc=0)
    assert (await bench.receive(bench.aggregator, m.Join)).message.island_id == "rome"
    bench.heard.clear()


@given_by("on_a_broker")
async def test_what_was_recorded_on_the_wire_is_worth_nothing_on_another_connection(bench):
    relay = Relay(bench.port())
    async with relay.listening() as port:
        rome = bench.dealer(keys=client_keys(bench.keys / "island-rome.secret", KeyRole.ISLAND), port=port)
        await rome.send_multipart(encode(bench.envelope("join:n", join("rome"), inc=0)))
        await bench.receive(bench.aggregator, m.Join)
        rome.close()
    bench.heard.clear()
    assert len(relay.begun) > 500
    before = (await bench.refusals()).get(Reason.MALFORMED, 0)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", bench.port()), timeout=WAIT_S) as sock:
            sock.sendall(relay.begun)
            await bench.beat_passes()
    await bench.counted(Reason.MALFORMED, at_least=before + 1)
    assert "join:n" not in bench.heard


@pytest.mark.parametrize("carrier", ["tcp", "ipc"])
@given_by("on_a_broker")
async def test_a_revoked_key_is_shut_out_while_the_broker_runs(bench, carrier, caplog, monkeypatch):
    monkeypatch.setattr(line, "RENEW_AFTER_S", 0.5)
    if carrier == "ipc":
        bench.listening = replace(bench.listening, address=bench.listening.ipc)
    rome = await bench.client("island-rome")
    await bench.send(rome, "join:n", join("rome"), inc=0)
    await bench.receive(bench.aggregator, m.Join)
    bench.heard.clear()
    path = bench.keys / ALLOW_LIST
    allowed = read_allow_list(path)
    write_allow_list(path, {key: each for key, each in allowed.items() if each.name != "rome"})
    await bench.counted(Reason.WRONG_KEY)  # its connection was ended, and the next one was turned away
    assert not await rome.send(bench.envelope("rome", beat(1)))
    assert sum("connection.not_allowed" in each and "revoked" in each for each in caplog.messages) == 1
    write_allow_list(path, allowed)
    assert await rome.ready(WAIT_S)


# --- floods ---------------------------------------------------------------------------------------------------------


async def sends_until_ended(bench, channel, chunk):
    """Says what a DEALER says first, then ``chunk`` again and again, until the broker ends the connection.

    Returns the bytes sent; libzmq itself never sends a message before its last frame is there.
    """
    greeting, ready = strangers.DEALER
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port(channel))
    bench.stack.callback(writer.close)
    writer.write(greeting + ready)
    await reader.readexactly(len(greeting))
    await reader.readexactly((await reader.readexactly(2))[1])  # the broker is ready too: what comes now are messages
    listening = asyncio.create_task(reader.read())
    sent = 0
    async with asyncio.timeout(WAIT_S):
        with contextlib.suppress(ConnectionError):
            while not listening.done():
                writer.write(chunk)
                sent += len(chunk)
                await writer.drain()
                await asyncio.sleep(0.002)
    with contextlib.suppress(ConnectionError):
        await listening
    return sent


SMALL = {"key": None, "max_header_bytes": 1 << 16, "max_message_bytes": 1 << 20, "peer_queue_bytes": 1 << 20}


@pytest.mark.parametrize("settings", [SMALL], ids=["small"])
@pytest.mark.parametrize("channel", list(Channel))
@pytest.mark.parametrize("size", [255, pytest.param(0, marks=pytest.mark.full("millions of frames"))])
@given_by("on_a_broker")
async def test_a_message_that_never_ends_is_cut_off(bench, channel, size):
    frame = bytes([1, size, *bytes(size)])  # the first byte says that more come
    # Not faster: what came within the second between two looks is parsed, frame by frame, before libzmq closes.
    assert await sends_until_ended(bench, channel, frame * (20_000 // len(frame))) > 1 << 18
    await bench.beat_passes()


@given_by("on_a_broker")
async def test_a_message_of_a_hundred_thousand_frames_is_refused_and_its_connection_ended(bench):
    context = bench.stack.enter_context(zmq.Context())
    sock = context.socket(zmq.DEALER)
    sock.linger = 0
    bench.stack.callback(sock.close)
    client_keys(bench.keys / "island-rome.secret", KeyRole.ISLAND).apply(sock)
    monitor = bench.stack.enter_context(sock.get_monitor_socket(zmq.EVENT_DISCONNECTED))
    sock.connect(f"tcp://127.0.0.1:{bench.port()}")
    await asyncio.get_running_loop().run_in_executor(None, sock.send_multipart, [b"x"] * 100_000)
    while not monitor.poll(0):
        # With pyzmq's own receiving, a million of them held everybody up for 24 s.
        assert await bench.beat_passes() < 10.0
    sock.disable_monitor()
    await bench.counted(Reason.OVERSIZE)


# --- settings -------------------------------------------------------------------------------------------------------


def test_a_broker_that_others_can_reach_needs_keys_or_an_explicit_risk():
    with pytest.raises(ConfigError, match=r"host = '0\.0\.0\.0': needs keys .*atoll keys new broker.*--insecure"):
        BrokerConfig(host="0.0.0.0")
    assert BrokerConfig(host="0.0.0.0", insecure=True).key is None
