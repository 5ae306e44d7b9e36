"""Runs :class:`aggregator.standby.candidate.Candidate`: sockets, store and lease of a standby. Shell.

Commits of the leader go into the store of this process one after the other, in a thread; the lease is read and taken by
tasks of their own. Nothing here waits for Redis but the decision to lead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_never

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Fenced, Note, NotLetIn, Received, Send
from aggregator.merge.passes import warm_up
from aggregator.process.broker_links import BrokerLinks
from aggregator.process.lease import LeaseKey
from aggregator.process.workers import ended
from aggregator.standby.candidate import Candidate
from aggregator.standby.candidate_events import (
    Arrived,
    CandidateAction,
    CandidateEvent,
    Heard,
    Keep,
    Kept,
    Lead,
    LeaseTaken,
    Poll,
    Polled,
    Quit,
    SendFollow,
    Take,
    Tick,
    Unpolled,
)
from aggregator.standby.replicas import commit_of, record_of
from aggregator.state.run_settings import settled
from aggregator.store.store import Loaded, Store, newer_but_damaged
from broker.base.errors import RemoteProtocolError, Unavailable
from broker.process import clocks, logs
from broker.transport.sockets import Context
from broker.wire.messages import BROKER, FollowBulk, Following, Replica, ReplicaRun, standing_by

log = logs.get(__name__)

#: Decisions worth a warning.
#: The timer's resolution: a deadline that has passed already must not keep the loop from the sockets.
MIN_WAIT_S = 0.0005


class Follower:
    """One stretch of standing by.

    Args:
        config: With ``failover``.
        given: Those of its settings that were given: a leader whose run has others is not followed.
        context: Of the process.
        store: Loaded.
        loaded: What it holds.
        lease: Of the shard.
    """

    def __init__(
        self,
        config: AggregatorConfig,
        given: Mapping[str, Any],
        context: Context,
        store: Store,
        loaded: Loaded,
        lease: LeaseKey,
    ) -> None:
        self._given = given
        self._config, self._store, self._lease = config, store, lease
        self._name = store.name
        self._clock = clocks.monotonic
        self._events: asyncio.Queue[CandidateEvent] = asyncio.Queue()
        self._wire = BrokerLinks(context, config, self._heard, sender=standing_by(self._name))
        self._disk = ThreadPoolExecutor(1, "disk")
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lead: Lead | None = None
        self.ended = False  #: the run has, as its leader has said
        self.core = Candidate(
            name=self._name,
            shard=config.shard,
            shards=config.shards,
            lease_s=config.lease_s,
            yields=config.standby,
            stored={p: (commit.fragment_version, commit.digest) for p, commit in loaded.fragments.items()},
            record=loaded.run,
            damaged=frozenset(p for p, _ in newer_but_damaged(loaded)),
            now_s=self._clock(),
        )

    async def run(self, stop: asyncio.Event) -> Lead | None:
        """Follows until this process may lead, and returns how; None if ``stop`` or the run's end came before.

        Raises:
            ConfigError: A setting that was given is not that of the run, in a group.
        """
        async with self._wire, self._group:
            for work in self._wire.work():
                self._spawn(work)
            self._spawn(self._warm_up())
            stopping = asyncio.create_task(stop.wait())
            try:
                await self._pump(stopping)
            finally:
                stopping.cancel()
                for task in self._tasks:
                    task.cancel()
        await ended(self._disk)  # what it is at may still be in the leader's commit
        return self._lead

    async def _pump(self, stopping: asyncio.Task[bool]) -> None:
        await self._perform(self.core.handle(Tick(), self._clock()))
        while self._lead is None and not self.ended and not stopping.done():
            event = await self._next_event(stopping)
            await self._perform(self.core.handle(event, self._clock()))

    async def _next_event(self, stopping: asyncio.Task[bool]) -> CandidateEvent:
        deadline_s = self.core.next_deadline_s()
        wait_s = MIN_WAIT_S if deadline_s is None else max(MIN_WAIT_S, deadline_s - self._clock())
        try:
            async with asyncio.timeout(wait_s):
                return await self._events.get()
        except TimeoutError:
            return Tick()

    async def _perform(self, actions: list[CandidateAction]) -> None:
        for action in actions:
            match action:
                case SendFollow(follow=follow):
                    await self._wire.send(Send(to=BROKER, message=follow))
                    await self._wire.send(Send(to=BROKER, message=FollowBulk(shard=follow.shard)))
                case Poll():
                    self._spawn(self._poll())
                case Take():
                    self._spawn(self._take(action))
                case Keep(message=message):
                    self._spawn(self._keep(message))
                case Lead():
                    self._lead = action
                case Quit():
                    log.info("aggregator.ended", run=self._config.run_id, by="its leader")
                    self.ended = True
                case Note(name=name, fields=fields):
                    (log.warning if action.level == "warning" else log.info)(name, **fields)
                case _:
                    assert_never(action)

    async def _heard(self, received: Received | Fenced | NotLetIn) -> None:
        if not isinstance(received, Received):
            return  # of the time when it led
        message = received.envelope.message
        match message:
            case Following():
                await self._events.put(Heard(broker=received.broker, following=message))
            case Replica() | ReplicaRun():
                await self._events.put(Arrived(message=message))
            case _:
                pass  # meant for a leader, which this process may have been

    async def _warm_up(self) -> None:
        """Loads and compiles what the first merge needs, so that a takeover does not wait for it."""
        await asyncio.to_thread(warm_up)

    async def _poll(self) -> None:
        try:
            await self._events.put(Polled(lease=await self._lease.read()))
        except Unavailable as err:
            await self._events.put(Unpolled(detail=str(err)))

    async def _take(self, action: Take) -> None:
        try:
            granted = await self._lease.take(
                holder=self._name,
                expected_epoch=action.expected_epoch,
                epoch=action.epoch,
                lease_s=self._config.lease_s,
                store_epoch=action.store_epoch,
            )
        except Unavailable as err:
            await self._events.put(Unpolled(detail=str(err)))
        else:
            await self._events.put(LeaseTaken(granted=granted))

    async def _keep(self, message: Replica | ReplicaRun) -> None:
        loop = asyncio.get_running_loop()
        try:
            fragment_id = await loop.run_in_executor(self._disk, self._keep_now, message)
        except (Unavailable, RemoteProtocolError) as err:
            await self._events.put(Kept(message=message, problem=str(err)))
        else:
            await self._events.put(Kept(message=message))
            if fragment_id is not None:  # and after that, for the leader waits for the answer
                await loop.run_in_executor(self._disk, self._store.prune, fragment_id)

    def _keep_now(self, message: Replica | ReplicaRun) -> int | None:
        """Writes what a message has; returns the fragment of a version.

        In the disk's thread, so that messages are kept in the order in which they came.
        """
        if isinstance(message, ReplicaRun):
            record = record_of(message)
            settled(self._given, record)  # better now than by the next leader
            self._store.save_run(record)
            return None
        commit, state = commit_of(message)
        self._store.adopt(commit, state, prune=False)
        return commit.fragment_id

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
