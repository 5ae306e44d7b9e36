"""Of the relay: what waits, for aggregators and for islands, and the limits that hold whatever comes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.routing.deliveries import BURST, ROOM_S
from broker.routing.directory import UNKNOWN
from broker.routing.resending import PATIENT_S, RESEND_S
from broker.wire import messages as m
from broker.wire.messages import AGGREGATOR, BROKER, Reason
from tests.aggregator_hand import beat
from tests.profiles import examples
from tests.relay_bench import CONFIG, Driver, contribution, fleet_state, join, state_part, version

# --- backpressure towards the aggregator ------------------------------------------------------------------------------


def test_blocked_contributions_wait_in_order_and_are_tried_again_after_a_while_or_where_there_is_room(led):
    led.receive("a", contribution(from_step=0), nbytes=50)
    led.block(led.sends[0])
    assert led.relay.queued_bytes == 50
    led.receive("b", contribution(), nbytes=50)
    assert led.sent == []
    assert led.relay.queued_bytes == 100
    assert led.relay.next_deadline_s() == pytest.approx(led.now_s + ROOM_S)
    led.tick(led.now_s + ROOM_S)
    assert [send.envelope.sender for send in led.sends] == ["a", "b"]
    assert led.relay.queued_bytes == 0
    sent = led.sends[1]
    led.block(sent)
    led.room(sent)
    assert [send.envelope for send in led.sends] == [sent.envelope]
    assert led.relay.queued_bytes == 0


def test_a_long_queue_is_tried_a_burst_at_a_time_and_keeps_its_order():
    driver = Driver(dataclasses.replace(CONFIG, peer_queue_bytes=10_000, total_queue_bytes=20_000))
    driver.attach()
    driver.receive("a", contribution(from_step=0, to_step=1))
    driver.block(driver.sends[0])
    for step in range(1, 3 * BURST - 1):
        driver.receive("a", contribution(from_step=step, to_step=step + 1))

    def tried():
        driver.tick(driver.relay.next_deadline_s())
        while not driver.sends:  # a deadline that another one has put off
            driver.tick(driver.relay.next_deadline_s())
        return [send.envelope.message.steps.from_step for send in driver.sends]

    assert tried() == list(range(BURST))
    for send in driver.sends:
        driver.block(send)
    assert tried() == list(range(BURST))
    last = 3 * BURST - 1
    driver.receive("a", contribution(from_step=last, to_step=last + 1))
    assert driver.sends == []
    assert tried() == list(range(BURST, 2 * BURST))
    assert tried() == list(range(2 * BURST, 3 * BURST))
    assert driver.relay.queued_bytes == 0
    driver.receive("a", contribution(from_step=last + 1, to_step=last + 2))
    assert len(driver.sends) == 1


def test_one_island_cannot_fill_the_queue_for_the_others(led):
    led.receive("a", contribution(from_step=0, to_step=1), nbytes=150)
    led.block(led.sends[0])
    led.receive("a", contribution(from_step=1, to_step=2), nbytes=100)  # 250 of 200 bytes
    assert led.reason() is Reason.QUEUE_FULL
    led.receive("b", contribution(), nbytes=100)
    assert led.sent == []  # queued
    led.receive("c", contribution(), nbytes=100)  # 350 of 300 bytes in total
    assert led.reason() is Reason.QUEUE_FULL
    assert led.relay.queued_bytes == 250


def test_a_contribution_larger_than_the_limit_finds_an_empty_queue_and_a_copy_of_it_takes_no_room(led):
    led.receive("a", contribution(), nbytes=1000)
    led.block(led.sends[0])
    led.receive("a", contribution(), nbytes=1000)
    assert led.sent == []
    assert led.relay.queued_bytes == 1000
    assert led.relay.counters.dropped == {"copy_in_queue": 1}
    led.tick(led.now_s + ROOM_S)
    assert len(led.sends) == 1


@pytest.mark.parametrize(
    ("after_s", "meanwhile", "passes_to"),
    [
        (0.0, "", b"aggregator/0/bulk"),
        (RESEND_S, "", None),
        (PATIENT_S, "", b"aggregator/0/bulk"),
        (RESEND_S, "delivered", b"aggregator/0/bulk"),  # and may have been lost since
        (RESEND_S, "connected again", b"again"),
    ],
)
def test_a_copy_passes_at_once_or_after_very_long_or_where_the_first_is_not_under_way(
    led, after_s, meanwhile, passes_to
):
    led.receive("a", contribution(), nbytes=50)
    first = led.sends[0]
    if meanwhile == "delivered":
        led.delivered(first)
    elif meanwhile == "connected again":
        led.receive(AGGREGATOR, m.AttachBulk(shard=0, epoch=1, shards=1), route=b"again")
    led.now_s += after_s
    led.receive("a", contribution(), nbytes=50)
    assert [send.peer for send in led.sends] == [passes_to] * bool(passes_to)
    assert led.relay.counters.dropped == ({} if passes_to else {"copy_under_way": 1})


def test_what_waits_for_a_leader_that_falls_silent_comes_back(led):
    led.receive("a", beat())
    led.receive("a", contribution(), nbytes=50)
    led.unreachable(led.sends[0])
    assert led.relay.queued_bytes == 50
    led.tick(led.now_s + CONFIG.leader_silent_s)
    assert led.reason() is Reason.NOT_LEADER
    assert led.relay.queued_bytes == 0


# --- versions to islands ----------------------------------------------------------------------------------------------


def test_what_islands_say_to_each_other_about_a_state_is_passed_on_each_on_its_channel(led):
    for name in ("donor", "receiver"):
        led.receive(name, beat())
        led.receive(name, m.Want(versions=()))
    ask = m.FetchState(state_id="", parts=(0,))
    led.receive("receiver", ask, to="donor")
    assert led.sent == [(b"donor/1/control", ask)]
    led.receive("donor", state_part(), to="receiver")
    assert led.sent == [(b"receiver/1/bulk", state_part())]
    led.block(led.sends[0])
    assert led.actions == [], "dropped: the receiver asks again"
    assert led.relay.counters.dropped == {"blocked": 1}
    assert led.relay.queued_bytes == 0


def test_small_files_are_asked_of_an_island_and_pass_to_the_leader_over_its_bulk_connection(led):
    led.receive("a", beat())
    ask = m.FetchFiles(digest="d", part=0)
    led.receive(AGGREGATOR, ask, to="a")
    assert led.sent == [(b"a/1/control", ask)]
    part = m.FilesPart(digest="d", part=0, num_bytes=4, payload=state_part().payload)
    led.receive("a", part)
    assert led.sent == [(b"aggregator/0/bulk", part)]
    led.block(led.sends[0])
    assert led.actions == [], "dropped: it is asked for again"


@pytest.mark.parametrize("arrived", [m.Want(versions=(3, -1)), beat(versions=(3, -1))], ids=["want", "heartbeat"])
def test_a_want_is_answered_with_one_version_and_the_next_goes_when_that_is_known_to_have_arrived(led, arrived):
    led.receive(AGGREGATOR, version(0, 3))
    led.receive(AGGREGATOR, version(1, 5))
    led.receive("a", m.Want(versions=(-1, -1)))
    assert led.sent == [(b"a/1/bulk", version(0, 3))]
    led.receive(AGGREGATOR, version(1, 6))
    assert led.sent == []  # one at a time, until the link is known
    led.receive("a", arrived)
    assert [each for each in led.sent if each[1] != arrived] == [(b"a/1/bulk", version(1, 6))]


def test_a_want_waits_until_something_newer_comes_and_a_later_one_replaces_it(led):
    led.receive(AGGREGATOR, version(0, 3))
    for newest in (3, 4):
        led.receive("a", m.Want(versions=(newest, -1)))
        assert led.sent == []
    led.receive(AGGREGATOR, version(0, 4))
    assert led.sent == []
    led.receive(AGGREGATOR, version(0, 5))
    assert led.sent == [(b"a/1/bulk", version(0, 5))]
    led.receive(AGGREGATOR, version(0, 6))
    assert led.sent == []


def test_a_newer_version_replaces_one_not_begun(led):
    led.receive("a", m.Want(versions=()))
    led.receive(AGGREGATOR, version(0, 1))
    led.block(led.sends[0])
    led.receive(AGGREGATOR, version(0, 2))
    led.tick(led.now_s + CONFIG.retry_s)
    assert led.sent == []  # still blocked
    led.tick(led.now_s + ROOM_S)
    assert led.sent == [(b"a/1/bulk", version(0, 2))]
    assert led.relay.queued_bytes == 0
    full = led.sends[0]
    led.block(full)
    led.receive(AGGREGATOR, version(0, 3))
    assert led.sent == []
    led.room(full)
    assert led.sent == [(b"a/1/bulk", version(0, 3))]


def test_an_island_is_forgotten_while_its_connection_is_full(led):
    led.receive("a", m.Want(versions=()))
    led.tick(led.now_s + CONFIG.forget_after_s - ROOM_S / 2)
    led.attach()
    led.receive(AGGREGATOR, version(0, 1))
    led.block(led.sends[0])
    led.tick(led.now_s + ROOM_S)
    assert led.relay.num_peers == 0


def test_no_fragment_is_starved_on_a_link_slower_than_versions_appear(led):
    for p in range(4):
        led.receive(AGGREGATOR, version(p, 0))
    served = []
    for n in range(1, 13):
        led.receive("a", m.Want(versions=(-1, -1, -1, -1)))
        served.append(led.sends[0].envelope.message.fragment_id)
        for p in (0, 1):  # these two change all the time
            led.receive(AGGREGATOR, version(p, n))
    assert sorted(served[:4]) == sorted(served[4:8]) == sorted(served[8:]) == [0, 1, 2, 3]


def test_an_older_or_repeated_version_is_not_kept(led):
    led.receive(AGGREGATOR, version(0, 3))
    led.receive(AGGREGATOR, version(0, 3))
    led.receive(AGGREGATOR, version(0, 2))
    led.receive("a", m.Want(versions=()))
    assert led.sent == [(b"a/1/bulk", version(0, 3))]
    assert led.relay.counters.dropped == {"old_version": 2}
    assert led.relay.held_bytes == 100


def test_the_same_version_of_a_later_epoch_is_kept_and_sent_to_nobody_who_has_it(led):
    led.receive(AGGREGATOR, version(0, 3))
    led.receive("a", m.Want(versions=(3,)))
    led.attach(epoch=2)
    led.receive(AGGREGATOR, version(0, 3, epoch=2), nbytes=70)
    assert led.sent == []
    assert led.relay.held_bytes == 70
    led.receive(AGGREGATOR, version(1, 0, epoch=2), nbytes=5)
    assert led.relay.held_bytes == 75


def test_an_unreachable_island_loses_its_connection_and_nothing_else(led):
    led.receive("a", beat())
    led.receive("a", m.Want(versions=()))
    led.receive(AGGREGATOR, version(0, 1))
    led.unreachable(led.sends[0])
    assert led.sent == []
    led.receive(AGGREGATOR, fleet_state(), to="a")
    assert led.sent == [(b"a/1/control", fleet_state())]
    led.receive("a", m.Want(versions=()))
    assert led.sent == [(b"a/1/bulk", version(0, 1))]


SENDERS = st.sampled_from(["a", "b", "c", "join:x", "join:y", AGGREGATOR, BROKER])
MESSAGES = st.one_of(
    st.builds(beat, st.integers(0, 3)),
    st.builds(join),
    st.builds(contribution, st.integers(0, 2), st.just(0), st.integers(1, 3)),
    st.builds(version, st.integers(0, 2), st.integers(0, 5), st.integers(1, 3)),
    st.builds(fleet_state, st.integers(1, 3)),
    st.builds(m.Want, versions=st.lists(st.integers(-1, 5), max_size=3).map(tuple)),
    st.builds(m.Attach, shard=st.just(0), epoch=st.integers(1, 3), versions=st.just((-1, -1))),
    st.builds(m.AttachBulk, shard=st.just(0), epoch=st.integers(1, 3)),
    st.builds(state_part, st.integers(0, 2)),
    st.builds(m.FetchState, state_id=st.just(""), parts=st.just((0,))),
    st.builds(m.AskDonor, tried=st.just(())),
    st.just(m.Leave(inner_step=1, tokens=10, reason="")),
    st.just(m.Refused(kind="", sequence=-1, reason=Reason.MALFORMED, detail="")),
)
STEPS = st.lists(
    st.tuples(
        SENDERS,
        MESSAGES,
        st.integers(1, 3),  # incarnation
        st.sampled_from(["", "block", "unreachable"]),
        st.sampled_from([0.0, 0.001, 0.1, 3.0, 30.0]),
        st.integers(1, 120),
    ),
    max_size=60,
)


@examples(150)
@given(steps=STEPS)
def test_whatever_comes_limits_hold(steps):
    driver, largest = Driver(dataclasses.replace(CONFIG, max_peers=4)), 120
    driver.attach()
    for sender, message, incarnation, fate, pause_s, nbytes in steps:
        driver.now_s += pause_s
        island = sender not in (AGGREGATOR, BROKER) and not sender.startswith("join:")
        to = "a" if sender == AGGREGATOR or isinstance(message, m.FetchState | m.StatePart) else ""
        driver.receive(sender, message, incarnation=incarnation if island else 0, to=to, nbytes=nbytes)
        queue = list(driver.sends) if fate else []
        while queue:
            getattr(driver, fate)(queue.pop(0))
            queue += driver.sends
        assert driver.relay.queued_bytes <= CONFIG.total_queue_bytes + largest
        assert driver.relay.num_peers <= 4
        assert driver.relay.held_bytes <= 3 * largest
        assert set(driver.relay.counters.refused) <= {"a", "b", "c", "join:x", "join:y", AGGREGATOR, UNKNOWN}
        deadline_s = driver.relay.next_deadline_s()
        assert deadline_s is None or deadline_s > driver.now_s - 1e-9
