"""What silence means, and what the broker makes of what it hears."""

from dataclasses import replace

import pytest

from broker.base.errors import ConfigError
from broker.gateway.config import BrokerConfig
from broker.registry.reporter import MembersSeen
from broker.routing.liveness import Liveness, LivenessConfig, liveness
from broker.wire import messages as m
from broker.wire.messages import AGGREGATOR, Envelope
from tests.aggregator_hand import beat
from tests.relay_bench import welcome

CONFIG = LivenessConfig(heartbeat_interval_s=0.5, suspect_after_s=2.0, dead_after_s=6.0)


def envelope(message, *, sender="a", incarnation=1):
    return Envelope(run_id="demo", sender=sender, incarnation=incarnation, sequence=0, to="", message=message)


def test_silence_makes_an_island_suspect_and_then_dead():
    states = [liveness(silent_s, CONFIG) for silent_s in (0.0, 1.999, 2.0, 5.999, 6.0, 1e9)]
    assert states == [Liveness.ALIVE] * 2 + [Liveness.SUSPECT] * 2 + [Liveness.DEAD] * 2


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
    ("field", "values"),
    [
        ("run_id", ["a b", ""]),
        ("host", [""]),
        ("port", [65_535, -1]),
        ("report_interval_s", [0.0]),
        ("forget_after_s", [1.0]),
        ("max_message_bytes", [1, -1]),
        ("peer_queue_bytes", [1, -1]),
        ("total_queue_bytes", [1, -1]),
        ("max_peers", [0]),
    ],
)
def test_broker_settings_that_cannot_work_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            BrokerConfig(**{field: value})
        assert caught.value.field == field


@pytest.fixture
def membership():
    return MembersSeen(max_islands=3)


def test_membership_hands_out_the_newest_of_each_island_once(membership):
    membership.observe(envelope(beat(1)), 100.0)
    membership.observe(envelope(beat(2)), 101.0)
    membership.observe(envelope(beat(9), sender="b"), 101.5)
    due = membership.due(102.0, everything=False)
    assert [(each.island_id, each.inner_step, each.heard_ago_s) for each in due] == [("a", 2, 1.0), ("b", 9, 0.5)]
    membership.observe(envelope(beat(3)), 102.5)
    membership.written(due, 102.0)
    due = membership.due(103.0, everything=False)
    assert [(each.island_id, each.inner_step) for each in due] == [("a", 3)], "heard while Redis was thinking"
    membership.written(due, 103.0)
    assert membership.due(103.0, everything=False) == []
    assert [each.heard_ago_s for each in membership.due(103.0, everything=True)] == [1.5, 0.5]


def test_a_last_word_keeps_what_the_heartbeats_said_and_one_that_it_overtook_does_not_bring_the_island_back(membership):
    membership.observe(envelope(beat(5, loss=2.5)), 100.0)
    membership.observe(envelope(m.Leave(inner_step=6, tokens=60, reason="done")), 101.0)
    membership.observe(envelope(beat(5)), 101.0)
    (record,) = membership.due(101.0, everything=False)
    assert (record.left, record.inner_step, record.tokens, record.loss) == (True, 6, 60, 2.5)
    membership.written([record], 101.0)
    for message in (m.Leave(inner_step=6, tokens=60, reason="done"), beat(5)):  # nothing else was heard of it
        membership.observe(envelope(message, sender="b"), 101.5)
    (record,) = membership.due(101.5, everything=False)
    assert (record.island_id, record.left) == ("b", True)
    membership.written([record], 101.5)
    membership.observe(envelope(beat(7), incarnation=2), 102.0)
    (record,) = membership.due(102.0, everything=False)
    assert (record.left, record.incarnation, record.inner_step) == (False, 2, 7)


def test_a_welcome_makes_a_member_and_a_repeated_one_takes_nothing_back(membership):
    welcomed = replace(welcome("a", 1), start_step=3, start_tokens=30)
    membership.observe(envelope(welcomed, sender=AGGREGATOR, incarnation=0), 100.0)
    (record,) = membership.due(100.0, everything=False)
    assert (record.island_id, record.incarnation, record.inner_step) == ("a", 1, 3)
    membership.observe(envelope(beat(5)), 101.0)
    membership.observe(envelope(welcomed, sender=AGGREGATOR, incarnation=0), 102.0)
    (record,) = membership.due(102.0, everything=False)
    assert record.inner_step == 5


def test_membership_remembers_no_more_islands_than_it_may(membership):
    for n in range(10):
        membership.observe(envelope(beat(n), sender=f"i{n}"), 100.0 + n)
        membership.observe(envelope(beat(n), sender="i0"), 100.0 + n)
    assert {each.island_id for each in membership.due(200.0, everything=True)} == {"i0", "i8", "i9"}
