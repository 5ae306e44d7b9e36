"""Versions under way to one island: as many as its link carries without waiting for each other."""

from broker.routing.window import LOST, Window

FRAGMENTS = 6


def follow(round_trip_s, transfer_s, every_s, versions=40, window=None):
    """Publishes a version every so often, fragment after fragment, over a modelled link that is served in order.

    Returns the window, and how long after its publication each version that was sent had arrived.
    """
    window = window or Window()
    held, published = [-1] * FRAGMENTS, [(-1, 0.0)] * FRAGMENTS
    free_at_s, on_the_way, ages = 0.0, [], []
    window.wants(tuple(held), 0.0)
    for tick in range(int(versions * FRAGMENTS * every_s / 0.05)):
        now_s = tick * 0.05
        n = int(now_s / every_s)
        p = n % FRAGMENTS
        if published[p][0] < n // FRAGMENTS:
            published[p] = n // FRAGMENTS, now_s
        for arrives_at_s, q, version in [each for each in on_the_way if each[0] + round_trip_s / 2 <= now_s]:
            on_the_way.remove((arrives_at_s, q, version))
            held[q] = version
            window.wants(tuple(held), now_s)
        while window.is_open:
            due = [q for q in range(FRAGMENTS) if published[q][0] > held[q] and q not in window.under_way]
            if not due:
                break
            q = min(due, key=lambda each: published[each][1])
            version, at_s = published[q]
            free_at_s = max(free_at_s, now_s) + transfer_s
            on_the_way.append((free_at_s + round_trip_s / 2, q, version))
            ages.append(free_at_s + round_trip_s / 2 - at_s)
            window.sent(q, version, now_s)
    return window, ages


def test_a_long_way_is_filled_and_left_to_one_where_the_link_becomes_slow():
    """The round trip takes as long as two and a half publications: one at a time would be as late as that."""
    window, ages = follow(round_trip_s=10.0, transfer_s=0.1, every_s=4.0)
    assert window.size >= 3
    assert max(ages[2 * FRAGMENTS :]) < 5.5, "half a round trip, and nothing waits"
    window.close()
    window, _ = follow(round_trip_s=10.0, transfer_s=30.0, every_s=4.0, window=window)
    assert window.size <= 2


def test_no_more_than_what_is_used_is_allowed():
    window = Window()
    for n in range(50):
        window.wants((n - 1, -1), float(n))
        window.sent(0, n, float(n))
    assert window.size == 2


def test_what_is_asked_for_again_was_lost_once_nobody_would_wait_for_it():
    window = Window()
    window.wants((-1, -1), 0.0)
    window.sent(0, 3, 0.0)
    assert not window.is_open
    window.wants((-1, -1), 1.0)
    assert window.is_open, "nothing was ever delivered: asked again, it is sent again"
    window.sent(0, 3, 1.0)
    window.wants((3, -1), 1.1)
    assert window.size == 1, "which of the two copies came is not known, so neither is what it took"
    window.sent(1, 5, 2.0)
    window.wants((3, 5), 4.0)
    window.sent(1, 6, 5.0)
    window.wants((3, 5), 5.0 + LOST * 2.0)
    assert 1 in window.under_way
    window.wants((3, 5), 5.1 + LOST * 2.0)
    assert 1 not in window.under_way


def test_a_heartbeat_opens_no_window_but_makes_room_where_the_answer_waits_behind_contributions():
    window = Window()
    window.adopted((-1, -1), 0.0, 0)
    assert not window.is_open
    window.wants((-1, -1), 0.0, 1)
    window.sent(0, 3, 0.0)
    window.adopted((-1, -1), 4.0, 3)
    assert not window.is_open
    window.adopted((3, -1), 5.0, 4)
    assert window.is_open
    window.wants((-1, -1), 30.0, 2)
    assert window.versions == (3, -1), "said before the heartbeat"
    window.wants((-1, -1), 31.0, 5)
    assert window.versions == (-1, -1), "it has thrown it away since"


def test_one_more_is_tried_ever_more_seldom_on_a_full_link():
    window, tried, held = Window(), [], [-1] * FRAGMENTS
    window.wants(tuple(held), 0.0)
    for n in range(400):
        now_s, together = 100.0 * n, [(n + k) % FRAGMENTS for k in range(window.size)]
        tried.append(len(together) > 1)
        for p in together:
            window.sent(p, n, now_s)
        for k, p in enumerate(together):
            held[p] = n
            window.wants(tuple(held), now_s + 10.0 * (k + 1))
    assert sum(tried[:20]) >= 2
    assert 1 <= sum(tried[-200:]) <= 8


def test_what_did_not_go_out_is_not_under_way():
    window = Window()
    window.wants((-1,), 0.0)
    window.sent(0, 1, 0.0)
    window.took_back(0)
    assert window.is_open
    window.sent(0, 1, 0.0)
    window.close()
    assert not window.is_open, "over the next connection the island says first what it has"
    window.wants((-1,), 1.0)
    assert window.is_open


def test_what_was_sent_before_something_that_has_arrived_was_refused_and_may_be_sent_again():
    window = Window()
    window.wants((-1,) * 3, 0.0)
    window.size = 3
    for p in range(3):
        window.sent(p, 4, float(p))
    window.wants((-1, 4, -1), 3.0)
    assert set(window.under_way) == {2}
    window.sent(0, 5, 4.0)
    assert not window.under_way[0].again  # another one
    window.wants((-1, 4, 4), 5.0)
    assert set(window.under_way) == {0}
