"""Regions of tensors: which elements they have, and whether several are the whole."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.interface.events import Piece, Pieced
from aggregator.merge.pieces import Pieces, Rows
from broker.wire.fragments import Region, flaw_in, whole
from broker.wire.messages import Codec
from broker.wire.tensors import decode_tensor, encode_tensor
from islands.arrays.regions import owners, region_of

shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def boxes(draw):
    shape = draw(shapes)
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return shape, Region(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


@given(boxes(), st.data())
def test_a_range_of_the_tensor_meets_one_range_of_the_region(box, data):
    shape, region = box
    tensor = np.arange(math.prod(shape)).reshape(shape)
    mine = tensor[region.slices].reshape(-1)
    start = data.draw(st.integers(0, tensor.size))
    stop = data.draw(st.integers(start, tensor.size))
    found, follows = [], None
    for here, there, length in Rows(region, shape).overlap(start, stop):
        assert list(mine[here : here + length]) == list(range(there, there + length))
        assert follows in (None, here)
        follows = here + length
        found += mine[here : here + length].tolist()
    assert found == [int(x) for x in mine if start <= x < stop]


@given(shapes, st.data())
def test_a_grid_of_regions_is_the_whole_and_no_part_of_it_is(shape, data):
    regions = [whole(shape)]
    for axis, length in enumerate(shape):
        at = data.draw(st.integers(0, length))
        halves = []
        for region in regions:
            for a, b in ((0, at), (at, length)):
                start = (*region.start[:axis], a, *region.start[axis + 1 :])
                halves.append(Region(start, (*region.shape[:axis], b - a, *region.shape[axis + 1 :])))
        regions = halves
    assert flaw_in(regions, shape) == ""
    filled = [region for region in regions if region.size]
    assert "elements" in flaw_in(filled[1:], shape)
    assert "elements" in flaw_in([*filled, filled[0]], shape)


def test_parts_that_meet_are_not_the_whole_though_they_count_as_many_elements():
    parts = [Region((0, 0), (2, 2)), Region((1, 1), (2, 2)), Region((0, 2), (1, 1))]
    assert flaw_in(parts, (3, 3)) == "the parts at [0, 0] and [1, 1] have elements in common"


@pytest.mark.parametrize("region", [Region((0,), (4,)), Region((1, 0), (2, 2))])
def test_a_part_that_does_not_fit_is_told(region):
    assert "not inside of [2, 2]" in flaw_in([region], (2, 2))


def test_replicas_are_handed_over_by_the_first_host_that_has_them():
    rows = [Region((0, 0), (2, 4)), Region((2, 0), (2, 4))]
    assert owners({1: rows, 0: [rows[1]]}) == {rows[1]: 0, rows[0]: 1}


def test_the_slices_of_a_sharding_are_a_region():
    assert region_of((slice(None), slice(2, 4)), (3, 4)) == Region((0, 2), (3, 2))


def in_pieces(tensor, axis, at, codec):
    """Returns a tensor in two pieces, and its elements as they arrive."""
    received, pieces = np.empty_like(tensor), []
    for a, b in ((0, at), (at, tensor.shape[axis])):
        start = tuple(a if i == axis else 0 for i in range(tensor.ndim))
        region = Region(start, tuple(b - a if i == axis else n for i, n in enumerate(tensor.shape)))
        encoded = encode_tensor(np.ascontiguousarray(tensor[region.slices]), codec)
        received[region.slices] = decode_tensor(encoded)
        pieces.append(Piece(start, encoded))
    return pieces, received


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize(("axis", "at"), [(0, 0), (0, 300), (1, 1), (1, 77), (2, 2)])
def test_a_tensor_in_pieces_is_read_as_if_it_were_whole(codec, axis, at):
    tensor = np.random.default_rng(0).normal(size=(700, 130, 5)).astype(np.float32)
    pieces, received = in_pieces(tensor, axis, at, codec)
    elements = Pieces(Pieced(tensor.shape, tuple(pieces)))
    for start, length in ((0, 1), (649, 65_536), (tensor.size - 1000, 1000), (12_345, 131_072)):
        assert np.array_equal(elements.read(start, np.empty(length, np.float32)), received.reshape(-1)[start:][:length])
