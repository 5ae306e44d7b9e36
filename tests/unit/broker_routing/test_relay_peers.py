"""Of the relay: who is who, who may say what, and whose keys they came under."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.routing.directory import UNKNOWN, WINDOW, Seen
from broker.routing.events import AllowListChanged, Rejected, Report, Send, TurnedAway
from broker.wire import messages as m
from broker.wire.identity import Identity, KeyRole
from broker.wire.messages import AGGREGATOR, BROKER, Channel, Reason
from tests.aggregator_hand import beat
from tests.relay_bench import CONFIG, Driver, contribution, fleet_state, join, version, welcome

# --- who is who -------------------------------------------------------------------------------------------------------


def test_a_heartbeat_reaches_the_aggregator_and_is_observed_and_its_answer_the_connection_that_was_heard_last(led):
    led.receive("a", beat())
    assert led.sent == [(b"aggregator/0/control", beat())]
    assert [type(action) for action in led.actions] == [Report, Send]
    led.receive("b", beat())
    led.receive(AGGREGATOR, fleet_state(), to="a")
    assert led.sent == [(b"a/1/control", fleet_state())]
    led.receive("a", beat(), route=b"new")
    led.receive(AGGREGATOR, fleet_state(), to="a")
    assert led.sent == [(b"new", fleet_state())]
    led.receive(AGGREGATOR, fleet_state(), to="nobody")
    assert led.sent == []
    assert led.relay.counters.dropped == {"no_such_peer": 1}


def test_a_joiner_is_addressed_by_its_nonce_and_may_only_join(led):
    led.receive("join:n", join())
    assert led.sent == [(b"aggregator/0/control", join())]
    led.receive(AGGREGATOR, welcome("a", 1), to="join:n")
    assert led.sent == [(b"join:n/0/control", welcome("a", 1))]
    led.receive("join:n", beat())
    assert led.reason() is Reason.UNKNOWN_ISLAND


def test_a_lower_incarnation_is_fenced_and_told_over_its_own_connection(led):
    led.receive("a", beat(), incarnation=2)
    led.receive("a", beat(), incarnation=1)
    assert led.reason() is Reason.FENCED
    assert led.refusal().peer == b"a/1/control"
    led.receive(AGGREGATOR, fleet_state(), to="a")
    assert led.sent == [(b"a/2/control", fleet_state())]
    led.receive("join:n", join())
    led.receive(AGGREGATOR, welcome("a", 3), to="join:n")
    led.receive("a", beat(), incarnation=2)
    assert led.reason() is Reason.FENCED, "before the new one is heard"


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


# --- who may send what ------------------------------------------------------------------------------------------------


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
        ("a", m.Probe(answer_buffers=2, payload=())),
        (AGGREGATOR, m.Probe(answer_buffers=2, payload=())),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_kind_from_the_wrong_role_is_refused(led, sender, message):
    led.receive(sender, message)
    assert led.reason() is Reason.WRONG_ROLE


def test_a_kind_on_the_wrong_channel_is_refused_by_name_over_the_control_connection(led):
    led.receive("a", beat())
    led.receive("a", m.Want(versions=()))
    for message in (beat(), contribution()):
        wrong = {Channel.BULK: Channel.CONTROL, Channel.CONTROL: Channel.BULK}[message.channel]
        led.receive("a", message, channel=wrong)
        refused = led.refusal()
        assert (refused.channel, refused.peer, refused.envelope.to) == (Channel.CONTROL, b"a/1/control", "a")
        said = refused.envelope.message
        assert (said.kind, said.sequence, said.reason) == (m.kind_of(message), led.sequence, Reason.WRONG_ROLE)


def test_message_of_another_run_is_refused_and_makes_no_peer(led):
    led.receive("a", beat(), run="other")
    assert led.reason() is Reason.WRONG_RUN
    assert led.relay.num_peers == 0


def test_a_refused_refusal_is_not_answered(led):
    led.receive("a", m.Refused(kind="", sequence=-1, reason=Reason.MALFORMED, detail=""))
    assert led.sent == []
    assert led.relay.counters.refused == {UNKNOWN: {Reason.WRONG_ROLE: 1}}


def test_undecodable_input_is_refused_to_its_connection_and_counted(led):
    led.event(Rejected(channel=Channel.BULK, peer=b"?", reason=Reason.MALFORMED, detail="header is 3", sender="ghost"))
    assert led.refusal().peer == b"?"
    assert led.refusal().envelope.message.detail == "header is 3"
    led.receive("a", beat())
    led.event(Rejected(channel=Channel.CONTROL, peer=b"a/1/control", reason=Reason.OVERSIZE, detail="", kind="join"))
    counted = {UNKNOWN: {Reason.MALFORMED: 1}, "a": {Reason.OVERSIZE: 1}}
    assert led.relay.counters.refused == counted, "a claimed sender is believed only if it is known"


# --- keys -------------------------------------------------------------------------------------------------------------


ALLOWED = {
    "K-paris": Identity(role=KeyRole.ISLAND, name="paris"),
    "K-rome": Identity(role=KeyRole.ISLAND, name="rome"),
    "K-leader": Identity(role=KeyRole.AGGREGATOR, name="aggregator"),
    "K-watcher": Identity(role=KeyRole.OBSERVER, name="w"),
}


class Keyed(Driver):
    """A relay that knows keys."""

    def __init__(self, config=CONFIG):
        super().__init__(config)
        self.event(AllowListChanged(allowed=ALLOWED))

    @property
    def refused(self):
        """Why, of all that was sent."""
        return [message.reason for _, message in self.sent if isinstance(message, m.Refused)]

    def hears(self, sender, message, key, **more):
        self.receive(sender, message, key=key, **more)
        return not self.refused


@pytest.fixture
def keyed():
    """With a leader, and the island paris."""
    driver = Keyed()
    driver.receive(AGGREGATOR, m.Attach(shard=0, epoch=1, versions=(-1,)), key="K-leader")
    driver.receive(AGGREGATOR, m.AttachBulk(shard=0, epoch=1, shards=1), key="K-leader")
    driver.receive("paris", beat(), key="K-paris")
    return driver


def test_a_message_that_does_not_fit_its_key_goes_nowhere_and_is_laid_to_the_key(keyed):
    keyed.receive("rome", beat(), key="K-rome")
    for sender, message, key in (
        ("paris", beat(9), "K-rome"),
        ("paris", contribution(), "K-rome"),
        ("paris", m.Want(versions=(-1,)), "K-rome"),
        (AGGREGATOR, m.Attach(shard=0, epoch=5, versions=(3,)), "K-rome"),
        (AGGREGATOR, version(0, 7, epoch=5), "K-rome"),
        ("join:n", dataclasses.replace(join(), island_id="paris"), "K-rome"),
        ("join:n", probe(), "K-unknown"),
        ("paris", beat(9), "K-unknown"),
        ("paris", beat(9), ""),
    ):
        keyed.receive(sender, message, route=b"elsewhere", key=key, incarnation=7)
        assert keyed.reason() is Reason.WRONG_KEY
    assert keyed.relay.counters.refused["rome"][Reason.WRONG_KEY] == 6
    assert keyed.relay.counters.refused[UNKNOWN][Reason.WRONG_KEY] == 3
    assert "paris" not in keyed.relay.counters.refused
    # The real ones are where they were: not fenced, not cut off, not overtaken.
    assert keyed.hears("paris", beat(10), "K-paris")
    assert keyed.hears(AGGREGATOR, version(0, 1, epoch=1), "K-leader")


def test_a_revoked_island_is_forgotten_and_a_revoked_key_says_nothing_more(keyed):
    keyed.receive("paris", m.Want(versions=(-1,)), key="K-paris")
    keyed.event(AllowListChanged(allowed={key: each for key, each in ALLOWED.items() if key != "K-paris"}))
    assert keyed.notes == ["relay.island_revoked"]
    assert keyed.relay.num_peers == 0
    keyed.receive(AGGREGATOR, version(0, 1), key="K-leader")
    assert keyed.sends == []  # what it wants is gone with it
    keyed.receive("paris", beat(), key="K-paris")
    assert keyed.refused == [Reason.WRONG_KEY]
    keyed.event(AllowListChanged(allowed=ALLOWED))
    assert keyed.hears("paris", beat(), "K-paris")


@pytest.mark.parametrize("between", [False, True], ids=["joins alone", "and itself between them"])
def test_one_connection_is_one_joiner_however_many_nonces_it_draws(between):
    driver = Keyed(dataclasses.replace(CONFIG, max_peers=4))
    for n in range(50):
        driver.receive(f"join:n{n}", dataclasses.replace(join(f"n{n}"), island_id="paris"), key="K-paris", route=b"one")
        if between:
            driver.receive("paris", beat(), key="K-paris", route=b"one")
    assert driver.relay.num_peers == 1
    driver.receive("join:n", dataclasses.replace(join(), island_id="rome"), key="K-rome")
    assert driver.refused == [Reason.NOT_LEADER]  # heard; nobody leads yet
    assert driver.relay.num_peers == 2


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
    keyed.receive("paris", beat(), key="K-paris")
    assert keyed.reason() is Reason.REPLAYED
    assert keyed.relay.counters.refused["paris"] == {Reason.REPLAYED: 1}
    assert keyed.relay.counters.repeated_messages == 1
    keyed.sequence += 10
    assert keyed.hears("paris", beat(), "K-paris")
    keyed.sequence -= 5
    assert keyed.hears("paris", beat(), "K-paris"), "it let others go first"
    keyed.sequence = 0
    assert keyed.hears("paris", beat(), "K-paris", route=b"new"), "which starts anew"


def test_what_is_too_old_to_tell_counts_as_seen():
    seen = Seen()
    seen.repeats(2 * WINDOW)
    assert not seen.repeats(WINDOW + 1)
    assert seen.repeats(WINDOW)


@given(st.lists(st.integers(0, 60), max_size=60), st.integers(0, 1 << 62))
def test_a_repetition_is_what_a_set_calls_one(numbers, begins):
    seen, model = Seen(), set()
    for n in numbers:
        assert seen.repeats(begins + n) == (n in model)
        model.add(n)


def test_a_want_that_is_played_back_brings_no_version(keyed):
    keyed.receive(AGGREGATOR, version(0, 1), key="K-leader")
    keyed.receive("paris", m.Want(versions=(-1,)), key="K-paris")
    assert m.Version in {type(message) for _, message in keyed.sent}
    keyed.sequence -= 1
    keyed.receive("paris", m.Want(versions=(-1,)), key="K-paris")
    assert m.Version not in {type(message) for _, message in keyed.sent}


def test_what_a_leader_or_a_standby_has_said_cannot_be_played_back_either(led):
    attach = m.Attach(shard=0, epoch=1, versions=(3,))
    follow = m.Follow(shard=0, epoch=1, stored=(), run_epoch=1, run_serial=1, made_under=1)
    for sender, message in ((AGGREGATOR, attach), (AGGREGATOR, version(0, 1)), (m.standing_by("b"), follow)):
        led.receive(sender, message, incarnation=0)
        assert m.Refused not in {type(said) for _, said in led.sent}
        led.sequence -= 1
        led.receive(sender, message, incarnation=0)
        assert led.reason() is Reason.REPLAYED


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


# --- islands of several hosts ---------------------------------------------------------------------------------


def host_part(host=1):
    return m.HostPart(fragment_id=0, from_step=0, to_step=1, host=host, hosts=3, places=(), payload=())


def test_hosts_of_an_island_hand_over_beside_its_speaker_each_once_over_a_connection_of_its_own(led):
    led.receive("a", m.Want(versions=(-1, -1)))
    for host in (1, 2):
        led.receive("a", host_part(host), route=b"host %d" % host)
        assert led.sent == [(b"aggregator/0/bulk", host_part(host))]
    led.sequence -= 1
    led.receive("a", host_part(2), route=b"host 2")
    assert led.reason() is Reason.REPLAYED
    led.receive(AGGREGATOR, version(0, 0))
    assert [peer for peer, _ in led.sent] == [b"a/1/bulk"]  # the speaker alone wants versions


def test_a_host_is_heard_once_its_island_is_and_not_in_a_life_that_has_ended(led):
    led.receive("a", host_part(), route=b"host 1")
    assert led.reason() is Reason.UNKNOWN_ISLAND
    led.receive("a", beat(), incarnation=2)
    led.receive("a", host_part(), route=b"host 1", incarnation=1)
    assert led.reason() is Reason.FENCED


# --- who measures the way ---------------------------------------------------------------------------------------------


def probe(answer_buffers=2, buffers=0):
    return m.Probe(answer_buffers=answer_buffers, payload=m.probe_payload(buffers))


def test_a_probe_is_answered_over_its_connection_with_as_many_buffers_and_makes_no_peer():
    driver = Driver(dataclasses.replace(CONFIG, release="1.2.3"))
    driver.receive("join:n", probe(answer_buffers=2, buffers=1), run="any")
    (send,) = driver.sends
    assert send.envelope.run_id == CONFIG.run_id, "whatever run it names, it is told which is served"
    assert (send.channel, send.peer, send.envelope.to) == (Channel.BULK, b"join:n/0/bulk", "join:n")
    expected = m.Probed(answers=driver.sequence, release="1.2.3", clock_s=0.0, payload=m.probe_payload(2))
    assert send.envelope.message == expected
    assert driver.relay.num_peers == 0
    assert driver.relay.counters.refused == {}


@pytest.mark.parametrize("key", ["K-paris", "K-leader", "K-watcher"])
def test_whoever_may_connect_may_measure_and_nothing_more_than_before(keyed, key):
    keyed.receive("join:n", probe(), key=key)
    assert [type(message) for _, message in keyed.sent] == [m.Probed]
    if key != "K-paris":
        keyed.receive("join:n", dataclasses.replace(join(), island_id="paris"), key=key)
        assert keyed.reason() is Reason.WRONG_KEY
