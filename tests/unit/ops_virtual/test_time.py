"""The event queue that drives runs in virtual time."""

from ops.virtual.queue import EventQueue


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
