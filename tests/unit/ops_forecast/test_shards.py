"""How many aggregators share a model, where that is left to the program."""

import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import ConfigError
from broker.routing.directory import MAX_SHARDS
from ops import cli
from ops.forecast.footprint import shards_for, shards_here
from ops.forecast_commands.model_size import parameters_of
from ops.run import local_plan
from ops.run.prepare import prepare

GB = 10**9
NUMPY = '[island]\ntask = "examples.numpy_task:task"\n'


@pytest.mark.parametrize(
    ("parameters", "fragments", "host_bytes", "shards"),
    [
        (10**6, 8, None, 1),
        (10**9, 8, None, 1),
        (5 * 10**9, 8, None, 5),
        (5 * 10**9, 24, 512 * GB, 5),
        (5 * 10**9, 24, 20 * GB, 10),
        (5 * 10**9, 4, None, 4),
        (5 * 10**9, 24, 2 * GB, 24),
    ],
)
def test_aggregators_apart_are_as_many_as_merge_and_hold_the_model(parameters, fragments, host_bytes, shards):
    assert shards_for(parameters, fragments=fragments, host_bytes=host_bytes) == shards


@pytest.mark.parametrize(
    ("parameters", "memory_bytes", "cores", "shards"),
    [
        (10**6, 16 * GB, 64, 1),
        (5 * 10**9, 512 * GB, 64, 5),
        (5 * 10**9, 512 * GB, 4, 2),
        (5 * 10**9, 512 * GB, 1, 1),
        (5 * 10**9, 150 * GB, 64, 4),
        (5 * 10**9, 8 * GB, 64, 1),
        (5 * 10**9, 0, 64, 5),
    ],
)
def test_aggregators_of_one_machine_share_its_cores_and_memory(parameters, memory_bytes, cores, shards):
    assert shards_here(parameters, fragments=24, memory_bytes=memory_bytes, cores=cores) == shards


@given(st.integers(1, 10**13), st.integers(1, 1000), st.integers(0, 10**13), st.integers(1, 512))
def test_each_aggregator_has_a_fragment_and_there_is_one(parameters, fragments, memory_bytes, cores):
    here = shards_here(parameters, fragments=fragments, memory_bytes=memory_bytes, cores=cores)
    apart = shards_for(parameters, fragments=fragments, host_bytes=memory_bytes)
    assert 1 <= here <= min(fragments, MAX_SHARDS)
    assert 1 <= apart <= min(fragments, MAX_SHARDS)


def test_plan_takes_the_rule(capsys):
    asked = ["plan", "--params", "5B", "--sites", "8", "--step-time", "1", "--shards", "auto", "--json"]
    assert cli.main(asked) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["shards"] == 5


def test_the_size_of_a_runs_model_is_counted_beside():
    one, two = (parameters_of(f"{NUMPY}[task]\nhidden = {hidden}\n") for hidden in (10, 20))
    assert 0 < one < two
    with pytest.raises(ConfigError, match=r"shards = 'auto': needs the size of the model \(.*\): give a number"):
        parameters_of('[island]\ntask = "no.such_module:task"\n')


def test_up_resolves_auto_to_a_number_and_writes_that(tmp_path):
    parser = argparse.ArgumentParser()
    parser.set_defaults(resume=None)
    local_plan.add_arguments(parser)
    words = ("--task", "examples.numpy_task:task", "--run-dir", str(tmp_path / "run"), "--shards", "auto")
    plan = prepare(parser.parse_args([*words, "--platform", "cpu"]))
    assert plan.aggregator.shards == 1
    assert "shards = 1" in plan.config_file.read_text()


@pytest.mark.parametrize("command", ["up", "plan --params 5B --sites 8"])
def test_a_word_that_is_neither_names_the_one_there_is(command, capsys):
    assert cli.main([*command.split(), "--shards", "autp"]) == 2
    assert "shards = 'autp': must be a whole number, or auto: by the model" in capsys.readouterr().err
