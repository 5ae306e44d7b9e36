"""Shares of the data: disjoint, shuffled, and a function of the cursor alone."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import ConfigError
from islands.tasks.data import Windows, batches, sequence_numbers, shuffled
from islands.tasks.task import DataShare

CONTEXT = 4


def windows_of(*lengths, vocabulary=2**16):
    """Arrays of consecutive numbers, so that a window shows where it came from."""
    arrays, start = [], 0
    for length in lengths:
        arrays.append(np.arange(start, start + length, dtype=np.uint16))
        start += length
    return Windows(arrays, CONTEXT, vocabulary=vocabulary, sources="numbers")


def firsts(batch):
    return batch[:, 0].tolist()


def test_windows_share_one_token_with_their_neighbour_and_none_across_arrays():
    windows = windows_of(9, 3, 6)  # 2 windows, none, 1 window
    assert len(windows) == 3
    assert windows.take(np.array([0, 1, 2])).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [12, 13, 14, 15, 16]]


@pytest.mark.parametrize("bad", [256, -1])
def test_a_token_outside_the_vocabulary_is_refused_when_it_is_met(bad):
    tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8, bad], np.int64)
    windows = Windows([tokens], CONTEXT, vocabulary=256, sources="tokens.npy")
    windows.take(np.array([0]))
    with pytest.raises(ConfigError, match=f"tokens.npy.*token id {bad}.*vocabulary = 256"):
        windows.take(np.array([1]))


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    positions = shuffled(np.arange(size, dtype=np.int64) + epoch * size, size, seed=seed)
    assert sorted(positions.tolist()) == list(range(size))


@given(
    share_count=st.integers(1, 7), batch=st.integers(1, 5), cursors=st.lists(st.integers(0, 30), min_size=7, max_size=7)
)
def test_shares_are_disjoint_whatever_the_cursors(share_count, batch, cursors):
    trained = []
    for index in range(share_count):
        for cursor in range(cursors[index]):
            trained += sequence_numbers(cursor, index, share_count, batch=batch).tolist()
    assert len(set(trained)) == len(trained)


def test_the_cursor_is_the_only_state():
    windows = windows_of(CONTEXT * 50 + 1)
    whole = [firsts(b) for b in islice(batches(windows, DataShare(index=1, count=4), batch=3), 20)]
    resumed = [firsts(b) for b in islice(batches(windows, DataShare(index=1, count=4, cursor=13), batch=3), 7)]
    assert resumed == whole[13:]


def test_a_share_that_changes_is_read_at_the_next_batch():
    windows = windows_of(CONTEXT * 200 + 1)
    share = DataShare(index=0, count=2)
    live = batches(windows, share, batch=2)
    next(live)
    share.index, share.count = 4, 5
    expected = next(batches(windows, DataShare(index=4, count=5, cursor=1), batch=2))
    assert firsts(next(live)) == firsts(expected)
