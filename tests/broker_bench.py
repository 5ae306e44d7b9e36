"""A real broker in the test's own process, and clients that say to it what a test wants."""

import asyncio
import contextlib
from dataclasses import replace

import zmq

from broker.base.errors import Unavailable
from broker.gateway.config import BrokerConfig
from broker.process import clocks
from broker.registry.registry import Registry
from broker.server import serve
from broker.transport.endpoint import Endpoint
from broker.transport.sockets import Context
from broker.wire import messages as m
from broker.wire.messages import AGGREGATOR, BROKER, Channel, Envelope
from broker.wire.tensors import encode_tensor
from ops.processes.cluster import free_ports
from tests import relay_bench

RUN = "demo"
WAIT_S = 40.0  # for anything that must happen; nothing here depends on how long it takes


def config(**changes):
    nowhere = f"redis://127.0.0.1:{free_ports(1)}"
    return BrokerConfig(
        **({"run_id": RUN, "port": 0, "name": "hub", "redis_url": nowhere, "report_interval_s": 0.05} | changes)
    )


# --- messages -------------------------------------------------------------------------------------------------------


def contribution(array, from_step=0, fragment_id=0):
    made = relay_bench.contribution(fragment_id, from_step, from_step + 1)
    return replace(made, payload=(encode_tensor(array, m.Codec.F32),))


def version(array, fragment_version=1, epoch=1):
    made = relay_bench.version(0, fragment_version, epoch)
    return replace(made, payload=(encode_tensor(array, m.Codec.F32),))


# --- clients --------------------------------------------------------------------------------------------------------


class Client:
    """Both endpoints of one sender."""

    def __init__(self, stack, context, address, name, incarnation):
        self.name, self.incarnation = name, incarnation
        self.endpoints = {channel: Endpoint(context, address, channel) for channel in Channel}
        self.sequence = 0
        self._stack = stack

    async def open(self):
        for endpoint in self.endpoints.values():
            await self._stack.enter_async_context(endpoint)
            assert await endpoint.ready(WAIT_S)
        return self

    async def send(self, message, run=RUN):
        self.sequence += 1
        envelope = Envelope(
            run_id=run,
            sender=self.name,
            incarnation=self.incarnation,
            sequence=self.sequence,
            to=BROKER if isinstance(message, m.Want | m.Version | m.Attach | m.AttachBulk) else AGGREGATOR,
            message=message,
        )
        assert await self.endpoints[message.channel].send(envelope)

    async def receive(self, kind, channel=None):
        """The next message of a kind; others are passed over."""
        ends_s = clocks.monotonic() + WAIT_S
        while True:
            envelope = await self.endpoints[channel or kind.channel].recv(0.5)
            if envelope is not None and isinstance(envelope.message, kind):
                return envelope
            assert clocks.monotonic() < ends_s, f"{self.name} received no {kind.__name__}"

    async def attach(self, versions=(-1,), epoch=1):
        await self.send(m.AttachBulk(shard=0, epoch=epoch, shards=1))
        await self.send(m.Attach(shard=0, epoch=epoch, versions=versions))
        return (await self.receive(m.Attached)).message


class Bench:
    """A broker that runs in this process, and its clients."""

    def __init__(self, stack, context, listening):
        self._stack, self.context = stack, context
        self.listening = listening

    async def client(self, name, incarnation=1):
        client = Client(self._stack, self.context, self.listening.address, name, incarnation)
        return await client.open()

    async def aggregator(self, **changes):
        aggregator = await self.client(AGGREGATOR, incarnation=0)
        await aggregator.attach(**changes)
        # The bulk port is another socket: a version that is kept shows that it has been heard there too.
        return aggregator

    def raw(self, channel):
        return bare_socket(self._stack, self.context, self.listening, channel)


def bare_socket(stack, context, listening, channel):
    """Returns a bare DEALER that is connected to a broker, for what no endpoint would send."""
    port = listening.bulk_port if channel is Channel.BULK else listening.bulk_port - 1
    sock = context.socket(zmq.DEALER)
    sock.linger = 0
    stack.callback(sock.close)
    sock.connect(f"tcp://127.0.0.1:{port}")
    return sock


def on_a_broker(settings, use):
    """Runs ``use(bench)`` beside a broker with ``settings``, then ends the broker."""

    async def main():
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        broker = asyncio.create_task(serve(settings, stop=stop, ready=ready.set_result))
        context = Context()
        try:
            async with contextlib.AsyncExitStack() as stack:
                await asyncio.wait([broker, ready], return_when=asyncio.FIRST_COMPLETED)
                if broker.done():
                    return await broker
                return await use(Bench(stack, context, ready.result()))
        finally:
            stop.set()
            await asyncio.wait([broker])
            context.term()
            broker.result()

    return asyncio.run(main())


async def until(condition, what):
    """Waits until the coroutine function ``condition`` returns something true, and returns it."""
    ends_s = clocks.monotonic() + WAIT_S
    while not (found := await condition()):
        assert clocks.monotonic() < ends_s, f"never came: {what}"
        await asyncio.sleep(0.01)
    return found


async def in_redis(url, condition, what, *, events=frozenset()):
    """Waits until what stands in Redis meets a condition, and has such events; returns it, and all events."""

    async def look():
        with contextlib.suppress(Unavailable, KeyError):
            found = await registry.read()
            told = [event for _, event in await registry.read_events_after((0, 0), 10_000)]
            if condition(found) and events <= {each["event"] for each in told}:
                return found, told

    async with contextlib.aclosing(Registry(url, RUN)) as registry:
        return await until(look, what)
