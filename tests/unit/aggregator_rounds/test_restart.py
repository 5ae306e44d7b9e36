"""A restarted aggregator goes on exactly where its disk says, and nothing that counts is counted twice."""

from aggregator.state.run_record import ROUND_IDS_PER_LIFE
from broker.wire.messages import Attach, Fate, Outstanding, Welcome
from tests.aggregator_hand import Desk, desk, notes, resolutions, sent


def with_a_version():
    made = desk("a", "b")
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    made.offer("b", 0, 4)
    return made


def test_a_restart_goes_on_with_the_next_epoch_and_the_same_versions():
    made = with_a_version()
    again = made.restarted()
    assert (again.epoch, again.versions, again.phase) == (2, (1,), "running")
    again.tick()
    assert sent(again.log, Attach)[0].versions == (1,)


def test_what_was_merged_is_known_and_what_was_not_is_asked_for_again():
    made = with_a_version()
    made.open_round("a", "b", step=8)
    made.offer("a", 4, 8)
    again = made.restarted()
    asked = tuple(Outstanding(fragment_id=0, from_step=s, to_step=s + 4) for s in (0, 4))
    fates = [r.fate for r in resolutions(again.beat("a", 8, outstanding=asked), "a")]
    assert fates == [Fate.MERGED, Fate.UNKNOWN]
    assert resolutions(again.offer("a", 0, 4, base=0), "a")[0].fate is Fate.MERGED
    assert notes(again.offer("a", 4, 8, base=1), "contribution.accepted"), "into the round that is due at once"


def test_neither_round_ids_nor_incarnations_are_given_twice():
    made = desk("a")
    first = made.open_round("a", step=4)
    again = made.restarted()
    again.beat("a", 4)
    second = again.open_round("a", step=8)
    assert second >= first + ROUND_IDS_PER_LIFE - 1
    again.join("a")
    third = again.restarted()
    assert [welcome.incarnation for welcome in sent(third.join("a"), Welcome)] == [3]
    third.beat("a", 8)
    assert third.open_round("a", step=12) > second


def test_a_restart_without_any_island_starts_empty():
    made = Desk()
    again = made.restarted()
    assert (again.epoch, again.phase, again.manifest) == (2, "seeding", None)
    again.gather("a")
    assert again.versions == (0,)


def test_a_life_that_no_commit_has_is_booked_after_a_restart():
    made = desk("a", "b")
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    made.nothing("b")  # the newest commit
    made.join("a")
    made.beat("a", 7)  # three steps of a second life, which ends before another commit
    made.join("a")
    trained = made.tokens()["trained"]
    after = made.restarted()
    assert after.tokens()["trained"] == trained == 110
