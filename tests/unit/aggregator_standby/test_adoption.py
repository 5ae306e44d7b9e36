"""What a standby makes of a leader's commits: as messages and back, and in its store."""

import contextlib
import dataclasses
import json
import os
import pathlib
import stat
from unittest.mock import Mock

import msgpack
import numpy as np
import pytest

from aggregator.standby.replicas import commit_of, payload_of, record_of, replica_of, run_message
from aggregator.store.layout import versions
from aggregator.store.ledger_file import LedgerFile
from aggregator.store.store import Store
from broker.base.errors import LocalProtocolError, RemoteProtocolError, Unavailable
from broker.wire.frames import decode, encode
from broker.wire.headers import Limits
from broker.wire.messages import AGGREGATOR, Codec, Envelope, standing_by
from broker.wire.tensors import encode_tensor
from tests.integration.test_aggregator_store import commit_of as fragment_commit
from tests.integration.test_aggregator_store import state_of

LIMITS = Limits(max_header_bytes=1 << 20, max_message_bytes=1 << 24)


def made(version, seed=0, size=64):
    """A commit of fragment 0 with its arrays; another seed makes other bytes."""
    state = state_of(version, size, seed)
    return fragment_commit(state, epoch=1 + seed, round_id=10 * version + seed), state


def envelope_of(message):
    return Envelope(run_id="demo", sender=AGGREGATOR, incarnation=0, sequence=1, to=standing_by("b"), message=message)


def over_the_wire(message):
    return decode([bytes(frame) for frame in encode(envelope_of(message))], LIMITS).message


@pytest.mark.parametrize("rounded", [False, True], ids=["exact", "rounded, with a residual"])
@pytest.mark.parametrize("size", [64, 1, 0])
def test_a_commit_comes_through_the_wire_as_it_was_bit_for_bit(size, rounded):
    commit, state = made(3, size=size)
    if rounded:
        state = state._replace(residual=state.momentum[::-1].copy())
    there, arrays = commit_of(over_the_wire(replica_of(commit, 0, 5, payload_of(state))))
    assert (there, arrays.version) == (commit, 3)
    assert arrays.params.tobytes() == state.params.tobytes()
    assert arrays.momentum.tobytes() == state.momentum.tobytes()
    assert (arrays.residual is not None) is rounded
    if rounded:
        assert arrays.residual.tobytes() == state.residual.tobytes()


def test_a_run_record_comes_through_the_wire_as_it_was():
    record = {"run_id": "demo", "epoch": 5, "manifest": None, "members": {"a": [0, "", 1, "n", 64, False, [0, 0]]}}
    assert record_of(over_the_wire(run_message(record, 0, 5, 9))) == record


COMMIT, STATE = made(3)
REPLICA = replica_of(COMMIT, 0, 5, payload_of(STATE))


def vector(*values):
    return encode_tensor(np.array(values, np.float32), Codec.F32)


@pytest.mark.parametrize(
    "changes",
    [
        {"fragment_version": 4},
        {"fragment_id": 1},
        {"round_id": 1},
        {"digest": "0" * 16},
        *({"commit": packed} for packed in (b"", b"\xc1", *map(msgpack.packb, (7, [1, 2], {"fragment_id": 0})))),
        {"payload": ()},
        {"payload": (vector(1, 2), vector(1, 2))},
        {"payload": REPLICA.payload[:1]},
        {"payload": (*REPLICA.payload, vector(1.0))},
        {"payload": (*REPLICA.payload, *REPLICA.payload)},
        {"payload": (REPLICA.payload[0], vector(1.0))},
        {"payload": tuple(encode_tensor(np.ones(64, np.float32), Codec.BF16) for _ in range(2))},
    ],
)
def test_a_replica_that_is_not_what_the_leader_committed_is_refused(changes):
    with pytest.raises(RemoteProtocolError):
        commit_of(dataclasses.replace(REPLICA, **changes))


@pytest.mark.parametrize("buffer", [1, 2], ids=["parameters", "momentum"])
def test_a_replica_with_a_flipped_bit_is_refused(buffer):
    frames = [bytearray(frame) for frame in encode(envelope_of(REPLICA))]
    frames[buffer][10] ^= 1
    with pytest.raises(RemoteProtocolError):
        commit_of(decode([bytes(frame) for frame in frames], LIMITS).message)


@pytest.mark.parametrize("record", [b"", b"\xc1", msgpack.packb(3), msgpack.packb([]), msgpack.packb({"epoch": 4})])
def test_a_run_record_that_is_none_or_of_another_epoch_is_refused(record):
    message = dataclasses.replace(run_message({"epoch": 5}, 0, 5, 1), record=record)
    with pytest.raises(RemoteProtocolError):
        record_of(message)


@pytest.fixture
def store(tmp_path):
    """Versions 0 to 3 of fragment 0."""
    with Store.open(tmp_path / "store") as opened:
        opened.load()
        for version in range(4):
            opened.commit(*made(version))
        yield opened


def reopened(tmp_path):
    with Store.open(tmp_path / "store") as opened:
        return opened.load()


def history(tmp_path):
    lines = (tmp_path / "store" / "ledger.jsonl").read_text().splitlines()
    return [(row["fragment_version"], row["digest"]) for row in map(json.loads, lines)]


def digest(version, seed=0):
    return made(version, seed)[0].digest


def test_an_adopted_version_is_the_newest_with_its_momentum(store, tmp_path):
    commit, state = made(4)
    store.adopt(commit, state)
    assert np.array_equal(store.newest_file(0).state.momentum, state.momentum)
    store.close()
    assert reopened(tmp_path).fragments[0] == commit


def test_a_store_that_was_closed_adopts_nothing_and_leaves_what_is_there(store, tmp_path):
    store.close()  # it may be another process's by now
    before = history(tmp_path), versions(tmp_path / "store", 0)
    with pytest.raises(LocalProtocolError, match="is closed, nothing can be adopted"):
        store.adopt(*made(2, seed=1))
    assert (history(tmp_path), versions(tmp_path / "store", 0)) == before


@pytest.mark.parametrize("fails", ["fsync", "replace", "unlink"])
@pytest.mark.parametrize("after", range(4))
def test_a_crash_in_the_middle_leaves_whole_versions_and_the_next_attempt_settles_it(
    store, tmp_path, monkeypatch, fails, after
):
    owner, calls = pathlib.Path if fails == "unlink" else os, []
    real = getattr(owner, fails)

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) > after:
            raise OSError(5, "the machine has lost power")
        return real(*args, **kwargs)

    with monkeypatch.context() as patched, contextlib.suppress(Unavailable):
        patched.setattr(owner, fails, failing)
        store.adopt(*made(2, seed=1))
    store.close()
    loaded = reopened(tmp_path)
    assert loaded.damaged == ()
    assert loaded.fragments[0].digest in (digest(1), digest(2), digest(3), digest(2, seed=1))
    with Store.open(tmp_path / "store") as again:
        again.load()
        again.adopt(*made(2, seed=1))
    assert reopened(tmp_path).fragments[0].digest == digest(2, seed=1)
    assert versions(tmp_path / "store", 0) == [2, 0]
    assert history(tmp_path) == [(0, digest(0)), (1, digest(1)), (2, digest(2, seed=1))]


@pytest.mark.parametrize("crashes", [False, True])
def test_what_gave_way_leaves_the_ledger_file_though_the_first_attempt_failed(store, tmp_path, monkeypatch, crashes):
    with monkeypatch.context() as patched:
        patched.setattr(LedgerFile, "strike", Mock(side_effect=Unavailable("the disk is full", definite=True)))
        with pytest.raises(Unavailable):
            store.adopt(*made(2))  # version 3 was never published
    if crashes:
        store.close()
        store = Store.open(tmp_path / "store")
        store.load()
    store.adopt(*made(2))
    store.adopt(*made(3, seed=1))
    store.close()
    assert history(tmp_path) == [*((version, digest(version)) for version in range(3)), (3, digest(3, seed=1))]


def test_a_version_is_flushed_before_it_gets_its_name_and_its_name_after_that(store, monkeypatch):
    calls = []

    def told(name, real):
        def call(*args, **kwargs):
            of_directory = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            calls.append("directory" if of_directory else name)
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(f"aggregator.store.store.os.{name}", told(name, getattr(os, name)))
    store.commit(*made(4))
    assert calls[:3] == ["fsync", "replace", "directory"]
