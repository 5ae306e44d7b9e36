"""What silence means, and what the broker makes of what it hears."""

from dataclasses import replace

import pytest

from broker.config import BrokerConfig
from broker.registry.reporter import MembersSeen
from broker.routing.liveness import Liveness, LivenessConfig, liveness
from broker.wire import messages as m
from broker.wire.errors import ConfigError
from broker.wire.messages import AGGREGATOR, Envelope
from tests.aggregator_hand import beat
from tests.relay_bench import welcome

CONFIG = LivenessConfig(heartbeat_interval_s=0.5, suspect_after_s=2.0, dead_after_s=6.0)


def envelope(message, *, sender="a", incarnation=1):
    return Envelope(run_id="demo", sender=sender, incarnation=incarnation, sequence=0, to="", message=message)


@pytest.mark.parametrize(
    ("silent_s", "state"),
    [
        (0.0, Liveness.ALIVE),
        (1.999, Liveness.ALIVE),
        (2.0, Liveness.SUSPECT),
        (5.999, Liveness.SUSPECT),
        (6.0, Liveness.DEAD),
        (1e9, Liveness.DEAD),
    ],
)
def test_silence_makes_an_island_suspect_and_then_dead(silent_s, state):
    assert liveness(silent_s, CONFIG) is state


def test_a_large_fleet_sends_heartbeats_less_often_and_never_so_that_two_missing_ones_make_an_island_suspect():
    assert [CONFIG.interval_of(n) for n in (1, 4, 128)] == [0.5] * 3
    assert CONFIG.interval_of(192) == 0.75
    assert CONFIG.interval_of(1000) == CONFIG.suspect_after_s / 2
    patient = LivenessConfig(heartbeat_interval_s=0.5, suspect_after_s=20.0, dead_after_s=30.0)
    assert patient.interval_of(1024) == 4.0
    assert patient.interval_of(10_000) == 10.0
    hasty = LivenessConfig(heartbeat_interval_s=2.0, suspect_after_s=4.0, dead_after_s=6.0)
    assert hasty.interval_of(10_000) == 2.0  # as configured: less would be no answer to anything


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"heartbeat_interval_s": 0.0}, "heartbeat_interval_s"),
        ({"suspect_after_s": 0.9}, "suspect_after_s"),
        ({"dead_after_s": 1.0, "suspect_after_s": 1.0}, "dead_after_s"),
        ({"dead_after_s": 1.9}, "dead_after_s"),
    ],
)
def test_allowances_that_would_bury_the_living_are_refused(settings, field):
    with pytest.raises(ConfigError) as caught:
        LivenessConfig(**settings)
    assert caught.value.field == field
    assert caught.value.value == settings[field]
    assert "must be" in caught.value.cure


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"run_id": "a b"}, "run_id"),
        ({"run_id": ""}, "run_id"),
        ({"host": ""}, "host"),
        ({"port": 65_535}, "port"),
        ({"port": -1}, "port"),
        ({"report_interval_s": 0.0}, "report_interval_s"),
        ({"forget_after_s": 1.0}, "forget_after_s"),
        ({"max_message_bytes": 1}, "max_message_bytes"),
        ({"peer_queue_bytes": 1}, "peer_queue_bytes"),
        ({"total_queue_bytes": 1}, "total_queue_bytes"),
        ({"max_peers": 0}, "max_peers"),
    ],
)
def test_broker_settings_that_cannot_work_are_refused_by_name(settings, field):
    with pytest.raises(ConfigError) as caught:
        BrokerConfig(**settings)
    assert caught.value.field == field


def test_membership_hands_out_the_newest_of_each_island_once():
    membership = MembersSeen(max_islands=10)
    membership.observe(envelope(beat(1)), 100.0)
    membership.observe(envelope(beat(2)), 101.0)
    membership.observe(envelope(beat(9), sender="b"), 101.5)
    due = membership.due(102.0, everything=False)
    assert [(each.island_id, each.inner_step, each.heard_ago_s) for each in due] == [("a", 2, 1.0), ("b", 9, 0.5)]
    membership.written(due, 102.0)
    assert membership.due(103.0, everything=False) == []
    assert [each.heard_ago_s for each in membership.due(103.0, everything=True)] == [2.0, 1.5]


def test_what_is_heard_while_redis_thinks_is_written_next():
    membership = MembersSeen(max_islands=10)
    membership.observe(envelope(beat(1)), 100.0)
    due = membership.due(100.0, everything=False)
    membership.observe(envelope(beat(2)), 100.5)
    membership.written(due, 100.0)
    assert [each.inner_step for each in membership.due(101.0, everything=False)] == [2]


def test_a_last_word_keeps_what_the_heartbeats_said():
    membership = MembersSeen(max_islands=10)
    membership.observe(envelope(beat(5, loss=2.5)), 100.0)
    membership.observe(envelope(m.Leave(inner_step=6, tokens=60, reason="done")), 101.0)
    (record,) = membership.due(101.0, everything=False)
    assert (record.left, record.inner_step, record.tokens, record.loss) == (True, 6, 60, 2.5)


def test_a_heartbeat_overtaken_by_the_last_word_does_not_bring_the_island_back():
    membership = MembersSeen(max_islands=10)
    membership.observe(envelope(m.Leave(inner_step=6, tokens=60, reason="done")), 100.0)
    membership.observe(envelope(beat(5)), 100.1)
    (record,) = membership.due(101.0, everything=False)
    assert record.left
    membership.observe(envelope(beat(7), incarnation=2), 102.0)
    (record,) = membership.due(102.0, everything=False)
    assert (record.left, record.incarnation, record.inner_step) == (False, 2, 7)


def test_a_welcome_makes_a_member_and_a_repeated_one_takes_nothing_back():
    welcomed = replace(welcome("a", 1), start_step=3, start_tokens=30)
    membership = MembersSeen(max_islands=10)
    membership.observe(envelope(welcomed, sender=AGGREGATOR, incarnation=0), 100.0)
    (record,) = membership.due(100.0, everything=False)
    assert (record.island_id, record.incarnation, record.inner_step) == ("a", 1, 3)
    membership.observe(envelope(beat(5)), 101.0)
    membership.observe(envelope(welcomed, sender=AGGREGATOR, incarnation=0), 102.0)
    (record,) = membership.due(102.0, everything=False)
    assert record.inner_step == 5


def test_membership_remembers_no_more_islands_than_it_may():
    membership = MembersSeen(max_islands=3)
    for n in range(10):
        membership.observe(envelope(beat(n), sender=f"i{n}"), 100.0 + n)
        membership.observe(envelope(beat(n), sender="i0"), 100.0 + n)
    assert {each.island_id for each in membership.due(200.0, everything=True)} == {"i0", "i8", "i9"}
