"""An island's own checkpoints: the inner optimizer's state, and parameters never synchronised.

The global model is the run's business; what only this island has is worth a file, so that a restart does not begin with
an optimizer that has seen nothing. One file per island, replaced as a whole::

    b"ATOLLCK2"  [length of the header]  [its xxh3_64 checksum]  [header: msgpack map]  [array]...

Length and checksum have 8 bytes each, little-endian. The header lists each array's name, sort, dtype, shape, length and
xxh3_64 checksum; leaves that are no arrays are written as such (:mod:`islands.arrays.plain_leaves`). A file that is
damaged, or of another run, model or optimizer, is left alone and the island starts fresh: a checkpoint is a
convenience, never a condition. (Two runs may have islands of one name, and one directory.) What another island gives
comes in the same form, so nothing in it is believed either.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401  (numpy finds bfloat16 by name once this is imported)
import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from broker.base.errors import ConfigError, Unavailable, cure_of
from islands.arrays import placement, plain_leaves
from islands.arrays.in_place import InPlaceState
from islands.arrays.parameters import Parameters
from islands.arrays.tree import Tree, map_leaves, named_leaves
from islands.interface.arguments import is_carried, shown
from islands.session.training_state import Position, Snapshot

_MAGIC = b"ATOLLCK2"
_PREFIX = struct.Struct("<8sQQ")  # magic, length of the header, its checksum
_MAX_HEADER_BYTES = 64 << 20
#: What may name a dtype: numpy reads more than that, as literals of Python, and fails on it in ways of its own.
_DTYPE = re.compile(r"[<>|=]?[A-Za-z]\w*(\[\w+\])?", re.ASCII)
#: Files that threads of this process are writing, and a number for each that none has had.
_being_written: set[Path] = set()
_numbers = itertools.count(1)
Array = npt.NDArray[Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read back: arrays by name, on the host.

    Attributes:
        run_id: Of which run it is; empty if it does not say.
        incarnation: The life that wrote it.
        at: Its counters then.
        cursor: The data cursor that it was given, if any.
        state: Leaves of the optimizer's state, in the order of the tree: (name, sort, array).
        local: Unsynchronised parameters, in the same form.
    """

    run_id: str
    incarnation: int
    at: Position
    cursor: int | None
    state: tuple[tuple[str, str, Array], ...]
    local: tuple[tuple[str, str, Array], ...]


def file_of(directory: Path, island_id: str) -> Path:
    """Returns where an island keeps its checkpoint; several islands may share a directory."""
    return directory / f"{island_id}.checkpoint"


# --- writing ----------------------------------------------------------------------------------------------------


def packed(snapshot: Snapshot, local_names: Sequence[str], at: Position, incarnation: int) -> list[bytes | memoryview]:
    """Returns what a checkpoint's file holds, in pieces: its beginning, then every array.

    Waits until a device has computed what the snapshot holds: not for the training thread, nor the event loop.
    """
    state = [(name, sort_of(leaf), _host_array(leaf)) for name, leaf in named_leaves(snapshot.state)]
    local = [(n, sort_of(x), placement.to_host(x)) for n, x in zip(local_names, snapshot.local, strict=True)]
    arrays = [np.ascontiguousarray(array) for _, _, array in (*state, *local)]
    buffers = [array.reshape(-1).view(np.uint8).data for array in arrays]
    rows = [
        [name, sort, str(array.dtype), list(original.shape), len(buffer), xxhash.xxh3_64_intdigest(buffer)]
        for (name, sort, original), array, buffer in zip((*state, *local), arrays, buffers, strict=True)
    ]
    header = msgpack.packb(
        {
            "run_id": snapshot.run_id,
            "incarnation": incarnation,
            "step": at.step,
            "tokens": at.tokens,
            "cursor": snapshot.cursor,
            "state": rows[: len(state)],
            "local": rows[len(state) :],
        }
    )
    return [_PREFIX.pack(_MAGIC, len(header), xxhash.xxh3_64_intdigest(header)) + header, *buffers]


def prepare(directory: Path) -> None:
    """Makes the directory of checkpoints at the start, so that an error shows before the first is due.

    Raises:
        ConfigError: Nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        sync_directory(directory)  # which some file systems cannot
    except OSError as err:
        cure = f"no checkpoint can be written there ({err.strerror}): {cure_of(err)}, or leave it out"
        raise ConfigError("state_dir", str(directory), cure) from err


class Newest:
    """Keeps the newest of several checkpoints that threads of one process write at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = -1

    def put(self, temporary: Path, path: Path, step: int) -> bool:
        """Puts a file that is written in its place, unless a newer one was put there; returns whether it did.

        Raises:
            OSError: It cannot be put there.
        """
        with self._lock:
            if step < self._step:
                temporary.unlink()
                return False
            os.replace(temporary, path)
            self._step = step
            return True


def save(
    path: Path, snapshot: Snapshot, local_names: Sequence[str], at: Position, incarnation: int, newest: Newest
) -> int:
    """Writes a checkpoint and makes it durable; the old one stands until then. Returns its bytes.

    Waits as :func:`packed` does. What ``newest`` knows to be older than the file that is there is not put there, and
    has 0 bytes.

    Raises:
        Unavailable: The file cannot be written; the old one is untouched.
    """
    pieces = packed(snapshot, local_names, at, incarnation)
    return write(path, pieces, lambda temporary: newest.put(temporary, path, at.step))


def write(path: Path, pieces: Sequence[Any], put: Callable[[Path], bool] | None = None) -> int:
    """Replaces a file as a whole and makes it durable; returns its bytes.

    Args:
        path: Of the file; its directory is made.
        pieces: What it will hold, as buffers.
        put: Puts the temporary file in its place; returns False, and then 0 bytes are written, where it does not.

    Raises:
        Unavailable: The file cannot be written; an old one is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(_numbers)}.tmp")
    _being_written.add(temporary)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of lives that ended as they were writing. Their process may have had the number that this one has: in a
        # container all have the same.
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):
            if leftover not in _being_written:
                leftover.unlink(missing_ok=True)
        with open(temporary, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if put is None:
            os.replace(temporary, path)
        elif not put(temporary):
            return 0
        sync_directory(path.parent)
    except OSError as err:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise Unavailable(f"cannot write {path} ({err.strerror}): {cure_of(err)}", definite=True) from err
    finally:
        _being_written.discard(temporary)
    return sum(map(len, pieces))


def sync_directory(directory: Path) -> None:
    """Makes what was renamed or made in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- reading ----------------------------------------------------------------------------------------------------


def read_if_there(path: Path) -> bytes | None:
    """Returns the bytes of a file; None if there is none.

    Raises:
        Unavailable: It cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as err:
        raise Unavailable(f"cannot read {path} ({err.strerror}): {cure_of(err)}", definite=True) from err


def load(path: Path) -> Checkpoint | None:
    """Reads a checkpoint; None if there is none.

    Raises:
        Unavailable: It cannot be read, or is damaged; the message says how.
    """
    content = read_if_there(path)
    if content is None:
        return None
    try:
        return parsed(memoryview(content))
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as err:
        raise Unavailable(f"the checkpoint {path} is damaged ({err})", definite=True) from err


def parsed(content: memoryview) -> Checkpoint:
    """Reads what :func:`packed` returned, its arrays as views of it.

    Raises:
        ValueError: It is cut off, changed, or was never written here; or KeyError, TypeError, an error of msgpack.
    """
    if bytes(content[: len(_MAGIC)]) != _MAGIC or len(content) < _PREFIX.size:
        raise ValueError("it does not begin as a checkpoint does")
    _, length, checksum = _PREFIX.unpack(content[: _PREFIX.size])
    offset = _PREFIX.size + length
    if length > _MAX_HEADER_BYTES or offset > len(content):
        raise ValueError(f"its header of {length} bytes is cut off")
    packed_header = content[_PREFIX.size : offset]
    if xxhash.xxh3_64_intdigest(packed_header) != checksum:
        raise ValueError("its header is changed")
    header = msgpack.unpackb(packed_header)
    groups: dict[str, list[tuple[str, str, Array]]] = {"state": [], "local": []}
    for group, entries in groups.items():
        for row in _checked(header[group], list):
            name, sort, dtype, shape, nbytes, checksum = _checked(row, list)
            for text in (name, sort, dtype):
                _checked(text, str)
            if not _DTYPE.fullmatch(dtype):
                raise ValueError(f"{group} {name} has {dtype!r:.60} where a dtype belongs")
            data = content[offset : offset + _count(nbytes)]
            offset += nbytes
            if len(data) != nbytes or xxhash.xxh3_64_intdigest(data) != checksum:
                raise ValueError(f"{group} {name} is cut off or changed")
            array = np.frombuffer(data, np.dtype(dtype)).reshape([_count(n) for n in shape])
            entries.append((name, sort, array))
    return Checkpoint(
        run_id=_checked(header.get("run_id", ""), str),  # which earlier versions did not write
        incarnation=_count(header["incarnation"]),
        at=Position(_count(header["step"]), _count(header["tokens"])),
        cursor=None if header["cursor"] is None else _count(header["cursor"]),
        state=tuple(groups["state"]),
        local=tuple(groups["local"]),
    )


def _checked(value: Any, sort: type[T]) -> T:
    """Returns ``value``; raises TypeError unless it is of just this type: a bool is no number."""
    if type(value) is not sort:
        raise TypeError(f"it has {value!r:.60} where a {sort.__name__} belongs")
    return value


def _count(value: Any) -> int:
    """Returns a number that counts something and fits into 64 bits; raises TypeError, ValueError."""
    number = _checked(value, int)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"it counts {number}")
    return number


# --- into trees -------------------------------------------------------------------------------------------------


def sort_of(leaf: Any) -> str:
    """Names what a leaf is, for comparison: its dtype (a random key's included), or its Python type."""
    return str(leaf.dtype) if hasattr(leaf, "dtype") else type(leaf).__name__


def check(tree: Tree) -> None:
    """Checks that a checkpoint can carry each leaf of an optimizer's state; reads no values.

    Raises:
        ConfigError: It cannot carry one: names it.
    """
    for name, leaf in named_leaves(_now(tree)):
        if not plain_leaves.is_plain(leaf) and not (placement.is_array(leaf) and is_carried(leaf.dtype)):
            value = shown(leaf) if placement.is_array(leaf) else type(leaf).__name__
            cure = (
                "no checkpoint carries it: make it an array of numpy or JAX, a number, text or bytes, leave it out, or"
            )
            cure += " tell JAX of its class if it holds such (jax.tree_util.register_dataclass)"
            raise ConfigError(f"state {name}".rstrip(), value, cure)


def _now(state: Any) -> Tree:
    """Returns an optimizer's state as a tree; most are one."""
    return state.tree() if isinstance(state, InPlaceState) else state


def _host_array(leaf: Any) -> Array:
    return plain_leaves.as_array(leaf) if plain_leaves.is_plain(leaf) else placement.to_host(leaf)


def misfit(saved: Sequence[tuple[str, str, Array]], named: Sequence[tuple[str, Any]]) -> str:
    """Says how saved arrays differ from the leaves they should replace; empty if they fit."""
    if len(saved) != len(named):
        return f"{len(saved)} arrays were saved, {len(named)} are needed"
    for (name, sort, array), (wanted, leaf) in zip(saved, named, strict=True):
        key = sort.startswith("key<")  # saved as its data, whose shape has one more dimension
        shape = tuple(getattr(leaf, "shape", ()))
        found = array.shape[: len(shape)] if key else array.shape
        alike = (sort, found) == (sort_of(leaf), shape) or _are_one(sort, array, leaf)
        if name != wanted or not alike:
            return f"saved was {name} {sort}{list(found)}, needed is {wanted} {sort_of(leaf)}{list(shape)}"
    return ""


def _are_one(sort: str, array: Array, leaf: Any) -> bool:
    """Says whether a value may replace one of another sort or shape: one of the two is a plain value."""
    if type(leaf) in (int, str, bytes) and sort == sort_of(leaf):
        return True  # text, or the digits of a large number: of another length
    plain = plain_leaves.is_plain(leaf) or sort in plain_leaves.PLAIN
    number = plain_leaves.number_in(leaf)
    return plain and number != "" and number == plain_leaves.number_in(array)


def difference(shown: Tree, given: Sequence[tuple[str, Any]]) -> str:
    """Says how a state differs from the one that a checkpoint of it is to replace; empty if it would fit."""
    leaves = named_leaves(_now(shown))
    return misfit([(n, sort_of(x), x if hasattr(x, "shape") else _host_array(x)) for n, x in leaves], given)


def leaves_of(tree: Tree) -> list[tuple[str, Any]]:
    """Returns the leaves of any tree with their names; unlike parameters, they may be plain numbers.

    Of a state that changes in place those that it has once it is trained: names, sorts and shapes.
    """
    return list(named_leaves(tree.form() if isinstance(tree, InPlaceState) else tree))


@dataclass(frozen=True, slots=True)
class Form:
    """A leaf without its values."""

    shape: tuple[int, ...]
    dtype: Any


def forms_of(leaves: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns what a comparison needs of leaves: forms of arrays, values of plain values."""
    return [(name, Form(tuple(x.shape), x.dtype) if hasattr(x, "dtype") else x) for name, x in leaves]


def restored(tree: Tree, saved: Sequence[tuple[str, str, Array]]) -> Tree:
    """Returns ``tree`` with its leaves replaced by saved ones that fit, each in its predecessor's place.

    A state that changes in place takes them over, and is returned itself.
    """
    arrays = iter([array for _, _, array in saved])

    def place(leaf: Any) -> Any:
        array = next(arrays)
        if plain_leaves.is_plain(leaf):
            return plain_leaves.value_of(array, type(leaf))
        return placement.from_host(array, leaf)

    if isinstance(tree, InPlaceState):
        tree.load(map_leaves(place, tree.form()))
        return tree
    return map_leaves(place, tree)


def copied(tree: Tree) -> Tree:
    """Returns ``tree`` with its arrays copied, on the device where they are; only dispatched there."""
    tree = _now(tree)
    copies = iter(placement.copy([leaf for _, leaf in named_leaves(tree)]))
    return map_leaves(lambda leaf: next(copies), tree)


def snapshot_of(params: Tree, state: tuple[Any, int | None], parameters: Parameters, run_id: str) -> Snapshot:
    """Returns copies for a checkpoint: the optimizer's state, the cursor, unsynchronised parameters.

    Raises:
        ConfigError: A leaf of the state can be in no checkpoint.
    """
    opt_state, cursor = state
    check(opt_state)
    local = tuple(placement.copy(parameters.of_none(params)))
    return Snapshot(state=copied(opt_state), cursor=cursor, local=local, run_id=run_id)
