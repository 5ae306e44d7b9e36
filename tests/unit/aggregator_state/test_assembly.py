"""Islands of several hosts: parts of a contribution are one when all are there, and count as nothing before."""

import numpy as np
import pytest

from aggregator.interface import events as agg
from aggregator.interface.events import Part, Piece, Pieced
from aggregator.merge.kernels import merge_fragment
from aggregator.merge.payload_checks import inspect
from broker.wire import messages as m
from broker.wire.fragments import FragmentManifest, Kind, TensorSpec
from broker.wire.messages import Codec, Envelope, Place, Reason
from broker.wire.tensors import encode_tensor
from tests.aggregator_hand import Desk, of, sent, steps, tensors

ROWS = np.arange(64, dtype=np.float32).reshape(8, 8)


def rows(first, last):
    """A place and its buffer: some rows of a tensor."""
    return Place(tensor=0, start=(first, 0)), encode_tensor(ROWS[first:last].copy(), Codec.F32)


def split(*parts):
    return {"places": tuple(place for place, _ in parts), "payload": tuple(buffer for _, buffer in parts)}


def spoken(desk, *parts):
    """What host 0 of island b says of its first four steps."""
    return m.Contribution(
        round_id=next(iter(desk.open_rounds)),
        fragment_id=0,
        steps=steps(0, 4),
        trained_on=(m.TrainedOn(fragment_version=0, steps=4),),
        hosts=2,
        **split(*parts),
    )


def part(from_step, to_step, *parts, host=1, hosts=2, fragment=0):
    return m.HostPart(
        fragment_id=fragment, from_step=from_step, to_step=to_step, host=host, hosts=hosts, **split(*parts)
    )


def refused(answers):
    """The one contribution that is refused."""
    (found,) = [r for state in sent(answers, m.FleetState) for r in state.resolutions if r.fate is m.Fate.REFUSED]
    return found


@pytest.fixture
def desk():
    desk = Desk(islands=2)
    desk.gather("a", "b")
    desk.open_round("a", "b", step=4)
    desk.offer("a", 0, 4)
    return desk


@pytest.fixture
def half(desk):
    """Host 0 of island b has said its part, rows 0 to 5, and host 1 not yet."""
    desk.say("b", spoken(desk, rows(0, 5)), norm=3.0)
    return desk


@pytest.mark.parametrize("speaker_first", [True, False])
def test_a_contribution_counts_when_its_last_part_is_there(desk, speaker_first):
    said = [spoken(desk, rows(0, 5)), part(0, 4, rows(5, 8))]
    first, second = said if speaker_first else reversed(said)
    assert not of(desk.say("b", first, norm=3.0), agg.Merge)
    assert desk.versions[0] == 0
    merges = of(desk.say("b", second, norm=4.0, payload_bytes=100), agg.Merge)
    (mine,) = [each for each in merges[0].parts if each.island_id == "b"]
    assert mine.payload[0].shape == (8, 8)
    assert sorted(piece.start for piece in mine.payload[0].pieces) == [(0, 0), (5, 0)]
    assert desk.versions[0] == 1


def test_half_a_contribution_is_unknown_and_nothing_is_booked(half):
    listed = (m.Outstanding(fragment_id=0, from_step=0, to_step=4),)
    (state,) = sent(half.beat("b", 4, outstanding=listed), m.FleetState)
    assert [r.fate for r in state.resolutions] == [m.Fate.UNKNOWN]


def test_a_new_life_does_not_complete_what_the_last_one_left_half(half):
    assert half.core._assembly.waiting_bytes == 256
    half.join("b")
    said = half.say("b", part(0, 4, rows(5, 8)), norm=4.0, payload_bytes=100)
    assert not [merge for merge in of(said, agg.Merge) if len(merge.parts) > 1]
    assert half.core._assembly.waiting_bytes == 100


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([rows(0, 5), rows(6, 8)], "the parts have 56 elements, the tensor has 64"),
        ([rows(0, 5), rows(4, 8)], "the parts have 72 elements"),
        ([rows(0, 4), rows(3, 7)], "have elements in common"),
    ],
)
def test_parts_that_are_not_the_whole_are_refused_as_one(desk, parts, said):
    desk.say("b", spoken(desk, parts[0]), norm=3.0)
    answers = desk.say("b", part(0, 4, parts[1]), norm=4.0)
    assert refused(answers).reason is Reason.WRONG_SHAPE
    assert "w0 of 2 hosts" in refused(answers).detail
    assert said in refused(answers).detail


def test_a_flaw_of_one_host_is_a_flaw_of_all(half):
    flaw = agg.Flaw(reason=Reason.NOT_FINITE, detail="w0 holds values that are not finite")
    assert refused(half.say("b", part(0, 4, rows(5, 8)), flaw=flaw)).reason is Reason.NOT_FINITE


def test_a_damaged_part_is_as_if_it_had_not_come_and_may_come_again(half):
    damaged = agg.Flaw(reason=Reason.CHECKSUM, detail="buffers[0]")
    assert not of(half.say("b", part(0, 4, rows(5, 8)), flaw=damaged), agg.Merge)
    assert of(half.say("b", part(0, 4, rows(5, 8)), norm=4.0), agg.Merge)


def test_version_0_comes_in_parts_too():
    desk = Desk(islands=1)
    desk.join("b")
    desk.say("b", m.Seed(fragment_id=0, hosts=2, **split(rows(0, 5))), norm=3.0)
    said = desk.say("b", part(0, 0, rows(5, 8)), norm=4.0)
    (plant,) = of(said, agg.Plant)
    assert isinstance(plant.payload[0], Pieced)


def test_parts_that_never_become_whole_do_not_pile_up(desk):
    for k in range(20):
        desk.say("b", part(4 * k, 4 * k + 4, rows(5, 8)), norm=4.0)
    assert desk.core._assembly.waiting_bytes == 2 * 256


def test_many_hosts_of_one_contribution_find_no_more_room_than_there_is():
    desk = Desk(islands=2, held_bytes=1000)
    desk.gather("a", "b")
    for host in range(1, 20):
        desk.say("b", part(0, 4, rows(0, 1), host=host, hosts=4096), norm=4.0)
        assert desk.core._assembly.waiting_bytes <= 1000


def test_parts_of_a_fragment_that_does_not_exist_are_not_kept(desk):
    desk.say("b", part(0, 4, rows(0, 1), fragment=7), norm=4.0)
    assert desk.core._assembly.waiting_bytes == 0


@pytest.mark.parametrize(
    ("place", "shape", "field"),
    [
        (Place(tensor=1, start=(0, 0)), (2, 8), "places[0].tensor"),
        (Place(tensor=0, start=(7, 0)), (2, 8), "buffers[0].shape"),
        (Place(tensor=0, start=(0,)), (2, 8), "buffers[0].shape"),
    ],
)
def test_a_place_outside_of_the_fragment_is_a_flaw_that_names_it(place, shape, field):
    message = part(0, 4, (place, encode_tensor(np.zeros(shape, np.float32), Codec.F32)))
    envelope = Envelope(run_id="demo", sender="b", incarnation=1, sequence=1, to="aggregator", message=message)
    flaw = inspect(envelope, FragmentManifest((tensors(1),))).flaw
    assert flaw.reason is Reason.WRONG_SHAPE
    assert field in flaw.detail


@pytest.mark.parametrize("codec", [Codec.F32, Codec.BF16])
@pytest.mark.parametrize("kind", [Kind.RDA, Kind.MEAN])
def test_merging_from_parts_gives_the_bytes_of_merging_whole_tensors(codec, kind):
    rng = np.random.default_rng(1)
    spec = TensorSpec(name="w", shape=(300, 700), dtype="float32", kind=kind)
    values = [rng.normal(size=spec.shape).astype(np.float32) for _ in range(3)]
    whole = [(encode_tensor(each, codec),) for each in values]

    def pieced(each, axis, at):
        after = tuple(at if i == axis else 0 for i in range(2))
        halves = zip([(0, 0), after], np.split(each, [at], axis), strict=True)
        pieces = (Piece(start, encode_tensor(np.ascontiguousarray(half), codec)) for start, half in halves)
        return Pieced(spec.shape, tuple(pieces))

    parts = [(pieced(values[0], 0, 111),), whole[1], (pieced(values[2], 1, 333),)]
    weights = [(1.0, 1.0), (2.0, 0.5), (3.0, 1.0)]

    def merged(payloads):
        contributions = [
            Part(island_id=str(i), steps=steps(0, 4), payload=payload, token_weight=w, staleness_weight=s)
            for i, (payload, (w, s)) in enumerate(zip(payloads, weights, strict=True))
        ]
        return merge_fragment((spec,), contributions)

    assert np.array_equal(merged(whole).delta, merged(parts).delta)
    assert merged(whole).norms == merged(parts).norms
