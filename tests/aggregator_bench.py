"""A real broker and a real aggregator on loopback, and islands that follow a script in place of training.

A scripted island runs steps by the clock, answers rounds with whatever its ``delta`` makes, and remembers what it was
told. Tests say what happens and wait for its consequences; nothing depends on how long they take.
"""

import asyncio
import contextlib
import time

import numpy as np

from aggregator.interface.config import AggregatorConfig
from aggregator.process.service import serve
from broker.base.settings import to_table
from broker.gateway.config import BrokerConfig
from broker.server import serve as serve_broker
from broker.transport.endpoint import Endpoint
from broker.transport.sockets import Context
from broker.wire import messages as m
from broker.wire.fragments import FragmentManifest, Kind, TensorSpec
from broker.wire.messages import AGGREGATOR, BROKER, Channel, Codec, Envelope
from broker.wire.ranges import StepRange
from broker.wire.tensors import decode_tensor, encode_tensor
from ops.processes.cluster import free_ports
from tests.broker_bench import bare_socket
from tests.run_reading import Reading

RUN = "demo"
WAIT_S = 40.0  # for anything that must happen
STEP_S = 0.004
TOKENS_PER_STEP = 10

TENSORS = (
    TensorSpec(name="embed", shape=(60, 20), dtype="float32", kind=Kind.MEAN),
    TensorSpec(name="layers/weight", shape=(2, 30, 20), dtype="float32", kind=Kind.RDA, unit_axes=1),
    TensorSpec(name="layers/scale", shape=(2, 20), dtype="float32", kind=Kind.MEAN),
)


def aggregator_config(tmp_path, **changes):
    settings = {
        "run_id": RUN,
        "redis_url": f"redis://127.0.0.1:{free_ports(1)}",  # nobody listens there
        "store": tmp_path / "store",
        "islands": 1,
        "fragments": 2,
        "sync_interval": 4,
        "heartbeat_interval_s": 0.2,
        "codec": Codec.F32,
        "record_payloads": False,
    }
    return AggregatorConfig(**(settings | changes))


def given(settings):
    """Settings as a command line gives them: those that are not the default."""
    usual = to_table(AggregatorConfig())
    return {name: value for name, value in to_table(settings).items() if value != usual.get(name)}


async def until(condition, what):
    """Waits until ``condition()`` is true, and returns it."""
    ends_s = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < ends_s, f"never came: {what}"
        await asyncio.sleep(0.005)
    return found


def initial(spec):
    """Version 0 of a tensor."""
    rng = np.random.default_rng(len(spec.name))
    return rng.standard_normal(spec.shape, dtype=np.float32)


class ScriptedIsland:
    """An island that trains by the clock.

    ``delta(p)`` returns one float32 array per tensor of fragment p. ``answering`` switches answers to rounds on and
    off; ``next_step[p]`` is where the next hand-over of fragment p begins.
    """

    def __init__(self, bench, name, *, delta=None, codec=Codec.F32, tensors=TENSORS, step_s=STEP_S):
        self.bench, self.name, self.codec, self.tensors, self.step_s = bench, name, codec, tensors, step_s
        self.delta = delta or (lambda p: [np.full(t.shape, 0.01, np.float32) for t in self.manifest.fragments[p]])
        self.endpoints = {channel: Endpoint(bench.context, bench.address, channel) for channel in Channel}
        self.nonce = f"{name}-{time.monotonic_ns()}"
        self.incarnation = 0
        self.sequence = 0
        self.manifest = None
        self.welcome = None
        self.began_s = None  # when it had all of version 0
        self.ended_s = None
        self.state = None
        self.versions = {}  # fragment -> newest Version message
        self.history = []  # every Version message, as it came
        self.resolutions = {}  # (fragment, from, to) -> the last resolution
        self.fates = []  # every resolution, as it came
        self.refused = []
        self.next_step = {}
        self.sent = {}  # (fragment, from, to) -> Contribution
        self.answering = True
        self.seeding = True
        self.answered = set()
        self.loss = 2.0

    async def open(self, stack):
        for endpoint in self.endpoints.values():
            await stack.enter_async_context(endpoint)
            assert await endpoint.ready(WAIT_S)

    async def send(self, message, *, sender=None):
        self.sequence += 1
        envelope = Envelope(
            run_id=RUN,
            sender=sender or self.name,
            incarnation=0 if sender else self.incarnation,
            sequence=self.sequence,
            to=BROKER if isinstance(message, m.Want) else AGGREGATOR,
            message=message,
        )
        await self.endpoints[message.channel].send(envelope)
        return self.sequence

    @property
    def step(self):
        ends_s = time.monotonic() if self.ended_s is None else self.ended_s
        trained_s = 0.0 if self.began_s is None else ends_s - self.began_s
        return self.welcome.start_step + int(trained_s / self.step_s)

    def stop(self):
        """Ends training; answers go on."""
        self.ended_s = time.monotonic()

    def tokens(self, step):
        return self.welcome.start_tokens + (step - self.welcome.start_step) * TOKENS_PER_STEP

    async def live(self):
        """Joins, then trains until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(Channel.CONTROL))
            group.create_task(self._receive(Channel.BULK))
            while self.welcome is None:
                join = m.Join(
                    nonce=self.nonce,
                    island_id=self.name,
                    hint="",
                    tensors=self.tensors,
                    tokens_per_step=TOKENS_PER_STEP,
                )
                await self.send(join, sender=m.joining(self.nonce))
                await asyncio.sleep(0.05)
            while True:
                await self.beat()
                await self.send(m.Want(versions=self._held()))
                await asyncio.sleep(0.02)

    def _held(self):
        return tuple(self.versions[p].fragment_version if p in self.versions else -1 for p in range(len(self.manifest)))

    async def beat(self):
        step = self.step
        await self.send(
            m.Heartbeat(
                inner_step=step,
                tokens=self.tokens(step),
                loss=self.loss,
                step_time_s=self.step_s,
                sync_share=0.001,
                bytes_up=self.endpoints[Channel.BULK].traffic.bytes_up,
                bytes_down=self.endpoints[Channel.BULK].traffic.bytes_down,
                versions=self._held(),
                overwritten_tokens=(0,) * len(self.manifest),
                outstanding=tuple(
                    m.Outstanding(fragment_id=p, from_step=a, to_step=b)
                    for p, a, b in self.sent
                    if self.fate(p, a, b) not in (m.Fate.MERGED, m.Fate.REFUSED)
                ),
                stopped=self.ended_s is not None,
            )
        )

    def fate(self, p, from_step, to_step):
        resolution = self.resolutions.get((p, from_step, to_step))
        return resolution.fate if resolution else None

    async def _receive(self, channel):
        while True:
            envelope = await self.endpoints[channel].recv(0.5)
            if envelope is not None:
                await self._take(envelope.message)

    async def _take(self, message):
        match message:
            case m.Welcome() if self.welcome is None:
                self.incarnation = message.incarnation
                self.manifest = FragmentManifest(message.fragments)
                self.next_step = dict.fromkeys(range(len(self.manifest)), message.start_step)
                self.welcome = message
            case m.FleetState():
                self.state = message
                for each in message.resolutions:
                    self.resolutions[each.fragment_id, each.from_step, each.to_step] = each
                    self.fates.append(each)
                for p in message.seed if self.seeding else ():
                    await self.seed(p)
                for each in message.rounds if self.answering else ():
                    await self.answer(each)
            case m.Version():
                self.versions[message.fragment_id] = message
                self.history.append(message)
                if self.began_s is None and len(self.versions) == len(self.manifest):
                    self.began_s = time.monotonic()
            case m.Refused():
                if (
                    message.reason is not m.Reason.NOT_LEADER or message.kind == "contribution"
                ):  # else: the broker lives
                    self.refused.append(message)
            case _:
                pass

    async def seed(self, p, codec=Codec.F32):
        payload = tuple(encode_tensor(initial(t), codec) for t in self.manifest.fragments[p])
        return await self.send(m.Seed(fragment_id=p, payload=payload))

    async def answer(self, opened):
        if opened.round_id in self.answered or opened.fragment_id not in self.versions:
            return
        p = opened.fragment_id
        if self.step <= self.next_step[p]:
            if self.ended_s is not None:
                await self.send(m.Nothing(round_id=opened.round_id, fragment_id=p))
            return  # asked again with the next state
        self.answered.add(opened.round_id)
        await self.send(self.contribution(p, self.step, round_id=opened.round_id))

    def contribution(self, p, to_step=None, *, round_id=1, arrays=None, version=None, codec=None):
        """The next hand-over of a fragment, up to ``to_step`` (one step, if not given)."""
        from_step = self.next_step[p]
        to_step = from_step + 1 if to_step is None else to_step
        self.next_step[p] = to_step
        version = self.versions[p].fragment_version if version is None else version
        contribution = m.Contribution(
            round_id=round_id,
            fragment_id=p,
            steps=StepRange(
                from_step=from_step,
                to_step=to_step,
                from_tokens=self.tokens(from_step),
                to_tokens=self.tokens(to_step),
            ),
            trained_on=(m.TrainedOn(fragment_version=version, steps=to_step - from_step),),
            payload=tuple(encode_tensor(a, codec or self.codec) for a in (self.delta(p) if arrays is None else arrays)),
        )
        self.sent[p, from_step, to_step] = contribution
        return contribution

    def arrays(self, message):
        return [decode_tensor(each) for each in message.payload]


class Bench(Reading):
    """Addresses and the core, for tests to look at."""

    def __init__(self, stack, context, listening, group):
        self.stack, self.context, self.listening, self.group = stack, context, listening, group
        self.address = listening.address
        self.core = None
        self._tasks = []
        self._ends = []

    async def island(self, name, *, live=True, **options):
        island = ScriptedIsland(self, name, **options)
        await island.open(self.stack)
        if live:
            self.background(island.live())
        return island

    def background(self, work):
        task = self.group.create_task(work)
        self._tasks.append(task)
        return task

    async def aggregator(self, settings):
        """Starts an aggregator in this process; returns what ends it: set, then await."""
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = self.group.create_task(serve(given(settings), stop=stop, ready=ready.set_result))
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        self.core = ready.result()

        async def end():
            stop.set()
            await task

        self._ends.append(end)
        return end

    async def serve(self, settings):
        """Runs an aggregator that is expected to end by itself, with an error."""
        async with asyncio.timeout(WAIT_S):
            await serve(given(settings), stop=asyncio.Event())

    def raw(self, channel):
        return bare_socket(self.stack, self.context, self.listening, channel)

    async def end(self):
        for end in self._ends:
            await end()
        for task in self._tasks:
            task.cancel()


def on_a_bench(use, *, broker=None):
    """Runs ``use(bench)`` beside a broker, then ends everything."""
    settings = BrokerConfig(
        **({"run_id": RUN, "port": 0, "redis_url": f"redis://127.0.0.1:{free_ports(1)}"} | (broker or {}))
    )

    async def main():
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve_broker(settings, stop=stop, ready=ready.set_result))
        context = Context()
        try:
            listening = await ready
            async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
                bench = Bench(stack, context, listening, group)
                try:
                    return await use(bench)
                finally:
                    await bench.end()
        finally:
            stop.set()
            await asyncio.wait([serving])
            context.term()
            serving.result()

    return asyncio.run(main())
