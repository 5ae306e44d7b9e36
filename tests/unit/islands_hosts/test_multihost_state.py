"""Leaves that several hosts share: as fragments, and as one optimizer's state that is put together and given out."""

import numpy as np
import pytest

from broker.base.errors import ConfigError
from broker.wire.fragments import Kind, Region, TensorSpec, flaw_in
from broker.wire.messages import Codec, StateSource
from broker.wire.tensors import decode_tensor, encode_tensor
from islands.agreement import messages as m
from islands.arrays import placement
from islands.arrays.in_place import InPlaceLeaf, InPlacePlacement, Part
from islands.arrays.reference import adopted
from islands.arrays.regions import Spread, part_of
from islands.hosts import state
from islands.session import checkpoint
from islands.session.training_state import Position, Snapshot


class Rows(InPlaceLeaf):
    """Some rows of an array, as one host has them."""

    def __init__(self, whole, start, stop, *, owned=True):
        self.array = np.array(whole[start:stop])
        self._part = Part(whole.shape, Region((start,) + (0,) * (whole.ndim - 1), self.array.shape), owned)

    shape = property(lambda self: self._part.shape)
    dtype = property(lambda self: self.array.dtype)
    part = property(lambda self: self._part)

    def copies(self, leaves):
        found = [Rows.__new__(Rows) for _ in leaves]
        for copy, leaf in zip(found, leaves, strict=True):
            copy.array, copy._part = leaf.array.copy(), leaf._part
        return found

    def before(self, leaves, placed):
        return self.copies(leaves)

    def install(self, leaves, placed, keep):
        for leaf, value in zip(leaves, placed, strict=True):
            leaf.array[...] = value if keep == 0 else adopted(leaf.array, value, keep)

    def place(self, value, *, room=True):
        return value

    def place_positions(self, positions):
        return tuple(positions)

    def sample(self, positions):
        return self.array[positions]

    def rows(self, start, stop):
        raise AssertionError("no leaf is cut")

    def to_host(self):
        return self.array

    def written(self, value):
        self.array[...] = part_of(value, self._part.region)
        return self


#: Of rows 0 to 5: with three hosts one has none.
CUTS = {1: [(0, 5)], 2: [(0, 3), (3, 5)], 3: [(0, 3), (3, 5), (5, 5)]}
WHOLE = {
    "a": np.arange(20, dtype=np.float32).reshape(5, 4),
    "b": np.linspace(0, 1, 5).astype(np.float16),
}
SPECS = [TensorSpec(name=name, shape=x.shape, dtype=str(x.dtype), kind=Kind.MEAN) for name, x in WHOLE.items()]


def leaves_of(host, hosts):
    return {name: Rows(x, *CUTS[hosts][host]) for name, x in WHOLE.items()}


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_the_regions_of_all_hosts_are_the_whole_fragment(hosts, keep):
    payload = tuple(encode_tensor(x.astype(np.float32), Codec.F32) for x in WHOLE.values())
    handed = [[] for _ in SPECS]
    for host in range(hosts):
        leaves = list(leaves_of(host, hosts).values())
        here = InPlacePlacement(leaves, [frozenset({leaf.part.region}) for leaf in leaves])
        parts = [x[leaf.part.region.slices] for x, leaf in zip(WHOLE.values(), leaves, strict=True) if leaf.array.size]
        assert [spec.shape for spec in here.parts.tensors(SPECS)] == [part.shape for part in parts]
        np.testing.assert_equal(here.values(leaves), parts)
        cut = here.parts.cut(payload)
        np.testing.assert_equal([decode_tensor(each) for each in cut], [part.astype(np.float32) for part in parts])
        encoded, places = here.parts.handed(cut)
        for place, each in zip(places, encoded, strict=True):
            handed[place.tensor].append(Region(place.start, each.shape))
        copies = here.copy(leaves)
        shifts = [np.full(part.shape, 0.5, np.float32) for part in parts]
        placed = here.place(shifts, keep)
        before = here.before(leaves, placed)
        assert here.install(leaves, placed, keep) == leaves
        for kept in (copies, before):
            np.testing.assert_equal([each.array for each in kept], parts)
        changed = [leaf.array for leaf in leaves if leaf.array.size]
        moved = zip(parts, shifts, strict=True)
        expected = [shift.astype(part.dtype) if keep == 0 else adopted(part, shift, keep) for part, shift in moved]
        np.testing.assert_equal(changed, expected)
        sampled = {i: leaves[i].sample(where).size for i, where in here.places(shifts).items()}
        assert sampled == {i: leaf.array.size for i, leaf in enumerate(leaves) if leaf.array.size}
    for spec, regions in zip(SPECS, handed, strict=True):
        assert flaw_in(regions, spec.shape) == ""


def test_what_another_host_hands_over_is_not_handed_over_twice():
    leaves = list(leaves_of(0, 2).values())
    here = InPlacePlacement(leaves, [frozenset(), frozenset({leaves[1].part.region})])
    payload = [encode_tensor(leaf.array.astype(np.float32), Codec.F32) for leaf in leaves]
    encoded, places = here.parts.handed(payload)
    assert [place.tensor for place in places] == [1]
    assert encoded == (payload[1],)


def snapshot_of(host, hosts):
    moments = {name: Rows(10 * x, *CUTS[hosts][host]) for name, x in WHOLE.items()}
    mean = (Rows(WHOLE["a"] + 1, *CUTS[hosts][host]),)
    return Snapshot(state={"count": np.int32(7), "mu": moments, "name": "adam"}, cursor=4, local=mean, run_id="demo")


def written(snapshot):
    pieces = checkpoint.packed(snapshot, ("mean",), Position(12, 120), 3)
    return checkpoint.parsed(memoryview(b"".join(pieces)))


def saved_by(hosts):
    """What an island of so many hosts writes down."""
    parts = [state.copied(state.labelled(snapshot_of(host, hosts), ("mean",))) for host in range(hosts)]
    return written(state.whole(snapshot_of(0, hosts), ("mean",), parts))


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_what_several_hosts_write_down_is_what_one_would(hosts):
    found = saved_by(hosts)
    moments = {name: 10 * x for name, x in WHOLE.items()}
    alone = {"count": np.int32(7), "mu": moments, "name": "adam"}
    expected = written(Snapshot(state=alone, cursor=4, local=(WHOLE["a"] + 1,), run_id="demo"))
    assert (found.at, found.cursor, found.incarnation) == (expected.at, expected.cursor, expected.incarnation)
    for ours, theirs in zip((*found.state, *found.local), (*expected.state, *expected.local), strict=True):
        assert ours[:2] == theirs[:2]
        np.testing.assert_array_equal(ours[2], theirs[2])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_a_state_goes_on_on_another_number_of_hosts(before, after):
    saved = saved_by(before)
    for host in range(after):
        fresh = snapshot_of(host, after)
        for leaf in (*fresh.state["mu"].values(), *fresh.local):
            leaf.array[...] = 0
        rows, buffers = state.given(saved.state, state.needed(checkpoint.leaves_of(fresh.state)), host)
        more, others = state.given(saved.local, state.needed([("mean", fresh.local[0])]), host)
        begin = m.Begin(
            source=StateSource.CHECKPOINT, incarnation=3, step=12, tokens=120, cursor=4, state=rows, local=more
        )
        message, views = m.unpacked([bytes(frame) for frame in m.packed(begin, [*buffers, *others])])
        found = state.taken(message, views, "demo")
        restored = checkpoint.restored(fresh.state, found.state)
        assert (restored["count"], restored["name"]) == (7, "adam")
        rows_here = slice(*CUTS[after][host])
        for name, x in WHOLE.items():
            np.testing.assert_array_equal(restored["mu"][name].array, 10 * x[rows_here])
        mean = placement.from_host(found.local[0][2], fresh.local[0])
        np.testing.assert_array_equal(mean.array, WHOLE["a"][rows_here] + 1)


def test_a_host_with_another_optimizer_is_refused():
    saved = saved_by(2)
    wanted = state.needed([("count", np.int32(0)), ("nu/a", leaves_of(1, 2)["a"])])
    with pytest.raises(ConfigError, match="host 1 has other leaves") as caught:
        state.given(saved.state, wanted, 1)
    assert "same optimizer" in caught.value.cure


def test_a_replica_is_written_down_once():
    rows, buffers = state.copied([("state mu", Rows(WHOLE["a"], 0, 5, owned=False))])
    assert (rows, buffers) == ((), [])


def test_what_is_here_of_a_leaf_is_its_region():
    leaf = leaves_of(1, 2)["a"]
    here = placement.here(leaf)
    assert isinstance(here, Spread)
    np.testing.assert_array_equal(here.at(leaf.part.region), WHOLE["a"][3:5])
