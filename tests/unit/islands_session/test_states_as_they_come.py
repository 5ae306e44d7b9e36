"""Optimizer states as they come: whatever a pytree holds is saved and given away bit for bit, or is refused by name."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from broker.base.errors import ConfigError
from islands.arrays import placement
from islands.session import checkpoint, state_parts
from islands.session.training_state import Needed, Position, Snapshot

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
LABELS = {"embed": "first", "layers": [{"w": "first", "b": "none"}], "scale": "none"}


#: Optimizers, each with a state of its own.
OPTIMIZERS = {
    "adamw on a schedule": optax.adamw(SCHEDULE),
    "sgd with momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "sgd without a state": optax.sgd(1e-2),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(1e-3),
    "MultiSteps that skips": optax.MultiSteps(optax.adam(1e-3), 2, should_skip_update_fn=optax.skip_not_finite),
    "hyperparameters in the state": optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE, momentum=0.9),
    "masks": optax.multi_transform({"first": optax.adam(1e-3), "none": optax.set_to_zero()}, LABELS),
    "what is not finite is skipped": optax.apply_if_finite(optax.adam(1e-3), 5),
    "noise": optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(7)), optax.lion(1e-3)),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-3),
    "averages": optax.chain(optax.adam(1e-3, mu_dtype=jnp.bfloat16), optax.ema(0.9, debias=True)),
    "a plateau": optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau(accumulation_size=50)),
    "l-bfgs": optax.lbfgs(),
}


OF_ONE_DTYPE = ("hyperparameters in the state", "l-bfgs")


class Nothing(NamedTuple):
    """As optax.EmptyState."""


@jax.tree_util.register_dataclass
@dataclass
class TrainState:
    """As that of Flax: some of its fields are no leaves."""

    step: Any
    opt_state: Any
    key: Any = None
    apply_fn: Any = field(default=np.tanh, metadata={"static": True})


class Network(eqx.Module):
    weight: Any
    frozen: bool = eqx.field(static=True, default=False)


def normed_and_dropped(seed):
    """Has statistics under a name that says nothing of them, and keys and counts of dropout."""
    return {"norm": nnx.BatchNorm(4, rngs=nnx.Rngs(seed)), "dropout": nnx.Dropout(0.5, rngs=nnx.Rngs(seed))}


def sharded(value):
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    return jax.device_put(jnp.full((4, 2), value), NamedSharding(mesh, PartitionSpec("x")))


FLOATS = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "float16", "bfloat16"]


def twice(array):
    return {"a": array, "b": array}


#: What else a state may hold: value -> the state.
STATES = {
    "None and empty containers": lambda v: [None, {}, (), optax.EmptyState(), optax.MaskedNode(), jnp.full(2, v)],
    "nothing": lambda v: None,
    "an array alone": lambda v: jnp.full(3, v),
    "a dataclass": lambda v: TrainState(step=int(v), opt_state=(Nothing(), jnp.full(2, v)), key=jax.random.key(int(v))),
    "an Equinox module": lambda v: Network(jnp.full((2, 2), v)),
    "a state of Flax NNX": lambda v: nnx.state(normed_and_dropped(int(v))),
    "typed keys": lambda v: [jax.random.key(int(v)), jax.random.key(int(v), impl="rbg")],
    "many typed keys": lambda v: jax.random.split(jax.random.key(int(v)), (2, 3)),
    "raw keys": lambda v: {"key": jax.random.PRNGKey(int(v))},
    "plain numbers": lambda v: {"step": int(v), "rate": v / 3, "on": v > 1, "z": complex(v, 1), "big": int(v) << 100},
    "infinite numbers": lambda v: [float("inf"), -float("inf"), float("nan"), jnp.full(2, v)],
    "texts": lambda v: {"name": "a" * int(v), "bytes": b"b" * int(v), "none": ""},
    "scalars of numpy": lambda v: [np.float32(v), np.int64(v), np.bool_(v > 1), ml_dtypes.bfloat16(v), np.complex64(v)],
    "texts of numpy": lambda v: np.array(["ab", "c"]),
    "times of numpy": lambda v: [np.datetime64(int(v), "s"), np.array([int(v)], "m8[s]")],
    "booleans": lambda v: {"mask": jnp.arange(3) < v, "host": np.arange(3) < v},
    "small floats and integers": lambda v: [jnp.full(3, v).astype(name) for name in (*FLOATS, "int4", "uint4", "int2")],
    "integers of two bits": lambda v: {"q": jnp.full(3000, v).astype("int2"), "w": jnp.full(2, v)},
    "integers of four bits": lambda v: {"q": jnp.full(3000, v).astype("int4"), "w": jnp.full(2, v)},
    "small ones of numpy": lambda v: [np.full(3, v).astype(t) for t in (ml_dtypes.int4, ml_dtypes.float8_e3m4)],
    "weakly typed arrays": lambda v: {"rate": jnp.asarray(v), "count": jnp.asarray(int(v)), "all": jnp.full((2, 2), v)},
    "arrays without elements": lambda v: [jnp.zeros((0, 3)), np.zeros((2, 0), np.int8), jnp.full(1, v)],
    "arrays in Fortran's order": lambda v: np.asfortranarray(np.full((2, 3), v)),
    "strided arrays, and bytes in another order": lambda v: [np.arange(9.0)[::2] * v, np.full(3, v, ">f4")],
    "sharded arrays": lambda v: {"m": sharded(v), "free": jnp.full(2, v)},
    "a key on a device": lambda v: jax.device_put(jax.random.key(int(v)), jax.devices()[0]),
    "masks that are not finite": lambda v: {"causal": jnp.where(jnp.tri(3) > 0, 0.0, -jnp.inf), "w": jnp.full(2, v)},
    "one array in two places": lambda v: twice(jnp.full(2, v)),
}


def alike(leaf, other):
    """Whether two leaves are the same to a training step, and to the last bit."""
    assert type(leaf) is type(other), (type(leaf), type(other))
    if not hasattr(other, "dtype"):
        assert leaf == other or (leaf != leaf and other != other)
        return
    assert (leaf.shape, leaf.dtype, bits(leaf)) == (other.shape, other.dtype, bits(other))
    if isinstance(leaf, jax.Array):
        assert (leaf.committed, leaf.sharding) == (other.committed, other.sharding)
        assert getattr(leaf, "weak_type", False) == getattr(other, "weak_type", False)  # a random key has none


def bits(leaf):
    return placement.to_host(leaf).tobytes()


def assert_same(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    jax.tree.map(alike, tree, other)


def through_a_file(state, fresh, path):
    """Saves a state and loads it where ``fresh`` stands, as Island.restore does."""
    checkpoint.check(fresh)
    snapshot = Snapshot(state=checkpoint.copied(state), cursor=None, local=())
    checkpoint.save(path, snapshot, (), Position(4, 40), 1, checkpoint.Newest())
    saved = checkpoint.load(path)
    needed = Needed(state=checkpoint.leaves_of(fresh), local=())
    assert state_parts.unfit(saved, needed) == ""
    return checkpoint.restored(fresh, saved.state)


def through_a_donor(state, fresh):
    """Gives a state to another island, as parts of messages."""
    snapshot = Snapshot(state=checkpoint.copied(state), cursor=None, local=())
    parts, size = state_parts.cut(checkpoint.packed(snapshot, (), Position(4, 40), 1))
    needed = Needed(state=checkpoint.leaves_of(fresh), local=())
    assert size <= needed.most_bytes
    found, flaw = state_parts.read(parts, size, needed)
    assert (flaw, found.at) == ("", Position(4, 40))
    return checkpoint.restored(fresh, found.state)


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_as_it_was(name, tmp_path):
    make = STATES[name]
    state, fresh = make(3.0), make(1.0)
    assert checkpoint.difference(state, checkpoint.leaves_of(fresh)) == ""
    assert_same(through_a_file(state, fresh, tmp_path / "c"), state)
    assert_same(through_a_donor(state, fresh), state)


@pytest.mark.rotating(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_from_its_checkpoint_in_the_same_train_step(name, tmp_path):
    optimizer, traced = optax.with_extra_args_support(OPTIMIZERS[name]), []

    def loss(params, seed):
        batch = jnp.linspace(-1, 1, 32).reshape(4, 8) * seed
        hidden = jnp.tanh(batch @ params["layers"][0]["w"] + params["layers"][0]["b"])
        return jnp.mean((hidden @ params["embed"].T * params["scale"]) ** 2)

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # it is compiled in half the time
    def step(params, opt_state, seed):
        traced.append(1)
        value, grads = jax.value_and_grad(loss)(params, seed)
        extra = {"value": value, "grad": grads, "value_fn": lambda p: loss(p, seed)}
        updates, opt_state = optimizer.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    w = jnp.sin(jnp.arange(64.0)).reshape(8, 8)
    embed = jnp.cos(jnp.arange(128.0)).reshape(16, 8).astype(jnp.float32 if name in OF_ONE_DTYPE else jnp.bfloat16)
    params = {"embed": embed, "layers": [{"w": w, "b": jnp.zeros(8)}], "scale": jnp.ones(())}
    fresh = opt_state = optimizer.init(params)
    for seed in range(3):
        params, opt_state = step(params, opt_state, seed)
    before = len(traced)
    again = through_a_file(opt_state, fresh, tmp_path / "c")
    assert_same(again, through_a_donor(opt_state, fresh))
    assert list(map(bits, jax.tree.leaves(again))) == list(map(bits, jax.tree.leaves(opt_state)))
    straight, resumed = step(params, opt_state, 3), step(params, again, 3)
    assert_same(resumed, straight)
    assert len(traced) == before, "no leaf has changed to what needs another trace"


class Tensor:
    """What a tensor of torch shows."""

    shape, dtype = (3,), "torch.float32"


REFUSED = {
    "a tensor of torch": ({"m": Tensor()}, "state m = 'Tensor'"),
    "an object": ({"m": object()}, "state m = 'object'"),
    "an unregistered dataclass": ({"m": [Position(1, 2)]}, "state m/0 = 'Point'"),
    "a function": ({"f": np.tanh}, "state f = 'ufunc'"),
    "a set": ({"f": {1, 2}}, "state f = 'set'"),
    "an array of objects": ({"o": np.array([None])}, "state o = 'object[1]'"),
    "a masked array": ({"o": np.ma.masked_array([1.0], mask=True)}, "state o = 'MaskedArray'"),
    "a shape without values": ({"s": jax.ShapeDtypeStruct((2,), jnp.float32)}, "state s = 'ShapeDtypeStruct'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_file_holds_is_refused_by_name(name):
    state, named = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        checkpoint.check(state)
    assert named in str(refused.value)


def test_a_mask_is_no_plain_boolean():
    saved, fresh = {"on": np.ones(3, bool)}, {"on": True}
    assert checkpoint.difference(saved, checkpoint.leaves_of(fresh)) == "saved was on bool[3], needed is on bool[]"
    assert "needed is on bool[3]" in checkpoint.difference(fresh, checkpoint.leaves_of(saved))


def test_local_parameters_come_back_in_their_place_and_with_their_masks(tmp_path):
    def local(value):
        counts = {"seen": np.float32(value), "on": np.arange(3) < value, "four": jnp.full(2, value).astype(jnp.int4)}
        mask = jnp.where(jnp.tri(3) > 0, 0.0, -jnp.inf)
        return {**counts, "mask": mask, "key": jax.random.key(int(value))}

    fresh, position = local(1.0), Position(4, 40)
    snapshot = Snapshot(state=(), cursor=None, local=tuple(local(2.0).values()))
    needed = Needed(state=(), local=list(fresh.items()))
    checkpoint.save(tmp_path / "c", snapshot, list(fresh), position, 1, checkpoint.Newest())
    saved = checkpoint.load(tmp_path / "c")
    given, _ = state_parts.read(*state_parts.cut(checkpoint.packed(snapshot, list(fresh), position, 1)), needed)
    for found in (saved, given):
        assert state_parts.unfit(found, needed) == ""
        arrays = [array for *_, array in found.local]
        assert_same(list(map(placement.from_host, arrays, fresh.values())), list(local(2.0).values()))
