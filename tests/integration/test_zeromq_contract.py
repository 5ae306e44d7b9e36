"""What the broker and its clients rely on of ZeroMQ: each property of libzmq itself and of the simulated sockets."""

import asyncio
import contextlib
import errno
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from broker.gateway.gate import ZAP_ADDRESS, zap_answer
from broker.transport.keys import new_pair
from broker.transport.sockets import Context
from broker.wire.identity import Identity, KeyRole
from ops.processes.cluster import free_ports
from ops.virtual.loop import VirtualTime
from ops.virtual.zeromq.network import Network
from ops.virtual.zeromq.sockets import Context as SimulatedContext

WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
SOON_S, WAIT_S = 0.3, 20.0


@dataclass
class World:
    """Contexts of a server and a client, and an address between them."""

    server: Any
    client: Any
    address: str
    hold: Any  #: holds the process up for so many seconds, while ZeroMQ's threads go on
    sockets: list = field(default_factory=list)

    def router(self, **options):
        return self.ready(self.server.socket(zmq.ROUTER), {"ROUTER_MANDATORY": 1} | options)

    def dealer(self, **options):
        return self.ready(self.client.socket(zmq.DEALER), {"IMMEDIATE": 1, "RECONNECT_IVL": 20} | options)

    def monitor(self, sock):
        return self.ready(sock.get_monitor_socket(WATCHED), {})

    def zap(self):
        sock = self.ready(self.server.socket(zmq.ROUTER), {})
        sock.bind(ZAP_ADDRESS)
        return sock

    def ready(self, sock, options):
        self.sockets.append(sock)
        sock.linger = options.pop("LINGER", 0)
        for name, value in options.items():
            if name.startswith("curve_"):
                setattr(sock, name, value)
            else:
                sock.set(getattr(zmq, name), value)
        return sock


def in_both(scenario):
    """Runs a coroutine function with libzmq, and in virtual time."""

    @pytest.mark.parametrize("world", ["libzmq", "simulated"])
    def test(world):
        if world == "libzmq":
            asyncio.run(_with_libzmq(scenario))
        else:
            _simulated(scenario)

    test.__doc__ = scenario.__doc__
    test.__module__ = scenario.__module__
    return test


async def _with_libzmq(scenario):
    server, client = Context(), Context()
    world = World(server, client, f"tcp://127.0.0.1:{free_ports(1)}", time.sleep)
    try:
        async with asyncio.timeout(WAIT_S):
            await scenario(world)
    finally:
        for sock in reversed(world.sockets):
            sock.close(linger=0)
        client.term()
        server.term()


def _simulated(scenario):
    with VirtualTime(1) as virtual, Network(virtual) as network:
        process = virtual.process("both")

        def hold(for_s):
            process.freeze(for_s + 1e-6)
            virtual.run_until(virtual.now_s + for_s)

        contexts = (SimulatedContext(network, process, f"127.0.0.{host}") for host in (1, 2))
        done = process.start(scenario(World(*contexts, "tcp://127.0.0.1:7001", hold)))
        virtual.run_until(WAIT_S, done.done)
        assert virtual.failures == []
        assert done.done(), "it took too long"
        done.result()


async def sent(sock, frames):
    """Sends once the socket takes it."""
    while True:
        try:
            return await sock.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            await asyncio.sleep(0.005)


async def met(world, router, dealer):
    """Connects both; returns the routing id of the dealer."""
    router.bind(world.address)
    dealer.connect(world.address)
    await sent(dealer, [b"hello"])
    route, _ = await router.recv_multipart()
    return route


async def taken(sock):
    """What a socket has, without waiting."""
    with contextlib.suppress(zmq.Again):
        return await sock.recv_multipart(zmq.NOBLOCK)


async def polled(world, sock, wait_s):
    poller = world.client.poller()
    poller.register(sock, zmq.POLLIN)
    return bool(await poller.poll(round(1000 * wait_s)))


async def heard(monitor, *events):
    """Waits until a monitor has told of these, in this order; returns all that it has told."""
    left, told = list(events), []
    while left:
        seen = parse_monitor_message(await monitor.recv_multipart())
        told.append((seen["event"], seen["value"], seen["endpoint"].decode()))
        if seen["event"] == left[0]:
            del left[0]
    return told


@in_both
async def test_messages_arrive_whole_and_in_order_with_what_is_known_of_their_connection(world):
    router, dealer = world.router(ZAP_DOMAIN=b"x"), world.dealer()
    zap = world.zap()

    async def admit():
        await zap.send_multipart(zap_answer(await zap.recv_multipart(), None))

    admitting = asyncio.create_task(admit())
    route = await met(world, router, dealer)
    await admitting
    assert (len(route), route[:1]) == (5, b"\0")
    for number in range(20):
        await sent(dealer, [b"head", memoryview(bytes([number]) * 100_000), b""])
    direct = world.server.direct(router)
    for number in range(20):
        frames = [await router.recv(copy=False)]
        assert frames[0].bytes == route
        while frames[-1].more:
            frames.append(direct.recv(zmq.NOBLOCK, copy=False))
        assert [bytes(memoryview(each)) for each in frames[1:]] == [b"head", bytes([number]) * 100_000, b""]
        assert frames[1].get(zmq.SRCFD) > 0
        assert frames[1].get("User-Id") == ""
    await sent(router, [route, b"back"])
    assert await dealer.recv_multipart() == [b"back"]


@in_both
async def test_nothing_to_take_or_nobody_to_take_it_is_an_error_at_once(world):
    router, dealer = world.router(), world.dealer()
    for fails in (lambda: dealer.recv_multipart(zmq.NOBLOCK), lambda: dealer.send_multipart([b"x"], zmq.NOBLOCK)):
        with pytest.raises(zmq.Again):
            await fails()
    with pytest.raises(zmq.ZMQError) as caught:
        await router.send_multipart([b"nobody", b"x"], zmq.NOBLOCK)
    assert caught.value.errno == errno.EHOSTUNREACH
    with pytest.raises(zmq.ZMQError) as caught:
        dealer.disconnect("tcp://127.0.0.1:1")
    assert caught.value.errno == errno.ENOENT
    router.bind(world.address)
    assert router.get(zmq.LAST_ENDPOINT).rstrip(b"\0") == world.address.encode()
    second = world.router()
    with pytest.raises(zmq.ZMQError) as caught:
        second.bind(world.address)
    assert caught.value.errno == errno.EADDRINUSE


@in_both
async def test_what_has_come_is_announced_once(world):
    """Whoever takes some of it directly leaves those asleep that wait for the rest, until they look themselves."""
    router, dealer = world.router(), world.dealer()
    route = await met(world, router, dealer)
    waiting = asyncio.create_task(polled(world, dealer, 2.0))
    await asyncio.sleep(0.05)
    for number in range(3):
        await sent(router, [route, bytes([number])])
    world.hold(0.1)  # nobody hears of it in time,
    assert await taken(dealer) == [b"\0"]  # and here it has been seen
    await asyncio.sleep(SOON_S)
    assert not waiting.done()
    await sent(router, [route, b"\3"])
    await asyncio.sleep(SOON_S)
    assert not waiting.done(), "nobody had found that nothing is left"
    assert await polled(world, dealer, 1.0), "another poll looks"
    await waiting
    assert [await taken(dealer) for _ in range(4)] == [[b"\1"], [b"\2"], [b"\3"], None]


@in_both
async def test_one_announcement_wakes_all_that_wait_one_after_the_other(world):
    router, dealer = world.router(), world.dealer()
    route = await met(world, router, dealer)
    waiting = [asyncio.create_task(polled(world, dealer, 5.0)) for _ in range(3)]
    await asyncio.sleep(0.05)
    await sent(router, [route, b"x"])
    assert await asyncio.gather(*waiting) == [True] * 3
    assert await taken(dealer) == [b"x"]
    assert await polled(world, dealer, 0.05) is False
    receiving = [asyncio.ensure_future(dealer.recv_multipart()) for _ in range(2)]
    await asyncio.sleep(0.05)
    await sent(router, [route, b"y"])
    await asyncio.sleep(0.1)
    assert [each.done() for each in receiving] == [True, False]
    await sent(router, [route, b"z"])
    assert await asyncio.gather(*receiving) == [[b"y"], [b"z"]]


@in_both
async def test_a_queue_at_its_mark_takes_nothing_until_half_of_it_has_gone(world):
    router, dealer = world.router(RCVHWM=4, RCVBUF=4096), world.dealer(SNDHWM=4, SNDBUF=4096)
    await met(world, router, dealer)
    number = 0
    with contextlib.suppress(zmq.Again):
        while True:
            await dealer.send_multipart([number.to_bytes(2), bytes(1 << 18)], zmq.NOBLOCK)
            number += 1
            await asyncio.sleep(0.02)  # its thread takes what it can
    assert 4 <= number < 60
    for expected in range(number):
        route, got, _ = await router.recv_multipart()
        assert int.from_bytes(got) == expected
    await sent(dealer, [b"more"])
    assert await router.recv_multipart() == [route, b"more"]
    full = 0
    with contextlib.suppress(zmq.Again):
        while True:
            await router.send_multipart([route, bytes(1 << 18)], zmq.NOBLOCK)
            full += 1
            await asyncio.sleep(0.001)
    assert full > 100, "a mark of 1000 messages, of which each fits into the buffers"


@in_both
async def test_a_server_that_goes_and_comes_is_noticed_and_the_connection_is_another_one(world):
    router, dealer = world.router(LINGER=1000), world.dealer()
    monitor = world.monitor(dealer)
    first = await met(world, router, dealer)
    told = await heard(monitor, zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED)
    assert [each[0] for each in told if each[0] != zmq.EVENT_CONNECT_RETRIED] == [
        zmq.EVENT_CONNECTED,
        zmq.EVENT_HANDSHAKE_SUCCEEDED,
    ]
    descriptor = told[-2][1]
    assert {each[2] for each in told} == {world.address}
    await sent(router, [first, b"last"])
    router.close()
    told = await heard(monitor, zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_CONNECT_RETRIED)
    assert told[0][:2] == (zmq.EVENT_DISCONNECTED, descriptor)
    assert not dealer.get(zmq.EVENTS)
    assert await taken(dealer) is None, "where the loss is noticed, what came before is dropped"
    with pytest.raises(zmq.Again):
        await dealer.send_multipart([b"to nobody"], zmq.NOBLOCK)
    router = world.router()
    for _ in range(200):
        try:
            router.bind(world.address)
            break
        except zmq.ZMQError:
            await asyncio.sleep(0.01)
    await heard(monitor, zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED)
    await sent(dealer, [b"again"])
    second, message = await router.recv_multipart()
    assert message == b"again"
    assert second != first


@in_both
async def test_a_router_hears_that_a_client_has_gone(world):
    router, dealer = world.router(), world.dealer()
    router.monitor("inproc://watch", zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    monitor = world.ready(world.server.socket(zmq.PAIR), {})
    monitor.connect("inproc://watch")
    route = await met(world, router, dealer)
    told = await heard(monitor, zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED)
    dealer.close()
    assert (await heard(monitor, zmq.EVENT_DISCONNECTED))[0][1] == told[0][1], "the same descriptor"
    await asyncio.sleep(0.01)
    with pytest.raises(zmq.ZMQError) as caught:
        await router.send_multipart([route, b"x"], zmq.NOBLOCK)
    assert caught.value.errno == errno.EHOSTUNREACH


@in_both
async def test_a_connection_that_is_given_up_takes_messages_for_a_moment_and_loses_them(world):
    router, dealer = world.router(), world.dealer()
    first = await met(world, router, dealer)
    await sent(router, [first, b"before"])
    await asyncio.sleep(0.1)
    dealer.disconnect(world.address)
    assert await dealer.recv_multipart() == [b"before"], "what has come can still be read"
    dealer.connect(world.address)
    lost = 0
    while True:
        try:
            await dealer.send_multipart([b"lost or not"], zmq.NOBLOCK)
            lost += 1
        except zmq.Again:
            break
        await asyncio.sleep(0)
    await sent(dealer, [b"over the new one"])
    while (message := await router.recv_multipart())[1] != b"over the new one":
        pass
    assert message[0] != first


@in_both
async def test_what_is_queued_is_sent_within_the_linger_time(world):
    router, dealer = world.router(), world.dealer()
    await met(world, router, dealer)
    for number in range(50):
        await sent(dealer, [number.to_bytes(2), bytes(10_000)])
    dealer.close(linger=5000)
    assert [int.from_bytes((await router.recv_multipart())[1]) for _ in range(50)] == list(range(50))


@in_both
async def test_a_frame_beyond_the_maximum_ends_its_connection(world):
    router, dealer = world.router(MAXMSGSIZE=1000), world.dealer()
    await met(world, router, dealer)
    monitor = world.monitor(dealer)
    await sent(dealer, [bytes(1000)])
    assert len((await router.recv_multipart())[1]) == 1000
    await sent(dealer, [bytes(1001)])
    await heard(monitor, zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECTED)


@in_both
async def test_only_an_allowed_key_gets_in_and_is_told_of_each_message(world):
    def pair(role, name):
        return new_pair(Identity(role=role, name=name))

    own, island, stranger = pair(KeyRole.BROKER, "b"), pair(KeyRole.ISLAND, "a"), pair(KeyRole.ISLAND, "x")
    router = world.router(
        curve_server=True,
        curve_publickey=own.public.encode(),
        curve_secretkey=own.secret.encode(),
        ZAP_DOMAIN=b"atoll",
        ZAP_ENFORCE_DOMAIN=1,
    )
    zap = world.zap()

    async def answer():
        while True:
            await zap.send_multipart(zap_answer(await zap.recv_multipart(), {island.public: island.identity}))

    answering = asyncio.create_task(answer())

    def dealer(of, server):
        return world.dealer(
            curve_serverkey=server.public.encode(),
            curve_publickey=of.public.encode(),
            curve_secretkey=of.secret.encode(),
        )

    refused = dealer(stranger, own)
    monitor = world.monitor(refused)
    router.bind(world.address)
    refused.connect(world.address)
    await heard(monitor, zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_DISCONNECTED)

    allowed = dealer(island, own)
    allowed.connect(world.address)
    await sent(allowed, [b"x"])
    route = await router.recv(copy=False)
    assert world.server.direct(router).recv(zmq.NOBLOCK, copy=False).get("User-Id") == island.public
    assert not world.server.direct(router).get(zmq.RCVMORE)
    assert route.more
    answering.cancel()


@in_both
async def test_the_process_that_waits_is_cancelled_by_a_socket_that_closes(world):
    dealer = world.dealer()
    waiting = asyncio.ensure_future(dealer.recv_multipart())
    await asyncio.sleep(0.01)
    dealer.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(zmq.ZMQError) as caught:
        await dealer.recv_multipart(zmq.NOBLOCK)
    assert caught.value.errno == zmq.ENOTSOCK
