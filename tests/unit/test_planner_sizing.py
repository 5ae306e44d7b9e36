"""How many parameters a model has: as people write it, or from its files."""

import json
import struct

import pytest

from broker.wire.errors import ConfigError
from ops.planning.footprint import cut
from ops.planning.sizing import parse_parameters, read_model


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


def a_safetensors_file(path, tensors):
    header = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def test_the_header_of_a_safetensors_file_is_enough(tmp_path):
    tensors = {
        "model.embed_tokens.weight": {"dtype": "BF16", "shape": [1000, 64], "data_offsets": [0, 128_000]},
        "model.layers.0.mlp.weight": {"dtype": "F32", "shape": [64, 128], "data_offsets": [0, 0]},
        "model.position_ids": {"dtype": "I64", "shape": [512], "data_offsets": [0, 0]},
    }
    model = read_model(a_safetensors_file(tmp_path / "model.safetensors", tensors))
    assert model.parameters == 1000 * 64 + 64 * 128  # integers are never synchronised
    assert {spec.name for spec in model.tensors} == {"model/embed_tokens/weight", "model/layers/0/mlp/weight"}
    assert len(cut(model.parameters, model.tensors, 8)) == 2  # no more fragments than tensors


def test_a_model_in_several_files_is_read_from_all_of_them(tmp_path):
    files = [f"model-0000{part}-of-00003.safetensors" for part in (1, 2, 3)]
    for k, name in enumerate(files[:2]):
        a_safetensors_file(tmp_path / name, {f"w{k}": {"dtype": "BF16", "shape": [10], "data_offsets": [0, 20]}})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {f"w{k}": name for k, name in enumerate(files)}}))
    for path in (tmp_path / files[0], index):
        with pytest.raises(
            ConfigError, match=r"belongs to a model in 3 files, and model-00003-of-00003.safetensors is not beside it"
        ):
            read_model(path)
    a_safetensors_file(tmp_path / files[2], {"w2": {"dtype": "BF16", "shape": [10], "data_offsets": [0, 20]}})
    for path in (tmp_path / files[1], index):
        assert read_model(path).parameters == 30
        assert "(headers of 3 files)" in read_model(path).source


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ('{"weight_map": {"w": "../model.safetensors"}}', "must name files that stand beside it"),
        ('{"weight_map": {}}', "must name files that stand beside it"),
        ("[1]", "must be a table of names and values"),
        ("{", "is not JSON"),
    ],
)
def test_a_json_file_that_is_neither_an_index_nor_a_configuration_is_refused(tmp_path, text, cure):
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(ConfigError, match=cure):
        read_model(tmp_path / "model.json")


def test_a_tensor_that_cannot_be_synchronised_is_refused_by_its_dtype(tmp_path):
    tensors = {"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    with pytest.raises(ConfigError, match=r"dtype that cannot be synchronised \(F4\); give --params"):
        read_model(a_safetensors_file(tmp_path / "model.safetensors", tensors))
    tensors = {"w": {"dtype": "F32", "shape": [-2, 3], "data_offsets": [0, 24]}}
    with pytest.raises(ConfigError, match="is no safetensors file"):
        read_model(a_safetensors_file(tmp_path / "model.safetensors", tensors))


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, struct.pack("<Q", 5) + b"nope!", struct.pack("<Q", 2) + b"[]"])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="is no safetensors file"):
        read_model(tmp_path / "model.safetensors")


def test_a_config_json_of_a_known_size_is_estimated(tmp_path):
    # GPT-like figures small enough for a hand: 100 x 8 + 2 x (4 x 8 x 8 + 2 x 8 + 3 x 8 x 16) + 8
    config = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 100, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 16}))
    assert read_model(tmp_path / "config.json").parameters == 800 + 2 * (256 + 16 + 384) + 8
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 16, "tie_word_embeddings": False}))
    assert read_model(tmp_path / "config.json").parameters == 1600 + 2 * (256 + 16 + 384) + 8


def _config(width, depth, vocabulary, heads, hidden, **more):
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "vocab_size": vocabulary, "num_attention_heads": heads}
    return sizes | {"intermediate_size": hidden, "tie_word_embeddings": False} | more


def _gpt2(width, depth, heads, **more):
    sizes = {"n_embd": width, "n_layer": depth, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return {"model_type": "gpt2"} | sizes | more


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (_config(4096, 32, 128256, 32, 14336, num_key_value_heads=8), 8.03e9),
        (_config(4096, 32, 32000, 32, 14336, num_key_value_heads=8, num_local_experts=8), 46.7e9),
        (_config(2048, 18, 256000, 8, 16384, num_key_value_heads=1, head_dim=256, tie_word_embeddings=True), 2.51e9),
        (
            _config(2048, 48, 151936, 32, 6144, num_key_value_heads=4, head_dim=128)
            | {"moe_intermediate_size": 768, "num_experts": 128},
            30.5e9,
        ),
        (
            _config(2048, 28, 102400, 16, 10944, moe_intermediate_size=1408)
            | {"n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 1},
            16.4e9,
        ),
        (
            _config(3584, 28, 151936, 28, 18944, num_key_value_heads=4, moe_intermediate_size=2560, num_experts=64)
            | {"shared_expert_intermediate_size": 20480},
            57.4e9,
        ),
        (
            _config(7168, 61, 129280, 128, 18432, moe_intermediate_size=2048)
            | {"n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3},
            671e9,
        ),
        (_config(4096, 32, 50432, 32, 16384, model_type="gpt_neox"), 6.86e9),
        (_gpt2(768, 12, 12), 124.4e6),
        (_gpt2(1600, 48, 25, n_inner=None), 1.558e9),
        (_gpt2(4096, 28, 16, model_type="gptj", vocab_size=50400, tie_word_embeddings=False), 6.05e9),
        (
            {
                "model_type": "one that sees",
                "text_config": _config(4096, 32, 128256, 32, 14336, num_key_value_heads=8, model_type="llama"),
            },
            8.03e9,
        ),
    ],
)
def test_the_sizes_of_published_models_come_out(tmp_path, config, published):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path / "config.json").parameters == pytest.approx(published, rel=0.02)


def test_latent_attention_is_counted_by_its_ranks(tmp_path):
    ranks = {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    config = _config(2560, 62, 73448, 40, 6400, model_type="minicpm3", tie_word_embeddings=True, **ranks)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path / "config.json").parameters == pytest.approx(4.07e9, rel=0.002)  # MiniCPM3-4B


def test_one_key_and_value_for_all_heads_is_counted_once(tmp_path):
    config = _gpt2(6144, 40, 48, model_type="gpt_bigcode", n_positions=8192, vocab_size=49152, n_inner=24576)
    (tmp_path / "config.json").write_text(json.dumps(config | {"multi_query": True}))
    assert read_model(tmp_path / "config.json").parameters == pytest.approx(15.52e9, rel=0.002)  # StarCoder


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"model_type": "mamba2"}, "is of the type mamba2"),
        ({"model_type": "one that sees", "text_config": {"hidden_size": 64}}, "is of the type one that sees"),
        ({"model_type": "deepseek", "n_routed_experts": 4, "moe_layer_freq": 2}, "has moe_layer_freq"),
        ({"model_type": "llama", "interleave_moe_layer_step": 2}, "has interleave_moe_layer_step"),
        ({"model_type": "albert", "embedding_size": 128}, "has embedding_size"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 2}, "has decoder_sparse_step"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [1]}, "has mlp_only_layers"),
    ],
)
def test_layers_that_are_not_known_are_refused_rather_than_miscounted(tmp_path, more, what):
    (tmp_path / "config.json").write_text(json.dumps(_config(64, 2, 100, 2, 256) | more))
    with pytest.raises(ConfigError, match=f"{what}, and its layers are not known here: give --params"):
        read_model(tmp_path / "config.json")


def test_whether_embeddings_are_tied_is_told(tmp_path):
    config = _config(8, 2, 100, 2, 16)
    for tied, words in (
        (True, "one table for embeddings and output"),
        (False, "a table each for embeddings and output"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
        assert words in read_model(tmp_path / "config.json").source


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"intermediate_size": -10}, "intermediate_size = -10 must be a whole number"),
        ({"num_hidden_layers": 2.9}, "num_hidden_layers = 2.9 must be a whole number"),
        ({"num_key_value_heads": -8}, "num_key_value_heads = -8 must be a whole number"),
        ({"hidden_size": float("inf")}, "hidden_size = inf must be a whole number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' must be true or false"),
    ],
)
def test_dimensions_that_are_no_whole_numbers_are_refused(tmp_path, more, what):
    (tmp_path / "config.json").write_text(json.dumps(_config(64, 2, 100, 2, 256) | more))
    with pytest.raises(ConfigError, match=what):
        read_model(tmp_path / "config.json")


def test_files_that_are_nested_too_deeply_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(100_000 * "[")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_model(tmp_path / "config.json")


def test_a_transformer_without_layers_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_config(8, 0, 100, 2, 16)))
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        read_model(tmp_path / "config.json")


def test_a_transformer_without_heads_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_config(8, 2, 100, 0, 16)))
    with pytest.raises(ConfigError, match="describes no transformer"):
        read_model(tmp_path / "config.json")


def test_experts_of_an_unknown_number_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_config(8, 2, 100, 2, 16, moe_intermediate_size=4)))
    with pytest.raises(ConfigError, match="n_routed_experts"):
        read_model(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["config.json", "gone.safetensors", "model.pt"])
def test_files_that_describe_no_model_are_refused(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="model = "):
        read_model(tmp_path / name)


def test_the_configuration_of_a_run_gives_its_model_and_settings(tmp_path):
    text = (
        '[island]\ntask = "examples.numpy_task:task"\n[task]\nhidden = 32\n[aggregator]\nfragments = 2\nislands = 3\n'
    )
    (tmp_path / "config.toml").write_text(text)
    model = read_model(tmp_path / "config.toml")
    assert model.parameters == 32 * 32 + 32 + 32 * 16 + 16
    assert model.defaults["fragments"] == 2
    assert model.defaults["sites"] == 3
    assert model.defaults["tokens_per_step"] == 64
