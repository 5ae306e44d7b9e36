"""How large a model is, from a file that describes it: safetensors, a run's config.toml, or a config.json.

Shell: reads files, and for a config.toml builds the task's initial parameters. Of a safetensors file only the header
is read; of a model in several of them, named by one or by their index, those of all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from aggregator.config import AggregatorConfig
from broker.config import BrokerConfig
from broker.process import settings
from broker.process.values import whole_number
from broker.wire.errors import ConfigError
from broker.wire.fragments import Kind, TensorSpec
from islands.arrays.partition import tensor_specs
from islands.config import IslandConfig

_MOST_HEADER_BYTES = 100 << 20  # as the format's own readers have it

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

#: A part of a model that is too large for one file.
_SHARD = re.compile(r"(?P<before>.+-)(?P<part>\d{5})-of-(?P<parts>\d{5})\.safetensors")

#: Of architectures (``model_type``) whose feed-forward has two matrices.
_TWO_MATRICES = frozenset(
    (
        *("bert", "codegen", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "nemotron", "persimmon", "phi", "roberta"),
        *("starcoder2", "xlm-roberta"),
    )
)
#: Of those whose feed-forward is gated, with three; what is of neither kind is not counted.
_THREE_MATRICES = frozenset(
    (
        *("baichuan", "cohere", "cohere2", "deepseek", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone", "gemma"),
        *("gemma2", "gemma3", "gemma3_text", "glm", "glm4", "gpt_oss", "granite", "granitemoe", "helium", "internlm"),
        *("internlm2", "internlm3", "kimi_k2", "llama", "minicpm", "minicpm3", "ministral", "mistral", "mistral3"),
        *("mixtral", "olmo", "olmo2", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen2_vl", "qwen3"),
        *("qwen3_moe", "seed_oss", "smollm3", "stablelm"),
    )
)
#: Of layers that differ in more than their numbers, or that are something else than attention and feed-forward.
_MIXED = ("attn_layer_period", "embedding_size", "expert_layer_period", "interleave_moe_layer_step", "mamba_d_state")

#: What the oldest of them call the keys of the others; their feed-forward is four times as wide where it is not told.
_OLD_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}
_FOUR_TIMES = frozenset(("codegen", "gpt2", "gpt_bigcode", "gptj"))

#: Of architectures that learn an embedding of each position, too.
_LEARNED_POSITIONS = frozenset(("gpt2", "gpt_bigcode"))

#: Names under which the number of experts of a layer stands in a config.json.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


#: What is counted by in a config.json.
_COUNTS = (
    *("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts", *_EXPERTS),
    *("first_k_dense_replace", "n_positions", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    "v_head_dim",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as far as planning needs it.

    Attributes:
        parameters: Elements that are synchronised.
        tensors: Empty if only their number is known.
        source: A sentence for the assumptions.
        defaults: Of the run that the file describes: ``sites``, ``sync_interval``, ``fragments``, ``overlap``,
            ``shards``, ``codec``, ``version_codec``, ``tokens_per_step``.
        limits: Of the same run, by the names that :class:`ops.planning.fleet.Fleet` has for them.
    """

    parameters: int
    tensors: tuple[TensorSpec, ...] = ()
    source: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """What the partition looks at in an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def parse_parameters(text: str) -> Model:
    """Returns a model of so many parameters: 5e9, 5B, 125M, 1_000_000 (:func:`broker.process.values.whole_number`).

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


def read_model(path: Path) -> Model:
    """Returns the model that a file describes, by the file's ending.

    Raises:
        ConfigError: It cannot be read, or describes none.
    """
    readers = {".safetensors": _of_safetensors, ".toml": _of_run, ".json": _of_config_json}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError("model", str(path), f"must end in one of {', '.join(readers)}")
    try:
        return reader(path)
    except OSError as err:
        raise ConfigError("model", str(path), f"cannot be read ({err.strerror}); name a file that can") from err


def _synchronised(specs: tuple[TensorSpec, ...], path: Path) -> tuple[TensorSpec, ...]:
    kept = tuple(spec for spec in specs if spec.kind in (Kind.RDA, Kind.MEAN))
    if not kept:
        raise ConfigError("model", str(path), "has no floating-point tensor; name a file with a model in it")
    return kept


def _of_safetensors(path: Path) -> Model:
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return _of_files([path], path)
    parts = int(found["parts"])
    names = [f"{found['before']}{part:05}-of-{parts:05}.safetensors" for part in range(1, parts + 1)]
    return _of_files([path.with_name(name) for name in names], path)


def _of_index(path: Path, weight_map: Mapping[str, Any]) -> Model:
    """The index of a model in several files, which stand beside it."""
    names = sorted({str(name) for name in weight_map.values()})
    if not names or any(Path(name).name != name for name in names):
        raise ConfigError("model", str(path), "must name files that stand beside it in its weight_map")
    return _of_files([path.with_name(name) for name in names], path)


def _of_files(files: Sequence[Path], path: Path) -> Model:
    missing = [file.name for file in files if not file.exists()]
    if missing and (len(files) > 1 or path not in files):
        cure = f"belongs to a model in {len(files)} files, and {', '.join(missing[:3])} is not beside it"
        raise ConfigError("model", str(path), f"{cure}; bring all of them, or give --params")
    leaves = {name: leaf for file in files for name, leaf in _leaves_of(file).items()}
    tensors = _synchronised(tensor_specs(leaves), path)
    return _with_tensors(tensors, f"header of {path.name}" if len(files) == 1 else f"headers of {len(files)} files")


def _leaves_of(path: Path) -> dict[str, _Leaf]:
    broken = ConfigError("model", str(path), "is no safetensors file: its header does not read as one")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _MOST_HEADER_BYTES:
            raise broken
        header = file.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        strange = sorted({str(entry["dtype"]) for entry in entries.values()} - _DTYPES.keys())
        if strange:
            cure = f"has tensors of a dtype that cannot be synchronised ({', '.join(strange)}); give --params"
            raise ConfigError("model", str(path), cure)
        leaves = {
            name.replace(".", "/"): _Leaf(tuple(map(int, entry["shape"])), _DTYPES[entry["dtype"]])
            for name, entry in entries.items()
        }
        if any(size < 0 for leaf in leaves.values() for size in leaf.shape):
            raise broken
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as err:
        raise broken from err
    return leaves


def _with_tensors(tensors: tuple[TensorSpec, ...], source: str, **defaults: Any) -> Model:
    parameters = sum(tensor.size for tensor in tensors)
    words = f"{parameters:,} parameters in {len(tensors)} tensors ({source}), cut into fragments as a run cuts them"
    return Model(parameters=parameters, tensors=tensors, source=words, defaults=defaults)


def _of_run(path: Path) -> Model:
    """The configuration of a run: its task is asked for initial parameters, of which only the shapes are kept."""
    from islands.tasks.task import load_task

    tables = settings.read_file(path)
    aggregator = settings.load(AggregatorConfig, _Config(path), "aggregator", environment={})  # type: ignore[arg-type]
    island = settings.load(IslandConfig, _Config(path), "island", environment={})  # type: ignore[arg-type]
    broker = settings.load(BrokerConfig, _Config(path), "broker", environment={})  # type: ignore[arg-type]
    task = load_task(island.task, tables.get("task", {}))
    params, _ = task.init(aggregator.seed)
    tensors = _synchronised(tensor_specs(params, task.kinds, task.unit_axes), path)
    model = _with_tensors(
        tensors,
        f"task {island.task} of {path.name}",
        sites=aggregator.islands,
        sync_interval=aggregator.sync_interval,
        fragments=aggregator.fragments,
        overlap=aggregator.overlap,
        shards=aggregator.shards,
        codec=str(aggregator.codec),
        version_codec=str(aggregator.version_codec),
        tokens_per_step=task.tokens_per_step,
    )
    limits = {
        "max_message_bytes": min(each.max_message_bytes for each in (aggregator, island, broker)),
        "held_bytes": aggregator.held_bytes,
        "max_tokens_per_step": aggregator.max_tokens_per_step,
        "max_staleness": aggregator.max_staleness,
    }
    return replace(model, limits=limits)


@dataclass(frozen=True, slots=True)
class _Config:
    """Stands for parsed flags of which only ``--config`` was given."""

    config: Path


def _latent_attention(config: Mapping[str, Any], width: int, heads: int) -> int:
    """Parameters of one layer of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); 0 where there is none."""
    latent = int(config.get("kv_lora_rank") or 0)
    if not latent:
        return 0
    plain, turned = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    value, of_query = int(config.get("v_head_dim") or width // heads), int(config.get("q_lora_rank") or 0)
    wide = heads * (plain + turned)
    query = (width + wide + 1) * of_query if of_query else width * wide
    return query + width * (latent + turned) + latent + latent * heads * (plain + value) + heads * value * width


def _check_counts(config: Mapping[str, Any]) -> None:
    """Raises ValueError where a dimension that is read here is no whole number, or below 0."""
    for name in _COUNTS:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1 or value > 10**15:
            raise ValueError(f"{name} = {value!r} must be a whole number, of at most 1e15")


def _of_config_json(path: Path) -> Model:
    """A transformer's config.json: attention with grouped keys and values, feed-forward, dense or experts."""
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as err:
        raise ConfigError("model", str(path), f"is not JSON: {err}") from err
    if not isinstance(config, dict):
        raise ConfigError("model", str(path), "describes no transformer: it must be a table of names and values")
    if isinstance(config.get("weight_map"), dict):
        return _of_index(path, config["weight_map"])
    try:
        sort = (config.get("text_config") or {}).get("model_type") or config.get("model_type")
        config |= config.get("text_config") or {}  # of a model that sees, too: its language model is what is counted
        config = {_OLD_NAMES.get(name, name): value for name, value in config.items()}
        _check_counts(config)
        width, depth = int(config["hidden_size"]), int(config["num_hidden_layers"])
        vocabulary, heads = int(config["vocab_size"]), int(config["num_attention_heads"])
        if min(width, depth, vocabulary, heads) < 1:
            raise ValueError("hidden_size, num_hidden_layers, vocab_size and num_attention_heads must be 1 or more")
        head_width = int(config.get("head_dim") or width // heads)
        mixed = [name for name in _MIXED if name in config]
        # Dense layers among those with experts, unless all of them are alike.
        mixed += [name for name in ("mlp_only_layers",) if config.get(name)]
        mixed += [name for name in ("decoder_sparse_step", "moe_layer_freq") if config.get(name) not in (None, 1)]
        if mixed or not (sort is None or sort in _TWO_MATRICES or sort in _THREE_MATRICES):
            what = f"has {mixed[0]}" if mixed else f"is of the type {sort}"
            cure = f"{what}, and its layers are not known here: give --params, or a safetensors file"
            raise ConfigError("model", str(path), cure)
        key_value = int(config.get("num_key_value_heads") or (1 if config.get("multi_query") else heads)) * head_width
        attention = _latent_attention(config, width, heads) or 2 * width * (heads * head_width + key_value)
        experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
        if config.get("model_type") in _FOUR_TIMES:
            config["intermediate_size"] = config.get("intermediate_size") or 4 * width
        hidden = int(config.get("moe_intermediate_size") or config["intermediate_size"])
        shared = int(config.get("shared_expert_intermediate_size") or 0)
        shared += int(config.get("n_shared_experts") or 0) * hidden
        dense = min(depth, int(config.get("first_k_dense_replace") or 0)) if experts else depth
        dense_hidden = int(config.get("intermediate_size") or hidden)
        # Who writes these files leaves out what is as the format has it: tied.
        tied = True if config.get("tie_word_embeddings") is None else config["tie_word_embeddings"]
        if not isinstance(tied, bool):
            raise ValueError(f"tie_word_embeddings = {tied!r} must be true or false")
        if config.get("moe_intermediate_size") and not experts:
            raise KeyError(" or ".join(_EXPERTS))
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, OverflowError) as err:
        cure = f"describes no transformer ({err!r}); give --params or a safetensors file"
        raise ConfigError("model", str(path), cure) from err
    layer = attention + 2 * width
    matrices = 2 if config.get("model_type") in _TWO_MATRICES else 3
    sparse_layer = width * experts + matrices * width * (hidden * experts + shared)
    positions = int(config.get("n_positions") or 0) if config.get("model_type") in _LEARNED_POSITIONS else 0
    parameters = (vocabulary * (1 if tied else 2) + positions) * width + depth * layer + width
    parameters += dense * matrices * width * dense_hidden + (depth - dense) * sparse_layer
    if parameters < 1:
        raise ConfigError("model", str(path), "describes a model without parameters")
    kind = "gated feed-forward" if matrices == 3 else "feed-forward of two matrices"
    ends = "one table" if tied else "a table each"
    words = (
        f"{parameters:,} parameters, estimated from {path.name}: {kind}, {ends} for embeddings and output, fragments "
        "of equal size"
    )
    return Model(parameters=parameters, source=words)
