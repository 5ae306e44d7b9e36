"""A state on its way between islands: cut, joined, and what of another island's is refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from islands import checkpoint, state_parts
from islands.donation import PART_BYTES
from islands.exchange import Position, Snapshot


def adam_of(value=1.0, size=3):
    params = {"w": jnp.full((size, 2), value), "b": jnp.full(2, value, jnp.bfloat16)}
    adam = optax.adam(1e-3)
    return {"adam": adam.update(params, adam.init(params), params)[1], "key": jax.random.key(int(value)), "lr": value}


def sent(state, local=()):
    snapshot = Snapshot(state=checkpoint.copied(state), cursor=0, local=tuple(x for _, x in local))
    return state_parts.cut(checkpoint.packed(snapshot, [name for name, _ in local], Position(40, 400), 2))


def needed(state, local=()):
    return state_parts.Needed(state=checkpoint.leaves_of(state), local=list(local))


def test_an_adam_state_with_its_count_a_key_and_bfloat16_arrives_as_it_was():
    given, stats = adam_of(2.0), [("stats", np.full(4, 3, ml_dtypes.bfloat16))]
    parts, size = sent(given, stats)
    found, flaw = state_parts.read(parts, size, needed(adam_of(1.0), stats))
    assert flaw == ""
    taken = checkpoint.restored(adam_of(1.0), found.state)
    assert int(taken["adam"][0].count) == 1
    assert taken["adam"][0].count.dtype == given["adam"][0].count.dtype
    assert np.array_equal(jax.random.key_data(taken["key"]), jax.random.key_data(given["key"]))
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), taken["adam"], given["adam"])
    assert all(jax.tree.leaves(same))
    assert found.at == Position(40, 400)


def test_a_large_state_is_cut_into_equal_parts_and_the_last_one_filled_up():
    state = {"m": np.arange(600_001, dtype=np.float32), "odd": np.arange(3, dtype=np.uint8)}
    parts, size = sent(state)
    lengths = [memoryview(each.data).nbytes for (each,) in parts]
    assert lengths[:-1] == [PART_BYTES] * (len(parts) - 1)
    assert 0 <= sum(lengths) - size < 4
    found, flaw = state_parts.read(parts, size, needed(state))
    assert (flaw, size) == ("", len(state_parts.joined(parts, size)))
    assert size <= needed(state).most_bytes
    assert np.array_equal(found.state[0][2], state["m"])


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"m": np.zeros(4, np.float32)}, "of another optimizer"),
        ({"m": np.zeros(3, np.float16)}, "of another optimizer"),
        ({"v": np.zeros(3, np.float32)}, "of another optimizer"),
        ({"m": np.zeros(3, np.float32), "n": np.zeros(3)}, "of another optimizer"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(wanted, says):
    parts, size = sent({"m": np.zeros(3, np.float32)})
    found, flaw = state_parts.read(parts, size, needed(wanted))
    assert found is None
    assert says in flaw


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_a_state_that_is_not_finite_is_refused(bad, dtype):
    state = {"m": np.array([1, bad, 2]).astype(dtype)}
    found, flaw = state_parts.read(*sent(state), needed(state))
    assert found is None
    assert flaw == "m is not finite"


def test_bytes_that_are_no_state_are_refused():
    state = {"m": np.zeros(3, np.float32)}
    parts, size = sent(state)
    for wrong in (size - 1, size - 20, 4):
        found, flaw = state_parts.read(parts, wrong, needed(state))
        assert found is None
        assert "cannot be read" in flaw


def test_an_array_that_is_not_what_it_is_called_is_refused(monkeypatch):
    monkeypatch.setattr(checkpoint, "sort_of", lambda leaf: "float32")
    parts, size = sent({"m": np.zeros(3, np.int8)})
    monkeypatch.undo()
    found, flaw = state_parts.read(parts, size, needed({"m": np.zeros(3, np.float32)}))
    assert found is None
    assert flaw == "m is called float32 and holds int8[3]"
