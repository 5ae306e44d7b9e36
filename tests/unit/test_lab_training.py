"""When the laboratory really runs a step and takes a copy, and that nobody can tell."""

from types import SimpleNamespace

import numpy as np
import pytest

from broker.wire.fragments import partition
from broker.wire.messages import Codec, Version
from broker.wire.ranges import StepRange
from broker.wire.tensors import decode_tensor, encode_tensor
from islands.protocol.data_shares import DataShare
from islands.tasks.task import Task
from ops.lab.strides import Strides
from ops.lab.training import Rule, TrainingIsland

STEPS = StepRange(from_step=0, to_step=1, from_tokens=0, to_tokens=1)


def counting(ran):
    """Returns a task of two tensors, whose every element says how many steps were run."""

    def train(params, state, batch, schedule):
        ran.append(batch)
        return {name: value + np.float32(1) for name, value in params.items()}, state, 0.0

    return Task(
        init=lambda _: ({"a": np.zeros((4, 4), np.float32), "b": np.zeros((4, 4), np.float32)}, {}),
        train=train,
        data=lambda _: iter(range(1000)),
        evaluate=lambda _: 0.0,
        tokens_per_step=1,
        fresh_optimizer=lambda _: {},
    )


@pytest.fixture
def ran():
    return []


@pytest.fixture
def island(ran):
    rule = Rule(kinds={}, codec=Codec.F32, feedback=True, seed=0, fleet_tokens=1, total_tokens=1000)
    task = counting(ran)
    return begun(TrainingIsland(task, rule, Strides(task)))


def begun(made):
    """Has an island hold version 0, all zero."""
    core = SimpleNamespace(manifest=partition(made.tensors, 2), schedule_tokens=float)
    made.joined(core, DataShare(index=0, count=1))
    for p in (0, 1):
        install(made, p, 0.0, keep=0.0)
    return made


def install(island, p, value, *, keep):
    payload = (encode_tensor(np.full((4, 4), value, np.float32), Codec.F32),)
    version = Version(shard=0, epoch=1, fragment_id=p, fragment_version=0, digest="", contributions=(), payload=payload)
    island.prepare(version, keep)
    island.install(p)


def train(island, steps):
    for _ in range(steps):
        island.train(0)


def captured(island, p):
    """Returns how many steps were in the copy, by the pseudo-gradient."""
    (encoded,) = island.capture(p, STEPS)
    return -float(decode_tensor(encoded)[0, 0])


def test_no_step_runs_before_somebody_asks_what_it_made(island, ran):
    train(island, 3)
    island.copy(0)
    train(island, 4)
    assert ran == []
    assert captured(island, 0) == 3
    assert ran == [0, 1, 2], "and none that came after the copy"


def test_a_copy_is_what_was_there_at_its_boundary_whatever_runs_before_it_is_asked_for(island, ran):
    train(island, 3)
    island.copy(0)
    train(island, 4)
    install(island, 1, 0.0, keep=1.0)  # runs every step
    assert len(ran) == 7
    train(island, 1)
    assert captured(island, 0) == 3


def test_of_several_copies_the_last_one_counts_and_the_others_are_never_made(island, monkeypatch):
    made = []
    copy_now = TrainingIsland._copy_now

    def counted(self, p):
        made.append(p)
        copy_now(self, p)

    monkeypatch.setattr(TrainingIsland, "_copy_now", counted)
    for _ in range(5):
        train(island, 1)
        island.copy(0)
    train(island, 2)
    assert captured(island, 0) == 5
    assert made == [0]


def test_what_is_installed_drops_the_copy_of_its_fragment(island):
    train(island, 1)
    island.copy(0)
    install(island, 0, 0.0, keep=1.0)
    with pytest.raises(KeyError):
        island.capture(0, STEPS)


def test_a_copy_is_kept_where_parameters_stay_valid_and_made_where_they_do_not(island):
    for keeps in (True, False):
        island._strides.agrees = keeps
        train(island, 1)
        island.copy(0)
        train(island, 1)
        here = island._parameters.of_fragment(island.params, 0)
        install(island, 1, 0.0, keep=1.0)
        copies = island._copies[0]
        assert all(copy is not leaf for copy, leaf in zip(copies, here, strict=True)), "a step lies between"
        island.copy(0)
        island._copy_now(0)
        own = island._parameters.of_fragment(island.params, 0)
        assert [copy is leaf for copy, leaf in zip(island._copies[0], own, strict=True)] == [keeps] * len(own)


def test_steps_do_not_stop_for_a_copy_that_was_forgotten(island, monkeypatch):
    rows = []
    monkeypatch.setattr(island._strides, "run", lambda params, state, steps: rows.append(len(steps)) or (params, state))
    train(island, 2)
    island.copy(0)
    train(island, 2)
    island.forget(0)
    install(island, 1, 0.0, keep=1.0)
    train(island, 2)
    island.copy(0)
    train(island, 1)
    install(island, 1, 0.0, keep=1.0)
    assert rows == [4, 2, 1]
