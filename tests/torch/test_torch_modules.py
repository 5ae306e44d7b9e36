"""Modules as trees: names, ties, frozen parameters, buffers, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import islands.torch
from broker.base.errors import ConfigError
from islands.arrays.parameters import Parameters
from islands.arrays.partition import tensor_specs
from islands.torch.modules import kinds_of, leaves_of, unsaid_statistics, unwrapped

pytestmark = pytest.mark.timeout(240)  # the first optimizer loads torch's compiler


class Tied(nn.Module):
    """An embedding that is the output head too, and a cache that is in no state dict."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 30)
        self.norm = nn.BatchNorm1d(30)
        self.head = nn.Linear(30, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(5), persistent=False)

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


def test_names_are_those_of_the_state_dict_and_tied_weights_are_one_leaf_with_the_first():
    leaves = leaves_of(model := Tied())
    assert leaves.keys() == model.state_dict().keys()
    assert leaves["head.weight"] is leaves["embed.weight"]
    specs = tensor_specs(leaves, kinds_of(model, None))
    assert [spec.name for spec in specs if "weight" in spec.name] == ["embed.weight", "norm.weight"]
    assert Parameters(leaves).tied == (), "one object cannot become two"


def test_a_tree_that_was_written_to_in_place_stays_the_tree_that_it_is():
    leaves = leaves_of(nn.Linear(2, 2))
    assert Parameters(leaves).replace(leaves, {0: list(leaves.values())}) is leaves


def test_the_specs_are_those_of_a_dict_of_numpy_arrays_with_the_same_names():
    model = Tied().to(torch.bfloat16)
    arrays = {name: x.float().numpy() for name, x in model.state_dict().items()}
    arrays["head.weight"] = arrays["embed.weight"]
    here, there = (tensor_specs(tree, kinds_of(model, None)) for tree in (leaves_of(model), arrays))
    assert [(s.name, s.shape, s.kind) for s in here] == [(s.name, s.shape, s.kind) for s in there]
    assert {s.dtype for s in here if s.kind != "local"} == {"bfloat16"}


def test_buffers_are_local_and_parameters_without_a_gradient_frozen_unless_kinds_says_otherwise():
    model = Tied()
    model.norm.bias.requires_grad_(False)
    kinds = {s.name: str(s.kind) for s in tensor_specs(leaves_of(model), kinds_of(model, None))}
    assert kinds["norm.bias"] == "frozen"
    assert {name for name, kind in kinds.items() if kind == "local"} == {
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    }  # fmt: skip
    given = {"norm.bias": "local", "running_mean": "mean"}
    kinds = {s.name: str(s.kind) for s in tensor_specs(leaves_of(model), kinds_of(model, given))}
    assert (kinds["norm.bias"], kinds["norm.running_mean"]) == ("local", "mean")


def test_a_compiled_module_has_the_names_of_the_module_inside():
    model = Tied()
    assert unwrapped(torch.compile(model, backend="eager")) is model


def test_names_are_without_those_of_wrappers_around_layers():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    names = leaves_of(model).keys()
    model[0], model[2] = torch.compile(model[0], backend="eager"), checkpoint_wrapper(model[2])
    model[1].requires_grad_(False)
    assert any("_orig_mod" in name for name in model.state_dict())
    assert leaves_of(model).keys() == names
    kinds = {each.name: str(each.kind) for each in tensor_specs(leaves_of(model), kinds_of(model, None))}
    assert [name for name, kind in kinds.items() if kind == "frozen"] == ["1.bias", "1.weight"]


def test_floating_buffers_that_nothing_was_said_of_are_named():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))  # its counter is an integer
    assert unsaid_statistics(model, None) == ["1.running_mean", "1.running_var"]
    assert unsaid_statistics(model, {"_var$": "local"}) == ["1.running_mean"]
    assert unsaid_statistics(model, {"running_": "local"}) == unsaid_statistics(nn.LayerNorm(3), None) == []


def test_a_buffer_that_a_module_replaces_is_followed_and_a_parameter_that_is_replaced_is_told():
    model = Tied()
    leaves = leaves_of(model)
    model.norm.running_mean = torch.full((30,), 2.0)
    assert leaves["norm.running_mean"].to_host()[0] == 2
    model.head.weight = nn.Parameter(torch.zeros(50, 30))
    with pytest.raises(ConfigError, match=r"params embed.weight = .*never replace them"):
        leaves["embed.weight"].to_host()


def on_meta():
    with torch.device("meta"):
        return nn.Linear(3, 2)


def sparse():
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.eye(3).to_sparse())
    return model


REFUSED = {
    "on the meta device": (on_meta, r"params weight = .*float32\[2, 3\].* is on the meta device .*to_empty\(device"),
    "lazy": (lambda: nn.LazyLinear(3), r"params weight = .*has no shape yet: call the model with one batch"),
    "a dict of tensors": (lambda: {"w": torch.ones(2)}, r"model = 'dict'.*must be a torch.nn.Module"),
    "a sparse parameter": (sparse, r"params weight = .*is no plain tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_join_is_refused_by_name_before_anything_is_connected(name):
    make, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        islands.torch.join("tcp://127.0.0.1:1", make())


def test_a_tree_of_tensors_is_sent_here_by_the_other_join():
    with pytest.raises(ConfigError, match=r"params w = .*islands.torch.join\(address, model, optimizer\)"):
        islands.join("tcp://127.0.0.1:1", {"w": torch.ones(2)})
    with pytest.raises(ConfigError, match=r"params v = .*not both.*tensor.detach\(\).numpy\(\)"):
        islands.join("tcp://127.0.0.1:1", {"v": torch.ones(2), "w": np.ones(2, np.float32)})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"optimizer": "adamw"}, r"optimizer = .*must be a torch.optim.Optimizer"),
        ({"optimizer": [1.0]}, r"optimizer = .*must be a torch.optim.Optimizer"),
        ({"scaler": 65536.0}, r"scaler = 'float'"),
    ],
)
def test_what_is_no_optimizer_or_scaler_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        islands.torch.join("tcp://127.0.0.1:1", nn.Linear(2, 2), **wrong)


def test_a_name_that_no_join_has_is_refused_with_the_nearest():
    with pytest.raises(TypeError, match=r"no argument 'recipes'; did you mean recipe\?"):
        islands.torch.join("tcp://127.0.0.1:1", nn.Linear(2, 2), recipes={})


def test_processes_that_train_one_model_together_are_refused_with_the_cure(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"torch.distributed = 'a world of 2 processes'.*as an island of its own"):
        islands.torch.join("tcp://127.0.0.1:1", nn.Linear(2, 2))
