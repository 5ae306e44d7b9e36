"""Trees as they come: whatever a pytree holds joins and is adopted into as it is, or is refused by name."""

import importlib.machinery
import sys
import types
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from broker.base.errors import ConfigError
from broker.wire.fragments import Kind, partition
from broker.wire.headers import Limits
from broker.wire.tensors import decode_tensor
from islands.arrays.parameters import Parameters
from islands.arrays.partition import describe_kinds, tensor_specs
from islands.arrays.placement import Placement, is_array, to_host
from islands.arrays.reference import Reference, encode_seed
from islands.arrays.tree import _plain_leaves, named_leaves
from islands.between_steps import InitialValues
from islands.interface import arguments
from tests.unit.islands_session.test_states_as_they_come import assert_same, bits, sharded

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine


class Pair(NamedTuple):
    left: object
    right: object


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    weight: object
    bias: object = None
    name: str = field(default="dense", metadata={"static": True})


class Unkeyed:
    """A node of somebody's own, which shows its children to nobody."""

    def __init__(self, *children):
        self._children = children


jax.tree_util.register_pytree_node(Unkeyed, lambda node: (node._children, None), lambda _, each: Unkeyed(*each))


class Unregistered:
    """A class that nobody has registered."""


class Table(dict):
    """A subclass that nobody has registered: a leaf, for JAX too."""


class Dataset:
    """An array of another library, with a dtype of numpy."""

    shape, dtype = (2,), np.dtype("float32")


class Metres(np.ndarray):
    """An array of numpy with something of its own."""


class Tensor:
    """What a tensor of torch shows."""

    shape, dtype = (3,), "torch.float32"


Tensor.__module__ = "torch"


class Module:
    """What a module of torch shows."""

    def named_parameters(self):
        return iter([("w", Tensor())])


FLOATS = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]


def f32(*shape):
    return jnp.arange(float(np.prod(shape)), dtype=jnp.float32).reshape(shape)


def weight(dtype=np.float32):
    return np.ones((4, 3), dtype)


#: What a tree of parameters may hold -> the tree.
TAKEN = {
    "an array alone": lambda: f32(3, 2),
    "bytes in another order": lambda: {"w": np.arange(6, dtype=">f4").reshape(2, 3)},
    "tuples and lists": lambda: ((f32(2, 2), [f32(3)]), f32(1)),
    "a named tuple": lambda: {"pair": Pair(f32(2), {"deep": f32(2, 2)})},
    "dicts of every sort": lambda: OrderedDict(z=f32(2), a=defaultdict(list, k=f32(3)), n={2: f32(1), 10: f32(2)}),
    "None and empty containers": lambda: [f32(2), None, {}, (), [], Pair((), None)],
    "a dataclass": lambda: {"layers": [Layer(f32(2, 2), f32(2)), Layer(f32(2, 2))]},
    "a node without names": lambda: {"own": Unkeyed(f32(2), Unkeyed(), f32(3))},
    "an Equinox module": lambda: eqx.filter(eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)), eqx.is_array),
    "scalars": lambda: {"w": weight(), "jax": jnp.float32(2), "array": np.array(2, np.float32)},
    "numpy scalars": lambda: {"w": weight(), "f": np.float32(2), "d": np.float64(3), "b": ml_dtypes.bfloat16(4)},
    "weakly typed arrays": lambda: {"w": jnp.full((2, 2), 1.5), "temperature": jnp.asarray(1.0)},
    "integers and booleans": lambda: {"w": f32(2), "i": jnp.arange(3), "u": np.uint8(3), "mask": np.ones(2, bool)},
    "integers of four bits": lambda: {"w": f32(2), "q": jnp.ones(4, jnp.int4)},
    "random keys": lambda: [f32(2), jax.random.key(1), jax.random.PRNGKey(2), jax.random.split(jax.random.key(3), 2)],
    "arrays without elements": lambda: {"w": f32(2), "nothing": f32(0, 3)},
    "every float": lambda: [jnp.ones((2, 2), name) for name in FLOATS],
    "numpy and JAX side by side": lambda: {"host": weight(), "device": f32(2, 2)},
    "numpy in Fortran's order": lambda: {"w": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))},
    "a read-only array": lambda: {"w": np.broadcast_to(np.float32(1), (3, 2))},
    "committed and sharded arrays": lambda: [jax.device_put(f32(2), jax.devices()[0]), sharded(2.0), f32(2)],
    "tied weights": lambda: (lambda embedding: [embedding, f32(2, 2), embedding])(f32(6, 2)),
    "complex numbers that are local": lambda: {"w": f32(2), "fft": jnp.ones(2, jnp.complex64)},
    "frozen parts": lambda: {"base": [weight(jnp.bfloat16), jnp.ones(4, jnp.int8)], "lora": [f32(4, 1), f32(1, 4)]},
    "a base that never travels": lambda: {"base": weight(jnp.bfloat16), "lora": [f32(4, 1), f32(1, 4)]},
}
#: The kinds that are given for some of them.
KINDS = {
    "complex numbers that are local": {"fft": "local"},
    "frozen parts": {"^base/": "frozen"},
    "a base that never travels": {"^base": "local"},
}


def traces(*trees):
    """How often a train step is traced for trees, one after the other; of leaves that JAX takes."""
    traced = []
    step = jax.jit(lambda leaves: traced.append(1))
    for tree in trees:
        step(jax.tree.map(lambda x: x if getattr(x.dtype, "isnative", True) else None, tree))
    return len(traced)


def joins(params, kinds=None):
    """What islands.join does with a tree: returns what goes to the run, and what knows the way to each leaf."""
    specs = tensor_specs(params, kinds)
    assert all(str(spec.kind) in describe_kinds(specs) for spec in specs)
    moving = tuple(spec for spec in specs if spec.kind is not Kind.LOCAL)
    arguments.check_join(moving, "demo", Limits())
    return moving, Parameters(params)


@pytest.mark.parametrize("keep", [0.0, 1.0])
@pytest.mark.parametrize("name", TAKEN)
def test_a_tree_is_adopted_into_as_it_is(name, keep):
    params = TAKEN[name]()
    moving, parameters = joins(params, KINDS.get(name))
    manifest = partition(moving, 2)
    parameters.assign(manifest)
    installed = {}
    for p, tensors in enumerate(manifest.fragments):
        leaves, reference = parameters.of_fragment(params, p), Reference(tensors)
        here = Placement(leaves)
        here.warm_up(leaves, keep)
        version = encode_seed(tensors, [to_host(leaf) for leaf in leaves])
        reference.installed(reference.shift(version, 0, here.dtypes), 0, here.dtypes, ())
        assert list(map(bits, here.copy(leaves))) == list(map(bits, leaves))
        installed[p] = here.install(leaves, here.place(reference.shift(version, keep, here.dtypes), keep), keep)
    again = parameters.replace(params, installed)
    beginning = InitialValues(parameters.of_none(params))
    again = parameters.replace_local(again, beginning.restored(parameters.of_none(again)))
    parameters.check(again)
    assert_same(again, params)
    assert traces(params, again) == 1, "the same train step serves"


#: What is refused -> the tree, the leaf or field that is named, and what the cure says.
REFUSED = {
    "a Python float": ({"w": weight(), "scale": 0.5}, "params scale = 'float'", "np.float32(x)"),
    "a Python bool": ({"w": weight(), "flag": True}, "params flag = 'bool'", "leave it out"),
    "text": ({"w": weight(), "name": "dense"}, "params name = 'str'", "leave it out"),
    "a function": ({"w": weight(), "act": np.tanh}, "params act = 'ufunc'", "eqx.is_array"),
    "an object of one's own": ({"net": Unregistered()}, "params net = 'Unregistered'", "register_dataclass"),
    "a subclass of dict": ({"net": Table(w=f32(2))}, "params net = 'Table'", "register_dataclass"),
    "a tensor of torch": ({"w": Tensor()}, "params w = 'torch.float32[3]'", "with islands.torch.join"),
    "a module of torch": (Module(), "params = 'Module'", "with islands.torch.join(address, model, optimizer)"),
    "tensors of torch beside arrays": ({"w": weight(), "v": Tensor()}, "params v", "or give tensor.detach().numpy()"),
    "a shape without values": (jax.eval_shape(lambda: {"w": f32(2)}), "params w = 'ShapeDtypeStruct'", "every leaf"),
    "a masked array": ({"w": np.ma.masked_array(weight(), mask=False)}, "params w = 'MaskedArray'", "np.asarray"),
    "an array that holds more": ({"w": weight().view(Metres)}, "params w = 'Metres'", "np.asarray"),
    "complex numbers": ({"w": np.ones(2, np.complex64)}, "params w = 'complex64[2]'", "real and imaginary parts apart"),
    "an array of another library": ({"a": [Dataset()]}, "params a/0 = 'Dataset'", "an array of numpy or"),
    "gradients of integers": ({"w": weight(), "g": np.zeros(2, jax.dtypes.float0)}, "params g", "leave it out"),
    "nothing at all": ({}, "params = '0 arrays'", "nothing is left to synchronise"),
    "None": (None, "params = '0 arrays'", "nothing is left to synchronise"),
    "integers alone": ({"i": np.arange(3)}, "params = '0 arrays'", "nothing is left to synchronise"),
    "keys that cannot be sorted": ({"w": {1: weight(), "1": weight()}}, "tree", "must have an order"),
    "two leaves of one path": ({"a/b": weight(), "a": {"b": weight()}}, "params = 'a/b'", "rename one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_synchronised_is_refused_by_name_and_with_a_cure(name):
    params, named, cure = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        joins(params)
    assert named in str(refused.value)
    assert cure in str(refused.value)


@pytest.mark.parametrize(
    ("frozen", "cure"),
    [
        (np.array([0, -(1 << 24) - 1]), "float32, which rounds integers that are as large: make it local"),
        (np.array([0, -np.inf], np.float32), "not finite in float32, and a run cannot begin with them: make it local"),
    ],
)
def test_a_frozen_part_whose_values_would_not_arrive_is_refused(frozen, cure):
    params = {"base": frozen, "lora": weight()}
    specs = tensor_specs(params, {"base": "frozen"})
    with pytest.raises(ConfigError) as refused:
        encode_seed(specs, list(params.values()))
    assert "params = 'base'" in str(refused.value)
    assert cure in str(refused.value)
    assert tensor_specs(params, {"base": "local"})[0].kind is Kind.LOCAL


def test_integers_that_float32_holds_are_frozen_as_they_are():
    base = np.array([(1 << 24) - 1, 1 - (1 << 24), 7])
    (spec, _) = tensor_specs({"base": base, "lora": weight()}, {"base": "frozen"})
    assert np.array_equal(decode_tensor(*encode_seed((spec,), [base])).astype(base.dtype), base)


def test_without_jax_a_dict_whose_keys_have_no_order_is_refused_by_its_path():
    with pytest.raises(ConfigError, match=r"^tree net/0 = 'a dict with keys of several sorts'.*make all of them texts"):
        list(_plain_leaves({"net": [{1: weight(), "1": weight()}]}, ()))


def test_scalars_of_numpy_are_not_tied_for_being_one_object():
    one = np.float32(1)
    params = {"a": one, "b": one, "on": np.bool_(True), "off": np.bool_(True)}
    assert [spec.name for spec in tensor_specs(params)] == ["a", "b", "off", "on"]
    assert Parameters(params).tied == ()


def test_a_jax_that_another_thread_is_importing_just_now_is_not_asked(monkeypatch):
    halfway = types.ModuleType("jax")
    halfway.__spec__ = importlib.machinery.ModuleSpec("jax", None)
    halfway.__spec__._initializing = True  # as Python has it
    monkeypatch.setitem(sys.modules, "jax", halfway)
    tree = {"a": np.zeros(2), "b": [np.ones(3)]}
    assert [name for name, _ in named_leaves(tree)] == ["a", "b/0"]
    assert is_array(tree["a"])
    assert not is_array("text")
