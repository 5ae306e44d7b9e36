"""The island's state machine: what it hands over, and until when it sends it again."""

import pytest

from broker.routing.resending import Backoff, Carried
from broker.wire import messages as m
from islands.protocol.events import Capture, Prepare, RefreshOptimizer, Tick, Watch
from islands.protocol.fragment import Pending, Stage
from tests.aggregator_hand import notes, of, steps
from tests.island_hand import Hand, sent


@pytest.fixture
def hand():
    return Hand()


def test_an_island_answers_an_open_round_from_the_copy_at_hand_and_each_round_once(hand):
    assert of(hand.state(due_soon=(0,)), Watch) == [Watch(fragments=frozenset({0}))]
    hand.boundary(3, copied=(0,))
    (capture,) = of(hand.state(rounds=((1, 0),)), Capture)  # in mid-step
    assert capture.step == 3
    (contribution,) = sent(hand.captured(), m.Contribution)
    assert (contribution.round_id, contribution.steps) == (1, steps(0, 3))
    assert contribution.trained_on == (m.TrainedOn(fragment_version=0, steps=3),)
    hand.boundary(1, copied=(0,))
    for round_id in (1, 0):
        assert not of(hand.state(rounds=((round_id, 0),)), Capture)


def test_with_nothing_new_the_answer_is_nothing(hand):
    hand.state(rounds=((1, 0),))
    (nothing,) = sent(hand.boundary(copied=(0,)), m.Nothing)
    assert (nothing.round_id, nothing.fragment_id) == (1, 0)


def test_ranges_follow_each_other_and_name_the_versions_trained_on(hand):
    hand.resolve(hand.hand_over(4, 1), m.Fate.WAITING)
    hand.boundary(2)
    hand.version(1)
    hand.boundary(1, installed=(0,))
    contribution = hand.hand_over(3, 2)
    assert contribution.steps == steps(4, 10)
    assert contribution.trained_on == (
        m.TrainedOn(fragment_version=0, steps=3),
        m.TrainedOn(fragment_version=1, steps=3),
    )


def test_no_copy_is_captured_between_preparing_and_installing_nor_after_it(hand):
    hand.boundary(2, copied=(0,))
    hand.version(1)
    assert hand.core.fragments[0].stage is Stage.READY
    assert not of(hand.state(rounds=((1, 0),)), Capture)
    assert not of(hand.boundary(1, installed=(0,)), Capture)
    assert of(hand.boundary(copied=(0,)), Capture)


def test_a_version_that_comes_while_a_copy_is_encoded_waits_for_it(hand):
    hand.state(rounds=((1, 0),))
    hand.boundary(4, copied=(0,))
    assert not of(hand.version(1), Prepare)
    assert of(hand.captured(), Prepare)


def test_a_round_is_answered_before_a_newer_version_is_prepared(hand):
    """An island whose boundaries are rarer than versions would else never hand anything over."""
    hand.boundary(2)
    hand.version(1)
    hand.version(2)
    hand.state(rounds=((1, 0),))
    said = hand.boundary(1, installed=(0,), copied=(0,))
    assert of(said, Capture)
    assert not of(said, Prepare)
    assert of(hand.captured(), Prepare)


def test_several_hosts_hand_over_what_they_copy_for_the_next_round_and_wait_for_its_fate():
    hand = Hand(several_hosts=True)
    assert of(hand.state(due_soon=(0,)), Watch) == [Watch(fragments=frozenset({0}))]
    said = hand.boundary(3, copied=(0,))
    assert of(said, Capture)
    assert of(said, Watch) == [Watch(fragments=frozenset())]
    (contribution,) = sent(hand.captured(), m.Contribution)
    assert (contribution.round_id, contribution.steps.to_step) == (0, 3)
    said = hand.state(rounds=((1, 0),))
    assert (of(said, Watch), sent(said, m.Nothing)) == ([], []), "what is on its way answers that round"
    said = hand.resolve(contribution, m.Fate.MERGED)
    assert of(said, Watch) == []
    assert of(hand.state(due_soon=(0,)), Watch) == [Watch(fragments=frozenset({0}))]


def test_several_hosts_answer_the_open_round_though_their_last_answer_came_too_late():
    hand = Hand(several_hosts=True)
    assert of(hand.state(rounds=((1, 0),)), Watch) == [Watch(fragments=frozenset({0}))]
    hand.boundary(3, copied=(0,))
    (late,) = sent(hand.captured(), m.Contribution)
    hand.resolve(late, m.Fate.WAITING)
    assert not of(hand.boundary(1), Watch), "no round waits for more"
    assert of(hand.state(rounds=((2, 0),)), Watch) == [Watch(fragments=frozenset({0}))]
    hand.boundary(2, copied=(0,))
    (answer,) = sent(hand.captured(), m.Contribution)
    assert (answer.round_id, answer.steps.from_step, answer.steps.to_step) == (2, 3, 6)


def test_a_heartbeat_names_what_is_outstanding(hand):
    hand.hand_over(4, 1)
    hand.now_s = 0.5
    (beat,) = sent(hand.feed(Tick()), m.Heartbeat)
    assert beat.outstanding == (m.Outstanding(fragment_id=0, from_step=0, to_step=4),)
    assert (beat.inner_step, beat.tokens, beat.versions) == (4, 40, (0,))


def test_a_contribution_that_never_arrived_is_sent_again_with_growing_pauses(hand):
    contribution = hand.hand_over(4, 1)
    times = []
    for hand.now_s in range(1, 130):
        if sent(hand.resolve(contribution, m.Fate.UNKNOWN), m.Contribution):
            times.append(hand.now_s)
    assert times == [2.0, 6.0, 14.0, 30.0, 62.0, 122.0]


def test_a_contribution_that_this_machine_still_holds_is_not_sent_again(hand):
    contribution = hand.hand_over(4, 1)
    for hand.now_s in range(1, 130):
        assert not sent(hand.resolve(contribution, m.Fate.UNKNOWN, carried=Carried(0, 7)), m.Contribution)
    hand.now_s += 2.0
    assert sent(hand.resolve(contribution, m.Fate.UNKNOWN, carried=Carried(7, 0)), m.Contribution) == [contribution]


def test_over_another_bulk_connection_it_says_what_it_wants_and_sends_again_what_is_unknown(hand):
    """The broker sends versions to nobody who has not spoken over that connection."""
    contribution = hand.hand_over(4, 1)
    hand.now_s = 0.5
    assert not sent(hand.state(carried=Carried(10, 7, 1)), m.Want)
    hand.now_s = 1.0
    said = hand.resolve(contribution, m.Fate.UNKNOWN, carried=Carried(1, 7, 2))
    assert sent(said, m.Want)
    assert sent(said, m.Contribution) == [contribution]
    hand.now_s = 1.5
    assert not sent(hand.resolve(contribution, m.Fate.UNKNOWN, carried=Carried(1, 7, 2)), m.Contribution)


@pytest.mark.parametrize("lost_with", ["leaders", "connections"])
def test_what_others_lost_is_sent_again_at_once_and_makes_no_later_pause_longer(hand, lost_with):
    contribution = hand.hand_over(4, 1)
    hand.resolve(contribution, m.Fate.WAITING, carried=Carried(7, 0, 0))
    for number in range(1, 11):
        hand.now_s += 0.5
        hand.epoch += lost_with == "leaders"
        carried = Carried(7, 0, number if lost_with == "connections" else 0)
        assert sent(hand.resolve(contribution, m.Fate.UNKNOWN, carried=carried), m.Contribution) == [contribution]
        assert not sent(hand.resolve(contribution, m.Fate.UNKNOWN, carried=carried), m.Contribution), "once is enough"
        hand.now_s += 0.05
        if number % 2:  # of the others nothing is heard
            hand.resolve(contribution, m.Fate.WAITING, carried=carried)
    hand.resolve(contribution, m.Fate.MERGED)
    later, sent_s = hand.hand_over(4, 2), hand.now_s
    while not sent(hand.resolve(later, m.Fate.UNKNOWN), m.Contribution):
        hand.now_s += 0.25
    assert hand.now_s - sent_s == 2.0


def test_a_new_leader_waits_for_what_this_machine_still_holds(hand):
    contribution = hand.hand_over(4, 1)
    hand.epoch = 2
    assert not sent(hand.resolve(contribution, m.Fate.UNKNOWN, carried=Carried(0, 7)), m.Contribution)


def test_the_same_bytes_are_sent_again_on_retry(hand):
    contribution = hand.hand_over(4, 1)
    hand.boundary(3, copied=(0,))
    hand.now_s = 2.5
    assert sent(hand.resolve(contribution, m.Fate.RETRY, m.Reason.QUEUE_FULL), m.Contribution) == [contribution]


def test_while_a_contribution_is_on_its_way_no_further_ones_pile_up_behind_it():
    """Control gets through and bulk does not: captured each time, what is kept would grow by a model per interval."""
    hand = Hand(fragments=2)
    first = hand.hand_over(4, 1)
    for round_id in range(2, 100):
        hand.boundary(4, copied=(0,))
        said = hand.state(rounds=((round_id, 0),))
        assert not of(said, Capture)
        assert [nothing.round_id for nothing in sent(said, m.Nothing)] == [round_id], "no round waits for it"
    assert len(hand.core.fragments[0].outstanding) == 1
    assert hand.hand_over(4, 100, p=1).steps.from_step == 0, "the other fragment is another matter"
    hand.resolve(first, m.Fate.WAITING)
    assert of(hand.state(rounds=((101, 0),)), Capture)
    (later,) = sent(hand.captured(), m.Contribution)
    assert later.steps == steps(4, 396), "nothing is lost by it"


def test_what_a_new_aggregator_has_not_got_counts_as_on_its_way_again(hand):
    first = hand.hand_over(4, 1)
    hand.resolve(first, m.Fate.WAITING)
    hand.resolve(first, m.Fate.UNKNOWN)
    hand.boundary(4, copied=(0,))
    assert sent(hand.state(rounds=((2, 0),)), m.Nothing)


def test_the_flush_gets_everything_whatever_is_still_on_its_way(hand):
    """There, "nothing" would mean that no steps are left."""
    hand.hand_over(4, 1)
    hand.state(phase=m.Phase.FLUSHING)
    hand.boundary(1, copied=(0,), stopped=True)
    said = hand.state(phase=m.Phase.FLUSHING, rounds=((2, 0),))
    assert not sent(said, m.Nothing)
    (contribution,) = sent(hand.captured(), m.Contribution)
    assert contribution.steps == steps(4, 5)


def test_a_version_resolves_the_contributions_in_it(hand):
    contribution = hand.hand_over(4, 1)
    merged = m.Merged(
        island_id="a",
        incarnation=1,
        steps=contribution.steps,
        staleness=0.0,
        token_weight=1.0,
        staleness_weight=1.0,
        merge_weight=1.0,
        fresh=True,
    )
    hand.version(1, merged=(merged,))
    assert not hand.core.fragments[0].outstanding


def test_stale_takes_nothing_with_it_that_could_still_be_merged(hand):
    contribution = hand.hand_over(4, 1)
    hand.version(9)
    hand.boundary(installed=(0,))
    hand.boundary(100)
    hand.state(versions=(17,))
    hand.resolve(contribution, m.Fate.REFUSED, m.Reason.STALE)
    assert of(hand.version(17), Prepare)[0].keep == 1.0
    hand.boundary(1, installed=(0,))
    assert hand.hand_over(1, 2).steps == steps(4, 106)
    assert hand.core.fragments[0].overwritten_tokens == 0


def test_after_stale_what_is_as_old_gives_way_to_the_global_parameters_and_nothing_is_handed_over_till_then(hand):
    contribution = hand.hand_over(4, 1)
    hand.version(1)
    hand.boundary(1, installed=(0,))
    hand.state(versions=(9,))
    said = hand.resolve(contribution, m.Fate.REFUSED, m.Reason.STALE)
    assert notes(said, "contribution.refused")
    hand.boundary(1, copied=(0,))
    assert sent(hand.state(rounds=((2, 0),)), m.Nothing), "it is spoilt"
    hand.state(versions=(9,))
    assert sent(hand.log, m.Want)[-1].versions == (-1,), "whatever there is, the version at hand too"
    (prepare,) = of(hand.version(1), Prepare)
    assert prepare.keep == 0.0
    hand.boundary(1, installed=(0,))
    assert hand.core.fragments[0].overwritten_tokens == 30
    (prepare,) = of(hand.version(2), Prepare)
    assert prepare.keep == 1.0


def test_while_a_version_is_wanted_once_more_older_ones_are_not_taken(hand):
    contribution = hand.hand_over(4, 1)
    hand.version(3)
    hand.boundary(1, installed=(0,))
    hand.state(versions=(9,))
    hand.resolve(contribution, m.Fate.REFUSED, m.Reason.STALE)
    assert not of(hand.version(2), Prepare)
    hand.state(versions=(9,))
    assert of(hand.version(3), Prepare)


def test_after_not_finite_every_fragment_takes_the_global_parameters_and_a_fresh_optimizer_once():
    hand = Hand(fragments=2)
    first, second = hand.hand_over(4, 1, p=0), hand.hand_over(4, 2, p=1)
    assert of(hand.resolve(first, m.Fate.REFUSED, m.Reason.NOT_FINITE), RefreshOptimizer)
    assert not of(hand.resolve(second, m.Fate.REFUSED, m.Reason.NOT_FINITE), RefreshOptimizer)
    assert [of(hand.version(0, p), Prepare)[0].keep for p in range(2)] == [0.0, 0.0]
    hand.boundary(1, installed=(0, 1))
    hand.core.fragments[1].outstanding[(0, 8)] = Pending(second, Backoff(1.0, 1.0), sent_at_s=0.0)
    assert not of(hand.resolve(second, m.Fate.REFUSED, m.Reason.NOT_FINITE), RefreshOptimizer), "from before it"
    assert not any(f.overwrite for f in hand.core.fragments.values())


@pytest.mark.parametrize("reason", [m.Reason.OVERLAP, m.Reason.IMPLAUSIBLE, m.Reason.RUN_ENDED])
def test_other_refusals_leave_the_local_parameters_alone(hand, reason):
    contribution = hand.hand_over(4, 1)
    said = hand.resolve(contribution, m.Fate.REFUSED, reason)
    assert not of(said, RefreshOptimizer)
    assert of(hand.version(1), Prepare)[0].keep == 1.0


def test_a_resolution_of_something_else_is_ignored(hand):
    contribution = hand.hand_over(4, 1)
    hand.state(resolutions=(m.Resolution(fragment_id=5, from_step=0, to_step=4, fate=m.Fate.MERGED),))
    hand.resolve(contribution, m.Fate.MERGED)
    assert hand.resolve(contribution, m.Fate.REFUSED, m.Reason.STALE) == []
