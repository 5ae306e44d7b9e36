"""Model directories in the layout of the Hugging Face hub: finds, checks and digests them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoTokenizer

from broker.base.errors import ConfigError
from broker.process.demands import BASE, INIT
from broker.process.model_folder import read
from islands.weights.files import Weights, grouped, open_weights

#: Files that a tokenizer is made of; the first ones that are there name it.
_TOKENIZER = "tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "merges.txt", "spiece.model"
_CHAT = "chat_template.jinja", "chat_template.json"


@dataclass(frozen=True)
class ModelDirectory:
    """A model on this machine's disk.

    Attributes:
        name: As the user gave it.
        path: The path of the directory.
    """

    name: str
    path: Path

    @classmethod
    def find(cls, model: str) -> ModelDirectory:
        """Returns the model directory at a path, or of a model on the hub, fetched if needed.

        Raises:
            ConfigError: It is neither, or the hub cannot be reached; says what is missing.
        """
        path = Path(model).expanduser()
        if not path.is_dir():
            path = _fetched(model)
        if not (path / "config.json").is_file():
            cure = "has no config.json: name the directory that save_pretrained wrote, or an id of the hub"
            raise ConfigError("model", model, cure)
        return cls(model, path)

    @cached_property
    def weights(self) -> Weights:
        """Returns the tensors in its files."""
        return open_weights(self.path, field="model")

    @cached_property
    def config(self) -> Any:
        """Returns the model's configuration as transformers reads it; code of the directory is never run."""
        try:
            return AutoConfig.from_pretrained(self.path, trust_remote_code=False, local_files_only=True)
        except (ValueError, OSError, KeyError) as err:
            raise ConfigError("model", self.name, f"is no model that transformers knows ({_line(err)})") from err

    @cached_property
    def tokenizer(self) -> Any:
        """Returns the tokenizer of the directory.

        Raises:
            ConfigError: It has none, or one whose tokens the model lacks.
        """
        try:
            found = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False, local_files_only=True)
        except (ValueError, OSError, KeyError) as err:
            raise ConfigError("model", self.name, f"has no tokenizer ({_line(err)}): put its files there") from err
        rows = getattr(self.config.get_text_config(), "vocab_size", None)
        if rows is not None and len(found) > rows:
            cure = f"has a tokenizer of {len(found)} tokens and a model of {rows}: they are not of one model"
            raise ConfigError("model", self.name, cure)
        return found

    def inputs(self, *, lora: bool) -> dict[str, str]:
        """Returns digests of the inputs that all islands must share (:mod:`broker.process.demands`)."""
        if lora:
            found = {BASE + name: digest for name, digest in grouped(self.weights.digests).items()}
        else:
            found = {INIT: self.weights.digest}
        config = json.loads((self.path / "config.json").read_text("utf-8"))
        ignored = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")  # an island may hold another dtype
        shape = {key: value for key, value in config.items() if key not in ignored}
        found["config"] = xxhash.xxh3_128_hexdigest(json.dumps(shape, sort_keys=True).encode())
        found["tokenizer"] = _digest(self.path, _TOKENIZER)
        template = getattr(self.tokenizer, "chat_template", None)
        if template:
            found["chat_template"] = xxhash.xxh3_128_hexdigest(json.dumps(template, sort_keys=True).encode())
        return found

    @cached_property
    def small_files(self) -> dict[str, bytes]:
        """Returns all files except weights: name -> bytes.

        Raises:
            ConfigError: They are more than 32 MB, or a link leads out of the directory; names the file and the cure.
        """
        cached = self.path.parent.name == "snapshots"  # of the hub's cache, which links to its blobs
        return read(self.path, within=self.path.parent.parent if cached else None)


def _fetched(model: str) -> Path:
    weights = ["*.safetensors", "*.safetensors.index.json"]
    small = ["*.json", "*.txt", "*.model", "*.jinja", "*/config.json"]
    try:
        return Path(snapshot_download(model, allow_patterns=weights + small))
    except LocalEntryNotFoundError as err:
        offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        cure = f"is no directory here, not in the cache, and {why}: fetch it before, or name its directory"
        raise ConfigError("model", model, cure) from err
    except (HfHubHTTPError, ValueError, OSError) as err:
        cure = f"is no directory here, and the hub does not give it ({_line(err)}): name a directory or an id"
        raise ConfigError("model", model, cure) from err


def _digest(folder: Path, names: tuple[str, ...]) -> str:
    found: Mapping[str, Path] = {name: folder / name for name in names if (folder / name).is_file()}
    hasher = xxhash.xxh3_128()
    for name in ("tokenizer.json",) if "tokenizer.json" in found else sorted(found):
        hasher.update(name.encode())
        hasher.update(found[name].read_bytes())
    return hasher.hexdigest()


def _line(err: Exception) -> str:
    return str(err).strip().partition("\n")[0][:200]
