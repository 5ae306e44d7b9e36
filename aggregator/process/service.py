"""One aggregator process, from its store to the end of the run. Shell.

Without failover it leads (:mod:`aggregator.process.leader`) until the end. With failover it leads for one term at a
time (:mod:`aggregator.process.lease`), and follows between its terms (:mod:`aggregator.process.follower`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from enum import Enum, auto
from threading import get_native_id
from typing import Any

from aggregator.copies.bucket import Bucket
from aggregator.copies.copier import LAST_AFTER_END_S, LAST_AFTER_STOP_S, Copier
from aggregator.interface.config import AggregatorConfig
from aggregator.process.follower import Follower
from aggregator.process.leader import Leader
from aggregator.process.lease import LeaseKey, Term
from aggregator.process.workers import load_kernels_early
from aggregator.rounds.core import Aggregator
from aggregator.state.metrics import AggregatorSnapshot, families_of
from aggregator.state.run_settings import settled
from aggregator.store.layout import read_run
from aggregator.store.rotation import Aside
from aggregator.store.store import Loaded, Store, newer_but_damaged
from aggregator.store.tape import Tape
from broker.base.errors import ConfigError, Unavailable, first_of
from broker.base.settings import build
from broker.gateway.config import DEFAULT_REDIS_URL
from broker.metrics.family import Family
from broker.metrics.serving import served
from broker.process import clocks, logs
from broker.process.limits import memory_bytes
from broker.registry.registry import Registry
from broker.transport.sockets import Context
from broker.wire.messages import Phase

log = logs.get(__name__)

#: Of the thread that compresses what is closed.
NICE = 10


def load_for(store: Store, config: AggregatorConfig, *, mendable: bool = False) -> Loaded:
    """Returns the store's content, if this run can go on from it, or (``mendable``) a leader can mend it.

    Raises:
        ConfigError: It belongs to another run, or to another shard of it.
        Unavailable: It is damaged beyond what a restart may pass over.
    """
    loaded = store.load()
    for damaged in loaded.damaged:
        log.error("store.damaged", path=str(damaged.path), problem=damaged.problem)
    if loaded.run is None:
        return loaded
    if loaded.run["run_id"] != config.run_id:
        cure = f"holds the run {loaded.run['run_id']!r}: give --run {loaded.run['run_id']}, or another --store"
        raise ConfigError("store", str(config.store), cure)
    shard, shards = loaded.run.get("shard", (config.shard, config.shards))  # which older stores do not say
    if loaded.run.get("manifest") is not None and (shard, shards) != (config.shard, config.shards):
        # Its fragments would not be all that this shard has, and so count as never begun.
        cure = f"is that of shard {shard} of {shards}: give --shard {shard} --shards {shards}, or another --store"
        raise ConfigError("store", str(config.store), cure)
    if mendable:
        return loaded
    given_up: dict[int, int] = {}
    for p, damaged in newer_but_damaged(loaded):
        # Islands may have seen it. Made again with other bytes, it would part them from this run for good.
        if config.new_lineage:
            given_up[p] = max(int(damaged.path.stem), given_up.get(p, -1))
            continue
        kept = loaded.fragments[p].fragment_version
        cure = (
            f"is damaged ({damaged.problem}): restore it from a copy, such as a standby's; or give up what is in "
            f"it and go on from version {kept}, with --new-lineage"
        )
        raise ConfigError("store", str(damaged.path), cure)
    lost = {int(damaged.path.parent.name) for damaged in loaded.damaged} - set(loaded.fragments)
    if lost:
        # Seeding anew over versions that islands have seen would be another run under the same name.
        which = ", ".join(map(str, sorted(lost)))
        what = f"the store {config.store} holds no whole version of fragment {which}"
        raise Unavailable(f"{what}; restore it from a copy, or start a new run with another --store", definite=True)
    if given_up:  # also where no peer has seen it: who could tell?
        store.begin_lineage(given_up, loaded.run["epoch"] + 1)
        log.warning("store.new_lineage", above=str(given_up), epoch=loaded.run["epoch"] + 1)
        return store.load()
    return loaded


def set_aside() -> Aside:
    """Returns what has a call made, in its turn, by a thread that lets all others go first."""
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(1, "aside", _give_way)
    return lambda call: loop.call_soon_threadsafe(loop.run_in_executor, pool, call)


def _give_way() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, get_native_id(), NICE)


class Ending(Enum):
    """Why an aggregator does not go on."""

    OVER = auto()  # the run is
    STOPPED = auto()
    DEPOSED = auto()  # another one leads


class _Service:
    """The process, once its store is open: it leads, or leads and follows in turn.

    Args:
        given: Settings by name, without those that the run of the store has.
        config: All of them.
        context: For sockets.
        store: Open.
        tape: If the process keeps one.
        stop: Ends it.
        ready: Called with each core that is about to lead.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        config: AggregatorConfig,
        context: Context,
        store: Store,
        tape: Tape | None,
        stop: asyncio.Event,
        ready: Callable[[Aggregator], None],
    ) -> None:
        self._given, self._config, self._context = given, config, context
        self._store, self._tape, self._stop, self._ready = store, tape, stop, ready
        self._leader: Leader | None = None  # while this process leads

    # --- metrics --------------------------------------------------------------------------------------------------

    def snapshot(self) -> AggregatorSnapshot:
        """Returns the figures of the moment."""
        leading = None if self._leader is None else self._leader.leading()
        return AggregatorSnapshot(
            run_id=self._config.run_id, shard=self._config.shard, leading=leading, wall_s=clocks.wall()
        )

    def families_of(self, snapshot: AggregatorSnapshot) -> list[Family]:
        """Returns them as metrics, with the space on the disk: asked for here, since a disk may hang."""
        try:
            disk = os.statvfs(self._config.store)
        except OSError:
            return families_of(snapshot)
        free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        return families_of(replace(snapshot, store_free_bytes=free, store_size_bytes=size))

    # --- its course -----------------------------------------------------------------------------------------------

    async def run(self, loaded: Loaded) -> Ending:
        """Leads, or follows until it may lead, from what the store holds."""
        if not self._config.failover:
            return await self._lead(loaded, None)
        while True:
            term = await self._follow(loaded)
            if isinstance(term, Ending):
                return term
            async with term:
                loaded = load_for(self._store, self._config)
                self._config = settled(self._given, loaded.run)  # of the run that it has followed
                ending = await self._lead(loaded, term)
            if ending is not Ending.DEPOSED:
                return ending
            loaded = load_for(self._store, self._config, mendable=True)

    def _registry(self) -> Registry:
        return Registry(self._config.redis_url or DEFAULT_REDIS_URL, self._config.run_id)

    async def _follow(self, loaded: Loaded) -> Term | Ending:
        """Stands by until this process may lead, or it is stopped, or the run has ended."""
        config, store, registry = self._config, self._store, self._registry()
        lease = LeaseKey(registry, config.shard)
        follower = Follower(config, self._given, self._context, store, loaded, lease)
        log.info(
            "aggregator.stands_by", run=config.run_id, broker=config.broker, name=store.name, redis=registry.address
        )
        lead = None
        try:
            lead = await follower.run(self._stop)
        finally:
            if lead is None:
                await registry.aclose()
        if lead is None:
            return Ending.OVER if follower.ended else Ending.STOPPED
        return Term(store.name, lead, registry, config.shard)

    async def _lead(self, loaded: Loaded, term: Term | None, *, least_epoch: int = 1) -> Ending:
        """Leads until the run has ended, or it is stopped or deposed."""
        config, store, registry = self._config, self._store, self._registry()
        leader = Leader(config, self._context, store, loaded, self._tape, registry, term, least_epoch=least_epoch)
        epoch = leader.core.run.epoch
        log.info(
            "aggregator.ready",
            run=config.run_id,
            broker=config.broker,
            store=str(config.store),
            epoch=epoch,
            redis=registry.address,
        )
        copier = Copier.of(config, name=store.name, epoch=epoch)
        if copier is not None:
            leader.report_too(copier.troubles)
        self._ready(leader.core)
        self._leader = leader
        try:
            try:
                await leader.run(self._stop)
            finally:
                self._leader = None
                await leader.close()
            if copier is not None and leader.lineage is None and leader.deposed is None:
                await _copy_last(copier, leader)
        finally:
            if copier is not None:
                copier.abandon()  # unless it has ended
            await registry.aclose()
        if leader.lineage is not None:
            order = leader.lineage
            store.begin_lineage(order.above, order.epoch)
            log.warning("store.new_lineage", above=str(dict(order.above)), epoch=order.epoch)
            return await self._lead(load_for(store, config), term, least_epoch=order.epoch)
        if leader.deposed is None:
            log.info("aggregator.ended", run=config.run_id, phase=leader.core.run.phase)
            return Ending.OVER if leader.core.run.phase is Phase.ENDED else Ending.STOPPED
        log.warning("aggregator.deposed", epoch=epoch, by=leader.deposed.holder, their_epoch=leader.deposed.epoch)
        return Ending.DEPOSED


async def serve(
    given: Mapping[str, Any],
    *,
    stop: asyncio.Event,
    ready: Callable[[Aggregator], None] = lambda _: None,
    context: Context | None = None,
) -> Ending:
    """Runs the aggregator until the run ends or ``stop`` is set; writes the report, returns the ending.

    Args:
        given: Settings of :class:`~aggregator.interface.config.AggregatorConfig` by name; the run of the store has the
            others.
        stop: Ends the aggregator within about a second, wherever the run stands.
        ready: Called once with the core, when the store is loaded; for tests to look at.
        context: For sockets; ended here if it is made here.

    Raises:
        ConfigError: A setting cannot work, such as a store that belongs to another run, or is not that of its run.
        Unavailable: The store cannot be used.
    """
    given = {**given, "memory_bytes": given.get("memory_bytes") or memory_bytes()}
    directory = build(AggregatorConfig, {name: value for name, value in given.items() if name == "store"}).store
    config = settled(given, read_run(directory))
    if config.copy_to:
        Bucket.open(config.copy_to)  # a standby must not find out when it is to lead
    load_kernels_early()
    aside = set_aside()
    with ExitStack() as stack:
        tape = None
        if config.tape is not None:
            tape = Tape(config.tape, round(config.tape_segment_mb * 1e6), config.tape_segments, aside)
            stack.callback(tape.close)
        store = stack.enter_context(
            Store.open(
                config.store,
                keep=config.keep_versions,
                keep_every=config.keep_every,
                segment_bytes=config.ledger_segment_bytes,
                segments=config.tape_segments,
                aside=aside,
            )
        )
        loaded = load_for(store, config, mendable=config.failover)
        if context is None:
            context = Context()
            stack.callback(context.term)
        service = _Service(given, config, context, store, tape, stop, ready)
        try:
            async with served(config.metrics_host, config.metrics_port, service.snapshot, service.families_of):
                return await service.run(loaded)
        except BaseExceptionGroup as group:
            # A task met something that somebody must put right: that is what is to be said, not which task it was.
            curable = group.subgroup((ConfigError, Unavailable))
            if curable is None:
                raise
            raise first_of(curable) from group


async def _copy_last(copier: Copier, leader: Leader) -> None:
    """Makes one last copy; report and status say that it is waited for, and then what came of it."""
    copier.begin_last(LAST_AFTER_END_S if leader.core.run.phase is Phase.ENDED else LAST_AFTER_STOP_S)
    await leader.report()
    await asyncio.to_thread(copier.finish)
    await leader.report()
