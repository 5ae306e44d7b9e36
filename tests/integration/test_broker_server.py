"""The broker over real sockets: what passes through it unchanged, and bad input, which is refused."""

import asyncio
import os
import socket
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import zmq

from broker.gateway.turns import VERIFY_HERE_BYTES
from broker.wire import messages as m
from broker.wire.frames import encode
from broker.wire.headers import seal
from broker.wire.messages import AGGREGATOR, BROKER, PROTOCOL_VERSION, Channel, Envelope, Reason
from tests.aggregator_hand import beat
from tests.broker_bench import RUN, WAIT_S, config, contribution, on_a_broker, until, version
from tests.coroutines import given_by

SMALL = {"max_header_bytes": 1 << 16, "max_message_bytes": 300_000, "peer_queue_bytes": 300_000}
beside_a_broker = given_by(lambda use: on_a_broker(config(), use))
beside_a_small_one = given_by(lambda use: on_a_broker(config(**SMALL), use))


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
@beside_a_broker
async def test_a_damaged_version_is_not_kept_but_refused_so_that_it_is_published_again(bench, elements):
    island, aggregator = await bench.client("a"), await bench.aggregator()
    good = version(np.ones(elements, np.float32))
    (buffer,) = good.payload
    changed = bytearray(buffer.data)
    changed[5] ^= 1
    await island.send(m.Want(versions=(-1,)))
    await aggregator.send(replace(good, payload=(replace(buffer, data=changed),)))
    answer = (await aggregator.receive(m.Refused)).message
    assert (answer.kind, answer.sequence, answer.reason) == ("version", aggregator.sequence, Reason.CHECKSUM)
    assert (await aggregator.attach()).versions == (-1,)
    await aggregator.send(good)
    received = (await island.receive(m.Version)).message  # the first that comes, and none before it
    assert bytes(received.payload[0].data) == bytes(buffer.data)
    assert (await aggregator.attach()).versions == (1,)


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


@beside_a_broker
async def test_an_aggregator_that_reconnects_gets_what_is_sent_to_it(bench):
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


# --- bad input ------------------------------------------------------------------------------------------------------


def frames_of(message, *, name="a", run=RUN):
    envelope = Envelope(run_id=run, sender=name, incarnation=1, sequence=5, to=AGGREGATOR, message=message)
    return encode(envelope)


def with_header(frames, **changes):
    """The frames with other values in the header, whose checksum is right."""
    header = msgpack.unpackb(frames[0])
    checksum = header.pop("checksum")  # stays the last
    return [seal(msgpack.packb(header | changes | {"checksum": checksum})), *frames[1:]]


def damaged(frames, at):
    header = bytearray(frames[0])
    header[at] ^= 0x10
    return [bytes(header), *frames[1:]]


BEAT, CONTRIBUTION = frames_of(beat(1)), frames_of(contribution(np.ones(4, np.float32)))
POSING = frames_of(m.Attached(versions=()), name=BROKER)

NOISE = [seal(b"\xc1 this is no msgpack" + bytes(8))]

BAD = {
    "noise": (Channel.CONTROL, NOISE, Reason.MALFORMED),
    "noise on the bulk port": (Channel.BULK, NOISE, Reason.MALFORMED),
    "a damaged header": (Channel.CONTROL, damaged(BEAT, 100), Reason.CHECKSUM),
    "another protocol version": (Channel.CONTROL, with_header(BEAT, v=PROTOCOL_VERSION + 1), Reason.PROTOCOL_VERSION),
    "another run": (Channel.CONTROL, frames_of(beat(1), run="other"), Reason.WRONG_RUN),
    "a header that is too large": (Channel.CONTROL, [b"x" * 100_000], Reason.OVERSIZE),
    "too much in all": (Channel.BULK, BEAT + [b"x" * 200_000] * 2, Reason.OVERSIZE),
    "a short buffer": (Channel.BULK, [CONTRIBUTION[0], b"short"], Reason.MALFORMED),
    "tensors on the control port": (Channel.CONTROL, CONTRIBUTION, Reason.WRONG_ROLE),
    "an island that poses as the broker": (Channel.CONTROL, POSING, Reason.WRONG_ROLE),
}


@pytest.mark.parametrize("what", BAD)
@beside_a_small_one
async def test_bad_input_is_refused_with_its_reason_and_the_run_goes_on(bench, what):
    channel, frames, reason = BAD[what]
    aggregator, island = await bench.aggregator(), await bench.client("b")
    garbage = bench.raw(channel)
    await garbage.send_multipart(frames)
    assert await garbage.poll(1000 * WAIT_S), "no refusal came"
    header = msgpack.unpackb((await garbage.recv_multipart())[0])
    assert header["kind"] == "refused"
    body = header["body"]
    assert body["reason"] == reason
    assert body["detail"]
    await island.send(beat(1))
    assert (await aggregator.receive(m.Heartbeat)).sender == "b"


@beside_a_small_one
async def test_a_frame_beyond_all_limits_costs_its_connection_only(bench):
    aggregator, island = await bench.aggregator(), await bench.client("b")
    garbage = bench.raw(Channel.CONTROL)
    events = garbage.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    await garbage.send(b"x" * (8 << 20))
    assert await events.poll(1000 * WAIT_S), "the connection still stands"
    garbage.disable_monitor()
    events.close(linger=0)
    await island.send(beat(1))
    assert (await aggregator.receive(m.Heartbeat)).sender == "b"
