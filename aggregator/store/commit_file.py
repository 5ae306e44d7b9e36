"""The file of one fragment version: parameters, momentum and books, whole or not at all.

    offset      content
    0           magic, 8 bytes: ``ATOLLCMT``
    8           length of the header, uint32
    12          xxh3_64 of the header, uint64
    20          header: msgpack map of ``format``, ``elements``, ``momentum_digest``, ``commit``, in format 2 also
                ``residual_digest``
    (aligned)   params, float32 [elements]: the bytes that ``commit.digest`` names
    ...         momentum, float32 [elements]
    ...         in format 2: residual, float32 [elements], of a version that was rounded for the wire

Numbers are little-endian; the header is padded with zeros so that the arrays begin at a multiple of 64 bytes. Nothing
follows the arrays, which are written from where they are, and used where they lie in the file
(:class:`aggregator.store.version_file.VersionFile`) or read to where they stay, without a second copy.
"""

from __future__ import annotations

import errno
import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash

from aggregator.interface.events import Commit
from aggregator.merge.fragment_state import FragmentState, Vector
from aggregator.state.records import commit_from_map, commit_to_map
from broker.base.errors import LocalProtocolError, Unavailable, cure_of
from broker.wire.schema import Unfit
from broker.wire.tensors import fragment_digest

FORMAT, WITH_RESIDUAL = 1, 2
#: Of a damaged version. Removed, it would leave a store that is behind what islands hold.
CURE = "restore it from a copy, such as a standby's; or give up what is in it, with --new-lineage"
_MAGIC = b"ATOLLCMT"
_PREFIX = struct.Struct("<8sIQ")
_ALIGNMENT = 64
#: Bytes per call to the kernel: large enough to cost nothing, small enough that one call never blocks for seconds.
_WRITE_BYTES = 8 << 20


class Damaged(Unavailable):
    """A file of the store is not what was written.

    Attributes:
        path: Which one.
        problem: What is wrong with it.
    """

    def __init__(self, path: Path, problem: str, cure: str = CURE) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path} is damaged: {problem}; {cure}", definite=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header before the arrays.

    Attributes:
        commit: What the core committed.
        elements: Of the fragment.
        momentum_digest: Names the bytes of the momentum, as ``commit.digest`` names those of the parameters.
        residual_digest: Likewise those of the residual; None: there is none.
        arrays_at: Offset of the parameters in the file, in bytes.
    """

    commit: Commit
    elements: int
    momentum_digest: str
    residual_digest: str | None
    arrays_at: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        arrays = 2 if self.residual_digest is None else 3
        return self.arrays_at + arrays * self.elements * np.dtype(np.float32).itemsize


def write_commit(fd: int, commit: Commit, state: FragmentState) -> None:
    """Writes one fragment version to an open, empty file. Making it durable is the caller's part.

    Args:
        fd: Descriptor, open for writing.
        commit: Names the version; ``digest`` must be that of ``state.params``.
        state: Two or three float32 vectors of one size.

    Raises:
        LocalProtocolError: If commit and state do not belong together: such a file would be refused when it is needed.
        OSError: As the operating system says.
    """
    given = [array for array in (state.params, state.momentum, state.residual) if array is not None]
    params, momentum, *residual = arrays = [np.ascontiguousarray(array, dtype="<f4") for array in given]
    if params.ndim != 1 or any(array.shape != params.shape for array in arrays):
        shapes = " and ".join(str(array.shape) for array in arrays)
        raise LocalProtocolError(f"{_name(commit)} has arrays of shapes {shapes}, must be vectors of one size")
    if commit.fragment_version != state.version:
        raise LocalProtocolError(f"{_name(commit)} comes with the arrays of version {state.version}")
    digest = fragment_digest(params)
    if commit.digest != digest:
        raise LocalProtocolError(f"{_name(commit)} is committed as {commit.digest}, its parameters are {digest}")
    body: dict[str, Any] = {
        "format": WITH_RESIDUAL if residual else FORMAT,
        "elements": params.size,
        "momentum_digest": fragment_digest(momentum),
        "commit": commit_to_map(commit),
        **({"residual_digest": fragment_digest(residual[0])} if residual else {}),
    }
    header: bytes = msgpack.packb(body)
    prefix = _PREFIX.pack(_MAGIC, len(header), xxhash.xxh3_64_intdigest(header))
    start = (prefix + header).ljust(_aligned(len(prefix) + len(header)), b"\0")
    write_all(fd, memoryview(start))
    for array in arrays:
        write_all(fd, memoryview(array.view(np.uint8).data))


def read_header(path: Path) -> Header:
    """Returns what stands before the arrays, which are not looked at.

    Raises:
        Damaged: If a byte of it is not what was written, or the file has not the length that it says.
        FileNotFoundError: If there is no such file.
        Unavailable: If it cannot be read; it may be whole.
    """
    with opened(path) as file:
        return _read_header(file, path)


def read_params(path: Path) -> tuple[Commit, Vector]:
    """Returns a version's commit and verified parameters, and reads no more; raises as read_header."""
    with opened(path) as file:
        header = _read_header(file, path)
        params = np.empty(header.elements, np.dtype("<f4"))
        if file.readinto(params.view(np.uint8).data) != params.nbytes:
            raise Damaged(path, "it ends within its params")
    check(path, "params", params, header.commit.digest)
    return header.commit, params


def check(path: Path, name: str, array: Vector, digest: str) -> None:
    """Raises Damaged if the bytes of an array of a file are not those that its digest names."""
    found = fragment_digest(array)
    if found != digest:
        raise Damaged(path, f"its {name} have digest {found}, expected {digest}")


def write_all(fd: int, data: memoryview) -> None:
    """Writes all bytes to a descriptor; raises OSError as the operating system says.

    The disk begins with each piece while the next one is copied: to flush 140 MB takes three quarters of the time then.
    """
    while data:
        written = os.write(fd, data[:_WRITE_BYTES])
        data = data[written:]
        if written == _WRITE_BYTES:
            end = os.lseek(fd, 0, os.SEEK_CUR)
            os.posix_fadvise(fd, end - written, written, os.POSIX_FADV_DONTNEED)  # Linux begins to write it


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a file for reading, and says what a failure to read it means."""
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise
    except OSError as err:
        if err.errno == errno.EIO:
            raise Damaged(path, "the disk cannot read it") from err
        raise Unavailable(f"cannot read {path}: {err.strerror}; {cure_of(err)}", definite=True) from err


def _read_header(file: io.BufferedReader, path: Path) -> Header:
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise Damaged(path, f"it ends after {size} bytes")
    magic, header_bytes, checksum = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise Damaged(path, f"it begins with {magic!r}, expected {_MAGIC!r}")
    if _PREFIX.size + header_bytes > size:
        raise Damaged(path, f"it ends after {size} bytes, within a header of {header_bytes}")
    raw = file.read(header_bytes)
    if xxhash.xxh3_64_intdigest(raw) != checksum:
        raise Damaged(path, "its header does not fit its checksum")
    # The checksum holds, so the rest is as it was written: by us, or by a version of this program that we do not know.
    body = msgpack.unpackb(raw)
    if body.get("format") not in (FORMAT, WITH_RESIDUAL):
        cure = f"this program reads formats {FORMAT} and {WITH_RESIDUAL}: run the one that wrote it"
        raise Unavailable(f"{path} has format {body.get('format')!r}; {cure}", definite=True)
    try:
        commit = commit_from_map(body["commit"])
    except Unfit as err:
        raise Damaged(path, f"{err.field} of its header is {err.got!r}, expected {err}") from err
    header = Header(
        commit=commit,
        elements=body["elements"],
        momentum_digest=body["momentum_digest"],
        residual_digest=body["residual_digest"] if body["format"] == WITH_RESIDUAL else None,
        arrays_at=_aligned(_PREFIX.size + header_bytes),
    )
    if size != header.file_bytes:
        raise Damaged(path, f"it holds {size} bytes, expected {header.file_bytes}")
    if file.read(header.arrays_at - file.tell()).strip(b"\0"):
        raise Damaged(path, "its padding is not zero")
    return header


def _aligned(offset: int) -> int:
    return offset + -offset % _ALIGNMENT


def _name(commit: Commit) -> str:
    return f"version {commit.fragment_version} of fragment {commit.fragment_id}"
