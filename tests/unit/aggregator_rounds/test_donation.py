"""Which island is named as a donor, and what is noted of where an optimizer's state came from."""

from aggregator.rounds.donation import MOST_RECEIVERS
from broker.wire.messages import AskDonor, Donor, StateSource
from tests.aggregator_hand import Desk, sent

FRESH = {"optimizer": StateSource.FRESH}


def fleet(*island_ids, step=8):
    """Islands that have all run ``step`` steps; H is 4."""
    desk = Desk(islands=max(1, len(island_ids)))
    desk.gather(*island_ids)
    for island_id in island_ids:
        desk.beat(island_id, step, **FRESH)
    return desk


def named(desk, island_id, *tried):
    """Who is named to an island that asks; None where nothing is answered."""
    answers = sent(desk.say(island_id, AskDonor(tried=tried)), Donor, island_id)
    return answers[0].island_id if answers else None


def test_an_untrained_island_is_never_a_donor():
    desk = fleet("a", "b", step=3)
    assert named(desk, "b") == ""
    desk.beat("a", 4, **FRESH)
    assert named(desk, "b") == "a"


def test_steps_of_an_earlier_life_do_not_count():
    desk = fleet("a", "b")
    desk.join("a")
    desk.beat("a", desk.members["a"].start[0] + 3, **FRESH)
    desk.join("b")
    assert named(desk, "b") == ""


def test_of_several_the_one_heard_last_is_named_again_and_again_and_the_tried_ones_are_not():
    desk = fleet("a", "b", "c", "d")
    desk.join("d")
    for at_s, island_id in enumerate(["c", "a", "b"]):
        desk.now_s = 0.1 * (1 + at_s)
        desk.beat(island_id, 9, **FRESH)
    assert named(desk, "d") == "b"
    desk.now_s = 0.5
    desk.beat("c", 9, **FRESH)
    assert named(desk, "d") == "b"
    desk.now_s = 0.6
    desk.beat("a", 9, **FRESH)
    assert named(desk, "d", "b") == "a"
    assert named(desk, "d", "b", "a") == "c"
    assert named(desk, "d", "b", "a", "c") == ""


def test_a_silent_a_stopped_and_a_quarantined_island_are_no_donors():
    desk = fleet("a", "b")
    desk.join("b")
    desk.now_s = desk.config.suspect_after_s + 0.1
    assert named(desk, "b") == ""
    desk.beat("a", 9, **FRESH)
    assert named(desk, "b") == "a"
    desk.beat("a", 9, stopped=True, **FRESH)
    assert named(desk, "b") == ""
    desk.beat("a", 9, **FRESH)
    desk.core.run.fleet.quarantine.restore({"a": [0, 1, 5.0, "outlier", 0]}, desk.now_s)
    assert named(desk, "b") == ""
    desk.now_s += 5.0
    desk.beat("a", 9, **FRESH)
    assert named(desk, "b") == "a"


def test_a_donor_gives_to_few_at_a_time_and_the_others_are_not_answered_until_it_is_free():
    receivers = [f"r{i}" for i in range(MOST_RECEIVERS + 1)]
    desk = fleet("a", *receivers)
    for island_id in receivers:
        desk.join(island_id)
    assert [named(desk, r) for r in receivers] == ["a"] * MOST_RECEIVERS + [None]
    desk.beat("r0", desk.members["r0"].start[0], optimizer=StateSource.DONOR)
    assert named(desk, receivers[-1]) == "a"
