"""Gaps between modes over tokens and sizes, from records whose gaps are known."""

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from ops.lab import gap_section, gaps, published, report
from ops.lab.chapter import findings_of
from ops.lab.claims import comparison_of
from ops.lab.settings import Mode
from tests.synthetic import FakeExperiment, record

CLAIM = {
    "claim": "Decoupled is close",
    "candidate": {"mode": "decoupled"},
    "baseline": {"mode": "data-parallel"},
    "by": ["islands"],
    "kind": "not-worse",
    "margin": 0.01,
}

USUAL = "- 2 islands, 3 comparisons with H = 24 and adamw"


def run(
    mode,
    share=0.0,
    *,
    seed=0,
    islands=2,
    parameters=1_000_000,
    tokens=6_000_000,
    name="parity",
    late=None,
    interval=24,
    optimizer=None,
    b2=None,
    momentum=None,
):
    """A run whose loss is 2 * (1 + share) from end to end, or ``late`` instead of it in the second half."""
    losses = [2 * (1 + (share if k <= 3 or late is None else late)) for k in range(1, 7)]
    made = record(losses[-1], seed=seed, tokens=tokens, experiment=name, mode=mode, islands=islands)
    curve = tuple((tokens * k / 6, 100.0 * k, loss) for k, loss in enumerate(losses, start=1))
    settings = {**made.settings, "mode": mode, "islands": islands, "sync_interval": interval}
    settings |= {"task.optimizer": optimizer} if optimizer else {}
    settings |= {"task.b2": b2} if b2 else {}
    settings |= {"task.momentum": momentum} if momentum else {}
    key = f"{made.key}-{name}-{parameters}"
    return replace(made, key=key, parameters=parameters, curve=curve, settings=settings)


def found_in(records, name="parity", **changes):
    return findings_of(FakeExperiment(name=name, comparisons=(comparison_of(CLAIM | changes),)), records)


def pair(share, **fields):
    return [run("decoupled", share, **fields), run("data-parallel", seed=fields.get("seed", 0), **_shape(fields))]


def _shape(fields):
    return {name: value for name, value in fields.items() if name not in ("seed", "late")}


def test_modes_that_had_equal_time_and_unequal_tokens_have_no_gap_here():
    records = [*pair(0.08), *pair(0.06, seed=1)]
    assert gaps.gaps([found_in(records, equal="time")]) == ()
    assert len(gaps.gaps([found_in(records)])) == 1


def test_a_gap_is_shown_on_the_way_and_at_the_end():
    records = [*pair(0.08, late=0.02), *pair(0.06, late=0.04, seed=1)]
    (gap,) = gaps.gaps([found_in(records)])
    assert (gap.baseline, gap.islands, gap.parameters, gap.tokens) == (Mode.DATA_PARALLEL, 2, 1_000_000, 6_000_000)
    assert [tokens for tokens, _ in gap.course] == pytest.approx([1e6 * k for k in range(1, 7)])
    assert [share for _, share in gap.course] == pytest.approx([0.07, 0.07, 0.07, 0.03, 0.03, 0.03])
    assert (gap.interval.mean, gap.interval.count) == (pytest.approx(0.03), 2)


def test_losses_between_two_points_of_a_curve_lie_on_a_line_over_the_logarithm_of_tokens():
    uneven = replace(run("decoupled"), curve=((1e6, 1.0, 4.0), (4e6, 2.0, 3.0), (6e6, 3.0, 2.0)))
    (gap,) = gaps.gaps([found_in([uneven, run("data-parallel")])])
    assert gap.course[1] == pytest.approx((2e6, 3.5 / 2 - 1))  # half way from 1 M to 4 M


def test_a_point_that_a_seed_lacks_is_left_out():
    late = replace(run("decoupled"), curve=((3e6, 1.0, 4.0), (6e6, 3.0, 2.0)))
    (gap,) = gaps.gaps([found_in([late, run("data-parallel")])])
    assert [tokens for tokens, _ in gap.course] == [3e6, 4e6, 5e6, 6e6]


def test_other_comparisons_are_not_gaps_of_decoupled_training():
    claim = {"candidate": {"mode": "diloco"}, "baseline": {"mode": "decoupled"}}
    assert gaps.gaps([found_in([run("diloco"), run("decoupled")], **claim)]) == ()
    both = {"candidate": {"islands": 2}, "baseline": {"islands": 4}, "by": []}
    assert gaps.gaps([found_in([run("decoupled"), run("decoupled", islands=4)], **both)]) == ()
    assert gap_section.sections([found_in([])]) == ()


def test_pairs_that_stand_in_two_experiments_count_where_most_of_them_are():
    def copied(records, name):
        return found_in([replace(each, experiment=name) for each in records], name=name)

    pairs = [*pair(0.02), *pair(0.04, seed=1)]
    few, many = copied(pairs[:2], "few"), copied(pairs, "many")
    assert [each.experiment for each in gaps.gaps([few, many])] == ["many"]
    own = copied([run("decoupled", 0.09, name="own"), pairs[1]], "own")  # one of its two sides is shared
    assert {each.experiment for each in gaps.gaps([own, many])} == {"own", "many"}


def test_a_baseline_that_syncs_at_another_interval_is_another_question():
    def at(mode, interval):
        return run(mode, interval=interval)

    for mode, same in (("diloco", False), ("data-parallel", True)):
        claim = {"baseline": {"mode": mode}}
        found = gaps.gaps([found_in([at("decoupled", 24), at(mode, 1)], **claim)])
        assert len(found) == same
        assert len(gaps.gaps([found_in([at("decoupled", 24), at(mode, 24)], **claim)])) == 1


@pytest.mark.parametrize(
    ("other", "cells"),
    [
        ({"interval": 6}, ["6", "adamw"]),
        ({"optimizer": "muon"}, ["24", "muon"]),
        ({"optimizer": "muon", "b2": 0.99}, ["24", "muon, b2 0.99"]),
        ({"optimizer": "muon", "b2": 0.99, "momentum": 0.9}, ["24", "muon, b2 0.99, momentum 0.9"]),
    ],
)
def test_gaps_of_another_interval_or_optimizer_have_their_row_and_no_part_in_the_slopes(other, cells):
    usual = [
        found_in([each for k in (0, 1) for each in pair(0.01, seed=k, parameters=size, name=name)], name=name)
        for name, size in (("small", 10**6), ("large", 10**7), ("largest", 10**8))
    ]
    unusual = found_in([each for k in (0, 1) for each in pair(0.5, seed=k, name="other", **other)], name="other")
    (section,) = gap_section.sections([*usual, unusual])
    text = section.body("results")
    (row,) = [line.split("|") for line in text.splitlines() if line.startswith("| [other]")]
    assert [cell.strip() for cell in row[3:5]] == cells
    assert f"{USUAL}: +0.00 ± 0.00 percentage points per tenfold of parameters" in text


def test_a_gap_names_its_text():
    runs = [replace(each, bytes_per_token=1.0, corpus="6c96d1") for each in pair(0.01)]
    (gap,) = gaps.gaps([found_in(runs)])
    assert gap.text == "bytes (6c96)"


def test_nothing_is_made_up_about_a_task_of_the_users_own():
    def own(each):
        return replace(each, bytes_per_token=0.0, corpus="", settings=each.settings | {"task": "mine:task"})

    found = found_in(map(own, pair(0.01)))
    (gap,) = gaps.gaps([found])
    assert (gap.optimizer, gap.text) == ("the task's own", "the task's own")
    (section,) = gap_section.sections([found])
    text = section.body("results")
    assert "line through published gaps" not in text
    assert "The last column follows published gaps" not in text
    assert "adamw" not in text


@pytest.mark.parametrize(
    ("ours", "other", "told"),
    [(0.99, None, "adamw, b2 0.99 against the default b2"), (None, 0.99, "adamw, the default b2 against b2 0.99")],
)
def test_two_optimizers_in_one_gap_are_told_apart(ours, other, told):
    (gap,) = gaps.gaps([found_in([run("decoupled", b2=ours), run("data-parallel", b2=other)])])
    assert gap.optimizer == told


def test_the_page_lists_gaps_by_mode_islands_and_size_with_their_trends():
    small = found_in([*pair(0.01), *pair(0.01, seed=1)])
    large = found_in(
        [each for k in (0, 1) for each in pair(0.05, seed=k, parameters=10_000_000, name="large")], name="large"
    )
    largest = found_in(
        [each for k in (0, 1) for each in pair(0.09, seed=k, parameters=100_000_000, name="largest")], name="largest"
    )
    (section,) = gap_section.sections([largest, small, large])
    text = section.body("results")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| [")]
    assert [row[1].split("]")[0].strip(" [") for row in rows] == ["parity", "large", "largest"]
    assert [row[3].strip() for row in rows] == ["24"] * 3
    assert [row[5].strip() for row in rows] == ["pieces of 4.0 bytes (c0ff)"] * 3
    assert [row[7].strip() for row in rows] == ["6", "0.6", "0.06"]
    assert [row[8].strip() for row in rows] == ["2,000"] * 3
    assert f"{USUAL}: +4.00 ± 0.00 percentage points per tenfold of parameters" in text
    assert f"{USUAL}: -4.00 ± 0.00 percentage points per tenfold of tokens per parameter" in text
    assert "correlate at -1.00" in text
    assert "with the same model" not in text
    assert "(results/gaps.svg)" in text
    ElementTree.fromstring(section.plots["gaps.svg"]())


def test_experiments_with_the_same_model_say_what_tokens_do_alone():
    def at(name, parameters, tokens, share):
        shape = {"parameters": parameters, "tokens": tokens, "name": name}
        return found_in([each for k in (0, 1) for each in pair(share, seed=k, **shape)], name)

    # 4 points less per tenfold at either size, and another level at each.
    found = [
        at("a", 1_000_000, 6_000_000, 0.08),
        at("b", 1_000_000, 60_000_000, 0.04),
        at("c", 9_000_000, 6_000_000, 0.06),
        at("d", 9_000_000, 60_000_000, 0.02),
        at("e", 2_000_000, 6_000_000, 0.5),  # alone with its size: it says nothing
    ]
    (section,) = gap_section.sections(found)
    slope = "-4.00 ± 0.00 percentage points per tenfold of tokens per parameter between experiments with the same model"
    assert f"- 2 islands, 4 experiments: {slope}" in section.body("results")


def test_two_sizes_at_once_are_told_apart():
    """Four points less per tenfold of parameters, two more per tenfold of tokens for each."""
    sizes = [(1e6, 6e6), (1e6, 60e6), (1e7, 60e6), (1e7, 6e8), (1e8, 1.2e9)]
    shares = [0.2 - 0.04 * math.log10(n) + 0.02 * math.log10(tokens / n) for n, tokens in sizes]
    found = []
    for k, ((parameters, tokens), share) in enumerate(zip(sizes, shares, strict=True)):
        shape = {"parameters": int(parameters), "tokens": int(tokens), "name": f"e{k}"}
        found.append(found_in([each for seed in (0, 1) for each in pair(share, seed=seed, **shape)], f"e{k}"))
    (section,) = gap_section.sections(found)
    text = section.body("results")
    told = [line.partition("at once: ")[2] for line in text.splitlines() if "both at once" in line]
    assert told == [
        "-4.00 ± 0.00 percentage points per tenfold of parameters with as many tokens for each",
        "+2.00 ± 0.00 percentage points per tenfold of tokens per parameter with as many parameters",
    ]


def test_published_gaps_lie_about_a_line_over_the_logarithm_of_size():
    gaps_of = {size: published.DILOCO[2][size] / loss - 1 for size, loss in published.DATA_PARALLEL.items()}
    there = {size: published.gap_at(size, 2) for size in gaps_of}
    assert all(abs(there[size].mean - each) < 0.0025 for size, each in gaps_of.items())
    assert published.gap_at(35e7, 2).mean - published.gap_at(35e6, 2).mean == pytest.approx(published.slope(2).mean)
    assert published.slope(2).high < 0
    assert published.gap_at(1e6, 2).half_width > published.gap_at(35e6, 2).half_width
    assert published.gap_at(1e6, 3) is None


def test_the_margins_that_claims_take_from_the_smallest_published_model_are_within_its_rounding():
    assert published.rounded(2) == (pytest.approx(3.535 / 3.515 - 1), pytest.approx(3.545 / 3.505 - 1))
    for islands, margin in ((2, 0.009), (4, 0.026)):
        low, high = published.rounded(islands)
        assert low < margin < high


def test_gaps_to_data_parallel_training_stand_beside_the_published_line():
    two, three = found_in(pair(0.01)), found_in(pair(0.01, islands=3))
    (section,) = gap_section.sections([two, three])
    rows = [line.split("|") for line in section.body("results").splitlines() if line.startswith("| [")]
    assert [row[-2].strip() for row in rows] == ["+1.7 % ± 0.6 %", "-"]


def test_the_report_has_it_with_its_plot():
    experiment = FakeExperiment(comparisons=(comparison_of(CLAIM),))
    made = report.build([experiment], pair(0.01), folder="results")
    assert "## Gaps over tokens and size" in made.text
    assert b"tokens per parameter" in made.plots["results/gaps.svg"]
