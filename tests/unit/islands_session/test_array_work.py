"""What an island does beside training: which jobs may wait for which."""

import asyncio
import threading

import numpy as np
import pytest

from broker.base.errors import Unavailable
from broker.wire import messages as m
from broker.wire.fragments import FragmentManifest, Kind, TensorSpec
from broker.wire.tensors import encode_tensor, fragment_digest
from islands.session import checkpoint
from islands.session.array_work import ArrayWork
from islands.session.exchange import Moment
from islands.session.training_state import Position, Snapshot

WAIT_S = 40.0  # for what must happen; nothing here depends on how long it takes


def test_versions_are_looked_at_while_a_checkpoint_hangs(tmp_path, monkeypatch):
    """A disk that does not answer would keep versions from coming, and their connection from being believed."""
    begun, released = threading.Event(), threading.Event()

    def hang(*_):
        begun.set()
        assert released.wait(WAIT_S)
        return 1

    monkeypatch.setattr(checkpoint, "save", hang)
    array_work = ArrayWork({"w": np.zeros(3, np.float32)}, None)
    moment = Moment(at=Position(1, 1), snapshot=Snapshot(state=(), cursor=0, local=()))
    none = m.StatePart(state_id="", part=0, num_parts=0, state_bytes=0, payload=())
    envelope = m.Envelope(run_id="r", sender="b", incarnation=1, sequence=1, to="a", message=none)

    async def both():
        saving = asyncio.create_task(array_work.save(tmp_path / "c", moment, 1))
        try:
            assert await asyncio.to_thread(begun.wait, WAIT_S)
            assert await asyncio.wait_for(array_work.inspect_part(envelope), WAIT_S) == ""
            assert not saving.done()
        finally:
            released.set()
        assert await saving == 1

    asyncio.run(both())
    array_work.close()


def test_a_checkpoint_that_was_begun_earlier_does_not_take_the_place_of_the_last_one(tmp_path, monkeypatch):
    """A slow device holds up the periodic one; then the process is told to end, and writes its last."""
    begun, released, packed = threading.Event(), threading.Event(), checkpoint.packed

    def hang_at_first(snapshot, names, at, *rest):
        if at.step == 1:
            begun.set()
            assert released.wait(WAIT_S)
        return packed(snapshot, names, at, *rest)

    monkeypatch.setattr(checkpoint, "packed", hang_at_first)
    path, snapshot = tmp_path / "c", Snapshot(state=(), cursor=None, local=())
    array_work = ArrayWork({"w": np.zeros(3, np.float32)}, None)

    async def both():
        saving = asyncio.create_task(array_work.save(path, Moment(at=Position(1, 1), snapshot=snapshot), 1))
        try:
            assert await asyncio.to_thread(begun.wait, WAIT_S)
            array_work.save_now(path, snapshot, Position(9, 9), 1, within_s=WAIT_S)
        finally:
            released.set()
        assert await saving == 0

    asyncio.run(both())
    array_work.close()
    assert checkpoint.load(path).at == Position(9, 9)
    assert list(tmp_path.iterdir()) == [path]


def test_what_changes_in_memory_is_told_by_each_job_that_would_use_it_and_ends_an_island_of_several_hosts():
    theta = np.arange(6, dtype=np.float32)
    array_work, version = ArrayWork({"w": theta}, None), (encode_tensor(theta, m.Codec.F32),)
    array_work.open(FragmentManifest(((TensorSpec(name="w", shape=(6,), dtype="float32", kind=Kind.RDA),),)))

    async def adopt(keep, beside=(), digest=""):
        install = await array_work.prepare(0, 1, version, keep, digest=digest)
        return install, await array_work.settle(install, beside)

    async def jobs():
        assert (await adopt(0.0, (theta,), fragment_digest(theta)))[1] == ""
        (reference,) = array_work._references
        reference.values[0] = reference.values[0] + np.float32(1)
        payload, _, flaw = await array_work.capture(0, (theta,), m.Codec.F32)
        assert (payload, flaw) == ((), "the reference of w changed in memory, in elements 0 to 5")
        install, settled = await adopt(1.0)
        assert (install.keep, install.flaw, settled) == (0.0, flaw, ""), "the version takes its place"
        assert (await adopt(0.0, (theta + np.float32(2),)))[1].startswith("w was not adopted as it came: element 0")
        install, _ = await adopt(0.0, (theta,), "another")
        assert install.flaw.endswith("was another")
        assert (await array_work.capture(0, (theta,), m.Codec.F32))[2] == ""
        array_work._several = True
        with pytest.raises(Unavailable, match="takes the run's parameters when its hosts are started again"):
            await adopt(0.0, (theta,), "another")

    asyncio.run(jobs())
    array_work.close()
