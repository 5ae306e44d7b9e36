"""The size of a model, from safetensors or from a run's config.toml.

Shell: reads files, and for a config.toml builds the task's initial parameters, also in a short child process. Of a
safetensors file only the header is read; of a model in several of them, named by their index, those of all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
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
from islands.arrays.partition import tensor_specs
from islands.interface.config import IslandConfig
from ops.launcher import python_path
from ops.processes.child_process import tied

_DTYPES: dict[str, np.dtype[Any]] = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

#: The name of a part of a model that is too large for one file.
_PART = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as far as planning needs it."""

    parameters: int  # elements that are synchronised
    tensors: tuple[TensorSpec, ...] = ()  # empty if only their number is known
    source: str  # a sentence for the assumptions
    islands: int = 2  # of the run that the file describes, as is the rest
    site: Mapping[str, Any] = field(default_factory=dict)  # by field of ops.forecast.fleet.Site
    training: Mapping[str, Any] = field(default_factory=dict)  # by field of Training there
    limits: Mapping[str, Any] = field(default_factory=dict)  # by field of Fleet there


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Shape and dtype of an array: all that the partition looks at."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def parse_parameters(text: str) -> Model:
    """Returns a model of so many parameters, such as 5e9, 5B, 125M or 1_000_000.

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
    readers = {".safetensors": _of_safetensors, ".toml": _of_run, ".json": _of_index}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError("model", str(path), f"must end in one of {', '.join(readers)}")
    try:
        return reader(path)
    except OSError as err:
        raise ConfigError("model", str(path), f"cannot be read ({err.strerror}); {cure_of(err)}") from err


def _of_safetensors(path: Path) -> Model:
    if _PART.fullmatch(path.name):
        cure = "is one of several files; give their index, model.safetensors.index.json, which names all of them"
        raise ConfigError("model", str(path), cure)
    return _with_tensors(tensor_specs(_leaves_of(path)), path, f"header of {path.name}")


def _of_index(path: Path) -> Model:
    """Returns the model of an index: it is in several files, which stand beside that."""
    try:
        names = sorted({str(name) for name in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        cure = "is no index of safetensors files; give --params, or a safetensors file"
        raise ConfigError("model", str(path), cure) from err
    if not names or any(Path(name).name != name for name in names):
        raise ConfigError("model", str(path), "must name files that stand beside it in its weight_map")
    missing = [name for name in names if not path.with_name(name).exists()]
    if missing:
        cure = f"belongs to a model in {len(names)} files, and {', '.join(missing[:3])} is not beside it"
        raise ConfigError("model", str(path), f"{cure}; bring all of them, or give --params")
    leaves = {name: leaf for file in names for name, leaf in _leaves_of(path.with_name(file)).items()}
    return _with_tensors(tensor_specs(leaves), path, f"headers of {len(names)} files")


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
    return _with_tensors(
        tensor_specs(params, task.kinds, task.unit_axes),
        path,
        f"task {island.task} of {path.name}",
        islands=aggregator.islands,
        site={"tokens_per_step": task.tokens_per_step},
        training=training,
        limits=limits,
    )


# --- in a child process -------------------------------------------------------------------------------------------

#: Initial parameters of 10^10 elements take minutes on a CPU.
WITHIN_S = 900.0

_CURE = "give a number"

_SCRIPT = """
import sys, pathlib
from ops.launcher import find_modules_here
find_modules_here()
from ops.forecast_commands.model_size import read_model
print(read_model(pathlib.Path(sys.argv[1])).parameters)
"""


def parameters_of(config: str) -> int:
    """Returns the parameters that are synchronised in a run, counted in a child process.

    ``up`` itself never loads the libraries of a task: it would hold a GPU for as long as the run lasts.

    Args:
        config: Its configuration, as ``config.toml`` has it.

    Raises:
        ConfigError: The task does not say, with what it said instead.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-size-") as folder:
        file = Path(folder) / "config.toml"
        file.touch(mode=0o600)  # options of the task may be secret
        file.write_text(config, encoding="utf-8")
        try:
            done = subprocess.run(
                tied([sys.executable, "-P", "-c", _SCRIPT, str(file)]),
                env=dict(os.environ) | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": python_path()},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=WITHIN_S,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                "shards", "auto", f"needs the size of the model, which took {WITHIN_S:g} s: {_CURE}"
            ) from None
    try:
        return int(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise ConfigError("shards", "auto", f"needs the size of the model ({said[0]}): {_CURE}") from None
