"""The simulated network: cuts, rates, ends of connections and of processes, as their sockets notice them."""

import asyncio

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from broker.transport import descriptors
from broker.transport.sockets import configure_socket
from broker.wire.messages import Channel
from ops.virtual.loop import VirtualTime
from ops.virtual.zeromq.network import Network
from ops.virtual.zeromq.pipe import Pipe
from ops.virtual.zeromq.sockets import Context

SERVER, CLIENT, PORT = "127.0.0.1", "127.0.0.2", 7001


class Pair:
    """A ROUTER and a DEALER that are connected, each in a process of its own, and what the dealer's monitor tells."""

    def __init__(self, virtual, network, channel=Channel.CONTROL):
        self.virtual, self.network = virtual, network
        self.server, self.client = virtual.process("server"), virtual.process("client")
        self.router = self.server.run(lambda: Context(network, self.server, SERVER).socket(zmq.ROUTER))
        self.dealer = self.client.run(lambda: Context(network, self.client, CLIENT).socket(zmq.DEALER))
        for sock in (self.router, self.dealer):
            configure_socket(sock, channel)
        self.router.set(zmq.HEARTBEAT_IVL, 0)
        self.dealer.set(zmq.IMMEDIATE, 1)
        self.told, self.got = [], []
        monitor = self.dealer.get_monitor_socket(zmq.EVENT_ALL)
        self.router.bind(f"tcp://{SERVER}:{PORT}")
        self.dealer.connect(f"tcp://{SERVER}:{PORT}")
        self.client.start(self._watch(monitor))
        self.server.start(self._read())
        virtual.run_until(1.0)
        assert self.told == ["CONNECTED", "HANDSHAKE_SUCCEEDED"]
        self.told.clear()

    async def _watch(self, monitor):
        while True:
            self.told.append(parse_monitor_message(await monitor.recv_multipart())["event"].name)

    async def _read(self):
        while True:
            frames = await self.router.recv_multipart(copy=False)
            self.got.append((round(self.virtual.now_s, 3), bytes(frames[-1][:1])))
            self.fd = frames[-1].get(zmq.SRCFD)

    def send(self, message):
        self.client.run(lambda: self.dealer.send_multipart([message], zmq.NOBLOCK).result())


@pytest.fixture
def virtual():
    with VirtualTime(1) as time:
        yield time


@pytest.fixture
def network(virtual):
    with Network(virtual) as made:
        link = made.link(CLIENT, SERVER)
        link.delay_s = made.link(SERVER, CLIENT).delay_s = (0.01, 0.01)
        yield made


def test_what_is_sent_into_a_cut_comes_in_order_once_it_is_over(virtual, network):
    pair = Pair(virtual, network)
    pair.send(b"a")
    network.cut(CLIENT, SERVER, 2.0)
    for message in (b"b", b"c"):
        pair.send(message)
        virtual.run_until(virtual.now_s + 0.5)
    assert pair.got == []
    virtual.run_until(4.0)
    assert [message for _, message in pair.got] == [b"a", b"b", b"c"]
    assert 3.0 <= pair.got[0][0] <= 3.5
    assert pair.told == []


@pytest.mark.parametrize(("channel", "least_s", "most_s"), [(Channel.CONTROL, 4, 8), (Channel.BULK, 20, 35)])
def test_a_cut_that_lasts_is_noticed_by_pings_or_by_the_kernel(virtual, network, channel, least_s, most_s):
    pair = Pair(virtual, network, channel)
    network.cut(SERVER, CLIENT, 100.0)
    virtual.run_until(1.0 + least_s)
    assert pair.told == []
    virtual.run_until(1.0 + most_s)
    assert pair.told[:2] == ["DISCONNECTED", "CONNECT_RETRIED"]
    virtual.run_until(130.0)
    assert pair.told[-2:] == ["CONNECTED", "HANDSHAKE_SUCCEEDED"]
    pair.send(b"x")
    virtual.run_until(131.0)
    assert [message for _, message in pair.got] == [b"x"]


def test_a_link_carries_so_many_bytes_for_all(virtual, network):
    pair = Pair(virtual, network)
    network.link(CLIENT, SERVER).bytes_per_s = 1e6
    for message in (b"a", b"b"):
        pair.send(message * 500_000)
    virtual.run_until(5.0)
    assert pair.got == [(pytest.approx(1.51, abs=0.002), b"a"), (pytest.approx(2.01, abs=0.002), b"b")]


def test_a_process_that_dies_ends_its_connections_behind_what_is_on_its_way(virtual, network):
    pair = Pair(virtual, network)
    pair.send(b"a")
    virtual.run_until(virtual.now_s + 0.001)
    pair.send(b"lost in its memory")
    pair.client.kill()
    virtual.run_until(2.0)
    assert [message for _, message in pair.got] == [b"a"]
    assert not network.connections
    pair.server.kill()
    assert not network.listeners


def test_descriptors_of_simulated_connections_are_asked_and_ended_as_real_ones_are(virtual, network):
    pair = Pair(virtual, network)
    pair.send(b"a" * 1000)
    virtual.run_until(2.0)
    assert descriptors.received_bytes(pair.fd) == 1000
    assert descriptors.hold(pair.fd, {PORT + 1}) is None
    assert not descriptors.hang_up(pair.fd, {PORT + 1})
    assert descriptors.hang_up(pair.fd, {PORT})
    virtual.run_until(3.0)
    assert pair.told == ["DISCONNECTED", "CONNECT_RETRIED", "CONNECTED", "HANDSHAKE_SUCCEEDED"]
    assert descriptors.received_bytes(pair.fd) is None


def test_a_pipe_is_full_until_half_of_it_has_been_read_and_announces_once():
    told = []
    pipe = Pipe(4, told.append)
    assert [pipe.write(number) for number in range(4)] == [True, False, False, False]
    assert pipe.full
    assert pipe.read() == 0
    assert told == []
    assert pipe.read() == 1
    assert told == [2]
    assert pipe.full, "its writer has not been told"
    pipe.told(2)
    assert not pipe.full
    assert [pipe.read() for _ in range(3)] == [2, 3, None]
    assert pipe.write(4), "its reader had found nothing"


def test_a_closed_socket_cancels_what_waits_and_term_waits_for_no_open_one(virtual, network):
    process = virtual.process("a")

    async def main():
        context = Context(network, process, CLIENT)
        sock = context.socket(zmq.DEALER)
        waiting = asyncio.ensure_future(sock.recv_multipart())
        with pytest.raises(AssertionError, match="still open"):
            context.term()
        sock.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        context.term()

    done = process.start(main())
    virtual.run_until(1.0)
    done.result()
