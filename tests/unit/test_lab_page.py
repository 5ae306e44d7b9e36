"""From records to cells, tables and the page of results: on synthetic records whose figures are known."""

import math
import re
from dataclasses import replace

import pytest

from ops.lab.cells import grouped, label, not_run, varying
from ops.lab.chapter import findings_of
from ops.lab.claims import comparison_of
from ops.lab.comparisons import findings
from ops.lab.markdown import anchor, count, duration, gap, table
from ops.lab.results import Section, document
from ops.lab.statistics import Verdict, interval
from ops.lab.tuning import Search, Tuned, Tuning
from tests.synthetic import CLAIM, SEEDS, experiment, pairs, record, whole_experiment

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


def page(records=None, **changes):
    found = findings_of(experiment(**changes), whole_experiment() if records is None else records)
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
    assert "| 8 | decoupled | 3 |" in text
    assert "extrapolated for 3 of 3 seeds" in text
    assert "18 runs, 6 of them for tuning" in text
    assert "jax 0.10.2, processor x86_64" in text


def test_the_page_says_what_tuning_tried_and_whether_it_has_ended():
    tried = (0.001, 0.002, 0.004)
    ends = {
        "diloco": Tuned(best=0.002, interior=True, next_value=None),
        "decoupled": Tuned(best=0.004, interior=False, next_value=0.008),
        "streaming": None,
    }
    tunings = [
        Tuning(group=(("mode", mode),), name="rate", search=Search(tried=tried, winner=winner), tokens=200_000)
        for mode, winner in ends.items()
    ]
    text = document([findings_of(experiment(), whole_experiment(), tunings=tunings)], {})
    assert "| diloco | rate | 0.001, 0.002, 0.004 | 0.002 | yes | - | 200 k |" in text
    assert "| decoupled | rate | 0.001, 0.002, 0.004 | 0.004 | **no** | 0.008 | 200 k |" in text
    assert "| streaming | rate | 0.001, 0.002, 0.004 | not known yet | - | - | 200 k |" in text


def test_final_runs_at_other_rates_say_how_far_the_choice_matters():
    records = whole_experiment()
    others = [
        replace(run, loss=0.99 * run.loss, cell=run.cell | {"task.learning_rate": 0.004})
        for run in records
        if run.stage == "final" and run.cell["islands"] == 2 and run.cell["mode"] == "diloco" and run.seed < 2
    ]
    text = document([findings_of(experiment(), records, others)], {})
    row = next(line for line in text.splitlines() if "| 0.004 | 0.002 |" in line)
    assert row == "| diloco, islands 2 | task.learning_rate | 0.004 | 0.002 | -1.00 % ± 0.00 % | 2 |"
    assert "at rates that were the best until more was known" not in page()


def test_the_page_says_on_how_many_sequences_losses_are_judged():
    assert "Losses are of 512 held-out sequences." in page()
    silent = [replace(each, sequences=0, loss_se=0.0) for each in whole_experiment()]
    assert "held-out sequences." not in page(silent)
    assert "error over sequences |" in page()
    assert "error over sequences |" not in page(silent)


def test_the_commands_of_a_page_name_the_records_that_it_was_written_from():
    found = findings_of(experiment(), whole_experiment(), flags="--records '/tmp/a b'")
    text = document([found], {}, docs=None)
    assert "```\natoll lab run parity --records '/tmp/a b'\n```" in text
    assert "| `atoll lab run parity --records '/tmp/a b'` |" in text
    assert "docs/lab.md and docs/design.md have the rest" in text
    assert "[lab.md](../docs/lab.md)" in document([found], {}, docs="../docs")


def test_cells_that_were_not_run_are_listed():
    text = page()
    assert "**Not run** (2 of 6 cells):" in text
    assert "- diloco, islands 64\n- decoupled, islands 64" in text
    only_tuned = [each for each in whole_experiment() if each.stage == "tune"]
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
    records = whole_experiment()
    assert page(sorted(records, key=lambda each: (each.seed, each.loss))) == page(records)


def test_the_page_begins_with_what_was_published_and_counts_verdicts():
    other = experiment(name="another", comparisons=())
    text = document([findings_of(other, []), findings_of(experiment(), whole_experiment())], {})
    assert text.index("## parity") < text.index("## another")
    assert re.search(r"Of \d+ claims tested in 18 runs: \d+ \*\*", text)


def test_a_reason_stands_beside_the_published_figure_unless_the_claim_holds():
    claims = (comparison_of(CLAIM | {"why": "Ours is smaller."}),)
    assert "| 3 | **fails** | Ours is smaller. | [parity](#parity)" in page(pairs(0.05, islands=2), comparisons=claims)
    assert "Ours is smaller." not in page(pairs(0.002, islands=2), comparisons=claims)


def test_runs_that_came_out_identical_are_called_so():
    modes = ("diloco", "decoupled")
    text = page([record(3.0 + s, seed=s, mode=mode, islands=2) for s in SEEDS for mode in modes])
    assert "Of 1 claims tested in 6 runs: 1 **identical**." in text
    assert "| none: identical runs | 3 | **identical** |" in text
    assert "extra tokens" not in text.partition("## parity")[2]
    text = page([record(3.0, seed=s, mode=mode, islands=2) for s in SEEDS for mode in modes])
    assert "**identical**: every run of every seed has the loss 3: it does not tell what was trained" in text


def test_an_interval_over_some_identical_runs_is_doubted():
    rows = pairs(0.0, islands=4, spread=0.0)
    rows[-1] = replace(rows[-1], loss=rows[-1].loss * 1.001)
    (found,) = findings([comparison_of(CLAIM)], rows)
    assert (found.same, found.verdict) == (2, Verdict.HOLDS)
    assert "**holds** (2 of 3 pairs are identical runs: the interval says little)" in page(rows)


def test_identical_runs_are_no_member_of_the_family_that_is_corrected():
    (found,) = findings([comparison_of(CLAIM | {"kind": "better"})], pairs(0.0, islands=4, spread=0.0))
    assert (found.verdict, found.p_value) == (Verdict.IDENTICAL, None)


def test_intervals_wider_than_the_margin_are_counted():
    assert "In 1 the interval is still wider than the margin" in page(pairs(0.0, islands=4, spread=0.02))
    assert "still wider than the margin" not in page(pairs(0.0, islands=4))


def test_a_claim_whose_candidate_diverged_has_failed_wherever_it_stands():
    rows = pairs(0.0, islands=4)
    rows[1] = replace(rows[1], loss=math.inf)
    claims = (comparison_of(CLAIM | {"target": "Within 1 % of synchronous DiLoCo", "why": "Ours is smaller."}),)
    text = page(rows, comparisons=claims)
    assert "not run yet" not in text
    assert "Of 1 claims tested in 6 runs: 1 **fails**." in text
    assert "| - | 0 | **fails**: the candidate diverged (seed 0) | Ours is smaller. |" in text
    assert "| Within 1 % of synchronous DiLoCo | 1 **fails** |" in text


def test_targets_stand_together_with_the_ends_of_what_was_found():
    claims = (comparison_of(CLAIM | {"target": "Within 1 % of synchronous DiLoCo"}),)
    text = page([*pairs(0.002, islands=2), *pairs(0.05, islands=4)], comparisons=claims)
    row = next(line for line in text.splitlines() if line.startswith("| Within 1 % of"))
    assert "| 1 **fails**, 1 **holds** | +0.20 % ± 0.12 % ([parity](#parity)) | +5.00 % ± 0.12 %" in row
    assert "## Targets" not in page(pairs(0.002, islands=2))


@pytest.mark.parametrize(("share", "seeds"), [(1e-6, 34), (0.020001, 34), (0.009, "1000 or more")])
def test_an_interval_that_is_too_wide_says_how_many_seeds_would_decide(share, seeds):
    """0.02 apart from seed to seed, the margin at 0.01: half a deviation away takes 34, as tables of power 0.8 say."""
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
