"""A durable version in its file: memory is taken only while its arrays are looked at.

The file is mapped. The kernel reads what is touched, keeps of it what it has room for, and needs to write nothing to
take that room back. Files of the store are replaced whole and never written to (:mod:`aggregator.store.replacing`), so
what is mapped does not change; a file that was removed lives on until nobody uses it. That somebody else wrote to it,
or the disk returns other bytes than it took, is found by :meth:`VersionFile.verify`.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from aggregator.interface.events import Commit
from aggregator.merge.fragment_state import FragmentState, Vector
from aggregator.store.commit_file import check, opened, read_header
from broker.wire.tensors import fragment_digest

_FLOAT_BYTES = np.dtype("<f4").itemsize


class VersionFile:
    """One fragment version in the file that makes it durable.

    Args:
        path: Of the file.

    Attributes:
        commit: Which version it is.
        state: Its arrays: views of the file, read only. They are valid as long as somebody refers to them.

    Raises:
        Damaged: The file is too short, or its header is not what was written.
        FileNotFoundError: If there is no such file.
        Unavailable: If it cannot be read; it may be whole.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self._path = path
        self._digests = {"params": header.commit.digest, "momentum": header.momentum_digest}
        if header.residual_digest is not None:
            self._digests["residual"] = header.residual_digest
        self._content = _content(path)
        size = header.elements
        arrays = {
            name: np.frombuffer(self._content, "<f4", size, header.arrays_at + number * size * _FLOAT_BYTES)
            for number, name in enumerate(self._digests)
        }
        self.commit: Commit = header.commit
        self.state = FragmentState(version=header.commit.fragment_version, **arrays)

    def verify(self) -> None:
        """Raises Damaged if a byte of the arrays is not what was written."""
        for name, digest in self._digests.items():
            check(self._path, name, getattr(self.state, name), digest)

    def verified(self) -> FragmentState:
        """Returns the arrays, whole; raises as :meth:`verify`."""
        self.verify()
        return self.state

    def mended(self, params: Vector) -> FragmentState:
        """Returns the version with the parameters of somebody else; raises Damaged if they differ.

        Momentum and residual are nowhere but in stores: what is not whole of them begins anew, with zeros.
        """
        check(self._path, "params", params, self.commit.digest)
        state = self.state._replace(params=params)
        for name in self._digests.keys() - {"params"}:
            array = getattr(state, name)
            if fragment_digest(array) != self._digests[name]:
                state = state._replace(**{name: np.zeros_like(array)})
        return state

    def release(self) -> None:
        """Gives back the memory that looking at the arrays took; they may be looked at again."""
        if isinstance(self._content, mmap.mmap):
            self._content.madvise(mmap.MADV_DONTNEED)


def verified(path: Path) -> VersionFile:
    """Returns a version that is whole, bit by bit; raises as :class:`VersionFile`."""
    version = VersionFile(path)
    version.verify()
    version.release()
    return version


def _content(path: Path) -> mmap.mmap | bytes:
    """Returns the bytes of a file: mapped, or read where its file system cannot map."""
    with opened(path) as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError:
            return file.read()
