"""Worker threads of the aggregator: one for merges, some for pieces, one for the disk.

Shell. Every order of the core ends in an event, while the loop goes on answering heartbeats. The bytes that orders make
have an owner for each fragment (:mod:`aggregator.process.version_bytes`). All bookkeeping happens on the event loop;
the threads compute from what they are given and return what they made.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from aggregator.interface.events import (
    Commit,
    Event,
    FilesKept,
    KeepFiles,
    Merge,
    MergeFailed,
    Persist,
    Persisted,
    PersistFailed,
    Plant,
    Publish,
    RunSaved,
    RunSaveFailed,
    SaveRun,
)
from aggregator.merge import versions
from aggregator.merge.fragment_state import FragmentState, Made
from aggregator.merge.passes import warm_up
from aggregator.merge.pieces import vector
from aggregator.merge.resources import Resources
from aggregator.process.version_bytes import VersionBytes
from aggregator.store.recording import Recorder
from aggregator.store.store import Store
from aggregator.store.version_file import VersionFile
from broker.base.errors import ConfigError, Unavailable, cure_of
from broker.chunks.memory import ReusedMemory
from broker.process import clocks, logs, model_folder
from broker.wire.fragments import FragmentManifest, TensorSpec
from broker.wire.messages import Encoded, Payload
from broker.wire.small_files import digest_of, joined, pack

log = logs.get(__name__)

P = ParamSpec("P")
R = TypeVar("R")

Deliver = Callable[[Event], Awaitable[None]]
Spawn = Callable[[Coroutine[Any, Any, None]], None]

#: Threads that merge. Eight read faster than the memory of most machines can follow.
MOST_THREADS = 8
#: Vectors of a fragment that are kept for the next merge: half of its time would go into new memory.
SPARE_VECTORS = 3


def load_kernels_early() -> None:
    """Begins to load the kernels in a thread; the first island takes longer to start than that.

    What goes wrong is said where they are needed (:meth:`Workers.warm_up`).
    """

    def load() -> None:
        with contextlib.suppress(Exception):
            warm_up()

    asyncio.get_running_loop().run_in_executor(None, load)


class Workers:
    """Carries out Plant, Merge, Persist, SaveRun and KeepFiles.

    An order reports back only while it is the newest one of its fragment.

    Args:
        store: Loaded; the caller closes it after :meth:`close`.
        durable: Fragments that have a version in the store.
        deliver: Takes the completions.
        spawn: Starts a task; an error that leaves it must end the process.
        recorder: Keeps merged payloads; None to keep none.

    Attributes:
        versions: What each fragment has, by id.
    """

    def __init__(
        self,
        store: Store,
        durable: Iterable[int],
        *,
        deliver: Deliver,
        spawn: Spawn,
        recorder: Recorder | None,
    ) -> None:
        self.versions = defaultdict[int, VersionBytes](VersionBytes)
        self.versions |= {p: VersionBytes(store.newest_file(p)) for p in durable}
        self.manifest: FragmentManifest | None = None
        self._store = store
        self._deliver = deliver
        self._spawn = spawn
        self._recorder = recorder
        self._unsaved: SaveRun | None = None
        self._saving = False
        self._compute = ThreadPoolExecutor(1, "compute")
        # That one waits meanwhile. They sleep between merges, where those of a numeric library would spin.
        self._pieces = ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "pieces")
        self._resources = Resources(self._spread, ReusedMemory(SPARE_VECTORS).floats)
        self._disk = ThreadPoolExecutor(1, "disk")

    async def warm_up(self) -> None:
        """Loads the kernels of merges in the computing thread: the first round would take seconds otherwise."""
        await _in(self._compute, warm_up)

    async def close(self) -> None:
        """Waits for what the threads are at; what was queued behind it is dropped, as by a crash.

        The tasks that gave it to them must have been cancelled.
        """
        for each in (self._compute, self._disk):
            await ended(each)
        self._pieces.shutdown()

    def payload(self, action: Publish) -> Callable[[], tuple[Encoded, ...]]:
        """Returns what reads the payload of a version to publish, in a thread."""
        return self.versions[action.fragment_id].payload(action, self._tensors(action.fragment_id))

    # --- orders -------------------------------------------------------------------------------------------------

    def plant(self, action: Plant) -> None:
        """Makes version 0 of a fragment."""
        self.versions[action.fragment_id].order = action
        self._spawn(self._plant(action))

    def merge(self, action: Merge) -> None:
        """Makes the next version of a fragment."""
        self.versions[action.fragment_id].order = action
        self._spawn(self._merge(action))

    def persist(self, action: Persist) -> None:
        """Makes the pending version of a fragment durable."""
        self.versions[action.commit.fragment_id].order = action
        self._spawn(self._persist(action))

    def save_run(self, action: SaveRun) -> None:
        """Replaces the run record, one write at a time: of those that wait, only the newest is kept."""
        self._unsaved = action
        if not self._saving:
            self._saving = True
            self._spawn(self._save_runs())

    def keep_files(self, action: KeepFiles) -> None:
        """Writes the small files of the model beside the versions."""
        self._spawn(self._keep_files(action))

    async def look_at_files(self) -> None:
        """Says which small files of a model are there, if any: at the start of a life."""
        try:
            found = await _in(self._disk, self._packed_now)
        except (OSError, ConfigError) as err:
            log.warning("files.unreadable", detail=str(err), cure="an island is asked for them again")
            return
        if found:
            await self._deliver(FilesKept(digest=digest_of(found)))

    # --- tasks --------------------------------------------------------------------------------------------------

    async def _plant(self, action: Plant) -> None:
        # Not in the computing thread: it may be compiling still, and every island waits for version 0.
        made = await _in(self._disk, versions.plant, self._tensors(action.fragment_id), action)
        await self._computed(action, made)

    async def _merge(self, action: Merge) -> None:
        p, fragment = action.fragment_id, self.versions[action.fragment_id]
        assert fragment.durable is not None, "a merge goes on from a durable version"
        try:
            if fragment.spoilt:
                fragment.durable = await _in(self._disk, self._mended_now, fragment.durable, action.given_back)
            made = await _in(self._compute, self._merge_now, self._tensors(p), action, fragment.durable)
        except Unavailable as err:
            fragment.spoilt = True
            failed = MergeFailed(fragment_id=p, fragment_version=action.fragment_version, detail=str(err))
            if fragment.order is action:
                await self._deliver(failed)
            return
        fragment.spoilt = False
        await self._computed(action, made)

    def _mended_now(self, durable: VersionFile, given_back: Payload | None) -> VersionFile:
        """Returns a version that had lost bytes, as it is on disk now, or with those of a broker."""
        with contextlib.suppress(Unavailable):
            again = self._store.newest_file(durable.commit.fragment_id)
            durable = again if again.commit == durable.commit else durable
        state = durable.mended(durable.state.params if given_back is None else vector(given_back))
        lost = [name for name in ("momentum", "residual") if getattr(state, name) is not getattr(durable.state, name)]
        log.warning("version.written_again", fragment=durable.commit.fragment_id, version=state.version, zeroed=lost)
        return self._store.mend(durable.commit, state)

    def _merge_now(self, tensors: tuple[TensorSpec, ...], action: Merge, durable: VersionFile) -> Made:
        """Merges, in the computing thread."""
        began_s = clocks.monotonic()
        for each in tuple(self.versions.values()):
            each.release()  # what was read of it to be sent
        durable.verify()
        before, kept = durable.state, self._recorder is not None
        made, merged = versions.merge(tensors, action, before, kept=kept, resources=self._resources)
        log.debug(
            "round.merged",
            round=action.round_id,
            fragment=action.fragment_id,
            norm=merged.norm,
            mean_norm=merged.mean_norm,
            took_s=clocks.monotonic() - began_s,
        )
        if self._recorder is not None:
            decided = replace(action, parts=action.final_parts(made.cosines))
            self._recorder.record(decided, before, merged, made.state)
        durable.release()
        return made

    def _spread(self, call: Callable[[int], int], count: int) -> Iterable[int]:
        """Runs the pieces of a merge in threads; their kernels hold no lock of the interpreter."""
        return map(call, range(count)) if count < 2 else self._pieces.map(call, range(count))

    async def _computed(self, action: Plant | Merge, made: Made) -> None:
        fragment = self.versions[action.fragment_id]
        if fragment.order is action:
            fragment.made = made
            await self._deliver(made.reported(action.fragment_id))

    def _packed_now(self) -> bytes:
        folder = self._store.model_folder
        return pack(model_folder.read(folder)) if folder.is_dir() else b""

    async def _keep_files(self, action: KeepFiles) -> None:
        packed = joined(action.parts, action.num_bytes)
        digest = digest_of(packed)
        detail = f"their digest is {digest}, not {action.digest}" if digest != action.digest else ""
        try:
            if not detail:
                await _in(self._disk, model_folder.write, self._store.model_folder, packed)
        except ValueError as err:
            detail = f"the model {err}"
        except OSError as err:
            detail = f"cannot write {self._store.model_folder} ({err.strerror}): {cure_of(err)}"
        await self._deliver(FilesKept(digest=digest, detail=detail))

    async def _persist(self, action: Persist) -> None:
        commit, fragment = action.commit, self.versions[action.commit.fragment_id]
        p, version = commit.fragment_id, commit.fragment_version
        done: Persisted | PersistFailed
        try:
            written = await _in(self._disk, self._commit_now, commit, fragment.to_write(commit))
            if fragment.order is action:
                fragment.written = written
            done = Persisted(fragment_id=p, fragment_version=version)
        except Unavailable as err:
            done = PersistFailed(fragment_id=p, fragment_version=version, detail=str(err))
        if fragment.order is action:
            await self._deliver(done)
        if isinstance(done, Persisted):
            await _in(self._disk, self._store.prune, p)

    def _commit_now(self, commit: Commit, state: FragmentState) -> VersionFile:
        """Writes a commit, in the thread of the disk."""
        self._store.commit(commit, state, prune=False)
        return self._store.newest_file(commit.fragment_id)

    async def _save_runs(self) -> None:
        while self._unsaved is not None:
            action, self._unsaved = self._unsaved, None
            done: RunSaved | RunSaveFailed
            try:
                await _in(self._disk, self._store.save_run, action.record)
                done = RunSaved(serial=action.serial)
            except Unavailable as err:
                done = RunSaveFailed(serial=action.serial, detail=str(err))
            await self._deliver(done)
        self._saving = False

    def _tensors(self, fragment_id: int) -> tuple[TensorSpec, ...]:
        assert self.manifest is not None, "an order came before the manifest"
        return self.manifest.fragments[fragment_id]


async def _in(executor: ThreadPoolExecutor, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls in a thread of ``executor``."""
    return await asyncio.get_running_loop().run_in_executor(executor, partial(call, *args, **kwargs))


async def ended(executor: ThreadPoolExecutor) -> None:
    """Ends a thread once it has done what it is at; its loop goes on meanwhile."""
    await asyncio.get_running_loop().run_in_executor(executor, lambda: None)  # behind all that is still wanted
    executor.shutdown()
