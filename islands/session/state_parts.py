"""Cuts an optimizer's state into parts for the wire, and checks received ones.

A state travels as a checkpoint is written (:mod:`islands.session.checkpoint`): name, sort, shape and raw bytes of every
leaf, step counts and random keys included. That is cut into parts, each one buffer. The protocol's buffers hold float32
elements, so the last part is filled up with zeros to whole ones; nothing reads them as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 and its like once this is imported)
import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from broker.wire.messages import Codec, Encoded, StatePart
from islands.arrays import placement
from islands.arrays.plain_leaves import PLAIN, as_array, is_plain, value_of
from islands.interface.arguments import is_floating
from islands.protocol.donation import PART_BYTES
from islands.session import checkpoint
from islands.session.checkpoint import Checkpoint
from islands.session.training_state import Needed

_ELEMENT_BYTES = 4


def cut(buffers: Sequence[Any]) -> tuple[tuple[tuple[Encoded, ...], ...], int]:
    """Returns the payloads of all parts, views of one copy, and the bytes that they hold together."""
    size = sum(memoryview(buffer).nbytes for buffer in buffers)
    whole = memoryview(b"".join([*buffers, bytes(-size % _ELEMENT_BYTES)]))
    pieces = [whole[i : i + PART_BYTES] for i in range(0, max(1, len(whole)), PART_BYTES)]
    return tuple((_encoded(piece),) for piece in pieces), size


def joined(parts: Sequence[Sequence[Encoded]], state_bytes: int) -> memoryview:
    """Returns what :func:`cut` was given, in one piece."""
    return memoryview(b"".join(each.data for part in parts for each in part))[:state_bytes]


def flaw_in(part: StatePart) -> str:
    """Says why a part's length is wrong; empty if it is right. Wrong parts are not worth keeping."""
    if not part.num_parts:
        return ""  # says that there is none to give
    begins = part.part * PART_BYTES
    needed = max(0, min(PART_BYTES, part.state_bytes - begins))
    needed += -needed % _ELEMENT_BYTES
    found = sum(memoryview(each.data).nbytes for each in part.payload)
    return "" if found == needed else f"part {part.part} has {found} bytes, {needed} belong there"


def read(parts: Sequence[Sequence[Encoded]], state_bytes: int, needed: Needed) -> tuple[Checkpoint | None, str]:
    """Returns a donor's state, or why it does not serve: damaged, another optimizer's, or not finite."""
    try:
        found = checkpoint.parsed(joined(parts, state_bytes))
    except (ValueError, KeyError, TypeError, OverflowError, msgpack.UnpackException) as err:
        return None, f"its state cannot be read ({err})"
    flaw = unfit(found, needed)
    return (None, flaw) if flaw else (found, "")


def unfit(found: Checkpoint, needed: Needed) -> str:
    """Says why a state that was read does not serve, a donor's or one's own; empty if it does."""
    misfit = checkpoint.misfit(found.state, needed.state) or checkpoint.misfit(found.local, needed.local)
    if misfit:
        return f"it is of another model or optimizer: {misfit}"
    leaves = zip((*found.state, *found.local), (*needed.state, *needed.local), strict=True)
    for (name, sort, array), (_, fresh) in leaves:
        if not _holds(sort, array):
            return f"{name} is called {sort} and holds {array.dtype}{list(array.shape)}"
        if not _finite(sort, array, fresh):
            return f"{name} is not finite"
    return ""


def _encoded(piece: memoryview) -> Encoded:
    shape = (len(piece) // _ELEMENT_BYTES,)
    return Encoded(codec=Codec.F32, shape=shape, checksum=xxhash.xxh3_64_intdigest(piece), data=piece)


def _holds(sort: str, array: npt.NDArray[Any]) -> bool:
    """Says whether an array may stand for a leaf of this sort: same dtype, key's integers, plain number."""
    if sort.startswith("key<"):
        return array.dtype.kind == "u"
    if str(array.dtype) == sort:  # a plain bool is called as an array of them is
        return True
    if sort not in PLAIN:
        return False
    try:
        value_of(array, PLAIN[sort])
    except ValueError:
        return False
    return True


def _finite(sort: str, array: npt.NDArray[Any], fresh: Any) -> bool:
    """Returns whether a leaf is finite wherever the fresh one is; masks are infinite in both."""
    if not (is_floating(array.dtype) or array.dtype.kind == "c"):
        return True
    # A best loss begins at infinity, and says nothing of what was trained.
    spoilt = np.isnan(array) if sort == float.__name__ else ~np.isfinite(array)
    if not spoilt.any():
        return True
    begun = as_array(fresh) if is_plain(fresh) else placement.to_host(fresh)
    return begun.shape == array.shape and np.array_equal(array[spoilt], begun[spoilt], equal_nan=True)
