"""Checkpoints of an island on a real disk: whole, damaged, of another model, and when there is no room."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from broker.base.errors import Unavailable
from islands.session import checkpoint
from islands.session.training_state import Position, Snapshot
from tests.unit.islands_session.test_states_as_they_come import assert_same

AT = Position(120, 5000)


def state_of(value=1.0):
    params = {"w": jnp.full((3, 2), value), "b": jnp.full(2, value, jnp.bfloat16)}
    adam = optax.adam(1e-3)
    opt_state = adam.update(params, adam.init(params), params)[1]
    return {"adam": opt_state, "key": jax.random.key(int(value)), "scale": value, "host": np.arange(3)}


def save(path, state, local=()):
    snapshot = Snapshot(state=checkpoint.copied(state), cursor=77, local=tuple(local))
    names = [f"local/{i}" for i in range(len(local))]
    return checkpoint.save(path, snapshot, names, AT, 4, checkpoint.Newest())


def test_an_optimizer_state_with_keys_numbers_and_bfloat16_comes_back_as_it_was(tmp_path):
    path = checkpoint.file_of(tmp_path / "new" / "folder", "island-3")
    state = state_of(2.0)
    stats = np.full(4, 3, ml_dtypes.bfloat16)
    assert save(path, state, [stats]) == path.stat().st_size
    found = checkpoint.load(path)
    assert (found.incarnation, found.at, found.cursor) == (4, AT, 77)
    fresh = state_of(1.0)
    assert checkpoint.misfit(found.state, checkpoint.leaves_of(fresh)) == ""
    assert_same(checkpoint.restored(fresh, found.state), state)
    assert checkpoint.misfit(found.local, [("local/0", stats)]) == ""
    assert [entry.name for entry in path.parent.iterdir()] == ["island-3.checkpoint"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:-1], "is cut off or changed"),
        (lambda data: data[:12], "does not begin as a checkpoint does"),
        (lambda data: b"", "does not begin as a checkpoint does"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "is cut off"),
        (lambda data: data[:-3] + b"\x01" + data[-2:], "m is cut off or changed"),
        (lambda data: data[:16] + b"\xc1" * 8 + data[24:], "its header is changed"),
        (lambda data: data[:40] + b"\xc1" + data[41:], "its header is changed"),
    ],
)
def test_a_damaged_file_is_refused_with_words(tmp_path, damage, says):
    path = tmp_path / "c"
    save(path, {"m": np.zeros(30, np.float32)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Unavailable, match=says):
        checkpoint.load(path)


def test_a_failed_write_leaves_the_old_checkpoint_and_says_what_to_do(tmp_path, monkeypatch):
    path = tmp_path / "c"
    save(path, {"m": np.zeros(3, np.float32)})
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("islands.session.checkpoint.os.fsync", full)
    with pytest.raises(Unavailable, match=r"No space left on device\): free space"):
        save(path, {"m": np.ones(3, np.float32)})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_what_lives_that_were_killed_while_saving_had_written_goes(tmp_path):
    path = tmp_path / "island-0.checkpoint"
    for name in ("11-3", "12-140234", f"{os.getpid()}-140234"):  # in a container each life has the same number
        path.with_name(f".{path.name}.{name}.tmp").write_bytes(b"half")
    other = path.with_name(".island-1.checkpoint.11.tmp")
    other.write_bytes(b"of another island")
    save(path, state_of())
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_the_end_of_a_process_waits_for_no_disk_that_hangs(tmp_path):
    code = """
import asyncio, threading
from pathlib import Path
import numpy as np
from islands.session import checkpoint, workers
from islands.session.exchange import Moment, Position, Snapshot
from islands.session.array_work import ArrayWork

workers.END_WITHIN_S = 0.1
begun = threading.Event()

def hang(*_):
    begun.set()
    threading.Event().wait()

checkpoint.save = hang
array_work = ArrayWork({"w": np.zeros(3, np.float32)}, None)
moment = Moment(at=Position(1, 1), snapshot=Snapshot(state=(), cursor=0, local=()))

async def main():
    saving = asyncio.create_task(array_work.save(Path("c"), moment, 1))
    await asyncio.to_thread(begun.wait)
    saving.cancel()

asyncio.run(main())
array_work.close()
print("left")
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("left\n", "")
