"""The size of a model or its LoRA adapters, from safetensors, its directory, or a run's config.toml.

Shell: reads files, and for a config.toml builds the task's initial parameters. Of a safetensors file only the header is
read; of a model in several of them, named by their index, those of all.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from aggregator.interface.config import AggregatorConfig
from broker.base import sources
from broker.base.errors import ConfigError, cure_of
from broker.base.settings import whole_number
from broker.gateway.config import BrokerConfig
from broker.wire.fragments import Kind, TensorSpec
from islands.arrays.partition import names_of_base, tensor_specs
from islands.interface.config import IslandConfig

_DTYPES: dict[str, np.dtype[Any]] = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

#: Files of a directory that say how large its model is, the best first.
_OF_DIRECTORY = "config.toml", "model.safetensors.index.json", "model.safetensors", "config.json"
#: Architectures whose shapes follow from config.json alone.
_LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
#: Modules that peft adapts by default -> architectures (peft.utils.constants; a test compares them).
_LORA_TARGETS = {
    ("q_proj", "v_proj"): "llama mistral mixtral qwen2 qwen3 gemma gemma2 gemma3_text opt gptj gpt_neo stablelm bart",
    ("query", "value"): "bert roberta xlm-roberta electra",
    ("query_key_value",): "bloom gpt_neox falcon",
    ("c_attn",): "gpt2 gpt_bigcode",
    ("q", "v"): "t5 mt5",
}
#: The name of a part of a model that is too large for one file.
_PART = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The facts about a model for planning."""

    parameters: int  # elements that are synchronised
    tensors: tuple[TensorSpec, ...] = ()  # empty if only their number is known
    source: str  # a sentence for the assumptions
    base_bytes: int = 0  # of tensors that each island holds, and that never travel
    islands: int = 2  # of the run that the file describes, as is the rest
    site: Mapping[str, Any] = field(default_factory=dict)  # by field of ops.forecast.fleet.Site
    training: Mapping[str, Any] = field(default_factory=dict)  # by field of Training there
    limits: Mapping[str, Any] = field(default_factory=dict)  # by field of Fleet there


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """LoRA adapters, with the options of ``islands.hf:task``."""

    rank: int
    targets: tuple[str, ...] = ()  # modules that get one; empty: as peft chooses for the architecture
    dtype: str = "f32"  # in which islands hold the base: f32 or bf16

    def __post_init__(self) -> None:
        """Raises ConfigError for an impossible rank or number format."""
        if self.rank < 1:
            raise ConfigError("lora_rank", self.rank, "must be at least 1, such as 8")
        if self.dtype not in ("f32", "bf16"):
            raise ConfigError("dtype", self.dtype, "must be f32 or bf16")


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Shape and dtype of an array, for the partition."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def parse_parameters(text: str) -> Model:
    """Returns a model by its number of parameters, such as 5e9, 5B, 125M or 1_000_000.

    Raises:
        ConfigError: It is no such number.
    """
    try:
        number = whole_number(text)
    except ValueError:
        number = 0
    if not 1 <= number <= 10**15:
        raise ConfigError("params", text, "must lie between 1 and 1e15, such as 125M, 5B or 5e9")
    return Model(parameters=number, source=f"{number:,} parameters, in fragments of equal size")


def read_model(path: Path, lora: Lora | None = None) -> Model:
    """Returns the model, or its adapters, of a file (by its ending) or directory.

    Raises:
        ConfigError: It cannot be read, describes none, or the adapters do not follow from it.
    """
    if path.is_dir():
        path = next((path / name for name in _OF_DIRECTORY if (path / name).is_file()), path)
    readers = {".safetensors": _of_safetensors, ".json": _of_config if path.name == "config.json" else _of_index}
    reader = readers.get(path.suffix)
    if reader is None and path.suffix != ".toml":
        known = ", ".join((*readers, ".toml"))
        raise ConfigError("model", str(path), f"must end in one of {known}, or be a directory with such a file")
    try:
        if reader is None:
            if lora is not None:
                raise ConfigError("lora_rank", lora.rank, f"is in [task] of {path}, if it has any: leave it out")
            return _of_run(path)
        leaves, source = reader(path)
        return _with_tensors(tensor_specs(leaves), path, source) if lora is None else _adapters(leaves, path, lora)
    except OSError as err:
        raise ConfigError("model", str(path), f"cannot be read ({err.strerror}); {cure_of(err)}") from err


def _of_safetensors(path: Path) -> tuple[dict[str, _Leaf], str]:
    if _PART.fullmatch(path.name):
        cure = "is one of several files; give their index, model.safetensors.index.json, which names all of them"
        raise ConfigError("model", str(path), cure)
    return _leaves_of(path), f"header of {path.name}"


def _of_index(path: Path) -> tuple[dict[str, _Leaf], str]:
    """Returns the tensors of an index file, from the files beside it."""
    try:
        names = sorted({str(name) for name in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        cure = "is no index of safetensors files; give --params, or a safetensors file"
        raise ConfigError("model", str(path), cure) from err
    if not names or any(Path(name).name != name for name in names):
        raise ConfigError("model", str(path), "must name files beside it in its weight_map")
    missing = [name for name in names if not path.with_name(name).exists()]
    if missing:
        cure = f"belongs to a model in {len(names)} files, and {', '.join(missing[:3])} is not beside it"
        raise ConfigError("model", str(path), f"{cure}; bring all of them, or give --params")
    leaves = {name: leaf for file in names for name, leaf in _leaves_of(path.with_name(file)).items()}
    return leaves, f"headers of {len(names)} files"


def _of_config(path: Path) -> tuple[dict[str, _Leaf], str]:
    """Returns the tensors of a Llama-shaped model from its configuration, without weights."""
    config = _config(path)
    kind = config.get("model_type")
    if kind not in _LIKE_LLAMA:
        cure = f"gives no shapes for model_type {kind}, as it does for {', '.join(_LIKE_LLAMA)}: bring its weights"
        raise ConfigError("model", str(path), cure)
    try:
        width, inner, rows, layers = (
            int(config[name]) for name in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
        )
        heads = int(config["num_attention_heads"])
        of_head = config.get("head_dim") or (128 if kind == "qwen3" else width // heads)
        queries, keys = heads * of_head, (config.get("num_key_value_heads") or heads) * of_head
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as err:
        raise ConfigError("model", str(path), f"lacks {err}: bring the model's weights, or give --params") from err
    out = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": width}
    layer: dict[str, tuple[int, ...]] = {f"self_attn/{name}/weight": (n, width) for name, n in out.items()}
    layer["self_attn/o_proj/weight"] = (width, queries)
    biased = out if config.get("attention_bias") else list(out)[:3] if kind == "qwen2" else ()
    layer |= {f"self_attn/{name}/bias": (out[name],) for name in biased}
    if kind == "qwen3":
        layer |= {f"self_attn/{name}/weight": (of_head,) for name in ("q_norm", "k_norm")}
    layer |= {"mlp/gate_proj/weight": (inner, width), "mlp/up_proj/weight": (inner, width)}
    layer |= {"mlp/down_proj/weight": (width, inner)}
    layer |= {f"{name}_layernorm/weight": (width,) for name in ("input", "post_attention")}
    shapes = {f"model/layers/{k}/{name}": shape for k in range(layers) for name, shape in layer.items()}
    shapes |= {"model/embed_tokens/weight": (rows, width), "model/norm/weight": (width,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head/weight"] = (rows, width)
    return {name: _Leaf(shape, _DTYPES["F32"]) for name, shape in shapes.items()}, f"shapes by {path.name}"


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError("model", str(path), "is no configuration of a model: name another file, or give --params")
    return found


def _adapters(leaves: Mapping[str, _Leaf], path: Path, lora: Lora) -> Model:
    """Returns peft's adapters of a model: for each matrix (m, n) one of (r, n) and one of (m, r)."""
    targets, beside = lora.targets, path.with_name("config.json")
    kind = str(_config(beside).get("model_type")) if not targets and beside.is_file() else "that is not known"
    targets = targets or next((names for names, kinds in _LORA_TARGETS.items() if kind in kinds.split()), ())
    matrices = {name.removesuffix("/weight"): each.shape for name, each in leaves.items() if len(each.shape) == 2}
    ends = tuple("/" + target.replace(".", "/") for target in targets)
    adapted = {name: shape for name, shape in matrices.items() if f"/{name}".endswith(ends)}
    if not adapted:
        known = ", ".join(sorted({name.rpartition("/")[2] for name in matrices}))
        why = "are in none of its matrices" if targets else f"do not follow from model_type {kind}"
        raise ConfigError("lora_targets", ",".join(lora.targets), f"{why}: name some of {known}")
    halves = {f"{name}/lora_A/weight": (lora.rank, shape[1]) for name, shape in adapted.items()}
    halves |= {f"{name}/lora_B/weight": (shape[0], lora.rank) for name, shape in adapted.items()}
    base = sum(spec.size for spec in tensor_specs(leaves) if spec.kind is not Kind.LOCAL)
    nbytes = base * (2 if lora.dtype == "bf16" else 4)
    what = f"LoRA of rank {lora.rank} on {', '.join(targets)}"
    held = (
        f"their base of {base:,} parameters, {nbytes / 1e9:.3g} GB in {lora.dtype}, is on each island and never travels"
    )
    specs = tensor_specs({name: _Leaf(shape, _DTYPES["F32"]) for name, shape in halves.items()})
    return _with_tensors(specs, path, f"{what}; {held}", base_bytes=nbytes)


def _leaves_of(path: Path) -> dict[str, _Leaf]:
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
            found = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except SafetensorError as err:
        raise ConfigError("model", str(path), f"is no safetensors file ({err}); name one that is") from err
    strange = sorted({dtype for dtype, _ in found.values()} - _DTYPES.keys())
    if strange:
        cure = f"has tensors of a dtype that cannot be synchronised ({', '.join(strange)}); give --params"
        raise ConfigError("model", str(path), cure)
    return {name.replace(".", "/"): _Leaf(shape, _DTYPES[dtype]) for name, (dtype, shape) in found.items()}


def _with_tensors(specs: Sequence[TensorSpec], path: Path, source: str, **of_run: Any) -> Model:
    tensors = tuple(spec for spec in specs if spec.kind in (Kind.RDA, Kind.MEAN))
    if not tensors:
        raise ConfigError("model", str(path), "has no floating-point tensor; name a file with a model in it")
    parameters = sum(tensor.size for tensor in tensors)
    words = f"{parameters:,} parameters in {len(tensors)} tensors ({source}), cut into fragments as a run cuts them"
    return Model(parameters=parameters, tensors=tensors, source=words, **of_run)


def _of_run(path: Path) -> Model:
    """Returns the model of a run's configuration, from the shapes of its task's initial parameters."""
    from islands.tasks.task import load_task

    tables = sources.read_file(path)
    only = argparse.Namespace(config=path)
    aggregator = sources.load(AggregatorConfig, only, "aggregator", environment={})
    island = sources.load(IslandConfig, only, "island", environment={})
    broker = sources.load(BrokerConfig, only, "broker", environment={})
    task = load_task(island.task, tables.get("task", {}))
    params, _ = task.init(aggregator.seed)
    training = {
        "sync_interval": aggregator.sync_interval,
        "fragments": aggregator.fragments,
        "overlap": aggregator.overlap,
        "shards": aggregator.shards,
        "codec": str(aggregator.codec),
        "version_codec": str(aggregator.codec_of_versions),
    }
    limits = {
        "max_message_bytes": min(
            filter(None, (each.max_message_bytes for each in (aggregator, island, broker))), default=0
        ),
        "held_bytes": aggregator.held_bytes,
        "max_tokens_per_step": aggregator.max_tokens_per_step,
        "max_staleness": aggregator.max_staleness,
        "max_staleness_s": aggregator.max_staleness_s,
    }
    specs, base = tensor_specs(params, task.kinds, task.unit_axes), set(names_of_base(params, task.kinds))
    return _with_tensors(
        specs,
        path,
        f"task {island.task} of {path.name}",
        base_bytes=sum(each.size * np.dtype(each.dtype).itemsize for each in specs if each.name in base),
        islands=aggregator.islands,
        site={"tokens_per_step": task.tokens_per_step},
        training=training,
        limits=limits,
    )
