"""From records to verdicts, tables, plots and the page: on synthetic records whose figures are known."""

import argparse
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from broker.errors import ConfigError
from ops.lab import archive, chapter, pictures, plots, report
from ops.lab.cells import grouped, label, not_run, varying
from ops.lab.chapter import findings_of
from ops.lab.comparisons import comparison_of, correction, findings
from ops.lab.markdown import anchor, count, duration, gap, table
from ops.lab.results import Section, document
from ops.lab.statistics import Interval, Verdict, interval
from tests.synthetic import FakeExperiment, record

TABLE = {
    "claim": "Decoupled is within 1 % of synchronous DiLoCo",
    "candidate": {"mode": "decoupled"},
    "baseline": {"mode": "diloco"},
    "by": ["islands"],
    "margin": 0.01,
    "kind": "not-worse",
    "ignore": ["task.learning_rate"],
    "published": 0.026,
    "source": "arXiv 0000.00000, table 1",
}

SEEDS = (0, 1, 2)


def pairs(gap_share, *, seeds=SEEDS, base=3.0, spread=0.0005, **cell):
    """Records of both modes, of which the candidate is worse by gap_share, give or take ``spread``, for each seed."""
    rows = []
    for seed in seeds:
        baseline = base * (1 + 0.01 * seed)
        offset = spread * (seed - (len(seeds) - 1) / 2)
        rows.append(record(baseline, seed=seed, mode="diloco", **cell))
        rows.append(record(baseline * (1 + gap_share + offset), seed=seed, mode="decoupled", **cell))
    return rows


def only(comparison_table, records):
    (found,) = findings([comparison_of(comparison_table)], records)
    return found


# --- comparisons --------------------------------------------------------------------------------------------------


def test_a_comparison_is_read_as_it_stands_in_the_file():
    comparison = comparison_of(TABLE)
    assert comparison.kind == "not-worse"
    assert comparison.by == ("islands",)
    assert comparison.published == 0.026
    assert comparison_of({k: v for k, v in TABLE.items() if k not in ("published", "source")}).published is None


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
    ],
)
def test_a_wrong_comparison_is_refused_with_field_and_cure(change, field, cure):
    with pytest.raises(ConfigError) as refused:
        comparison_of(TABLE | change)
    assert refused.value.field == field
    assert cure in refused.value.cure


@pytest.mark.parametrize("missing", ["claim", "candidate", "baseline", "kind"])
def test_what_a_comparison_needs_is_asked_for(missing):
    with pytest.raises(ConfigError, match=f"{missing} = None: is needed"):
        comparison_of({key: value for key, value in TABLE.items() if key != missing})


def test_there_is_a_verdict_for_each_value_of_by_in_order():
    records = [*pairs(0.002, islands=16), *pairs(0.03, islands=2), *pairs(0.0, seeds=(0,), islands=4)]
    found = findings([comparison_of(TABLE)], records)
    assert [(each.name, each.verdict) for each in found] == [
        ("islands 2", Verdict.FAILS),
        ("islands 4", Verdict.INCONCLUSIVE),
        ("islands 16", Verdict.HOLDS),
    ]
    assert found[2].found.mean == pytest.approx(0.002)
    assert found[2].found.half_width == pytest.approx(4.302653 * 0.0005 / math.sqrt(3), rel=1e-6)
    assert list(found[2].differences) == [0, 1, 2]
    assert found[2].cells == ({"mode": "decoupled", "islands": 16}, {"mode": "diloco", "islands": 16})
    assert found[1].reason == "one seed decides nothing"


def test_cells_that_differ_in_what_by_does_not_name_get_verdicts_of_their_own():
    records = [*pairs(0.0, islands=4, context=128), *pairs(0.03, islands=4, context=256)]
    found = findings([comparison_of(TABLE)], records)
    assert [(each.name, each.verdict) for each in found] == [
        ("islands 4, context 128", Verdict.HOLDS),
        ("islands 4, context 256", Verdict.FAILS),
    ]


def test_tuned_rates_may_differ_but_other_fields_must_match():
    records = [
        *(record(3.0, seed=seed, mode="diloco", islands=4, task__learning_rate=0.001) for seed in SEEDS),
        *(record(3.001, seed=seed, mode="decoupled", islands=4, task__learning_rate=0.004) for seed in SEEDS),
    ]
    assert only(TABLE, records).verdict is Verdict.HOLDS
    strict = only(TABLE | {"ignore": []}, records)
    assert (strict.verdict, strict.reason) == (Verdict.INCONCLUSIVE, "nothing of the baseline was run")


def test_a_baseline_that_lacks_a_field_serves_for_all_of_its_values():
    parallel = [record(3.0, seed=seed, mode="data-parallel") for seed in SEEDS]
    ours = [record(3.001, seed=seed, mode="decoupled", islands=m) for seed in SEEDS for m in (2, 8)]
    found = findings([comparison_of(TABLE | {"baseline": {"mode": "data-parallel"}})], [*parallel, *ours])
    assert [each.verdict for each in found] == [Verdict.HOLDS, Verdict.HOLDS]


def test_what_a_baseline_fixes_for_itself_need_not_match():
    parallel = [record(3.0, seed=seed, mode="data-parallel", islands=1) for seed in SEEDS]
    ours = [record(3.001, seed=seed, mode="decoupled", islands=m) for seed in SEEDS for m in (2, 8)]
    selection = {"baseline": {"mode": "data-parallel", "islands": 1}}
    found = findings([comparison_of(TABLE | selection)], [*parallel, *ours])
    assert [each.name for each in found] == ["islands 2", "islands 8"]
    assert all(each.verdict is Verdict.HOLDS for each in found)


def test_a_more_general_baseline_does_not_contain_the_candidate():
    rows = [record(3.0 - 0.1 * grace, seed=seed, grace=grace) for seed in SEEDS for grace in (0, 1)]
    rows += [replace(each, cell={**each.cell, "mode": "decoupled"}) for each in rows]
    wanted = {"candidate": {"mode": "decoupled", "grace": 1}, "baseline": {"mode": "decoupled"}, "by": []}
    found = only(TABLE | wanted, rows)
    assert len(found.differences) == 3
    assert found.found.mean == pytest.approx(-0.1 / 3)


def test_lists_in_a_cell_select_and_match():
    rows = [
        record(3.0, seed=seed, mode=mode, step_times_s=times)
        for seed in SEEDS
        for mode in ("diloco", "decoupled")
        for times in ([1.0], [1.0, 1.2])
    ]
    found = findings([comparison_of(TABLE | {"by": ["step_times_s"]})], rows)
    assert [each.name for each in found] == ["step times s 1", "step times s 1 1.2"]
    assert all(len(each.differences) == 3 for each in found)


def test_tuning_runs_are_never_compared():
    records = [replace(each, stage="tune") for each in pairs(0.0, islands=4)]
    assert only(TABLE, records).reason == "nothing of the candidate was run"


def test_only_seeds_that_both_have_are_paired():
    records = [*pairs(0.0, islands=4), record(9.0, seed=7, mode="decoupled", islands=4)]
    assert list(only(TABLE, records).differences) == [0, 1, 2]
    apart = [record(3.0, seed=0, mode="decoupled"), record(3.0, seed=1, mode="diloco")]
    assert only(TABLE, apart).reason == "no seed was run for both"


def test_two_runs_for_one_seed_are_not_chosen_from():
    doubled = [*pairs(0.0, islands=4), record(2.0, seed=0, mode="decoupled", islands=4, task__learning_rate=1.0)]
    found = only(TABLE, doubled)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "candidate with the same seed differ in task.learning_rate" in found.reason


def test_different_corpora_are_not_compared():
    rows = [replace(each, corpus=each.cell["mode"]) for each in pairs(0.0)]
    assert "corpora" in only(TABLE, rows).reason


def test_a_diverged_candidate_fails_and_a_diverged_baseline_is_left_out():
    rows = pairs(0.0, islands=4)
    candidate = [
        replace(each, loss=math.nan) if (each.seed, each.cell["mode"]) == (1, "decoupled") else each for each in rows
    ]
    assert only(TABLE, candidate).verdict is Verdict.FAILS
    assert only(TABLE, candidate).reason == "the candidate diverged (seed 1)"
    baseline = [
        replace(each, loss=math.nan) if (each.seed, each.cell["mode"]) == (1, "diloco") else each for each in rows
    ]
    found = only(TABLE, baseline)
    assert list(found.differences) == [0, 2]
    assert found.reason == "left out, since the baseline diverged: seed 1"
    both = [replace(each, loss=math.nan) if each.seed == 1 else each for each in rows]
    assert only(TABLE, both).verdict is Verdict.INCONCLUSIVE


def test_better_claims_of_one_experiment_are_corrected_together():
    better = TABLE | {"kind": "better", "margin": 0.0}
    alone = pairs(-0.01, islands=4, spread=0.004)  # t = -0.01 / (0.004 / sqrt 3) = -4.33: p = 0.0247
    assert only(better, alone).verdict is Verdict.HOLDS
    several = findings([comparison_of(better)], [*alone, *pairs(0.0, islands=2), *pairs(-0.05, islands=8)])
    assert [each.verdict for each in several] == [Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE, Verdict.HOLDS]
    assert "holds by itself (p = 0.025), not as one of 3 claims of its kind (Holm)" in several[1].reason
    assert "The 3 claims" in correction(several)
    assert correction(several[:1]) == ""
    # Claims of other kinds are no part of the family.
    mixed = findings([comparison_of(better), comparison_of(TABLE)], alone)
    assert [each.verdict for each in mixed] == [Verdict.HOLDS, Verdict.HOLDS]


def test_runs_are_compared_in_equal_time_where_that_is_asked_for():
    rows = [
        replace(each, tokens=2 * each.tokens) if each.cell["mode"] == "decoupled" else each
        for each in pairs(-0.02, islands=4)
    ]
    assert only(TABLE, rows).reason == "trained tokens differ by more than 1 %"
    found = only(TABLE | {"equal": "time"}, rows)
    assert (found.verdict, found.extra) == (Verdict.HOLDS, {})
    late = [replace(each, virtual_s=1600.0) if each.cell["mode"] == "decoupled" else each for each in rows]
    assert only(TABLE | {"equal": "time"}, late).reason == "virtual times differ by more than 1 %"


def test_extra_tokens_follow_from_the_curves():
    # The synthetic curve is loss * (tokens / end) ** -0.1, so one percent more loss is 1.01 ** 10 - 1 more tokens.
    found = only(TABLE, pairs(0.01, islands=4, spread=0.0))
    assert all(each.extrapolated for each in found.extra.values())
    assert [each.extra for each in found.extra.values()] == pytest.approx([1.01**10 - 1] * 3, rel=1e-6)


def test_extra_tokens_that_a_seed_never_reached_are_more_than_those_of_the_others():
    found = only(TABLE, pairs(0.01, islands=4, spread=0.0))
    one, *others = found.extra
    text = chapter._extra([replace(found, extra=found.extra | {one: None})])
    assert "above +10.5 %" in text
    assert "not within 4 times the run for 1 of 3 seeds" in text
    assert "+10.5 % ± 0.0 %" in chapter._extra([found])
    assert "| - |" in chapter._extra([replace(found, extra=dict.fromkeys([one, *others]))])


# --- cells --------------------------------------------------------------------------------------------------------


def test_cells_keep_the_declared_order_and_others_come_after():
    rows = [record(mode="extra"), record(mode="b", seed=1), record(mode="a"), record(mode="b", seed=0)]
    cells = grouped(rows, [{"mode": "a"}, {"mode": "b"}])
    assert [dict(cell)["mode"] for cell in cells] == ["a", "b", "extra"]
    assert [run.seed for run in list(cells.values())[1]] == [0, 1]


def test_a_declared_cell_is_run_if_any_record_has_its_fields():
    declared = [{"mode": "a", "islands": 2}, {"mode": "a", "islands": 4}]
    rows = [record(mode="a", islands=2, task__learning_rate=0.1)]
    assert not_run(declared, rows) == (declared[1],)


def test_labels_are_short_and_name_what_differs():
    cells = [{"mode": "a", "task.learning_rate": 0.002, "n": 1}, {"mode": "b", "task.learning_rate": 0.002, "n": 1}]
    assert varying(cells) == ("mode",)
    assert label(cells[0]) == "a, learning rate 0.002, n 1"
    assert label(cells[0], ["mode"]) == "a"
    assert label({}) == "all"
    assert label({"keep": True}) == "keep yes"


# --- Markdown -----------------------------------------------------------------------------------------------------


def test_a_table_drops_empty_columns_and_escapes_bars():
    text = table(("a", ">b", "c"), [("x|y", "", "1"), ("z", "", "")])
    assert text == "| a | c |\n| --- | --- |\n| x\\|y | 1 |\n| z | - |"


def test_figures_are_shown_with_what_they_are_worth():
    assert gap(interval([0.01, 0.02, 0.03])) == "+2.00 % ± 2.48 %"
    assert gap(interval([-0.01])) == "-1.00 % (one seed)"
    assert gap(None) == "-"
    assert [count(n) for n in (0, 999, 1234, 999_600, 12_345_678, 3e12)] == [
        "0",
        "999",
        "1.23 k",
        "1 M",
        "12.3 M",
        "3 T",
    ]
    assert [duration(s) for s in (0.5, 59, 90, 3600, 86_399)] == ["0.5 s", "59 s", "2 min", "1 h 00 min", "24 h 00 min"]
    assert anchor("Published claims: a/b") == "#published-claims-ab"


# --- the page -----------------------------------------------------------------------------------------------------


def experiment(**changes):
    declared = tuple({"mode": mode, "islands": m} for m in (2, 8, 64) for mode in ("diloco", "decoupled"))
    return FakeExperiment(**{"comparisons": (comparison_of(TABLE),), "declared": declared, **changes})


def records_of_a_whole_experiment():
    rows = [each for m in (2, 8) for each in pairs(0.002 * m, islands=m, task__learning_rate=0.002)]
    rows += [replace(each, parameters=each.parameters * 10) if each.cell["islands"] == 8 else each for each in rows]
    unique = {
        (each.key, each.parameters): each
        for each in rows
        if not (each.cell["islands"] == 8 and each.parameters == 10_000_000)
    }
    tuning = [
        record(loss, stage="tune", tokens=200_000, mode=mode, islands=2, task__learning_rate=rate)
        for mode in ("diloco", "decoupled")
        for rate, loss in ((0.001, 3.3), (0.002, 3.2), (0.004, 3.4 if mode == "diloco" else 3.1))
    ]
    return [*unique.values(), *tuning]


def page(records=None, **changes):
    found = findings_of(experiment(**changes), records_of_a_whole_experiment() if records is None else records)
    return document([found], {})


def test_the_page_sets_our_figures_beside_the_published_ones():
    text = page()
    row = next(line for line in text.splitlines() if "arXiv" in line and "islands 2" in line)
    assert "+2.60 %" in row
    assert "+0.40 % ± 0.12 %" in row
    assert "| 3 | **holds** |" in row
    assert "[parity](#parity)" in row


def test_the_page_says_how_to_run_it_again_what_it_cost_and_where_we_differ():
    text = page()
    row = next(line for line in text.splitlines() if line.startswith("| [parity]"))
    assert "`atoll lab run parity`" in row
    assert "| 18 | 13.2 M | 18 min | 75.0 % |" in row
    assert "**Notes.** Smaller models, by a factor of 500." in text


def test_the_page_lists_settings_cells_tuning_and_extra_tokens():
    text = page()
    assert "| `task.context` | 128 |" in text
    assert "| `step_times_s` | [1.0, 1.2] |" in text
    assert "| decoupled | 8 | 3 |" in text or "| 8 | decoupled | 3 |" in text
    assert "0.001, 0.002, 0.004 | 0.002 | yes |" in text
    assert "0.001, 0.002, 0.004 | 0.004 | **no** | 0.008 |" in text
    assert "extrapolated for 3 of 3 seeds" in text
    assert "18 runs, 6 of them for tuning" in text
    assert "jax 0.10.2, processor x86_64" in text


def test_final_runs_at_other_rates_say_how_far_the_choice_matters():
    records = records_of_a_whole_experiment()
    others = [
        replace(run, loss=0.99 * run.loss, cell=run.cell | {"task.learning_rate": 0.004})
        for run in records
        if run.stage == "final" and run.cell["islands"] == 2 and run.cell["mode"] == "diloco" and run.seed < 2
    ]
    text = document([findings_of(experiment(), records, others)], {})
    row = next(line for line in text.splitlines() if "| 0.004 | 0.002 |" in line)
    assert row == "| diloco, islands 2 | task.learning_rate | 0.004 | 0.002 | -1.00 % ± 0.00 % | 2 |"
    assert "at rates that were the best until more was known" not in page()


def test_cells_that_were_not_run_are_listed():
    text = page()
    assert "**Not run** (2 of 6 cells):" in text
    assert "- diloco, islands 64\n- decoupled, islands 64" in text
    only_tuned = [each for each in records_of_a_whole_experiment() if each.stage == "tune"]
    assert "**Run for tuning only** (2 of 6 cells):" in page(only_tuned)


def test_an_experiment_without_records_says_so():
    text = page([])
    assert "Nothing of it was run yet: all of its 6 cells are missing." in text
    assert "nan" not in text
    assert "inf" not in re.sub(r"\binfinite\b", "", text)


def test_a_section_from_elsewhere_stands_before_the_experiments():
    found = findings_of(experiment(), [])
    text = document([found], {}, [Section(title="Goodput", body=lambda folder: "| a |\n")])
    assert text.index("## Goodput\n\n| a |") < text.index("## parity")


def test_the_order_of_records_does_not_matter_to_the_page():
    records = records_of_a_whole_experiment()
    assert page(sorted(records, key=lambda each: (each.seed, each.loss))) == page(records)


# --- plots --------------------------------------------------------------------------------------------------------


def drawn(records=None, **changes):
    found = findings_of(experiment(**changes), records_of_a_whole_experiment() if records is None else records)
    return {each.file: each.svg for each in pictures.of(found)}


def test_plots_are_svg_with_titles_and_units_and_without_a_date():
    plots_drawn = drawn()
    kinds = {name.removeprefix("parity-").removesuffix(".svg") for name in plots_drawn}
    assert kinds == {"loss", "loss-tokens", "loss-time", "participation", "staleness", "rounds"}
    for svg in plots_drawn.values():
        ElementTree.fromstring(svg)
        assert b"dc:date" not in svg
        assert b"Matplotlib v" not in svg
        assert len(svg) < 100_000
    assert b"tokens trained (millions)" in plots_drawn["parity-loss-tokens.svg"]
    assert b"virtual time (min)" in plots_drawn["parity-loss-time.svg"]
    assert b"loss (nats per token)" in plots_drawn["parity-loss-tokens.svg"]


def test_the_same_records_give_the_same_bytes():
    assert drawn() == drawn()


def outer_run(rate, momentum, *, seed=0, **others):
    loss = math.nan if (rate, momentum) == (1.0, 0.9) else 3 + rate * momentum + seed
    settings = {"outer_learning_rate": rate, "outer_momentum": momentum, "seed": seed, "merge": "rda", **others}
    return replace(record(loss, seed=seed, rule=f"{rate} {momentum} {others}"), settings=settings)


def test_an_outer_grid_holds_the_mean_of_runs_that_differ_in_rate_and_momentum_alone():
    points = [(0.7, 0.5), (0.5, 0.5), (0.7, 0.0), (1.0, 0.9)]
    runs = [outer_run(*point, seed=seed) for point in points for seed in (0, 1)]
    runs += [outer_run(0.7, 0.5, merge="mean"), outer_run(0.7, 0.9, merge="mean")]
    grid = pictures.outer_grid(runs)
    assert grid == pytest.approx({(0.7, 0.5): 3.85, (0.5, 0.5): 3.75, (0.7, 0.0): 3.5, (1.0, 0.9): math.inf})
    assert pictures.outer_grid(runs[:2]) == {}  # one rate
    assert pictures.outer_grid([record()]) == {}
    svg = drawn(runs, comparisons=())["parity-outer-grid.svg"]
    assert b"diverged" in svg
    assert b"3.850" in svg
    assert b"<image" not in svg


def test_many_cells_are_split_into_panels():
    rows = [record(mode=mode, islands=m) for mode in ("a", "b", "c") for m in (2, 4, 8, 16)]
    shown = pictures.panels(grouped(rows))
    assert {title: list(lines) for title, lines in shown.items()}["b"] == [
        "islands 2",
        "islands 4",
        "islands 8",
        "islands 16",
    ]
    one_field = pictures.panels(grouped([record(n=n) for n in range(12)]))
    assert {title: len(lines) for title, lines in one_field.items()} == {"cells 1 to 8": 8, "cells 9 to 12": 4}
    crowded = pictures.panels(grouped([record(n=n) for n in range(100)]))
    assert len(crowded) == pictures.PANELS
    assert list(crowded)[-1] == "cells 65 to 72 of 100"
    assert pictures.panels({}) == {}
    plots.loss_against_tokens(shown)


def test_a_gap_of_one_seed_is_drawn_without_an_interval():
    one, two = (1e2, Interval(mean=0.01, half_width=math.inf, count=1)), (1e2, interval([0.01, 0.02]))
    drawn_of = {end: plots.gap_against_tokens({"to": {"a": plots.GapLine(way=(), end=end)}}) for end in (one, two)}
    assert len(drawn_of[one]) < len(drawn_of[two])


def test_a_grid_of_outer_settings_has_the_seeds_that_all_its_points_have():
    runs = [outer_run(*point) for point in ((0.7, 0.5), (0.5, 0.5), (0.7, 0.0))]
    assert pictures.outer_grid([*runs, outer_run(0.7, 0.0, seed=1)]) == pictures.outer_grid(runs)
    assert pictures.outer_grid([*runs[:2], outer_run(0.7, 0.0, seed=1)]) == {}
    assert pictures.outer_grid([outer_run(0.7, 0.5), outer_run(0.5, 0.0)]) == {}  # a diagonal


def test_participation_of_everybody_is_not_drawn():
    assert "parity-participation.svg" in drawn([replace(record(), participation=0.9)], comparisons=())
    assert "parity-participation.svg" not in drawn([replace(record(), participation=0.999)], comparisons=())


def test_the_page_begins_with_what_was_published_and_counts_verdicts():
    other = experiment(name="another", comparisons=())
    text = document([findings_of(other, []), findings_of(experiment(), records_of_a_whole_experiment())], {})
    assert text.index("## parity") < text.index("## another")
    assert re.search(r"Of \d+ claims tested in 18 runs: \d+ \*\*", text)


def test_a_reason_stands_beside_the_published_figure_unless_the_claim_holds():
    claims = (comparison_of(TABLE | {"why": "Ours is smaller."}),)
    assert "| 3 | **fails** | Ours is smaller. | [parity](#parity)" in page(pairs(0.05, islands=2), comparisons=claims)
    assert "Ours is smaller." not in page(pairs(0.002, islands=2), comparisons=claims)


def test_runs_that_came_out_identical_are_called_so():
    text = page([record(3.0, seed=s, mode=mode, islands=2) for s in SEEDS for mode in ("diloco", "decoupled")])
    assert "Of 1 claims tested in 6 runs: 1 **identical**." in text
    assert "| none: identical runs | 3 | **identical** |" in text


def test_an_interval_over_some_identical_runs_is_doubted():
    rows = pairs(0.0, islands=4, spread=0.0)
    rows[-1] = replace(rows[-1], loss=rows[-1].loss * 1.001)
    found = only(TABLE, rows)
    assert (found.same, found.verdict) == (2, Verdict.HOLDS)
    assert "**holds** (2 of 3 pairs are identical runs: the interval says little)" in page(rows)


def test_identical_runs_are_no_member_of_the_family_that_is_corrected():
    (found,) = findings([comparison_of(TABLE | {"kind": "better"})], pairs(0.0, islands=4, spread=0.0))
    assert (found.verdict, found.p_value) == (Verdict.IDENTICAL, None)


def test_intervals_wider_than_the_margin_are_counted():
    assert "In 1 the interval is still wider than the margin" in page(pairs(0.0, islands=4, spread=0.02))
    assert "still wider than the margin" not in page(pairs(0.0, islands=4))


def test_targets_stand_together_with_the_ends_of_what_was_found():
    claims = (comparison_of(TABLE | {"target": "Within 1 % of synchronous DiLoCo"}),)
    text = page([*pairs(0.002, islands=2), *pairs(0.05, islands=4)], comparisons=claims)
    row = next(line for line in text.splitlines() if line.startswith("| Within 1 % of"))
    assert "| 1 **fails**, 1 **holds** | +0.20 % ± 0.12 % ([parity](#parity)) | +5.00 % ± 0.12 %" in row
    assert "## Targets" not in page(pairs(0.002, islands=2))


@pytest.mark.parametrize(("share", "seeds"), [(1e-6, 18), (0.020001, 18), (0.009, "1000 or more")])
def test_an_interval_that_is_too_wide_says_how_many_seeds_would_decide(share, seeds):
    """0.02 apart from seed to seed, the margin at 0.01: half a deviation away takes 18, as tables of power say too."""
    text = page(pairs(share, spread=0.02, islands=2))
    row = next(line for line in text.splitlines() if "not-worse, 1 %" in line)
    assert f"| 3 | {seeds} | **inconclusive** |" in row


def test_a_run_that_was_taken_over_from_another_experiment_counts_once():
    mine, copy = record(3.0, mode="diloco", islands=2), record(3.0, experiment="another", mode="diloco", islands=2)
    first, second = (findings_of(experiment(name=each.experiment), [each]) for each in (mine, copy))
    text = document([first, second], {})
    assert "1 runs stand in two experiments" in text
    assert "| all | - | 1 | 1 M | 1 min |" in text
    assert "each for itself" not in text


def test_a_run_that_two_experiments_made_is_compared_to_the_last_bit():
    mine, theirs = record(3.0, mode="diloco", islands=2), record(3.0, experiment="another", mode="diloco", islands=2)
    theirs = replace(theirs, wall_s=61.0)
    first, second = (findings_of(experiment(name=each.experiment), [each]) for each in (mine, theirs))
    said = "that several experiments made, each for itself: 1, 0 of them by different revisions of the sources."
    assert f"{said} 1 have the same loss to the last bit." in document([first, second], {})
    second = findings_of(experiment(name="another"), [replace(theirs, loss=3.003, code="0.2.0")])
    assert "0 have the same loss to the last bit; the others differ by 0.1 % at most." in document([first, second], {})


def test_rounds_that_all_had_one_contributor_are_drawn():
    lone = replace(record(), gantt=((0.0, 1.0, 1.5, 3, 1), (1.0, 2.0, 2.5, 7, 1)))
    assert b"fragment" in plots.rounds(lone)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Directories with records and an experiment's file, which a fake reads."""
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "parity.toml").write_text("")
    for each in records_of_a_whole_experiment():
        archive.append(tmp_path / "records", each)
    monkeypatch.setattr(report, "load", lambda path: experiment(name=path.stem))
    monkeypatch.setattr(report, "sections", tuple)  # of simulate and plan, which take seconds
    monkeypatch.setattr(report, "current", lambda _, records: [each for each in records if each.code != "old"])
    monkeypatch.setattr(report, "passed_over", lambda _, records: [])
    return tmp_path


def arguments(place, *more):
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    where = ["--records", place / "records", "--out", place / "docs" / "results.md", "--experiments", place / "lab"]
    return parser.parse_args([*map(str, where), *more])


def test_the_command_writes_the_page_and_its_plots(place, capsys):
    assert report.run(arguments(place)) == 0
    text = (place / "docs" / "results.md").read_text()
    links = re.findall(r"\]\((results/[^)]+\.svg)\)", text)
    assert len(set(links)) == 6
    assert all((place / "docs" / link).is_file() for link in links)
    assert "1 experiments, 18 runs, 6 plots; 1 fails, 1 holds" in capsys.readouterr().out


def test_writing_it_again_changes_no_byte(place):
    def content():
        return {path.name: path.read_bytes() for path in (place / "docs").rglob("*") if path.is_file()}

    report.run(arguments(place))
    before = content()
    report.run(arguments(place))
    assert content() == before
    assert len(before) == 7


def test_json_is_one_object(place, capsys):
    report.run(arguments(place, "--json"))
    printed = json.loads(capsys.readouterr().out)
    assert printed["records"] == 18
    assert printed["verdicts"] == {"fails": 1, "holds": 1}
    assert len(printed["plots"]) == 6


def test_records_that_are_left_out_are_named(place, capsys):
    archive.append(place / "records", record(experiment="mystery"))
    archive.append(place / "records", replace(record(9.0, seed=9, mode="diloco", islands=2), code="old"))
    assert report.run(arguments(place, "--json")) == 0
    printed = capsys.readouterr()
    assert "1 of 1 records of mystery are left out" in printed.err
    assert "1 of 19 records of parity are left out" in printed.err
    assert json.loads(printed.out)["records"] == 18


def test_other_records_have_a_page_of_their_own(place, monkeypatch):
    """Only ours belong to docs/results.md."""
    monkeypatch.chdir(place)
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    assert report.run(parser.parse_args(["--records", str(place / "records"), "--experiments", "lab"])) == 0
    assert (place / "records-results.md").is_file()
    assert not (place / "docs").exists()
    assert not list((place / "records").glob("*.svg"))


def test_plots_that_are_no_longer_on_the_page_are_named(place, capsys):
    report.run(arguments(place))
    assert "no longer" not in capsys.readouterr().err
    (place / "docs" / "results" / "gone.svg").write_text("")
    report.run(arguments(place))
    assert "but no longer on the page: gone.svg" in capsys.readouterr().err


def test_a_directory_without_experiments_is_refused(place):
    with pytest.raises(ConfigError, match="must be a directory with experiments"):
        report.run(arguments(place, "--experiments", str(place / "records")))
