"""The training thread of one of several hosts: each boundary does what the plans say, and no more."""

import numpy as np
import pytest

from broker.wire.fragments import partition
from islands.agreed_steps import AgreedSteps
from islands.agreement.messages import Plan
from islands.arrays.partition import tensor_specs
from islands.hosts.plans import NEVER, Plans
from islands.session.array_work import ArrayWork
from islands.session.exchange import Exchange, JoinedRun
from islands.session.training_state import Position
from tests.island_hand import SETTINGS

PARAMS = {"w": np.ones((4, 3), np.float32)}


@pytest.fixture
def made():
    exchange, array_work = Exchange(), ArrayWork(PARAMS, None)
    manifest = partition(tensor_specs(PARAMS, None), 1)
    array_work.open(manifest)
    exchange.membership = JoinedRun(
        run_id="demo",
        island_id="island-0",
        incarnation=1,
        start=Position(0, 0),
        settings=SETTINGS,
        num_fragments=1,
        moving=manifest.moving,
    )
    plans = Plans(exchange, speaks=True)
    yield AgreedSteps(array_work, exchange, plans), plans, exchange
    array_work.close()


def copied(exchange):
    return list(exchange.moments.popleft().copied)


def test_a_plan_for_a_training_that_stands_still_is_carried_out_at_once_and_once(made):
    steps, plans, exchange = made
    assert not steps.has_news(None)
    plans.stand(Plan(copies=(0,)))
    assert steps.has_news(None)
    steps.run(PARAMS, Position(1, 10), None)
    assert copied(exchange) == [0]
    assert not steps.has_news(None)


def test_a_step_has_work_where_the_hosts_have_agreed_on_a_plan_for_it(made):
    steps, plans, exchange = made
    assert plans.gate.promise(1, 3, Plan(copies=(0,)))
    plans.gate.decide(1, fixed=True)
    assert [steps.due(step, None) for step in (1, 2, 3)] == [False, False, True]
    steps.run(PARAMS, Position(3, 30), None)
    assert copied(exchange) == [0]
    assert not steps.due(4, None)


def test_after_the_last_step_no_plan_for_a_later_one_is_promised(made):
    steps, plans, exchange = made
    steps.run(PARAMS, Position(2, 20), None, stopped=True)
    assert copied(exchange) == [0]
    assert (plans.stopped, plans.passed) == (True, NEVER)
    assert not plans.gate.promise(1, 9, Plan())
