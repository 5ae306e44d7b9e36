"""The size of a model: as people write it, or from its files."""

import json
import math
import struct

import pytest

from broker.base.errors import ConfigError
from ops.forecast.footprint import cut
from ops.forecast_commands.model_size import Lora, parse_parameters, read_model


@pytest.mark.parametrize(
    ("text", "parameters"),
    [("5e9", 5 * 10**9), ("5B", 5 * 10**9), ("125M", 125 * 10**6), ("1_000", 1000), ("1.5k", 1500)],
)
def test_parameters_are_read_as_people_write_them(text, parameters):
    assert parse_parameters(text).parameters == parameters


@pytest.mark.parametrize("text", ["", "5X", "B", "-5B", "0", "nan", "inf", "1e400", "5 B B"])
def test_what_is_no_number_of_parameters_is_refused(text):
    with pytest.raises(ConfigError, match="such as 125M, 5B or 5e9"):
        parse_parameters(text)


def a_safetensors_file(path, **tensors):
    """Writes a file of tensors of zeros, given as (dtype, shape)."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * {"I64": 8, "F32": 4, "BF16": 2, "F8_E8M0": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + bytes(at))
    return path


def test_the_header_of_a_safetensors_file_is_enough(tmp_path):
    tensors = {"embed.weight": ("BF16", [1000, 64]), "mlp.weight": ("F32", [64, 128]), "position_ids": ("I64", [512])}
    model = read_model(a_safetensors_file(tmp_path / "model.safetensors", **tensors))
    assert model.parameters == 1000 * 64 + 64 * 128  # integers are never synchronised
    assert {spec.name for spec in model.tensors} == {"embed/weight", "mlp/weight"}
    assert len(cut(model.parameters, model.tensors, 8)) == 2  # no more fragments than tensors


def test_a_model_in_several_files_is_read_from_all_of_them(tmp_path):
    first, second, third = files = [f"model-0000{part}-of-00003.safetensors" for part in (1, 2, 3)]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {f"w{k}": name for k, name in enumerate(files)}}))
    for name in (first, second):
        a_safetensors_file(tmp_path / name, **{name: ("BF16", [10])})
    with pytest.raises(ConfigError, match=rf"belongs to a model in 3 files, and {third} is not beside it"):
        read_model(index)
    a_safetensors_file(tmp_path / third, w2=("BF16", [10]))
    assert read_model(index).parameters == 30
    assert "(headers of 3 files)" in read_model(index).source
    with pytest.raises(ConfigError, match="is one of several files; give their index"):
        read_model(tmp_path / first)


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ('{"weight_map": {"w": "../model.safetensors"}}', "must name files beside it"),
        ('{"weight_map": {}}', "must name files beside it"),
        ('{"hidden_size": 4096}', "is no index of safetensors files; give --params"),
        ("{", "is no index of safetensors files"),
        (100_000 * "[", "is no index of safetensors files"),
    ],
)
def test_a_json_file_that_is_no_index_is_refused(tmp_path, text, cure):
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(ConfigError, match=cure):
        read_model(tmp_path / "model.json")


def test_a_tensor_that_cannot_be_synchronised_is_refused_by_its_dtype(tmp_path):
    with pytest.raises(ConfigError, match=r"dtype that cannot be synchronised \(F8_E8M0\); give --params"):
        read_model(a_safetensors_file(tmp_path / "model.safetensors", w=("F8_E8M0", [2])))


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, struct.pack("<Q", 5) + b"nope!", struct.pack("<Q", 2) + b"[]"])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="is no safetensors file"):
        read_model(tmp_path / "model.safetensors")


def test_adapters_are_two_narrow_matrices_for_each_that_is_adapted(tmp_path):
    layer = {"q_proj.weight": ("BF16", [48, 64]), "v_proj.weight": ("BF16", [16, 64]), "norm.weight": ("BF16", [64])}
    tensors = {f"model.layers.{k}.self_attn.{name}": each for k in range(2) for name, each in layer.items()}
    a_safetensors_file(tmp_path / "model.safetensors", **tensors)
    with pytest.raises(ConfigError, match=r"lora_targets = '': do not follow from model_type that is not known: name"):
        read_model(tmp_path, Lora(rank=4))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    model = read_model(tmp_path, Lora(rank=4))
    assert model.parameters == 2 * 4 * (48 + 64 + 16 + 64)
    assert len(model.tensors) == 8
    assert model.base_bytes == 4 * 2 * (48 * 64 + 16 * 64 + 64)
    with pytest.raises(
        ConfigError, match=r"lora_targets = 'o_proj': are in none of its matrices: name some of q_proj, v"
    ):
        read_model(tmp_path, Lora(rank=4, targets=("o_proj",)))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=r"gives no shapes for model_type gpt2.*: bring its weights"):
        read_model(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["config.json", "gone.safetensors", "model.pt"])
def test_files_that_describe_no_model_are_refused(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="model = "):
        read_model(tmp_path / name)


def test_the_configuration_of_a_run_gives_its_model_and_settings(tmp_path):
    path, task = tmp_path / "config.toml", '[island]\ntask = "examples.numpy_task:task"\n[task]\nhidden = 32\n'
    path.write_text(f"{task}[aggregator]\nfragments = 2\nislands = 3\nmax_staleness = 2\nmax_staleness_s = 5.0\n")
    model = read_model(path)
    assert model.parameters == 32 * 32 + 32 + 32 * 16 + 16
    assert (model.islands, model.site, model.training["fragments"]) == (3, {"tokens_per_step": 64}, 2)
    assert (model.limits["max_staleness"], model.limits["max_staleness_s"]) == (2, 5.0)
