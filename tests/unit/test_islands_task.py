"""Tasks by name and option, and the default one from options to held-out loss."""

from __future__ import annotations

import sys
import types
from itertools import islice

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from broker.errors import ConfigError
from islands import language
from islands.evaluate import evaluate_file, place
from islands.task import DataShare, Schedule, Task, load_task
from islands.tree import flatten


def a_task(*, width: int = 3, depth: int = 1, **rest) -> Task:
    """A task that does nothing; ``width`` tells it apart."""
    params = {"w": np.zeros((width, 2), np.float32), "seen": np.zeros((), np.int32)}
    return Task(
        init=lambda seed: (params, None),
        train=lambda params, state, batch, schedule: (params, state, 0.0),
        data=lambda share: iter(()),
        evaluate=lambda params: float(params["w"].sum()),
        tokens_per_step=width,
        fresh_optimizer=lambda params: None,
    )


@pytest.fixture
def tasks(monkeypatch):
    """A module ``tasks_of_a_test`` with some functions in it."""
    module = types.ModuleType("tasks_of_a_test")
    module.good = a_task
    module.strict = lambda *, needed, size=1: a_task(width=size)
    module.wrong = lambda: {"not": "a task"}
    module.constant = 3

    def refuses(*, size=0):
        raise ConfigError("size", size, "must be positive")

    module.refuses = refuses
    monkeypatch.setitem(sys.modules, "tasks_of_a_test", module)


def test_a_task_is_loaded_with_its_options(tasks):
    assert load_task("tasks_of_a_test:good", {"width": 5}).tokens_per_step == 5
    assert load_task("tasks_of_a_test:good", {"whatever": 1}).tokens_per_step == 3


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("islands.language", {}, "must read package.module:function"),
        (":task", {}, "must read package.module:function"),
        ("no_such_package.module:task", {}, "there is no module no_such_package"),
        ("islands.no_such_module:task", {}, "there is no module islands.no_such_module"),
        ("tasks_of_a_test:absent", {}, "module tasks_of_a_test has no function absent"),
        ("tasks_of_a_test:constant", {}, "has no function constant"),
        ("tasks_of_a_test:wrong", {}, "returned dict: it must return an islands.task.Task"),
        ("tasks_of_a_test:strict", {"needed": 1, "sise": 2}, r"task.sise = 2: .* it has: needed, size"),
        ("tasks_of_a_test:strict", {}, "task.needed = None: .* needs this option"),
        ("tasks_of_a_test:refuses", {}, "task.size = 0: must be positive"),
    ],
)
def test_a_task_that_cannot_be_loaded_is_refused_with_the_cure(tasks, path, options, message):
    with pytest.raises(ConfigError, match=message):
        load_task(path, options)


def test_a_task_whose_own_import_is_missing_is_told_from_one_that_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "needy_task_of_a_test.py").write_text("import a_framework_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="imports a_framework_nobody_has, which is not installed"):
        load_task("needy_task_of_a_test:task", {})


def test_a_step_trains_at_least_one_token():
    with pytest.raises(ConfigError, match="tokens_per_step = 0"):
        a_task(width=0)


# --- the default task -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of text that is easy to learn."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"file {i}: " + "to be or not to be, that is the question. " * 20)
    return str(folder)


@pytest.fixture(scope="module")
def tiny(text):
    return language.task(model="tiny", data=[text], batch=4, context=32, warm_up_steps=5, held_out_tokens=512)


def test_the_default_task_learns(tiny):
    params, state = tiny.init(0)
    before = tiny.evaluate(params)
    batches = tiny.data(DataShare(index=0, count=2))
    for step, batch in enumerate(islice(batches, 60)):
        params, state, loss = tiny.train(params, state, batch, Schedule(step, 60))
    assert before == pytest.approx(np.log(256), abs=0.1)
    assert float(loss) < 0.7 * before
    assert tiny.evaluate(params) < 0.7 * before
    assert tiny.evaluate(params) == tiny.evaluate(params)


def test_the_default_task_describes_itself(tiny):
    assert tiny.describe == "123,200 parameters, 128 tokens per step, vocabulary 256"
    assert tiny.tokens_per_step == 128
    assert sum(x.size for x in jax.tree.leaves(tiny.init(0)[0])) == 123_200


def test_a_mixture_of_experts_is_one_setting(text):
    task = language.task(model="tiny", data=[text], batch=4, context=32, experts=4, held_out_tokens=512)
    params, state = task.init(0)
    params, state, loss = task.train(params, state, next(task.data(DataShare(index=0, count=1))), Schedule(0, 0))
    assert np.isfinite(float(loss))
    assert flatten(params)["layers/0/mlp/experts/up"].shape == (4, 64, 192)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "huge"}, "model = 'huge': must be one of tiny, small, medium"),
        ({"dtype": "float16"}, "dtype = 'float16': must be one of float32, bfloat16"),
        ({"batch": 0}, "batch = 0"),
        ({"context": 0}, "context = 0"),
        ({"context": 10**6}, "raise the amount|give more"),
        ({"learning_rate": -1.0}, "learning_rate = -1.0"),
        ({"experts": 2, "top_k": 5}, "top_k = 5"),
        ({"vocabulary": 100}, "vocabulary = 100"),
        ({"data": ["/no/such/path"]}, "data = '/no/such/path': does not exist"),
    ],
)
def test_options_of_the_default_task_that_cannot_work_are_refused(text, options, message):
    with pytest.raises(ConfigError, match=message):
        language.task(**{"data": [text]} | options)


# --- a model file ---------------------------------------------------------------------------------------------


def test_a_model_file_is_judged_as_the_parameters_it_holds(tiny, tmp_path):
    params, _ = tiny.init(1)
    save_file({name: np.asarray(x) for name, x in flatten(params).items()}, tmp_path / "model.safetensors")
    assert evaluate_file(tiny, tmp_path / "model.safetensors") == tiny.evaluate(params)


def test_local_tensors_are_in_no_file_and_keep_their_first_value():
    params = place(a_task(), {"w": np.ones((3, 2))}, source="x")
    assert params["w"].dtype == np.float32
    assert params["w"].sum() == 6
    assert params["seen"] == 0


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, r"lacks \['w'\]"),
        ({"w": np.ones((3, 2)), "v": np.ones(1)}, r"the unknown \['v'\]"),
        ({"w": np.ones((2, 2))}, r"should have the shape \(3, 2\)"),
    ],
)
def test_a_file_of_another_model_is_refused(arrays, message):
    with pytest.raises(ConfigError, match=message):
        place(a_task(), arrays, source="model.safetensors")


def test_a_file_that_is_no_model_is_refused(tiny, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    for path in (tmp_path / "model.safetensors", tmp_path / "absent.safetensors"):
        with pytest.raises(ConfigError, match="cannot be read as safetensors"):
            evaluate_file(tiny, path)


def test_a_task_whose_own_code_fails_is_named_with_the_line(tmp_path, monkeypatch):
    (tmp_path / "broken_task.py").write_text("def task():\n    return jax_taks()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"NameError: name 'jax_taks' is not defined \(.*broken_task.py, line 2\)"):
        load_task("broken_task:task", {})
