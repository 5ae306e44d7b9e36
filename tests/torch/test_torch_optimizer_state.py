"""The state of optimizers as a tree: its form before the first step, and the way through a checkpoint's file."""

import numpy as np
import pytest
import torch
from torch import nn

from broker.base.errors import ConfigError
from islands.session import checkpoint, state_parts
from islands.session.training_state import Needed, Position, Snapshot
from islands.torch.optimizer_state import LARGE_BYTES, OptimizerState

pytestmark = pytest.mark.timeout(240)  # the first optimizer loads torch's compiler
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw with amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adam with a rate on the device": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), foreach=False),
    "fused adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
}


class Float32Moments(torch.optim.Optimizer):
    """Momentum in float32 whatever the parameters, and a count that is a Python number."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["steps"], state["sum"], state["nothing"] = 0, torch.zeros_like(p, dtype=torch.float32), None
                state["steps"] += 1
                state["sum"].mul_(0.9).add_(p.grad.float())
                p.sub_((group["lr"] * state["sum"]).to(p.dtype))


class Wrapper(torch.optim.Optimizer):
    """Shows another optimizer's state and groups as its own, as Accelerate's does: without hooks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state, lambda self, value: setattr(self.optimizer, "state", value))
    param_groups = property(
        lambda self: self.optimizer.param_groups, lambda self, value: setattr(self.optimizer, "param_groups", value)
    )

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.optimizer.step(closure)


class WithAverages(torch.optim.Optimizer):
    """Steps by another optimizer, and has a state of its own beside that one's."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2} | settings)


def step(model, optimizer, number, scaler=None):
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    inputs = torch.from_numpy(np.random.default_rng(number).standard_normal((4, 6))).to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    scaler.scale(model(inputs).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def through_a_file(path, state):
    """What is read back of a state that was written."""
    snapshot = Snapshot(state=checkpoint.copied(state), cursor=None, local=())
    checkpoint.save(path, snapshot, [], Position(3, 30), 1, checkpoint.Newest())
    return checkpoint.load(path)


def unfit(saved, state):
    return state_parts.unfit(saved, Needed(state=checkpoint.leaves_of(state), local=[]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "float32 moments"])
def test_training_goes_on_from_a_file_as_if_it_had_never_stopped(name, dtype, tmp_path):
    make = OPTIMIZERS.get(name, lambda p: Float32Moments(p, lr=1e-2))
    model = network(dtype)
    optimizer = make(model.parameters())
    state = OptimizerState([optimizer])
    for number in range(3):
        step(model, optimizer, number)
    saved, again = through_a_file(tmp_path / "c", state), network(dtype)
    again.load_state_dict(model.state_dict())
    another = make(again.parameters())
    fresh = OptimizerState([another])
    assert unfit(saved, fresh) == "", "known before its first step"
    checkpoint.restored(fresh, saved.state)
    assert checkpoint.difference(fresh, checkpoint.leaves_of(state)) == ""
    for number in range(3, 6):
        step(model, optimizer, number)
        step(again, another, number)
    for name, expected in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], expected), name


def test_the_form_is_found_without_a_trace_in_the_optimizer_its_parameters_or_its_schedule():
    model = network()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    before, calls = {n: x.clone() for n, x in model.state_dict().items()}, []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    OptimizerState([optimizer])
    assert (len(optimizer.state), calls, schedule.last_epoch) == (0, [], 0)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    step(model, optimizer, 0)
    assert len(calls) == 1


def test_wrappers_of_an_optimizer_are_looked_through_and_left_as_they_were():
    model = network()
    inner = adamw(model)
    wrapper = Wrapper(Wrapper(inner))
    state, groups = inner.state, inner.param_groups
    saved = OptimizerState([wrapper])
    assert saved.optimizers == (inner,)
    assert inner.state is state
    assert inner.param_groups is groups
    assert list(saved.form()["optimizers"][0]["state"]) == [f"{n:06}" for n, _ in enumerate(model.parameters())]
    step(model, wrapper, 1)
    assert set(saved.tree()["optimizers"][0]["state"]["000000"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_the_optimizer_of_accelerate_is_such_a_wrapper_and_one_with_a_state_of_its_own_is_none():
    from accelerate import Accelerator  # seconds, which the other tests do without

    inner = adamw(network())
    assert OptimizerState([Accelerator(cpu=True).prepare(inner)]).optimizers == (inner,)
    outer = WithAverages(inner)
    assert OptimizerState([outer]).optimizers == (outer,)


def test_a_large_parameter_is_tried_without_its_memory():
    model = nn.Linear(LARGE_BYTES // 4 + 1, 1, bias=False)
    form = OptimizerState([adamw(model)]).form()
    leaf = form["optimizers"][0]["state"]["000000"]["exp_avg"]
    assert leaf.shape == model.weight.shape
    assert leaf.to_host().strides == (0, 0)


def test_a_parameter_that_never_had_a_gradient_fits_all_the_same(tmp_path):
    model = network()
    unused = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([*model.parameters(), unused])
    state = OptimizerState([optimizer])
    step(model, optimizer, 0)
    assert unused not in optimizer.state
    assert unfit(through_a_file(tmp_path / "c", state), OptimizerState([optimizer])) == ""


def test_numbers_of_the_groups_come_back_and_flags_stay_those_of_the_script(tmp_path):
    first = adamw(network(), foreach=True)
    saved = through_a_file(tmp_path / "c", OptimizerState([first]))
    second = adamw(network(), lr=5e-2, betas=(0.8, 0.9), foreach=False)
    state = OptimizerState([second])
    checkpoint.restored(state, saved.state)
    (group,) = second.param_groups
    assert (group["lr"], group["betas"], group["foreach"]) == (1e-2, (0.9, 0.999), False)
    assert len(group["params"]) == 4


def test_a_state_of_another_optimizer_or_model_does_not_fit(tmp_path):
    adam = OptimizerState([adamw(network())])
    saved = through_a_file(tmp_path / "c", adam)
    assert "of another model or optimizer" in unfit(saved, OptimizerState([torch.optim.SGD(network().parameters())]))
    wider = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    assert "of another model or optimizer" in unfit(saved, OptimizerState([adamw(wider)]))


def test_a_group_that_is_added_makes_another_state():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    state = OptimizerState([torch.optim.AdamW(model[0].parameters(), lr=1e-2)])
    began = checkpoint.forms_of(checkpoint.leaves_of(state))
    assert checkpoint.difference(state, began) == ""
    state.optimizers[0].add_param_group({"params": model[1].parameters()})
    assert "arrays were saved" in checkpoint.difference(state, began)


def test_a_scaler_comes_back_with_its_scale_and_its_count_and_begins_again_when_all_is_spoilt(tmp_path):
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    model, ours = network(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    state = OptimizerState([optimizer], ours)
    for number in range(3):
        step(model, optimizer, number, ours)
    assert ours.get_scale() == 2048
    saved, theirs = through_a_file(tmp_path / "c", state), scaler()
    fresh = OptimizerState([torch.optim.SGD(network().parameters(), lr=1e-2)], theirs)
    assert unfit(saved, fresh) == ""
    checkpoint.restored(fresh, saved.state)
    assert theirs.state_dict() == ours.state_dict()
    state.reset()
    assert ours.get_scale() == 1024


def test_copies_of_a_state_are_of_the_values_of_then():
    model = network()
    optimizer = adamw(model)
    state = OptimizerState([optimizer])
    step(model, optimizer, 0)
    copied = checkpoint.copied(state)
    leaf = copied["optimizers"][0]["state"]["000000"]["exp_avg"]
    before = leaf.to_host().copy()
    step(model, optimizer, 1)
    assert np.array_equal(leaf.to_host(), before)
    assert not np.array_equal(optimizer.state[next(model.parameters())]["exp_avg"].numpy(), before)


def test_what_no_checkpoint_carries_is_refused_with_a_cure():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    state = OptimizerState([optimizer])
    optimizer.state[next(model.parameters())]["function"] = print
    with pytest.raises(ConfigError, match=r"optimizer = 'builtin_function_or_method'.*optimizer=None"):
        checkpoint.check(state)


def test_an_optimizer_that_needs_a_closure_trains_and_its_state_is_left_out(caplog):
    state = OptimizerState([torch.optim.LBFGS(network().parameters())])
    assert state.form()["optimizers"][0]["state"] == {}
    assert "island.optimizer_form" in caplog.text
