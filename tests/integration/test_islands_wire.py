"""What waits for an island's bulk connection: in which order it goes, and that a full connection loses nothing."""

from __future__ import annotations

import asyncio
import functools
from contextlib import suppress

import numpy as np
import pytest
import zmq

from broker.transport.endpoint import Endpoint
from broker.transport.sockets import Context
from broker.wire import messages as m
from broker.wire.ranges import StepRange
from broker.wire.tensors import encode_tensor
from islands.interface.config import IslandConfig
from islands.session import connections
from islands.session.connections import Connections, Posted
from ops.processes.cluster import free_ports
from tests.bulk_receiver import BulkReceiver
from tests.coroutines import in_a_loop

MEGABYTES = 8
MANY = 12


def contribution(number: int) -> m.Contribution:
    values = np.zeros(MEGABYTES * 250_000, np.float32)
    return m.Contribution(
        round_id=number,
        fragment_id=0,
        steps=StepRange(from_step=number, to_step=number + 1, from_tokens=number, to_tokens=number + 1),
        trained_on=(m.TrainedOn(fragment_version=0, steps=1),),
        payload=(encode_tensor(values, m.Codec.F32),),
    )


def posted(message: m.Message) -> Posted:
    return Posted(message, to="aggregator", sender="island-0", incarnation=1)


@pytest.mark.timeout(60)
@in_a_loop
async def test_behind_a_reader_that_is_slow_nothing_is_dropped_and_what_is_wanted_goes_first(monkeypatch):
    monkeypatch.setattr(connections, "Endpoint", functools.partial(Endpoint, bulk_wait_s=0.2))
    port = free_ports(2)
    came: list[m.Envelope] = []
    with (
        Context() as context,
        context.socket(zmq.ROUTER) as control,
        context.socket(zmq.ROUTER) as bulk,
    ):
        for socket, number in ((control, port), (bulk, port + 1)):
            socket.set_hwm(1)
            socket.bind(f"tcp://127.0.0.1:{number}")

        async def nothing(channel: m.Channel, envelope: m.Envelope) -> None:
            pass

        config = IslandConfig(broker=f"tcp://127.0.0.1:{port}")
        async with Connections(config, Context, nothing, lambda *_: None) as wire:
            carrying = asyncio.create_task(wire.run())
            await asyncio.sleep(1.0)
            for number in range(MANY):
                wire.post(posted(contribution(number)))
            wire.post(posted(m.Want(versions=(1,))))
            wire.post(posted(m.Want(versions=(2,))))
            await asyncio.sleep(0.6)  # longer than a send waits before it gives up
            receiver = BulkReceiver(bulk)
            while len(came) < MANY + 1:
                came.append(await receiver.message())
            carrying.cancel()
            with suppress(asyncio.CancelledError):
                await carrying

    first, *others = [each.message for each in came]
    assert first == m.Want(versions=(2,)), "the newest says it all, and passes between two chunks"
    assert [each.round_id for each in others] == list(range(MANY))
    assert sorted(each.sequence for each in came) == list(range(1, MANY + 2)), "each has its own"
