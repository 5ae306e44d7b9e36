"""The ladder for a lent GPU: its runs are the laboratory's, a second call goes on, and its table is the law's."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import ladder, output, side_by_side
from islands.tasks.task import DataShare, load_task
from ops.lab import lockstep, records
from ops.lab.records import Record
from ops.lab.schedule import Run
from ops.plans.cell import cell_settings

TASK = {"width": 8, "depth": 1, "batch": 4, "context": 8, "learning_rate": 0.01, "warm_up_steps": 2, "b2": 0.99}


def cell(mode, islands):
    options = {f"task.{name}": value for name, value in TASK.items()}
    base = {"task": "benchmarks.side_by_side:task", "steps": 12, "fragments": 1, "sync_interval": 4}
    return cell_settings(base | {"mode": mode, "islands": islands, "evaluations": 3} | options)


@pytest.mark.full("compiles the steps of both")
@pytest.mark.parametrize(("mode", "islands"), [("data-parallel", 1), ("diloco", 2)])
def test_islands_side_by_side_come_to_what_the_laboratory_comes_to(mode, islands):
    settings = cell(mode, islands)
    task = load_task(settings.task, settings.options)
    told = []
    found = side_by_side.SideBySide(task, settings).run(0, task.evaluate, lambda step, loss: told.append(step))
    expected = lockstep.run(task, settings, 0, task.evaluate)
    for ours, theirs in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)  # sums in another order
    assert [point.tokens for point in found.curve] == [point.tokens for point in expected.curve]
    assert (found.tokens, found.rounds, told) == (expected.tokens, expected.rounds, [4, 8, 12])
    assert side_by_side.parameters_of(8, 1, 256) == sum(leaf.size for leaf in jax.tree.leaves(found.params))


@pytest.mark.full("compiles two models")
def test_products_in_bfloat16_leave_gradients_what_they_are_in_float32():
    """Those of embeddings too, to which each of thousands of tokens adds a little: 34 % off if added in bfloat16."""
    task = side_by_side.task(**TASK | {"width": 16, "batch": 256, "context": 64})
    (params, _), batch = task.init(0), next(task.data(DataShare(index=0, count=1, seed=0)))
    narrow, wide = (
        jax.jit(jax.grad(side_by_side.model_of(16, 1, 64, dtype, ())[1]))(params, batch)
        for dtype in ("bfloat16", "float32")
    )
    for ours, exact in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert ours.dtype == np.float32
        assert np.linalg.norm(ours - exact) < 0.02 * np.linalg.norm(exact)


def called(capsys, folder, *flags):
    flags = ["--quick", "--islands", "1", "--outer-rate", "1", "--outer-momentum", "0", *flags]
    status = ladder.main([*flags, "--json", "--out", str(folder)])
    said = capsys.readouterr()
    return status, [json.loads(line) for line in said.out.splitlines()], said.err


def test_one_island_is_data_parallel_training_and_a_second_call_adds_nothing(capsys, tmp_path):
    """With rate 1 and no momentum what an island hands over comes back as it was."""
    assert called(capsys, tmp_path, "--minutes", "0")[1][0]["seeds"] == 0
    assert list(tmp_path.iterdir()) == [], "no time, no run"
    status, rows, said = called(capsys, tmp_path)
    assert (status, rows[0]["seeds"], rows[0]["pairs_1"], rows[1]["pairs"]) == (0, 1, 1, 1)
    assert rows[0]["gap_1"] == pytest.approx(0, abs=1e-4)
    assert rows[0]["loss_0"] < 3.5
    assert "tokens/s" in said
    kept = records.path_of(tmp_path, "ladder").read_bytes()
    assert called(capsys, tmp_path)[:2] == (0, rows)
    assert records.path_of(tmp_path, "ladder").read_bytes() == kept


def test_an_interrupted_ladder_keeps_what_is_finished(capsys, tmp_path, monkeypatch):
    def record_of(run, *rest):
        if run.cell["islands"]:
            raise KeyboardInterrupt
        return record(run, 2.0, tokens=10**9)  # so quick that the next one fits

    monkeypatch.setattr(ladder, "record_of", record_of)
    monkeypatch.setattr(ladder, "load_task", lambda *of: None)
    monkeypatch.setattr(ladder, "SideBySide", lambda *of: None)
    digest = side_by_side.corpus_of(()).digest
    monkeypatch.setattr(f"{__name__}.CORPUS", digest)
    status, rows, said = called(capsys, tmp_path)
    assert (status, rows[0]["loss_0"], "gap_1" in rows[0]) == (130, 2.0, False)
    assert "the same command goes on" in said
    assert len(records.read(tmp_path, "ladder")) == 1


CORPUS = "text"


def run(size, islands, seed=0):
    return Run({"parameters": size, "islands": islands}, cell("diloco", 2), seed, f"{size} {islands} {seed}")


def record(run, loss, **values):
    settings = {"device": ladder._device(), "steps": 12, "step_s": 0.5}
    found = {"experiment": "ladder", "cell": run.cell, "key": run.key, "seed": run.seed, "corpus": CORPUS}
    return Record(**found | {"loss": loss, "tokens": 12 * 2 * 4 * 8, "wall_s": 10.0, "settings": settings} | values)


def test_gaps_and_slopes_of_losses_by_the_law_are_the_laws():
    runs = [run(size, islands, seed) for size in (10**6, 10**7) for islands in (0, 2, 4) for seed in (0, 1)]
    done = {}
    for each in runs:
        factor, power = ladder.LAW.get(each.cell["islands"], (1, 0))
        done[each.key] = record(each, (2 + each.seed) * factor * each.cell["parameters"] ** power)
    sizes, slopes = ladder.tables(runs, done, 10**6)
    for row in sizes:
        assert row["gap_2"] == pytest.approx(row["law_2"])
        assert row["gap_4"] == pytest.approx(row["law_4"])
        assert row["half_width_2"] == pytest.approx(0, abs=1e-6)
    assert [(row["pairs"], row["law"]) for row in slopes] == [(4, -0.0016), (4, -0.0039)]
    assert [row["slope"] for row in slopes] == pytest.approx([-0.0016, -0.0039])
    done[runs[0].key] = record(runs[0], 9.0, diverged=True)
    assert ladder.tables(runs, done, 10**6)[1][0]["pairs"] == 3


def test_a_run_is_foretold_by_steps_of_the_nearest_size_on_this_device():
    small, large = run(1000, 2), run(3000, 2)
    found = [record(small, 2.0), record(run(9, 2), 2.0, wall_s=99.0)]
    assert ladder.foretold_s(large, found, compiled=True) == pytest.approx(3 * 6)
    assert ladder.foretold_s(large, found, compiled=False) == pytest.approx(3 * 6 + 4)
    elsewhere = record(small, 2.0, settings={"device": "another", "steps": 12, "step_s": 0.5})
    assert ladder.foretold_s(large, [elsewhere], compiled=True) == 0


class Trainer:
    """Tells of these steps, and comes to nothing."""

    def __init__(self, *steps):
        self._steps = steps

    def run(self, seed, judge, told):
        for step in self._steps:
            told(step, 2.0)
        return records.Outcome(params=None, curve=(), tokens=768, merged_tokens=768, virtual_s=0.0)


def test_a_run_is_dropped_by_its_first_steps_and_never_by_its_last(monkeypatch):
    monkeypatch.setattr(ladder, "held_out_loss", lambda *of: 2.0)
    monkeypatch.setattr(ladder, "SAY_EVERY_S", 0.0)
    task = SimpleNamespace(init=lambda seed: (None, None), corpus=CORPUS)
    printer = output.Printer((), as_json=True)
    with pytest.raises(ladder.TooLong):
        ladder.record_of(run(1000, 2), task, Trainer(4, 8, 12), printer, 0.0)
    found = ladder.record_of(run(1000, 2), task, Trainer(4, 12), printer, 0.0)
    assert found.settings["step_s"] > 0
    assert found.diverged, "it ends no lower than it began"


@pytest.mark.parametrize(
    ("parameters", "shape"), [(5e6, (256, 6)), (10e6, (384, 5)), (20e6, (512, 6)), (35e6, (576, 8))]
)
def test_shapes_are_near_the_size(parameters, shape):
    assert ladder.shape_of(parameters, 256) == shape
    assert side_by_side.parameters_of(*shape, 256) == pytest.approx(parameters, rel=0.05)
