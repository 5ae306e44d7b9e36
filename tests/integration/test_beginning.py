"""Islands begin with a trained model from a file, or adapt one that never travels; others with another are refused."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from broker.base.errors import ConfigError
from tests.hub import Hub
from tests.training_loops import join, params_of, train


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path / "store", islands=2) as running:
        yield running


def model(path, value=3.0, dtype=np.float32):
    save_file(params_of(value, dtype), path)
    return path


def test_version_0_comes_from_the_file_and_who_joins_later_takes_the_runs(hub, tmp_path):
    with join(hub, params_of(), init=model(tmp_path / "m.safetensors", dtype=np.float16)) as first:
        params, _ = first.restore(params_of(), None)
        assert {name: np.unique(array).tolist() for name, array in params.items()} == {"w": [3.0], "b": [3.0]}
        assert hub.core.run.origin.inputs.keys() == {"init"}
        with pytest.raises(
            ConfigError, match=r"recipe.*init is [0-9a-f]{32} at the island, and [0-9a-f]{32} in the run"
        ):
            join(hub, params_of(), init=model(tmp_path / "other.safetensors", 3.5))
        train(first, params, until=lambda: max(first.versions) >= 2)
        with join(hub, params_of(7.0)) as later:
            taken, _ = later.restore(params_of(), None)
            assert all(np.all(array < 3.0) for array in taken.values())


def test_a_file_that_does_not_fit_is_refused_before_anything_is_sent_and_taken_in_part_where_told(hub, tmp_path):
    save_file({"w": params_of(3.0)["w"], "head": np.ones(2, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match=r"init = .*: 1 missing \(b\); 1 unexpected \(head\).*init_partial=True"):
        join(hub, params_of(), init=tmp_path / "m.safetensors")
    with join(hub, params_of(), init=tmp_path / "m.safetensors", init_partial=True) as island:
        params, _ = island.restore(params_of(), None)
    assert {name: np.unique(array).tolist() for name, array in params.items()} == {"w": [3.0], "b": [1.0]}


OF_BASE = {"^base": "base"}


def adapted(value=1.0, dtype=np.float32):
    return {"base": {"w": np.full((40, 30), value, dtype)}, "a": np.ones((40, 2), np.float32)}


def files(path, value=1.0):
    save_file({"w": np.full((40, 30), value, np.float32)}, path)
    return path


def test_a_base_is_in_no_version_and_an_island_with_another_is_told_the_first_tensor(hub, tmp_path):
    base = files(tmp_path / "base.safetensors")
    with join(hub, adapted(), kinds=OF_BASE, base=base) as first:
        first.restore(adapted(), None)
        assert hub.core.run.model.manifest.tensors().keys() == {"a"}
        changed = np.full((40, 30), 1.0, np.float32)
        changed[7, 3] = np.nextafter(np.float32(1), np.float32(2))
        save_file({"w": changed}, tmp_path / "other.safetensors")
        with pytest.raises(ConfigError, match=r"base w is [0-9a-f]{32} at the island, and [0-9a-f]{32} in the run"):
            join(hub, adapted(), kinds=OF_BASE, base=tmp_path / "other.safetensors")
        with join(hub, adapted(dtype=ml_dtypes.bfloat16), kinds=OF_BASE, base=base) as narrow:
            params, _ = narrow.restore(adapted(dtype=ml_dtypes.bfloat16), None)
            assert params["base"]["w"].dtype == ml_dtypes.bfloat16


def test_training_that_moves_the_base_ends_with_its_name(hub, tmp_path):
    base = files(tmp_path / "base.safetensors")

    def step(params):
        return {"base": {"w": params["base"]["w"] - np.float32(0.1)}, "a": params["a"] - np.float32(0.1)}

    said = r"params base/w .*is on every island's own disk"
    with pytest.raises(ConfigError, match=said), join(hub, adapted(), kinds=OF_BASE, base=base) as island:
        train(island, island.restore(adapted(), None)[0], step)


def test_one_side_of_a_base_alone_is_refused(hub, tmp_path):
    base = files(tmp_path / "base.safetensors")
    with pytest.raises(ConfigError, match="kinds of base/w = 'base': is of the base: name the model"):
        join(hub, adapted(), kinds=OF_BASE)
    with pytest.raises(ConfigError, match=r"base = .*: has no parameter that comes from it"):
        join(hub, adapted(), base=base)
