"""Batches of tokens: disjoint shares of one shuffled order, with a cursor as the only state.

Token arrays (:mod:`islands.tasks.corpus`) are cut into *windows* of ``context + 1`` tokens; neighbours share one token,
so that each token is predicted once. Which windows a batch holds is arithmetic: with N windows, window b of the batch
that island ``index`` of ``count`` trains on in inner step ``cursor`` has the number

    g = (cursor * batch + b) * count + index

in one order that all islands share, and that is window permutation(g mod N) of epoch g // N. In a run, ``count`` is 1,
and no two islands have the same ``cursor`` (:mod:`islands.protocol.data_shares`); without one, ``count`` processes have
a part each. So in an epoch no window is trained twice, whatever their speeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from broker.base.errors import ConfigError
from islands.tasks.corpus import Tokens
from islands.tasks.task import DataShare

_FEISTEL_ROUNDS: Final = 4


class Windows:
    """Numbered windows of ``context + 1`` tokens in a list of arrays."""

    def __init__(self, arrays: Sequence[Tokens], context: int, *, vocabulary: int, sources: str) -> None:
        """Counts the windows; arrays that are too short are left out.

        Args:
            arrays: Token ids.
            context: Tokens to be predicted per window.
            vocabulary: Every id is below it.
            sources: Where the ids came from, for messages.

        Raises:
            ConfigError: If there is not one window.
        """
        self._arrays = [a for a in arrays if len(a) > context]
        if not self._arrays:
            have = max((len(a) for a in arrays), default=0)
            cure = f"holds {have} tokens at most in one piece; context + 1 = {context + 1}: give more, or lower context"
            raise ConfigError("data", sources, cure)
        counts = [(len(a) - 1) // context for a in self._arrays]
        self._starts = np.cumsum([0, *counts[:-1]])
        self._num_windows = sum(counts)
        self._context = context
        self._vocabulary = vocabulary
        self._sources = sources

    def __len__(self) -> int:
        return self._num_windows

    def take(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Returns windows by number, shape (len(numbers), context + 1), in the smallest unsigned dtype.

        Raises:
            ConfigError: If one holds a token id outside the vocabulary.
        """
        rows = np.empty((len(numbers), self._context + 1), np.int64)
        which = np.searchsorted(self._starts, numbers, side="right") - 1
        offsets = (numbers - self._starts[which]) * self._context
        for row, i, start in zip(rows, which.tolist(), offsets.tolist(), strict=True):
            row[:] = self._arrays[i][start : start + self._context + 1]
        for bad in (int(rows.max()), int(rows.min())):
            if not 0 <= bad < self._vocabulary:
                cure = f"holds the token id {bad}, but vocabulary = {self._vocabulary}: raise it, or repair the data"
                raise ConfigError("data", self._sources, cure)
        return rows.astype(np.min_scalar_type(self._vocabulary - 1))


def batches(windows: Windows, share: DataShare, *, batch: int) -> Iterator[npt.NDArray[Any]]:
    """Yields the share's batches without end, from ``share.cursor``; reads ``share`` again for each batch.

    Yields:
        Arrays (batch, context + 1), of the vocabulary's smallest unsigned dtype.
    """
    while True:
        index, count, cursor, seed = share.take()
        numbers = sequence_numbers(cursor, index, count, batch=batch)
        yield windows.take(shuffled(numbers, len(windows), seed=seed))


def sequence_numbers(cursor: int, index: int, share_count: int, *, batch: int) -> npt.NDArray[np.int64]:
    """Returns the sequence numbers of one batch of a share, in the order of all islands: shape (batch,)."""
    return (cursor * batch + np.arange(batch, dtype=np.int64)) * share_count + index


def shuffled(numbers: npt.NDArray[np.int64], size: int, *, seed: int) -> npt.NDArray[np.int64]:
    """Maps sequence numbers to ``[0, size)``, with a new permutation for every ``size`` numbers.

    A Feistel network permutes the next power of four; values that fall outside are walked on until they fall inside
    (Black and Rogaway, 2002). So an epoch of any size is shuffled without holding it, and any cursor is O(1) away.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    epochs, values = np.divmod(numbers.astype(np.uint64), np.uint64(size))
    keys = _mix(epochs + _mix(np.full_like(epochs, seed % 2**64)))

    def permute(x: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> half, x & mask
        for r in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(right + key + np.uint64(r << 56)) & mask)
        return (left << half) | right

    values = permute(values, keys)
    outside = np.flatnonzero(values >= size)
    while len(outside):
        values[outside] = permute(values[outside], keys[outside])
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def evenly(windows: Windows, most: int) -> npt.NDArray[np.int64]:
    """Returns at most ``most`` evenly spaced window numbers, the fixed set of an evaluation."""
    return np.linspace(0, len(windows) - 1, min(most, len(windows))).astype(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64 bits: each input bit moves all output bits (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
