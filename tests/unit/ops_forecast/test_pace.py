"""The forecast of a fleet: bytes, bandwidth, time and memory, in figures that can be checked by hand."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.base.errors import ConfigError
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.messages import Codec
from broker.wire.number_formats import encoded_bytes
from ops.forecast.fleet import PLANNED, Assume, Fleet, Mode
from ops.forecast.footprint import contribution_bytes, cut, version_bytes, wire_of
from ops.forecast.links import load_of, merging_steps, required
from ops.forecast.pace import forecast
from ops.forecast.planner import notes, plan
from tests.planned_fleets import N, fleet, site
from tests.profiles import examples


def test_a_round_costs_the_encoded_fragment_and_a_header():
    assert contribution_bytes((1000, 24), Codec.BF16) == 2048 + 270 + 2 * 75
    assert version_bytes((1000, 24), Codec.F32) == 4096 + 270 + 2 * 75 + 200
    assert contribution_bytes((1000,), Codec.INT4) == encoded_bytes(Codec.INT4, 1000) + 345 == 516 + 345


@pytest.mark.parametrize("codec", Codec)
def test_a_cycle_moves_every_parameter_once(codec):
    wire = wire_of(cut(N + 3, (), 8), codec=codec, version_codec=Codec.F32)
    assert wire.rounds == 8
    bits = {Codec.F32: 32, Codec.BF16: 16, Codec.INT8: 8.125, Codec.INT4: 4.125}[codec]
    assert sum(wire.ups) == pytest.approx(N * bits / 8, rel=0.01)
    assert sum(wire.downs) == pytest.approx(4 * N, rel=0.01)


def test_fragments_cut_by_number_are_even_and_complete():
    assert cut(10, (), 4) == ((3,), (3,), (2,), (2,))


def test_decoupled_needs_the_model_once_per_interval_in_each_direction():
    found = forecast(fleet(sync_interval=24, fragments=8), Mode.DECOUPLED)
    assert found.up_gbps == pytest.approx(N * 2 * 8e-9 / 12, rel=2e-3)
    assert found.down_gbps == pytest.approx(N * 4 * 8e-9 / 12, rel=4e-3)
    assert found.broker_up_gbps == 4 * found.down_gbps
    assert found.broker_down_gbps == 4 * found.up_gbps
    assert found.utilisation == 1.0
    assert found.rounds_apart_s == pytest.approx(1.5)
    rounds = 4 * 86_400 / found.rounds_apart_s
    assert found.traffic_gb_per_day == pytest.approx(rounds * (found.round_up_bytes + found.round_down_bytes) / 1e9)


@pytest.mark.parametrize("mode", [Mode.DECOUPLED, Mode.STREAMING, Mode.DILOCO])
@pytest.mark.parametrize(("codec", "version_codec"), [(Codec.INT4, Codec.F32), (Codec.F32, Codec.BF16)])
@pytest.mark.parametrize("fragments", [1, 2, 5])
def test_neither_direction_could_be_narrower(mode, codec, version_codec, fragments):
    """Each one is its flow, or as wide as the journey of the largest fragment needs it beside the other one."""
    asked = fleet(
        codec=codec, version_codec=version_codec, fragments=fragments, latency_s=0.1, overlap=8, utilisation=0.5
    )
    load, need = load_of(asked, mode), required(load_of(asked, mode), 0.5)
    busy = 1.0 if mode is Mode.DECOUPLED else 0.5
    within_s = load.interval_s if mode is Mode.DECOUPLED else load.turn_s + 8 * 0.5 * (mode is Mode.STREAMING)
    ways = ((max(load.wire.ups), need.up_gbps), (max(load.wire.downs), need.down_gbps))
    journey_s = 0.2 + sum(nbytes * 8e-9 / gbps for nbytes, gbps in ways)
    assert journey_s <= within_s * (1 + 1e-6)
    for cycle, gbps in ((sum(load.wire.ups), need.up_gbps), (sum(load.wire.downs), need.down_gbps)):
        assert gbps == pytest.approx(cycle * 8e-9 * busy / load.interval_s) or journey_s == pytest.approx(within_s)


@pytest.mark.parametrize(("parameters", "fragments"), [(5 * 10**9, 8), (10**10, 8), (10**12, 24), (5 * 10**9, 1)])
def test_a_slow_aggregator_stretches_the_interval_and_asks_nothing_more_of_the_links(parameters, fragments):
    """Of eight sites whose merging takes minutes: the need is that of the H that was asked for, of the flow alone."""
    asked = fleet(sites=8, parameters=parameters, fragments=fragments, step_s=1.0)
    found = forecast(asked, Mode.DECOUPLED)
    flow = parameters * 8e-9 / 24
    both = 2 * flow + 4 * flow  # of one fragment, up and then down
    expected = (2 * flow, 4 * flow) if fragments > 1 else (both, both)
    assert (found.up_gbps, found.down_gbps) == pytest.approx(expected, rel=1e-3)
    assert found.sync_interval_steps >= merging_steps(asked)
    assert any("Merging every fragment once" in each for each in notes(asked, plan(asked)))


def test_shards_share_the_merging_and_the_model():
    """Eight fragments: five aggregators have two at most, as four have."""
    asked = fleet(sites=8, parameters=5 * 10**9, step_s=1.0, gbps=10.0)
    steps = {n: merging_steps(replace(asked, shards=n)) for n in (1, 2, 4, 5, 8)}
    assert [steps[1] / each for each in steps.values()] == pytest.approx([1, 2, 4, 4, 8], rel=0.02)
    one, eight = (plan(replace(asked, shards=n)) for n in (1, 8))
    assert eight.chosen.sync_interval_steps == 24 < one.chosen.sync_interval_steps
    assert eight.memory["aggregator"].expected < one.memory["aggregator"].expected
    assert any("Merging every" in each for each in notes(asked, one))
    assert not any("Merging every" in each for each in notes(replace(asked, shards=8), eight))


def test_one_aggregator_and_the_broker_share_a_host():
    asked = fleet(sites=8, parameters=5 * 10**9, step_s=1.0)
    memory = plan(asked).memory
    assert memory["aggregator"].expected + memory["broker"].expected == pytest.approx(60.9e9, rel=1e-2)
    with pytest.raises(ConfigError, match=r"too little for the aggregator beside the broker: it takes 61\.1"):
        plan(replace(asked, host_memory_gb=40.0))
    shared = replace(asked, shards=8, host_memory_gb=90.0)
    assert plan(shared).memory["aggregator"].expected < 30e9


def test_one_site_that_is_far_away_changes_nothing_for_the_others():
    """At 13 s each way a round of it takes longer than H; rounds do not wait, and it is merged a version later."""
    near, far = site(gbps=1.0, latency_s=0.01), site(name="far", gbps=1.0, latency_s=13.0)
    asked, alike = fleet(step_s=0.5), fleet(sites=4, gbps=1.0, latency_s=0.01)
    asked = replace(asked, sites=(near, near, near, far))
    found, expected = forecast(asked, Mode.DECOUPLED), forecast(alike, Mode.DECOUPLED)
    assert (found.exact_gbps, found.sync_interval_steps) == (expected.exact_gbps, expected.sync_interval_steps)
    assert found.tokens_per_day == expected.tokens_per_day
    lost = forecast(replace(asked, sites=(near, near, near, replace(far, latency_ms=200_000.0))), Mode.DECOUPLED)
    assert lost.tokens_per_day == pytest.approx(expected.tokens_per_day * 3 / 4, rel=0.01)
    assert forecast(replace(asked, assume=Assume.PAPER), Mode.DECOUPLED).arrivals[-1].age < 2
    with pytest.raises(ConfigError, match="latency alone takes"):
        forecast(replace(asked, sites=(near, far, far, far)), Mode.DECOUPLED)


@pytest.mark.parametrize("gbps", [0.017, 0.002])
def test_one_site_on_a_narrow_link_does_not_choose_for_all(gbps):
    wide, narrow = site(step_s=1.0, gbps=10.0), site(name="narrow", step_s=1.0, gbps=gbps)
    asked = replace(fleet(parameters=10**9), sites=(wide,) * 7 + (narrow,))
    planned = plan(asked)
    assert (planned.choice.fleet.sync_interval, planned.choice.link_gbps) == (24, 10.0)
    assert any(note.startswith("narrow: in") for note in notes(asked, planned))
    if gbps < 0.016:
        with pytest.raises(ConfigError, match="needs at least"):
            plan(replace(asked, sites=(wide,) * 2 + (narrow,) * 6))


@examples(60)
@given(
    gbps=st.floats(0.5, 40.0),
    parameters=st.sampled_from([10**8, 10**9, 5 * 10**9]),
    fragments=st.sampled_from([1, 2, 8]),
    sites=st.integers(2, 8),
)
@example(gbps=9.99, parameters=5 * 10**9, fragments=1, sites=2)
@example(gbps=2.0, parameters=10**9, fragments=1, sites=2)
@example(gbps=6.66, parameters=5 * 10**9, fragments=8, sites=8)
def test_a_wider_link_never_makes_the_interval_longer_or_work_much_staler(gbps, parameters, fragments, sites):
    def found(width):
        asked = fleet(sites=sites, parameters=parameters, fragments=fragments, step_s=1.0, gbps=width)
        return forecast(asked, Mode.DECOUPLED)

    narrow, wide = found(gbps), found(1.02 * gbps)
    assert wide.sync_interval_steps <= narrow.sync_interval_steps * (1 + 1e-9)
    assert wide.staleness <= narrow.staleness + 0.05


@pytest.mark.parametrize("tau", [0, 1, 2, 5, 7])
@pytest.mark.parametrize("fragments", [2, 8, 24])
@pytest.mark.parametrize("latency_s", [0.4, 2.2])
def test_streaming_waits_as_a_timeline_of_its_steps_says(fragments, tau, latency_s):
    """Step n + tau begins when the version of what was captured before step n is there; several may be under way."""
    asked = fleet(fragments=fragments, overlap=tau, latency_s=latency_s, gbps=1000.0, utilisation=0.01)
    found = forecast(asked, Mode.STREAMING)
    steps, spacing, starts = 24_000, 24 // fragments, []
    for step in range(steps):
        at_s = starts[-1] + 0.5 if starts else 0.0
        captured = step - tau
        if captured >= 0 and captured % spacing == 0:
            at_s = max(at_s, (starts[captured] if tau else at_s) + found.round_s)
        starts.append(at_s)
    assert found.utilisation == pytest.approx(steps * 0.5 / starts[-1], rel=2e-3)


def test_staleness_is_the_journeys_share_of_the_interval():
    fast = forecast(fleet(gbps=1000.0), Mode.DECOUPLED)
    assert fast.staleness == pytest.approx(1 / 24, rel=0.1)  # half a step before the capture, half before adoption
    far = forecast(fleet(gbps=1000.0, latency_s=1.0), Mode.DECOUPLED)
    assert far.staleness == pytest.approx((4 + 1) / 24, rel=0.05)  # there and back: 2 s, 4 steps


def test_links_that_are_too_narrow_upwards_stretch_the_interval_and_keep_islands_computing():
    needed = forecast(fleet(codec=Codec.F32), Mode.DECOUPLED)
    found = forecast(fleet(codec=Codec.F32, gbps=needed.up_gbps / 2), Mode.DECOUPLED)
    assert found.fits is False
    assert found.utilisation == 1.0
    assert found.sync_interval_steps == pytest.approx(48, rel=3e-3)
    assert found.tokens_per_day == needed.tokens_per_day
    assert found.traffic_gb_per_day == pytest.approx(needed.traffic_gb_per_day / 2, rel=1e-3)


def test_of_versions_that_are_too_many_for_links_some_are_skipped_and_rounds_keep_their_pace():
    needed = forecast(fleet(), Mode.DECOUPLED)  # bf16 up, f32 down
    found = forecast(fleet(gbps=needed.down_gbps / 2), Mode.DECOUPLED)
    assert (found.fits, found.utilisation) == (False, 1.0)
    assert found.sync_interval_steps == pytest.approx(24, rel=1e-3)
    assert {round(each.received, 3) for each in found.arrivals} == {0.5}
    assert found.tokens_per_day == needed.tokens_per_day
    assert found.traffic_gb_per_day == pytest.approx(needed.traffic_gb_per_day * 2 / 3, rel=1e-2)
    assert 1 < found.staleness < 3


@pytest.mark.parametrize(
    ("times", "limit", "in_time"), [(1.0, 8, 1.0), (2.5, 8, 1.0), (3.0, 8, 0.815), (4.0, 8, 0.288), (2.0, 4, 0.435)]
)
def test_one_narrow_link_costs_its_own_site_what_is_too_stale_and_the_others_nothing(times, limit, in_time):
    wide = fleet(gbps=1.0, codec=Codec.F32, max_staleness=limit, max_staleness_s=0.0)
    need = forecast(wide, Mode.DECOUPLED)
    asked = replace(
        wide, sites=(*wide.sites[1:], replace(wide.sites[0], name="far", bandwidth=need.exact_gbps / times))
    )
    found = forecast(asked, Mode.DECOUPLED)
    assert (found.sync_interval_steps, found.round_s, found.staleness) == (24, need.round_s, need.staleness)
    assert [each.in_time for each in found.arrivals] == [1, 1, 1, pytest.approx(in_time, abs=0.01)]
    assert found.tokens_per_day == pytest.approx(need.tokens_per_day * (3 + in_time) / 4, rel=0.01)
    assert found.traffic_gb_per_day == pytest.approx(need.traffic_gb_per_day * (3 + 1 / times) / 4, rel=0.01)
    told = [each for each in notes(asked, plan(asked)) if each.startswith("far: in")]
    assert len(told) == (times > 1)


def test_at_a_fast_pace_staleness_is_allowed_by_seconds():
    found = []
    for seconds in (0.0, 120.0):
        wide = fleet(gbps=1000.0, codec=Codec.F32, step_s=0.1, max_staleness_s=seconds)
        need = forecast(wide, Mode.DECOUPLED)
        slow = replace(wide.sites[0], name="far", bandwidth=need.exact_gbps / 4.0)
        found.append(forecast(replace(wide, sites=(*wide.sites[1:], slow)), Mode.DECOUPLED).arrivals[-1].in_time)
    assert found == [pytest.approx(0.288, abs=0.01), 1]


@pytest.mark.parametrize(
    ("latency_s", "told"),
    [
        (1.9, []),
        (7.9, ["The way there and back takes 8 steps of 24. It costs about 3% of the loss of a small model."]),
        (
            8.1,
            [
                "The way there and back takes 9 steps of 24: H grows to 27, which then costs no more and sends less. "
                "It costs about 3% of the loss of a small model."
            ],
        ),
    ],
)
def test_what_a_journey_costs_is_noted_and_that_an_interval_has_room_for_three(latency_s, told):
    asked = fleet(latency_s=latency_s / 2, step_s=1.0)
    assert [each for each in notes(asked, plan(asked)) if each.startswith("The way there and back")] == told


def test_where_most_links_are_narrow_rounds_follow_the_median_and_the_narrowest_is_late_even_so():
    asked = fleet(codec=Codec.F32)
    need = forecast(asked, Mode.DECOUPLED).exact_gbps
    asked = replace(asked, sites=tuple(site(gbps=need / times) for times in (1, 2, 2, 8)))
    found = forecast(asked, Mode.DECOUPLED)
    assert found.sync_interval_steps == pytest.approx(48, rel=3e-3)
    assert [round(each.participation, 2) for each in found.arrivals] == [1, 1, 1, 0.25]
    assert "H is 48." in notes(asked, plan(asked))[0]


@pytest.mark.parametrize("mode", [Mode.DP, Mode.DILOCO, Mode.STREAMING])
def test_a_baseline_that_no_link_brings_to_the_target_is_told_with_what_it_reaches(mode):
    far = fleet(sites=8, step_s=1.0, gbps=10.0, latency_s=5.0, parameters=10**9, utilisation=0.95)
    found = plan(far).alternatives[mode]
    assert found.beyond
    assert found.fits is False
    assert 0.0 < found.utilisation < 0.95
    near = forecast(replace(far, utilisation=found.utilisation * (1 - 1e-6)), mode)
    assert (near.beyond, near.utilisation) == ("", found.utilisation)
    with pytest.raises(ConfigError):
        forecast(fleet(sites=8, step_s=1.0, latency_s=5.0, parameters=10**9), mode)


def test_diloco_waits_for_the_whole_journey():
    found = forecast(fleet(gbps=0.01, latency_s=0.1), Mode.DILOCO)
    journey_s = (N * 2 + N * 4) * 8e-9 / 0.01 + 0.2
    assert found.round_s == pytest.approx(journey_s, rel=2e-3)
    assert found.utilisation == pytest.approx(12 / (12 + journey_s), rel=1e-3)


@pytest.mark.parametrize("mode", PLANNED)
@pytest.mark.parametrize("fragments", [1, 8])
@pytest.mark.parametrize("target", [0.5, 0.9])
@pytest.mark.parametrize("assume", Assume)
def test_the_required_link_reaches_the_target_and_no_narrower_one_would_do(mode, fragments, target, assume):
    asked = {"utilisation": target, "fragments": fragments, "assume": assume}
    needed = forecast(fleet(**asked), mode)
    gbps = max(needed.up_gbps, needed.down_gbps)
    found, narrow = (forecast(fleet(**asked, gbps=each), mode) for each in (gbps, 0.98 * gbps))
    assert found.fits is True
    assert found.utilisation >= target - 1e-6
    if assume is Assume.ATOLL:  # the paper's are rounded up to a grid
        assert narrow.fits is False
        assert narrow.utilisation < target or narrow.staleness > needed.staleness


def test_unequal_sites_are_paced_by_the_median_and_synchronous_ones_by_the_slowest():
    unequal = Fleet(parameters=N, sites=(site(step_s=0.5), site(step_s=0.5), site(step_s=0.5), site(step_s=2.0)))
    decoupled, together = forecast(unequal, Mode.DECOUPLED), forecast(replace(unequal, utilisation=0.9), Mode.DILOCO)
    assert decoupled.rounds_apart_s == pytest.approx(1.5)
    assert decoupled.tokens_per_day == pytest.approx(86_400 * 1000 * (3 / 0.5 + 1 / 2.0))
    assert together.tokens_per_day == pytest.approx(86_400 * 1000 * 4 / 2.0 * 0.9)


def test_memory_grows_with_the_islands_only_by_their_messages():
    few, many = (plan(fleet(sites=m)).memory["aggregator"].bound for m in (4, 12))
    assert many - few == pytest.approx(8 * N / 8 * 4, rel=0.02)
    planned = plan(fleet()).memory
    assert all(each.bound is None or each.expected <= each.bound for each in planned.values())
    assert planned["island_accelerators"].expected == 16 * N


def unequal(**changes):
    """Seven matrices and an embedding thirteen times their size: a fragment each."""
    shapes = [(1000, 1000)] * 7 + [(13_000, 1000)]
    kinds = [Kind.RDA] * 7 + [Kind.MEAN]
    named = enumerate(zip(shapes, kinds, strict=True))
    tensors = tuple(TensorSpec(name=f"t{i}", shape=shape, dtype="float32", kind=kind) for i, (shape, kind) in named)
    return fleet(parameters=20 * N, tensors=tensors, fragments=8, **changes)


def test_a_round_is_open_for_as_long_as_its_own_fragment_takes():
    asked = unequal(step_s=0.1)
    found = forecast(asked, Mode.DECOUPLED)
    payload = cut(asked.parameters, asked.tensors, 8)
    wire = wire_of(payload, codec=asked.codec, version_codec=asked.version_codec)
    merging_s = [0.006 + 4 * 0.003 + sum(f) * (13e-9 + 4 * 1.3e-9) for f in payload]
    ways_s = [
        8e-9 * (up / found.up_gbps + down / found.down_gbps) for up, down in zip(wire.ups, wire.downs, strict=True)
    ]
    journeys_s = [way + made for way, made in zip(ways_s, merging_s, strict=True)]
    assert found.round_s == pytest.approx(max(journeys_s))
    assert sum(found.open_shares) == pytest.approx(sum(min(1, each / 2.4) for each in journeys_s))
    assert sum(found.open_shares) < 2
    assert found.staleness == pytest.approx((sum(journeys_s) / 8 / 0.1 + 1) / found.sync_interval_steps)
    planned = plan(asked).memory
    contributions = 4 * sum(up * min(1, each / 2.4) for up, each in zip(wire.ups, journeys_s, strict=True))
    empty = 192 * 2**20
    making = 4 * 2 * 2 * 13 * N + max(wire.downs)
    assert making > 4 * 20 * N
    assert planned["aggregator"].expected == pytest.approx(empty + 4 * 20 * N + making + contributions)
    assert all(each.bound is None or each.expected <= each.bound for each in planned.values())


def test_of_several_aggregators_the_fullest_is_told():
    alone, shared = (plan(unequal(shards=n)).memory["aggregator"].expected for n in (1, 8))
    largest = 4 * 13 * N
    assert shared > 192 * 2**20 + 5 * largest  # the one that has the embedding, and nothing else
    assert shared <= alone
