"""An island's tensors over several connections at once, through a real broker, also while one of them breaks."""

import asyncio
import contextlib
import itertools
import time

import numpy as np

from broker.clients.flows import Flows
from broker.routing.liveness import LivenessConfig
from broker.transport.endpoint import Endpoint
from broker.transport.line import Line
from broker.wire import messages as m
from broker.wire.messages import Channel
from tests.aggregator_hand import beat
from tests.broker_bench import WAIT_S, config, contribution, on_a_broker, version
from tests.coroutines import given_by
from tests.tcp_relay import Relay

CONNECTIONS = 4
#: The aggregator of these tests says nothing for as long as a busy machine takes for 16 MB.
PATIENT = LivenessConfig(dead_after_s=WAIT_S)
beside_a_broker = given_by(lambda use: on_a_broker(config(liveness=PATIENT), use))
#: More than may be under way over one connection at first.
DELTA = np.random.default_rng(0).normal(size=(4 << 20,)).astype(np.float32)


@contextlib.asynccontextmanager
async def spread(bench, proxy):
    """An aggregator, and an island whose tensors go through the proxy."""
    aggregator, island = await bench.aggregator(), await bench.client("a")
    async with proxy.listening() as port:
        bulk = Endpoint(bench.context, f"tcp://127.0.0.1:{port - 1}", Channel.BULK, connections=CONNECTIONS)
        island.endpoints[Channel.BULK] = bulk
        async with bulk:
            await island.send(beat(1))
            await aggregator.receive(m.Heartbeat)
            assert await bulk.ready(WAIT_S)
            yield aggregator, island, bulk


def carrying(bulk):
    """How many connections carry chunks: the first, and those over which the broker has answered."""
    return len({0, *bulk._chunked.bonding._joined})


async def all_carry(bulk, proxy, made):
    """Reads until all connections carry chunks, when at least so many have been made."""
    ends_s = time.monotonic() + WAIT_S
    while not bulk.connection or carrying(bulk) != CONNECTIONS or len(proxy.up) < made:
        assert await bulk.recv(0.05) is None
        assert time.monotonic() < ends_s, f"{carrying(bulk)} connections of {len(proxy.up)}, {made} never came"


@beside_a_broker
async def test_tensors_go_both_ways_over_all_connections_and_arrive_unchanged(bench):
    proxy = Relay(bench.listening.bulk_port)
    async with spread(bench, proxy) as (aggregator, island, bulk):
        await all_carry(bulk, proxy, CONNECTIONS)
        for number in range(3):
            reading = asyncio.create_task(aggregator.receive(m.Contribution))
            await island.send(contribution(DELTA + number, from_step=number))
            assert bytes((await reading).message.payload[0].data) == (DELTA + number).tobytes()
        assert min(proxy.up) > DELTA.nbytes / 8
        for number in range(1, 4):
            await aggregator.send(version(DELTA - number, fragment_version=number))
            await island.send(m.Want(versions=(number - 1,)))
            reading = asyncio.create_task(island.receive(m.Version))
            got = (await reading).message
            assert got.fragment_version == number
            assert bytes(got.payload[0].data) == (DELTA - number).tobytes()


@beside_a_broker
async def test_a_connection_that_breaks_takes_the_others_with_it_and_all_come_back(bench):
    proxy = Relay(bench.listening.bulk_port)
    async with spread(bench, proxy) as (aggregator, island, bulk):
        await all_carry(bulk, proxy, CONNECTIONS)
        for victim, place in itertools.product((2, 0), range(2)):
            made, cut = len(proxy.up), proxy.living()[victim]
            sent = proxy.up[cut]
            reading = asyncio.create_task(aggregator.receive(m.Contribution))
            under_way = asyncio.create_task(island.send(contribution(DELTA, from_step=2 * victim + place)))
            while proxy.up[cut] < sent + (1 << 20):
                await asyncio.sleep(0.001)
            proxy.cut(cut)
            with contextlib.suppress(AssertionError):  # the endpoint says that it could not be sent
                await under_way
            await all_carry(bulk, proxy, made + CONNECTIONS)
            if not reading.done():
                await island.send(contribution(DELTA, from_step=2 * victim + place))
            got = (await reading).message
            assert bytes(got.payload[0].data) == DELTA.tobytes()


@beside_a_broker
async def test_a_connection_that_is_lost_behind_what_came_over_it_takes_the_others_from_under_no_reader(
    bench, monkeypatch
):
    """The loss is seen between two reads of one turn, and with it the sockets of the others close."""
    proxy, taken = Relay(bench.listening.bulk_port), Line.taken
    async with spread(bench, proxy) as (aggregator, island, bulk):
        await all_carry(bulk, proxy, CONNECTIONS)

        def lost_behind(line):
            frames = taken(line)
            if frames is not None and line is bulk._lines.get(0):
                monkeypatch.setattr(Line, "taken", taken)
                line.renew(time.monotonic())
            return frames

        await aggregator.send(version(DELTA[:4], fragment_version=1))
        monkeypatch.setattr(Line, "taken", lost_behind)
        await island.send(m.Want(versions=(0,)))
        assert (await bulk.recv(WAIT_S)).message.fragment_version == 1


@beside_a_broker
async def test_to_a_broker_that_does_not_answer_for_it_all_goes_over_one_connection(bench, monkeypatch):
    monkeypatch.setattr(Flows, "_bind", lambda *_: None)
    proxy = Relay(bench.listening.bulk_port)
    async with spread(bench, proxy) as (aggregator, island, bulk):
        reading = asyncio.create_task(aggregator.receive(m.Contribution))
        await island.send(contribution(DELTA))
        assert bytes((await reading).message.payload[0].data) == DELTA.tobytes()
        assert carrying(bulk) == len(proxy.up) == 1


@beside_a_broker
async def test_whoever_waits_for_a_message_goes_on_waiting_when_all_connections_are_made_anew(bench):
    """The sockets of the others close under the poll of one task while another one notices the loss."""
    proxy = Relay(bench.listening.bulk_port)
    async with spread(bench, proxy) as (aggregator, island, bulk):
        await all_carry(bulk, proxy, CONNECTIONS)
        reading = asyncio.create_task(bulk.recv(WAIT_S))
        await asyncio.sleep(0.1)
        proxy.cut(proxy.living()[0])
        assert not await bulk.line(True, WAIT_S)
        assert await bulk.ready(WAIT_S)
        await aggregator.send(version(DELTA[:4], fragment_version=1))
        await island.send(m.Want(versions=(0,)))
        assert (await reading).message.fragment_version == 1
