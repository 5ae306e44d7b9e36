"""What an endpoint makes of what it cannot read, against a bare ROUTER that stands for the broker."""

import asyncio
import contextlib
import json
import random
from dataclasses import replace
from urllib.parse import urlsplit

import msgpack
import numpy as np
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from benchmarks.hostile import strangers
from broker.process import logs
from broker.transport import line
from broker.transport.endpoint import Endpoint
from broker.transport.sockets import BULK_OPTIONS
from broker.wire.addresses import channel_address
from broker.wire.frames import decode, encode
from broker.wire.headers import Limits, seal
from broker.wire.messages import Attached, Channel, Codec, Reason, Want
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
    sent_until_received,
)
from tests.coroutines import in_a_loop
from tests.tcp_relay import Relay


def header(**changes):
    return seal(msgpack.packb(msgpack.unpackb(encode(envelope(LEAVE, sender="broker"))[0]) | changes))


UNREADABLE = {
    "garbage": ([seal(b"\xff\xfe" + bytes(8))], Reason.MALFORMED),
    "kind": ([header(kind="update")], Reason.UNKNOWN_KIND),
    "extra frame": ([header(), b"1234"], Reason.MALFORMED),
    "oversize": ([bytes(2000)], Reason.OVERSIZE),
}


@pytest.mark.parametrize("frames", UNREADABLE)
@in_a_loop
async def test_what_cannot_be_read_is_reported_and_the_line_lives_on(frames):
    frames, reason = UNREADABLE[frames]
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


@in_a_loop
async def test_an_address_where_nobody_answers_is_named_with_the_cure_and_not_each_time(caplog, monkeypatch):
    monkeypatch.setattr(line, "RENEW_AFTER_S", 0.05)
    address = f"tcp://127.0.0.1:{free_ports(1)}"
    with caplog.at_level("WARNING"):
        async with (
            asyncio.timeout(PATIENCE_S),
            context() as ctx,
            Endpoint(ctx, address, Channel.CONTROL) as endpoint,
        ):
            while endpoint.traffic.renewals < 5:
                await endpoint.ready(0.1)
    told = [each for each in caplog.records if "connection." in each.getMessage()]
    assert [each.getMessage() for each in told] == [
        f"connection.none address={address} "
        'cure="start the broker there, or check the address, and the keys on both sides" times=1'
    ]
    as_json = json.loads(logs.JsonFormatter("island-0").format(told[0]))
    assert (as_json["event"], as_json["address"], as_json["times"]) == ("connection.none", address, 1)


@in_a_loop
async def test_a_connection_that_zeromq_has_given_up_is_made_anew(monkeypatch):
    """A stranger with another security mechanism is answered by ZeroMQ with giving up for ever."""
    monkeypatch.setattr(line, "RENEW_AFTER_S", 0.05)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    met = asyncio.Event()

    async def stranger(reader, writer):
        writer.write(greeting)
        await reader.read()  # until the client hangs up
        writer.close()
        met.set()

    server = await asyncio.start_server(stranger, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with context() as ctx, Endpoint(ctx, address, Channel.CONTROL) as endpoint:
        async with server:
            await asyncio.wait_for(met.wait(), PATIENCE_S)
        async with bound(ctx, Channel.CONTROL, address) as (router, _):
            assert await endpoint.ready(PATIENCE_S)
            assert len(await sent_until_received(endpoint, router, LEAVE)) == 2
            assert endpoint.traffic.renewals >= 1


@in_a_loop
async def test_whatever_strangers_at_the_broker_s_port_say_the_broker_is_reached_in_the_end(monkeypatch):
    monkeypatch.setattr(line, "RENEW_AFTER_S", 0.05)
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

    port = free_ports(1)
    server = await asyncio.start_server(stranger, "127.0.0.1", port)
    heard = []
    async with (
        context() as ctx,
        Endpoint(
            ctx,
            f"tcp://127.0.0.1:{port}",
            Channel.CONTROL,
            on_unreadable=lambda error, origin: heard.append(error.reason),
        ) as endpoint,
    ):
        async with server, asyncio.timeout(PATIENCE_S):
            while saying:
                await endpoint.recv(0.01)
                await endpoint.send(envelope(LEAVE))
        async with bound(ctx, Channel.CONTROL, f"tcp://127.0.0.1:{port}"):
            assert await endpoint.ready(PATIENCE_S)
    assert heard, "some speak ZeroMQ well enough to be heard"


@in_a_loop
async def test_a_connection_that_damaged_bytes_have_ended_is_made_anew_soon():
    """Found by chaos: ZeroMQ does not reconnect after a frame that cannot be, and islands waited half a minute."""
    async with (
        context() as ctx,
        bound(ctx, Channel.CONTROL) as (router, address),
        (relay := Relay(urlsplit(address).port)).listening() as port,
        Endpoint(ctx, f"tcp://127.0.0.1:{port}", Channel.CONTROL) as endpoint,
    ):
        assert await endpoint.ready(PATIENCE_S)
        assert await endpoint.send(envelope(LEAVE))
        await received(router)
        relay.clients[0].write(b"\xff" * 64)  # a frame longer than there is memory
        began_s = asyncio.get_running_loop().time()
        while len(relay.clients) < 2:
            await endpoint.recv(0.05)
            assert asyncio.get_running_loop().time() - began_s < PATIENCE_S, "no connection was made anew"
        assert await endpoint.ready(PATIENCE_S)
        assert decode((await sent_until_received(endpoint, router, LEAVE))[1:]).sequence >= 2


@in_a_loop
async def test_a_connection_that_delivers_nothing_any_more_is_mended_by_making_it_anew():
    """What comes is swallowed as part of a frame that never ends; ZeroMQ finds out after minutes."""
    async with (
        context() as ctx,
        bound(ctx, Channel.BULK) as (router, address),
        (relay := Relay(urlsplit(channel_address(address, Channel.BULK)).port)).listening() as port,
        Endpoint(ctx, f"tcp://127.0.0.1:{port - 1}", Channel.BULK) as endpoint,
    ):
        assert await endpoint.ready(PATIENCE_S)
        assert await endpoint.send(envelope(Want(versions=())))
        peer, _ = await received(router)
        relay.clients[0].write(b"\x02" + (1 << 30).to_bytes(8, "big"))  # a frame of 1 GiB begins
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
        assert (endpoint.traffic.renewals, len(relay.clients)) == (1, 2)


@pytest.mark.parametrize("timeout_s", [65.6, 600.0])
@in_a_loop
async def test_a_connection_that_is_idle_for_longer_than_pings_are_apart_stays(timeout_s):
    """Libzmq reads what a ping says of patience into 16 bits of milliseconds: 65.6 s were 64 ms, and 600 s were ten."""
    options = replace(BULK_OPTIONS, ping_every_s=0.3, ping_timeout_s=timeout_s)
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
