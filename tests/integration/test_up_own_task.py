"""Tasks of somebody's own under ``up``: what they evaluate is told by its name, and a wrong loss at its first step."""

import pytest

from tests.local_run import ROOT, Up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ACCURACY = """
import dataclasses
from examples import numpy_task

def task():
    plain = numpy_task.task()
    return dataclasses.replace(
        plain,
        metrics={"accuracy": "max"},
        evaluate=lambda params: {"accuracy": 1 / (1 + plain.evaluate(params)), "loss": plain.evaluate(params)},
    )
"""

WITH_AUX = """
import jax.numpy as jnp
import numpy as np
from islands import jax_task, warm_up_cosine

def loss(params, batch):
    return jnp.mean((params["w"] - batch) ** 2), {"seen": batch.size}

def batches(share):
    while True:
        share.take()
        yield np.ones(3, np.float32)

def task(*, has_aux: bool = False):
    return jax_task(
        init=lambda key: {"w": jnp.zeros(3)},
        loss=loss,
        has_aux=has_aux,
        data=batches,
        evaluate=lambda params: loss(params, np.ones(3, np.float32))[0],
        learning_rate=warm_up_cosine(0.01, warm_up_steps=0),
        tokens_per_step=10,
    )
"""


def up(folder, source, *flags):
    folder.mkdir(exist_ok=True)
    (folder / "own_task.py").write_text(source)
    flags = ("--islands", 1, "--fragments", 1, *flags)
    return Up(folder / "run", *flags, task="own_task:task", PYTHONPATH=f"{ROOT}:{folder}")


def test_an_accuracy_is_told_by_its_name_and_as_better_when_it_is_higher(tmp_path):
    with up(tmp_path, ACCURACY, "--tokens", 20_000) as run:
        assert run.wait() == 0, run.err
    report = run.report()
    accuracy, loss = report["metrics"]["accuracy"], report["metrics"]["loss"]
    assert accuracy["before"] < accuracy["after"]
    assert (accuracy["better"], loss["better"]) == ("max", "min")
    assert report["loss"] == {"before": loss["before"], "after": loss["after"], "unit": ""}
    assert f"  accuracy      {accuracy['before']:.3f} -> {accuracy['after']:.3f} (better)\n" in run.out


def test_a_loss_with_aux_is_refused_at_its_first_step_or_trained_as_it_is_told(tmp_path):
    with up(tmp_path / "one", WITH_AUX) as run:
        assert run.wait() == 2, run.err
    told = "loss = 'tuple of 2: float32 array of shape (), dict': must return a scalar, the mean loss of the batch"
    assert f"island-0 ended with status 2: its settings are wrong: atoll: {told}; has_aux=True where it" in run.err
    assert told in run.out, "and in the report"
    assert "restarting it" not in run.err
    with up(tmp_path / "other", WITH_AUX, "--task-option", "has_aux=true", "--tokens", 500) as other:
        assert other.wait() == 0, other.err
    assert other.report()["loss"]["after"] < other.report()["loss"]["before"]
