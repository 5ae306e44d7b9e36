"""The ladder for a lent GPU: its runs are the laboratory's, a second call goes on, and its table is the law's."""

import argparse
import json

import jax
import numpy as np
import pytest

from benchmarks import ladder, output, side_by_side
from islands.tasks.task import load_task
from ops.lab import lockstep, records
from ops.lab.records import Record
from ops.lab.schedule import due
from ops.plans.cell import cell_settings, resolved


@pytest.mark.full("compiles the steps of both")
@pytest.mark.parametrize(("mode", "islands"), [("data-parallel", 1), ("diloco", 2)])
def test_islands_side_by_side_come_to_what_the_laboratory_comes_to(mode, islands):
    values = {"mode": mode, "islands": islands, "steps": 12, "fragments": 1, "sync_interval": 4, "evaluations": 3}
    options = {"model": "8x1", "batch": 4, "context": 8, "learning_rate": 0.01, "warm_up_steps": 2}
    settings = cell_settings(values | {f"task.{name}": value for name, value in options.items()})
    task = load_task(settings.task, settings.options)
    told = []
    found = side_by_side.run(task, settings, 0, task.evaluate, lambda step, loss: told.append(step))
    expected = lockstep.run(task, settings, 0, task.evaluate)
    for ours, theirs in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)  # sums in another order
    assert [point.tokens for point in found.curve] == [point.tokens for point in expected.curve]
    assert (found.tokens, found.rounds, told) == (expected.tokens, expected.rounds, [4, 8, 12])
    assert ladder.parameters_of("8x1", 256) == sum(leaf.size for leaf in jax.tree.leaves(found.params))


def called(capsys, folder, *flags):
    status = ladder.main(["--quick", *flags, "--json", "--out", str(folder)])
    said = capsys.readouterr()
    return status, [json.loads(line) for line in said.out.splitlines()], said.err


@pytest.mark.full("trains two models")
def test_a_second_call_adds_nothing_and_no_time_is_no_run(capsys, tmp_path):
    assert called(capsys, tmp_path, "--minutes", "0")[1][0]["pairs"] == 0
    assert list(tmp_path.iterdir()) == []
    status, rows, said = called(capsys, tmp_path)
    assert (status, rows[0]["pairs"], rows[1]["pairs"]) == (0, 1, 1)
    assert rows[0]["baseline"] < rows[0]["loss"] < 3.5
    assert "nats per token" in said
    kept = records.path_of(tmp_path, "ladder").read_bytes()
    assert called(capsys, tmp_path)[:2] == (0, rows)
    assert records.path_of(tmp_path, "ladder").read_bytes() == kept


def test_an_interrupted_ladder_keeps_what_is_finished(capsys, tmp_path, monkeypatch):
    def record_of(run, *rest):
        if run.cell["mode"] == "diloco":
            raise KeyboardInterrupt
        return record(run, 2.0, tokens=10**9)  # so quick that the next one fits

    monkeypatch.setattr(ladder, "record_of", record_of)
    status, rows, said = called(capsys, tmp_path)
    assert (status, rows[0]["baseline"], rows[0]["gap"]) == (130, 2.0, None)
    assert "the same command goes on" in said
    assert len(records.read(tmp_path, "ladder")) == 1


def experiment(*sizes, seeds=2):
    args = argparse.Namespace(sizes=sizes, islands=(2, 4), seeds=seeds, scale=1.0, tokens=20.0, data=())
    return ladder.experiment_of(args, 256)


def record(run, loss, **values):
    settings = resolved(run.settings) | {"device": ladder.device(), "step_s": 0.5}
    found = {"experiment": "ladder", "cell": run.cell, "key": run.key, "seed": run.seed, "loss": loss}
    tokens = ladder.tokens_of(settings)
    return Record(**found | {"tokens": tokens, "wall_s": 0.5 * settings["steps"] + 4, "settings": settings} | values)


def test_gaps_and_slopes_of_losses_by_the_law_are_the_laws():
    plan = experiment(10**6, 10**7)
    runs, laws = due(plan, ()), ladder.LAW | {1: (1, 0)}
    assert [run.seed for run in runs] == [0] * 6 + [1] * 6, "first seeds first"
    assert [run.cell["islands"] for run in runs] == [1, 2, 4] * 4, "small sizes first"

    def lost(run):
        factor, power = laws[run.cell["islands"]]
        return (2 + run.seed) * factor * ladder.size_of(resolved(run.settings)) ** power

    found = [record(run, lost(run)) for run in runs]
    gaps, slopes = ladder.tables(plan, found, 10**6)
    assert [row["islands"] for row in gaps] == [2, 2, 4, 4]
    for row in gaps:
        assert row["gap"] == pytest.approx(row["law"])
        assert row["half_width"] == pytest.approx(0, abs=1e-6)
    assert [(row["pairs"], row["law"]) for row in slopes] == [(4, -0.0016), (4, -0.0039)]
    assert [row["slope"] for row in slopes] == pytest.approx([-0.0016, -0.0039])
    found[0] = record(runs[0], 9.0, diverged=True)
    assert ladder.tables(plan, found, 10**6)[1][0]["pairs"] == 3


def test_a_run_is_foretold_by_steps_of_the_nearest_size_on_this_device():
    small, _, _, large, *_ = due(experiment(10**6, 10**7, seeds=1), ())
    settings, before = resolved(large.settings), resolved(small.settings)
    work = [ladder.size_of(each) * ladder.tokens_of(each) for each in (settings, before)]
    expected = work[0] / work[1] * 0.5 * before["steps"] + 4
    assert ladder.foretold_s(settings, [record(small, 2.0)]) == pytest.approx(expected)
    assert ladder.foretold_s(settings, [record(small, 2.0, settings=before | {"device": "another"})]) == 0


def test_a_run_is_dropped_by_its_first_steps_and_never_by_its_last(monkeypatch):
    run, steps = due(experiment(10**6, seeds=1), ())[0], []

    def run_cell(cell, seed, *, train, **rest):
        for step in steps:
            train.keywords["told"](step, 2.0)
        return record(run, 2.0)

    monkeypatch.setattr(ladder, "run_cell", run_cell)
    monkeypatch.setattr(ladder, "SAY_EVERY_S", 0.0)
    printer = output.Printer((), as_json=True)
    steps[:] = 24, run.settings.steps
    assert ladder.record_of(run, "", printer, 0.0).settings["step_s"] > 0
    steps[:] = 24, 48, run.settings.steps
    with pytest.raises(ladder.TooLong):
        ladder.record_of(run, "", printer, 0.0)


@pytest.mark.parametrize(("size", "model"), [(5e6, "256x6"), (10e6, "384x5"), (20e6, "512x6"), (35e6, "576x8")])
def test_shapes_are_near_the_size(size, model):
    assert ladder.model_of(size, 256) == model
    assert ladder.parameters_of(model, 256) == pytest.approx(size, rel=0.05)
