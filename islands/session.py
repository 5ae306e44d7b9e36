"""The communication thread of an island: the driver of :class:`islands.core.Island` over real sockets.

Shell. One thread with one event loop owns the core, both connections and every copy that waits to be encoded. What
computes or waits (encoding, decoding, the device, the disk) runs in worker threads and comes back as an event, one job at a time
per fragment and in the order of its causes, so that heartbeats go on whatever the size of the model.

The training thread appears as :class:`islands.exchange.Moment` values, and as two counters that are read before each
event: the core always knows where training stands. :class:`ops.simulate.SimIsland` is the same driver in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, assert_never

import zmq.asyncio

from broker import logs
from broker.endpoint import Endpoint
from broker.errors import ConfigError, Unavailable
from broker.messages import Channel, Contribution, Envelope, Heartbeat, Message, Reason, Version, Want, joining
from islands import checkpoint, events, placement
from islands.config import IslandConfig
from islands.core import Island
from islands.exchange import Batch, Exchange, Install, Membership, Moment, Position, newest_ready
from islands.inspection import flaw_in
from islands.placement import Leaf, Parameters, Site, site_of
from islands.reference import Reference, encode_seed
from islands.tree import Tree

log = logs.get(__name__)

#: How long a receive waits before it looks again; nothing depends on it.
POLL_S = 1.0
#: The last word may take so long; the broker notices silence by itself.
GOODBYE_S = 0.5
#: Threads for tensors; most of the time they wait for the device.
WORKERS = 8


class Session:
    """One island's membership in a run, from joining to leaving.

    Args:
        config: Addresses and intervals.
        core: Fresh; touched by this session's thread alone, but for :meth:`Island.schedule_tokens`.
        params: The initial parameters: their structure and, unless ``init`` is given, version 0 if this island is
            asked for it. They must stay valid until :attr:`Exchange.startable`.
        init: seed -> initial parameters, called if this island is asked for version 0.
        exchange: Shared with the training thread.
    """

    def __init__(
        self,
        config: IslandConfig,
        core: Island,
        params: Tree,
        parameters: Parameters,
        exchange: Exchange,
        init: Callable[[int], Tree] | None,
    ) -> None:
        self._config = config
        self._core = core
        self._parameters = parameters
        self._exchange = exchange
        self._initial: list[Leaf] | None = parameters.leaves(params)
        self._init = init
        self._thread = threading.Thread(target=self._main, name="atoll-island", daemon=True)
        self._clock = time.monotonic

        # Touched by the communication thread only.
        self._loop: asyncio.AbstractEventLoop
        self._tasks: asyncio.TaskGroup
        self._endpoints: dict[Channel, Endpoint] = {}
        self._outboxes = {channel: _Outbox() for channel in Channel}
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None
        self._leaving: asyncio.Event
        self._leave_reason: str | None = None
        self._workers = ThreadPoolExecutor(WORKERS, "atoll-tensors")
        self._inspector = ThreadPoolExecutor(1, "atoll-versions")
        self._turn: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._references: tuple[Reference, ...] = ()
        self._copies: dict[int, tuple[int, tuple[Leaf, ...]]] = {}  # fragment -> (step, leaves)
        self._sites: dict[int, tuple[Site, ...]] = {}
        self._warm = False  # everything that a boundary calls is compiled
        self._recovering = False
        self._held: dict[int, Install] = {}  # of a recovery, until every fragment is there
        self._snapshot_at_s = 0.0
        self._saving = False
        self._notes: Counter[tuple[str, str]] = Counter()

    # --- called by the training thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def leave(self, reason: str, within_s: float = 3.0) -> None:
        """Says goodbye and ends the thread; returns when it has ended, or when the time is over."""
        self._leave_reason = self._leave_reason or reason
        self._exchange.wake()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def place_from(self, leaves: Sequence[Leaf]) -> None:
        """Notes where the parameters are kept from now on: a loop may start from numpy and go on with JAX."""
        membership = self._exchange.membership
        assert membership is not None
        # Replaced as a whole: the worker threads read it.
        self._sites = {
            p: tuple(map(site_of, self._parameters.of_fragment(leaves, p))) for p in range(membership.num_fragments)
        }

    # --- the thread -------------------------------------------------------------------------------------------

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._serve())
        except BaseExceptionGroup as group:
            error = _first(group)
        except (Exception, asyncio.CancelledError) as err:
            error = err
        finally:
            self._workers.shutdown(wait=False, cancel_futures=True)
            self._inspector.shutdown(wait=False, cancel_futures=True)
            if error is None and self._leave_reason is None:
                error = Unavailable("the island's communication ended without a reason", definite=False)
            self._exchange.error = error
            self._exchange.wake = lambda: None
            self._exchange.news.set()

    async def _serve(self) -> None:
        self._loop, self._leaving = asyncio.get_running_loop(), asyncio.Event()
        self._exchange.wake = self._wake
        context = zmq.asyncio.Context()
        try:
            async with AsyncExitStack() as stack:
                for channel in Channel:
                    endpoint = Endpoint(context, self._config.broker, channel, limits=self._config.limits())
                    self._endpoints[channel] = await stack.enter_async_context(endpoint)
                async with asyncio.TaskGroup() as self._tasks:
                    await self._converse()
        finally:
            context.term()

    async def _converse(self) -> None:
        """Runs until the island is to leave; a failure of any task ends all of them."""
        running = [self._tasks.create_task(self._connect(), name="connect")]
        for channel, endpoint in self._endpoints.items():
            running.append(self._tasks.create_task(self._receive(endpoint), name=f"receive {channel}"))
            running.append(
                self._tasks.create_task(self._send(endpoint, self._outboxes[channel]), name=f"send {channel}")
            )
        if self._leave_reason is None:
            await self._leaving.wait()
        self._catch_up()
        self._perform(self._core.handle(events.Leaving(reason=self._leave_reason or "ended"), self._clock()))
        await self._outboxes[Channel.CONTROL].emptied(GOODBYE_S)
        if self._timer is not None:
            self._timer.cancel()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    def _wake(self) -> None:
        """Called by the training thread."""
        with contextlib.suppress(RuntimeError):  # the loop has just ended
            self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        if self._leave_reason is not None:
            self._leaving.set()
        else:
            self._guarded(self._look)

    def _look(self) -> None:
        self._catch_up()
        self._after()

    def _guarded(self, call: Callable[[], None]) -> None:
        """Runs a callback of the event loop; its failure ends the session as that of a task would."""
        try:
            call()
        except Exception as err:
            self._tasks.create_task(_raise(err), name="failed callback")

    # --- connections ------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        """Joins as soon as the control connection stands: a join into nothing would be repeated only later."""
        control = self._endpoints[Channel.CONTROL]
        while not await control.ready(POLL_S):
            pass
        self._exchange.doing = "waiting for the run's aggregator to answer"
        self._exchange.news.set()
        self._perform(self._core.start(self._clock()))
        self._after()

    async def _receive(self, endpoint: Endpoint) -> None:
        while True:
            envelope = await endpoint.recv(POLL_S)
            if envelope is None:
                continue
            self._exchange.heard_at_s = self._clock()
            flaw = ""
            manifest = self._core.manifest
            if isinstance(envelope.message, Version) and manifest is not None:
                flaw = await self._loop.run_in_executor(self._inspector, flaw_in, envelope, manifest)
            self._handle(events.Received(envelope=envelope, flaw=flaw))

    async def _send(self, endpoint: Endpoint, outbox: _Outbox) -> None:
        while True:
            # What could not be sent is repeated in time by the core; nothing is kept for a broker that is away.
            await endpoint.send(await outbox.next())
            outbox.sent()

    def _post(self, to: str, message: Message) -> None:
        core = self._core
        self._sequence += 1
        envelope = Envelope(
            run_id=self._config.run_id,
            sender=core.island_id if core.joined else joining(core.nonce),
            incarnation=core.incarnation,
            sequence=self._sequence,
            to=to,
            message=message,
        )
        self._outboxes[message.channel].put(envelope)

    # --- the core ---------------------------------------------------------------------------------------------

    def _handle(self, event: events.Event) -> None:
        """Feeds one event to the core, after everything that the training thread has done, and acts on the answer."""
        self._catch_up()
        self._perform(self._core.handle(event, self._clock()))
        self._after()

    def _catch_up(self) -> None:
        exchange, core = self._exchange, self._core
        position = exchange.position  # before the moments: see islands.exchange
        now_s, deadline_s = self._clock(), core.next_deadline_s()
        if exchange.moments or (deadline_s is not None and now_s >= deadline_s):
            core.handle(self._vitals(), now_s)  # what the next heartbeat reports; nothing follows from it
        while exchange.moments:
            self._boundary(exchange.moments.popleft())
        if core.joined and position.step > core.at.step:
            self._perform(core.handle(events.Boundary(inner_step=position.step, tokens=position.tokens), now_s))
        self._ask_for_snapshot(now_s)

    def _boundary(self, moment: Moment) -> None:
        for install, before in moment.installed:
            self._copies.pop(install.fragment_id, None)
            self._spawn(self._settle(install, before))  # ahead of whatever the core asks of this fragment next
        self._copies.update({p: (moment.at.step, leaves) for p, leaves in moment.copied.items()})
        if moment.snapshot is not None:
            self._saving = True
            self._spawn(self._save(moment))
        boundary = events.Boundary(
            inner_step=moment.at.step,
            tokens=moment.at.tokens,
            installed=tuple(install.fragment_id for install, _ in moment.installed),
            copied=tuple(moment.copied),
            stopped=moment.stopped,
        )
        self._perform(self._core.handle(boundary, self._clock()))

    def _perform(self, actions: Sequence[events.Action]) -> None:
        """Carries out actions; what takes time ends in an event."""
        for action in actions:
            match action:
                case events.Send():
                    self._post(action.to, action.message)
                case events.Joined():
                    self._joined(action)
                case events.Watch():
                    self._exchange.watched = action.fragments
                case events.Capture():
                    # Taken out now: by the time the task runs, a later boundary may have put another one there.
                    step, copies = self._copies.pop(action.fragment_id)
                    assert step == action.step, "a capture names a copy that is gone"
                    self._spawn(self._capture(action.fragment_id, copies))
                case events.Prepare():
                    self._spawn(self._prepare(action))
                case events.EncodeSeed():
                    self._spawn(self._seed(action.fragment_id))
                case events.RefreshOptimizer():
                    self._recovering = True
                case events.Note():
                    self._note(action.name, action.fields)
                case events.Fail():
                    raise self._refusal(action)
                case _:
                    assert_never(action)

    def _after(self) -> None:
        """Publishes what the training thread looks at, and sets the timer."""
        exchange, core = self._exchange, self._core
        exchange.share = core.share
        exchange.urgent = frozenset(p for p, fragment in core.fragments.items() if fragment.asked is not None)
        startable = core.startable and self._warm
        if (core.done, core.finished, startable) != (exchange.done, exchange.finished, exchange.startable):
            exchange.done, exchange.finished, exchange.startable = core.done, core.finished, startable
            exchange.news.set()
        deadline_s = core.next_deadline_s()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline_s is not None and self._leave_reason is None:
            # The event loop's clock is the same; never earlier than in a millisecond, or a late one would spin.
            at_s = max(deadline_s, self._clock() + 0.001)
            self._timer = self._loop.call_at(at_s, self._guarded, lambda: self._handle(events.Tick()))

    def _vitals(self) -> events.Vitals:
        exchange, traffic = self._exchange, [endpoint.traffic for endpoint in self._endpoints.values()]
        return events.Vitals(
            loss=newest_ready(exchange.losses),
            step_time_s=exchange.step_time_s,
            sync_share=exchange.sync_share,
            bytes_up=sum(each.bytes_up for each in traffic),
            bytes_down=sum(each.bytes_down for each in traffic),
        )

    def _note(self, name: str, fields: Mapping[str, Any]) -> None:
        """Logs what the core has to say; what repeats itself, the first time and at each power of ten."""
        key = name, str(fields.get("reason", ""))
        self._notes[key] += 1
        times = self._notes[key]
        if str(times).rstrip("0") == "1":
            log.warning(name, **fields, **({"times": times} if times > 1 else {}))

    def _refusal(self, fail: events.Fail) -> ConfigError:
        """What the core cannot go on with, as an error of the setting that would have to change."""
        match fail.reason:
            case Reason.MANIFEST:
                return ConfigError("params", "as given to join", fail.cure)
            case Reason.WRONG_RUN:
                return ConfigError("run", self._config.run_id, fail.cure)
            case Reason.PROTOCOL_VERSION:
                return ConfigError(
                    "broker", self._config.broker, f"{fail.cure}: use one version of this program everywhere"
                )
            case _:
                return ConfigError("island_id", self._core.island_id, f"{fail.reason}: {fail.cure}")

    # --- fragments --------------------------------------------------------------------------------------------

    def _joined(self, joined: events.Joined) -> None:
        core, exchange = self._core, self._exchange
        assert core.settings is not None
        assert self._initial is not None
        self._parameters.assign(joined.manifest)
        self._references = tuple(Reference(tensors) for tensors in joined.manifest.fragments)
        start = Position(joined.start_step, joined.start_tokens)
        exchange.position = start  # the training thread writes it only once it has a membership
        exchange.share = core.share
        exchange.membership = Membership(
            island_id=joined.island_id,
            incarnation=joined.incarnation,
            start=start,
            settings=core.settings,
            num_fragments=len(joined.manifest),
            moving=joined.manifest.moving,
        )
        exchange.doing = "waiting for version 0"
        exchange.news.set()
        self.place_from(self._initial)
        self._snapshot_at_s = self._clock() + self._config.checkpoint_interval_s
        self._spawn(self._warm_up(self._initial))
        log.info(
            "island.joined",
            island=joined.island_id,
            incarnation=joined.incarnation,
            run=self._config.run_id,
            start_step=start.step,
            fragments=len(joined.manifest),
        )

    async def _warm_up(self, leaves: list[Leaf]) -> None:
        assert self._core.manifest is not None
        assert self._core.settings is not None
        for p, tensors in enumerate(self._core.manifest.fragments):
            chosen = self._parameters.of_fragment(leaves, p)
            await self._loop.run_in_executor(
                self._workers, placement.warm_up, chosen, tensors, self._core.settings.keep
            )
        self._warm = True
        self._after()

    async def _in_turn(self, fragment_id: int, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a job on a fragment in a worker thread, after those that were asked for before it."""
        async with self._turn[fragment_id]:
            return await self._loop.run_in_executor(self._workers, function, *args)

    async def _settle(self, install: Install, before: tuple[Leaf, ...]) -> None:
        reference = self._references[install.fragment_id]

        def settle() -> None:
            replaced = [placement.to_host(leaf) for leaf in before]
            reference.installed(install.shift, install.keep, install.dtypes, replaced)

        await self._in_turn(install.fragment_id, settle)

    async def _capture(self, p: int, copies: tuple[Leaf, ...]) -> None:
        assert self._core.settings is not None
        codec, reference = self._core.settings.codec, self._references[p]
        payload = await self._in_turn(p, lambda: reference.capture([placement.to_host(leaf) for leaf in copies], codec))
        self._handle(events.Captured(fragment_id=p, payload=payload))

    async def _prepare(self, action: events.Prepare) -> None:
        version, keep = action.version, action.keep
        p = version.fragment_id
        reference = self._references[p]

        def prepare() -> Install:
            sites = self._sites[p]
            dtypes = tuple(site.dtype for site in sites)
            shift = reference.shift(version.payload, keep, dtypes)
            return Install(
                fragment_id=p,
                fragment_version=version.fragment_version,
                keep=keep,
                placed=tuple(placement.place(shift, sites, keep)),
                shift=shift,
                dtypes=dtypes,
            )

        install = await self._in_turn(p, prepare)
        # The core first: the training thread may install it as soon as it can see it.
        self._catch_up()
        prepared = events.Prepared(fragment_id=p, fragment_version=version.fragment_version)
        self._perform(self._core.handle(prepared, self._clock()))
        self._offer(install)
        self._after()

    def _offer(self, install: Install) -> None:
        """Lets the training thread have a version; those of a recovery all at once.

        What is not finite spreads to every fragment with the next step. So the global parameters that replace a
        spoilt state wait for each other, and for a fresh optimizer.
        """
        if self._recovering and install.keep == 0:
            self._held[install.fragment_id] = install
            if len(self._held) < len(self._references):
                return
            batch = Batch(installs=tuple(self._held.values()), fresh_optimizer=True)
            self._held.clear()
            self._recovering = False
        else:
            batch = Batch(installs=(install,))
        self._exchange.ready.append(batch)
        ready = sum(fragment.newest >= 0 for fragment in self._core.fragments.values())
        self._exchange.doing = f"waiting for version 0: {ready} of {len(self._references)} fragments are here"
        self._exchange.news.set()

    async def _seed(self, fragment_id: int) -> None:
        """Encodes version 0 from this island's initial parameters."""
        core = self._core
        assert core.manifest is not None
        assert core.settings is not None
        tensors, seed = core.manifest.fragments[fragment_id], core.settings.seed

        def encode() -> Any:
            leaves = self._seed_leaves(seed)
            return encode_seed(
                tensors, [placement.to_host(x) for x in self._parameters.of_fragment(leaves, fragment_id)]
            )

        # All in turn: the first one makes the parameters.
        payload = await self._in_turn(-1, encode)
        self._handle(events.SeedEncoded(fragment_id=fragment_id, payload=payload))

    def _seed_leaves(self, seed: int) -> list[Leaf]:
        if self._init is not None:
            self._initial = self._parameters.leaves(self._init(seed))
            self._init = None
        leaves = self._initial
        if leaves is None:
            cure = "the run has lost version 0 after it began: start it again under another name"
            raise ConfigError("run", self._config.run_id, cure)
        return leaves

    def forget_initial(self) -> None:
        """Called by the training thread, which is about to train: the initial parameters may be donated now."""
        self._initial = None

    # --- checkpoints ------------------------------------------------------------------------------------------

    @property
    def checkpoint_file(self) -> Path | None:
        """This island's checkpoint, if it keeps one."""
        if self._config.state_dir is None:
            return None
        return checkpoint.file_of(self._config.state_dir, self._core.island_id)

    def _ask_for_snapshot(self, now_s: float) -> None:
        if self._config.state_dir is not None and not self._saving and now_s >= self._snapshot_at_s:
            self._snapshot_at_s = now_s + self._config.checkpoint_interval_s
            self._exchange.snapshot_wanted = True

    async def _save(self, moment: Moment) -> None:
        path, snapshot = self.checkpoint_file, moment.snapshot
        assert path is not None
        assert snapshot is not None
        names = [self._parameters.names[i] for i in self._parameters.local]
        try:
            nbytes = await self._loop.run_in_executor(
                self._inspector, checkpoint.save, path, snapshot, names, moment.at, self._core.incarnation
            )
            log.debug("checkpoint.saved", step=moment.at.step, bytes=nbytes)
        except Unavailable as err:
            log.warning("checkpoint.failed", detail=str(err), retry_s=self._config.checkpoint_interval_s)
        finally:
            self._saving = False

    def _spawn(self, work: Any) -> None:
        self._tasks.create_task(work)


class _Outbox:
    """Messages on their way to one connection, in order; a message that a newer one replaces is taken out."""

    def __init__(self) -> None:
        self._waiting: list[Envelope] = []
        self._more = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, Want | Heartbeat):  # the newest says it all
            self._waiting = [e for e in self._waiting if type(e.message) is not type(message)]
        elif isinstance(message, Contribution) and any(e.message is message for e in self._waiting):
            return
        self._waiting.append(envelope)
        self._more.set()
        self._empty.clear()

    async def next(self) -> Envelope:
        while not self._waiting:
            self._more.clear()
            await self._more.wait()
        return self._waiting.pop(0)

    def sent(self) -> None:
        if not self._waiting:
            self._empty.set()

    async def emptied(self, within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._empty.wait()


async def _raise(error: BaseException) -> None:
    raise error


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that is not itself a group: what went wrong, rather than how it was noticed."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
