"""What Decoupled DiLoCo (https://arxiv.org/abs/2604.21428) says about rounds, a test per claim."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.rules.quorum import RoundView, Verdict, Waits, decide, grace_window_s
from tests.linked_cores import LinkedCluster

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
    cluster = LinkedCluster("a", keep=0.0, sync_interval=8)
    cluster.train(40)
    books = cluster.aggregator.run.ledger.books().tokens()
    assert set(books["wasted"]) == {"overwritten"}
    versions = cluster.aggregator.run.versions[0]
    assert books["wasted"]["overwritten"] <= 2 * 10 * versions
    assert set(cluster["a"].keeps) == {0.0}


def test_the_inner_optimizer_is_left_alone_by_an_adoption():
    """Parameters only (the paper does not say; keeping the moments is the obvious choice)."""
    cluster = LinkedCluster("a", "b")
    cluster.train(20)
    assert cluster.aggregator.run.versions[0] >= 2
    assert cluster["a"].refreshes == cluster["b"].refreshes == 0


def test_a_stalled_learner_needs_only_the_newest_version():
    """Broadcasts missed while stalled: applying the newest of each fragment is the same as applying all in turn."""
    cluster = LinkedCluster("a", "b", "c", dead_after_s=1000.0)
    cluster.train(24, "a", "b")
    newest = cluster.aggregator.run.versions[0]
    assert newest >= 3
    assert cluster["c"].core.fragments[0].version == 0
    cluster["c"].train(2)
    cluster.train(1, "c")
    assert cluster["c"].core.fragments[0].version == newest
    assert len(cluster["c"].keeps) <= 3
