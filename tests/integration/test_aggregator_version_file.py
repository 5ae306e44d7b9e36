"""Durable versions that stay in their files: memory, damage, and a merge that uses them."""

import asyncio
import mmap
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregator.interface.events import Computed, Merge, MergeFailed, Persist, Plant, Publish
from aggregator.process.workers import Workers
from aggregator.store import version_file
from aggregator.store.commit_file import Damaged
from aggregator.store.layout import commit_path
from aggregator.store.store import Store
from aggregator.store.version_file import VersionFile, verified
from broker.wire.fragments import FragmentManifest
from broker.wire.messages import Codec
from broker.wire.tensors import encode_tensor
from tests.coroutines import in_a_loop
from tests.integration.test_aggregator_store import commit_of, state_of
from tests.unit.aggregator_merge.test_merge import part, random, spec

SIZE = 4_000_000  # elements: 16 MB an array


def committed(directory, size=1000):
    """Commits version 1, with a residual; returns its file and its arrays."""
    state = state_of(1, size)._replace(residual=random(size, 9))
    with Store.open(directory) as store:
        store.load()
        store.commit(commit_of(state), state)
    return commit_path(directory, 0, 1), state


def flip(path, place):
    """Another process writes to the file."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def mapped_bytes():
    """Resident memory of this process that is a version's file; libraries, too, come page by page."""
    found = re.findall(r"\.commit\nSize:[^\n]*(?:\n\w+:[^\n]*)*?\nRss:\s+(\d+)", Path("/proc/self/smaps").read_text())
    return 1024 * sum(map(int, found))


def same(state, expected):
    return all(np.array_equal(getattr(state, name), getattr(expected, name)) for name in state._fields)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_while_the_arrays_are_looked_at_and_no_longer(tmp_path):
    path, expected = committed(tmp_path, SIZE)
    nbytes = 3 * 4 * SIZE
    before = mapped_bytes()
    version = VersionFile(path)
    assert mapped_bytes() - before < nbytes / 10
    version.verify()
    assert mapped_bytes() - before > 0.9 * nbytes
    version.release()
    assert mapped_bytes() - before < nbytes / 10
    assert same(version.state, expected)
    del version
    assert mapped_bytes() - before < nbytes / 10


def test_a_version_lives_on_after_its_file_was_removed(tmp_path):
    path, expected = committed(tmp_path)
    version = verified(path)
    path.unlink()
    version.release()
    version.verify()
    assert same(version.state, expected)
    assert version.commit.fragment_version == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_loaded_keeps_no_file_of_an_old_version(tmp_path):
    """A run goes on for days with what it was loaded from; the disk would never get those files back."""
    committed(tmp_path)
    with Store.open(tmp_path) as store:
        loaded = store.load()
        assert loaded.fragments[0].fragment_version == 1
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", ["params", "momentum", "residual"])
def test_what_somebody_else_wrote_to_a_file_is_found(tmp_path, name):
    path, _ = committed(tmp_path)
    version = verified(path)
    end = path.stat().st_size - 4000 * (2 - ["params", "momentum", "residual"].index(name))
    flip(path, end - 100)
    with pytest.raises(Damaged, match=f"its {name} have digest"):
        version.verify()


def test_where_files_cannot_be_mapped_they_are_read(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError(19, "No such device")

    path, expected = committed(tmp_path)
    monkeypatch.setattr(version_file.mmap, "mmap", type("Refused", (mmap.mmap,), {"__new__": refused}))
    version = verified(path)
    path.unlink()
    assert same(version.state, expected)


class Desk:
    """Workers on a store, driven by hand: orders go in, completions come out."""

    def __init__(self, store):
        self.done = asyncio.Queue()
        self.tasks = []
        self.workers = Workers(store, store.load().fragments, deliver=self.done.put, spawn=self.spawn, recorder=None)
        self.workers.manifest = FragmentManifest(((spec((SIZE,)),), (spec((SIZE,), name="y"),)))

    async def plant(self, fragment_id):
        """Makes version 0 of a fragment."""
        self.workers.plant(Plant(fragment_id=fragment_id, payload=part(random(SIZE, fragment_id)).payload))
        await self.durable(0, fragment_id)

    def spawn(self, work):
        self.tasks.append(asyncio.ensure_future(work))

    async def durable(self, version, fragment_id=0):
        """Has what was computed written, and settles it; returns the resident memory of files before it was."""
        computed = await self.done.get()
        mapped = mapped_bytes() if sys.platform == "linux" else 0
        commit = commit_of(state_of(version), fragment_id, digest=computed.digest)
        self.workers.persist(Persist(commit=commit))
        assert (await self.done.get()).fragment_version == version
        self.workers.versions[fragment_id].settle(version)
        await asyncio.gather(*self.tasks)
        self.tasks.clear()
        return mapped


def merge_of(version):
    parts = (part(random(SIZE, version), codec=Codec.BF16),)
    return Merge(
        round_id=version,
        fragment_id=0,
        fragment_version=version,
        parts=parts,
        outer_rule=(1.0, 0.0),
        version_codec=Codec.BF16,
    )


@in_a_loop
async def test_a_merge_uses_the_file_of_the_version_before_and_refuses_one_that_was_changed(tmp_path):
    with Store.open(tmp_path) as store:
        desk = Desk(store)
        try:
            await desk.plant(0)
            await desk.plant(1)
            before = mapped_bytes() if sys.platform == "linux" else 0
            desk.workers.versions[1].durable.state.params.max()  # as it is read to be sent whole
            desk.workers.merge(merge_of(1))
            assert await desk.durable(1) - before < 4 * SIZE, "what is looked at takes memory no longer than that"
            durable = desk.workers.versions[0].durable
            assert durable.state.params.base is not None, "the arrays are views of the file"
            assert not durable.state.params.flags.writeable
            digest = durable.commit.digest
            published = Publish(fragment_id=0, fragment_version=1, digest=digest, contributions=(), base=0)
            (step,) = desk.workers.payload(published)()
            assert step.codec is Codec.BF16
            with pytest.raises(AssertionError, match="not made"):
                desk.workers.payload(published)  # a difference is handed out once
            path = commit_path(tmp_path, 0, 1)
            flip(path, path.stat().st_size - 100)
            desk.workers.merge(merge_of(2))
            failed = await desk.done.get()
            assert isinstance(failed, MergeFailed)
            assert re.search(
                r"00000001\.commit is damaged: its residual have digest .*; restore it from", failed.detail
            )
            with pytest.raises(Damaged):  # nor is it sent to a standby, or again to a broker
                desk.workers.versions[0].read(durable.commit)()
            desk.workers.merge(merge_of(2))  # what only stores have begins anew
            assert isinstance(await desk.done.get(), Computed)
            assert not desk.workers.versions[0].durable.state.residual.any()
            assert desk.workers.versions[0].durable.state.momentum.any()
        finally:
            await desk.workers.close()


@in_a_loop
async def test_a_version_that_has_lost_bytes_gets_them_back_from_what_a_broker_holds(tmp_path):
    with Store.open(tmp_path) as store:
        desk = Desk(store)
        try:
            await desk.plant(0)
            params = desk.workers.versions[0].durable.state.params.copy()
            flip(commit_path(tmp_path, 0, 0), commit_path(tmp_path, 0, 0).stat().st_size - 4 * SIZE - 100)
            for given_back in (None, (encode_tensor(params + 1, Codec.F32),)):  # other bytes are not taken
                desk.workers.merge(replace(merge_of(1), given_back=given_back))
                assert "its params have digest" in (await desk.done.get()).detail
            desk.workers.merge(replace(merge_of(1), given_back=(encode_tensor(params, Codec.F32),)))
            assert isinstance(await desk.done.get(), Computed)
            assert np.array_equal(verified(commit_path(tmp_path, 0, 0)).state.params, params)
        finally:
            await desk.workers.close()
