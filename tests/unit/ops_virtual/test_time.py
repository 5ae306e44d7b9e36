"""The event queue, the link model and the alarm that drive runs in virtual time."""

import random

import pytest

from ops.virtual.queue import Alarm, EventQueue, LinkModel, Sender


def test_events_happen_in_the_order_of_their_times_and_then_of_scheduling_and_the_past_is_now():
    queue, seen = EventQueue(), []
    for name, at_s in [("c", 2.0), ("a", 1.0), ("b", 1.0)]:
        queue.at(at_s, lambda name=name: seen.append((queue.now_s, name)))
    queue.at(2.0, lambda: queue.at(1.0, lambda: seen.append((queue.now_s, "too late"))))
    queue.run_until(9.0)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "too late")]


def test_the_queue_stops_at_the_end_or_when_it_is_done_and_keeps_what_comes_later():
    queue, seen = EventQueue(), []
    for at_s in (3.0, 4.0, 5.0):
        queue.after(at_s, lambda: seen.append(queue.now_s))
    assert not queue.run_until(2.0)
    assert (queue.now_s, seen) == (2.0, [])
    assert queue.run_until(9.0, lambda: len(seen) == 2)
    assert seen == [3.0, 4.0]


def test_a_perfect_link_delivers_once_within_its_delays():
    link = LinkModel(delay_s=(0.1, 0.2))
    for seed in range(50):
        (arrival_s,) = link.arrivals_s(random.Random(seed), queued_s=0.5)
        assert 0.6 <= arrival_s <= 0.7


def test_what_is_sent_waits_until_what_was_sent_before_has_left():
    sender = Sender()
    assert sender.queued_s(10.0, 500, 1000.0) == pytest.approx(0.5)
    assert sender.queued_s(10.0, 500, 1000.0) == pytest.approx(1.0)
    assert sender.queued_s(20.0, 500, 1000.0) == pytest.approx(0.5)  # idle meanwhile
    assert sender.queued_s(20.0, 500, 0.0) == 0.0  # an infinite rate


@pytest.mark.parametrize(
    ("loss", "duplication", "mean"), [(0.0, 0.0, 1.0), (0.3, 0.0, 0.7), (0.0, 0.3, 1.3), (0.3, 0.3, 1.0)]
)
def test_copies_come_as_often_as_configured(loss, duplication, mean):
    link, rng = LinkModel(loss=loss, duplication=duplication), random.Random(0)
    copies = [len(link.arrivals_s(rng)) for _ in range(4000)]
    assert sum(copies) / 4000 == pytest.approx(mean, abs=0.04)  # five standard errors
    assert set(copies) <= {0, 1, 2}


def test_an_alarm_rings_once_at_its_last_setting_and_can_be_turned_off_and_set_to_the_same_time_again():
    queue, rings = EventQueue(), []
    alarm = Alarm(queue, lambda: rings.append(queue.now_s))
    alarm.arm(3.0)
    alarm.arm(None)
    queue.run_until(4.0)
    assert rings == []
    for at_s in (7.0, 5.0, 6.0):
        alarm.arm(at_s)
    queue.run_until(8.0)
    alarm.arm(6.0)  # it has rung: a time in the past means now
    queue.run_until(9.0)
    assert rings == [6.0, 8.0]
