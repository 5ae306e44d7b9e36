"""Commits and run records as messages to standbys, and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from aggregator.interface.events import Commit
from aggregator.merge.fragment_state import FragmentState
from aggregator.state.records import commit_from_map, commit_to_map
from broker.base.errors import RemoteProtocolError
from broker.wire.frames import verify_payload
from broker.wire.messages import Codec, Encoded, Payload, Reason, Replica, ReplicaRun
from broker.wire.schema import Unfit
from broker.wire.tensors import decode_into, encode_tensor, fragment_digest


def replica_of(commit: Commit, shard: int, epoch: int, payload: Payload) -> Replica:
    """Returns a commit of a shard as a message, with :func:`payload_of` its fragment."""
    return Replica(
        shard=shard,
        epoch=epoch,
        fragment_id=commit.fragment_id,
        fragment_version=commit.fragment_version,
        digest=commit.digest,
        round_id=commit.round_id,
        commit=msgpack.packb(commit_to_map(commit)),
        payload=payload,
    )


def payload_of(state: FragmentState) -> tuple[Encoded, ...]:
    """Returns parameters, momentum and any residual for the wire; the buffers are views of the arrays."""
    arrays = (state.params, state.momentum, state.residual)
    return tuple(encode_tensor(array, Codec.F32) for array in arrays if array is not None)


def commit_of(replica: Replica) -> tuple[Commit, FragmentState]:
    """Returns the commit of a message, with new arrays, verified.

    Raises:
        RemoteProtocolError: The bytes are not what the leader committed.
    """
    try:
        commit = commit_from_map(msgpack.unpackb(replica.commit))
        if type(commit.digest) is not str or type(commit.ledger) is not dict:
            raise TypeError
    except (Unfit, ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as err:
        raise _unfit("commit", type(err).__name__, "the record of a commit") from err
    named = replica.fragment_id, replica.fragment_version, replica.digest, replica.round_id
    if (commit.fragment_id, commit.fragment_version, commit.digest, commit.round_id) != named:
        raise _unfit(
            "commit", f"version {commit.fragment_version} of fragment {commit.fragment_id}", "the one it names"
        )
    if len(replica.payload) not in (2, 3) or any(each.codec is not Codec.F32 for each in replica.payload):
        raise _unfit("payload", f"{len(replica.payload)} buffers", "parameters, momentum, perhaps a residual, in f32")
    verify_payload(replica.payload)  # the digest names the parameters alone: nothing else would notice the momentum
    arrays = []
    for encoded in replica.payload:
        array = np.empty(encoded.shape, np.float32)
        decode_into(encoded, array)
        arrays.append(array)
    params, momentum, *residual = arrays
    if params.ndim != 1 or any(each.shape != params.shape for each in arrays):
        raise _unfit("payload", " and ".join(str(each.shape) for each in arrays), "vectors of one size")
    if fragment_digest(params) != replica.digest:
        raise _unfit("payload", "other bytes", f"parameters with digest {replica.digest}")
    state = FragmentState(params=params, momentum=momentum, version=commit.fragment_version)
    return commit, state._replace(residual=residual[0]) if residual else state


def run_message(record: Mapping[str, Any], shard: int, epoch: int, serial: int) -> ReplicaRun:
    """Returns the run record of a shard as a message."""
    return ReplicaRun(shard=shard, epoch=epoch, serial=serial, record=msgpack.packb(dict(record)))


def record_of(message: ReplicaRun) -> dict[str, Any]:
    """Returns the run record of a message.

    Raises:
        RemoteProtocolError: It is none.
    """
    try:
        record: dict[str, Any] = msgpack.unpackb(message.record)
        if record["epoch"] != message.epoch:
            raise _unfit("record", f"epoch {record['epoch']}", f"{message.epoch}, that of the message")
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as err:
        raise _unfit("record", type(err).__name__, "a run record") from err
    return record


def _unfit(field: str, got: str, expected: str) -> RemoteProtocolError:
    return RemoteProtocolError(reason=Reason.MALFORMED, field=field, got=got, expected=expected)
