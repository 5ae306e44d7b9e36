"""Writes a run's model as a directory that ``from_pretrained`` loads, by the libraries themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from broker.base.errors import ConfigError
from islands.hf.directory import ModelDirectory
from islands.torch.conversion import Array, as_tensor

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

#: (name -> values, the new directory, number format, whether adapters are merged into their base) -> nothing.
Save = Callable[[Mapping[str, Array], Path, str, bool], None]


def of(directory: ModelDirectory, build: Callable[[], Any]) -> Save:
    """Returns the function that writes a run's tensors as a model's directory.

    Weights go in shards with an index where they are large; configuration, tokenizer and templates are those of the
    directory that the run began with. Adapters are written as a directory of peft, unless they are merged.

    Args:
        directory: That the run began with.
        build: Makes the module whose tensors the run has.
    """

    def save(tensors: Mapping[str, Array], folder: Path, dtype: str, merge: bool) -> None:
        module = build()
        state = {name: as_tensor(array) for name, array in tensors.items()}
        missing, unexpected = module.load_state_dict(state, strict=False)
        own = {name for name, each in module.named_parameters() if each.requires_grad}
        lacks = [name for name in missing if name in own and not _tied(module, name, state)]
        if lacks or unexpected:
            cure = "is not the model of this run: use the task and the options it was trained with"
            raise ConfigError("model", directory.name, f"lacks {lacks[:3]}, has the unknown {unexpected[:3]}: {cure}")
        if isinstance(module, PeftModel):
            if not merge:
                module.to(_DTYPES[dtype]).save_pretrained(folder)
                return
            module = module.merge_and_unload()
        elif merge:
            raise ConfigError("merge", True, "is for a run of adapters: this one trained the whole model")
        module.to(_DTYPES[dtype]).save_pretrained(folder)
        directory.copy_small_files(folder)

    return save


def _tied(module: Any, name: str, state: Mapping[str, Any]) -> bool:
    """Returns True if a parameter is tied, and its values are there under its other name."""
    wanted = module.get_parameter(name)
    return any(other in state for other, each in module.named_parameters(remove_duplicate=False) if each is wanted)
