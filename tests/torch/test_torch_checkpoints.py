"""A torch distributed checkpoint goes in and out, bit for bit, in one process."""

import numpy as np
import pytest
import torch

import islands
from broker.base.errors import ConfigError
from islands.torch import checkpoints
from islands.torch.conversion import as_array
from islands.weights.files import open_weights


def test_a_checkpoint_has_the_bytes_that_went_in_and_is_read_by_name(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 2))
    state = {name: as_array(tensor) for name, tensor in module.state_dict().items()}
    checkpoints.write(state, tmp_path / "dcp")
    weights = open_weights(tmp_path / "dcp")
    assert {name: (a.dtype, a.tobytes()) for name, a in weights.items()} == {
        name: (a.dtype, a.tobytes()) for name, a in state.items()
    }
    loaded = islands.load(tmp_path / "dcp", like={"1/weight": np.zeros((2, 4), np.float32)}, partial=True)
    np.testing.assert_array_equal(loaded["1/weight"], state["1.weight"])


def test_a_checkpoint_that_is_cut_off_is_refused_by_name(tmp_path):
    checkpoints.write({"w": np.ones(1000, np.float32)}, tmp_path / "dcp")
    for file in (tmp_path / "dcp").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match="is no whole torch distributed checkpoint"):
        open_weights(tmp_path / "dcp")
