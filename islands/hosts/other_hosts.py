"""The speaker's side of an island of several hosts: proposes plans, orders, notices lost hosts. Shell.

Lives in the speaker's communication thread, beside the driver of the core (:mod:`islands.session.session`), which knows
of other hosts only what stands here.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from broker.base.errors import ConfigError, Unavailable, first_of
from broker.process import clocks, logs
from broker.wire.fragments import FragmentManifest, Region
from broker.wire.headers import Buffer
from broker.wire.messages import Block, Codec, Pacing, RunSettings, Version
from broker.wire.ranges import StepRange
from islands.agreement import messages as m
from islands.agreement.speaker_rules import LOST_S
from islands.arrays.reference import cut
from islands.arrays.regions import HeldTensor, Owners, check_alike, handed_by, owners_of
from islands.hosts import state
from islands.hosts.link import Contact, SpeakerLink
from islands.hosts.loss import MISTAKEN, end_soon, lost
from islands.hosts.plans import Planner, Plans
from islands.hosts.rendezvous import SeveralHosts
from islands.protocol.events import Joined
from islands.session.exchange import Due, Exchange, StateFound
from islands.session.training_state import Snapshot
from islands.session.workers import Workers

log = logs.get(__name__)

#: From and to step of contributions.
Keys = frozenset[tuple[int, int]]

#: How often the speaker says that it is alive, and looks who else is.
BEAT_S = 0.25
#: A host whose connection has gone, and does not come back within this time, is lost.
UNREACHABLE_S = 1.0
#: Copies of the optimizer's state whose parts wait for each other.
MOST_COPIES = 2


@dataclass(slots=True)
class Host:
    """One of the other hosts, as last heard of."""

    tensors: tuple[HeldTensor, ...]
    at: m.HostAt = field(default_factory=lambda: m.HostAt(step=0, stopped=False))
    left: bool = False


class OtherHosts:
    """The other hosts of an island that has several.

    Args:
        team: Of this island; this host is its speaker.
        contact: Of this host.
        link: This host's end of the connections to the others.
        tokens_per_step: As the speaker's loop has declared it.
        plans: Of the speaker's own training thread.
        exchange: Of the speaker's two threads.

    Attributes:
        plans: As given.
        due: What the core has for the training threads: plans are made of it.
        boundaries: How many the core has seen.
        num_hosts: How many there are, the speaker among them.
    """

    def __init__(
        self,
        team: SeveralHosts,
        contact: Contact,
        link: SpeakerLink,
        tokens_per_step: int,
        plans: Plans,
        exchange: Exchange,
    ) -> None:
        self.due, self.boundaries, self.num_hosts = Due(), 0, team.hosts
        self._contact, self.plans, self._exchange = contact, plans, exchange
        self._tensors, self._tokens_per_step = team.tensors, tokens_per_step
        self._link = link
        self._hosts: dict[int, Host] = {}
        self._owners: Owners = {}
        self._manifest: FragmentManifest | None = None
        self._planner = Planner(team.hosts, self.due, plans, exchange, self._to_all)
        self._waiting: dict[tuple[int, int], tuple[set[int], asyncio.Event]] = {}  # version -> hosts that place it
        self._copies: dict[int, dict[int, tuple[m.Copied, Sequence[Buffer]]]] = {}  # boundary -> host -> its part
        self._copied = asyncio.Event()
        self._needs: dict[int, m.Needs] = {}
        self._begun: StateFound | None = None
        self._open: dict[int, Keys] = {}
        self._ending = (False, False)
        self._all_here = asyncio.Event()
        self._said_goodbye = self._failed = False
        self._sends: asyncio.Queue[tuple[int, m.HostMessage, Sequence[Buffer]]] = asyncio.Queue()
        self._workers = Workers(1, "atoll-hosts")

    async def __aenter__(self) -> Self:
        """Begins to speak with :meth:`work`."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Says goodbye to those that have not heard it, and why."""
        if not self._said_goodbye:
            self._failed = True
            why = first_of(exc) if isinstance(exc, BaseExceptionGroup) else exc
            if isinstance(why, ConfigError):
                self.plans.mistake = why
                if self._exchange.startable:  # training has begun, and may wait in a collective
                    end_soon(MISTAKEN, str(why))
            await self.goodbye(f"the speaker failed: {why or 'it ends'}")
        self._workers.close()
        self._link.close()

    # --- tasks ------------------------------------------------------------------------------------------------

    def work(self, within_s: float) -> list[Coroutine[Any, Any, None]]:
        """Returns coroutines that run side by side until cancelled; ``within_s``: time for hosts to come."""
        return [self.hear(), self.say(), self.watch(within_s)]

    async def hear(self) -> None:
        """Takes in what the hosts say, until it is cancelled.

        Raises:
            ConfigError: Hosts cannot make one island. Unavailable: One of them has left.
        """
        while True:
            heard = await self._link.recv()
            if heard is not None:
                self._heard(*heard)

    async def say(self) -> None:
        """Sends what there is to say, in order."""
        while True:
            await self._link.send(*await self._sends.get())

    async def watch(self, within_s: float) -> None:
        """Says that the speaker is alive, and looks who is lost.

        Args:
            within_s: How long the hosts may take to say their first word.

        Raises:
            Unavailable: One of them is lost, or never came.
        """
        began_s = clocks.monotonic()
        while True:
            now_s = clocks.monotonic()
            self._to_all(m.Alive(after=self.boundaries))
            if not self._all_here.is_set():
                missing = sorted(set(range(1, self.num_hosts)) - self._hosts.keys())
                if now_s - began_s > within_s:
                    cure = "look at its log, and whether it reaches the speaker's address"
                    said = f"host {missing[0]} of {self.num_hosts} has said nothing for {within_s:g} s"
                    raise Unavailable(f"{said} at {self._contact.address}: {cure}", definite=True)
            else:
                unreachable = self._link.unreachable_s.items()
                gone = [h for h, since_s in unreachable if now_s - since_s > UNREACHABLE_S and not self._hosts[h].left]
                silent = [h for h in self._planner.silent() if not self._hosts[h].left]
                if gone or silent:
                    why = "has no connection any more" if gone else f"has said nothing for {LOST_S:g} s"
                    raise lost(f"host {[*gone, *silent][0]} of {self.num_hosts} {why}")
                self._plan()
            await asyncio.sleep(BEAT_S)

    async def assembled(self) -> dict[str, frozenset[Region]]:
        """Returns the regions that the speaker hands over of each tensor, once every host is there."""
        await self._all_here.wait()
        return handed_by(0, self._owners)

    async def goodbye(self, reason: str) -> None:
        """Says that the speaker leaves: with all others, or in the middle of training."""
        ended = not (self.plans.broken_off or self._failed)
        self._said_goodbye = True
        while not self._sends.empty():
            await self._link.send(*self._sends.get_nowait())
        mistake = self.plans.mistake
        said = m.Mistaken.of(mistake) if mistake else m.Goodbye(reason=reason[:500], ended=ended)
        for host in range(1, self.num_hosts):
            await self._link.send(host, said)

    # --- orders -----------------------------------------------------------------------------------------------

    def joined(self, joined: Joined, settings: RunSettings, blocks: tuple[Block, ...]) -> None:
        """Sends all other hosts the terms of the membership.

        Raises:
            ConfigError: The run's recipe is not for islands of several hosts, or it has cut a tensor.
        """
        if settings.recipe.pacing is Pacing.LOCKSTEP:
            cure = "islands of several hosts do not wait for other islands at fixed steps: choose another pacing"
            raise ConfigError("recipe.pacing", str(settings.recipe.pacing), cure)
        for section in joined.manifest.sections.values():
            cure = "no island of several hosts takes tensors that the run has cut: begin the run with a larger one"
            raise ConfigError("max_message_bytes", f"too small for params {section.tensor} in one piece", cure)
        self._manifest = joined.manifest
        self._planner.begin(joined)
        for host in self._hosts:
            handed = handed_by(host, self._owners)
            terms = m.Terms(
                island_id=joined.island_id,
                incarnation=joined.incarnation,
                start_step=joined.start_step,
                start_tokens=joined.start_tokens,
                fragments=joined.manifest.fragments,
                settings=settings,
                blocks=blocks,
                handed=tuple(
                    HeldTensor(tensor=each.tensor, regions=tuple(sorted(handed[each.tensor.name])))
                    for each in self._tensors
                ),
            )
            self._say(host, terms)

    def encode(self, fragment_id: int, seed: int) -> None:
        """Has every host encode its regions of the initial parameters."""
        self._to_all(m.EncodeRegions(after=self.boundaries, fragment_id=fragment_id, seed=seed))

    def capture(self, fragment_id: int, boundary: int, steps: StepRange, codec: Codec) -> None:
        """Has every host encode what it has trained, from the copies of a boundary."""
        order = m.CaptureRegions(
            after=self.boundaries,
            fragment_id=fragment_id,
            boundary=boundary,
            from_step=steps.from_step,
            to_step=steps.to_step,
            codec=codec,
        )
        self._to_all(order)

    def send_part(self, fragment_id: int, steps: StepRange | None, island_id: str, incarnation: int) -> None:
        """Has every host send its part of a contribution; or with no steps, of version 0."""
        order = m.SendPart(
            after=self.boundaries,
            fragment_id=fragment_id,
            from_step=0 if steps is None else steps.from_step,
            to_step=0 if steps is None else steps.to_step,
            island_id=island_id,
            incarnation=incarnation,
        )
        self._to_all(order)

    def _open_parts(self, open_steps: Mapping[int, Keys]) -> None:
        """Says which contributions of each fragment may be asked for again."""
        for p, keys in open_steps.items():
            if keys != self._open.get(p, frozenset()):
                self._open[p] = keys
                steps = tuple(step for key in sorted(keys) for step in key)
                self._to_all(m.OpenParts(after=self.boundaries, fragment_id=p, open_steps=steps))

    async def prepare(self, version: Version, keep: float, *, mixes: bool) -> None:
        """Has every host place its regions of a version; returns when all have."""
        assert self._manifest is not None
        p = version.fragment_id
        names = [tensor.name for tensor in self._manifest.fragments[p]]
        placed = asyncio.Event()
        self._waiting[p, version.fragment_version] = set(self._hosts), placed
        for number, host in self._hosts.items():
            held = {each.tensor.name: each.regions for each in host.tensors}
            regions = [(i, region) for i, name in enumerate(names) for region in held[name]]
            payload = await self._workers.do(cut, version.payload, regions)
            order = m.PrepareRegions(
                after=self.boundaries,
                fragment_id=p,
                fragment_version=version.fragment_version,
                keep=keep,
                mixes=mixes,
            )
            self._say(number, order, [encoded.data for encoded in payload])
        await placed.wait()

    async def whole(self, snapshot: Snapshot, boundary: int, local_names: Sequence[str]) -> Snapshot:
        """Returns a copy of the state with the regions of all hosts in it."""
        while len(self._copies.setdefault(boundary, {})) < len(self._hosts):
            self._copied.clear()
            await self._copied.wait()
        parts = [(copied.leaves, buffers) for copied, buffers in self._copies.pop(boundary).values()]

        def put_together() -> Snapshot:
            own = state.copied(state.labelled(snapshot, local_names))
            return state.whole(snapshot, local_names, [own, *parts])

        return await self._workers.do(put_together)

    def begin(self, begun: StateFound) -> None:
        """Has all hosts begin with the speaker's state of the optimizer."""
        if begun is self._begun:
            return
        self._begun = begun
        for host in list(self._needs):
            self._give(host)

    def use(self, broker: int) -> None:
        """Tells all hosts the broker to send to from now on."""
        self._to_all(m.Use(broker=broker))

    def core_has_moved(self, open_steps: Mapping[int, Keys], *, delivered: bool, finished: bool) -> None:
        """Tells the hosts what an event has changed, and makes the next plan if there is something to do.

        Args:
            open_steps: Fragment -> contributions that may be asked for again.
            delivered: All that a stopped island has trained is known to be there.
            finished: It has installed the last versions, too.
        """
        self._open_parts(open_steps)
        self._plan()
        if (delivered, finished) != self._ending:
            self._ending = delivered, finished
            self._to_all(m.Ending(after=self.boundaries, delivered=delivered, finished=finished))

    def _plan(self) -> None:
        """Makes the next plan, if there is something to do."""
        if self._manifest is not None:
            self._planner.advance(self.boundaries, all_stopped=all(host.at.stopped for host in self._hosts.values()))

    # --- what hosts say ---------------------------------------------------------------------------------------

    def _heard(self, number: int, message: Any, buffers: Sequence[Buffer]) -> None:
        host = self._hosts.get(number)
        if isinstance(message, m.Hello):
            if not hmac.compare_digest(message.token, self._contact.token):
                log.warning("hosts.stranger", host=number)
                return
            self._hello(number, message)
        if host is None:
            return  # it has not said who it is
        self._planner.heard(number, host.at)
        match message:
            case m.HostAt():
                host.at = message
                self._planner.heard(number, message)
                self._plan()
            case m.Answer():
                self._planner.voted(number, message)
            case m.Placed():
                hosts, placed = self._waiting.get((message.fragment_id, message.fragment_version), (set(), None))
                hosts.discard(number)
                if placed is not None and not hosts:
                    del self._waiting[message.fragment_id, message.fragment_version]
                    placed.set()
            case m.Copied():
                self._copies.setdefault(message.boundary, {})[number] = message, buffers
                for old in sorted(self._copies)[:-MOST_COPIES]:
                    del self._copies[old]
                self._copied.set()
            case m.Needs():
                self._needs[number] = message
                self._give(number)
            case m.Mistaken():
                raise message.error()
            case m.Goodbye():
                host.left = True
                if not message.ended:
                    raise lost(f"host {number} of {self.num_hosts} has left ({message.reason})")
            case _:
                pass

    def _hello(self, number: int, hello: m.Hello) -> None:
        """Takes note of a host; raises ConfigError if those that are there cannot make one island."""
        self._hosts[number] = Host(hello.tensors)
        self._planner.heard(number, self._hosts[number].at)
        check_alike(number, self._tensors, hello.tensors, (self._tokens_per_step, hello.tokens_per_step))
        if len(self._hosts) == self.num_hosts - 1:
            tensors = {0: self._tensors, **{host: each.tensors for host, each in self._hosts.items()}}
            self._owners = owners_of(tensors)
            self._all_here.set()

    def _give(self, number: int) -> None:
        """Gives a host the state to begin with, if both are known."""
        if self._begun is None or number not in self._needs:
            return
        needs, found = self._needs.pop(number), self._begun.found
        if found is None:
            nothing = m.Begin(
                source=self._begun.source, incarnation=0, step=0, tokens=0, cursor=None, state=(), local=()
            )
            self._say(number, nothing)
            return
        given, buffers = state.given(found.state, needs.state, number)
        local, more = state.given(found.local, needs.local, number)
        begin = m.Begin(
            source=self._begun.source,
            incarnation=found.incarnation,
            step=found.at.step,
            tokens=found.at.tokens,
            cursor=found.cursor,
            state=given,
            local=local,
        )
        self._say(number, begin, [*buffers, *more])

    def _say(self, host: int, message: m.HostMessage, buffers: Sequence[Buffer] = ()) -> None:
        self._sends.put_nowait((host, message, buffers))

    def _to_all(self, message: m.HostMessage) -> None:
        for host in self._hosts:
            self._say(host, message)
