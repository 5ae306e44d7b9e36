"""Island cores, the relay and the aggregator core, wired back to back in memory.

A test exercises both sides of every conversation by moving ``now_s``: nothing here opens a socket, reads a clock or
sleeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from aggregator.interface import events as agg
from aggregator.rounds.core import Aggregator
from broker.routing.events import Blocked, RelayConfig, Unreachable
from broker.routing.events import Received as RelayReceived
from broker.routing.events import Send as RelaySend
from broker.routing.events import Tick as RelayTick
from broker.routing.relay import Relay
from broker.wire import messages as m
from islands.protocol import events as ie
from islands.protocol.core import Island
from tests.aggregator_hand import TOKENS_PER_STEP, Desk, config, tensors


class LinkedIsland:
    """An island core with a training thread that steps when the test says so."""

    def __init__(self, cluster: LinkedCluster, island_id: str, life: int) -> None:
        self.cluster, self.island_id = cluster, island_id
        self.address = f"{island_id}/{life}".encode()
        self.core = Island(
            island_id=island_id,
            hint="",
            nonce=f"{island_id}-{life}",
            tensors=tensors(cluster.config.fragments),
            tokens_per_step=TOKENS_PER_STEP,
        )
        self.alive, self.stopped, self.step, self.sequence = True, False, 0, 0
        self.watched: frozenset[int] = frozenset()
        self.ready: list[int] = []
        self.failed: ie.Fail | None = None
        self.keeps: list[float] = []  #: of every version prepared, in order
        self.refreshes = 0
        self.perform(self.core.start(cluster.now_s))

    def handle(self, event: ie.Event) -> None:
        """Feeds one event to the core."""
        if self.alive:
            self.perform(self.core.handle(event, self.cluster.now_s))

    def train(self, num_steps: int = 1) -> None:
        """Runs inner steps, each followed by a boundary."""
        for _ in range(num_steps):
            if self.stopped:
                if self.ready:
                    self.boundary()
                    self.cluster.settle()
                continue
            self.step += 1
            vitals = ie.Vitals(loss=1.0, step_time_s=0.1, sync_share=0.0, bytes_up=0, bytes_down=0)
            self.handle(vitals)
            self.stopped = self.core.done
            self.boundary()
            self.cluster.settle()

    def boundary(self) -> None:
        """Installs what is ready, then copies what is watched; everything at the last one."""
        installed, self.ready = tuple(self.ready), []
        assert self.core.manifest is not None
        copied = self.core.manifest.moving if self.stopped else tuple(sorted(self.watched))
        boundary = ie.Boundary(
            inner_step=self.step,
            tokens=self.step * TOKENS_PER_STEP,
            installed=installed,
            copied=copied,
            stopped=self.stopped,
        )
        self.handle(boundary)

    def perform(self, actions: Iterable[ie.Action]) -> None:
        """Carries actions out; what takes time is complete at once, but for installations."""
        for action in actions:
            match action:
                case ie.Send():
                    self.sequence += 1
                    self.cluster.from_island(self, action)
                case ie.Joined():
                    self.step = action.start_step
                case ie.Watch():
                    self.watched = action.fragments
                case ie.Capture(fragment_id=p):
                    self.handle(ie.Captured(fragment_id=p, payload=(self.island_id, p, action.step)))
                case ie.Prepare(version=version):
                    self.keeps.append(action.keep)
                    self.ready.append(version.fragment_id)
                    self.handle(ie.Prepared(fragment_id=version.fragment_id))
                case ie.EncodeSeed(fragment_id=p):
                    self.handle(ie.SeedEncoded(fragment_id=p, payload=f"seed {p} of {self.island_id}"))
                case ie.RefreshOptimizer():
                    self.refreshes += 1
                case ie.Fail():
                    self.failed, self.alive = action, False
                case ie.Note():
                    self.cluster.notes.append((self.island_id, action))


class LinkedCluster:
    """Islands, relay and aggregator in one process; messages arrive at once, in order, unless ``lose`` takes them.

    Attributes:
        lose: Says of a message, with sender and addressee, whether it is lost.
    """

    def __init__(self, *island_ids: str, **settings: Any) -> None:
        self.now_s = 0.0
        self.config = config(**{"islands": max(1, len(island_ids)), **settings})
        self.notes: list[tuple[str, Any]] = []
        self.lose: Callable[[str, str, m.Message], bool] = lambda sender, to, message: False
        self.relay = Relay(RelayConfig(run_id=self.config.run_id))
        self.flaw: Callable[[m.Message], agg.Flaw | None] = lambda message: None
        self._queue: deque[Callable[[], None]] = deque()
        self._sequence = 0
        self.desk = Desk(config=self.config)
        self._attach()
        self.islands: dict[str, LinkedIsland] = {}
        self._processes: dict[bytes, LinkedIsland] = {}
        self._lives: dict[str, int] = {}
        for island_id in island_ids:
            self.start_island(island_id)
        self.settle()
        self.run_to(0.6)
        for island in self.islands.values():
            island.boundary()
        self.run_to(1.2)

    @property
    def aggregator(self) -> Aggregator:
        """The aggregator core of now."""
        return self.desk.core

    def __getitem__(self, island_id: str) -> LinkedIsland:
        return self.islands[island_id]

    def start_island(self, island_id: str) -> LinkedIsland:
        """Starts a process of an island, in place of an earlier one."""
        if island_id in self.islands:
            self.islands[island_id].alive = False
        self._lives[island_id] = self._lives.get(island_id, 0) + 1
        island = self.islands[island_id] = LinkedIsland(self, island_id, self._lives[island_id])
        self._processes[island.address] = island
        self.settle()
        return island

    def restart_aggregator(self) -> None:
        """Kills the aggregator; its successor reads the same disk."""
        self.desk.now_s = self.now_s
        self.desk = self.desk.restarted()
        self._attach()
        self.settle()

    def restart_broker(self) -> None:
        """Kills the broker; the next one knows nothing."""
        self.relay = Relay(RelayConfig(run_id=self.config.run_id))

    def run_to(self, at_s: float) -> None:
        """Moves the time from deadline to deadline of all parties."""
        for _ in range(100_000):
            self.settle()
            due = [self.aggregator.next_deadline_s(self.now_s), self.relay.next_deadline_s()]
            due += [i.core.next_deadline_s() for i in self.islands.values() if i.alive]
            next_s = min((each for each in due if each is not None), default=at_s)
            if next_s > at_s:
                self.now_s = self.desk.now_s = at_s
                return
            self.now_s = self.desk.now_s = max(self.now_s, next_s)
            self._to_aggregator(agg.Tick())
            self._relay(RelayTick())
            for island in list(self.islands.values()):
                island.handle(ie.Tick())
        raise AssertionError(f"somebody asks to be woken again and again at {self.now_s}")

    def train(self, num_steps: int, *island_ids: str, step_s: float = 0.1) -> None:
        """Lets islands (all, unless named) run steps of ``step_s`` side by side."""
        for _ in range(num_steps):
            self.run_to(self.now_s + step_s)
            for island in [self.islands[i] for i in island_ids or sorted(self.islands)]:
                if island.alive:
                    island.train()

    def from_island(self, island: LinkedIsland, send: ie.Send) -> None:
        """Carries a message of an island to the relay."""
        core = island.core
        sender = core.island_id if core.joined else m.joining(core.nonce)
        envelope = m.Envelope(
            run_id=self.config.run_id,
            sender=sender,
            incarnation=core.incarnation,
            sequence=island.sequence,
            to=send.to,
            message=send.message,
        )
        self._carry(island.address, envelope)

    def settle(self) -> None:
        """Delivers messages until none is under way."""
        for _ in range(100_000):
            if not self._queue:
                return
            self._queue.popleft()()
        raise AssertionError("messages go round and round")

    # --- wiring -----------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        self._from_aggregator(self.desk.take())
        self._to_aggregator(agg.Tick())

    def _to_aggregator(self, event: agg.Event) -> None:
        self.desk.now_s = self.now_s
        self._from_aggregator(self.desk.feed(event))

    def _from_aggregator(self, actions: Iterable[agg.Action]) -> None:
        for action in actions:
            match action:
                case agg.Send():
                    self._send(action.to, action.message)
                case agg.Publish():
                    version = m.Version(
                        epoch=self.aggregator.run.epoch,
                        fragment_id=action.fragment_id,
                        fragment_version=action.fragment_version,
                        digest=action.digest,
                        contributions=action.contributions,
                        base=action.base,
                        payload=action.digest,
                    )
                    self._send(m.BROKER, version)
                case agg.Note():
                    self.notes.append((m.AGGREGATOR, action))
                case _:
                    pass

    def _send(self, to: str, message: m.Message) -> None:
        self._sequence += 1
        envelope = m.Envelope(
            run_id=self.config.run_id,
            sender=m.AGGREGATOR,
            incarnation=0,
            sequence=self._sequence,
            to=to,
            message=message,
        )
        self._carry(b"aggregator", envelope)

    def _carry(self, peer: bytes, envelope: m.Envelope) -> None:
        if self.lose(envelope.sender, envelope.to, envelope.message):
            return
        event = RelayReceived(channel=envelope.message.channel, peer=peer, envelope=envelope, size_bytes=100)
        self._queue.append(lambda: self._relay(event))

    def _relay(self, event: RelayReceived | RelayTick | Blocked | Unreachable) -> None:
        for action in self.relay.handle(event, self.now_s):
            if isinstance(action, RelaySend):
                self._queue.append(lambda send=action: self._deliver(send))  # type: ignore[misc]

    def _deliver(self, send: RelaySend) -> None:
        if send.peer == b"aggregator":
            flaw = self.flaw(send.envelope.message)
            size = 256 if isinstance(send.envelope.message, m.Contribution | m.Seed) else 0
            self._to_aggregator(agg.Received(envelope=send.envelope, flaw=flaw, payload_bytes=size))
            return
        process = self._processes.get(send.peer)
        if process is not None:
            process.handle(ie.Received(envelope=send.envelope))
