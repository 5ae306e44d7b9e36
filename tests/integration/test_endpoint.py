"""The endpoint on real sockets, against a bare ROUTER that stands for the broker."""

import asyncio
import contextlib
import random
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from benchmarks import strangers
from broker.chunks import heads, subflow
from broker.chunks.receiving import Inflow
from broker.chunks.sending import Outflow
from broker.chunks.subflow import MOST_CHUNK_BYTES
from broker.transport.endpoint import Endpoint
from broker.transport.sockets import BULK_OPTIONS, configure_socket
from broker.wire.addresses import bulk_address, channel_address, check_address
from broker.wire.codec import decode, encode, verify
from broker.wire.errors import ConfigError, LocalProtocolError
from broker.wire.headers import Limits, seal
from broker.wire.messages import PROTOCOL_VERSION, Attached, Channel, Codec, Contribution, Envelope, Leave, Reason, Want
from broker.wire.ranges import StepRange
from broker.wire.tensors import encode_tensor
from ops.processes.cluster import free_ports
from tests.bulk_receiver import BulkReceiver

PATIENCE_S = 30.0  # for what is bound to happen; never waited for in full unless the test fails
LEAVE = Leave(inner_step=3, tokens=12, reason="done")


def envelope(message, *, sequence=1, sender="island-0", to="broker"):
    return Envelope(run_id="demo", sender=sender, incarnation=1, sequence=sequence, to=to, message=message)


def contribution(array, codec=Codec.F32):
    steps = StepRange(from_step=0, to_step=4, from_tokens=0, to_tokens=64)
    return Contribution(round_id=1, fragment_id=0, steps=steps, trained_on=(), payload=(encode_tensor(array, codec),))


@contextlib.asynccontextmanager
async def context():
    """A context that must terminate: a socket left open hangs here, until the test's time limit."""
    opened = zmq.asyncio.Context()
    try:
        yield opened
    finally:
        opened.term()


@contextlib.asynccontextmanager
async def bound(ctx, channel, address="tcp://127.0.0.1:0", limits=None):
    """A ROUTER bound on loopback, and the control address that leads a client to it."""
    router = ctx.socket(zmq.ROUTER)
    configure_socket(router, channel, limits or Limits())
    router.linger = 0
    router.bind(address)
    at = router.get(zmq.LAST_ENDPOINT).decode()
    if channel is Channel.BULK and at.startswith("tcp"):
        host, port = at.rsplit(":", 1)
        at = f"{host}:{int(port) - 1}"  # nothing listens there, and nothing of these tests asks
    try:
        yield router, at.removesuffix(".bulk")
    finally:
        router.close()


@contextlib.asynccontextmanager
async def linked(channel, *, address="tcp://127.0.0.1:0", limits=None, **arguments):
    async with (
        context() as ctx,
        bound(ctx, channel, address, limits) as (router, at),
        Endpoint(ctx, at, channel, limits=limits or Limits(), **arguments) as endpoint,
    ):
        assert await endpoint.ready(PATIENCE_S)
        yield router, endpoint


async def received(router):
    return await asyncio.wait_for(router.recv_multipart(), PATIENCE_S)


async def sent_until_received(endpoint, router, message):
    """Sends a message again and again, as islands do: the connection that took one may be on its way out."""
    for sequence in range(2, 2 + int(PATIENCE_S)):
        await endpoint.send(envelope(message, sequence=sequence))
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(router.recv_multipart(), 1.0)
    raise AssertionError(f"nothing came within {PATIENCE_S} s")


def run(main):
    asyncio.run(main)


# --- messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_message_goes_up_and_its_answer_comes_down(transport, tmp_path):
    async def main():
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
            assert (traffic.sent, traffic.received, traffic.bytes_up) == (1, 1, len(header))
            assert traffic.bytes_down == len(encode(answer)[0])

    run(main())


def test_a_steady_stream_does_not_starve_other_tasks():
    async def main():
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
            assert turns >= 200

    run(main())


# --- what cannot be read ----------------------------------------------------------------------------------------


def header(**changes):
    return seal(msgpack.packb(msgpack.unpackb(encode(envelope(LEAVE, sender="broker"))[0]) | changes))


UNREADABLE = {
    "garbage": ([seal(b"\xff\xfe" + bytes(8))], Reason.MALFORMED),
    "damaged": ([header()[:-1] + b"!"], Reason.CHECKSUM),
    "version": ([header(v=PROTOCOL_VERSION + 1)], Reason.PROTOCOL_VERSION),
    "kind": ([header(kind="update")], Reason.UNKNOWN_KIND),
    "field": ([header(body={"mood": "good"})], Reason.MALFORMED),
    "extra frame": ([header(), b"1234"], Reason.MALFORMED),
    "oversize": ([bytes(2000)], Reason.OVERSIZE),
    "empty": ([b""], Reason.CHECKSUM),
}


@pytest.mark.parametrize("frames", UNREADABLE)
def test_what_cannot_be_read_is_reported_and_the_line_lives_on(frames):
    frames, reason = UNREADABLE[frames]

    async def main():
        seen = []
        limits = Limits(max_header_bytes=1000)
        arguments = {"limits": limits, "on_unreadable": lambda error, origin: seen.append((error, origin))}
        async with linked(Channel.CONTROL, **arguments) as (router, endpoint):
            assert await endpoint.send(envelope(LEAVE))
            routing_id, _ = await received(router)
            good = envelope(Attached(versions=()), sender="broker", to="island-0")
            await router.send_multipart([routing_id, *frames])
            await router.send_multipart([routing_id, *encode(good)])
            assert await endpoint.recv(PATIENCE_S) is None
            assert await endpoint.recv(PATIENCE_S) == good
            ((error, origin),) = seen
            assert error.reason == reason
            assert origin.sender in ("", "broker")
            assert (endpoint.traffic.unreadable, endpoint.traffic.received) == (1, 1)

    run(main())


def test_an_address_where_nobody_answers_is_named_with_the_cure_and_not_each_time(caplog):
    address = f"tcp://127.0.0.1:{free_ports(1)}"

    async def main():
        async with context() as ctx, Endpoint(ctx, address, Channel.CONTROL, renew_after_s=0.05) as endpoint:
            while endpoint.traffic.renewals < 5:
                await endpoint.ready(0.1)

    with caplog.at_level("WARNING"):
        run(asyncio.wait_for(main(), PATIENCE_S))
    told = [each.getMessage() for each in caplog.records if "connection." in each.getMessage()]
    assert told == [
        f"connection.none address={address} "
        "cure='start the broker there, or check the address, and the keys on both sides' times=1"
    ]


def test_a_connection_that_zeromq_has_given_up_is_made_anew():
    """A stranger with another security mechanism is answered by ZeroMQ with giving up for ever."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)

    async def main():
        met = asyncio.Event()

        async def stranger(reader, writer):
            writer.write(greeting)
            await reader.read()  # until the client hangs up
            writer.close()
            met.set()

        server = await asyncio.start_server(stranger, "127.0.0.1", 0)
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with context() as ctx, Endpoint(ctx, address, Channel.CONTROL, renew_after_s=0.05) as endpoint:
            async with server:
                await asyncio.wait_for(met.wait(), PATIENCE_S)
            async with bound(ctx, Channel.CONTROL, address) as (router, _):
                assert await endpoint.ready(PATIENCE_S)
                assert len(await sent_until_received(endpoint, router, LEAVE)) == 2
                assert endpoint.traffic.renewals >= 1

    run(main())


@pytest.mark.parametrize("channel", list(Channel))
def test_whatever_strangers_at_the_broker_s_port_say_the_broker_is_reached_in_the_end(channel):
    async def main():
        rng = random.Random(5)
        saying = [strangers.KINDS[name](rng) for name in sorted(strangers.KINDS)]

        async def stranger(reader, writer):
            with contextlib.suppress(OSError):
                for words in saying.pop() if saying else ():
                    writer.write(words)
                    await asyncio.wait_for(reader.read(1 << 16), PATIENCE_S)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

        port = free_ports(2)
        listens_at = port + (channel is Channel.BULK)
        server = await asyncio.start_server(stranger, "127.0.0.1", listens_at)
        heard = []
        async with (
            context() as ctx,
            Endpoint(
                ctx,
                f"tcp://127.0.0.1:{port}",
                channel,
                renew_after_s=0.05,
                on_unreadable=lambda error, origin: heard.append(error.reason),
            ) as endpoint,
        ):
            async with server, asyncio.timeout(PATIENCE_S):
                while saying:
                    await endpoint.recv(0.01)
                    await endpoint.send(envelope(LEAVE if channel is Channel.CONTROL else Want(versions=())))
            async with bound(ctx, channel, f"tcp://127.0.0.1:{listens_at}"):
                assert await endpoint.ready(PATIENCE_S)
        assert heard, "some speak ZeroMQ well enough to be heard"

    run(main())


@contextlib.asynccontextmanager
async def relayed(address):
    """An address whose connections lead to another one, and what can be written to their clients besides."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    clients, proxies = [], []

    async def carry(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def proxy(reader, writer):
        clients.append(writer)
        proxies.append(asyncio.current_task())
        inner, outer = await asyncio.open_connection(host.strip("[]"), int(port))
        await asyncio.gather(carry(reader, outer), carry(inner, writer))

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    async with server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", clients
        await asyncio.wait_for(asyncio.gather(*proxies), PATIENCE_S)


def test_a_connection_that_damaged_bytes_have_ended_is_made_anew_soon():
    """Found by chaos: ZeroMQ does not reconnect after a frame that cannot be, and islands waited half a minute."""

    async def main():
        async with (
            context() as ctx,
            bound(ctx, Channel.CONTROL) as (router, address),
            relayed(address) as (through, clients),
            Endpoint(ctx, through, Channel.CONTROL) as endpoint,
        ):
            assert await endpoint.ready(PATIENCE_S)
            assert await endpoint.send(envelope(LEAVE))
            await received(router)
            clients[0].write(b"\xff" * 64)  # a frame longer than there is memory
            began_s = asyncio.get_running_loop().time()
            while len(clients) < 2:
                await endpoint.recv(0.05)
                assert asyncio.get_running_loop().time() - began_s < PATIENCE_S, "no connection was made anew"
            assert await endpoint.ready(PATIENCE_S)
            assert decode((await sent_until_received(endpoint, router, LEAVE))[1:]).sequence >= 2

    run(main())


def test_a_connection_that_delivers_nothing_any_more_is_mended_by_making_it_anew():
    """What comes is swallowed as part of a frame that never ends; ZeroMQ finds out after minutes."""

    async def main():
        async with (
            context() as ctx,
            bound(ctx, Channel.BULK) as (router, address),
            relayed(bulk_address(address)) as (through, clients),
        ):
            host, port = through.rsplit(":", 1)
            async with Endpoint(ctx, f"{host}:{int(port) - 1}", Channel.BULK) as endpoint:
                assert await endpoint.ready(PATIENCE_S)
                assert await endpoint.send(envelope(Want(versions=())))
                peer, _ = await received(router)
                clients[0].write(b"\x02" + (1 << 30).to_bytes(8, "big"))  # a frame of 1 GiB begins
                answer = envelope(contribution(np.ones(4, np.float32), Codec.F32), to="island-0")
                await router.send_multipart([peer, *encode(answer)])
                assert await endpoint.recv(0.3) is None
                endpoint.renew()
                again, header = await sent_until_received(endpoint, router, Want(versions=()))
                assert again != peer
                assert decode([header]).sequence >= 2
                await router.send_multipart([again, *encode(answer)])
                assert await endpoint.recv(PATIENCE_S) == answer
                assert await endpoint.recv(1.2) is None  # by then a connection that was forgotten would be made anew
                assert (endpoint.traffic.renewals, len(clients)) == (1, 2)

    run(main())


@pytest.mark.parametrize("timeout_s", [6.0, 65.6, 600.0])
def test_a_connection_that_is_idle_for_longer_than_pings_are_apart_stays(timeout_s):
    """libzmq reads what a ping says of patience into 16 bits of milliseconds: 65.6 s were 64 ms, and 600 s were ten."""
    options = replace(BULK_OPTIONS, ping_every_s=0.3, ping_timeout_s=timeout_s)

    async def main():
        async with context() as ctx:
            router, dealer = ctx.socket(zmq.ROUTER), ctx.socket(zmq.DEALER)
            for socket in (router, dealer):
                options.apply(socket, 1 << 20)
            router.set(zmq.HEARTBEAT_IVL, 0)  # as brokers do
            seen = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
            assert (await recv_monitor_message(seen))["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            assert not await seen.poll(1000)
            dealer.disable_monitor()
            for socket in (seen, router, dealer):
                socket.close(linger=0)

    run(main())


# --- nobody there, and full queues --------------------------------------------------------------------------------


def test_with_nobody_there_a_control_message_is_dropped_at_once_and_counted():
    async def main():
        async with context() as ctx, Endpoint(ctx, unused_address(), Channel.CONTROL) as endpoint:
            assert not await endpoint.ready(0.01)
            for _ in range(3):
                assert not await endpoint.send(envelope(LEAVE))
            assert (endpoint.traffic.unsent, endpoint.traffic.sent, endpoint.traffic.bytes_up) == (3, 0, 0)

    run(main())


LARGE = np.arange(2 << 20, dtype=np.float32)  # 8 MB


def test_large_messages_go_in_chunks_one_after_the_other_and_arrive_whole():
    async def main():
        async with linked(Channel.BULK) as (router, endpoint):
            receiver = BulkReceiver(router)
            sent = [asyncio.create_task(endpoint.send(envelope(contribution(LARGE), sequence=i))) for i in range(3)]
            for sequence in range(3):
                arrived = await receiver.message()
                verify(arrived)
                assert arrived.sequence == sequence
            assert await asyncio.gather(*sent) == [True] * 3
            assert endpoint.traffic.bytes_up > 3 * LARGE.nbytes

    run(main())


def test_no_frame_on_the_wire_is_larger_than_a_chunk():
    async def main():
        async with linked(Channel.BULK) as (router, endpoint):
            under_way = asyncio.create_task(endpoint.send(envelope(contribution(LARGE))))
            into, sizes, whole = Inflow(Limits()), [], None
            while whole is None:
                peer, first, *frames = await received(router)
                sizes += map(len, frames)
                (whole,) = [into.take(*each) for each in into.in_order(heads.read(first), frames)]
                await router.send_multipart([peer, into.credit().packed()])
            assert await under_way
            assert max(sizes) <= MOST_CHUNK_BYTES
            assert sum(sizes) > LARGE.nbytes

    run(main())


def test_what_nobody_notes_holds_up_what_is_behind_it_but_nothing_urgent():
    async def main():
        async with linked(Channel.BULK, bulk_wait_s=0.2) as (router, endpoint):
            under_way = asyncio.create_task(endpoint.send(envelope(contribution(LARGE), sequence=1)))
            await received(router)  # its first chunk
            assert not await endpoint.send(envelope(contribution(np.ones(3, np.float32)), sequence=2))
            assert endpoint.traffic.unsent == 1
            assert await endpoint.send(envelope(Want(versions=(1,)), sequence=3))
            first = b"\xc1"
            while heads.is_head(first):
                _, first, *_ = await received(router)
            assert decode([first]).sequence == 3
            assert not under_way.done()
            under_way.cancel()

    run(main())


def test_a_connection_that_notes_nothing_any_more_is_made_anew(monkeypatch):
    monkeypatch.setattr(subflow, "STALLED_S", 0.2)

    async def main():
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

    run(main())


def test_a_message_that_a_connection_cut_off_goes_on_where_it_was_under_another_number():
    async def main():
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

    run(main())


def test_a_large_message_comes_down_in_chunks_and_is_noted():
    async def main():
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
                    out.credited(heads.read(frame), 0.0)

            serving = asyncio.create_task(serve())
            arrived = None
            while arrived is None:
                arrived = await endpoint.recv(PATIENCE_S)
            verify(arrived)
            await serving

    run(main())


def test_after_a_broker_was_away_messages_go_to_the_new_one_and_no_stale_ones():
    async def main():
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

    run(main())


# --- our own mistakes -------------------------------------------------------------------------------------------


def test_a_message_that_peers_would_refuse_for_its_size_is_our_own_error():
    async def main():
        limits = Limits(max_header_bytes=1000, max_message_bytes=1000)
        async with linked(Channel.BULK, limits=limits) as (_, endpoint):
            with pytest.raises(LocalProtocolError, match="max_message_bytes"):
                await endpoint.send(envelope(contribution(np.zeros(1000, np.float32))))

    run(main())


# --- addresses --------------------------------------------------------------------------------------------------


def unused_address():
    """A control address on loopback where nothing listens, with the next port free too, a moment ago."""
    return f"tcp://127.0.0.1:{free_ports(2)}"


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
    assert bulk_address(control) == bulk
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
        bulk_address(address, field="bind")
    assert caught.value.field == "bind"
    assert caught.value.value == address
    assert "must" in caught.value.cure
