"""Intervals, verdicts, corrections, tuning and curves, against values worked out by hand or by SciPy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.lab.curves import REACH, exponent, extra_tokens, tokens_to_reach
from ops.lab.statistics import (
    SEEDS_BEFORE_LOOKING,
    Interval,
    Kind,
    Verdict,
    holm,
    interval,
    judge,
    over_text,
    p_better,
    paired_differences,
    seeds_for,
    seeds_needed,
    student_cdf,
    student_quantile,
)

# --- Student's distribution ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423), (120, 1.9799)],
)
def test_quantiles_are_those_of_the_printed_tables(freedom, quantile):
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, abs=5e-5)
    assert student_quantile(0.025, freedom) == pytest.approx(-quantile, abs=5e-5)


def test_one_and_two_degrees_of_freedom_have_their_closed_forms():
    for t in (-3.0, -0.5, 0.0, 0.7, 20.0):
        assert student_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-15)
        assert student_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-15)


@given(t=st.floats(-50, 50), freedom=st.integers(1, 200))
def test_the_distribution_is_that_of_scipy(t, freedom):
    scipy = pytest.importorskip("scipy.special")
    # Near zero SciPy itself is off by up to 1e-9: 0.5 + t / pi is what one degree of freedom gives there.
    assert student_cdf(t, freedom) == pytest.approx(float(scipy.stdtr(freedom, t)), abs=2e-9)


@given(probability=st.floats(0.001, 0.999), freedom=st.integers(1, 60))
def test_a_quantile_inverts_the_distribution(probability, freedom):
    assert student_cdf(student_quantile(probability, freedom), freedom) == pytest.approx(probability, abs=1e-12)


# --- intervals ----------------------------------------------------------------------------------------------------


def test_an_interval_over_text_is_that_of_a_ratio_over_parts_of_it():
    ours, theirs = [3.0, 5, 4, 4, 4, 4, 4, 4], [2.0, 2, 2, 2, 2, 2, 2, 2]  # twice as much: deviations of -1 and 1
    found = over_text([ours], [theirs])
    assert (found.mean, found.count) == (1.0, 1)
    assert found.half_width == pytest.approx(student_quantile(0.975, 7) * 0.5 * math.sqrt(2 / 7 / 8))
    halves = [[x for x in losses for _ in (0, 1)] for losses in (ours, theirs)]  # 16 blocks are eight parts
    assert over_text([halves[0]], [halves[1]]).half_width == pytest.approx(found.half_width)
    twice = over_text([ours, [x + 1 for x in ours]], [theirs, [x + 1 for x in theirs]])  # seeds are added up
    assert twice.mean == pytest.approx((32 + 40) / (16 + 24) - 1)
    assert twice.count == 2


@given(st.lists(st.floats(1.0, 9.0), min_size=8, max_size=40), st.floats(0.5, 2.0))
def test_text_that_is_hard_for_both_widens_no_interval_over_text(hard, factor):
    """What is a constant share of the loss is so on any text."""
    found = over_text([[x * factor for x in hard]], [hard])
    assert found.mean == pytest.approx(factor - 1)
    assert found.half_width == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["so many nats more", "so much more"])
def test_an_interval_over_text_covers_what_other_text_would_have_said(share):
    """Of texts drawn anew about one in twenty misses, whatever the difference is made of."""
    rng = np.random.default_rng(0)
    truth = 0.02 * (1 - share) / 2.0 + 0.02 * share
    missed = 0
    for _ in range(1000):
        base = rng.normal(2.0, 0.5, 32)
        ours = base * (1 + 0.02 * share) + 0.02 * (1 - share) + rng.normal(0.0, 0.005, 32)
        found = over_text([ours.tolist()], [base.tolist()])
        missed += abs(found.mean - truth) > found.half_width
    assert 25 <= missed <= 85


@pytest.mark.parametrize(("looks", "wrong"), [((8,), 0.05), ((4, 8), 0.086), ((4, 12, 24), 0.123)], ids=str)
def test_what_it_costs_to_look_again_at_a_claim_that_was_open(looks, wrong):
    """The truth lies on the margin, so that every verdict is wrong; the page and docs/lab.md quote these shares."""
    seeds = np.random.default_rng(0).normal(size=(20_000, looks[-1]))
    verdicts = np.zeros(len(seeds), bool)
    for n in looks:
        half_width = student_quantile(0.975, n - 1) * seeds[:, :n].std(axis=1, ddof=1) / math.sqrt(n)
        verdicts |= np.abs(seeds[:, :n].mean(axis=1)) > half_width
    assert verdicts.mean() == pytest.approx(wrong, abs=0.006)


@pytest.mark.parametrize(("most", "one_in"), [(6, 15), (12, 12), (24, 11.5)])
def test_what_it_costs_that_seeds_are_added_until_the_interval_is_narrow(most, one_in):
    """At the worst ratio of margin to scatter; docs/lab.md and the page quote these shares."""
    seeds = np.random.default_rng(0).normal(size=(20_000, most))
    counts = np.arange(SEEDS_BEFORE_LOOKING, most + 1)
    means = np.stack([seeds[:, :n].mean(axis=1) for n in counts])
    quantiles = [student_quantile(0.975, n - 1) / math.sqrt(n) for n in counts]
    widths = np.stack([q * seeds[:, :n].std(axis=1, ddof=1) for q, n in zip(quantiles, counts, strict=True)])
    worst = 0.0
    for margin in np.geomspace(0.2, 3.0, 30):
        narrow = widths <= margin
        narrow[-1] = True
        ends = narrow.argmax(axis=0), np.arange(len(seeds))
        worst = max(worst, float(np.mean(np.abs(means[ends]) > widths[ends])))
    assert 1 / worst == pytest.approx(one_in, rel=0.06)


def test_an_interval_of_three_values_by_hand():
    # mean 2; deviations -1, 0, 1; variance 1; standard error 1 / sqrt(3); quantile 4.302653 with 2 degrees
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found.count == 3
    assert found.low == pytest.approx(2 - 2.484138, abs=1e-6)
    assert found.high == pytest.approx(2 + 2.484138, abs=1e-6)


@pytest.mark.parametrize("away", [0.05, 0.03, 0.02, 0.01])
def test_so_many_seeds_decide_four_times_in_five_and_fewer_do_not(away):
    seen = [0.01, -0.03, 0.05, 0.02]
    found, deviation = interval(seen), np.std(seen, ddof=1)
    needed = seeds_for(found, away, at_most=2000)
    assert seeds_for(found, away, at_most=5) == min(needed, 5)

    def decided(n):
        sets = np.random.default_rng(7).normal(-away, deviation, size=(20_000, n))
        half_width = student_quantile(0.975, n - 1) * sets.std(axis=1, ddof=1) / math.sqrt(n)
        return np.mean(sets.mean(axis=1) + half_width <= 0)

    assert 0.78 < decided(needed) < 0.88
    assert decided(needed - 1) < 0.83


def test_one_value_has_an_interval_without_ends():
    assert interval([0.3]) == Interval(mean=0.3, half_width=math.inf, count=1)


def test_no_values_have_no_interval():
    with pytest.raises(ValueError, match="at least one"):
        interval([])


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_interval_covers_the_truth_in_95_of_100_simulated_cases(n):
    random = np.random.default_rng(n)
    cases = 4000
    covered = sum(
        abs(found.mean - 0.01) <= found.half_width
        for found in (interval(list(row)) for row in random.normal(0.01, 0.003, size=(cases, n)))
    )
    # Five standard deviations of a binomial with p = 0.95.
    assert covered / cases == pytest.approx(0.95, abs=5 * math.sqrt(0.95 * 0.05 / cases))


def test_differences_are_paired_by_seed_and_relative_to_the_baseline():
    found = paired_differences({1: 2.02, 0: 3.0, 7: 9.0}, {0: 2.0, 1: 2.0, 2: 1.0})
    assert list(found) == [0, 1]
    assert found == pytest.approx({0: 0.5, 1: 0.01})


# --- verdicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "low", "high", "verdict"),
    [
        (Kind.NOT_WORSE, -0.5, 0.0099, Verdict.HOLDS),
        (Kind.NOT_WORSE, -0.5, 0.011, Verdict.INCONCLUSIVE),
        (Kind.NOT_WORSE, 0.011, 0.02, Verdict.FAILS),
        (Kind.BETTER, -0.05, -0.011, Verdict.HOLDS),
        (Kind.BETTER, -0.05, -0.009, Verdict.INCONCLUSIVE),
        (Kind.BETTER, -0.005, 0.0, Verdict.FAILS),
        (Kind.EQUAL, -0.0099, 0.0099, Verdict.HOLDS),
        (Kind.EQUAL, -0.02, 0.005, Verdict.INCONCLUSIVE),
        (Kind.EQUAL, 0.02, 0.03, Verdict.FAILS),
        (Kind.EQUAL, -0.03, -0.02, Verdict.FAILS),
    ],
)
def test_a_verdict_follows_from_where_the_interval_lies(kind, low, high, verdict):
    found = Interval(mean=(low + high) / 2, half_width=(high - low) / 2, count=3)
    assert judge(found, kind, 0.01) is verdict


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("difference", [-0.5, 0.0, 0.5])
def test_one_seed_is_always_inconclusive(kind, difference):
    assert judge(interval([difference]), kind, 0.01) is Verdict.INCONCLUSIVE


def test_being_better_by_nothing_is_not_better():
    assert judge(interval([0.0, 0.0]), Kind.BETTER, 0.0) is Verdict.FAILS


def test_a_p_value_by_hand():
    # mean -2, standard error 1 / sqrt(3), t = -2 sqrt(3); 2 degrees: 1/2 + t / (2 sqrt(2 + t^2)) with t^2 = 12
    assert p_better([-1.0, -2.0, -3.0], 0.0) == pytest.approx(0.5 - math.sqrt(12) / (2 * math.sqrt(14)))
    assert p_better([-1.0, -2.0, -3.0], 2.0) == pytest.approx(0.5)
    assert p_better([-1.0, -1.0], 0.0) == 0.0
    assert p_better([0.0, 0.0], 0.0) == 1.0
    with pytest.raises(ValueError, match="two differences"):
        p_better([-1.0], 0.0)


@given(st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=6), st.floats(0, 0.05))
def test_a_p_value_below_the_level_and_a_verdict_that_holds_are_the_same(differences, margin):
    p = p_better(differences, margin)
    if abs(p - 0.025) > 1e-6:  # at the very edge, rounding decides
        assert (p < 0.025) == (judge(interval(differences), Kind.BETTER, margin) is Verdict.HOLDS)


def test_holm_by_hand():
    # 0.01 <= 0.05/4, 0.015 <= 0.05/3, 0.03 > 0.05/2: it and the larger one fall, though 0.04 <= 0.05.
    assert holm([0.03, 0.01, 0.04, 0.015], level=0.05) == (False, True, False, True)
    assert holm([], level=0.05) == ()
    assert holm([0.02], level=0.025) == (True,)


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_accepts_no_less_than_bonferroni_and_no_more_than_no_correction(p_values):
    for p, stands in zip(p_values, holm(p_values), strict=True):
        assert stands or p > 0.025 / len(p_values)
        assert not stands or p <= 0.025


def test_holm_keeps_the_chance_of_any_false_claim_below_the_level():
    random = np.random.default_rng(0)
    cases = 4000
    false = sum(any(holm(list(row))) for row in random.uniform(size=(cases, 5)))  # p-values of claims that are false
    assert false / cases <= 0.025 + 4 * math.sqrt(0.025 * 0.975 / cases)


def test_another_seed_is_needed_while_the_interval_is_wider_than_the_margin():
    assert seeds_needed([], margin=0.01, max_seeds=5)
    assert seeds_needed([0.0], margin=0.01, max_seeds=5)
    assert not seeds_needed([0.0], margin=0.01, max_seeds=1)
    wide, narrow = [0.0, 0.01, 0.02, 0.03], [0.0, 0.001, 0.002, 0.003]  # half-widths 0.0205 and 0.00205
    assert seeds_needed(wide, margin=0.01, max_seeds=5)
    assert not seeds_needed(wide, margin=0.01, max_seeds=4)
    assert not seeds_needed(narrow, margin=0.01, max_seeds=5)
    # Three that happen to lie close together say little about how far apart seeds lie.
    assert seeds_needed(narrow[:3], margin=0.01, max_seeds=5)


# --- curves -------------------------------------------------------------------------------------------------------


def law(tokens):
    return 5.0 * tokens**-0.1


CURVE = [(n, law(n)) for n in (100, 200, 400, 600, 800, 1000)]


def test_a_loss_between_two_points_is_found_linearly_in_the_logarithm_of_tokens():
    assert tokens_to_reach([(100, 4.0), (10_000, 2.0)], 3.0) == pytest.approx(1000)
    assert tokens_to_reach([(100, 4.0), (10_000, 2.0)], 2.0) == pytest.approx(10_000)
    assert tokens_to_reach([(100, 4.0), (10_000, 2.0)], 1.9) is None
    assert tokens_to_reach([(100, 4.0)], 5.0) == 100
    assert tokens_to_reach([], 5.0) is None


def test_of_several_crossings_the_last_one_counts():
    noisy = [(100, 4.0), (200, 2.9), (400, 3.5), (1600, 2.5)]
    assert tokens_to_reach(noisy, 3.0) == pytest.approx(400 * 2)  # halfway from 3.5 to 2.5


def test_a_better_candidate_needs_fewer_tokens():
    found = extra_tokens(CURVE, loss=3.0, tokens=1000)
    assert not found.extrapolated
    assert found.tokens == pytest.approx((5 / 3) ** 10, rel=0.01)
    assert found.extra == pytest.approx((5 / 3) ** 10 / 1000 - 1, abs=0.01)


def test_a_worse_candidate_is_followed_along_its_power_law_and_says_so():
    found = extra_tokens(CURVE, loss=law(1300), tokens=1000)
    assert found.extrapolated
    assert found.extra == pytest.approx(0.3)


@given(b=st.floats(0.02, 0.5), times=st.floats(1.01, REACH - 0.01))
def test_an_exact_law_is_followed_exactly(b, times):
    curve = [(n, 7 * n**-b) for n in (250, 500, 750, 1000)]
    assert exponent(curve) == pytest.approx(b)
    assert extra_tokens(curve, loss=7 * (1000 * times) ** -b, tokens=1000).extra == pytest.approx(times - 1)


@pytest.mark.parametrize(
    ("curve", "loss"),
    [
        ([], 3.0),
        ([(0, 9.0)], 3.0),  # initialisation alone
        (CURVE[:2], 2.0),  # too few points for a law
        (CURVE, law(1000 * REACH * 1.01)),  # too far
        ([(500, 3.0), (700, 3.1), (1000, 3.2)], 2.0),  # it rises
        (CURVE, 0.0),
        ([(n, math.inf) for n, _ in CURVE], 3.0),
    ],
)
def test_what_is_never_reached_is_none(curve, loss):
    assert extra_tokens(curve, loss=loss, tokens=1000) is None


def test_a_law_needs_two_sizes():
    with pytest.raises(ValueError, match="two sizes"):
        exponent([(10, 3.0), (10, 3.1)])
