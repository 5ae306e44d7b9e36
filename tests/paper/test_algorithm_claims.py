"""What Decoupled DiLoCo (https://arxiv.org/abs/2604.21428) says about rounds, a test per claim."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.rules.quorum import RoundView, Verdict, Waits, decide, grace_window_s
from broker.wire import messages as m
from islands.protocol.events import Prepare, RefreshOptimizer
from tests.aggregator_hand import TOKENS_PER_STEP, of
from tests.island_hand import Hand

seconds = st.floats(0.0, 100.0)


def test_equation_3_by_hand():
    """Tau = 2 steps of 1 s leave 2 s; 0.5 s went to the quorum, 0.3 s to synchronising; gamma = 0.9 of the rest."""
    grace_s = grace_window_s(factor=0.9, overlap_steps=2, step_s=1.0, quorum_s=0.5, sync_s=0.3)
    assert grace_s == pytest.approx(0.9 * (2 * 1.0 - (0.5 + 0.3)))


@given(st.floats(0.0, 10.0), st.integers(1, 8), seconds, seconds, seconds)
def test_equation_3_the_grace_window_never_exceeds_the_slack(gamma, tau, step_s, quorum_s, sync_s):
    """0 <= xi_grace <= gamma * xi_slack, and no more than tau steps: waiting costs no island a step."""
    grace_s = grace_window_s(factor=gamma, overlap_steps=tau, step_s=step_s, quorum_s=quorum_s, sync_s=sync_s)
    slack_s = tau * step_s - (quorum_s + sync_s)
    if slack_s <= 0.0:
        assert grace_s == 0.0
    assert 0.0 <= grace_s <= max(0.0, gamma * slack_s) + 1e-9  # sums in another order round differently
    assert grace_s <= tau * step_s


def test_algorithm_2_line_3_at_least_k_learners_are_waited_for():
    waits = Waits(quorum=3, grace_s=0.0, arrivals_s=0.0, timeout_s=1e9)
    for have in range(5):
        view = RoundView(
            opened_at_s=0.0,
            fresh=frozenset(range(have)),
            held=frozenset(),
            owing=frozenset(range(have, 6)),
            quorum_met_at_s=1.0 if have >= 3 else None,
        )
        closes = decide(1e6, view, 6, waits).verdict is Verdict.CLOSE
        assert closes == (have >= 3)


def test_overwriting_replaces_the_fragment_and_drops_the_steps_since_capture():
    """Algorithm 1: theta <- Theta at tau steps after the hand-over; at most those steps are wasted."""
    hand = Hand(keep=0.0)
    hand.resolve(hand.hand_over(4, 1), m.Fate.WAITING)
    (prepare,) = of(hand.version(1), Prepare)
    assert prepare.keep == 0.0
    hand.boundary(3, installed=(0,))
    assert hand.core.fragments[0].overwritten_tokens == 3 * TOKENS_PER_STEP
    assert hand.hand_over(2, 2).trained_on == (m.TrainedOn(fragment_version=1, steps=2),)


def test_the_inner_optimizer_is_left_alone_by_an_adoption():
    """Parameters only (the paper does not say; keeping the moments is the obvious choice)."""
    hand = Hand()
    for number in (1, 2):
        hand.resolve(hand.hand_over(4, number), m.Fate.MERGED)
        assert of(hand.version(number), Prepare)
        hand.boundary(1, installed=(0,))
    assert not of(hand.log, RefreshOptimizer)


def test_a_stalled_learner_needs_only_the_newest_version():
    """Broadcasts missed while stalled: applying the newest of each fragment is the same as applying all in turn."""
    hand = Hand()
    said = [each for number in range(1, 6) for each in of(hand.version(number), Prepare)]
    said += of(hand.boundary(1, installed=(0,)), Prepare)
    hand.boundary(installed=(0,))
    assert [prepare.version.fragment_version for prepare in said] == [1, 5]
    assert hand.core.fragments[0].version == 5
