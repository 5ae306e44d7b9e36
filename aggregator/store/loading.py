"""Loads a store, and checks that it is whole and of this run and shard. Shell."""

from __future__ import annotations

from aggregator.config import AggregatorConfig
from aggregator.store.store import Loaded, Store, newer_but_damaged
from broker.process import logs
from broker.wire.errors import ConfigError, Unavailable

log = logs.get(__name__)


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
    lost = {int(d.path.parent.name) for d in loaded.damaged if d.path.parent.name.isdecimal()} - set(loaded.fragments)
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
