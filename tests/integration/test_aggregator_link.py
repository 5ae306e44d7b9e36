"""The aggregator's connections to several brokers: one that takes nothing holds up no other."""

import asyncio
import contextlib
import functools
import socket

import numpy as np
import pytest
import zmq

from aggregator.process import broker_link
from aggregator.process.broker_link import MOST_DIFFERENCES, Link, Outgoing
from broker.chunks.sending import WHOLE_BYTES
from broker.transport.endpoint import Endpoint
from broker.wire import messages as m
from broker.wire.frames import decode
from broker.wire.headers import DEFAULT_LIMITS
from broker.wire.tensors import encode_tensor
from tests.bare_router import context
from tests.bulk_receiver import BulkReceiver
from tests.coroutines import in_a_loop

#: Below the 5 s that a bulk message waits for a broker that is away; all else here takes milliseconds.
WITHIN_S = 4.5


def version(fragment_version, fragment_id=0, payload=()):
    return m.Version(
        epoch=1,
        fragment_id=fragment_id,
        fragment_version=fragment_version,
        digest="0" * 32,
        contributions=(),
        payload=payload,
    )


def publication(fragment_version, fragment_id=0, payload=()):
    async def made():
        return version(fragment_version, fragment_id, payload)

    return Outgoing(m.BROKER, lambda: asyncio.ensure_future(made()))


def publish(link, fragment_version, fragment_id=0, payload=(), *, whole=True):
    link.publish(fragment_id, fragment_version, publication(fragment_version, fragment_id, payload), whole=whole)


def wrap(to, message):
    return m.Envelope(run_id="demo", sender=m.AGGREGATOR, incarnation=0, sequence=1, to=to, message=message)


def link_to(context, address, unsendable):
    return Link(
        context,
        address,
        keys=None,
        limits=DEFAULT_LIMITS,
        wrap=wrap,
        on_unreadable=lambda *_: None,
        on_unsendable=lambda error, to: unsendable.append((to, str(error))),
    )


@contextlib.asynccontextmanager
async def sending(unsendable=(), most_waiting=None):
    """A link that sends what is queued, and the broker's bulk socket, which reads when it is asked to."""
    async with context() as opened:
        with opened.socket(zmq.ROUTER) as bulk:
            bulk.linger = 0
            if most_waiting is not None:
                bulk.set_hwm(most_waiting)
            port = bulk.bind_to_random_port("tcp://127.0.0.1")
            async with link_to(opened, f"tcp://127.0.0.1:{port - 1}", unsendable) as link, asyncio.TaskGroup() as group:
                task = group.create_task(link.send_bulk())
                yield link, bulk
                task.cancel()


LARGE = (encode_tensor(np.zeros(2_000_000, np.float32), m.Codec.F32),)
#: Of 8 MB each: none goes on before the broker has noted what came.
MANY = 12


@in_a_loop
async def test_a_message_that_no_peer_would_read_is_dropped_and_the_next_one_goes_out():
    """What a peer claims may end up in a message; one that cannot be encoded must not end the aggregator."""
    unsendable = []
    async with sending(unsendable) as (link, bulk), asyncio.timeout(30.0):
        publish(link, 2**64)
        publish(link, 7, 1)
        await link.send(wrap("a", m.Donor(island_id="b", wait_s=float("inf"))))
        _, *frames = await bulk.recv_multipart()
    assert decode(frames, DEFAULT_LIMITS).message.fragment_version == 7
    said = dict(unsendable)
    assert said.keys() == {"a", m.BROKER}
    assert "wait_s" in said["a"]
    assert "fragment_version" in said[m.BROKER]


@pytest.mark.timeout(60)
@in_a_loop
async def test_behind_a_broker_that_is_slow_nothing_is_dropped_and_newer_versions_replace_those_that_wait(monkeypatch):
    monkeypatch.setattr(broker_link, "Endpoint", functools.partial(Endpoint, bulk_wait_s=0.2))
    async with sending(most_waiting=1) as (link, bulk):
        for fragment_id in range(MANY):
            publish(link, 1, fragment_id, LARGE)
        await asyncio.sleep(0.6)  # longer than a send waits before it gives up
        publish(link, 2, MANY - 1, LARGE)
        receiver = BulkReceiver(bulk)
        came = [(await receiver.message()).message for _ in range(MANY)]
    newest = [(p, 1 + (p == MANY - 1)) for p in range(MANY)]
    assert [(each.fragment_id, each.fragment_version) for each in came] == newest


@in_a_loop
async def test_differences_that_wait_go_out_in_order_and_give_way_to_a_whole_version_or_where_they_are_many():
    async with sending() as (link, bulk):
        for number in range(1, MOST_DIFFERENCES + 1):  # of fragment 0: as many as may wait
            publish(link, number, whole=False)
        for number in range(1, MOST_DIFFERENCES + 2):  # of fragment 1: one more
            publish(link, number, 1, whole=False)
        for number, whole in ((1, False), (2, False), (2, True), (3, False)):
            publish(link, number, 2, whole=whole)
        came = []
        async with asyncio.timeout(WITHIN_S):
            while not came or came[-1] != (2, 3):
                _, *frames = await bulk.recv_multipart(copy=False)
                message = decode(frames, DEFAULT_LIMITS).message
                came.append((message.fragment_id, message.fragment_version))
    in_order = [(0, number) for number in range(1, MOST_DIFFERENCES + 1)]
    assert came == [*in_order, (1, MOST_DIFFERENCES + 1), (2, 2), (2, 3)]


@pytest.mark.timeout(60)
@in_a_loop
async def test_over_a_connection_made_anew_it_attaches_first_and_sends_what_waits():
    """A broker takes no version from one who has not attached over that connection."""
    async with sending(most_waiting=1) as (link, bulk), asyncio.timeout(30.0):
        link.attach(m.AttachBulk(shard=0, epoch=3, shards=1))
        for fragment_id in range(MANY):
            publish(link, 1, fragment_id, LARGE)
        while link.endpoints[m.Channel.BULK].traffic.bytes_up < WHOLE_BYTES:  # the broker notes nothing
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        link.endpoints[m.Channel.BULK].renew()
        publish(link, 2, 5)
        came, receiver = [], BulkReceiver(bulk)
        while not came or came[-1][1:] != (m.Version, 2):
            peer, envelope = await receiver.taken()
            message = envelope.message
            came.append((peer, type(message), getattr(message, "fragment_version", None)))
    first, last = came[0][0], came[-1][0]
    assert first != last
    over_the_new_one = [each[1:] for each in came if each[0] == last]
    assert over_the_new_one[0] == (m.AttachBulk, None)
    assert over_the_new_one[1:] == [(m.Version, 1)] * 11 + [(m.Version, 2)]  # each once; one gave way to the newer


@in_a_loop
async def test_versions_reach_a_broker_while_another_one_is_away():
    with socket.socket() as taken:  # bound, not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        away = f"tcp://127.0.0.1:{taken.getsockname()[1] - 1}"
        async with context() as opened, sending() as (link, bulk), link_to(opened, away, []) as other:
            task = asyncio.create_task(other.send_bulk())
            for number in range(3):
                shared = publication(number)
                for each in (other, link):
                    each.publish(0, 1, shared, whole=True)
                async with asyncio.timeout(WITHIN_S):
                    _, *frames = await bulk.recv_multipart()
                assert decode(frames, DEFAULT_LIMITS).message.fragment_version == number
            assert len(other._versions) <= 1  # of a fragment only the newest waits
            task.cancel()
