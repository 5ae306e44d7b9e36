"""Writes a run's model as a directory that ``from_pretrained`` loads, by the libraries themselves."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from broker.base.errors import ConfigError
from islands.hf.directory import ModelDirectory
from islands.torch.conversion import Array, as_tensor

#: Beside the small files: what else a module is built from where its weights are not.
_BUFFERS, _ADAPTER = "atoll/buffers", "atoll/adapter_config.json"
#: The largest file of weights.
SHARD = "5GB"
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

#: (name -> values, the new directory, number format, whether adapters are merged into their base) -> nothing.
Save = Callable[[Mapping[str, Array], Path, str, bool], None]


def of(directory: ModelDirectory, build: Callable[[], Any]) -> Save:
    """Returns the function that writes a run's tensors as a model directory.

    Weights go in shards with an index where they are large; configuration, tokenizer and templates are those of the
    directory that the run began with. Adapters are written as a directory of peft, unless they are merged.

    Args:
        directory: That the run began with.
        build: Makes the module whose tensors the run has.
    """

    def save(tensors: Mapping[str, Array], folder: Path, dtype: str, merge: bool) -> None:
        module = build()
        state = {name: as_tensor(array) for name, array in tensors.items()}
        state |= {name: state[other] for name, other in _tied(module) if other in state}
        empty = next(module.parameters()).is_meta
        missing, unexpected = module.load_state_dict(state, strict=False, assign=empty)
        if empty and not isinstance(module, PeftModel):
            module.tie_weights()
        own = {name for name, each in module.named_parameters() if each.requires_grad}
        lacks = [name for name in missing if name in own]
        if lacks or unexpected:
            cure = "is not the model of this run: use the task and the options it was trained with"
            raise ConfigError("model", directory.name, f"lacks {lacks[:3]}, has the unknown {unexpected[:3]}: {cure}")
        if isinstance(module, PeftModel):
            if not merge:
                module.to(_DTYPES[dtype]).save_pretrained(folder)
                return
            if empty:
                cure = (
                    "needs the base, which is on islands alone: export where it is, with --base DIR and --config FILE"
                )
                raise ConfigError("merge", True, cure)
            module = module.merge_and_unload()
        elif merge:
            raise ConfigError("merge", True, "is for a run of adapters: this one trained the whole model")
        module.to(_DTYPES[dtype]).save_pretrained(folder, max_shard_size=SHARD)
        if any(name.endswith("running_var") and name not in tensors for name, _ in module.named_buffers()):
            with (folder / "README.md").open("a", encoding="utf-8") as card:
                card.write("\nStatistics of normalisation are those of the model that the run began with.\n")
        for name, content in directory.small_files.items():
            path = folder / name
            if name not in (_BUFFERS, _ADAPTER) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    return save


def described(module: Any, name: str) -> dict[str, bytes]:
    """Returns the files that a module is built from, except its weights, as name -> bytes.

    Args:
        module: The module in training.
        name: The base model's name, to load an adapter with.
    """
    adapted = isinstance(module, PeftModel)
    inner = module.get_base_model() if adapted else module
    inner.config.architectures = [type(inner).__name__]  # as save_pretrained says it
    found = {"config.json": inner.config.to_json_string().encode()}
    if adapted:
        with tempfile.TemporaryDirectory() as folder:
            module.peft_config["default"].save_pretrained(folder)
            config = json.loads((Path(folder) / "adapter_config.json").read_text("utf-8"))
        found[_ADAPTER] = json.dumps(config | {"base_model_name_or_path": name}).encode()
        return found
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name: each.contiguous() for name, each in module.state_dict().items() if name not in parameters}
    if buffers:
        found[_BUFFERS] = safetensors.torch.save(buffers)
    return found


def of_files(folder: Path) -> Save:
    """Returns the function that writes a run's tensors, given only the model's small files.

    Args:
        folder: What :attr:`islands.Task.files` of ``islands.hf:task`` holds, as files.

    Raises:
        ConfigError: They name no model that transformers knows.
    """
    directory = ModelDirectory.find(str(folder))
    name = (directory.config.architectures or [""])[0]
    of_model = getattr(transformers, name, None)
    if not (isinstance(of_model, type) and issubclass(of_model, transformers.PreTrainedModel)):
        raise ConfigError("model", str(folder), f"is a {name!r}, which this version of transformers has not")

    def build() -> Any:
        with torch.device("meta"):
            module = of_model(directory.config)
            if (folder / _ADAPTER).is_file():
                adapter = LoraConfig.from_pretrained((folder / _ADAPTER).parent)
                module.name_or_path = module.config.name_or_path = adapter.base_model_name_or_path
                return get_peft_model(module, adapter)
        if (folder / "generation_config.json").is_file():
            module.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        if (folder / _BUFFERS).is_file():
            buffers = safetensors.torch.load((folder / _BUFFERS).read_bytes())
            module.load_state_dict(buffers, strict=False, assign=True)
        return module

    return of(directory, build)


def _tied(module: Any) -> list[tuple[str, str]]:
    """Returns pairs of names that share one parameter; a run has its values under one name."""
    names: dict[int, list[str]] = {}
    for name, each in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(each), []).append(name)
    return [pair for group in names.values() for pair in itertools.permutations(group, 2)]
