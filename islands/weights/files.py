"""Opens a trained model: safetensors, whole or in shards, or a checkpoint of Orbax or torch.

A model directory of Hugging Face has ``model.safetensors``, or shards and an index that says which tensor is in which
(https://huggingface.co/docs/safetensors). Tensors stay in their files until they are read.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError, safe_open

from broker.base.errors import ConfigError, cure_of
from broker.process import logs, user_files

log = logs.get(__name__)

Array = npt.NDArray[Any]

#: Number formats of safetensors.
_DTYPES = {
    "BOOL": np.dtype(bool),
    **{f"{letter}{bits}": np.dtype(f"{kind}{bits // 8}") for bits in (8, 16, 32, 64) for letter, kind in ("Ii", "Uu")},
    **{f"F{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
#: Files of a model directory, the first that is there; an index names shards.
_INDEXES = "model.safetensors.index.json", "adapter_model.safetensors.index.json"
_SINGLE = "model.safetensors", "adapter_model.safetensors"
#: Files that tell the directory of a checkpoint from that of a model.
_ORBAX, _TORCH = "_METADATA", ".metadata"
#: More digests than these are told as digests of groups of tensors.
MOST_DIGESTS = 2048


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, from byte ``start`` on."""

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    def read(self) -> Array:
        """Returns the elements, read-only, mapped from the file."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        found: Array = np.memmap(self.file, self.dtype, "r", self.start, self.shape)
        return found


class Weights(Mapping[str, Array]):
    """The tensors of a model by name; each is read on access.

    Args:
        path: That was opened, for messages.
        tensors: Name -> tensor in a file, or its elements.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Stored | Array]) -> None:
        self.path = path
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Array:
        found = self._tensors[name]
        return found.read() if isinstance(found, Stored) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor without reading it."""
        return self._tensors[name].shape

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """Returns name -> 32 hex digits over number format, shape and bytes; cached beside each file."""
        by_file: dict[Path, dict[str, Stored]] = {}
        for name, tensor in self._tensors.items():
            if isinstance(tensor, Stored):
                by_file.setdefault(tensor.file, {})[name] = tensor
        found = {name: _digest(each) for name, each in self._tensors.items() if not isinstance(each, Stored)}
        for file, tensors in by_file.items():
            found |= _digests_of(file, tensors)
        return dict(sorted(found.items()))

    @property
    def digest(self) -> str:
        """32 hex digits over the names and digests of all tensors; the same for one file or shards."""
        return combined(self.digests)


def combined(digests: Mapping[str, str]) -> str:
    """Returns one digest for several named ones: 32 hex digits."""
    return xxhash.xxh3_128_hexdigest("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode())


def grouped(digests: Mapping[str, str], most: int = MOST_DIGESTS) -> dict[str, str]:
    """Returns digests by tensor; if there are more than ``most``, by the first parts of the names."""
    depth = max((name.count(".") for name in digests), default=0) + 1
    while True:
        groups: dict[str, dict[str, str]] = {}
        for name, digest in digests.items():
            groups.setdefault(".".join(name.split(".")[:depth]), {})[name] = digest
        if len(groups) <= most or depth == 1:
            return {
                name: next(iter(each.values())) if [*each] == [name] else combined(each)
                for name, each in groups.items()
            }
        depth -= 1


def open_weights(path: str | os.PathLike[str], *, field: str = "init") -> Weights:
    """Opens a trained model; reads names and shapes, and no elements of safetensors.

    Args:
        path: A safetensors file; a directory with one, or with shards and their index; an Orbax checkpoint; a torch
            distributed checkpoint.
        field: The setting, for errors.

    Raises:
        ConfigError: It is none of these, or a file is missing, cut off or broken; names the file and the cure.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return Weights(path, _in_file(path, field))
    if not path.is_dir():
        cure = "is no file or directory here: name a safetensors file, or the directory of a model or a checkpoint"
        raise ConfigError(field, str(path), cure)
    if found := next((path / name for name in _INDEXES if (path / name).is_file()), None):
        return Weights(path, _in_shards(found, field))
    if found := next((path / name for name in _SINGLE if (path / name).is_file()), None):
        return Weights(path, _in_file(found, field))
    if (path / _TORCH).is_file():
        return Weights(path, importlib.import_module("islands.torch.checkpoints").read(path, field))
    if orbax := _orbax_item(path):
        return Weights(path, importlib.import_module("islands.weights.orbax").read(orbax, field))
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return Weights(path, _in_file(files[0], field))
    cure = f"has none of {', '.join((*_INDEXES, *_SINGLE))}, and is no checkpoint of Orbax or torch"
    if pickled := sorted(each.name for each in path.glob("*.bin")):
        cure += f"; {pickled[0]} is a pickle, which may hold code: save the model as safetensors"
    raise ConfigError(field, str(path), f"{cure}: name one safetensors file")


def _in_shards(index: Path, field: str) -> dict[str, Stored]:
    """Returns the tensors of an index file, from its shards."""
    try:
        shard_of = json.loads(index.read_text("utf-8"))["weight_map"]
        shards = sorted({str(name) for name in shard_of.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigError(field, str(index), f"is no index of shards ({err!r}): fetch the model again") from err
    found: dict[str, Stored] = {}
    for name in shards:
        if Path(name).name != name:
            raise ConfigError(field, str(index), f"names {name!r}, which is outside of its directory")
        found |= _in_file(index.parent / name, field)
    if unlike := sorted(found.keys() ^ shard_of.keys()):
        what = f"and its shards differ about {len(unlike)} tensors, such as {unlike[0]}: fetch the model again"
        raise ConfigError(field, str(index), what)
    return found


def _in_file(file: Path, field: str) -> dict[str, Stored]:
    """Returns the tensors of a safetensors file; the library checks that it is complete."""
    try:
        with safe_open(file, "numpy"):
            pass
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
    except OSError as err:
        raise ConfigError(field, str(file), f"cannot be read ({err.strerror or err}): {cure_of(err)}") from err
    except (SafetensorError, ValueError) as err:
        raise ConfigError(field, str(file), f"is no whole safetensors file ({err}): fetch it again") from err
    header.pop("__metadata__", None)
    if unknown := sorted({each["dtype"] for each in header.values()} - _DTYPES.keys()):
        raise ConfigError(field, str(file), f"holds {unknown[0]}, a number format that numpy has not: convert it")
    return {
        name: Stored(file, _DTYPES[each["dtype"]], tuple(each["shape"]), 8 + size + each["data_offsets"][0])
        for name, each in header.items()
    }


def _orbax_item(path: Path) -> Path | None:
    """Returns the folder of an Orbax checkpoint's tree: the folder itself, its item, or the newest step's."""
    steps: Sequence[Path] = sorted((p for p in path.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))
    for folder in (path, *reversed(steps)):
        for item in (folder, *sorted(p for p in folder.iterdir() if p.is_dir())) if folder.is_dir() else ():
            if (item / _ORBAX).is_file():
                return item
    return None


# --- digests ----------------------------------------------------------------------------------------------------


def _digest(array: Array) -> str:
    hasher = xxhash.xxh3_128(f"{array.dtype.name} {array.shape} ".encode())
    if array.size:
        hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    return hasher.hexdigest()


def _digests_of(file: Path, tensors: Mapping[str, Stored]) -> dict[str, str]:
    """Returns the digests of a file's tensors, from the cache if the file has not changed."""
    stat = file.stat()
    state = [stat.st_size, stat.st_mtime_ns]
    cache = user_files.cache_folder()
    places = [file.with_name(f".{file.name}.digests.json")]
    if cache is not None:
        places.append(cache / "digests" / f"{xxhash.xxh3_64_hexdigest(str(file.resolve()).encode())}.json")
    for place in places:
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(place.read_text("utf-8"))
            if kept["file"] == state and kept["digests"].keys() == tensors.keys():
                return dict(kept["digests"])
    log.info("weights.digests", file=str(file), gigabytes=round(stat.st_size / 1e9, 3), detail="once for this file")
    found = {name: _digest(tensor.read()) for name, tensor in tensors.items()}
    for place in places:
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            temporary = place.with_name(f"{place.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps({"file": state, "digests": found}), "utf-8")
            os.replace(temporary, place)
            break
    return found
