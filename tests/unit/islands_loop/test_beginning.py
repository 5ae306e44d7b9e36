"""What replaces unsynchronised parameters that were spoilt."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from islands.between_steps import InitialValues


def test_what_can_be_spoilt_comes_back_as_it_was_and_counters_and_keys_go_on():
    began = [
        np.full(3, 2, np.float32),
        np.full(3, 2, ml_dtypes.bfloat16),
        np.int32(4),
        jnp.full(3, 2, jnp.float32),
        jax.random.key(0),
        1.5,
    ]
    beginning = InitialValues(began)
    began[0][:] = np.nan  # training writes where it likes
    later = [
        np.full(3, np.nan, np.float32),
        np.full(3, np.inf, ml_dtypes.bfloat16),
        np.int32(9),
        jnp.full(3, jnp.nan, jnp.float32),
        jax.random.key(7),
        float("nan"),
    ]
    for _ in range(2):
        a, b, count, c, key, number = beginning.restored(later)
        assert (a.dtype, b.dtype, c.dtype) == (np.float32, ml_dtypes.bfloat16, jnp.float32)
        assert all(np.all(np.asarray(x, np.float32) == 2) for x in (a, b, c))
        assert (count, number) == (9, 1.5)
        assert np.array_equal(jax.random.key_data(key), jax.random.key_data(later[4]))
        a[:] = 5  # and again
