"""Of the relay: who leads, one shard or several, and what finds its way to whom."""

import dataclasses

import pytest

from broker.routing.directory import MAX_SHARDS
from broker.routing.relay import Report, Send
from broker.wire import messages as m
from broker.wire.messages import AGGREGATOR, Channel, Reason
from tests.aggregator_hand import beat
from tests.relay_bench import CONFIG, contribution, fleet_state, join, version, welcome

# --- aggregators ------------------------------------------------------------------------------------------------------


def test_attach_is_answered_with_the_versions_held(driver):
    driver.attach(versions=(4, 7, -1))
    driver.receive(AGGREGATOR, version(1, 7))
    driver.receive(AGGREGATOR, m.Attach(shard=0, epoch=1, versions=(4, 7, -1)))
    assert driver.sent == [(b"aggregator/0/control", m.Attached(versions=(-1, 7, -1)))]


def test_aggregator_that_has_not_attached_is_refused(driver):
    driver.receive(AGGREGATOR, fleet_state(), to="a")
    assert driver.reason() is Reason.NOT_LEADER
    driver.receive(AGGREGATOR, version())
    assert driver.reason() is Reason.NOT_LEADER
    assert driver.relay.held_bytes == 0


def test_attachment_holds_per_connection(led):
    led.receive(AGGREGATOR, version(), route=b"somebody else")
    assert led.reason() is Reason.NOT_LEADER


def test_lower_epochs_are_fenced(led):
    led.receive(AGGREGATOR, m.Attach(shard=0, epoch=3, versions=()), route=b"new")
    assert "relay.leader_attached" in led.notes
    for message, route in [
        (m.Attach(shard=0, epoch=2, versions=()), None),
        (m.AttachBulk(shard=0, epoch=2, shards=1), None),
        (fleet_state(epoch=2), b"new"),
        (fleet_state(epoch=2), None),
        (version(epoch=2), None),
    ]:
        led.receive(AGGREGATOR, message, route=route)
        assert led.reason() is Reason.FENCED, message


def test_epoch_stays_fenced_after_its_leader_fell_silent(led):
    led.attach(epoch=3)
    led.tick(led.now_s + CONFIG.leader_silent_s)
    assert "relay.leader_lost" in led.notes
    led.receive(AGGREGATOR, m.Attach(shard=0, epoch=2, versions=()))
    assert led.reason() is Reason.FENCED
    led.receive(AGGREGATOR, m.Attach(shard=0, epoch=3, versions=()))
    assert isinstance(led.sent[0][1], m.Attached)


def test_absurd_shard_is_refused(driver):
    driver.receive(AGGREGATOR, m.Attach(shard=MAX_SHARDS, epoch=1, versions=()))
    assert driver.reason() is Reason.IMPLAUSIBLE


def test_without_a_leader_control_is_dropped_and_contributions_come_back(driver):
    driver.receive("a", beat())
    assert driver.reason() is Reason.NOT_LEADER
    assert [type(action) for action in driver.actions] == [Report, Send]  # Redis hears of it all the same
    assert driver.relay.counters.dropped == {"no_leader": 1}
    assert driver.relay.counters.refused == {}  # nothing is wrong with a heartbeat
    driver.receive("a", contribution())
    assert driver.reason() is Reason.NOT_LEADER
    assert Reason.NOT_LEADER in m.RETRY_REASONS


def test_the_broker_says_that_it_lives_where_the_aggregator_does_not_answer(led):
    for step in range(3):
        led.receive("a", beat(step))
        led.receive(AGGREGATOR, fleet_state(), to="a")
        assert [type(message) for _, message in led.sent] == [m.FleetState]
        led.now_s += 0.5
    led.receive("a", beat(3))
    assert [type(message) for _, message in led.sent] == [m.Heartbeat]  # the aggregator has its time to answer
    led.now_s += 0.5
    led.receive("a", beat(4))
    forwarded, refused = (message for _, message in led.sent)
    assert isinstance(forwarded, m.Heartbeat)
    assert (refused.kind, refused.reason) == ("heartbeat", Reason.NOT_LEADER)
    led.receive(AGGREGATOR, fleet_state(), to="a")
    led.receive("a", beat(5))
    assert [type(message) for _, message in led.sent] == [m.Heartbeat]


def test_an_island_that_was_away_when_the_run_ended_hears_of_it_when_its_aggregator_has_gone(led):
    def answer():
        led.receive("a", beat())
        return [each.envelope.message for each in led.sends if isinstance(each.envelope.message, m.Refused)]

    led.receive("b", beat())
    led.receive(AGGREGATOR, fleet_state(phase=m.Phase.ENDED), to="b")
    assert answer() == []
    led.receive("b", beat())
    led.unreachable(led.sends[0])
    (said,) = answer()
    assert said.reason is Reason.NOT_LEADER, "its connection broke, and it may come back"
    led.tick(led.now_s + CONFIG.leader_silent_s)
    (said,) = answer()
    assert (said.kind, said.reason) == ("heartbeat", Reason.RUN_ENDED)
    led.receive("join:x", join())
    assert led.reason() is Reason.RUN_ENDED, "who comes later hears of it as well"
    led.attach(epoch=2)  # it goes on
    led.tick(led.now_s + CONFIG.leader_silent_s)
    (said,) = answer()
    assert said.reason is Reason.NOT_LEADER


def test_contributions_follow_the_fragment_to_its_shard(driver):
    driver.receive(AGGREGATOR, m.Attach(shard=0, epoch=1, versions=(0,)), route=b"c0")
    driver.receive(AGGREGATOR, m.AttachBulk(shard=0, epoch=1, shards=1), route=b"b0")
    driver.receive("a", contribution(fragment_id=0))
    assert driver.sends[0].peer == b"b0"
    driver.receive("a", contribution(fragment_id=99))  # unknown: shard 0 says so
    assert driver.sends[0].peer == b"b0"


# --- several shards ---------------------------------------------------------------------------------------------------


def roster(to_shard=1, epoch=1):
    return m.Roster(
        to_shard=to_shard,
        epoch=epoch,
        serial=1,
        phase=m.Phase.SEEDING,
        seeding_id=0,
        seeder="",
        seeder_incarnation=0,
        fragments=(),
        recipe=None,
        members=(),
        tenures=(),
    )


def rostered(shard=1, epoch=1):
    return m.Rostered(
        shard=shard,
        epoch=epoch,
        roster_epoch=0,
        roster_serial=0,
        seeding_id=0,
        flushed=False,
        begins=(),
        reached=(),
    )


def attach_shard(driver, shard, epoch=1, shards=2):
    """Attaches over connections c0 and b0, c1 and b1, and so on."""
    attach = m.Attach(shard=shard, shards=shards, epoch=epoch, versions=(-1,) * 4)
    driver.receive(AGGREGATOR, attach, route=f"c{shard}".encode())
    return driver.receive(AGGREGATOR, m.AttachBulk(shard=shard, epoch=epoch, shards=shards), route=f"b{shard}".encode())


@pytest.fixture
def sharded(driver):
    """Two shards, and an island that the broker knows."""
    for shard in (0, 1):
        attach_shard(driver, shard)
    driver.receive("a", beat())
    driver.receive(AGGREGATOR, fleet_state(), route=b"c0", to="a")
    return driver


def test_heartbeats_and_farewells_reach_every_shard_and_are_observed_once(sharded):
    for message in (beat(1), m.Leave(inner_step=1, tokens=10, reason="bye")):
        sharded.receive("a", message)
        assert sharded.sent == [(b"c0", message), (b"c1", message)]
        assert [type(action) for action in sharded.actions].count(Report) == 1


def test_a_silent_shard_holds_up_nobody_elses_fragments(sharded):
    sharded.now_s += CONFIG.leader_silent_s / 2
    attach_shard(sharded, 0)
    sharded.tick(sharded.now_s + CONFIG.leader_silent_s / 2)
    assert sharded.notes == ["relay.leader_lost"]
    sharded.receive("a", contribution(fragment_id=1))
    assert sharded.reason() is Reason.NOT_LEADER
    assert "shard 1" in sharded.refusal().envelope.message.detail
    sharded.receive("a", contribution(fragment_id=0))
    assert [peer for peer, _ in sharded.sent] == [b"b0"]
    sharded.receive("a", beat(1))
    assert sharded.sent == [(b"c0", beat(1))]
    assert sharded.relay.counters.dropped == {"no_leader": 1}


def test_a_shard_whose_connection_is_full_lets_the_others_through(sharded):
    sharded.receive("a", contribution(fragment_id=1))
    sharded.block(sharded.sends[0])
    sharded.receive("a", contribution(fragment_id=1, from_step=1, to_step=2), nbytes=50)
    assert sharded.sent == []
    sharded.receive("a", contribution(fragment_id=0))
    assert [peer for peer, _ in sharded.sent] == [b"b0"]
    attach_shard(sharded, 0)
    assert [message for _, message in sharded.sent if isinstance(message, m.Contribution)] == []
    sharded.tick(sharded.now_s + CONFIG.retry_s)
    assert [peer for peer, _ in sharded.sent] == [b"b1", b"b1"]


def test_rosters_go_from_shard_0_to_the_shard_they_are_for_and_answers_back(driver):
    for shard in (0, 1, 2):
        attach_shard(driver, shard, shards=3)
    for shard in (1, 2):
        driver.receive(AGGREGATOR, roster(to_shard=shard), route=b"c0")
        assert driver.sent == [(b"c%d" % shard, roster(to_shard=shard))]
        driver.receive(AGGREGATOR, rostered(shard), route=b"c%d" % shard)
        assert driver.sent == [(b"c0", rostered(shard))]


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (0, dataclasses.replace(fleet_state(), shard=1, shards=2)),
        (1, fleet_state()),
        (0, version(fragment_id=1)),
        (1, version(fragment_id=2)),
        (1, roster()),
        (1, roster(to_shard=0)),
        (0, rostered()),
        (1, rostered(shard=2)),
        (1, welcome("a", 2)),
    ],
)
def test_a_shard_that_speaks_for_another_is_refused(sharded, shard, message):
    route = b"c%d" if message.channel is Channel.CONTROL else b"b%d"
    sharded.receive(AGGREGATOR, message, route=route % shard, to="a")
    assert sharded.reason() is Reason.WRONG_ROLE
    assert f"shard {shard} speaks for itself alone" in sharded.refusal().envelope.message.detail
    assert sharded.relay.held_bytes == 0
    sharded.receive("a", beat(1))
    assert len(sharded.sent) == 2, "it is still the first life that the broker knows"


def test_an_aggregator_that_counts_other_shards_than_those_that_lead_is_refused(sharded):
    attach_shard(sharded, 2, shards=3)
    sharded.receive(AGGREGATOR, m.Attach(shard=2, shards=3, epoch=1, versions=()), route=b"c2")
    assert sharded.reason() is Reason.IMPLAUSIBLE
    assert "shard 0 leads as one of 2: start all" in sharded.refusal().envelope.message.detail
    sharded.receive("a", m.Nothing(round_id=1, fragment_id=2))
    assert [peer for peer, _ in sharded.sent] == [b"c0"], "fragments still belong to shards as before"


def test_epochs_are_compared_within_a_shard(sharded):
    attach_shard(sharded, 1, epoch=7)
    assert isinstance(sharded.receive(AGGREGATOR, fleet_state(epoch=1), route=b"c0", to="a")[0], Send)
    assert sharded.sent[0][0].startswith(b"a/")
    for message, route in (
        (m.Attach(shard=1, shards=2, epoch=6, versions=()), b"c1"),
        (dataclasses.replace(fleet_state(epoch=6), shard=1, shards=2), b"c1"),
        (rostered(epoch=6), b"c1"),
        (version(fragment_id=1, epoch=6), b"b1"),
    ):
        sharded.receive(AGGREGATOR, message, route=route, to="a")
        assert sharded.reason() is Reason.FENCED, message
    sharded.receive(AGGREGATOR, roster(epoch=1), route=b"c0")
    assert sharded.sent == [(b"c1", roster(epoch=1))]


def test_a_shard_that_has_not_attached_yet_is_not_measured_by_the_epoch_of_another(driver):
    attach_shard(driver, 0, epoch=5)  # to a broker that has just started
    for message in (version(fragment_id=1), rostered(), dataclasses.replace(fleet_state(), shard=1, shards=2)):
        driver.receive(AGGREGATOR, message, route=b"1")
        assert driver.reason() is Reason.NOT_LEADER, message  # as fenced it would take its store for behind
