"""Islands that do everything an island does on the wire, and train nothing.

They run in lock step, a closed loop: all of them report that an interval has passed, the aggregator opens the round
that has fallen due, each hands over the same bytes, and when every one of them has the new version the next interval
is over. So rounds never overlap, and a round takes as long as it takes, whatever its size.

Steps are a script: the aggregator paces rounds by reported inner steps, and a step time beyond all waiting keeps it
from counting on steps that were not reported. Or they train at a pace (:meth:`ScriptedFleet.train`), an open loop: a
step takes its time, heartbeats at their usual times tell of it, and rounds fall due as they do in a run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from benchmarks.fleet import RUN
from broker.base.errors import ConfigError, Unavailable
from broker.transport.endpoint import Endpoint
from broker.transport.sockets import Context
from broker.wire import messages as m
from broker.wire.fragments import FragmentManifest, Kind, TensorSpec, partition
from broker.wire.messages import AGGREGATOR, BROKER, Channel, Codec, Encoded, Envelope
from broker.wire.ranges import StepRange
from broker.wire.tensors import encode_tensor

#: Inner steps between two rounds of different fragments: round n falls due at step n times this. Islands stop a little
#: before, and then step a little beyond it together: the aggregator opens a round on the word of half of them, and
#: takes it as said for the others where they were last.
SPACING_STEPS = 1000
MARGIN_STEPS = 10
STEP_TIME_S = 1e5
HEARTBEAT_S = 0.5
#: Version 0 is the whole model in float32 for every island, through one broker.
GIVE_UP_S, GIVE_UP_SEEDING_S = 180.0, 900.0
#: Of waiting for a message, before it is waited for again: two thousand tasks that wake up are work.
RECEIVE_S = 20.0
#: Until an island that lacks something of version 0 asks for it again.
WANT_AGAIN_S = 20.0

TENSORS = 48
COLUMNS = 1024


def model(parameters: int) -> tuple[TensorSpec, ...]:
    """Returns 48 equal matrices (a dozen layers of four) merged by RDA, of ``parameters`` or more in all."""
    rows = -(-parameters // (TENSORS * COLUMNS))
    columns = COLUMNS if rows > 1 else -(-parameters // TENSORS)
    return tuple(
        TensorSpec(name=f"layers/{i:02}/weight", shape=(rows, columns), dtype="float32", kind=Kind.RDA)
        for i in range(TENSORS)
    )


class Payloads:
    """What scripted islands send: one seed and one pseudo-gradient per fragment, the same for all of them.

    Args:
        tensors: The model.
        fragments: How many fragments it is cut into (P).
        codec: Of pseudo-gradients.
    """

    def __init__(self, tensors: tuple[TensorSpec, ...], fragments: int, codec: Codec) -> None:
        if TENSORS % fragments:
            raise ConfigError("fragments", fragments, f"must divide {TENSORS}, so that all fragments are equal")
        self.tensors = tensors
        self.manifest: FragmentManifest = partition(tensors, fragments)
        # All fragments hold equal matrices: one buffer serves them all, and this process stays small.
        largest = max(self.manifest.fragments, key=len)
        values = np.random.default_rng(0).standard_normal((len(largest), *largest[0].shape), dtype=np.float32)
        values *= np.float32(1e-3)
        self._seed = [encode_tensor(each, Codec.F32) for each in values]
        self._delta = [encode_tensor(each, codec) for each in values]

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(self.manifest.sizes)

    def seed(self, p: int) -> tuple[Encoded, ...]:
        """Version 0 of a fragment, float32."""
        return tuple(self._seed[: len(self.manifest.fragments[p])])

    def delta(self, p: int) -> tuple[Encoded, ...]:
        """A pseudo-gradient of a fragment."""
        return tuple(self._delta[: len(self.manifest.fragments[p])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A version that reached an island, at ``at_s`` of the monotonic clock, which all processes share."""

    fragment_id: int
    fragment_version: int
    at_s: float


class Turns:
    """Spaces overdue heartbeats by a pause: those of separate hosts never come at once.

    Args:
        pause_s: Between two of this process.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._next_at_s = 0.0

    async def wait(self) -> None:
        """Waits for the next turn."""
        now_s = time.monotonic()
        at_s = self._next_at_s = max(now_s, self._next_at_s + self._pause_s)
        if at_s > now_s:
            await asyncio.sleep(at_s - now_s)


class ScriptedIsland:
    """One island."""

    def __init__(
        self,
        context: Context,
        address: str,
        name: str,
        payloads: Payloads,
        turns: Turns,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        phase_s: float = 0.0,
    ) -> None:
        self.name = name
        self.beats = 0  # heartbeats sent
        self.answers_s: list[float] = []  # from each to the next state
        self._heartbeat_s, self._phase_s = heartbeat_s, phase_s
        self._turns = turns
        self._wanted_s = 0.0
        self._asked_s: float | None = None  # when a heartbeat was sent that no state has followed
        self.versions: dict[int, int] = {}
        self.arrivals: list[Arrival] = []
        self.told = asyncio.Event()  # something came
        self.states = 0  # answers to heartbeats, and announcements
        self.endpoints = {channel: Endpoint(context, address, channel) for channel in Channel}
        self._payloads = payloads
        self._nonce = f"{name}-{time.monotonic_ns()}"
        self._welcome: m.Welcome | None = None
        self._sequence = 0
        self._step = 0
        self._step_s, self._since_s = STEP_TIME_S, 0.0  # the time of a step, and when it stood at ``_step``
        self._next_step = [0] * len(payloads.manifest)
        self._answered: set[int] = set()
        self._seeded: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether it holds some version of every fragment."""
        return len(self.versions) == len(self._payloads.manifest)

    @property
    def merges(self) -> int:
        """Versions made since version 0 that it knows of, over all fragments."""
        return sum(self.versions.values())

    async def live(self) -> None:
        """Joins, then answers whatever comes, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive(Channel.CONTROL))
            tasks.create_task(self._receive(Channel.BULK))
            pause_s = 0.1
            while self._welcome is None:
                await self._send(
                    m.Join(
                        nonce=self._nonce,
                        island_id=self.name,
                        hint="",
                        tensors=self._payloads.tensors,
                        tokens_per_step=1,
                    )
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2.0, 2 * pause_s)  # of very many, one that asks on and on holds up the others
            # Once, and after each arrival: a second one while a version is on its way would fetch it twice. But where
            # nothing comes for very long, it was lost.
            await self._want()
            while True:
                # At times of its own, as on a host of its own: what holds up this process must not bring them together.
                await asyncio.sleep(self._heartbeat_s - (time.monotonic() - self._phase_s) % self._heartbeat_s)
                await self._turns.wait()
                await self.beat()
                if not self.complete and time.monotonic() - self._wanted_s > WANT_AGAIN_S:
                    await self._want()

    async def advance(self, step: int) -> None:
        """Reports that training has come to ``step``."""
        self._step, self._since_s = step, time.monotonic()
        await self.beat()

    def train(self, step_s: float) -> None:
        """Goes on by itself from here: a step takes ``step_s`` seconds."""
        self._step, self._since_s, self._step_s = self.step, time.monotonic(), step_s

    @property
    def step(self) -> int:
        """Returns the inner steps that it has come to."""
        return self._step + int((time.monotonic() - self._since_s) / self._step_s) if self._since_s else self._step

    async def beat(self) -> None:
        """Sends a heartbeat."""
        traffic = self.endpoints[Channel.BULK].traffic
        self.beats += 1
        step = self.step
        self._asked_s = self._asked_s or time.monotonic()
        await self._send(
            m.Heartbeat(
                inner_step=step,
                tokens=step,
                loss=None,
                step_time_s=self._step_s,
                sync_share=0.0,
                bytes_up=traffic.bytes_up,
                bytes_down=traffic.bytes_down,
                versions=self._held(),
                overwritten_tokens=(0,) * len(self._payloads.manifest),
                outstanding=(),
                stopped=False,
            )
        )

    def _held(self) -> tuple[int, ...]:
        return tuple(self.versions.get(p, -1) for p in range(len(self._payloads.manifest)))

    async def _want(self) -> None:
        self._wanted_s = time.monotonic()
        await self._send(m.Want(versions=self._held()))

    async def _send(self, message: Any) -> None:
        self._sequence += 1
        welcome = self._welcome
        envelope = Envelope(
            run_id=RUN,
            sender=self.name if welcome is not None else m.joining(self._nonce),
            incarnation=0 if welcome is None else welcome.incarnation,
            sequence=self._sequence,
            to=BROKER if isinstance(message, m.Want) else AGGREGATOR,
            message=message,
        )
        await self.endpoints[message.channel].send(envelope)

    async def _receive(self, channel: Channel) -> None:
        while True:
            envelope = await self.endpoints[channel].recv(RECEIVE_S)
            if envelope is not None:
                await self._take(envelope.message)

    async def _take(self, message: m.Message) -> None:
        match message:
            case m.Welcome() if self._welcome is None:
                if message.fragments != self._payloads.manifest.fragments:
                    raise Unavailable("the aggregator cut the model into other fragments than expected", definite=True)
                self._welcome = message
            case m.FleetState():
                self.states += 1
                if self._asked_s is not None:
                    self.answers_s.append(time.monotonic() - self._asked_s)
                    self._asked_s = None
                self.told.set()
                for p in message.seed:
                    if p not in self._seeded:
                        self._seeded.add(p)
                        await self._send(m.Seed(fragment_id=p, payload=self._payloads.seed(p)))
                for each in message.rounds:
                    await self._answer(each)
            case m.Version(fragment_id=p, fragment_version=version):
                arrival = Arrival(fragment_id=p, fragment_version=version, at_s=time.monotonic())
                self.arrivals.append(arrival)
                self.versions[p] = version
                self.told.set()
                await self._want()
            case m.Refused(reason=m.Reason.NOT_LEADER, kind="join" | "heartbeat"):
                pass  # the broker says that it lives; both are repeated
            case m.Refused():
                raise Unavailable(
                    f"{self.name}: its {message.kind} was refused: {message.reason}, {message.detail}", definite=True
                )
            case _:
                pass

    async def _answer(self, opened: m.OpenRound) -> None:
        p, begins, step = opened.fragment_id, self._next_step[opened.fragment_id], self.step
        if opened.round_id in self._answered or not self.complete or step <= begins:
            return  # the last: opened on the word of the others, before this one's step was told
        self._answered.add(opened.round_id)
        self._next_step[p] = step
        steps = StepRange(from_step=begins, to_step=step, from_tokens=begins, to_tokens=step)
        await self._send(
            m.Contribution(
                round_id=opened.round_id,
                fragment_id=p,
                steps=steps,
                trained_on=(m.TrainedOn(fragment_version=self.versions[p], steps=steps.steps),),
                payload=self._payloads.delta(p),
            )
        )


class ScriptedFleet:
    """All islands of a run; see :func:`scripted_fleet`."""

    def __init__(self, islands: list[ScriptedIsland]) -> None:
        self.islands = islands
        self._rounds = 0

    async def seeded(self) -> None:
        """Returns when every island holds version 0; raises Unavailable if that never comes."""
        await self._all(
            lambda island: island.complete, "version 0 did not reach every island", within_s=GIVE_UP_SEEDING_S
        )
        await self._report(0)  # the aggregator counts steps from the first report of an island that has everything

    async def round(self) -> None:
        """Runs one round, from the report of a passed interval to the last island's receipt of the version.

        Raises:
            Unavailable: The version did not come.
        """
        self._rounds += 1
        due_at = self._rounds * SPACING_STEPS
        await self._report(due_at - MARGIN_STEPS)
        for island in self.islands:
            await island.advance(due_at + MARGIN_STEPS)
        # Each round makes one version of one fragment, whichever it is.
        await self._all(lambda island: island.merges >= self._rounds, "the version did not reach every island")

    async def train(self, seconds: float, every_s: float) -> float:
        """Has all islands train for a while, at a pace at which a round falls due each ``every_s`` seconds.

        Returns:
            Rounds that every island has the version of; a part of one for those that some have.
        """
        before = [island.merges for island in self.islands]
        for island in self.islands:
            island.train(every_s / SPACING_STEPS)
        await asyncio.sleep(seconds + every_s / 2)  # the last round too has time to be made
        made = sum(island.merges - merges for island, merges in zip(self.islands, before, strict=True))
        return made / len(self.islands)

    async def _report(self, step: int) -> None:
        """Returns when the aggregator knows that every island is at ``step``.

        Answers do not say what they answer. Two may be on their way for other reasons, so the third is to one of these.
        """
        heard = {island.name: island.states for island in self.islands}
        for island in self.islands:
            for _ in range(3):
                await island.advance(step)
        await self._all(lambda island: island.states >= heard[island.name] + 3, "heartbeats were not answered")

    async def _all(self, reached: Callable[[ScriptedIsland], bool], what: str, *, within_s: float = GIVE_UP_S) -> None:
        try:
            async with asyncio.timeout(within_s):
                for island in self.islands:
                    while not reached(island):
                        island.told.clear()
                        await island.told.wait()
        except TimeoutError as err:
            cure = f"within {within_s:.0f} s: see the logs of broker and aggregator"
            raise Unavailable(f"{what} {cure}", definite=False) from err


@asynccontextmanager
async def scripted_fleet(
    addresses: list[str],
    payloads: Payloads,
    *,
    heartbeat_s: float = HEARTBEAT_S,
) -> AsyncIterator[ScriptedFleet]:
    """Joins one island per address and ends them with the block; an error of an island ends the block too.

    Args:
        addresses: Control address of the broker, or of what stands before it, for each island.
        payloads: What they send.
        heartbeat_s: Between two heartbeats of an island; theirs are spread evenly over it.
    """
    context = Context(io_threads=2)
    context.set(zmq.MAX_SOCKETS, max(1023, 16 * len(addresses)))  # to be said before the first one
    turns = Turns(heartbeat_s / (2 * len(addresses)))  # at most twice as many as usual
    try:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            islands = [
                ScriptedIsland(
                    context,
                    address,
                    f"island-{i:02}",
                    payloads,
                    turns,
                    heartbeat_s=heartbeat_s,
                    phase_s=heartbeat_s * i / len(addresses),
                )
                for i, address in enumerate(addresses)
            ]
            for island in islands:
                for endpoint in island.endpoints.values():
                    await stack.enter_async_context(endpoint)
            living = [tasks.create_task(island.live(), name=island.name) for island in islands]
            try:
                yield ScriptedFleet(islands)
            finally:
                for each in living:
                    each.cancel()
    finally:
        context.term()
