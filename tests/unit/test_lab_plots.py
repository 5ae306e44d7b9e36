"""The plots of the page of results: what they show of synthetic records."""

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from ops.lab import pictures, plots
from ops.lab.cells import grouped
from ops.lab.chapter import findings_of
from ops.lab.statistics import Interval, interval
from tests.synthetic import experiment, record, whole_experiment


def drawn(records=None, **changes):
    found = findings_of(experiment(**changes), whole_experiment() if records is None else records)
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


def test_losses_of_a_task_of_ones_own_have_no_unit_of_ours():
    theirs = [
        replace(each, settings=each.settings | {"task": "mine:task"})
        for each in (*whole_experiment(), *(outer_run(*point) for point in ((0.7, 0.5), (0.5, 0.5), (0.7, 0.0))))
    ]
    plots_drawn = drawn(theirs, comparisons=())
    assert all(b"nats" not in svg for svg in plots_drawn.values())
    with_losses = ("loss", "loss-tokens", "loss-time", "outer-grid")
    assert all(b"loss" in plots_drawn[f"parity-{kind}.svg"] for kind in with_losses)


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
    ElementTree.fromstring(plots.loss_against_tokens(shown))


def test_cells_whose_words_are_the_same_are_all_drawn():
    cells = grouped([record(rule="default"), record(pace="default"), record(rule="mean")])
    assert list(pictures.named(cells, ["rule", "pace"])) == ["rule default", "pace default", "rule mean"]
    told_apart = grouped([record(rule="default"), record(pace="slow")])
    assert list(pictures.named(told_apart, ["rule", "pace"])) == ["default", "slow"]


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


def test_rounds_that_all_had_one_contributor_are_drawn():
    lone = replace(record(), gantt=((0.0, 1.0, 1.5, 3, 1), (1.0, 2.0, 2.5, 7, 1)))
    assert b"fragment" in plots.rounds(lone)
