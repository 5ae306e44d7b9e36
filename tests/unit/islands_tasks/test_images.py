"""The image classifier that ships: its data, its batches, and that it learns."""

import importlib.util
from itertools import islice

import numpy as np
import pytest

from broker.base.errors import ConfigError
from islands.protocol.data_shares import DataShare
from islands.tasks import images
from islands.tasks.task import Schedule, evaluated


@pytest.fixture(scope="module")
def digits():
    return images.load_digits()


def test_the_images_are_those_that_the_library_itself_loads(digits):
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    theirs = sklearn_datasets.load_digits()
    assert np.array_equal(digits.pixels.reshape(-1, 64) * 16, theirs.data)
    assert np.array_equal(digits.labels, theirs.target)


def test_one_in_five_is_held_out_and_never_trained_on(digits):
    train, held_out = images.split(digits)
    assert (len(train.labels), len(held_out.labels)) == (1437, 360)
    assert np.bincount(held_out.labels).min() > 20  # of each digit
    assert not {each.tobytes() for each in train.pixels} & {each.tobytes() for each in held_out.pixels}


def test_a_batch_is_a_function_of_the_share_and_its_number(digits):
    variants = images.moved(images.split(digits)[0], 1)

    def batches(index, cursor):
        share = DataShare(index=index, count=2, cursor=cursor, seed=5)
        return list(islice(images.batches(variants, share, batch=8), 2))

    (_, second), (again, _), (other, _) = batches(0, 4), batches(0, 5), batches(1, 5)
    assert np.array_equal(second.pixels, again.pixels)
    assert np.array_equal(second.labels, again.labels)
    assert not np.array_equal(again.pixels, other.pixels)


def test_a_moved_image_loses_nothing_but_what_leaves_it(digits):
    some = images.Images(digits.pixels[:3], digits.labels[:3])
    assert np.array_equal(images.moved(some, 0).pixels[0], some.pixels)
    variants = images.moved(some, 1).pixels
    assert variants.shape == (9, 3, 8, 8, 1)
    assert np.array_equal(variants[4], some.pixels)
    assert np.array_equal(variants[0][:, 1:, 1:], some.pixels[:, :-1, :-1])
    assert not variants[0][:, 0].any()


@pytest.mark.full("trains for seconds")
def test_it_learns_to_read_digits():
    task = images.task(batch=32, channels=8, hidden=32, shift=0, learning_rate=0.01)
    params, state = task.init(0)
    batches = task.data(DataShare(index=0, count=1))
    before = evaluated(task, params)
    for step in range(120):
        params, state, _ = task.train(params, state, next(batches), Schedule(step, 120))
    after = evaluated(task, params)
    assert before["loss"] == pytest.approx(np.log(10), rel=1e-5)
    assert after["accuracy"] > 0.85 > before["accuracy"]
    assert after["loss"] < 0.6
    assert (task.better("accuracy"), task.better("loss")) == ("max", "min")
    assert task.inner_optimizer == "adamw"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 0}, "batch = 0: must be at least 1"),
        ({"channels": -1}, "channels = -1: must be at least 1"),
        ({"shift": 9}, "shift = 9: must be from 0 to 7 pixels"),
        ({"weight_decay": -1.0}, "weight_decay = -1.0: must be 0 or more"),
        ({"learning_rate": 0.0}, "learning_rate = 0.0: must be a positive number"),
    ],
)
def test_an_option_that_cannot_work_is_refused(options, said):
    with pytest.raises(ConfigError) as caught:
        images.task(**options)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (None, "pip install scikit-learn, on every island"),
        (importlib.util.spec_from_file_location("sklearn", "/nowhere/__init__.py"), "csv.gz.*does not hold the digits"),
    ],
    ids=["no package", "no file"],
)
def test_without_the_package_or_its_file_the_cure_is_named(monkeypatch, spec, told):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ConfigError, match=told):
        images.load_digits()
