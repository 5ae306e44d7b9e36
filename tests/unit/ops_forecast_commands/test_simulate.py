"""``atoll simulate`` as a command, and what the laboratory plays of it."""

import argparse
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import ConfigError
from ops.forecast.accounts import batch_means
from ops.forecast.failures import DAY_S, FailureModel, SimulatedFleet
from ops.forecast.goodput import pauses, simulate
from ops.forecast.timeline import Cause
from ops.forecast_commands import simulate as simulating

# --- for other parts of the program -------------------------------------------------------------------------------


def test_pauses_are_sorted_disjoint_and_those_behind_the_goodput():
    fleet = SimulatedFleet(chips=1_200_000, islands=8, days=1.0, seed=5)
    found = pauses(FailureModel(), chips=fleet.chips, islands=8, duration_s=DAY_S, seed=5)
    assert len(found) == 8
    for of_island in found:
        assert all(pause.for_s > 0.0 for pause in of_island)
        ends = [pause.at_s + pause.for_s for pause in of_island]
        assert all(end <= later.at_s for end, later in zip(ends, of_island[1:], strict=False))
        assert ends[-1] <= DAY_S
    paused = sum(pause.for_s for of_island in found for pause in of_island) / (8 * DAY_S)
    assert paused == pytest.approx(simulate(fleet, FailureModel()).account.wasted[Cause.PAUSED].value)


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=30))
def test_an_estimate_lies_within_its_interval_and_within_0_and_1(samples):
    found = batch_means(np.array(samples))
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0


# --- the command --------------------------------------------------------------------------------------------------


def command(*flags):
    parser = argparse.ArgumentParser()
    simulating.add_arguments(parser)
    return simulating.run(parser.parse_args(list(flags)))


def test_the_command_prints_one_json_object(capsys):
    assert command("--chips", "300000", "--islands", "4", "--days", "1", "--mtbi-years", "0.5", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goodput_ci"][0] <= found["goodput"] <= found["goodput_ci"][1]
    assert 0.0 < found["goodput"] < found["uptime"] <= 1.0
    assert found["goodput"] + sum(found["waste"].values()) == pytest.approx(1.0)
    assert found["parameters"]["mtbi_years"] == 0.5
    assert found["seed"] == 0
    assert 0.0 < found["staleness"] < 1.0


@pytest.mark.parametrize("mode", ["decoupled", "elastic-dp", "dp"])
def test_the_same_seed_prints_the_same_bytes_and_another_one_others(capsys, mode):
    printed = []
    for seed in ("7", "7", "8"):
        command("--mode", mode, "--days", "0.5", "--seed", seed, "--json")
        printed.append(capsys.readouterr().out.replace(f'"seed": {seed}', ""))
    assert printed[0] == printed[1] != printed[2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chips", "64", "--islands", "1", "--days", "10"], "1.8 interruptions to be expected"),
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
        (["--chips", "4"], "chips = 4: must lie between 8 and 1e+12: at least one per island"),
        (["--slice-chips", "0"], "slice_chips = 0: must"),
        (["--sync-interval", "0"], "sync_interval = 0: must"),
        (["--mode", "magic"], "mode = 'magic': must be one of decoupled, streaming, diloco"),
        (["--mtbi-years", "0"], "mtbi_years = 0.0: must lie between 1e-09 and"),
        (["--mtbi-years", "nan"], "mtbi_years = nan: must be"),
        (["--seed", "-1"], "seed = -1: must lie between 0"),
        (["--chips", "1e12"], "interruptions; at most 2e+08: simulate fewer days"),
        (["--mode", "streaming"], "mode = 'streaming': is not simulated: take decoupled"),
        (["--sync-interval", "1"], "overlap = 1: must be below sync_interval = 1"),
        (["--step-s", "0.001"], "days = 30.0: would be 8.6e+08 rounds of all islands; at most 5e+07: simulate fewer"),
    ],
)
def test_a_wrong_flag_says_field_value_and_cure(flags, words):
    with pytest.raises(ConfigError) as refused:
        command(*flags)
    assert words in str(refused.value)
