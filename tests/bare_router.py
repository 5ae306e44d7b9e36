"""An endpoint against a bare ROUTER that stands for the broker, on loopback."""

import asyncio
import contextlib
import dataclasses

import zmq

from broker.transport.endpoint import Endpoint
from broker.transport.sockets import Context, configure_socket
from broker.wire.headers import Limits
from broker.wire.messages import Channel, Codec, Envelope, Leave
from broker.wire.tensors import encode_tensor
from tests import relay_bench

PATIENCE_S = 30.0  # for what is bound to happen; never waited for in full unless the test fails
LEAVE = Leave(inner_step=3, tokens=12, reason="done")


def envelope(message, *, sequence=1, sender="island-0", to="broker"):
    return Envelope(run_id="demo", sender=sender, incarnation=1, sequence=sequence, to=to, message=message)


def contribution(array, codec=Codec.F32):
    return dataclasses.replace(relay_bench.contribution(), payload=(encode_tensor(array, codec),))


@contextlib.asynccontextmanager
async def context():
    """A context that must terminate: a socket left open hangs here, until the test's time limit."""
    opened = Context()
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
