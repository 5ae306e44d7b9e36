"""Regions of tensors: which elements they have, and whether several are the whole."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from islands.hosts.regions import Region, Rows, cut, flaw_in, owners, region_of, whole

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
    mine = cut(tensor, region).reshape(-1)
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


@pytest.mark.parametrize(
    ("region", "said"),
    [(Region((0,), (4,)), "1 dimensions"), (Region((1, 0), (2, 2)), "reaches beyond")],
)
def test_a_part_that_does_not_fit_is_told(region, said):
    assert said in flaw_in([region], (2, 2))


def test_replicas_are_handed_over_by_the_first_host_that_has_them():
    rows = [Region((0, 0), (2, 4)), Region((2, 0), (2, 4))]
    assert owners({1: rows, 0: [rows[1]]}) == {rows[1]: 0, rows[0]: 1}


def test_the_slices_of_a_sharding_are_a_region():
    assert region_of((slice(None), slice(2, 4)), (3, 4)) == Region((0, 2), (3, 2))
