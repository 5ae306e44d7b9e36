"""``atoll simulate``: the goodput that planners and curves expect, and the command itself."""

import argparse
import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.wire.errors import ConfigError, Unavailable
from ops.goodput import command as goodput
from ops.goodput import published, renewal, simulation
from ops.goodput.accounts import batch_means
from ops.goodput.fleet import DAY_S, FailureModel, Fleet, Mode
from ops.goodput.simulation import expected_goodput, pauses, simulate
from ops.goodput.timeline import Cause

NEVER = FailureModel(mtbi_years=1e9)


# --- for other parts of the program -------------------------------------------------------------------------------


def test_pauses_are_sorted_disjoint_and_those_behind_the_goodput():
    fleet = Fleet(chips=1_200_000, islands=8, days=1.0, seed=5)
    found = pauses(FailureModel(), chips=fleet.chips, islands=8, duration_s=DAY_S, seed=5)
    assert len(found) == 8
    for of_island in found:
        assert all(pause.for_s > 0.0 for pause in of_island)
        ends = [pause.at_s + pause.for_s for pause in of_island]
        assert all(end <= later.at_s for end, later in zip(ends, of_island[1:], strict=False))
        assert ends[-1] <= DAY_S
    paused = sum(pause.for_s for of_island in found for pause in of_island) / (8 * DAY_S)
    assert paused == pytest.approx(simulate(fleet, FailureModel()).account.waste[Cause.PAUSED])


def test_pauses_can_be_played_faster_but_not_in_no_time():
    fleet = {"chips": 600_000, "islands": 2, "seed": 1}
    slow = pauses(FailureModel(), **fleet, duration_s=10_000.0)
    fast = pauses(FailureModel(), **fleet, duration_s=100.0, time_scale=0.01)
    assert np.allclose(np.array(slow[1]) / 100.0, np.array(fast[1]))
    with pytest.raises(ConfigError, match="time_scale"):
        pauses(FailureModel(), **fleet, duration_s=1.0, time_scale=0.0)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_expected_goodput_is_what_a_long_simulation_finds(mode):
    expected = expected_goodput(mode=mode, chips=600_000, islands=4, mtbi_years=2.0, events=20_000)
    found = simulate(Fleet(mode=mode, chips=600_000, islands=4, days=8.0, seed=9), FailureModel(mtbi_years=2.0))
    assert expected == pytest.approx(found.account.goodput.value, abs=0.01)


@pytest.mark.parametrize("mode", ["diloco", "elastic-dp"])
@pytest.mark.parametrize("islands", [2, 8, 64])
def test_the_expected_goodput_is_of_usual_differences_in_speed_and_not_of_one_draw(mode, islands):
    uneven = replace(NEVER, speed_spread=0.1, step_jitter=0.0)
    fleet = Fleet(mode=Mode(mode), chips=islands, islands=islands)
    found = expected_goodput(mode=mode, chips=islands, islands=islands, model=uneven, events=1000)
    assert found == pytest.approx(renewal.in_step_share(fleet, uneven), abs=0.006)


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=30))
def test_an_estimate_lies_within_its_interval_and_within_0_and_1(samples):
    found = batch_means(np.array(samples))
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0


def test_the_expected_goodput_takes_no_fleet_that_cannot_be_but_any_that_has_a_closed_form():
    assert 0.1 < expected_goodput(mode="elastic-dp", chips=3_200_000_000, islands=8) < 0.3
    with pytest.raises(ConfigError, match="chips"):
        expected_goodput(chips=2, islands=4)


def test_the_expected_goodput_of_many_small_islands_is_that_of_some_of_them():
    some, many = (expected_goodput(chips=8 * islands, islands=islands, events=5000) for islands in (64, 100_000))
    assert many == pytest.approx(some, abs=1e-3)


# --- the command --------------------------------------------------------------------------------------------------


def command(*flags):
    parser = argparse.ArgumentParser()
    goodput.add_arguments(parser)
    return goodput.run(parser.parse_args(list(flags)))


def test_an_interval_of_one_step_is_simulated(capsys):
    assert command("--mode", "diloco", "--sync-interval", "1e0", "--days", "0.01", "--json") == 0
    assert 0 < json.loads(capsys.readouterr().out)["goodput"] < 1


def test_the_command_prints_one_json_object(capsys):
    assert command("--chips", "300000", "--islands", "4", "--days", "1", "--mtbi-years", "0.5", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goodput_ci"][0] <= found["goodput"] <= found["goodput_ci"][1]
    assert 0.0 < found["goodput"] < found["uptime"] <= 1.0
    assert found["goodput"] + sum(found["waste"].values()) == pytest.approx(1.0)
    assert found["parameters"]["mtbi_years"] == 0.5
    assert found["seed"] == 0
    assert sum(each["share"] for each in found["staleness"]["histogram"]) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_same_seed_prints_the_same_bytes_and_another_one_others(capsys, mode):
    printed = []
    for seed in ("7", "7", "8"):
        command("--mode", mode.value, "--days", "0.5", "--seed", seed, "--json")
        printed.append(capsys.readouterr().out.replace(f'"seed": {seed}', ""))
    assert printed[0] == printed[1] != printed[2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chips", "64", "--islands", "1", "--days", "10"], "1.8 interruptions to be expected"),
        (
            ["--domain-mtbi-days", "3", "--domain-islands", "8", "--days", "30", "--step-s", "6"],
            "9.9 domain failures to be",
        ),
        (["--repair-s", "36000", "--days", "8"], "repairs after interruptions last longer than a 20th"),
        (["--mode", "dp", "--repair-s", "604800", "--days", "7"], None),
        (["--mode", "dp", "--chips", "20000000"], "interruption of the job every 1.58 s the"),
        (["--mtbi-years", "0.01", "--days", "0.2"], "interruption of an island every 2.1 s the"),
        (["--step-s", "60"], "upper bound"),
        (["--step-s", "6"], None),
        (["--mode", "dp", "--chips", "1024", "--days", "365"], "elastic modes go without one of 16 slices for 1800 s"),
        (["--mode", "dp", "--chips", "2304", "--days", "365"], None),
        (["--mtbi-years", "1e9"], None),
    ],
)
def test_a_goodput_that_looks_better_than_it_is_has_a_warning(flags, words, capsys):
    assert command("--days", "1", *flags, "--json") == 0
    warning = json.loads(capsys.readouterr().out)["warning"]
    assert (words in warning) if words else (warning is None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chips", "4"], "chips = 4: must be at least one per island: 8"),
        (["--days", "-3"], "days = -3.0: must be above 0"),
        (["--mode", "magic"], "mode = 'magic': must be one of decoupled, elastic-dp, dp, diloco"),
        (["--mtbi-years", "0"], "mtbi_years = 0.0: must be above 0"),
        (["--mtbi-years", "1e305"], "mtbi_years = 1e+305: must be at most 1e+12; give that for what never happens"),
        (["--mtbi-years", "nan"], "mtbi_years = nan: must be"),
        (["--chips", "1e15"], "must be at most 1e+12"),
        (["--seed", "-1"], "seed = -1: must be at least 0"),
        (["--check-s", "1e-7"], "check_s = 1e-07: must be at least 0.001, or 0 for at once"),
        (["--coordinator-mtbi-days", "1e-300", "--coordinator-repair-s", "0"], "coordinator failures; at most 1e+07"),
        (["--table", "--domain-mtbi-days", "1", "--domain-islands", "4"], "at most the number of islands, 2"),
        (["--islands", "many"], "islands = 'many': must be a whole number"),
        (["--step-s", "0.001"], "days = 30.0: would be 8.6e+08 rounds of all islands; at most 5e+07: simulate fewer"),
        (["--table", "--chips", "100"], "leave it out"),
        (["--table", "--plot", "x.svg"], "leave out --table"),
        (["--domain-mtbi-days", "1", "--domain-islands", "9"], "at most the number of islands"),
    ],
)
def test_a_wrong_flag_says_field_value_and_cure(flags, words):
    with pytest.raises(ConfigError) as refused:
        command(*flags)
    assert words in str(refused.value)


def test_the_table_shows_every_cell_beside_the_published_one(capsys):
    assert command("--table", "--days", "0.2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[6].startswith("mean distance ")
    assert all(line.count(" / ") == 5 for line in lines[2:6])


def test_the_table_warns_of_other_settings_and_of_too_short_a_time(capsys):
    def warning(*flags):
        assert command("--table", *flags, "--json") == 0
        document = json.loads(capsys.readouterr().out)
        assert len(document["cells"]) == 20
        assert document["parameters"]["days"] == float(flags[1])
        return document["warning"]

    assert warning("--days", "0.5") is None
    said = warning("--days", "0.2", "--mtbi-years", "0.5")
    assert "mtbi_years = 0.5 (1); elastic DP with 150,000 chips, and 14 more alike: repairs" in said


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(simulation, "ESTIMATE_EVENTS", 1000)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unavailable, match="pip install matplotlib"):
        command("--days", "0.1", "--plot", str(tmp_path / "plot.svg"))


def test_a_plot_is_an_svg_that_names_the_modes(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(simulation, "ESTIMATE_EVENTS", 1000)
    path, again, full = (tmp_path / name for name in ("plot.svg", "again.svg", "full.svg"))
    full.symlink_to("/dev/full")
    assert command("--days", "0.1", "--plot", str(path)) == 0
    text = path.read_text()
    assert ET.fromstring(text).tag.endswith("svg")
    assert all(words in text for words in ("elastic-dp", "this simulation"))
    command("--days", "0.1", "--plot", str(again))
    assert again.read_text() == text
    capsys.readouterr()
    with pytest.raises(Unavailable, match="cannot write"):
        command("--days", "0.1", "--plot", str(full))
    assert "goodput" in capsys.readouterr().out  # what was simulated is not lost with it


def test_sizes_that_fail_too_often_are_no_part_of_a_curve_but_where_there_is_a_closed_form():
    drawn = published.curves(Fleet(chips=1_000), FailureModel(mtbi_years=1e-7))
    assert len(drawn.get("decoupled", ())) < len(drawn["dp"]) == 12


@pytest.mark.parametrize("chips", [1_000, 1_234_567, 20_000_000])
def test_curves_have_the_size_of_the_fleet_itself(chips, monkeypatch):
    monkeypatch.setattr(published, "expected_goodput", lambda **_: 0.5)
    sizes = [size for size, _ in published.curves(Fleet(mode=Mode.DP, chips=chips), FailureModel())["dp"]]
    assert chips in sizes
    assert sizes == sorted(set(sizes))
    assert min(sizes) <= 50_000
    assert max(sizes) >= 10_000_000


@pytest.mark.parametrize(
    ("name", "cure"),
    [("goodput.png", "must end in .svg"), ("none/goodput.svg", "a folder that"), ("there.svg", "cannot be written")],
)
def test_a_plot_that_cannot_be_is_refused_before_anything_is_simulated(name, cure, tmp_path):
    (tmp_path / "there.svg").mkdir()
    with pytest.raises(ConfigError, match=cure):
        command("--days", "1e5", "--plot", str(tmp_path / name))
