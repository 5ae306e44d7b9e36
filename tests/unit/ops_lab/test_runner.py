"""What the laboratory's runner and command decide, without a process."""

import argparse
from dataclasses import replace

import pytest

from broker.base.errors import ConfigError, Unavailable
from ops.lab import command, runner
from ops.lab.records import read
from ops.lab.runner import Runner
from ops.lab.schedule import due, load
from tests.synthetic import record

EXPERIMENT = """
question = "Does it go on?"
seeds = 2
budget_minutes = 2.0
[run]
steps = 60
islands = 2
task = "examples.numpy_task:task"
[grid]
mode = ["decoupled", "diloco"]
"""


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "parity.toml"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture
def said():
    return []


@pytest.fixture
def made(experiment, tmp_path, said):
    return Runner(experiment=load(experiment), directory=tmp_path / "records", jobs=1, say=said.append)


def record_of(run, **changes):
    return replace(record(3.0, seed=run.seed, **run.cell), key=run.key, **changes)


def test_a_record_that_is_kept_is_in_its_file_and_its_run_no_longer_due(made, said):
    first = due(made.experiment, [])[0]
    made.keep(record_of(first), first)
    assert read(made.directory, "parity") == (record_of(first),)
    assert "loss 3.0000" in said[-1]
    assert "3 to go" in said[-1]


@pytest.mark.parametrize(
    ("records", "failed", "reason"),
    [
        ([record()], (), ""),
        ([record(seed=0), record(seed=1)], (), "the budget of 2 processor minutes is spent"),
        ([record(seed=0), record(seed=0)], (), ""),
        ([], ("a", "b"), ""),
        ([], ("a", "b", "c"), "none succeeded"),
    ],
)
def test_no_further_run_is_started_when_the_budget_is_spent_or_all_fail(made, records, failed, reason):
    made._records, made._failed = list(records), set(failed)
    assert made.over().startswith(reason)
    assert bool(made.over()) == bool(reason)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("run {0}/parity.toml --jobs 0", "--jobs"),
        ("run {0}/parity.toml --max-seeds 0", "--max-seeds"),
        ("run {0}/parity.toml --records {0}/records.jsonl.xz", "--records"),
        ("run {0}/none.toml", "none.toml"),
        ("run {0}/parity.toml {0}/other.toml", "ilands"),
        ("show {0}/parity.toml --records {0}/nowhere", "nowhere"),
    ],
)
def test_wrong_flags_and_files_are_named_before_anything_is_run(experiment, tmp_path, line, word):
    (tmp_path / "other.toml").write_text(EXPERIMENT.replace("islands", "ilands"))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(ConfigError, match=word):
        command.run(parser.parse_args(line.format(tmp_path).split()))


def test_two_laboratories_do_not_run_the_same_experiment(made):
    with runner._locked(made.directory, "parity"), pytest.raises(Unavailable, match="is being run already"):
        made.run(lambda: None)
