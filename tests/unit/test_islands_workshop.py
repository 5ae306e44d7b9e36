"""What an island does beside training: which jobs may wait for which."""

import asyncio
import threading

import numpy as np

from broker import messages as m
from islands import checkpoint
from islands.exchange import Moment, Position, Snapshot
from islands.workshop import Workshop

WAIT_S = 40.0  # for what must happen; nothing here depends on how long it takes


def test_versions_are_looked_at_while_a_checkpoint_hangs(tmp_path, monkeypatch):
    """A disk that does not answer would keep versions from coming, and their connection from being believed."""
    begun, released = threading.Event(), threading.Event()

    def hang(*_):
        begun.set()
        assert released.wait(WAIT_S)
        return 1

    monkeypatch.setattr(checkpoint, "save", hang)
    workshop = Workshop({"w": np.zeros(3, np.float32)}, None)
    moment = Moment(at=Position(1, 1), snapshot=Snapshot(state=(), cursor=0, local=()))
    none = m.StatePart(state_id="", part=0, num_parts=0, state_bytes=0, payload=())
    envelope = m.Envelope(run_id="r", sender="b", incarnation=1, sequence=1, to="a", message=none)

    async def both():
        saving = asyncio.create_task(workshop.save(tmp_path / "c", moment, 1))
        try:
            assert await asyncio.to_thread(begun.wait, WAIT_S)
            assert await asyncio.wait_for(workshop.inspect_part(envelope), WAIT_S) == ""
            assert not saving.done()
        finally:
            released.set()
        assert await saving == 1

    asyncio.run(both())
    workshop.close()
