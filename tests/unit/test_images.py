"""The classifier of digits that ships: data by share, and a model that learns to read them."""

import numpy as np
import pytest

from broker.wire.errors import ConfigError
from islands import images
from islands.tasks.task import DataShare, Schedule


def test_a_fifth_is_held_out_and_no_image_is_in_two_batches_of_an_epoch():
    train, held_out = images.split(images.load_digits())
    assert (len(train.labels), len(held_out.labels)) == (1437, 360)
    variants = images.moved(train, 1)
    assert variants.pixels.shape == (9, 1437, 8, 8, 1)
    assert np.array_equal(variants.pixels[4], train.pixels)
    seen = []
    for index in range(2):
        source = images.batches(
            variants._replace(labels=np.arange(1437)), DataShare(index=index, count=2, seed=3), batch=50
        )
        seen += [int(n) for _, batch in zip(range(14), source, strict=False) for n in batch.labels]
    assert len(set(seen)) == len(seen)


def test_it_learns_to_read_digits_in_a_few_steps():
    task = images.task(batch=64, channels=8, hidden=32)
    params, state = task.init(0)
    before = task.evaluate(params)
    assert before["loss"] == pytest.approx(np.log(10), abs=1e-5)
    data = task.data(DataShare(index=0, count=1, seed=0))
    for step in range(300):
        params, state, _ = task.train(params, state, next(data), Schedule(step, 300))
    after = task.evaluate(params)
    assert after["accuracy"] > 0.85
    assert task.metrics == {"accuracy": "max"}
    assert task.inner_optimizer == "adamw"


@pytest.mark.parametrize("options", [{"batch": 0}, {"shift": 8}, {"weight_decay": -1.0}])
def test_options_that_cannot_work_are_refused_by_name(options):
    (name,) = options
    with pytest.raises(ConfigError, match=f"^{name} = "):
        images.task(**options)


def test_without_scikit_learn_the_cure_is_named(monkeypatch):
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        images.load_digits()
