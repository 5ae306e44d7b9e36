"""From records to verdicts: on synthetic records whose figures are known."""

import math
from dataclasses import replace

import pytest

from broker.wire.errors import ConfigError
from ops.lab import verdicts
from ops.lab.claims import comparison_of
from ops.lab.comparisons import correction, distinct, findings
from ops.lab.statistics import Verdict, interval, over_text
from tests.synthetic import CLAIM, SEEDS, pairs, record


def only(comparison_table, records):
    (found,) = findings([comparison_of(comparison_table)], records)
    return found


def test_a_comparison_is_read_as_it_stands_in_the_file():
    comparison = comparison_of(CLAIM)
    assert comparison.kind == "not-worse"
    assert comparison.by == ("islands",)
    assert comparison.published == 0.026
    assert comparison_of({k: v for k, v in CLAIM.items() if k not in ("published", "source")}).published is None


@pytest.mark.parametrize(
    ("change", "field", "cure"),
    [
        ({"claims": "x"}, "[compare] claims", "claim"),
        ({"kind": "worse"}, "kind", "not-worse, better, equal"),
        ({"margin": -0.1}, "margin", "from 0"),
        ({"margin": "1 %"}, "margin", "a number"),
        ({"margin": 3}, "margin", "one percent"),
        ({"kind": "equal", "margin": 0.0}, "margin", "above 0"),
        ({"claim": " "}, "claim", "sentence"),
        ({"candidate": {}}, "candidate", "select"),
        ({"candidate": {"mode": {}}}, "candidate.mode", "text"),
        ({"candidate": {"mode": "diloco"}}, "baseline", "same cells"),
        ({"by": "islands"}, "by", "list"),
        ({"by": ["mode"]}, "by", "leave it out"),
        ({"by": ["task.learning_rate"]}, "by", "leave it out"),
        ({"source": ""}, "source", "where"),
        ({"published": "2.6 %"}, "published", "a number"),
        ({"looks": [3], "seeds": 3}, "looks", "below seeds = 3"),
        ({"looks": [4, 2], "seeds": 9}, "looks", "must grow"),
        ({"looks": [0], "seeds": 3}, "looks", "from 1"),
        ({"looks": [2]}, "looks", "needs seeds"),
    ],
)
def test_a_wrong_comparison_is_refused_with_field_and_cure(change, field, cure):
    with pytest.raises(ConfigError) as refused:
        comparison_of(CLAIM | change)
    assert refused.value.field == (field if field.startswith("[compare]") else f"compare.{field}")
    assert cure in refused.value.cure


@pytest.mark.parametrize("missing", ["claim", "candidate", "baseline", "kind"])
def test_what_a_comparison_needs_is_asked_for(missing):
    with pytest.raises(ConfigError, match=f"{missing} = None: is needed"):
        comparison_of({key: value for key, value in CLAIM.items() if key != missing})


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
    assert found[2].cells == ({"mode": "decoupled", "islands": 16}, {"mode": "diloco", "islands": 16})
    assert found[1].reason == "one seed decides nothing"


def test_seeds_that_were_planned_after_the_last_look_are_told_apart():
    records = pairs(0.01, seeds=range(6), spread=0.001)
    claim = CLAIM | {"seeds": 6, "looks": [1, 2]}
    found = only(claim, records)
    assert found.new_seeds == interval([found.differences[seed] for seed in (2, 3, 4, 5)])
    assert only(claim, records[:4]).new_seeds is None
    assert only(CLAIM, records).new_seeds is None
    assert "| 6 of 8 |" in _row(claim | {"seeds": 8}, records)
    assert "| +1.00 % ± 0.20 % | ± 0.45 % (2) | 6 | +1.10 % ± 0.21 % (4) |" in _row(claim, records)


def _row(claim, records):
    """The row of a claim as its chapter has it, where two of its pairs have told of parts of the text."""
    blocks = [[3.0] * 8, [3.03, 3.0, 3.06, 3.03, 3.03, 3.03, 3.03, 3.03]]
    told = [
        replace(each, blocks=tuple(blocks[each.cell["mode"] == "decoupled"])) if each.seed in (1, 4) else each
        for each in records
    ]
    return verdicts.verdicts(findings([comparison_of(claim)], told))


def test_what_other_text_would_say_is_told_by_the_pairs_that_kept_blocks_of_it():
    def blocks(seed, mode):
        return tuple(2.0 + 0.1 * seed + 0.01 * (mode == "decoupled") * (k % 3) + 0.1 * k for k in range(16))

    told = [replace(each, blocks=blocks(each.seed, each.cell["mode"])) for each in pairs(0.0)]

    def of(*seeds):
        return over_text(*([blocks(seed, mode) for seed in seeds] for mode in ("decoupled", "diloco")))

    assert only(CLAIM, told).over_text == of(0, 1, 2)
    half = [replace(each, blocks=()) if (each.seed, each.cell["mode"]) == (1, "diloco") else each for each in told]
    assert only(CLAIM, half).over_text == of(0, 2) != of(0, 1)
    assert only(CLAIM, [replace(each, blocks=()) for each in told]).over_text is None
    assert only(CLAIM, [replace(each, blocks=each.blocks[:7]) for each in told]).over_text is None


@pytest.mark.parametrize(
    "change", [{"sequences": 64}, {"settings": {"task.context": 64}}], ids=["sequences", "context"]
)
def test_blocks_of_unlike_sequences_are_not_compared(change):
    told = [replace(each, blocks=tuple(range(1, 17))) for each in pairs(0.0)]
    assert only(CLAIM, told).over_text is not None
    unlike = [replace(each, **change) if each.cell["mode"] == "diloco" else each for each in told]
    assert only(CLAIM, unlike).over_text is None


def test_cells_that_differ_in_what_by_does_not_name_get_verdicts_of_their_own():
    records = [*pairs(0.0, islands=4, context=128), *pairs(0.03, islands=4, context=256)]
    found = findings([comparison_of(CLAIM)], records)
    assert [(each.name, each.verdict) for each in found] == [
        ("islands 4, context 128", Verdict.HOLDS),
        ("islands 4, context 256", Verdict.FAILS),
    ]


def test_tuned_rates_may_differ_but_other_fields_must_match():
    records = [
        *(record(3.0 + seed, seed=seed, mode="diloco", islands=4, task__learning_rate=0.001) for seed in SEEDS),
        *(record(3.001 + seed, seed=seed, mode="decoupled", islands=4, task__learning_rate=0.004) for seed in SEEDS),
    ]
    assert only(CLAIM, records).verdict is Verdict.HOLDS
    strict = only(CLAIM | {"ignore": []}, records)
    assert (strict.verdict, strict.reason) == (Verdict.INCONCLUSIVE, "nothing of the baseline was run")


def test_a_baseline_that_lacks_a_field_serves_for_all_of_its_values():
    parallel = [record(3.0 + seed, seed=seed, mode="data-parallel") for seed in SEEDS]
    ours = [record(3.001 + seed, seed=seed, mode="decoupled", islands=m) for seed in SEEDS for m in (2, 8)]
    found = findings([comparison_of(CLAIM | {"baseline": {"mode": "data-parallel"}})], [*parallel, *ours])
    assert [each.verdict for each in found] == [Verdict.HOLDS, Verdict.HOLDS]


def test_what_a_baseline_fixes_for_itself_need_not_match():
    parallel = [record(3.0 + seed, seed=seed, mode="data-parallel", islands=1) for seed in SEEDS]
    ours = [record(3.001 + seed, seed=seed, mode="decoupled", islands=m) for seed in SEEDS for m in (2, 8)]
    selection = {"baseline": {"mode": "data-parallel", "islands": 1}}
    found = findings([comparison_of(CLAIM | selection)], [*parallel, *ours])
    assert [each.name for each in found] == ["islands 2", "islands 8"]
    assert all(each.verdict is Verdict.HOLDS for each in found)


def test_a_more_general_baseline_does_not_contain_the_candidate():
    rows = [record(3.0 - 0.1 * grace, seed=seed, grace=grace) for seed in SEEDS for grace in (0, 1)]
    rows += [replace(each, cell={**each.cell, "mode": "decoupled"}) for each in rows]
    wanted = {"candidate": {"mode": "decoupled", "grace": 1}, "baseline": {"mode": "decoupled"}, "by": []}
    found = only(CLAIM | wanted, rows)
    assert len(found.differences) == 3
    assert found.interval.mean == pytest.approx(-0.1 / 3)


def test_lists_in_a_cell_select_and_match():
    rows = [
        record(3.0, seed=seed, mode=mode, step_times_s=times)
        for seed in SEEDS
        for mode in ("diloco", "decoupled")
        for times in ([1.0], [1.0, 1.2])
    ]
    found = findings([comparison_of(CLAIM | {"by": ["step_times_s"]})], rows)
    assert [each.name for each in found] == ["step times s 1", "step times s 1 1.2"]
    assert all(len(each.differences) == 3 for each in found)


def test_tuning_runs_are_never_compared():
    records = [replace(each, stage="tune") for each in pairs(0.0, islands=4)]
    assert only(CLAIM, records).reason == "nothing of the candidate was run"


def test_only_seeds_that_both_have_are_paired():
    records = [*pairs(0.0, islands=4), record(9.0, seed=7, mode="decoupled", islands=4)]
    assert list(only(CLAIM, records).differences) == [0, 1, 2]
    apart = [record(3.0, seed=0, mode="decoupled"), record(3.0, seed=1, mode="diloco")]
    assert only(CLAIM, apart).reason == "no seed was run for both"


def test_two_runs_for_one_seed_are_not_chosen_from():
    doubled = [*pairs(0.0, islands=4), record(2.0, seed=0, mode="decoupled", islands=4, task__learning_rate=1.0)]
    found = only(CLAIM, doubled)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "candidate with the same seed differ in task.learning_rate" in found.reason


def test_runs_on_different_texts_are_neither_compared_nor_pooled():
    found = only(CLAIM, [replace(each, corpus=each.cell["mode"]) for each in pairs(0.0)])
    assert (found.verdict, found.reason) == (Verdict.INCONCLUSIVE, "candidate and baseline saw different texts")
    # Both runs of a pair saw the same, but it was another one when the second pair was run.
    found = only(CLAIM, [replace(each, corpus=f"text {each.seed % 2}") for each in pairs(0.0)])
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.reason == "not all seeds saw the same text: remove the records of one"


@pytest.mark.parametrize("loss", [0.0, -2.0])
def test_a_loss_that_is_not_above_0_is_part_of_no_ratio(loss):
    rows = pairs(0.0)
    found = only(CLAIM, [replace(rows[0], loss=loss), *rows[1:]])
    assert (found.verdict, found.settled) == (Verdict.INCONCLUSIVE, True)
    assert "cannot be part of a ratio" in found.reason


def test_a_diverged_candidate_fails_and_a_diverged_baseline_is_left_out():
    rows = pairs(0.0, islands=4)
    candidate = [
        replace(each, loss=math.nan) if (each.seed, each.cell["mode"]) == (1, "decoupled") else each for each in rows
    ]
    assert only(CLAIM, candidate).verdict is Verdict.FAILS
    assert only(CLAIM, candidate).reason == "the candidate diverged (seed 1)"
    baseline = [
        replace(each, loss=math.nan) if (each.seed, each.cell["mode"]) == (1, "diloco") else each for each in rows
    ]
    found = only(CLAIM, baseline)
    assert list(found.differences) == [0, 2]
    assert found.reason == "left out, since the baseline diverged: seed 1"
    both = [replace(each, loss=math.nan) if each.seed == 1 else each for each in rows]
    assert only(CLAIM, both).verdict is Verdict.INCONCLUSIVE


def test_a_candidate_that_diverged_early_has_failed_though_it_trained_less():
    rows = [
        replace(each, loss=math.nan, tokens=each.tokens // 2) if each.cell["mode"] == "decoupled" else each
        for each in pairs(0.0, islands=4)
    ]
    found = only(CLAIM, rows)
    assert (found.verdict, found.reason) == (Verdict.FAILS, "the candidate diverged (seed 0, 1, 2)")


@pytest.mark.parametrize("kind", ["not-worse", "better", "equal"])
@pytest.mark.parametrize("share", [-0.05, 0.05])
def test_seeds_that_change_nothing_decide_nothing(kind, share):
    losses = {"diloco": 3.0, "decoupled": 3.0 * (1 + share)}
    rows = [record(loss, seed=seed, mode=mode, islands=4) for seed in SEEDS for mode, loss in losses.items()]
    found = only(CLAIM | {"kind": kind}, rows)
    assert (found.verdict, found.p_value) == (Verdict.INCONCLUSIVE, None)
    assert found.reason.startswith("every seed gives the same two losses")


def test_a_curve_that_touches_zero_ends_no_report():
    rows = pairs(0.01, islands=4)
    rows = [replace(each, curve=(*each.curve[:3], (each.tokens * 4 / 5, 1200.0, 0.0), each.curve[4])) for each in rows]
    assert only(CLAIM, rows).extra.keys() == set(SEEDS)


def test_claims_on_the_same_runs_that_ask_the_same_count_once():
    again = CLAIM | {"claim": "The same in other words"}
    stricter = CLAIM | {"claim": "The same with less to spare", "margin": 0.001}
    rows = pairs(0.002, islands=4)
    found = findings([comparison_of(each) for each in (CLAIM, again, stricter)], rows)
    assert [each.comparison.claim for each in distinct(found)] == [CLAIM["claim"], stricter["claim"]]
    nothing = findings([comparison_of(each) for each in (CLAIM, again)], pairs(0.0, spread=0.0, islands=4))
    assert len(distinct(nothing)) == 2, "identical runs tell nothing of each other"


def test_what_is_corrected_needs_more_seeds():
    better = [comparison_of(CLAIM | {"kind": "better", "margin": 0.0, "claim": name}) for name in ("one", "two")]
    (alone,) = findings(better[:1], pairs(-0.001, spread=0.002, islands=4))
    both = findings(better, pairs(-0.001, spread=0.002, islands=4))
    assert [each.level for each in (alone, *both)] == pytest.approx([0.025, 0.0125, 0.0125])
    needed = [int(verdicts.verdicts([each]).splitlines()[-1].split("|")[-3]) for each in (alone, both[0])]
    assert needed[0] < needed[1]


def test_better_claims_of_one_experiment_are_corrected_together():
    better = CLAIM | {"kind": "better", "margin": 0.0}
    alone = pairs(-0.01, islands=4, spread=0.004)  # t = -0.01 / (0.004 / sqrt 3) = -4.33: p = 0.0247
    assert only(better, alone).verdict is Verdict.HOLDS
    several = findings([comparison_of(better)], [*alone, *pairs(0.0, islands=2), *pairs(-0.05, islands=8)])
    assert [each.verdict for each in several] == [Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE, Verdict.HOLDS]
    assert "holds by itself (p = 0.025), not as one of 3 claims of its kind (Holm)" in several[1].reason
    assert "The 3 claims" in correction(several)
    assert correction(several[:1]) == ""
    # Claims of other kinds are no part of the family.
    mixed = findings([comparison_of(better), comparison_of(CLAIM)], alone)
    assert [each.verdict for each in mixed] == [Verdict.HOLDS, Verdict.HOLDS]


def test_runs_are_compared_in_equal_time_where_that_is_asked_for():
    rows = [
        replace(each, tokens=2 * each.tokens) if each.cell["mode"] == "decoupled" else each
        for each in pairs(-0.02, islands=4)
    ]
    reason = only(CLAIM, rows).reason
    assert reason.startswith("trained tokens differ by more than 1 % (seed 0: "), reason
    assert "more steps" in reason
    found = only(CLAIM | {"equal": "time"}, rows)
    assert (found.verdict, found.extra) == (Verdict.HOLDS, {})
    late = [replace(each, virtual_s=1600.0) if each.cell["mode"] == "decoupled" else each for each in rows]
    expected = f"virtual seconds differ by more than 1 % (seed 0: 1,600 and {rows[0].virtual_s:,.0f})"
    assert only(CLAIM | {"equal": "time"}, late).reason == expected


def test_extra_tokens_follow_from_the_curves():
    # The synthetic curve is loss * (tokens / end) ** -0.1, so one percent more loss is 1.01 ** 10 - 1 more tokens.
    found = only(CLAIM, pairs(0.01, islands=4, spread=0.0))
    assert all(each.extrapolated for each in found.extra.values())
    assert [each.extra for each in found.extra.values()] == pytest.approx([1.01**10 - 1] * 3, rel=1e-6)


def test_extra_tokens_that_a_seed_never_reached_are_more_than_those_of_the_others():
    found = only(CLAIM, pairs(0.01, islands=4, spread=0.0))
    one, *others = found.extra
    text = verdicts.extra_tokens([replace(found, extra=found.extra | {one: None})])
    assert "above +10.5 %" in text
    assert "within 4 times the run for 1 of 3 seeds" in text
    assert "+10.5 % ± 0.0 %" in verdicts.extra_tokens([found])
    assert "| - |" in verdicts.extra_tokens([replace(found, extra=dict.fromkeys([one, *others]))])
