"""The endpoint on real sockets, against a bare ROUTER that stands for the broker."""

import asyncio
import contextlib
import gc
import time
import weakref

import numpy as np
import pytest
import zmq

from broker.base.errors import ConfigError, LocalProtocolError
from broker.chunks import chunk_heads, sending
from broker.chunks.chunk_heads import Credit, packed
from broker.chunks.sending import MOST_CHUNK_BYTES, Outflow
from broker.transport.endpoint import AT_A_TIME, Endpoint
from broker.transport.line import Line
from broker.transport.sockets import IN_A_ROW, failure_of
from broker.wire.addresses import channel_address, check_address
from broker.wire.frames import decode, encode, verify
from broker.wire.headers import Limits
from broker.wire.messages import Attached, Channel, Want
from ops.processes.cluster import free_ports
from tests.bare_router import (
    LEAVE,
    PATIENCE_S,
    bound,
    context,
    contribution,
    envelope,
    linked,
    received,
)
from tests.bulk_receiver import BulkReceiver
from tests.coroutines import in_a_loop


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
@in_a_loop
async def test_a_message_goes_up_and_its_answer_comes_down(transport, tmp_path):
    address = "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{tmp_path}/broker"
    async with linked(Channel.CONTROL, address=address) as (router, endpoint):
        sent = envelope(LEAVE, sequence=7)
        assert await endpoint.send(sent)
        routing_id, header = await received(router)
        assert decode([header]) == sent
        answer = envelope(Attached(versions=(1, -1)), sender="broker", to="island-0")
        await router.send_multipart([routing_id, *encode(answer)])
        assert await endpoint.recv(PATIENCE_S) == answer
        traffic = endpoint.traffic
        assert (traffic.bytes_up, traffic.bytes_down) == (len(header), len(encode(answer)[0]))


@in_a_loop
async def test_a_steady_stream_does_not_starve_other_tasks():
    async with linked(Channel.CONTROL) as (router, endpoint):
        assert await endpoint.send(envelope(LEAVE))
        routing_id, _ = await received(router)
        answer = encode(envelope(Attached(versions=()), sender="broker", to="island-0"))
        for _ in range(200):
            await router.send_multipart([routing_id, *answer])
        turns = 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(200):
            assert await endpoint.recv(PATIENCE_S) is not None
        task.cancel()
        assert turns >= 200 // IN_A_ROW[Channel.CONTROL]


# --- nobody there, and full queues --------------------------------------------------------------------------------


@in_a_loop
async def test_with_nobody_there_a_control_message_is_dropped_at_once():
    async with context() as ctx, Endpoint(ctx, f"tcp://127.0.0.1:{free_ports(2)}", Channel.CONTROL) as endpoint:
        assert not await endpoint.ready(0.01)
        assert not await endpoint.send(envelope(LEAVE))
        assert endpoint.traffic.bytes_up == 0


LARGE = np.arange(2 << 20, dtype=np.float32)  # 8 MB


@in_a_loop
async def test_large_messages_go_in_chunks_one_after_the_other_and_arrive_whole():
    async with linked(Channel.BULK) as (router, endpoint):
        receiver = BulkReceiver(router)
        sent = [asyncio.create_task(endpoint.send(envelope(contribution(LARGE), sequence=i))) for i in range(3)]
        for sequence in range(3):
            arrived = await receiver.message()
            verify(arrived)
            assert arrived.sequence == sequence
        assert await asyncio.gather(*sent) == [True] * 3
        assert endpoint.traffic.bytes_up > 3 * LARGE.nbytes
        assert 0 < receiver.largest <= MOST_CHUNK_BYTES


@in_a_loop
async def test_a_try_that_failed_holds_nothing_of_who_tried():
    """Else a version that was sent stays until the collector of cycles comes, which in a daemon is hardly ever."""

    class Held:
        pass

    def tried(call):
        held = Held()
        assert isinstance(failure_of(call()), zmq.Again)
        return weakref.ref(held)

    gc.disable()
    try:
        async with context() as opened:
            with opened.socket(zmq.DEALER) as socket:  # connected to nobody
                receives = tried(lambda: socket.recv_multipart(zmq.NOBLOCK, copy=False))
                sends = tried(lambda: socket.send_multipart([b""], zmq.NOBLOCK, copy=False))
                assert (receives(), sends()) == (None, None)
    finally:
        gc.enable()


@in_a_loop
async def test_what_nobody_notes_holds_up_what_is_behind_it_but_nothing_urgent():
    async with linked(Channel.BULK, bulk_wait_s=0.2) as (router, endpoint):
        under_way = asyncio.create_task(endpoint.send(envelope(contribution(LARGE), sequence=1)))
        await received(router)  # its first chunk
        assert not await endpoint.send(envelope(contribution(np.ones(3, np.float32)), sequence=2))
        assert await endpoint.send(envelope(Want(versions=(1,)), sequence=3))
        while chunk_heads.read(first := (await received(router))[1]) is not None:
            pass
        assert decode([first]).sequence == 3
        assert not under_way.done()
        under_way.cancel()


@in_a_loop
async def test_a_connection_that_notes_nothing_any_more_is_made_anew(monkeypatch):
    monkeypatch.setattr(sending, "STALLED_S", 0.2)
    async with linked(Channel.BULK, bulk_wait_s=0.2) as (router, endpoint):
        assert not await endpoint.send(envelope(contribution(LARGE), sequence=1))
        assert endpoint.traffic.renewals == 1
        receiver = BulkReceiver(router)
        with contextlib.suppress(TimeoutError):
            while True:
                await asyncio.wait_for(router.recv_multipart(), 0.5)  # of the old connection
        again = asyncio.create_task(endpoint.send(envelope(contribution(LARGE), sequence=2)))
        assert (await receiver.message()).sequence == 2
        assert await again


@in_a_loop
async def test_a_message_that_a_connection_cut_off_goes_on_where_it_was_under_another_number():
    async with linked(Channel.BULK) as (router, endpoint):
        receiver = BulkReceiver(router)
        first = asyncio.create_task(endpoint.send(envelope(contribution(LARGE), sequence=1)))
        while receiver.nbytes < LARGE.nbytes / 4:
            await receiver.step()
        had = receiver.nbytes
        endpoint.renew()
        receiver.broken()
        assert not await first
        again = asyncio.create_task(endpoint.send(envelope(contribution(LARGE), sequence=2)))
        arrived = await receiver.message()
        assert await again
        verify(arrived)
        assert arrived.sequence == 2
        assert receiver.resumed == [had]


@in_a_loop
async def test_what_one_task_leaves_on_a_socket_wakes_another():
    """A sender takes in what comes as well, a few at a time. What it leaves there ZeroMQ does not announce again."""
    async with linked(Channel.BULK) as (router, endpoint):
        assert await endpoint.send(envelope(Want(versions=(1,))))
        peer, *_ = await received(router)
        receiving = asyncio.create_task(endpoint.recv(PATIENCE_S))
        await asyncio.sleep(0.1)
        small = encode(envelope(Want(versions=(1,)), sender="broker", to="island-0"))
        credit = packed(Credit(received=0, limit=0))
        for frames in [[credit]] * AT_A_TIME + [small]:
            await router.send_multipart([peer, *frames])
        time.sleep(0.2)  # all of it comes, and the receiver has no turn
        endpoint._take_in(endpoint._chunked)
        began_s = time.monotonic()
        assert (await receiving).message == Want(versions=(1,))
        assert time.monotonic() - began_s < PATIENCE_S / 2


@pytest.mark.parametrize("takes_all", [True, False])
@in_a_loop
async def test_a_large_message_comes_down_in_chunks_and_is_noted(takes_all, monkeypatch):
    """Also where a connection at first takes none of the notes: its sender waits for them, and nothing else comes."""
    refused, put = [], Line.put

    def puts(line, frames):
        if takes_all or chunk_heads.read(memoryview(frames[0])) is None or len(refused) == 10:
            return put(line, frames)
        refused.append(frames)
        return False

    monkeypatch.setattr(Line, "put", puts)
    async with linked(Channel.BULK) as (router, endpoint):
        assert await endpoint.send(envelope(Want(versions=(1,))))
        peer, *_ = await received(router)
        out = Outflow()
        out.put(encode(envelope(contribution(LARGE), sender="broker", to="island-0")))

        async def serve():
            while len(out):
                while (step := out.next()) is not None:
                    await router.send_multipart([peer, *step.frames])
                    out.sent(step, 0.0)
                _, frame = await received(router)
                out.credited(chunk_heads.read(frame), 0.0)

        serving = asyncio.create_task(serve())
        arrived = None
        while arrived is None:
            arrived = await endpoint.recv(PATIENCE_S)
        verify(arrived)
        await serving
        assert takes_all or len(refused) == 10


@in_a_loop
async def test_after_a_broker_was_away_messages_go_to_the_new_one_and_no_stale_ones():
    async with (
        context() as ctx,
        bound(ctx, Channel.CONTROL) as (first, address),
        Endpoint(ctx, address, Channel.CONTROL) as endpoint,
    ):
        assert await endpoint.ready(PATIENCE_S)
        first.close()
        while await endpoint.send(envelope(LEAVE, sequence=0)):
            await endpoint.recv(0.01)  # gives the loss time to be noticed
        async with bound(ctx, Channel.CONTROL, address) as (second, _):
            assert await endpoint.ready(PATIENCE_S)
            assert await endpoint.send(envelope(LEAVE, sequence=1))
            _, frame = await received(second)
            assert decode([frame]).sequence == 1
            assert endpoint.traffic.renewals == 0


@in_a_loop
async def test_a_message_that_peers_would_refuse_for_its_size_is_our_own_error():
    limits = Limits(max_header_bytes=1000, max_message_bytes=1000)
    async with linked(Channel.BULK, limits=limits) as (_, endpoint):
        with pytest.raises(LocalProtocolError, match="max_message_bytes"):
            await endpoint.send(envelope(contribution(np.zeros(1000, np.float32))))


# --- addresses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("control", "bulk"),
    [
        ("tcp://hub:7001", "tcp://hub:7002"),
        ("tcp://hub.example.org:7001", "tcp://hub.example.org:7002"),
        ("tcp://[::1]:7001", "tcp://[::1]:7002"),
        ("tcp://[fe80::1%eth0]:1", "tcp://[fe80::1%eth0]:2"),
        ("tcp://*:65534", "tcp://*:65535"),
        ("ipc:///run/atoll/broker", "ipc:///run/atoll/broker.bulk"),
    ],
)
def test_the_bulk_port_is_the_next_one(control, bulk):
    assert channel_address(control, Channel.BULK) == bulk
    assert channel_address(control, Channel.CONTROL) == check_address(control) == control


@pytest.mark.parametrize(
    "address",
    [
        "",
        "hub",
        "hub:7001",
        "tcp://hub",
        "tcp://:7001",
        "tcp://hub:",
        "tcp://hub:0",
        "tcp://hub:65535",
        "tcp://hub:99999",
        "tcp://hub:70a1",
        "tcp://hub:7001/x",
        "tcp://a;b:7001",
        "tcp://::1:7001",
        "tcp://hub :7001",
        "tcp://hub:7001\n",
        "udp://hub:7001",
        "inproc://hub",
        "ipc://",
        "ipc://" + "x" * 103,
    ],
)
def test_a_malformed_address_names_its_setting_and_says_what_would_be_right(address):
    with pytest.raises(ConfigError) as caught:
        check_address(address, field="bind")
    assert caught.value.field == "bind"
    assert caught.value.value == address
    assert "must" in caught.value.cure
