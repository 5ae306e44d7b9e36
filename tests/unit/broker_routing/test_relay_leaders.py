"""Of the relay: who leads, one shard or several, who stands by, and what finds its way to whom."""

import dataclasses

import pytest

from broker.routing.deliveries import ROOM_S
from broker.routing.directory import MAX_SHARDS
from broker.routing.events import Report, Send
from broker.wire import messages as m
from broker.wire.messages import AGGREGATOR, Channel, Reason, standing_by
from tests.aggregator_hand import beat
from tests.relay_bench import CONFIG, Driver, contribution, fleet_state, join, version, welcome

# --- aggregators ------------------------------------------------------------------------------------------------------


def test_attach_is_answered_with_the_versions_held(driver):
    driver.receive(AGGREGATOR, m.Attach(shard=0, epoch=1, versions=()))
    first = driver.sends[0].envelope.sequence
    driver.attach(versions=(4, 7, -1))
    driver.receive(AGGREGATOR, version(1, 7))
    driver.receive(AGGREGATOR, m.Attach(shard=0, epoch=1, versions=(4, 7, -1)))
    assert driver.sent == [(b"aggregator/0/control", m.Attached(versions=(-1, 7, -1)))]
    assert driver.sends[0].envelope.sequence == first + 2, "the broker numbers its own messages"


def test_an_aggregator_that_has_not_attached_over_this_connection_is_refused(driver):
    for message, to in ((fleet_state(), "a"), (version(), "")):
        driver.receive(AGGREGATOR, message, to=to)
        assert driver.reason() is Reason.NOT_LEADER
    driver.attach()
    driver.receive(AGGREGATOR, version(), route=b"somebody else")
    assert driver.reason() is Reason.NOT_LEADER
    assert driver.relay.held_bytes == 0


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


def test_a_broker_that_stood_still_gives_up_nobody_whose_words_wait_for_it(led):
    led.receive("a", beat())
    led.now_s += 2 * CONFIG.forget_after_s  # frozen, or its clock jumped: this is the first that it reads
    led.receive("a", beat())
    assert led.sent == [(b"aggregator/0/control", beat())]
    assert led.notes == []
    led.tick(led.now_s + CONFIG.leader_silent_s)
    assert led.notes == ["relay.leader_lost"]


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
    def heard(step):
        led.receive("a", beat(step))
        return [message.reason if isinstance(message, m.Refused) else type(message) for _, message in led.sent]

    for step in range(3):
        assert heard(step) == [m.Heartbeat]
        led.receive(AGGREGATOR, fleet_state(), to="a")
        led.now_s += 0.5
    assert heard(3) == [m.Heartbeat]  # the aggregator has its time to answer
    led.now_s += 0.5
    assert heard(4) == [m.Heartbeat, Reason.NOT_LEADER]
    assert led.sent[1][1].kind == "heartbeat"
    led.receive(AGGREGATOR, fleet_state(), to="a")
    assert heard(5) == [m.Heartbeat]


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


# --- several shards ---------------------------------------------------------------------------------------------------


def roster(to_shard=1, epoch=1):
    seeding = {"phase": m.Phase.SEEDING, "seeding_id": 0, "seeder": "", "seeder_incarnation": 0}
    run = {"serial": 1, "fragments": (), "recipe": None, "members": (), "tenures": ()}
    return m.Roster(to_shard=to_shard, epoch=epoch, **seeding, **run)


def rostered(shard=1, epoch=1):
    heard = {"roster_epoch": 0, "roster_serial": 0, "seeding_id": 0}
    return m.Rostered(shard=shard, epoch=epoch, **heard, flushed=False, begins=(), reached=())


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
    for fragment_id in (0, 98):  # also one that does not exist: its shard says so
        sharded.receive("a", contribution(fragment_id=fragment_id))
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
    sharded.tick(sharded.now_s + ROOM_S)
    assert [peer for peer, _ in sharded.sent] == [b"b1", b"b1"]


def test_rosters_go_from_shard_0_to_the_shard_they_are_for_and_answers_back(driver):
    for shard in (0, 1, 2):
        attach_shard(driver, shard, shards=3)
    for shard in (1, 2):
        for message, route, reached in ((roster(to_shard=shard), 0, shard), (rostered(shard), shard, 0)):
            driver.receive(AGGREGATOR, message, route=b"c%d" % route)
            assert driver.sent == [(b"c%d" % reached, message)]


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
    sharded.receive(AGGREGATOR, m.Attach(shard=MAX_SHARDS, epoch=1, versions=()))
    assert sharded.reason() is Reason.IMPLAUSIBLE
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


# --- standbys ---------------------------------------------------------------------------------------------------------

B = standing_by("b")


def follow(epoch=1, shard=0, made_under=None, fragment_version=1):
    stored = (m.Stored(fragment_id=shard, fragment_version=fragment_version, digest="ab"),)
    made_under = epoch if made_under is None else made_under
    return m.Follow(shard=shard, epoch=epoch, stored=stored, made_under=made_under, run_epoch=epoch, run_serial=1)


def replica(epoch=1):
    what = {"fragment_id": 0, "fragment_version": 1, "digest": "ab", "round_id": 1}
    return m.Replica(shard=0, epoch=epoch, commit=b"", payload=(), **what)


class Broker(Driver):
    """A relay with a standby."""

    def follow(self, sender=B, **changes):
        self.receive(sender, follow(**changes), incarnation=0)
        return self.following()

    def follow_bulk(self, sender=B, **more):
        return self.receive(sender, m.FollowBulk(shard=0), incarnation=0, **more)

    def following(self):
        """What the standby was just told."""
        (found,) = (message for _, message in self.sent if isinstance(message, m.Following))
        return found


@pytest.fixture
def broker():
    return Broker()


def test_a_standby_hears_who_leads_since_when_and_what_is_held_here_and_the_leader_hears_it(broker):
    broker.attach(epoch=4)
    broker.receive(AGGREGATOR, version(1, 7, epoch=4))
    broker.now_s += 0.75
    held = m.Stored(fragment_id=1, fragment_version=7, digest="00")
    broker.follow()
    (forwarded,) = (send for send in broker.sends if isinstance(send.envelope.message, m.Follow))
    assert (forwarded.channel, forwarded.peer) == (Channel.CONTROL, b"aggregator/0/control")
    assert forwarded.envelope.sender == B
    assert broker.following() == m.Following(epoch=4, leader_heard_ago_s=0.75, stored=(held,), newest=None)


def test_replicas_and_run_records_go_to_the_standby_over_its_newest_bulk_connection(broker):
    broker.attach()
    broker.follow_bulk()
    for message in (replica(), m.ReplicaRun(shard=0, epoch=1, serial=1, record=b"")):
        broker.receive(AGGREGATOR, message, to=B)
        assert broker.sent == [(b"standby:b/0/bulk", message)]
        assert broker.sends[0].channel is Channel.BULK
    broker.follow_bulk(route=b"again")
    broker.receive(AGGREGATOR, replica(), to=B)
    assert broker.sent == [(b"again", replica())]


def test_only_a_standby_follows_and_it_does_nothing_else(broker):
    broker.attach()
    for sender, message in (("island-0", follow()), (AGGREGATOR, follow()), (B, beat()), (B, join()), (B, version())):
        broker.receive(sender, message)
        assert broker.reason() is Reason.WRONG_ROLE, (sender, type(message))
    broker.receive(B, follow(shard=MAX_SHARDS), incarnation=0)
    assert broker.reason() is Reason.IMPLAUSIBLE


def test_standbys_are_counted_among_the_peers_and_forgotten_like_them(broker):
    for n in range(CONFIG.max_peers):
        broker.follow(sender=standing_by(f"s{n}"))
    broker.receive(standing_by("more"), follow(), incarnation=0)
    assert broker.reason() is Reason.QUEUE_FULL
    broker.tick(broker.now_s + 2 * CONFIG.forget_after_s)
    broker.follow(sender=standing_by("more"))
    assert broker.relay.num_peers == 1


def test_a_standby_hears_which_other_one_has_the_newest_store_of_its_shard(broker):
    def say(name, made_under, version, shard=0):
        return broker.follow(standing_by(name), made_under=made_under, fragment_version=version, shard=shard).newest

    assert say("b", 1, 9) is None
    assert say("c", 2, 5).name == "b"
    assert say("d", 2, 4) == m.Standing(name="c", made_under=2, stored=follow(fragment_version=5).stored)
    assert say("e", 7, 7, shard=1) is None
    assert say("c", 2, 5).name == "d"
    broker.now_s += CONFIG.leader_silent_s
    assert say("b", 1, 9) is None  # nobody else was heard since
