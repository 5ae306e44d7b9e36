"""Intervals, verdicts and corrections, against SciPy and values worked out by hand; and claims judged on records."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from broker.base.errors import ConfigError
from ops.lab.statistics import Interval, Verdict, holm, interval, judge, p_better
from ops.plans.experiment import Kind, comparison_of
from tests.synthetic import CLAIM, SEEDS, chapter, pairs, record


@given(st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=9).filter(lambda values: len(set(values)) > 1))
def test_an_interval_and_a_p_value_are_those_of_scipys_t_test(values):
    test = stats.ttest_1samp(values, -0.01, alternative="less")
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    found = interval(values)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-6, abs=1e-9)
    assert p_better(values, 0.01) == pytest.approx(test.pvalue, rel=1e-5, abs=1e-9)


def test_values_that_do_not_scatter_and_single_ones():
    assert interval([0.3]) == Interval(0.3, math.inf)
    assert (p_better([-1.0, -1.0], 0.0), p_better([0.0, 0.0], 0.0)) == (0.0, 1.0)
    assert judge(interval([0.0, 0.0]), Kind.BETTER, 0.0) is Verdict.FAILS


@pytest.mark.parametrize(
    ("kind", "low", "high", "verdict"),
    [
        (Kind.NOT_WORSE, -0.5, 0.0099, Verdict.HOLDS),
        (Kind.NOT_WORSE, -0.5, 0.011, Verdict.INCONCLUSIVE),
        (Kind.NOT_WORSE, 0.011, 0.02, Verdict.FAILS),
        (Kind.NOT_WORSE, -math.inf, math.inf, Verdict.INCONCLUSIVE),
        (Kind.BETTER, -0.05, -0.011, Verdict.HOLDS),
        (Kind.BETTER, -0.05, -0.009, Verdict.INCONCLUSIVE),
        (Kind.BETTER, -0.005, 0.0, Verdict.FAILS),
    ],
)
def test_a_verdict_follows_from_where_the_interval_lies(kind, low, high, verdict):
    found = Interval(0.0, math.inf) if math.isinf(high) else Interval((low + high) / 2, (high - low) / 2)
    assert judge(found, kind, 0.01) is verdict


def test_holm_by_hand():
    # 0.01 <= 0.05/4, 0.015 <= 0.05/3, 0.03 > 0.05/2: it and the larger one fall, though 0.04 <= 0.05.
    assert holm([0.03, 0.01, 0.04, 0.015], level=0.05) == (False, True, False, True)
    assert holm([], level=0.05) == ()


def findings(records, *claims):
    return chapter(records, *claims).findings


def only(table, records):
    (found,) = findings(records, table)
    return found


@pytest.mark.parametrize(
    ("change", "field", "cure"),
    [
        ({"claims": "x"}, "[compare] claims", "claim"),
        ({"kind": "worse"}, "kind", "not-worse, better"),
        ({"margin": -0.1}, "margin", "from 0"),
        ({"margin": "1 %"}, "margin", "a number"),
        ({"claim": " "}, "claim", "sentence"),
        ({"candidate": {}}, "candidate", "select"),
        ({"candidate": {"mode": {}}}, "candidate.mode", "text"),
        ({"candidate": {"mode": "diloco"}}, "baseline", "same cells"),
        ({"source": ""}, "source", "must name"),
        ({"law": [900_000, 3]}, "law", "islands one of [1, 2, 4]"),
    ],
)
def test_a_wrong_comparison_is_refused_with_field_and_cure(change, field, cure):
    with pytest.raises(ConfigError) as refused:
        comparison_of(CLAIM | change)
    assert refused.value.field == (field if field.startswith("[compare]") else f"compare.{field}")
    assert cure in refused.value.cure


def test_what_the_law_says_is_what_is_published():
    assert comparison_of(CLAIM | {"law": [900_000, 2]}).published == 0.013


def test_there_is_a_verdict_for_each_value_of_what_is_neither_selected_nor_ignored_in_the_order_of_the_grid():
    found = findings([*pairs(0.03, islands=2), *pairs(0.0, seeds=(0,), islands=4), *pairs(0.002, islands=16)])
    assert [(each.name, each.verdict) for each in found] == [
        ("islands 2", Verdict.FAILS),
        ("islands 4", Verdict.INCONCLUSIVE),
        ("islands 16", Verdict.HOLDS),
    ]
    assert found[2].interval.mean == pytest.approx(0.002)
    assert found[2].interval.half_width == pytest.approx(4.302653 * 0.0005 / math.sqrt(3), rel=1e-6)
    assert list(found[2].differences) == [0, 1, 2]


def test_rates_that_are_ignored_may_differ():
    rates = {"diloco": 0.001, "decoupled": 0.004}
    rows = [replace(each, cell=each.cell | {"task.learning_rate": rates[each.cell["mode"]]}) for each in pairs(0.001)]
    assert only(CLAIM, rows).verdict is Verdict.HOLDS


@pytest.mark.parametrize("more", [{}, {"islands": 1}], ids=["lacks the field", "fixes it"])
def test_one_baseline_serves_for_all_values_of_a_field_that_it_does_not_share(more):
    parallel = [record(3.0 + seed, seed=seed, mode="data-parallel", **more) for seed in SEEDS]
    ours = [record(3.001 + seed, seed=seed, mode="decoupled", islands=m) for seed in SEEDS for m in (2, 8)]
    found = findings([*parallel, *ours], CLAIM | {"baseline": {"mode": "data-parallel", **more}})
    assert [each.verdict for each in found] == [Verdict.HOLDS, Verdict.HOLDS]


def test_only_seeds_that_both_have_are_paired():
    assert list(only(CLAIM, [*pairs(0.0), record(9.0, seed=7, mode="decoupled")]).differences) == [0, 1, 2]
    assert only(CLAIM, [record(3.0, seed=0, mode="decoupled"), record(3.0, seed=1, mode="diloco")]).interval is None


@pytest.mark.parametrize("text_of", [lambda each: each.cell["mode"], lambda each: str(each.seed % 2)])
def test_runs_on_different_texts_are_neither_compared_nor_pooled(text_of):
    found = only(CLAIM, [replace(each, corpus=text_of(each)) for each in pairs(0.0)])
    assert (found.verdict, found.interval) == (Verdict.INCONCLUSIVE, None)


@pytest.mark.parametrize("loss", [0.0, -2.0])
def test_a_loss_that_is_not_above_0_is_part_of_no_ratio(loss):
    rows = pairs(0.0)
    assert only(CLAIM, [replace(rows[0], loss=loss), *rows[1:]]).interval is None


def test_a_diverged_candidate_fails_and_a_diverged_baseline_is_left_out():
    def lost(*modes):
        return [
            replace(row, loss=math.nan, tokens=9) if row.seed == 1 and row.cell["mode"] in modes else row
            for row in pairs(0.0, islands=4)
        ]

    assert only(CLAIM, lost("decoupled")).verdict is Verdict.FAILS, "though it trained less"
    assert list(only(CLAIM, lost("diloco")).differences) == [0, 2]
    assert only(CLAIM, lost("diloco", "decoupled")).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("kind", ["not-worse", "better"])
@pytest.mark.parametrize(("share", "verdict"), [(-0.05, Verdict.INCONCLUSIVE), (0.0, Verdict.IDENTICAL)])
def test_seeds_that_change_nothing_decide_nothing(kind, share, verdict):
    losses = {"diloco": 3.0, "decoupled": 3.0 * (1 + share)}
    found = only(CLAIM | {"kind": kind}, [record(losses[m], seed=seed, mode=m) for seed in SEEDS for m in losses])
    assert (found.verdict, found.p_value) == (verdict, None)


def test_better_claims_of_one_experiment_are_corrected_together():
    better = CLAIM | {"kind": "better", "margin": 0.0}
    alone = pairs(-0.01, islands=4, spread=0.004)  # t = -0.01 / (0.004 / sqrt 3) = -4.33: p = 0.0247
    assert only(better, alone).verdict is Verdict.HOLDS
    several = findings([*pairs(0.0, islands=2), *alone, *pairs(-0.05, islands=8)], better)
    assert [each.verdict for each in several] == [Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE, Verdict.HOLDS]
    # Claims of other kinds are no part of the family.
    assert [each.verdict for each in findings(alone, better, CLAIM)] == [Verdict.HOLDS, Verdict.HOLDS]


def test_runs_are_compared_in_equal_time_where_that_is_asked_for():
    def rows(**changes):
        return [replace(each, **changes) if each.cell["mode"] == "decoupled" else each for each in pairs(-0.02)]

    more = {"tokens": 2 * record().tokens}
    assert only(CLAIM, rows(**more)).interval is None, "tokens differ"
    assert only(CLAIM | {"equal": "time"}, rows(**more)).verdict is Verdict.HOLDS
    assert only(CLAIM | {"equal": "time"}, rows(**more, virtual_s=1600.0)).interval is None
