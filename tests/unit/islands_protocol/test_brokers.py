"""When an island leaves its broker for the next one."""

import math

import pytest

from broker.base.errors import ConfigError
from broker.wire import messages as m
from broker.wire.addresses import broker_addresses
from islands.interface.config import IslandConfig
from islands.protocol.broker_choice import LEADERLESS_S, LOST_S, BrokerChoice, MoveReason
from islands.protocol.core import Island
from islands.protocol.events import Connect, Line, Tick
from tests.aggregator_hand import notes, of, tensors
from tests.island_hand import sent

SILENT_S = 2.0


@pytest.fixture
def choice():
    made = BrokerChoice(2, "n", SILENT_S)
    made.start(0.0)
    made.line(True, 0.1)
    made.asked(0.1)
    made.answered(0.15)
    made.welcomed(0.5)
    return made


def test_a_single_broker_is_never_left():
    alone = BrokerChoice(1, "n", SILENT_S)
    alone.start(0.0)
    alone.line(True, 0.0)
    alone.asked(0.0)
    assert alone.due_at_s == math.inf
    assert alone.move(1e6) is None


def test_islands_spread_over_the_brokers_and_again_over_those_that_are_left():
    firsts, seconds = [], []
    for nonce in range(300):
        one = BrokerChoice(3, str(nonce), SILENT_S)
        one.start(0.0)
        firsts.append(one.at)
        assert one.move(SILENT_S) is MoveReason.NOT_REACHED
        seconds.append((firsts[-1], one.at))
    assert all(70 < firsts.count(k) < 130 for k in range(3))
    assert all(25 < seconds.count((a, b)) < 75 for a in range(3) for b in range(3) if a != b)


def test_a_silent_broker_is_left_after_the_stated_time(choice):
    before = choice.at
    for beat in (10.0, 10.5, 11.0, 11.5):  # the first one counts
        choice.asked(beat)
    assert choice.due_at_s == 10.0 + SILENT_S
    assert choice.move(11.99) is None
    assert choice.move(12.0) is MoveReason.SILENT
    assert choice.at == 1 - before


def test_a_slow_link_is_not_a_silent_broker(choice):
    choice.asked(10.0)
    choice.answered(11.5)
    choice.asked(12.0)
    assert choice.due_at_s == 12.0 + 4 * 1.5
    for beat in range(40):  # fast again: patience comes back, slowly
        choice.asked(20.0 + beat)
        choice.answered(20.05 + beat)
    assert choice.patience_s == SILENT_S


def test_a_lost_connection_is_given_up_soon(choice):
    choice.line(False, 10.0)
    assert choice.move(10.0 + LOST_S) is MoveReason.LOST


def test_a_broker_without_a_leader_is_kept_much_longer_and_then_ever_longer(choice):
    first_s, _ = LEADERLESS_S
    for beat in (10.0, 10.5):
        choice.asked(beat)
        choice.leaderless(beat + 0.1)
    assert choice.due_at_s == 10.1 + first_s
    assert choice.move(10.1 + first_s) is MoveReason.NO_LEADER
    choice.line(True, 20.0)
    choice.leaderless(20.0)
    assert choice.due_at_s == 20.0 + 2 * first_s
    choice.answered(21.0)
    choice.leaderless(30.0)
    assert choice.due_at_s == 30.0 + first_s


def test_after_the_last_comes_the_first_and_pauses_grow_while_nobody_answers():
    choice = BrokerChoice(2, "n", SILENT_S)
    choice.start(0.0)
    now_s, pauses, places = 0.0, [], []
    for _ in range(10):
        places.append(choice.at)
        pauses.append(choice.due_at_s - now_s)
        now_s = choice.due_at_s
        assert choice.move(now_s) is MoveReason.NOT_REACHED
    assert places == places[:2] * 5
    assert pauses == [2.0] * 2 + [4.0] * 2 + [8.0] * 6
    choice.line(True, now_s)
    choice.heard()
    choice.asked(now_s)
    assert choice.due_at_s == now_s + SILENT_S


def test_a_process_that_slept_itself_looks_once_more(choice):
    choice.asked(10.0)
    assert choice.move(17.0) is None  # the answer may lie unread
    assert choice.due_at_s == 17.0 + SILENT_S
    assert choice.move(17.0 + SILENT_S) is MoveReason.SILENT


def test_an_island_that_is_not_answered_asks_the_next_broker_to_join():
    island = Island(island_id="a", hint="", nonce="n", tensors=tensors(1), tokens_per_step=10, brokers=2)
    first = island.broker
    assert len(sent(island.start(0.0), m.Join)) == 1
    assert len(sent(island.handle(Line(stands=True), 0.1), m.Join)) == 1  # the first one went nowhere
    said = []
    while not of(said, Connect):
        now_s = island.next_deadline_s()
        assert now_s <= 2.1
        said = island.handle(Tick(), now_s)
    assert of(said, Connect) == [Connect(broker=1 - first)]
    left = {"broker": first, "reason": "silent", "next": 1 - first, "patience_s": 2.0}
    assert notes(said, "broker.left") == [left]
    assert len(sent(island.handle(Line(stands=True), 2.2), m.Join)) == 1


def test_a_list_of_brokers_is_read_in_order():
    assert broker_addresses("tcp://a:7001, tcp://b:7001") == ("tcp://a:7001", "tcp://b:7001")
    assert IslandConfig(broker="tcp://a:7001,ipc:///tmp/x", insecure=True).brokers == ("tcp://a:7001", "ipc:///tmp/x")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has an empty place"),
        ("tcp://a:7001;tcp://b:7001", "must be tcp://HOST:PORT"),
        ("tcp://a:7001,b:7001", "must be tcp://HOST:PORT"),
        ("tcp://a:7001,tcp://a:7001", "names tcp://a:7001 twice"),
        (",".join(f"tcp://a:{7001 + 2 * n}" for n in range(17)), "at most 16"),
    ],
)
def test_a_list_that_cannot_work_is_refused_with_the_cure(text, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        IslandConfig(broker=text)
    assert caught.value.field == "broker"
