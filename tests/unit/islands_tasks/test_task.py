"""Tasks by name and option, and the default one from options to held-out loss."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from itertools import islice

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from broker.base.errors import ConfigError
from broker.wire.fragments import Kind
from islands.arrays.partition import tensor_specs
from islands.arrays.tree import flatten
from islands.tasks import language
from islands.tasks import model as transformer
from islands.tasks.corpus import load_corpus
from islands.tasks.data import Windows, evenly
from islands.tasks.evaluate import load_file_of
from islands.tasks.task import DataShare, Schedule, Task, evaluated, held_out_loss, load_task

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine


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
    module.refuses = lambda *, size=0: transformer.ModelConfig(width=size, depth=1, heads=1, hidden=1)
    monkeypatch.setitem(sys.modules, "tasks_of_a_test", module)


def test_a_task_is_loaded_with_its_options(tasks):
    assert load_task("tasks_of_a_test:good", {"width": 5}).tokens_per_step == 5
    assert load_task("tasks_of_a_test:good", {"whatever": 1}).tokens_per_step == 3


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (":task", {}, "must read package.module:function"),
        ("no_such_package.module:task", {}, "there is no module no_such_package"),
        ("tasks_of_a_test:constant", {}, "has no function constant"),
        ("tasks_of_a_test:wrong", {}, "returned dict: it must return an islands.tasks.task.Task"),
        ("tasks_of_a_test:strict", {"needed": 1, "sise": 2}, r"task.sise = 2"),
        ("tasks_of_a_test:refuses", {}, "task.width = 0"),
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


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of text that is easy to learn."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"file {i}: " + "to be or not to be, that is the question. " * 20)
    return str(folder)


SMALL = {"width": 32, "depth": 1, "heads": 2, "hidden": 32}


@pytest.fixture(scope="module", autouse=True)
def tiny(text):
    """The default task; its model is smaller than the smallest that has a name, and is compiled sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(transformer.PRESETS, "tiny", SMALL)
        yield language.task(model="tiny", data=[text], batch=4, context=32, warm_up_steps=5, held_out_tokens=512)


@pytest.mark.full("compiles for seconds")
def test_islands_stacked_under_vmap_take_the_steps_they_take_one_by_one(tiny):
    """A laboratory trains all its islands in one program; the schedule's numbers differ between them."""
    islands, steps = 2, 3
    shares = [tiny.data(DataShare(index=i, count=islands)) for i in range(islands)]
    batches = [[next(share) for share in shares] for _ in range(steps)]
    schedules = [[Schedule(step + 10 * i, 100 + i) for i in range(islands)] for step in range(steps)]

    def stacked(trees):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    together = jax.jit(jax.vmap(tiny.train, in_axes=(0, 0, 0, 0)))
    params, state = stacked([tiny.init(i) for i in range(islands)])
    for batch, schedule in zip(batches, schedules, strict=True):
        params, state, losses = together(params, state, np.stack(batch), stacked(schedule))

    for i in range(islands):
        alone, alone_state = tiny.init(i)
        for step in range(steps):
            alone, alone_state, loss = tiny.train(alone, alone_state, batches[step][i], schedules[step][i])
        # Batched matrix products add in another order. Where a gradient is close to 0, Adam turns the difference into
        # one of the step itself: 3 steps of at most 0.0008 each.
        assert float(losses[i]) == pytest.approx(float(loss), rel=1e-4)
        for name, expected in flatten(alone).items():
            np.testing.assert_allclose(flatten(params)[name][i], expected, rtol=1e-4, atol=1e-5, err_msg=name)
        assert int(state.num_steps[i]) == int(alone_state.num_steps) == steps


@pytest.mark.parametrize("experts", [0, 4])
def test_held_out_losses_are_those_of_the_model_however_many_fill_a_batch(text, experts):
    """22 sequences in batches of 4: the last one is filled up, which an expert's places do not notice."""
    options = {"model": "tiny", "data": [text], "context": 32, "experts": experts, "batch": 4}
    params, _ = language.task(**options).init(0)
    config = transformer.ModelConfig(vocabulary=256, experts=experts, balance=0.0, **SMALL)
    windows = Windows(load_corpus([text]).held_out, 32, vocabulary=256, sources="")
    losses = language._held_out_losses(windows, config, rows=4, most=22)(params)
    assert losses.shape == (22,)
    assert language.task(**options, held_out_tokens=22 * 32).evaluate(params) == pytest.approx(losses.mean())
    numbers = evenly(windows, 22)
    cross_entropy = jax.jit(lambda params, tokens: transformer.loss(params, tokens, config))
    for start in range(0, 22, 4):
        expected = float(cross_entropy(params, windows.take(numbers[start : start + 4])))
        if experts == 0 or start < 20:  # two sequences by themselves have other places in the experts than among four
            assert losses[start : start + 4].mean() == pytest.approx(expected, rel=1e-5)


def test_all_of_what_is_held_out_is_evaluated_when_it_is_less_than_asked_for(tmp_path):
    text = tmp_path / "short.txt"
    text.write_bytes(bytes(range(1, 250)) * 160)
    task = language.task(model="tiny", data=[text], context=64, held_out_tokens=10**9)
    windows = Windows(load_corpus([text]).held_out, 64, vocabulary=256, sources="")
    params, _ = task.init(0)
    losses = language._held_out_losses(
        windows, transformer.ModelConfig(vocabulary=256, **SMALL), rows=8, most=len(windows)
    )
    assert task.evaluate(params) == pytest.approx(losses(params).mean(), rel=1e-5)


@pytest.mark.full("trains for seconds")
def test_a_model_of_pieces_learns_and_says_how_long_they_are(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task = language.task(model="tiny", data=["python:optax"], bpe=512, batch=4, context=32, held_out_tokens=512)
    assert re.search(r"128 tokens per step, vocabulary 512, [1-4]\.\d\d bytes per token$", task.describe)
    params, state = task.init(0)
    before = task.evaluate(params)
    assert before == pytest.approx(np.log(512), abs=0.1)
    for step, batch in enumerate(islice(task.data(DataShare(index=0, count=1)), 60)):
        params, state, _ = task.train(params, state, batch, Schedule(step, 60))
    assert task.evaluate(params) < 0.95 * before


@pytest.mark.parametrize(("embeddings", "kind", "unit_axes"), [("mean", Kind.MEAN, 0), ("rows", Kind.RDA, 1)])
def test_embeddings_are_merged_by_the_mean_or_row_by_row(text, embeddings, kind, unit_axes):
    task = language.task(model="tiny", data=[text], embeddings=embeddings, held_out_tokens=512)
    specs = {spec.name: spec for spec in tensor_specs(task.init(0)[0], task.kinds, task.unit_axes)}
    assert (specs["embed"].kind, specs["embed"].unit_axes) == (kind, unit_axes)
    assert {str(spec.kind) for name, spec in specs.items() if name.endswith("query")} == {"rda"}


def test_one_path_instead_of_a_list_is_told_as_that(text):
    with pytest.raises(ConfigError, match=r"must be a list: write \["):
        load_corpus(str(text))


@pytest.mark.full("compiles for seconds")
def test_what_is_computed_in_bfloat16_steps_parameters_in_float32(text):
    steps = []
    for compute in ("float32", "bfloat16"):
        task = language.task(model="16x1", data=[text], batch=4, context=32, compute=compute, held_out_tokens=512)
        before = jax.tree.map(np.asarray, task.init(0)[0])
        params, _, loss = task.train(*task.init(0), next(task.data(DataShare(index=0, count=1))), Schedule(50, 100))
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
        update = np.concatenate([(b - a).ravel() for a, b in zip(*map(jax.tree.leaves, (before, params)), strict=True)])
        steps.append((float(loss), task.evaluate(params), update))
    assert steps[0][:2] == pytest.approx(steps[1][:2], rel=0.01)
    assert np.corrcoef(steps[0][2], steps[1][2])[0, 1] > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "huge"}, "model = 'huge'"),
        ({"model": "8x"}, "WIDTHxDEPTH such as 384x5"),
        ({"model": "8x0"}, "depth = 0"),
        ({"embeddings": "columns"}, "embeddings = 'columns'"),
        ({"b2": 1.0}, "b2 = 1.0"),
        ({"optimizer": "muon", "momentum": 1.0}, "momentum = 1.0"),
        ({"momentum": 0.9}, "momentum = 0.9"),
        ({"optimizer": "sgd"}, "optimizer = 'sgd'"),
        ({"dtype": "float16"}, "dtype = 'float16'"),
        ({"compute": "float16"}, "compute = 'float16'"),
        ({"batch": 0}, "batch = 0"),
        ({"context": 0}, "context = 0"),
        ({"context": 10**6}, "raise the amount|give more"),
        ({"learning_rate": -1.0}, "learning_rate = -1.0"),
        ({"experts": 2, "top_k": 5}, "top_k = 5"),
        ({"vocabulary": 100}, "vocabulary = 100"),
        ({"bpe": 100}, "bpe = 100"),
        ({"data": ["python:no_such_package"]}, "data = 'python:no_such_package'"),
        ({"data": ["/no/such/path"]}, "data = '/no/such/path'"),
    ],
)
def test_options_of_the_default_task_that_cannot_work_are_refused(text, options, message):
    with pytest.raises(ConfigError, match=message):
        language.task(**{"data": [text]} | options)


def test_a_model_file_is_judged_as_the_parameters_it_holds(tiny, tmp_path):
    params, _ = tiny.init(1)
    save_file({name: np.asarray(x) for name, x in flatten(params).items()}, tmp_path / "model.safetensors")
    assert tiny.evaluate(load_file_of(tiny, tmp_path / "model.safetensors")) == tiny.evaluate(params)


@pytest.mark.parametrize(
    ("metrics", "returned", "found"),
    [
        ({}, 1.5, {"loss": 1.5}),
        ({"accuracy": "max"}, np.float32(0.5), {"accuracy": 0.5}),
        ({"accuracy": "max"}, {"loss": 1.5, "accuracy": np.ones(1)}, {"loss": 1.5, "accuracy": 1.0}),
        ({"accuracy": "max", "perplexity": "min"}, {"perplexity": 9}, {"perplexity": 9.0}),
        ({}, {"whatever": 3}, {"whatever": 3.0}),
    ],
)
def test_what_is_evaluated_has_a_name_and_is_a_plain_number(metrics, returned, found):
    task = dataclasses.replace(a_task(), metrics=metrics, evaluate=lambda params: returned)
    assert evaluated(task, {}) == found
    assert {type(number) for number in evaluated(task, {}).values()} == {float}


@pytest.mark.parametrize(
    ("metrics", "returned", "told"),
    [
        ({"accuracy": "max", "perplexity": "min"}, 0.5, "must map the names accuracy, perplexity to numbers"),
        ({}, None, "must return the held-out loss, a number, or a mapping"),
        ({}, {}, "must map names of metrics to numbers"),
        ({}, {1: 0.5}, "must map names of metrics to numbers"),
        ({}, {"two\nlines": 0.5}, "must map names of metrics to numbers"),
        ({}, {"accuracy": "high"}, "must return the held-out loss, a number, or a mapping"),
        ({}, (0.5, 0.6), "must return the held-out loss, a number, or a mapping"),
    ],
)
def test_what_is_no_number_with_a_name_is_refused(metrics, returned, told):
    task = dataclasses.replace(a_task(), metrics=metrics, evaluate=lambda params: returned)
    with pytest.raises(ConfigError, match=rf"task\.evaluate = .*{told}"):
        evaluated(task, {})


def test_an_accuracy_is_not_taken_for_a_loss():
    task = dataclasses.replace(a_task(), metrics={"accuracy": "max"}, evaluate=lambda params: 0.5)
    with pytest.raises(ConfigError, match=r"task\.evaluate = {'accuracy': 0.5}: .*must return a loss"):
        held_out_loss(task, {})
    assert held_out_loss(dataclasses.replace(task, evaluate=lambda params: {"accuracy": 0.5, "loss": 2}), {}) == 2.0
