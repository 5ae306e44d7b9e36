"""Intervals, verdicts, corrections, tuning and curves, against values worked out by hand or by SciPy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.lab.cells import tunings
from ops.lab.curves import REACH, exponent, extra_tokens, tokens_to_reach
from ops.lab.statistics import (
    Interval,
    Kind,
    Verdict,
    holm,
    interior,
    interval,
    judge,
    p_better,
    paired_differences,
    seeds_for,
    seeds_needed,
    student_cdf,
    student_quantile,
    survivors,
)
from tests.synthetic import record

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


def test_an_interval_of_three_values_by_hand():
    # mean 2; deviations -1, 0, 1; variance 1; standard error 1 / sqrt(3); quantile 4.302653 with 2 degrees
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found.count == 3
    assert found.low == pytest.approx(2 - 2.484138, abs=1e-6)
    assert found.high == pytest.approx(2 + 2.484138, abs=1e-6)


@pytest.mark.parametrize("margin", [0.5, 0.1, 0.02, 0.003])
def test_so_many_seeds_and_no_fewer_are_needed_for_a_margin(margin):
    found = interval([0.01, -0.03, 0.05, 0.02])
    deviation = np.std([0.01, -0.03, 0.05, 0.02], ddof=1)
    widths = {n: student_quantile(0.975, n - 1) * deviation / math.sqrt(n) for n in range(2, 2000)}
    enough = min(n for n, width in widths.items() if width <= margin)
    assert seeds_for(found, margin, at_most=2000) == enough
    assert seeds_for(found, margin, at_most=10) == min(enough, 10)


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


# --- tuning -------------------------------------------------------------------------------------------------------


def test_a_best_value_in_the_middle_is_interior():
    found = interior([0.004, 0.001, 0.002], [3.3, 3.2, 3.1])
    assert (found.best, found.interior, found.next_value) == (0.002, True, None)


@pytest.mark.parametrize(
    ("losses", "best", "next_value"),
    [([3.0, 3.1, 3.2], 0.001, 0.0005), ([3.2, 3.1, 3.0], 0.004, 0.008), ([math.nan, math.inf, 9.0], 0.004, 0.008)],
)
def test_beyond_an_edge_the_next_value_continues_the_ratio(losses, best, next_value):
    found = interior([0.001, 0.002, 0.004], losses)
    assert (found.best, found.interior) == (best, False)
    assert found.next_value == pytest.approx(next_value)


def test_if_all_diverged_a_smaller_value_is_tried_next():
    assert interior([0.1, 0.2], [math.inf, math.nan]).next_value == pytest.approx(0.05)


def test_a_single_value_is_an_edge_and_zero_has_no_ratio():
    assert interior([0.5], [3.0]).next_value == 1.0
    assert interior([0.0, 0.5, 0.9], [2.0, 3.0, 4.0]).next_value is None
    with pytest.raises(ValueError, match="nothing"):
        interior([], [])


def test_survivors_are_the_best_cells_by_their_mean_over_seeds():
    rung = [
        record(3.0, seed=0, task__learning_rate=0.001),
        record(3.4, seed=1, task__learning_rate=0.001),
        record(3.1, seed=0, task__learning_rate=0.002),
        record(3.2, seed=1, task__learning_rate=0.002),
        record(2.0, seed=0, task__learning_rate=0.004),
        record(math.nan, seed=1, task__learning_rate=0.004),
    ]
    rates = [cell["task.learning_rate"] for cell in survivors(rung, 2)]
    assert rates == [0.002, 0.001]
    assert len(survivors(rung, 5)) == 2  # a diverged cell never goes on
    assert survivors([], 2) == ()


def test_tuning_chooses_on_the_last_rung_but_counts_what_was_dropped_before_as_tried():
    def rung(tokens, losses, **cell):
        return [
            record(loss, stage="tune", tokens=tokens, task__learning_rate=rate, **cell) for rate, loss in losses.items()
        ]

    records = [
        *rung(100, {0.001: 4.2, 0.002: 4.1, 0.004: 4.0, 0.008: 4.3}, mode="diloco"),
        *rung(400, {0.002: 3.4, 0.004: 3.5}, mode="diloco"),
        *rung(100, {0.001: 4.0, 0.002: 4.1}, mode="data-parallel"),
        *rung(400, {0.001: 3.0}, mode="data-parallel"),
        record(1.0, mode="diloco", task__learning_rate=9.0),  # final: says nothing about tuning
    ]
    diloco, parallel = tunings(records, ["task.learning_rate", "islands"])
    assert dict(diloco.group) == {"mode": "diloco"}
    assert diloco.values == (0.001, 0.002, 0.004, 0.008)
    assert (diloco.found.best, diloco.found.interior, diloco.tokens) == (0.002, True, 400)
    assert (parallel.found.best, parallel.found.interior) == (0.001, False)
    assert parallel.found.next_value == pytest.approx(0.0005)


def test_with_two_tuned_fields_a_value_is_judged_in_its_best_company():
    losses = {(1, 10): 3.0, (1, 20): 5.0, (2, 10): 4.0, (2, 20): 2.0, (4, 10): 6.0, (4, 20): 6.0}
    records = [record(loss, stage="tune", inner=a, outer=b) for (a, b), loss in losses.items()]
    inner, outer = tunings(records, ["inner", "outer"])
    assert (inner.found.best, inner.found.interior) == (2, True)
    assert (outer.found.best, outer.found.interior) == (20, False)


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
