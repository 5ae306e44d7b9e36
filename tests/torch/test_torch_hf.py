"""The task of Hugging Face models: it learns, its model goes out as every tool loads it, wrong input is refused."""

import json
import os
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("datasets")

from peft import PeftModel
from peft.utils import constants
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    ResNetConfig,
    ResNetForImageClassification,
)

from broker.base.errors import ConfigError
from broker.process import model_folder
from broker.wire.fragments import Kind
from broker.wire.small_files import pack
from examples import nnx_llama
from islands import daemon
from islands.arrays.partition import tensor_specs
from islands.hf import saving
from islands.interface.config import IslandConfig
from islands.protocol.data_shares import DataShare
from islands.tasks.task import Schedule, endless_batches, evaluated, load_task
from islands.torch.conversion import as_array
from islands.weights.files import open_weights
from ops import cli
from ops.evaluation import harness
from ops.forecast_commands import model_size
from ops.forecast_commands.model_size import Lora, read_model
from tests.local_run import Process, ops, wait_for
from tests.torch import small_models

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),  # of peft, for what transformers renamed
]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def task_of(tmp_path, **changes):
    if not (tmp_path / "model").exists():
        small_models.llama(tmp_path / "model")
        small_models.texts(tmp_path / "texts.jsonl")
    usual = {"model": str(tmp_path / "model"), "data": str(tmp_path / "texts.jsonl"), "held_out": "0.25"}
    usual |= {"sequence_length": 16, "batch": 8, "learning_rate": 3e-3}
    return load_task("islands.hf:task", usual | changes)


def trained(task, steps):
    """Trains a task by itself; returns its parameters."""
    params, state = task.init(0)
    batches = endless_batches(task, DataShare(index=0, count=1))
    for step, batch in enumerate(islice(batches, steps)):
        params, state, _ = task.train(params, state, batch, Schedule(step, steps))
    return params


def merged(task, params):
    """Returns what a run has of a task's parameters: name -> values, of all that is not local."""
    specs = [each for each in tensor_specs(params, task.kinds) if each.kind is not Kind.LOCAL]
    return {each.name: params[each.name].to_host().copy() for each in specs}


def test_a_causal_model_learns_and_comes_out_as_from_pretrained_loads_it(tmp_path):
    task = task_of(tmp_path, accumulation=2, gradient_checkpointing=True)
    before = evaluated(task, task.init(0)[0])["loss"]
    params = trained(task, 30)
    assert evaluated(task, params)["loss"] < before - 0.5
    run = merged(task, params)
    task.save(run, tmp_path / "out", "f32", False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in loaded.state_dict().items():
        if name in run:
            assert as_array(tensor).tobytes() == run[name].tobytes(), name
    ours, theirs = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("model", "out"))
    assert ours("an island merges") == theirs("an island merges")
    task.save(run, tmp_path / "narrow", "bf16", False)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "narrow").dtype == torch.bfloat16


def test_of_a_run_of_adapters_they_alone_travel_and_come_out_for_peft_or_merged(tmp_path):
    task = task_of(tmp_path, lora_rank=2, lora_targets="q_proj,v_proj", dtype="bf16")
    run = merged(task, trained(task, 5))
    assert len(run) == 8
    assert all("lora_" in name for name in run)
    assert sum(name.startswith("base ") for name in task.inputs) == len(task_of(tmp_path).init(0)[0]) - 1  # tied
    task.save(run, tmp_path / "adapter", "f32", False)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(8, 24)[None]
    logits = adapted(input_ids=ids).logits
    for name, tensor in adapted.state_dict().items():
        if name in run:
            assert as_array(tensor).tobytes() == run[name].tobytes()
    task.save(run, tmp_path / "whole", "f32", True)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(whole(input_ids=ids).logits, logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="merge = True: is for a run of adapters"):
        task_of(tmp_path).save(merged(task_of(tmp_path), task_of(tmp_path).init(0)[0]), tmp_path / "x", "f32", True)


#: Perplexity as transformers computes it by itself, of a directory and a file, in sequences of 16 tokens.
PLAIN = """
import json, math, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = (each.from_pretrained(sys.argv[1]) for each in (AutoTokenizer, AutoModelForCausalLM))
ids, total, tokens = [], 0.0, 0
for line in open(sys.argv[2]):
    ids += tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
for part in torch.tensor(ids).split(16):
    if len(part) > 1:
        with torch.no_grad():
            total += float(model.eval()(input_ids=part[None], labels=part[None]).loss) * (len(part) - 1)
        tokens += len(part) - 1
assert "islands" not in sys.modules
print(json.dumps([tokens, total / tokens, math.exp(total / tokens)]))
"""


@pytest.mark.parametrize("rows", [1, 21, 64])
def test_the_perplexity_of_a_file_is_that_of_transformers_in_a_process_without_us(tmp_path, rows):
    task = task_of(tmp_path)
    params = trained(task, 5)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join((tmp_path / "texts.jsonl").read_text().splitlines(keepends=True)[:rows]))
    found = task.benchmarks["perplexity"](str(held_out))(params)
    task.save(merged(task, params), tmp_path / "out", "f32", False)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", PLAIN, tmp_path / "out", held_out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=variables)
    assert done.returncode == 0, done.stderr
    tokens, nats, perplexity = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {"held_out/tokens", "held_out/nats_per_token", "held_out/perplexity"}
    assert found["held_out/tokens"].value == tokens
    assert found["held_out/nats_per_token"].value == pytest.approx(nats, rel=1e-6)
    assert found["held_out/perplexity"].value == pytest.approx(perplexity, rel=1e-6)


def test_the_harness_gets_a_whole_model_that_generates_text_also_of_adapters(tmp_path):
    task = task_of(tmp_path, lora_rank=2, lora_targets="q_proj,v_proj")
    params = trained(task, 3)
    harness.saver("lm_eval:mc", task)(params, tmp_path / "handed")
    task.save(merged(task, params), tmp_path / "whole", "f32", True)
    handed, whole = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("handed", "whole"))
    assert all(torch.equal(handed[name], whole[name]) for name in whole)
    assert AutoTokenizer.from_pretrained(tmp_path / "handed")("an island")
    small_models.bert(tmp_path / "model")
    masked = task_of(tmp_path, objective="masked")
    with pytest.raises(ConfigError, match=r"is for models that generate text: this run trained \['BertForMaskedLM'\]"):
        harness.saver("lm_eval:mc", masked)(masked.init(0)[0], tmp_path / "masked")


def test_perplexity_is_of_masked_models_too_and_of_no_classifier(tmp_path):
    small_models.bert(tmp_path / "model")
    data = small_models.classes(tmp_path / "rows.jsonl")
    task = task_of(tmp_path, data=str(data), objective="masked")
    found = task.benchmarks["perplexity"](str(data))(task.init(0)[0])
    assert found["rows/perplexity"].value > 1
    assert found["rows/perplexity"].better == "min"
    classify = task_of(tmp_path, data=str(data), objective="classify")
    with pytest.raises(ConfigError, match="this run's objective is classify"):
        classify.benchmarks["perplexity"](str(data))


@pytest.mark.parametrize(
    ("objective", "make", "metric", "least"),
    [
        ("masked", small_models.texts, "loss", None),
        ("contrastive", small_models.pairs, "reciprocal_rank", 0.0),
        ("classify", small_models.classes, "accuracy", 0.9),
    ],
)
def test_other_objectives_learn_and_tell_their_metric(tmp_path, objective, make, metric, least):
    small_models.bert(tmp_path / "model")
    data = make(tmp_path / "rows.jsonl")
    task = task_of(tmp_path, data=str(data), objective=objective, learning_rate=1e-2)
    before = evaluated(task, task.init(0)[0])
    after = evaluated(task, trained(task, 30))
    assert after["loss"] < before["loss"]
    assert evaluated(task, task.init(0)[0]).keys() == after.keys() >= {metric}
    assert least is None or after[metric] > least
    if objective == "masked":
        run = merged(task, task.init(1)[0])
        task.save(run, tmp_path / "out", "f32", False)
        assert AutoModelForMaskedLM.from_pretrained(tmp_path / "out") is not None


def test_what_must_not_differ_between_islands_has_its_digest(tmp_path):
    ours = task_of(tmp_path).inputs
    assert ours.keys() == {"init", "config", "tokenizer", "sequence_length", "data"}
    assert task_of(tmp_path).inputs == ours
    assert "data" not in task_of(tmp_path, local_data=True).inputs

    def differs(**changes):
        other = task_of(tmp_path, **changes).inputs
        return {name for name in ours if ours[name] != other[name]}

    assert differs(sequence_length=12) == {"sequence_length", "data"}
    small_models.tokenizer_in(tmp_path / "model", extra=("weights",))
    assert differs() >= {"tokenizer"}
    small_models.llama(tmp_path / "model", seed=1)
    assert differs() == {"init"}


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def remove(name):
    return lambda folder: (folder / name).unlink()


def other_tokenizer(folder):
    small_models.tokenizer_in(folder, extra=[f"word{i}" for i in range(40)])


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (remove("config.json"), {}, "model = .*: has no config.json"),
        (remove("tokenizer.json"), {}, "model = .*: has no tokenizer"),
        (cut, {}, "model = .*: is no whole safetensors file"),
        (other_tokenizer, {}, "has a tokenizer of .* tokens and a model of 32"),
        (None, {"model": "nobody/nothing"}, "is no directory here, not in the cache, and HF_HUB_OFFLINE is set"),
        (None, {"dtype": "f64"}, "dtype = 'f64': must be one of f32, bf16"),
        (None, {"lora_rank": 0}, "lora_rank = 0: must be at least 1"),
        (None, {"lora_rank": 2, "lora_targets": "nowhere"}, "lora_targets = 'nowhere': .*name some of .*q_proj"),
        (None, {"text": "body"}, "text = 'body': is no column of .*; there are text"),
        (None, {"sequence_length": 4096}, "gives no sequence of sequence_length = 4096"),
        (None, {"batch": 0}, "batch = 0: must be above 0"),
        (None, {"accumulation": 3}, "accumulation = 3: must divide batch = 8"),
        (None, {"spread": "other"}, "spread = 'other': must be ddp or fsdp"),
        (None, {"objective": "other"}, "objective = 'other': must be one of causal, masked"),
        (None, {"held_out": "2"}, "held_out = '2': must be a share between 0 and 1"),
        (None, {"data": "EMPTY"}, "is empty: give a file with examples in it"),
        (None, {"data": "nobody/nothing"}, "is no file here, and no dataset that can be fetched"),
    ],
)
def test_wrong_input_is_one_clear_error_before_anything_starts(tmp_path, change, options, said):
    task_of(tmp_path) if change is None else small_models.llama(tmp_path / "model")
    small_models.texts(tmp_path / "texts.jsonl")
    if change is not None:
        change(tmp_path / "model")
    (tmp_path / "empty.jsonl").touch()
    options = {name: str(tmp_path / "empty.jsonl") if value == "EMPTY" else value for name, value in options.items()}
    with pytest.raises(ConfigError, match=said):
        task_of(tmp_path, **options)


def test_a_batch_that_ranks_cannot_divide_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"batch = 8: must be a multiple of accumulation x ranks = 1 x 3"):
        task_of(tmp_path)


def test_the_example_finds_functions_by_their_docstrings_in_installed_packages(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("examples.finetune.PACKAGES", ("msgpack", "optax"))
    small_models.bert(tmp_path / "atoll" / "finetune" / "all-MiniLM-L6-v2")  # in place of what it fetches
    task = load_task("examples.finetune:task", {"batch": 4, "sequence_length": 16})
    trained(task, 2)
    assert 0 < evaluated(task, task.init(0)[0])["reciprocal_rank"] <= 1
    train, held_out = ((tmp_path / "atoll" / "finetune" / f"{n}.jsonl").read_text() for n in ("train", "held_out"))
    assert not set(train.splitlines()) & set(held_out.splitlines())
    assert '"docstring"' in held_out


# --- where of the model only the small files are -------------------------------------------------------------------


def saved_both_ways(tmp_path, task, run, *, dtype="f32"):
    """Saves a run by its task, and by its small files alone; returns both directories."""
    model_folder.write(tmp_path / "kept", pack(task.files))
    folders = tmp_path / "by-task", tmp_path / "by-files"
    for folder, save in zip(folders, (task.save, saving.of_files(tmp_path / "kept")), strict=True):
        folder.mkdir()
        save(run, folder, dtype, False)
    return folders


def different(one, other):
    """Returns names of files and tensors that differ; which shard has a tensor does not matter."""
    names = sorted(each.relative_to(one).as_posix() for each in one.rglob("*"))
    assert names == sorted(each.relative_to(other).as_posix() for each in other.rglob("*"))
    small = [name for name in names if (one / name).is_file() and not name.startswith("model")]
    tensors, others = open_weights(one), open_weights(other)
    assert tensors.keys() == others.keys()
    found = [name for name in small if (one / name).read_bytes() != (other / name).read_bytes()]
    return found + [name for name in tensors if tensors[name].tobytes() != others[name].tobytes()]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_small_files_alone_give_the_same_directory_bit_for_bit_in_shards(tmp_path, monkeypatch, tied, dtype):
    monkeypatch.setattr(saving, "SHARD", "8KB")
    small_models.llama(tmp_path / "model", tie_word_embeddings=tied)
    small_models.texts(tmp_path / "texts.jsonl")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "model" / "generation_config.json").write_text('{"max_new_tokens": 7}')
    task = task_of(tmp_path)
    by_task, by_files = saved_both_ways(tmp_path, task, merged(task, trained(task, 3)), dtype=dtype)
    assert different(by_task, by_files) == []
    names = {each.name for each in by_files.iterdir()}
    assert {"model.safetensors.index.json", "chat_template.jinja", "tokenizer.json"} <= names
    assert AutoModelForCausalLM.from_pretrained(by_files).generation_config.max_new_tokens == 7


@pytest.mark.parametrize("objective", ["classify", "contrastive"])
def test_the_configuration_that_is_kept_is_that_of_the_module_that_was_trained(tmp_path, objective):
    small_models.bert(tmp_path / "model")
    data = {"classify": small_models.classes, "contrastive": small_models.pairs}[objective](tmp_path / "rows.jsonl")
    task = task_of(tmp_path, data=str(data), objective=objective)
    by_task, by_files = saved_both_ways(tmp_path, task, merged(task, task.init(0)[0]))
    assert different(by_task, by_files) == []


def test_of_adapters_the_small_files_give_the_directory_of_peft_and_name_the_base(tmp_path):
    task = task_of(tmp_path, lora_rank=2, lora_targets="q_proj,v_proj")
    run = merged(task, trained(task, 2))
    by_task, by_files = saved_both_ways(tmp_path, task, run)
    assert different(by_task, by_files) == []
    assert json.loads((by_files / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "model"
    )
    with pytest.raises(ConfigError, match="merge = True: needs the base, which is on islands alone"):
        saving.of_files(tmp_path / "kept")(run, tmp_path / "whole", "f32", True)


@pytest.mark.parametrize("averaged", [True, False])
def test_statistics_of_normalisation_are_the_runs_or_else_said_to_be_the_sources(tmp_path, averaged):
    torch.manual_seed(0)
    config = ResNetConfig(num_channels=1, embedding_size=4, hidden_sizes=[4, 4], depths=[1, 1], num_labels=2)
    module = ResNetForImageClassification(config)
    for each in module.buffers():
        each += torch.rand(each.shape).to(each.dtype) if each.is_floating_point() else 3
    (tmp_path / "kept").mkdir()
    model_folder.write(tmp_path / "kept", pack(saving.described(module, "resnet")))
    run = {name: 2 * each.detach().numpy() for name, each in module.named_parameters()}
    if averaged:
        run |= {name: 2 * each.numpy() for name, each in module.named_buffers() if "running" in name}
    (tmp_path / "out").mkdir()
    saving.of_files(tmp_path / "kept")(run, tmp_path / "out", "f32", False)
    loaded = ResNetForImageClassification.from_pretrained(tmp_path / "out").state_dict()
    for name, each in module.state_dict().items():
        assert torch.equal(loaded[name], 2 * each if name in run else each), name
    assert (tmp_path / "out" / "README.md").exists() != averaged


def test_files_that_name_no_model_are_refused(tmp_path):
    for name in ("Nothing", "AutoModel", "torch"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": [name]}))
        with pytest.raises(ConfigError, match=f"is a '{name}', which this version of transformers has not"):
            saving.of_files(tmp_path)


@pytest.mark.full("a hub, an island and two exports as processes of their own")
def test_a_hub_without_the_model_exports_what_its_island_ended_with_bit_for_bit(tmp_path, monkeypatch):
    small_models.llama(tmp_path / "model")
    small_models.texts(tmp_path / "texts.jsonl")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "cut", max_shard_size="8KB")
    (tmp_path / "model" / "model.safetensors").unlink()
    for each in (tmp_path / "cut").glob("model*"):
        each.rename(tmp_path / "model" / each.name)
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    task = task_of(tmp_path)
    words = ["hub", "--run", "demo", "--run-dir", tmp_path / "hub", "--port", 0, "--islands", 1, "--tokens", "5K"]
    with Process(tmp_path / "logs", *words, "--fragments", 2, "--sync-interval", 4) as hub:
        address = wait_for((tmp_path / "hub" / "hub.address").is_file, "address", evidence=lambda: hub.err)
        address = (tmp_path / "hub" / "hub.address").read_text().strip()
        key = next((tmp_path / "hub" / "keys").glob("islands.secret"))
        final = daemon.train(IslandConfig(run_id="demo", broker=address, key=key, task="islands.hf:task"), task)
        assert hub.wait(120) == 0, hub.err
    (tmp_path / "model").rename(tmp_path / "away")
    run = merged(task, final)
    monkeypatch.setattr(saving, "SHARD", "8KB")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "nothing"))
    assert cli.main(["export", str(tmp_path / "hub"), "--hf", str(tmp_path / "out")]) == 0
    done = ops("export", tmp_path / "hub", "--hf", tmp_path / "one", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    for folder in ("out", "one"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        assert run.keys() <= loaded.keys()
        for name, array in run.items():
            assert as_array(loaded[name]).tobytes() == array.tobytes(), name
        assert AutoTokenizer.from_pretrained(tmp_path / folder)("an island merges")["input_ids"]
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert [each.name for each in (tmp_path / "one").glob("model*")] == ["model.safetensors"]
    begun = AutoModelForCausalLM.from_pretrained(tmp_path / "away").state_dict()
    assert any(not torch.equal(begun[name], loaded[name]) for name in run), "it has trained"
    assert ops("snapshots", "save", tmp_path / "hub", "end").returncode == 0
    done = ops("snapshots", "export", tmp_path / "hub", "end", "--hf", tmp_path / "snapshot", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert "README.md" not in different(tmp_path / "one", tmp_path / "snapshot")


@pytest.mark.full("a whole run of up")
def test_up_ends_with_a_directory_for_other_tools_and_says_how_to_load_it(tmp_path):
    small_models.llama(tmp_path / "model")
    small_models.texts(tmp_path / "texts.jsonl")
    options = [f"model={tmp_path / 'model'}", f"data={tmp_path / 'texts.jsonl'}", "sequence_length=16", "batch=8"]
    words = ["up", "--task", "islands.hf:task", "--task-option", *options, "--islands", 1, "--tokens", "4K"]
    words += ["--run-dir", tmp_path / "run", "--fragments", 2, "--sync-interval", 4]
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = ops(*words, within_s=220, **cache)
    assert done.returncode == 0, done.stderr
    assert f"its model for other tools: from_pretrained('{tmp_path / 'run' / 'export'}')" in done.stdout
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export").state_dict()
    run = open_weights(tmp_path / "run" / "model.safetensors")
    assert all(as_array(loaded[name]).tobytes() == run[name].tobytes() for name in run)
    assert "Held-out loss" in (tmp_path / "run" / "export" / "README.md").read_text()


def test_a_model_of_flax_is_filled_from_a_directory_and_computes_the_same(tmp_path):
    small_models.llama(tmp_path, head_dim=4, num_attention_heads=8, num_key_value_heads=2)
    ids = torch.arange(8, 24)[None]
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids).logits
    found = nnx_llama.loaded(tmp_path)(ids.numpy())
    torch.testing.assert_close(torch.from_numpy(np.asarray(found).copy()), wanted, atol=1e-5, rtol=1e-5)


def test_plan_counts_the_adapters_that_the_task_makes(tmp_path):
    run = merged(task := task_of(tmp_path, lora_rank=2, dtype="bf16"), task.init(0)[0])
    planned = read_model(tmp_path / "model", Lora(rank=2, dtype="bf16"))
    assert sorted(each.size for each in planned.tensors) == sorted(array.size for array in run.values())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert planned.base_bytes == 2 * base.num_parameters()
    several = read_model(tmp_path / "model", Lora(rank=3, targets=("mlp.up_proj", "o_proj")))
    assert several.parameters == 2 * 3 * (16 + 32 + 16 + 16)
    file = tmp_path / "config.toml"  # of a run with this task
    options = f'model = "{tmp_path}/model"\ndata = "{tmp_path}/texts.jsonl"\nlora_rank = 2\ndtype = "bf16"\n'
    file.write_text(f'[island]\ntask = "islands.hf:task"\n[task]\nsequence_length = 16\n{options}')
    assert (read_model(file).parameters, read_model(file).base_bytes) == (planned.parameters, planned.base_bytes)


@pytest.mark.parametrize("kind", model_size._LIKE_LLAMA)
def test_the_shapes_of_a_model_follow_from_its_configuration(tmp_path, kind):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": kind == "llama"}
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = AutoConfig.for_model(kind, **sizes | heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    whole = read_model(tmp_path), read_model(tmp_path, Lora(rank=4))
    (tmp_path / "model.safetensors").unlink()
    from_config = read_model(tmp_path), read_model(tmp_path / "config.json", Lora(rank=4))
    for ours, theirs in zip(from_config, whole, strict=True):
        assert {(each.name, each.shape) for each in ours.tensors} == {
            (each.name, each.shape) for each in theirs.tensors
        }
        assert ours.base_bytes == theirs.base_bytes


def test_plan_knows_the_modules_that_peft_adapts():
    known = {kind: names for names, kinds in model_size._LORA_TARGETS.items() for kind in kinds.split()}
    of_peft = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert known == {kind: tuple(of_peft[kind]) for kind in known}
