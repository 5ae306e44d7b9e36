"""One direction of a link: nothing is lost, reordered, early or too fast, and small messages pass large ones."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.links.condition import Direction
from ops.links.lane import MAX_TURN_BYTES, MAX_WINDOW_BYTES, Delivery, Lane, Mark

#: What the lane's clock may be off by.
EARLY_S = 2e-6


def lane(seed=0, **condition):
    return Lane(Direction(**condition), random.Random(seed))


def drain(way, now_s, end_s=float("inf")):
    """Yields (time, delivery) of everything that arrives by ``end_s``, woken exactly when the lane asks for it."""
    fruitless = 0
    while True:
        fruitless += 1
        assert fruitless < 5, "the lane asks to be woken and then has nothing"
        for delivery in way.take(now_s):
            fruitless = 0
            yield now_s, delivery
        at_s = way.next_s()
        if at_s is None or at_s > end_s:
            return
        now_s = max(now_s, at_s)


def payload(deliveries, flow):
    return b"".join(each.item for each in deliveries if each.flow == flow and isinstance(each.item, bytes))


directions = st.builds(
    Direction,
    delay_ms=st.sampled_from([0.0, 1.0, 40.0]),
    jitter_ms=st.sampled_from([0.0, 5.0, 80.0]),
    mbit=st.sampled_from([0.0, 0.05, 1.0, 100.0]),
    stall=st.booleans(),
    partition=st.sampled_from([False, False, True]),
)
actions = st.one_of(
    st.tuples(st.just("offer"), st.integers(0, 2), st.sampled_from([1, 100, 5_000, 100_000])),
    st.tuples(st.just("offer"), st.just(0), st.sampled_from([5_000, 100_000])),
    st.tuples(st.just("mark"), st.integers(0, 2), st.sampled_from(list(Mark))),
    st.tuples(st.just("wait"), st.floats(0.0, 0.5), st.none()),
    st.tuples(st.just("hold"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("change"), directions, st.none()),
)


def test_a_flow_that_becomes_ready_behind_one_that_waits_for_the_rate_wakes_nobody():
    way = lane(seed=1)
    way.change(Direction(jitter_ms=5.0, mbit=100.0), 1000.0)  # its bucket is what a lane without a rate has: a packet
    for flow, size in enumerate((100_000, 1, 1)):
        way.offer(flow, bytes(size), 1000.0)
    wakes = []
    while (at_s := way.next_s()) is not None:
        wakes.append(bool(way.take(at_s)))
    fruitless = len(wakes) - sum(wakes)
    assert fruitless <= 2  # the first turn of the large one waits for the bucket, and so may its second


@given(directions, st.lists(actions, max_size=40), st.integers(0, 2**16))
def test_whatever_happens_every_flow_arrives_whole_in_order_and_not_early(first, script, seed):
    source = random.Random(seed)
    way, now_s = Lane(first, random.Random(seed)), 1000.0
    direction = first
    offered = {flow: [] for flow in range(3)}  # (not before, item), marks and bytes as they were sent
    arrived = []

    def settle(until_s):
        arrived.extend(drain(way, now_s, until_s))
        came = [each for _, each in arrived]
        for flow, sent in offered.items():
            waiting = sum(len(i) for _, i in sent if not isinstance(i, Mark)) - len(payload(came, flow))
            assert not sent or way.room(flow) == max(0, way.window_bytes - waiting)

    for kind, what, value in script:
        match kind:
            case "offer":
                data = source.randbytes(min(value, way.room(what) if offered[what] else value))
                if data:
                    offered[what].append((now_s + direction.delay_s, data))
                    way.offer(what, data, now_s)
            case "mark":
                offered[what].append((now_s + direction.delay_s, value))
                way.offer(what, value, now_s)
            case "wait":
                settle(now_s + what)
                now_s += what
            case "hold":
                way.hold(what, value)
            case "change":
                direction = what
                way.change(what, now_s)
    for flow in range(3):
        way.hold(flow, False)
    way.change(Direction(mbit=100.0), now_s)
    settle(float("inf"))

    for flow, sent in offered.items():
        came = [(at_s, each.item) for at_s, each in arrived if each.flow == flow]
        for not_before_s, item in sent:
            rest = item
            while rest:
                at_s, piece = came.pop(0)
                assert at_s >= not_before_s - EARLY_S
                assert piece == rest if isinstance(item, Mark) else piece and rest.startswith(piece)
                rest = rest[len(piece) :]
        assert came == []
    assert way.passed_bytes == sum(len(i) for sent in offered.values() for _, i in sent if not isinstance(i, Mark))


@given(
    st.sampled_from([0.05, 1.0, 8.0, 400.0]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200_000), st.floats(0.0, 0.3)), min_size=1, max_size=12),
)
def test_over_any_time_no_more_than_the_burst_and_the_rate_leave(mbit, sends):
    way, now_s, arrived = lane(mbit=mbit, delay_ms=20.0), 5.0, []
    for flow, size, wait_s in sends:
        way.offer(flow, bytes(size), now_s)
        arrived += [(at_s, len(each.item)) for at_s, each in drain(way, now_s, now_s + wait_s)]
        now_s += wait_s
    arrived += [(at_s, len(each.item)) for at_s, each in drain(way, now_s)]
    rate = way.direction.bytes_per_s
    # Cumulated, so that the worst window is found in one pass: what left up to here, less what the rate allowed.
    total, least = 0, float("inf")
    for at_s, size in arrived:
        least = min(least, total - rate * at_s)
        total += size
        assert total - rate * at_s - least <= way.burst_bytes + 1 + rate * EARLY_S


def test_a_lane_with_enough_to_send_reaches_its_rate():
    way, now_s = lane(mbit=80.0, delay_ms=40.0), 0.0
    way.offer(1, bytes(10_000_000), now_s)
    *_, (last_s, _) = drain(way, now_s)
    assert last_s == pytest.approx(0.040 + 1.0, rel=0.02)  # 10 MB at 10 MB/s


def test_the_window_keeps_the_rate_over_the_delay_and_no_more_than_twice_that():
    assert lane(mbit=100.0, delay_ms=40.0).window_bytes == 65_536 + 2 * 500_000
    assert lane(mbit=10_000.0, delay_ms=400.0).window_bytes == MAX_WINDOW_BYTES
    assert lane(delay_ms=40.0).window_bytes == MAX_WINDOW_BYTES
    way = lane(mbit=1.0)
    way.offer(1, bytes(65_000), 0.0)
    assert way.room(1) == 536
    way.offer(1, bytes(5_000), 0.0)
    assert way.room(1) == 0
    assert way.room(2) == 0  # nobody has opened it


def test_flows_share_the_rate_evenly():
    way = lane(mbit=8.0)
    for flow in range(4):
        way.offer(flow, bytes(400_000), 0.0)
    first = [each for _, each in itertools.takewhile(lambda each: each[0] <= 0.8, drain(way, 0.0))]
    sent = [len(payload(first, flow)) for flow in range(4)]
    assert sum(sent) == pytest.approx(800_000, rel=0.02)
    assert max(sent) - min(sent) <= way.burst_bytes


def test_small_messages_do_not_starve_a_flow_that_waits_for_its_turn():
    way = lane(mbit=0.8)
    way.offer(1, bytes(100_000), 0.0)
    for _ in range(1000):
        way.offer(2, bytes(100), 0.0)
    came = [each for ms in range(500) for each in way.take(ms / 1000)]  # asked far more often than it asks to be
    assert len(payload(came, 1)) > 10 * len(payload(came, 2)) > 0


def test_a_heartbeat_passes_megabytes_of_another_connection():
    way = lane(mbit=8.0, delay_ms=40.0)
    way.offer(1, bytes(4_000_000), 0.0)  # four seconds of the rate
    list(drain(way, 0.0, 0.5))
    way.offer(2, b"alive", 0.5)
    at_s = next(at_s for at_s, each in drain(way, 0.5) if each.flow == 2)
    assert 0.540 <= at_s < 0.540 + 2 * way.burst_bytes / way.direction.bytes_per_s


def test_without_a_rate_a_turn_is_all_there_is_and_with_one_it_is_small():
    way = lane()
    way.offer(1, bytes(1_000_000), 0.0)
    assert [len(each.item) for each in way.take(0.0)] == [1_000_000]
    way = lane(mbit=100_000.0)
    way.offer(1, bytes(1_000_000), 0.0)
    assert max(len(each.item) for each in way.take(0.0)) == MAX_TURN_BYTES


@pytest.mark.parametrize("blocked", [{"stall": True}, {"partition": True}])
def test_nothing_leaves_a_blocked_lane_and_all_of_it_leaves_afterwards(blocked):
    way = lane(**blocked)
    way.offer(1, b"abc", 0.0)
    assert way.take(10.0) == []
    assert way.next_s() is None
    way.change(Direction(), 20.0)
    assert way.take(20.0) == [Delivery(1, b"abc")]


def test_a_receiver_that_takes_nothing_holds_up_its_own_flow_alone_and_one_that_is_gone_is_forgotten():
    way = lane(mbit=8.0)
    for flow, data in ((1, b"one"), (2, b"two"), (3, b"three")):
        way.offer(flow, data, 0.0)
    way.hold(1, True)
    way.drop(3)
    way.drop(3)
    way.hold(3, True)
    assert way.take(0.0) == [Delivery(2, b"two")]
    assert way.next_s() is None
    way.hold(1, False)
    assert way.take(0.0) == [Delivery(1, b"one")]


def test_jitter_spreads_arrivals_over_its_whole_range_and_reorders_nothing():
    way = lane(delay_ms=10.0, jitter_ms=100.0)
    for i in range(200):
        way.offer(i, b"x", 0.0)
    times_s = [at_s for at_s, _ in drain(way, 0.0)]
    assert 0.010 <= times_s[0] < 0.020
    assert 0.100 < times_s[-1] <= 0.110


@pytest.mark.parametrize("piece", [100, 64_000])
def test_damage_changes_as_many_bytes_as_was_asked_for_and_never_their_number(piece):
    way, data = lane(corrupt_per_mb=500.0), random.Random(1).randbytes(1_000_000)
    for start in range(0, len(data), piece):
        way.offer(1, data[start : start + piece], 0.0)
    came = payload(way.take(0.0), 1)
    assert len(came) == len(data)
    assert sum(a != b for a, b in zip(came, data, strict=True)) == pytest.approx(500, rel=0.15)
    way.change(Direction(), 0.0)
    way.offer(1, data, 0.0)
    assert payload(way.take(0.0), 1) == data
