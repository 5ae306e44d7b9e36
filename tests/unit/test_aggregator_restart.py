"""A restarted aggregator goes on exactly where its disk says, and nothing that counts is counted twice."""

from aggregator.state.restoring import ROUND_IDS_PER_LIFE
from broker.wire.messages import Attach, Fate, Outstanding, Welcome
from tests.aggregator_hand import Desk, notes, resolutions, sent
from tests.linked_cores import LinkedCluster


def desk(*island_ids, **settings):
    made = Desk(**settings)
    made.gather(*(island_ids or ("a", "b")))
    return made


def test_a_restart_goes_on_with_the_next_epoch_and_the_same_versions():
    made = desk()
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    made.offer("b", 0, 4)
    again = made.restarted()
    assert (again.run.epoch, again.run.versions, again.run.phase) == (2, (1,), "running")
    assert again.run.fragments[0].digest == made.run.fragments[0].digest
    again.tick()
    assert sent(again.log, Attach)[0].versions == (1,)


def test_what_was_merged_is_known_and_what_was_not_is_asked_for_again():
    made = desk()
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    made.offer("b", 0, 4)
    made.open_round("a", "b", step=8)
    made.offer("a", 4, 8)
    again = made.restarted()
    asked = tuple(Outstanding(fragment_id=0, from_step=s, to_step=s + 4) for s in (0, 4))
    fates = [r.fate for r in resolutions(again.beat("a", 8, outstanding=asked), "a")]
    assert fates == [Fate.MERGED, Fate.UNKNOWN]
    assert resolutions(again.offer("a", 0, 4, base=0), "a")[0].fate is Fate.MERGED
    assert notes(again.offer("a", 4, 8, base=1), "contribution.accepted"), "into the round that is due at once"


def test_a_merge_that_was_not_durable_is_done_again():
    made = desk("a")
    made.writes = False
    made.open_round("a", step=4)
    made.offer("a", 0, 4)
    again = made.restarted()
    assert again.run.versions == (0,)
    assert again.run.ledger.books().merged == 0
    again.beat("a", 4)
    again.offer("a", 0, 4, round_id=2)  # its answer to a round before the restart
    again.open_round("a", step=8)
    again.offer("a", 4, 8)
    assert again.run.versions == (1,)
    assert again.run.ledger.books().tokens()["merged"] == 80


def test_round_ids_are_never_used_again():
    made = desk("a")
    first = made.open_round("a", step=4)
    again = made.restarted()
    again.beat("a", 4)
    second = again.open_round("a", step=8)
    assert second >= first + ROUND_IDS_PER_LIFE - 1
    third = again.restarted()
    third.beat("a", 8)
    assert third.open_round("a", step=12) > second


def test_incarnations_are_never_given_twice():
    made = desk("a")
    made.join("a")
    (welcome,) = sent(made.restarted().join("a"), Welcome)
    assert welcome.incarnation == 3


def test_a_restart_without_any_island_starts_empty():
    made = Desk()
    again = made.restarted()
    assert (again.run.epoch, again.run.phase, again.run.manifest) == (2, "seeding", None)
    again.gather("a")
    assert again.run.versions == (0,)


def test_islands_go_on_through_a_restart_and_every_token_is_accounted_for():
    cluster = LinkedCluster("a", "b", total_tokens=800)
    cluster.train(13)
    before = cluster.aggregator.run.versions
    cluster.restart_aggregator()
    cluster.train(60)
    assert cluster.aggregator.run.epoch == 2
    assert cluster.aggregator.run.versions > before
    assert cluster.aggregator.run.phase == "ended"
    books = cluster.aggregator.run.ledger.books().tokens()
    assert books["merged"] == books["trained"] >= 800


def test_a_life_that_no_commit_has_is_booked_after_a_restart():
    made = Desk(fragments=1)
    made.gather("a", "b")
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    made.nothing("b")  # the newest commit
    made.join("a")
    made.beat("a", 7)  # three steps of a second life, which ends before another commit
    made.join("a")
    trained = made.run.ledger.trained_tokens()
    after = made.restarted()
    assert after.run.ledger.life("a", 2).trained_tokens == 30
    assert after.run.ledger.trained_tokens() == trained
