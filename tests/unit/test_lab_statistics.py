"""Intervals, verdicts and corrections, against values worked out by hand; and claims judged on synthetic records."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from broker.wire.errors import ConfigError
from ops.lab.experiment import Kind, comparison_of
from ops.lab.statistics import Interval, Verdict, findings, holm, interval, judge, p_better
from tests.synthetic import CLAIM, SEEDS, pairs, record

# --- intervals ------------------------------------------------------------------------------------------------------


def test_an_interval_of_three_values_by_hand():
    # mean 2; deviations -1, 0, 1; variance 1; standard error 1 / sqrt(3); quantile 4.302653 with 2 degrees
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert (found.low, found.high) == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-6)


@given(st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=9).filter(lambda values: len(set(values)) > 1))
def test_an_interval_and_a_p_value_are_those_of_scipys_t_test(values):
    test = stats.ttest_1samp(values, -0.01, alternative="less")
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    found = interval(values)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-6, abs=1e-9)
    assert p_better(values, 0.01) == pytest.approx(test.pvalue, rel=1e-5, abs=1e-9)


def test_one_value_has_an_interval_without_ends_and_none_has_no_interval():
    assert interval([0.3]) == Interval(mean=0.3, half_width=math.inf, count=1)
    with pytest.raises(ValueError, match="at least one"):
        interval([])


@pytest.mark.parametrize(("looks", "one_in"), [((8,), 20), ((4, 8), 11.6), ((4, 12, 24), 8.1)], ids=str)
def test_what_it_costs_to_look_again_at_a_claim_that_was_open(looks, one_in):
    """The truth lies on the margin, so that every verdict is wrong; docs/results.md quotes the last share."""
    seeds = np.random.default_rng(0).normal(size=(20_000, looks[-1]))
    wrong = np.zeros(len(seeds), bool)
    for n in looks:
        half_width = stats.t.ppf(0.975, n - 1) * seeds[:, :n].std(axis=1, ddof=1) / math.sqrt(n)
        wrong |= np.abs(seeds[:, :n].mean(axis=1)) > half_width
    assert 1 / wrong.mean() == pytest.approx(one_in, rel=0.06)


@pytest.mark.parametrize(("most", "one_in"), [(6, 15), (12, 12)])
def test_what_it_cost_that_seeds_were_added_until_the_interval_was_narrow(most, one_in):
    """At the worst ratio of margin to scatter, looking from the fourth seed on; docs/results.md quotes these shares."""
    seeds = np.random.default_rng(0).normal(size=(20_000, most))
    counts = np.arange(4, most + 1)
    means = np.stack([seeds[:, :n].mean(axis=1) for n in counts])
    scale = [stats.t.ppf(0.975, n - 1) / math.sqrt(n) for n in counts]
    widths = np.stack([q * seeds[:, :n].std(axis=1, ddof=1) for q, n in zip(scale, counts, strict=True)])
    worst = 0.0
    for margin in np.geomspace(0.2, 3.0, 30):
        narrow = widths <= margin
        narrow[-1] = True
        ends = narrow.argmax(axis=0), np.arange(len(seeds))
        worst = max(worst, float(np.mean(np.abs(means[ends]) > widths[ends])))
    assert 1 / worst == pytest.approx(one_in, rel=0.06)


# --- verdicts -------------------------------------------------------------------------------------------------------


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
    assert p_better([-1.0, -1.0], 0.0) == 0.0
    assert p_better([0.0, 0.0], 0.0) == 1.0
    with pytest.raises(ValueError, match="two differences"):
        p_better([-1.0], 0.0)


def test_holm_by_hand():
    # 0.01 <= 0.05/4, 0.015 <= 0.05/3, 0.03 > 0.05/2: it and the larger one fall, though 0.04 <= 0.05.
    assert holm([0.03, 0.01, 0.04, 0.015], level=0.05) == (False, True, False, True)
    assert holm([], level=0.05) == ()


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_accepts_no_less_than_bonferroni_and_no_more_than_no_correction(p_values):
    for p, stands in zip(p_values, holm(p_values), strict=True):
        assert stands or p > 0.025 / len(p_values)
        assert not stands or p <= 0.025


# --- claims on records ----------------------------------------------------------------------------------------------


def only(table, records):
    (found,) = findings([comparison_of(table)], records)
    return found


@pytest.mark.parametrize(
    ("change", "field", "cure"),
    [
        ({"claims": "x"}, "[compare] claims", "claim"),
        ({"kind": "worse"}, "kind", "not-worse, better, equal"),
        ({"margin": -0.1}, "margin", "from 0"),
        ({"margin": "1 %"}, "margin", "a number"),
        ({"kind": "equal", "margin": 0.0}, "margin", "above 0"),
        ({"claim": " "}, "claim", "sentence"),
        ({"candidate": {}}, "candidate", "select"),
        ({"candidate": {"mode": {}}}, "candidate.mode", "text"),
        ({"candidate": {"mode": "diloco"}}, "baseline", "same cells"),
        ({"by": ["mode"]}, "by", "leave it out"),
        ({"source": ""}, "source", "where"),
    ],
)
def test_a_wrong_comparison_is_refused_with_field_and_cure(change, field, cure):
    with pytest.raises(ConfigError) as refused:
        comparison_of(CLAIM | change)
    assert refused.value.field == (field if field.startswith("[compare]") else f"compare.{field}")
    assert cure in refused.value.cure


def test_there_is_a_verdict_for_each_value_of_by_in_order():
    records = [*pairs(0.002, islands=16), *pairs(0.03, islands=2), *pairs(0.0, seeds=(0,), islands=4)]
    found = findings([comparison_of(CLAIM)], records)
    assert [(each.name, each.verdict) for each in found] == [
        ("islands 2", Verdict.FAILS),
        ("islands 4", Verdict.INCONCLUSIVE),
        ("islands 16", Verdict.HOLDS),
    ]
    assert found[2].interval.mean == pytest.approx(0.002)
    assert found[2].interval.half_width == pytest.approx(4.302653 * 0.0005 / math.sqrt(3), rel=1e-6)
    assert list(found[2].differences) == [0, 1, 2]


def test_cells_that_differ_in_what_by_does_not_name_get_verdicts_of_their_own():
    records = [*pairs(0.0, islands=4, context=128), *pairs(0.03, islands=4, context=256)]
    found = findings([comparison_of(CLAIM)], records)
    assert [each.verdict for each in found] == [Verdict.HOLDS, Verdict.FAILS]


def test_tuned_rates_may_differ_but_other_fields_must_match():
    records = [
        *(record(3.0 + seed, seed=seed, mode="diloco", islands=4, task__learning_rate=0.001) for seed in SEEDS),
        *(record(3.001 + seed, seed=seed, mode="decoupled", islands=4, task__learning_rate=0.004) for seed in SEEDS),
    ]
    assert only(CLAIM, records).verdict is Verdict.HOLDS
    strict = only(CLAIM | {"ignore": []}, records)
    assert (strict.verdict, strict.interval) == (Verdict.INCONCLUSIVE, None)


@pytest.mark.parametrize("more", [{}, {"islands": 1}], ids=["lacks the field", "fixes it"])
def test_one_baseline_serves_for_all_values_of_a_field_that_it_does_not_share(more):
    parallel = [record(3.0 + seed, seed=seed, mode="data-parallel", **more) for seed in SEEDS]
    ours = [record(3.001 + seed, seed=seed, mode="decoupled", islands=m) for seed in SEEDS for m in (2, 8)]
    found = findings([comparison_of(CLAIM | {"baseline": {"mode": "data-parallel", **more}})], [*parallel, *ours])
    assert [each.verdict for each in found] == [Verdict.HOLDS, Verdict.HOLDS]


def test_only_final_runs_with_seeds_that_both_have_are_paired():
    records = [*pairs(0.0, islands=4), record(9.0, seed=7, mode="decoupled", islands=4)]
    assert list(only(CLAIM, records).differences) == [0, 1, 2]
    assert only(CLAIM, [replace(each, stage="tune") for each in records]).interval is None
    apart = [record(3.0, seed=0, mode="decoupled"), record(3.0, seed=1, mode="diloco")]
    assert only(CLAIM, apart).interval is None


def test_two_runs_for_one_seed_are_not_chosen_from():
    doubled = [*pairs(0.0, islands=4), record(2.0, seed=0, mode="decoupled", islands=4, task__learning_rate=1.0)]
    found = only(CLAIM, doubled)
    assert (found.verdict, found.interval) == (Verdict.INCONCLUSIVE, None)
    assert "task.learning_rate" in found.reason


def test_runs_on_different_texts_are_neither_compared_nor_pooled():
    for text_of in (lambda each: each.cell["mode"], lambda each: str(each.seed % 2)):
        found = only(CLAIM, [replace(each, corpus=text_of(each)) for each in pairs(0.0)])
        assert (found.verdict, found.interval) == (Verdict.INCONCLUSIVE, None)


@pytest.mark.parametrize("loss", [0.0, -2.0])
def test_a_loss_that_is_not_above_0_is_part_of_no_ratio(loss):
    rows = pairs(0.0)
    assert only(CLAIM, [replace(rows[0], loss=loss), *rows[1:]]).interval is None


def test_a_diverged_candidate_fails_and_a_diverged_baseline_is_left_out():
    def lost(*modes):
        rows = pairs(0.0, islands=4)
        return [
            replace(row, loss=math.nan, tokens=9) if row.seed == 1 and row.cell["mode"] in modes else row
            for row in rows
        ]

    assert only(CLAIM, lost("decoupled")).verdict is Verdict.FAILS, "though it trained less"
    assert list(only(CLAIM, lost("diloco")).differences) == [0, 2]
    assert only(CLAIM, lost("diloco", "decoupled")).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("kind", ["not-worse", "better", "equal"])
@pytest.mark.parametrize(("share", "verdict"), [(-0.05, Verdict.INCONCLUSIVE), (0.0, Verdict.IDENTICAL)])
def test_seeds_that_change_nothing_decide_nothing(kind, share, verdict):
    losses = {"diloco": 3.0, "decoupled": 3.0 * (1 + share)}
    rows = [record(loss, seed=seed, mode=mode, islands=4) for seed in SEEDS for mode, loss in losses.items()]
    found = only(CLAIM | {"kind": kind}, rows)
    assert (found.verdict, found.p_value) == (verdict, None)


def test_better_claims_of_one_experiment_are_corrected_together():
    better = CLAIM | {"kind": "better", "margin": 0.0}
    alone = pairs(-0.01, islands=4, spread=0.004)  # t = -0.01 / (0.004 / sqrt 3) = -4.33: p = 0.0247
    assert only(better, alone).verdict is Verdict.HOLDS
    several = findings([comparison_of(better)], [*alone, *pairs(0.0, islands=2), *pairs(-0.05, islands=8)])
    assert [each.verdict for each in several] == [Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE, Verdict.HOLDS]
    # Claims of other kinds are no part of the family.
    mixed = findings([comparison_of(better), comparison_of(CLAIM)], alone)
    assert [each.verdict for each in mixed] == [Verdict.HOLDS, Verdict.HOLDS]


def test_runs_are_compared_in_equal_time_where_that_is_asked_for():
    rows = [
        replace(each, tokens=2 * each.tokens) if each.cell["mode"] == "decoupled" else each
        for each in pairs(-0.02, islands=4)
    ]
    assert only(CLAIM, rows).interval is None, "tokens differ"
    assert only(CLAIM | {"equal": "time"}, rows).verdict is Verdict.HOLDS
    late = [replace(each, virtual_s=1600.0) if each.cell["mode"] == "decoupled" else each for each in rows]
    assert only(CLAIM | {"equal": "time"}, late).interval is None
