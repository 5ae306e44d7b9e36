"""The aggregator's connections to several brokers: one that takes nothing holds up no other."""

import asyncio
import contextlib
import socket

import numpy as np
import pytest
import zmq.asyncio

from aggregator.process.broker_link import MOST_DIFFERENCES, Link, Outgoing
from broker.chunks.sending import WHOLE_BYTES
from broker.wire import messages as m
from broker.wire.codec import decode
from broker.wire.headers import DEFAULT_LIMITS
from broker.wire.tensors import encode_tensor
from tests.bulk_receiver import BulkReceiver

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
    context = zmq.asyncio.Context()
    bulk = context.socket(zmq.ROUTER)
    if most_waiting is not None:
        bulk.set_hwm(most_waiting)
    port = bulk.bind_to_random_port("tcp://127.0.0.1")
    try:
        async with link_to(context, f"tcp://127.0.0.1:{port - 1}", unsendable) as link, asyncio.TaskGroup() as group:
            task = group.create_task(link.send_bulk())
            yield link, bulk
            task.cancel()
    finally:
        bulk.close(linger=0)
        context.term()


def test_a_message_that_no_peer_would_read_is_dropped_and_the_next_one_goes_out():
    """What a peer claims may end up in a message; one that cannot be encoded must not end the aggregator."""

    async def main():
        unsendable = []
        async with sending(unsendable) as (link, bulk):
            publish(link, 2**64)
            publish(link, 7, 1)
            await link.send(wrap("a", m.Donor(island_id="b", wait_s=float("inf"))))
            async with asyncio.timeout(30.0):
                frames = await bulk.recv_multipart()
        return decode(frames[1:], DEFAULT_LIMITS).message.fragment_version, unsendable

    version_sent, unsendable = asyncio.run(main())
    assert version_sent == 7
    assert {to: "wait_s" in error or "fragment_version" in error for to, error in unsendable} == {
        "a": True,
        m.BROKER: True,
    }


@pytest.mark.timeout(60)
def test_behind_a_broker_that_is_slow_nothing_is_dropped_and_newer_versions_replace_those_that_wait():
    many = 12  # of 8 MB each: none goes on before the broker has noted what came
    payload = (encode_tensor(np.zeros(2_000_000, np.float32), m.Codec.F32),)

    async def main():
        async with sending(most_waiting=1) as (link, bulk):
            for fragment_id in range(many):
                publish(link, 1, fragment_id, payload)
            await asyncio.sleep(6.0)  # longer than a send waits before it gives up
            publish(link, 2, many - 1, payload)
            came, receiver = [], BulkReceiver(bulk)
            while len(came) < many:
                message = (await receiver.message()).message
                came.append((message.fragment_id, message.fragment_version))
        return came

    assert asyncio.run(main()) == [(p, 1 + (p == many - 1)) for p in range(many)]


def test_differences_that_wait_go_out_in_order_and_give_way_to_a_whole_version_or_where_they_are_many():
    async def main():
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
        return came

    in_order = [(0, number) for number in range(1, MOST_DIFFERENCES + 1)]
    assert asyncio.run(main()) == [*in_order, (1, MOST_DIFFERENCES + 1), (2, 2), (2, 3)]


@pytest.mark.timeout(60)
def test_over_a_connection_made_anew_it_attaches_first_and_sends_what_waits():
    """A broker takes no version from one who has not attached over that connection."""
    payload = (encode_tensor(np.zeros(2_000_000, np.float32), m.Codec.F32),)

    async def main():
        async with sending(most_waiting=1) as (link, bulk):
            link.attach(m.AttachBulk(shard=0, epoch=3, shards=1))
            for fragment_id in range(12):
                publish(link, 1, fragment_id, payload)
            async with asyncio.timeout(30.0):
                while link.endpoints[m.Channel.BULK].traffic.bytes_up < WHOLE_BYTES:  # the broker notes nothing
                    await asyncio.sleep(0.05)
                await asyncio.sleep(1.0)
                link.endpoints[m.Channel.BULK].renew()
                publish(link, 2, 5)
                came, receiver = [], BulkReceiver(bulk)
                while not came or (came[-1][1], came[-1][2]) != (m.Version, 2):
                    peer, envelope = await receiver.taken()
                    message = envelope.message
                    came.append((peer, type(message), getattr(message, "fragment_version", None)))
        return came

    came = asyncio.run(main())
    first, last = came[0][0], came[-1][0]
    assert first != last
    over_the_new_one = [each[1:] for each in came if each[0] == last]
    assert over_the_new_one[0] == (m.AttachBulk, None)
    assert over_the_new_one[1:] == [(m.Version, 1)] * 11 + [(m.Version, 2)]  # each once; one gave way to the newer


def test_versions_reach_a_broker_while_another_one_is_away():
    async def main():
        context = zmq.asyncio.Context()
        with socket.socket() as taken:  # bound, not listening: nobody answers there
            taken.bind(("127.0.0.1", 0))
            bulk = context.socket(zmq.ROUTER)
            port = bulk.bind_to_random_port("tcp://127.0.0.1")
            addresses = [f"tcp://127.0.0.1:{taken.getsockname()[1] - 1}", f"tcp://127.0.0.1:{port - 1}"]
            links = [link_to(context, each, []) for each in addresses]
            async with links[0], links[1], asyncio.TaskGroup() as group:
                tasks = [group.create_task(link.send_bulk()) for link in links]
                seen = []
                for number in range(3):
                    shared = publication(number)
                    for link in links:
                        link.publish(0, 1, shared, whole=True)
                    async with asyncio.timeout(WITHIN_S):
                        frames = await bulk.recv_multipart()
                    seen.append(decode(frames[1:], DEFAULT_LIMITS).message.fragment_version)
                assert len(links[0]._versions) <= 1  # of a fragment only the newest waits
                for task in tasks:
                    task.cancel()
            bulk.close(linger=0)
        context.term()
        return seen

    assert asyncio.run(main()) == [0, 1, 2]
