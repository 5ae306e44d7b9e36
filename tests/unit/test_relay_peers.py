"""Of the relay: who is who, who may say what, and whose keys they came under."""

import dataclasses

import pytest

from broker.routing.directory import UNKNOWN
from broker.routing.relay import AllowListChanged, Note, Rejected, Report, Send, TurnedAway
from broker.wire import messages as m
from broker.wire.identity import Identity, KeyRole
from broker.wire.messages import AGGREGATOR, BROKER, Channel, Reason
from tests.aggregator_hand import beat
from tests.relay_bench import CONFIG, Driver, contribution, fleet_state, join, version, welcome

# --- who is who -------------------------------------------------------------------------------------------------------


def test_heartbeat_reaches_the_aggregator_and_is_observed(led):
    led.receive("a", beat())
    assert led.sent == [(b"aggregator/0/control", beat())]
    assert [type(action) for action in led.actions] == [Report, Send]


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


# --- keys -------------------------------------------------------------------------------------------------------------


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
    assert not [action for action in sends if isinstance(action, Send)]  # what it wants is gone with it
    assert refusals_in(keyed.receive("paris", beat(), key="K-paris")) == [Reason.WRONG_KEY]
    keyed.event(AllowListChanged(allowed=ALLOWED))
    assert not refusals_in(keyed.receive("paris", beat(), key="K-paris"))


@pytest.mark.parametrize("between", [False, True], ids=["joins alone", "and itself between them"])
def test_one_connection_is_one_joiner_however_many_nonces_it_draws(between):
    driver = Driver(dataclasses.replace(CONFIG, max_peers=4))
    driver.event(AllowListChanged(allowed=ALLOWED))
    for n in range(50):
        asks = m.Join(nonce=f"n{n}", island_id="paris", hint="", tensors=(), tokens_per_step=1)
        driver.receive(f"join:n{n}", asks, key="K-paris", route=b"one")
        if between:
            driver.receive("paris", beat(), key="K-paris", route=b"one")
    assert driver.relay.num_peers == 1
    asks = m.Join(nonce="n", island_id="rome", hint="", tensors=(), tokens_per_step=1)
    assert refusals_in(driver.receive("join:n", asks, key="K-rome")) == [Reason.NOT_LEADER]  # heard; nobody leads yet
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


def test_hosts_of_an_island_hand_over_beside_its_speaker_each_over_a_connection_of_its_own(led):
    led.receive("a", m.Want(versions=(-1, -1)))
    led.receive("a", host_part(1), route=b"host 1")
    assert led.sent == [(b"aggregator/0/bulk", host_part(1))]
    led.receive("a", host_part(2), route=b"host 2")
    assert led.sent == [(b"aggregator/0/bulk", host_part(2))]
    led.receive(AGGREGATOR, version(0, 0))
    assert [peer for peer, _ in led.sent] == [b"a/1/bulk"]  # the speaker alone wants versions


def test_a_host_is_heard_once_its_island_is_and_not_in_a_life_that_has_ended(led):
    led.receive("a", host_part(), route=b"host 1")
    assert led.reason() is Reason.UNKNOWN_ISLAND
    led.receive("a", beat(), incarnation=2)
    led.receive("a", host_part(), route=b"host 1", incarnation=1)
    assert led.reason() is Reason.FENCED


def test_what_a_host_sent_is_not_taken_twice_over_one_connection(led):
    led.receive("a", beat())
    led.receive("a", host_part(), route=b"host 1")
    led.sequence -= 1
    led.receive("a", host_part(), route=b"host 1")
    assert led.reason() is Reason.REPLAYED


# --- who measures the way ---------------------------------------------------------------------------------------------


def probe(answer_buffers=2, buffers=0):
    return m.Probe(answer_buffers=answer_buffers, payload=m.probe_payload(buffers))


def test_a_probe_is_answered_over_its_connection_with_as_many_buffers_and_makes_no_peer():
    driver = Driver(dataclasses.replace(CONFIG, release="1.2.3"))
    driver.receive("join:n", probe(answer_buffers=2, buffers=1))
    (send,) = driver.sends
    assert (send.channel, send.peer, send.envelope.to) == (Channel.BULK, b"join:n/0/bulk", "join:n")
    expected = m.Probed(answers=driver.sequence, release="1.2.3", clock_s=0.0, payload=m.probe_payload(2))
    assert send.envelope.message == expected
    assert driver.relay.num_peers == 0
    assert driver.relay.counters.refused == {}


def test_an_answer_that_is_blocked_or_has_nowhere_to_go_is_dropped_and_counted(led):
    led.receive("join:n", probe())
    (send,) = led.sends
    led.block(send)
    led.unreachable(send)
    assert led.sends == []
    assert led.relay.counters.dropped == {"blocked": 1, "unreachable": 1}


def test_a_probe_comes_from_nobody_who_takes_part(led):
    for sender in ("a", AGGREGATOR):
        led.receive(sender, probe())
        assert led.reason() is Reason.WRONG_ROLE


@pytest.mark.parametrize("key", ["K-paris", "K-leader", "K-watcher"])
def test_whoever_may_connect_may_measure_and_nothing_more_than_before(keyed, key):
    allowed = {"K-watcher": Identity(role=KeyRole.OBSERVER, name="w")}
    allowed |= {"K-paris": Identity(role=KeyRole.ISLAND, name="paris")}
    allowed |= {"K-leader": Identity(role=KeyRole.AGGREGATOR, name=AGGREGATOR)}
    keyed.event(AllowListChanged(allowed=allowed))
    keyed.receive("join:n", probe(), key=key)
    assert [type(message) for _, message in keyed.sent] == [m.Probed]
    if key != "K-paris":
        keyed.receive("join:n", dataclasses.replace(join(), island_id="paris"), key=key)
        assert keyed.reason() is Reason.WRONG_KEY


def test_a_key_that_is_not_on_the_list_measures_nothing(keyed):
    keyed.receive("join:n", probe(), key="K-unknown")
    assert keyed.reason() is Reason.WRONG_KEY
