"""Optimizer state of an island of several hosts: joined at the speaker, given out to any number.

A checkpoint, and what an island gives to another one, hold whole leaves (:mod:`islands.session.checkpoint`), however
they were spread. So an island comes back on other hosts, or on one, and one format serves all: the speaker takes the
regions of all hosts in, and gives out those that each host of its next life has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes  # noqa: F401  (numpy finds bfloat16 by name once this is imported)
import numpy as np
import numpy.typing as npt

from broker.base.errors import ConfigError
from broker.wire.fragments import Region
from broker.wire.headers import Buffer
from islands.agreement.messages import Begin, StateLeaf
from islands.arrays import placement
from islands.arrays.plain_leaves import as_array, is_plain
from islands.arrays.regions import Spread, part_of
from islands.arrays.tree import map_leaves, named_leaves
from islands.session.checkpoint import Checkpoint, sort_of
from islands.session.training_state import Position, Snapshot

Array = npt.NDArray[Any]
Saved = tuple[tuple[str, str, Any], ...]


# --- into a checkpoint ------------------------------------------------------------------------------------------


def copied(leaves: Sequence[tuple[str, Any]]) -> tuple[tuple[StateLeaf, ...], list[Buffer]]:
    """Returns what this host hands over of the leaves that are spread over hosts; waits for devices.

    Args:
        leaves: All of them, with their names.
    """
    rows: list[StateLeaf] = []
    buffers: list[Buffer] = []
    for name, leaf in leaves:
        owned = placement.owned(leaf)
        if not owned:
            continue
        value = placement.here(leaf)
        rows.append(_row(name, leaf, owned))
        buffers += [_bytes(part_of(value, region)) for region in owned]
    return tuple(rows), buffers


def whole(snapshot: Snapshot, local_names: Sequence[str], parts: Sequence[tuple[Sequence[StateLeaf], Any]]) -> Snapshot:
    """Returns a copy of the state whose spread leaves are put together, as arrays of numpy.

    Args:
        snapshot: The speaker's.
        local_names: Of its local parameters.
        parts: Of every host, :func:`copied`: of the state and the local parameters, one after the other.
    """
    found: dict[str, Array] = {}
    for rows, buffers in parts:
        remaining = iter(buffers)
        for row in rows:
            array = found.setdefault(row.name, np.empty(row.shape, np.dtype(row.dtype)))
            for region in row.regions:
                array[region.slices] = _array(next(remaining), row.dtype, region.shape)
    names = iter([f"state {name}" for name, _ in named_leaves(snapshot.state)])
    return replace(
        snapshot,
        state=map_leaves(lambda leaf: found.get(next(names), leaf), snapshot.state),
        local=tuple(found.get(f"local {name}", x) for name, x in zip(local_names, snapshot.local, strict=True)),
    )


def labelled(snapshot: Snapshot, local_names: Sequence[str]) -> list[tuple[str, Any]]:
    """Returns all leaves of a copy of the state, with names that tell the state from local parameters."""
    state = [(f"state {name}", leaf) for name, leaf in named_leaves(snapshot.state)]
    return state + [(f"local {name}", leaf) for name, leaf in zip(local_names, snapshot.local, strict=True)]


# --- out of one -------------------------------------------------------------------------------------------------


def needed(leaves: Sequence[tuple[str, Any]]) -> tuple[StateLeaf, ...]:
    """Returns what a host needs of each leaf: all of it, or the regions that it has."""
    rows = []
    for name, leaf in leaves:
        value = None if is_plain(leaf) else placement.here(leaf)
        rows.append(_row(name, leaf, tuple(value.parts) if isinstance(value, Spread) else ()))
    return tuple(rows)


def given(saved: Saved, wanted: Sequence[StateLeaf], host: int) -> tuple[tuple[StateLeaf, ...], list[Buffer]]:
    """Returns what a host needs of saved leaves.

    Raises:
        ConfigError: It needs others than the speaker.
    """
    if [name for name, _, _ in saved] != [row.name for row in wanted]:
        cure = "give all hosts the same optimizer, and restore the same state"
        raise ConfigError("state", f"host {host} has other leaves than the speaker", cure)
    rows: list[StateLeaf] = []
    buffers: list[Buffer] = []
    for (name, sort, array), row in zip(saved, wanted, strict=True):
        parts = [array[region.slices] for region in row.regions] if row.regions else [array]
        shape = tuple(int(n) for n in array.shape)
        rows.append(StateLeaf(name=name, sort=sort, dtype=str(array.dtype), shape=shape, regions=row.regions))
        buffers += map(_bytes, parts)
    return tuple(rows), buffers


def taken(begin: Begin, buffers: Sequence[Buffer], run_id: str) -> Checkpoint:
    """Returns the state that the speaker has given, as a checkpoint of which only some regions are here."""
    remaining = iter(buffers)
    return Checkpoint(
        run_id=run_id,
        incarnation=begin.incarnation,
        at=Position(begin.step, begin.tokens),
        cursor=begin.cursor,
        state=tuple(_read(begin.state, remaining)),
        local=tuple(_read(begin.local, remaining)),
    )


def _read(rows: Sequence[StateLeaf], buffers: Iterator[Buffer]) -> Iterator[tuple[str, str, Any]]:
    for row in rows:
        if not row.regions:
            yield row.name, row.sort, _array(next(buffers), row.dtype, row.shape)
            continue
        parts = {region: _array(next(buffers), row.dtype, region.shape) for region in row.regions}
        yield row.name, row.sort, Spread(row.shape, np.dtype(row.dtype), parts)


def _row(name: str, leaf: Any, regions: tuple[Region, ...]) -> StateLeaf:
    value = as_array(leaf) if is_plain(leaf) else leaf
    shape = tuple(int(n) for n in value.shape)
    return StateLeaf(name=name, sort=sort_of(leaf), dtype=str(value.dtype), shape=shape, regions=regions)


def _bytes(array: Array) -> Buffer:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _array(buffer: Buffer, dtype: str, shape: tuple[int, ...]) -> Array:
    return np.frombuffer(buffer, np.dtype(dtype)).reshape(shape)
