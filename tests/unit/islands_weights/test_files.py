"""Trained models are opened as other tools write them, and told apart by digests of their bytes."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from broker.base.errors import ConfigError
from islands.weights.files import combined, grouped, open_weights

TENSORS = {
    "layers.0.w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "layers.1.w": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "scale": np.array(3, np.float16),
    "empty": np.zeros((0, 2), np.float32),
}


def shards(folder, tensors=TENSORS):
    folder.mkdir()
    weight_map = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, its in weight_map.items() if its == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def single(path, tensors=TENSORS):
    save_file(tensors, path)
    return path


def orbax(folder, tensors=TENSORS):
    pytest.importorskip("orbax.checkpoint")
    from islands.weights import orbax

    orbax.write({name: array for name, array in tensors.items() if array.size}, folder)
    return folder


def test_a_model_in_one_file_in_a_directory_and_in_shards_is_the_same(tmp_path):
    opened = [open_weights(single(tmp_path / "model.safetensors")), open_weights(tmp_path)]
    opened.append(open_weights(shards(tmp_path / "shards")))
    for weights in opened:
        assert weights.keys() == TENSORS.keys()
        for name, array in TENSORS.items():
            assert (weights[name].dtype, weights.shape(name)) == (array.dtype, array.shape)
            np.testing.assert_array_equal(weights[name], array)
    assert len({weights.digest for weights in opened}) == 1


def test_an_orbax_checkpoint_goes_in_and_out_also_below_the_newest_step(tmp_path):
    full = {name: array for name, array in TENSORS.items() if array.size}
    (tmp_path / "run" / "9").mkdir(parents=True)
    orbax(tmp_path / "run" / "10")
    weights = open_weights(tmp_path / "run")
    assert {name: (a.dtype, a.tobytes()) for name, a in weights.items()} == {
        name: (a.dtype, a.tobytes()) for name, a in full.items()
    }
    assert weights.digest == open_weights(single(tmp_path / "x.safetensors", full)).digest


def test_digests_tell_the_first_tensor_that_differs_and_its_number_format(tmp_path):
    other = TENSORS | {"layers.0.w": TENSORS["layers.0.w"] + np.eye(3, 4, dtype=np.float32) * 1e-6}
    cast = TENSORS | {"scale": TENSORS["scale"].astype(np.float32)}
    ours, theirs, third = (
        open_weights(single(tmp_path / f"{n}.safetensors", each)).digests
        for n, each in enumerate((TENSORS, other, cast))
    )
    assert [name for name in ours if ours[name] != theirs[name]] == ["layers.0.w"]
    assert [name for name in ours if ours[name] != third[name]] == ["scale"]


def test_digests_are_kept_beside_the_file_until_it_changes(tmp_path, monkeypatch):
    file = single(tmp_path / "x.safetensors")
    first = open_weights(file).digest
    with monkeypatch.context() as patch:
        patch.setattr("islands.weights.files._digest", lambda array: pytest.fail("computed again"))
        assert open_weights(file).digest == first
    single(file, TENSORS | {"scale": np.array(4, np.float16)})
    assert open_weights(file).digest != first


def test_a_folder_that_cannot_be_written_has_its_digests_in_the_cache(tmp_path, monkeypatch):
    file = single(tmp_path / "x.safetensors")
    (tmp_path / f".{file.name}.digests.json").mkdir()  # nothing can be put there, not even by root
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = open_weights(file).digest
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1
    monkeypatch.setattr("islands.weights.files._digest", lambda array: pytest.fail("computed again"))
    assert open_weights(file).digest == first


def test_many_digests_are_told_in_groups_by_name():
    digests = {f"layers.{layer}.{part}": f"{layer}{part}" for layer in range(4) for part in "abc"} | {"head": "h"}
    assert grouped(digests, 13) == digests
    found = grouped(digests, 5)
    assert found.keys() == {"head", *(f"layers.{layer}" for layer in range(4))}
    assert found["layers.2"] == combined({f"layers.2.{part}": f"2{part}" for part in "abc"})
    assert grouped(digests, 1).keys() == {"head", "layers"}


def truncated(folder):
    shards(folder)
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def missing_shard(folder):
    shards(folder)
    (folder / "model-1.safetensors").unlink()


def index_of_others(folder):
    shards(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("scale", "scales"))


def outside(folder):
    shards(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-1", "../model-1"))


def pickled(folder):
    folder.mkdir()
    (folder / "pytorch_model.bin").touch()


def no_index(folder):
    shards(folder)
    (folder / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "is no file or directory here"),
        (lambda folder: folder.mkdir(), "has none of model.safetensors.index.json"),
        (lambda folder: folder.write_text("no model at all"), "is no whole safetensors file"),
        (truncated, r"model-1.safetensors'.*: is no whole safetensors file \(.*: fetch it again"),
        (missing_shard, "model-1.safetensors.* cannot be read"),
        (index_of_others, "differ about 2 tensors, such as scale"),
        (outside, "which is outside of its directory"),
        (no_index, "is no index of shards"),
        (pickled, "pytorch_model.bin is a pickle"),
    ],
)
def test_what_is_no_whole_model_is_refused_by_name_with_the_cure(tmp_path, make, said):
    make(tmp_path / "model")
    with pytest.raises(ConfigError, match=said) as refused:
        open_weights(tmp_path / "model")
    assert refused.value.field == "init"
