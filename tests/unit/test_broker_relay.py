"""The relay's rules, event by event; its driver is the test."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker import messages as m
from broker.directory import MAX_SHARDS, UNKNOWN
from broker.errors import ConfigError
from broker.hearing import Carried
from broker.identity import Identity, KeyRole
from broker.messages import AGGREGATOR, BROKER, Channel, Envelope, Reason
from broker.ranges import StepRange
from broker.relay import (
    AllowListChanged,
    Blocked,
    Note,
    Observe,
    Received,
    Rejected,
    Relay,
    RelayConfig,
    Send,
    Tick,
    TurnedAway,
    Unreachable,
)
from broker.resending import RESEND_S

RUN = "demo"
CONFIG = RelayConfig(run_id=RUN, peer_queue_bytes=200, total_queue_bytes=300, max_peers=50)


# --- messages -------------------------------------------------------------------------------------------------------


def beat(step=0):
    return m.Heartbeat(
        inner_step=step,
        tokens=step * 10,
        loss=None,
        step_time_s=None,
        sync_share=0.0,
        bytes_up=0,
        bytes_down=0,
        versions=(),
        overwritten_tokens=(),
        outstanding=(),
        stopped=False,
    )


def contribution(fragment_id=0, from_step=0, to_step=1):
    steps = StepRange(from_step=from_step, to_step=to_step, from_tokens=from_step * 10, to_tokens=to_step * 10)
    return m.Contribution(round_id=1, fragment_id=fragment_id, steps=steps, trained_on=(), payload=())


def version(fragment_id=0, fragment_version=0, epoch=1):
    return m.Version(
        epoch=epoch,
        fragment_id=fragment_id,
        fragment_version=fragment_version,
        digest="00",
        contributions=(),
        payload=(),
    )


def join(nonce="n"):
    return m.Join(nonce=nonce, island_id="", hint="", tensors=(), tokens_per_step=10)


def welcome(island_id, incarnation, nonce="n"):
    settings_ = m.RunSettings(
        sync_interval_steps=4,
        keep=1.0,
        codec=m.Codec.F32,
        heartbeat_interval_s=0.5,
        total_tokens=0,
        tokens_per_fleet_step=10,
        seed=0,
    )
    return m.Welcome(
        nonce=nonce,
        island_id=island_id,
        incarnation=incarnation,
        epoch=1,
        fragments=(),
        settings=settings_,
        share=m.Share(index=0, count=1, share_epoch=0),
        start_step=0,
        start_tokens=0,
    )


def fleet_state(epoch=1):
    return m.FleetState(
        epoch=epoch,
        phase=m.Phase.RUNNING,
        rounds=(),
        due_soon=(),
        versions=(),
        resolutions=(),
        seed=(),
        trained_tokens=0,
        fleet_ratio=1.0,
        share=m.Share(index=0, count=1, share_epoch=0),
    )


def state_part(index=0):
    return m.StatePart(state_id="1.4", part=index, num_parts=3, state_bytes=12, payload=())


# --- the driver -----------------------------------------------------------------------------------------------------


class Driver:
    """Hands events to a relay and remembers the last actions."""

    def __init__(self, config=CONFIG):
        self.relay = Relay(config)
        self.now_s = 100.0
        self.sequence = 0
        self.actions = []

    def event(self, event):
        self.actions = self.relay.handle(event, self.now_s)
        return self.actions

    def receive(
        self,
        sender,
        message,
        *,
        route=None,
        channel=None,
        incarnation=None,
        to="",
        run=RUN,
        nbytes=100,
        key="",
        carried=None,
    ):
        """What ``sender`` sends over its usual connection."""
        self.sequence += 1
        channel = channel or message.channel
        if incarnation is None:
            incarnation = 0 if sender == AGGREGATOR or sender.startswith("join:") else 1
        route = route or f"{sender}/{incarnation}/{channel}".encode()
        envelope = Envelope(
            run_id=run, sender=sender, incarnation=incarnation, sequence=self.sequence, to=to, message=message
        )
        return self.event(
            Received(channel=channel, peer=route, envelope=envelope, size_bytes=nbytes, key=key, carried=carried)
        )

    def attach(self, versions=(-1, -1), epoch=1, shard=0):
        self.receive(AGGREGATOR, m.Attach(shard=shard, epoch=epoch, versions=versions))
        return self.receive(AGGREGATOR, m.AttachBulk(shard=shard, epoch=epoch, shards=1))

    def block(self, send):
        return self.event(
            Blocked(channel=send.channel, peer=send.peer, envelope=send.envelope, size_bytes=send.size_bytes)
        )

    def unreachable(self, send):
        return self.event(
            Unreachable(channel=send.channel, peer=send.peer, envelope=send.envelope, size_bytes=send.size_bytes)
        )

    def tick(self, now_s):
        self.now_s = now_s
        return self.event(Tick())

    @property
    def sends(self):
        return [action for action in self.actions if isinstance(action, Send)]

    @property
    def sent(self):
        """(routing id, message) of what was sent."""
        return [(send.peer, send.envelope.message) for send in self.sends]

    @property
    def notes(self):
        return [action.event for action in self.actions if isinstance(action, Note)]

    def refusal(self):
        """The one refusal sent; fails if there is none or something else."""
        (send,) = self.sends
        assert isinstance(send.envelope.message, m.Refused), send
        assert send.envelope.sender == BROKER
        return send

    def reason(self):
        return self.refusal().envelope.message.reason


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def led(driver):
    driver.attach()
    return driver


# --- who is who -----------------------------------------------------------------------------------------------------


def test_heartbeat_reaches_the_aggregator_and_is_observed(led):
    led.receive("a", beat())
    assert led.sent == [(b"aggregator/0/control", beat())]
    assert [type(action) for action in led.actions] == [Observe, Send]


def test_answer_reaches_the_island_over_its_control_connection(led):
    led.receive("a", beat())
    led.receive("b", beat())
    led.receive(AGGREGATOR, fleet_state(), to="b")
    assert led.sent == [(b"b/1/control", fleet_state())]


def test_joiner_is_addressed_by_its_nonce(led):
    led.receive("join:n", join())
    assert led.sent == [(b"aggregator/0/control", join())]
    led.receive(AGGREGATOR, welcome("a", 1), to="join:n")
    assert led.sent == [(b"join:n/0/control", welcome("a", 1))]


def test_joiner_may_only_join(led):
    led.receive("join:n", beat())
    assert led.reason() is Reason.UNKNOWN_ISLAND


def test_a_reconnect_under_the_same_incarnation_moves_the_address(led):
    led.receive("a", beat(), route=b"old")
    led.receive("a", beat(), route=b"new")
    led.receive(AGGREGATOR, fleet_state(), to="a")
    assert led.sent == [(b"new", fleet_state())]


def test_a_lower_incarnation_is_fenced_and_told_over_its_own_connection(led):
    led.receive("a", beat(), incarnation=2)
    led.receive("a", beat(), incarnation=1)
    assert led.reason() is Reason.FENCED
    assert led.refusal().peer == b"a/1/control"
    led.receive(AGGREGATOR, fleet_state(), to="a")
    assert led.sent == [(b"a/2/control", fleet_state())]


def test_a_welcome_fences_earlier_incarnations_before_the_new_one_is_heard(led):
    led.receive("a", beat(), incarnation=1)
    led.receive("join:n", join())
    led.receive(AGGREGATOR, welcome("a", 2), to="join:n")
    led.receive("a", beat(), incarnation=1)
    assert led.reason() is Reason.FENCED


def test_a_repeated_welcome_of_an_earlier_life_fences_nobody(led):
    led.receive("a", beat(), incarnation=2)
    led.receive(AGGREGATOR, welcome("a", 1), to="join:n")
    led.receive("a", beat(), incarnation=2)
    assert led.sent == [(b"aggregator/0/control", beat())]


def test_message_for_an_unknown_island_is_dropped_and_counted(led):
    led.receive(AGGREGATOR, fleet_state(), to="nobody")
    assert led.sent == []
    assert led.relay.counters.dropped == {"no_such_peer": 1}


def test_silent_peer_is_forgotten_and_known_again_when_it_speaks(led):
    led.receive("a", beat())
    led.receive("a", m.Want(versions=()))
    assert led.relay.num_peers == 1
    led.tick(100.0 + CONFIG.forget_after_s)
    assert led.relay.num_peers == 0
    assert "relay.island_forgotten" in led.notes
    led.attach(epoch=2)
    led.receive("a", beat())
    assert led.sent == [(b"aggregator/0/control", beat())]


def test_no_more_than_max_peers_are_known():
    driver = Driver(dataclasses.replace(CONFIG, max_peers=2))
    for nonce in ("x", "y"):
        driver.receive(f"join:{nonce}", join(nonce))
    driver.receive("join:z", join("z"))
    assert driver.reason() is Reason.QUEUE_FULL
    assert driver.relay.num_peers == 2


# --- who may send what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        ("a", fleet_state()),
        ("a", welcome("a", 1)),
        ("a", m.Attach(shard=0, epoch=9, versions=())),
        ("a", m.Attached(versions=())),
        (AGGREGATOR, beat()),
        (AGGREGATOR, join()),
        (AGGREGATOR, m.Attached(versions=())),
        (BROKER, m.Attached(versions=())),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_kind_from_the_wrong_role_is_refused(led, sender, message):
    led.receive(sender, message)
    assert led.reason() is Reason.WRONG_ROLE


def test_kind_on_the_wrong_channel_is_refused(led):
    led.receive("a", beat(), channel=Channel.BULK)
    assert led.reason() is Reason.WRONG_ROLE
    led.receive("a", contribution(), channel=Channel.CONTROL)
    assert led.reason() is Reason.WRONG_ROLE


def test_message_of_another_run_is_refused_and_makes_no_peer(led):
    led.receive("a", beat(), run="other")
    assert led.reason() is Reason.WRONG_RUN
    assert led.relay.num_peers == 0


def test_a_refusal_names_what_was_refused(led):
    led.receive("a", beat())
    led.receive("a", contribution(), channel=Channel.CONTROL)
    refused = led.refusal()
    assert refused.envelope.message.kind == "contribution"
    assert refused.envelope.message.sequence == led.sequence
    assert refused.envelope.to == "a"


def test_refusals_of_bulk_messages_go_to_the_control_connection(led):
    led.receive("a", beat())
    led.receive("a", m.Want(versions=()))
    led.receive("a", beat(), channel=Channel.BULK)
    assert (led.refusal().channel, led.refusal().peer) == (Channel.CONTROL, b"a/1/control")


def test_a_refused_refusal_is_not_answered(led):
    refused = m.Refused(kind="", sequence=-1, reason=Reason.MALFORMED, detail="")
    led.receive("a", refused)
    assert led.sent == []
    assert led.relay.counters.refused == {UNKNOWN: {Reason.WRONG_ROLE: 1}}


def test_a_refusal_by_the_aggregator_reaches_the_island_and_is_counted_there_alone(led):
    led.receive("a", beat())
    refused = m.Refused(kind="heartbeat", sequence=3, reason=Reason.UNKNOWN_ISLAND, detail="join first")
    led.receive(AGGREGATOR, refused, to="a")
    assert led.sent == [(b"a/1/control", refused)]
    assert led.relay.counters.refused == {}


def test_undecodable_input_is_refused_to_its_connection_and_counted(led):
    led.event(Rejected(channel=Channel.BULK, peer=b"?", reason=Reason.MALFORMED, detail="header is 3"))
    assert led.refusal().peer == b"?"
    assert led.refusal().envelope.message.detail == "header is 3"
    led.receive("a", beat())
    led.event(Rejected(channel=Channel.CONTROL, peer=b"a/1/control", reason=Reason.OVERSIZE, detail="", kind="join"))
    assert led.relay.counters.refused == {UNKNOWN: {Reason.MALFORMED: 1}, "a": {Reason.OVERSIZE: 1}}


def test_a_claimed_sender_is_believed_only_if_it_is_known(led):
    for n in range(100):
        claim = f"ghost-{n}"
        led.event(Rejected(channel=Channel.CONTROL, peer=b"?", reason=Reason.CHECKSUM, detail="", sender=claim))
    assert led.relay.counters.refused == {UNKNOWN: {Reason.CHECKSUM: 100}}


def test_repeated_refusals_are_noted_at_powers_of_ten(led):
    noted = []
    for n in range(1, 1001):
        led.event(Rejected(channel=Channel.CONTROL, peer=b"?", reason=Reason.MALFORMED, detail=""))
        if led.notes:
            noted.append(n)
    assert noted == [1, 10, 100, 1000]


# --- aggregators ----------------------------------------------------------------------------------------------------


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
    assert [type(action) for action in driver.actions] == [Observe, Send]  # Redis hears of it all the same
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


def test_contributions_follow_the_fragment_to_its_shard(driver):
    driver.receive(AGGREGATOR, m.Attach(shard=0, epoch=1, versions=(0,)), route=b"c0")
    driver.receive(AGGREGATOR, m.AttachBulk(shard=0, epoch=1, shards=1), route=b"b0")
    driver.receive("a", contribution(fragment_id=0))
    assert driver.sends[0].peer == b"b0"
    driver.receive("a", contribution(fragment_id=99))  # unknown: shard 0 says so
    assert driver.sends[0].peer == b"b0"


# --- several shards -------------------------------------------------------------------------------------------------


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
        assert [type(action) for action in sharded.actions].count(Observe) == 1


def test_joins_and_questions_for_a_donor_reach_shard_0_alone(sharded):
    sharded.receive(m.joining("n"), join())
    assert [peer for peer, _ in sharded.sent] == [b"c0"]
    sharded.receive("a", m.AskDonor(tried=()))
    assert [peer for peer, _ in sharded.sent] == [b"c0"]


@pytest.mark.parametrize(("fragment_id", "shard"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_what_is_about_a_fragment_reaches_its_shard_alone(sharded, fragment_id, shard):
    for message in (
        m.Nothing(round_id=1, fragment_id=fragment_id),
        contribution(fragment_id=fragment_id),
        m.Seed(fragment_id=fragment_id, payload=()),
    ):
        sharded.receive("a", message)
        route = b"c%d" if message.channel is Channel.CONTROL else b"b%d"
        assert sharded.sent == [(route % shard, message)]


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


def test_what_waits_when_the_count_of_shards_changes_waits_for_a_shard_that_is_not_there_yet(driver):
    attach_shard(driver, 0, shards=1)
    driver.receive("a", beat())
    driver.receive("a", contribution(fragment_id=1))
    driver.block(driver.sends[0])
    attach_shard(driver, 0, epoch=2, shards=2)
    (again,) = [send for send in driver.sends if isinstance(send.envelope.message, m.Contribution)]
    driver.block(again)
    driver.tick(driver.now_s + CONFIG.retry_s)
    assert driver.sent == []
    attach_shard(driver, 1, shards=2)
    assert [peer for peer, _ in driver.sent] == [b"b1"]


def test_rosters_go_from_shard_0_to_the_shard_they_are_for_and_answers_back(driver):
    for shard in (0, 1, 2):
        attach_shard(driver, shard, shards=3)
    for shard in (1, 2):
        driver.receive(AGGREGATOR, roster(to_shard=shard), route=b"c0")
        assert driver.sent == [(b"c%d" % shard, roster(to_shard=shard))]
        driver.receive(AGGREGATOR, rostered(shard), route=b"c%d" % shard)
        assert driver.sent == [(b"c0", rostered(shard))]


def test_a_roster_for_a_shard_that_is_away_is_dropped_and_counted(driver):
    attach_shard(driver, 0)
    driver.receive(AGGREGATOR, roster(), route=b"c0")
    assert driver.sent == []
    assert driver.relay.counters.dropped == {"no_leader": 1}


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


def test_an_aggregator_that_counts_other_shards_takes_no_place_by_its_bulk_connection_either(sharded):
    sharded.receive(AGGREGATOR, m.AttachBulk(shard=1, epoch=2, shards=3), route=b"b-wrong")
    assert sharded.reason() is Reason.IMPLAUSIBLE
    sharded.receive(AGGREGATOR, version(fragment_id=1, fragment_version=5, epoch=2), route=b"b-wrong")
    assert sharded.relay.held_bytes == 0
    sharded.receive("a", contribution(fragment_id=1))
    assert [peer for peer, _ in sharded.sent] == [b"b1"], "it goes to the one that leads"


def test_a_shard_may_begin_anew_with_another_number_once_all_others_are_gone(sharded):
    sharded.tick(sharded.now_s + CONFIG.leader_silent_s + 1)
    sharded.receive(AGGREGATOR, m.Attach(shard=0, shards=1, epoch=2, versions=()), route=b"c0")
    assert [type(message) for _, message in sharded.sent] == [m.Attached]


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


def test_a_new_leader_of_one_shard_takes_the_place_of_no_other(sharded):
    attach = m.Attach(shard=1, shards=2, epoch=2, versions=(-1,) * 4)
    sharded.receive(AGGREGATOR, attach, route=b"new")
    sharded.receive("a", beat(1))
    assert sharded.sent == [(b"c0", beat(1)), (b"new", beat(1))]
    sharded.receive(AGGREGATOR, rostered(epoch=2), route=b"c1")
    assert sharded.reason() is Reason.NOT_LEADER, "that connection is no leader's any more"


def test_a_shard_that_has_not_attached_yet_is_not_measured_by_the_epoch_of_another(driver):
    attach_shard(driver, 0, epoch=5)  # to a broker that has just started
    for message in (version(fragment_id=1), rostered(), dataclasses.replace(fleet_state(), shard=1, shards=2)):
        driver.receive(AGGREGATOR, message, route=b"1")
        assert driver.reason() is Reason.NOT_LEADER, message  # as fenced it would take its store for behind


@pytest.mark.parametrize(("shard", "shards"), [(1, 1), (0, 0), (2, 2), (0, MAX_SHARDS + 1)])
def test_an_absurd_number_of_shards_is_refused(driver, shard, shards):
    driver.receive(AGGREGATOR, m.Attach(shard=shard, shards=shards, epoch=1, versions=()))
    assert driver.reason() is Reason.IMPLAUSIBLE


# --- backpressure towards the aggregator ----------------------------------------------------------------------------


def test_blocked_contributions_wait_in_order_and_are_tried_again(led):
    led.receive("a", contribution(from_step=0), nbytes=50)
    (first,) = led.sends
    led.block(first)
    assert led.relay.queued_bytes == 50
    led.receive("b", contribution(), nbytes=50)
    assert led.sent == []
    assert led.relay.queued_bytes == 100
    assert led.relay.next_deadline_s() == pytest.approx(led.now_s + CONFIG.retry_s)
    led.tick(led.now_s + CONFIG.retry_s)
    assert [send.envelope.sender for send in led.sends] == ["a", "b"]
    assert led.relay.queued_bytes == 0


def test_order_survives_a_retry_that_fails_for_all(led):
    led.receive("a", contribution(), nbytes=50)
    led.block(led.sends[0])
    led.receive("b", contribution(), nbytes=50)
    led.tick(led.now_s + CONFIG.retry_s)
    for send in led.sends:
        led.block(send)
    led.tick(led.now_s + CONFIG.retry_s)
    assert [send.envelope.sender for send in led.sends] == ["a", "b"]


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


def test_a_contribution_larger_than_the_limit_still_finds_an_empty_queue(led):
    led.receive("a", contribution(), nbytes=1000)
    led.block(led.sends[0])
    led.tick(led.now_s + CONFIG.retry_s)
    assert len(led.sends) == 1


def test_a_copy_of_what_waits_already_takes_no_room(led):
    led.receive("a", contribution(), nbytes=50)
    led.block(led.sends[0])
    led.receive("a", contribution(), nbytes=50)
    assert led.sent == []
    assert led.relay.queued_bytes == 50
    assert led.relay.counters.dropped == {"copy_in_queue": 1}


def large(from_step=0):
    """A contribution of 40 bytes, and what is about it."""
    payload = (m.Encoded(codec=m.Codec.F32, shape=(10,), checksum=0, data=memoryview(bytes(40))),)
    return dataclasses.replace(contribution(from_step=from_step, to_step=from_step + 1), payload=payload)


def later(led, message, carried):
    """What an island sends after a pause."""
    led.now_s += RESEND_S
    return led.receive("a", message, nbytes=50, carried=carried)


def test_a_copy_of_what_has_not_left_this_machine_goes_nowhere(led):
    led.receive("a", large(), nbytes=50, carried=Carried(up=900, down=0, waiting=100))
    assert led.sends[0].peer == led.relay.onwards(b"a", led.sends[0].envelope)
    later(led, large(), Carried(up=1_039, down=0, waiting=1))
    assert led.sent == []
    assert led.relay.counters.dropped == {"copy_under_way": 1}
    later(led, large(), Carried(up=1_040, down=0, waiting=1))
    assert len(led.sends) == 1  # the first one has left, and may have been lost


SLOW = Carried(up=0, down=0, waiting=100)


def test_a_copy_of_what_went_with_the_old_connection_passes(led):
    led.receive("a", large(), nbytes=50, carried=SLOW)
    led.receive(AGGREGATOR, m.AttachBulk(shard=0, epoch=1, shards=1), route=b"again", carried=SLOW)
    later(led, large(), SLOW)
    assert [send.peer for send in led.sends] == [b"again"]
    later(led, large(), SLOW)
    assert led.sent == []


def test_what_waited_for_a_new_connection_is_under_way_from_then_on(led):
    led.receive("a", large(1), nbytes=50, carried=SLOW)
    led.unreachable(led.sends[0])
    led.receive(AGGREGATOR, m.AttachBulk(shard=0, epoch=1, shards=1), route=b"again", carried=SLOW)
    assert [send.peer for send in led.sends] == [b"again"]
    later(led, large(1), SLOW)
    assert led.sent == []


def test_what_a_full_connection_gave_back_is_sent_when_it_takes_more_and_no_copy_of_it(led):
    led.receive("a", large(), nbytes=50, carried=SLOW)
    led.block(led.sends[0])
    led.receive("a", large(), nbytes=50, carried=SLOW)
    led.tick(led.now_s + CONFIG.retry_s)
    assert len(led.sends) == 1
    later(led, large(), SLOW)
    assert led.sent == []
    assert led.relay.counters.dropped == {"copy_in_queue": 1, "copy_under_way": 1}
    later(led, large(), Carried(up=140, down=0, waiting=1))
    assert len(led.sends) == 1, "what was given back was counted twice"


def test_only_what_goes_on_to_an_aggregator_asks_for_the_account_of_its_connection(led):
    led.receive("a", beat())
    assert led.relay.onwards(b"a", led.sends[0].envelope) is None
    led.receive("a", m.Seed(fragment_id=0, payload=()))
    assert led.relay.onwards(b"a", led.sends[0].envelope) == led.sends[0].peer
    seed = led.sends[0].envelope
    led.tick(led.now_s + CONFIG.leader_silent_s)
    assert led.relay.onwards(b"a", seed) is None
    attach = dataclasses.replace(seed, message=m.AttachBulk(shard=0, epoch=1, shards=1))
    assert led.relay.onwards(b"its own", attach) == b"its own"


def test_what_waits_for_a_leader_that_falls_silent_comes_back(led):
    led.receive("a", beat())
    led.receive("a", contribution(), nbytes=50)
    led.unreachable(led.sends[0])
    assert led.relay.queued_bytes == 50
    led.tick(led.now_s + CONFIG.leader_silent_s)
    assert led.reason() is Reason.NOT_LEADER
    assert led.relay.queued_bytes == 0


def test_contribution_to_a_vanished_connection_waits_for_the_next(led):
    led.receive("a", contribution())
    led.unreachable(led.sends[0])
    assert led.relay.queued_bytes == 100
    led.receive(AGGREGATOR, m.AttachBulk(shard=0, epoch=1, shards=1), route=b"again")
    assert [send.peer for send in led.sends] == [b"again"]
    assert led.relay.queued_bytes == 0


def test_a_blocked_control_message_is_dropped_and_counted(led):
    led.receive("a", beat())
    before = led.relay.next_deadline_s()
    led.block(led.sends[0])
    assert led.sent == []
    assert led.relay.counters.dropped == {"blocked": 1}
    assert led.relay.next_deadline_s() == before


def test_bytes_sent_do_not_count_what_bounced(led):
    led.receive("a", contribution(), nbytes=70)
    before = led.relay.counters.sent_bytes
    led.block(led.sends[0])
    assert led.relay.counters.sent_bytes == before - 70


# --- versions by credit ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("to", ["nobody", AGGREGATOR, BROKER, ""])
def test_a_state_part_for_no_island_goes_nowhere(led, to):
    led.receive("a", beat())
    led.receive("a", state_part(), to=to)
    assert led.actions == []
    assert led.relay.counters.dropped == {"no_such_peer": 1}


def test_a_want_is_answered_with_one_version(led):
    led.receive(AGGREGATOR, version(0, 3))
    led.receive(AGGREGATOR, version(1, 5))
    led.receive("a", m.Want(versions=()))
    assert led.sent == [(b"a/1/bulk", version(0, 3))]
    led.receive(AGGREGATOR, version(1, 6))
    assert led.sent == []  # the credit is spent
    led.receive("a", m.Want(versions=(3, -1)))
    assert led.sent == [(b"a/1/bulk", version(1, 6))]


def test_a_want_waits_until_something_newer_comes(led):
    led.receive(AGGREGATOR, version(0, 3))
    led.receive("a", m.Want(versions=(3, -1)))
    assert led.sent == []
    led.receive(AGGREGATOR, version(0, 4))
    assert led.sent == [(b"a/1/bulk", version(0, 4))]


def test_a_later_want_replaces_the_earlier_one(led):
    led.receive("a", m.Want(versions=(3,)))
    led.receive("a", m.Want(versions=(4,)))
    led.receive(AGGREGATOR, version(0, 4))
    assert led.sent == []
    led.receive(AGGREGATOR, version(0, 5))
    assert len(led.sends) == 1
    led.receive(AGGREGATOR, version(0, 6))
    assert led.sent == []


def test_a_newer_version_replaces_one_not_begun(led):
    led.receive("a", m.Want(versions=()))
    led.receive(AGGREGATOR, version(0, 1))
    led.block(led.sends[0])
    led.receive(AGGREGATOR, version(0, 2))
    assert led.sent == []  # still blocked
    led.tick(led.now_s + CONFIG.retry_s)
    assert led.sent == [(b"a/1/bulk", version(0, 2))]
    assert led.relay.queued_bytes == 0


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
    led.receive(AGGREGATOR, version(0, 3, epoch=2))
    assert led.sent == []
    assert led.relay.held_bytes == 100


def test_a_new_connection_is_not_blocked_by_its_predecessor(led):
    led.receive("a", m.Want(versions=()))
    led.receive(AGGREGATOR, version(0, 1))
    led.block(led.sends[0])
    led.receive("a", m.Want(versions=()), route=b"new")
    assert led.sent == [(b"new", version(0, 1))]


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


def test_an_empty_broker_heals_from_what_it_hears():
    """After a restart: attach, see what is missing, publish it again; islands ask again."""
    driver = Driver()
    driver.receive("a", m.Want(versions=(2,)))
    driver.receive(AGGREGATOR, m.AttachBulk(shard=0, epoch=5, shards=1))
    driver.receive(AGGREGATOR, m.Attach(shard=0, epoch=5, versions=(3,)))
    assert driver.sent == [(b"aggregator/0/control", m.Attached(versions=(-1,)))]
    driver.receive(AGGREGATOR, version(0, 3, epoch=5))
    assert driver.sent == [(b"a/1/bulk", version(0, 3, epoch=5))]


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["peer_queue_bytes", "max_peers", "forget_after_s", "leader_silent_s", "retry_s"])
def test_limits_must_be_positive(name):
    with pytest.raises(ConfigError, match=f"{name} = 0: must be above 0"):
        dataclasses.replace(CONFIG, **{name: 0})


def test_the_total_must_hold_the_share_of_one():
    with pytest.raises(ConfigError, match="at least peer_queue_bytes"):
        RelayConfig(run_id=RUN, peer_queue_bytes=10, total_queue_bytes=9)


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
        st.sampled_from(["deliver", "block", "lose"]),
        st.sampled_from([0.0, 0.001, 0.1, 3.0, 30.0]),
        st.integers(1, 120),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_whatever_comes_limits_hold_and_nobody_is_sent_what_it_did_not_ask_for(steps):
    driver = Driver(dataclasses.replace(CONFIG, max_peers=4))
    driver.attach()
    largest = 120
    wants = {}
    for sender, message, incarnation, fate, pause_s, nbytes in steps:
        driver.now_s += pause_s
        island = sender not in (AGGREGATOR, BROKER) and not sender.startswith("join:")
        driver.receive(
            sender,
            message,
            incarnation=incarnation if island else 0,
            to="a" if sender == AGGREGATOR or isinstance(message, m.FetchState | m.StatePart) else "",
            nbytes=nbytes,
        )
        if isinstance(message, m.Want) and island:
            wants[sender, incarnation] = message.versions
        queue = list(driver.sends)
        while queue:
            send = queue.pop(0)
            sent = send.envelope.message
            if isinstance(sent, m.Version):
                name, life, _ = send.peer.decode().split("/")
                had = wants[name, int(life)]
                assert sent.fragment_version > (had[sent.fragment_id] if sent.fragment_id < len(had) else -1)
            if fate == "block":
                driver.block(send)
            elif fate == "lose":
                driver.unreachable(send)
            else:
                if isinstance(sent, m.Version):
                    del wants[name, int(life)]  # one transfer for one want
                continue
            queue += driver.sends
        assert driver.relay.queued_bytes <= CONFIG.total_queue_bytes + largest
        assert driver.relay.num_peers <= 4
        assert driver.relay.held_bytes <= 3 * largest
        assert set(driver.relay.counters.refused) <= {"a", "b", "c", "join:x", "join:y", AGGREGATOR, UNKNOWN}
        deadline_s = driver.relay.next_deadline_s()
        assert deadline_s is None or deadline_s > driver.now_s - 1e-9


# --- keys -----------------------------------------------------------------------------------------------------------

ALLOWED = {
    "K-paris": Identity(role=KeyRole.ISLAND, name="paris"),
    "K-rome": Identity(role=KeyRole.ISLAND, name="rome"),
    "K-leader": Identity(role=KeyRole.AGGREGATOR, name="aggregator"),
}


@pytest.fixture
def keyed():
    """A relay with keys, a leader, and the island paris."""
    driver = Driver()
    driver.event(AllowListChanged(allowed=ALLOWED))
    driver.receive(AGGREGATOR, m.Attach(shard=0, epoch=1, versions=(-1,)), key="K-leader")
    driver.receive(AGGREGATOR, m.AttachBulk(shard=0, epoch=1, shards=1), key="K-leader")
    driver.receive("paris", beat(), key="K-paris")
    return driver


def refusals_in(actions):
    sends = [action for action in actions if isinstance(action, Send)]
    return [send.envelope.message.reason for send in sends if isinstance(send.envelope.message, m.Refused)]


def test_a_message_that_does_not_fit_its_key_goes_nowhere_and_is_laid_to_the_key(keyed):
    keyed.receive("rome", beat(), key="K-rome")
    for sender, message, key in (
        ("paris", beat(9), "K-rome"),
        ("paris", contribution(), "K-rome"),
        ("paris", m.Want(versions=(-1,)), "K-rome"),
        (AGGREGATOR, m.Attach(shard=0, epoch=5, versions=(3,)), "K-rome"),
        (AGGREGATOR, version(0, 7, epoch=5), "K-rome"),
        ("join:n", m.Join(nonce="n", island_id="paris", hint="", tensors=(), tokens_per_step=1), "K-rome"),
        ("paris", beat(9), "K-unknown"),
        ("paris", beat(9), ""),
    ):
        actions = keyed.receive(sender, message, route=b"elsewhere", key=key, incarnation=7)
        assert refusals_in(actions) == [Reason.WRONG_KEY]
        assert [type(action) for action in actions if isinstance(action, Send)] == [Send]
    assert keyed.relay.counters.refused["rome"][Reason.WRONG_KEY] == 6
    assert keyed.relay.counters.refused[UNKNOWN][Reason.WRONG_KEY] == 2
    assert "paris" not in keyed.relay.counters.refused
    # The real ones are where they were: not fenced, not cut off, not overtaken.
    assert not refusals_in(keyed.receive("paris", beat(10), key="K-paris"))
    assert not refusals_in(keyed.receive(AGGREGATOR, version(0, 1, epoch=1), key="K-leader"))


def test_a_revoked_island_is_forgotten_and_a_revoked_key_says_nothing_more(keyed):
    keyed.receive("paris", m.Want(versions=(-1,)), key="K-paris")
    actions = keyed.event(AllowListChanged(allowed={key: each for key, each in ALLOWED.items() if key != "K-paris"}))
    assert [action.event for action in actions if isinstance(action, Note)] == ["relay.island_revoked"]
    assert keyed.relay.num_peers == 0
    sends = keyed.receive(AGGREGATOR, version(0, 1), key="K-leader")
    assert not [action for action in sends if isinstance(action, Send)]  # its credit is gone with it
    assert refusals_in(keyed.receive("paris", beat(), key="K-paris")) == [Reason.WRONG_KEY]
    keyed.event(AllowListChanged(allowed=ALLOWED))
    assert not refusals_in(keyed.receive("paris", beat(), key="K-paris"))


def test_those_turned_away_at_the_port_are_counted_and_noted_now_and_then(keyed):
    notes = 0
    for _ in range(100):
        actions = keyed.event(TurnedAway(channel=Channel.BULK, reason=Reason.WRONG_KEY, detail="no such key"))
        notes += len(actions)
    keyed.event(TurnedAway(channel=Channel.BULK, reason=None, detail="a knock"))
    assert keyed.relay.counters.refused[UNKNOWN] == {Reason.WRONG_KEY: 100}
    assert keyed.relay.counters.dropped["silent_connection"] == 1
    assert notes == 3


def test_a_message_played_back_over_its_connection_is_refused_and_counted(keyed):
    for _ in range(3):
        keyed.receive("paris", beat(), key="K-paris")
    assert keyed.relay.counters.repeated_messages == 0
    keyed.sequence -= 2
    actions = keyed.receive("paris", beat(), key="K-paris")
    assert refusals_in(actions) == [Reason.REPLAYED]
    assert [type(action) for action in actions if isinstance(action, Send)] == [Send], "it goes nowhere else"
    assert keyed.relay.counters.refused["paris"] == {Reason.REPLAYED: 1}
    assert keyed.relay.counters.repeated_messages == 1
    keyed.sequence = 0
    assert not refusals_in(keyed.receive("paris", beat(), key="K-paris", route=b"new")), "which starts anew"


def test_what_let_others_go_first_is_not_played_back(keyed):
    keyed.sequence = 10
    keyed.receive("paris", beat(), key="K-paris")
    keyed.sequence = 5
    assert not refusals_in(keyed.receive("paris", beat(), key="K-paris"))


def test_a_want_that_is_played_back_brings_no_version(keyed):
    keyed.receive(AGGREGATOR, version(0, 1), key="K-leader")
    served = keyed.receive("paris", m.Want(versions=(-1,)), key="K-paris")
    assert m.Version in {type(a.envelope.message) for a in served if isinstance(a, Send)}
    keyed.sequence -= 1
    served = keyed.receive("paris", m.Want(versions=(-1,)), key="K-paris")
    assert m.Version not in {type(a.envelope.message) for a in served if isinstance(a, Send)}


def test_what_a_leader_or_a_standby_has_said_cannot_be_played_back_either(driver):
    driver.attach()
    attach = m.Attach(shard=0, epoch=1, versions=(3,))
    follow = m.Follow(shard=0, epoch=1, stored=(), run_epoch=1, run_serial=1, made_under=1)
    for sender, message in ((AGGREGATOR, attach), (AGGREGATOR, version(0, 1)), (m.standing_by("b"), follow)):
        assert not refusals_in(driver.receive(sender, message, incarnation=0))
        driver.sequence -= 1
        assert refusals_in(driver.receive(sender, message, incarnation=0)) == [Reason.REPLAYED]


def test_what_is_played_back_is_no_sign_of_life(keyed):
    keyed.receive("paris", beat(), key="K-paris")
    answers = []
    for _ in range(10):
        keyed.now_s += CONFIG.forget_after_s / 4
        keyed.sequence -= 1
        answers.append(refusals_in(keyed.receive("paris", beat(), key="K-paris")))
    assert [Reason.REPLAYED] in answers
    assert [Reason.NOT_LEADER] in answers, "it was forgotten meanwhile, with all that it had said"


def test_a_broker_that_knows_as_many_peers_as_it_may_takes_no_more():
    driver = Driver(dataclasses.replace(CONFIG, max_peers=2))
    driver.attach()
    for island in ("a", "b"):
        driver.receive(island, beat())
    driver.receive("c", beat())
    assert driver.reason() is Reason.QUEUE_FULL
    assert driver.relay.num_peers == 2
    driver.receive("a", beat())
    assert driver.sends  # whoever is known is heard


def test_a_shelf_counts_what_it_holds(led):
    for number, nbytes in enumerate((100, 70, 30)):
        led.receive(AGGREGATOR, version(0, number), nbytes=nbytes)
        assert led.relay.held_bytes == nbytes
    led.receive(AGGREGATOR, version(1, 0), nbytes=5)
    assert led.relay.held_bytes == 35
