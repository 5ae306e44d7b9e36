"""Reads the global model of a run from its stores, also while it goes on; one file of it.

The file's metadata says which version each fragment has. A store is read without its lock
(:mod:`aggregator.store.layout`). While a run is live, fragments are read one after another, each whole: their versions
may be those of different moments, as they are in every island.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from aggregator.interface.events import Commit
from aggregator.ledger.ledger import tokens_trained
from aggregator.merge.fragment_state import Vector
from aggregator.state.records import MANIFEST, RUN_ID, manifest_from_rows
from aggregator.store.commit_file import Damaged
from aggregator.store.layout import mapped, read_newest, read_run, read_seed
from broker.base.errors import ConfigError, Unavailable
from broker.wire.fragments import FragmentManifest, shard_of
from broker.wire.schema import Unfit

DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


class Which(StrEnum):
    """The version of each fragment to read."""

    NEWEST = "newest"
    SEED = "seed"  # version 0, before any training


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalModel:
    """One global model in memory.

    Attributes:
        run_id: Whose.
        manifest: Its fragments.
        tensors: Name -> values, float32; what the run has cut is whole. Local tensors (batch statistics and the like)
            are in no store.
        commits: Of each fragment, with its version.
    """

    run_id: str
    manifest: FragmentManifest
    tensors: Mapping[str, NDArray[Any]]
    commits: tuple[Commit, ...]

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment."""
        return tuple(each.fragment_version for each in self.commits)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that stand for the bytes of all fragments."""
        return xxhash.xxh3_64_hexdigest(" ".join(each.digest for each in self.commits).encode())

    @property
    def tokens(self) -> int:
        """Tokens that the islands had trained, as far as was known when the newest of these versions was made."""
        return max(tokens_trained(each.ledger) for each in self.commits)


def read_model(stores: Sequence[Sequence[Path]], which: Which = Which.NEWEST) -> GlobalModel:
    """Reads a model. Takes memory for one copy of it.

    Args:
        stores: Of each shard, in their order, its stores.
        which: Newest versions, or the seed.

    Raises:
        Unavailable: If the stores have no model yet, or a file cannot be read.
    """
    run_id, manifest = _run_of(stores[0][0])
    tensors: dict[str, NDArray[Any]] = {}
    commits = []
    for fragment_id, specs in enumerate(manifest.fragments):
        store, commit, params = _newest(stores[shard_of(fragment_id, len(stores))], fragment_id, which)
        if params.size != manifest.sizes[fragment_id]:
            holds = f"fragment {fragment_id} of {store} holds {params.size} elements"
            cure = "its commits are of another run: restore the store from one copy"
            raise Unavailable(f"{holds}, its manifest {manifest.sizes[fragment_id]}; {cure}", definite=True)
        ends = np.cumsum([spec.size for spec in specs])[:-1]
        for spec, flat in zip(specs, np.split(params, ends), strict=True):
            here = manifest.sections.get(spec.name)
            if here is None:
                tensors[spec.name] = flat.reshape(spec.shape)
                continue
            if here.tensor not in tensors:
                tensors[here.tensor] = np.empty(manifest.whole[here.tensor].shape, np.float32)
            tensors[here.tensor][here.start : here.stop] = flat.reshape(spec.shape)
        commits.append(commit)
    return GlobalModel(run_id=run_id, manifest=manifest, tensors=tensors, commits=tuple(commits))


def stores_of(directory: Path) -> list[list[Path]]:
    """Returns each shard's stores in order: its first aggregator's, then those of its standbys.

    Raises:
        ConfigError: If the directory holds no store.
    """
    if (directory / "fragments").is_dir():
        return [[directory]]
    if not (directory / "store" / "fragments").is_dir():
        raise ConfigError("RUN_DIR", str(directory), "must be the directory of a run or a store, with fragments in it")
    shards = [[directory / "store", *sorted(directory.glob("standby-*/store"))]]
    others = [shard for shard in directory.glob("aggregator-[0-9]*") if shard.name[11:].isdecimal()]
    others.sort(key=lambda shard: int(shard.name[11:]))
    return shards + [[each / "store", *sorted(directory.glob(f"{each.name}-standby-*/store"))] for each in others]


def _newest(stores: Sequence[Path], fragment_id: int, which: Which) -> tuple[Path, Commit, Vector]:
    """Returns the newest version of a fragment in the stores of its shard."""
    found: list[tuple[Path, Commit, Vector]] = []
    failed: Unavailable | Damaged | None = None
    for store in stores:
        try:
            commit, params = (read_seed if which is Which.SEED else read_newest)(store, fragment_id)
        except (Unavailable, Damaged) as err:
            failed = failed or err
            continue
        if not found or (commit.epoch, commit.fragment_version) > (found[0][1].epoch, found[0][1].fragment_version):
            found = [(store, commit, params)]
    if not found:
        assert failed is not None
        raise failed
    return found[0]


def _run_of(store: Path) -> tuple[str, FragmentManifest]:
    record = read_run(store)
    if record is None or record.get(MANIFEST) is None:
        raise Unavailable(f"{store} holds no model yet; wait until an island has joined", definite=True)
    try:
        return str(record[RUN_ID]), manifest_from_rows(record[MANIFEST])
    except (KeyError, TypeError, Unfit) as err:
        cure = "export it with the program that wrote it"
        raise Unavailable(f"the run record of {store} does not read as one ({err!r}); {cure}", definite=True) from err


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The file that was written.

    Attributes:
        path: Where.
        run_id: Whose model.
        versions: Fragment version of each fragment.
        parameters: Elements of all tensors.
        file_bytes: Size of the file.
        digest: Names the model, whatever the number format (:attr:`GlobalModel.digest`).
    """

    path: str
    run_id: str
    versions: tuple[int, ...]
    parameters: int
    file_bytes: int
    digest: str


def export(directory: Path | Sequence[Path], out: Path, *, which: Which = Which.NEWEST, dtype: str = "f32") -> Exported:
    """Writes the global model of a run as safetensors, replacing ``out`` at once or not at all.

    Tensors have the names and shapes of the run's manifest. Local tensors (batch statistics and the like) are in no
    store and so not in the file. Takes memory for one copy of the model.

    Args:
        directory: Of a run (with a ``store`` in it, and those of standbys and of each further shard), or a store
            itself; or several stores that have all fragments among them.
        out: File to write; its directory must exist.
        which: Newest versions, or the seed.
        dtype: A key of :data:`DTYPES`; bf16 rounds to nearest.

    Raises:
        ConfigError: If the directory holds no store, or ``dtype`` is unknown.
        Unavailable: If the store has no model yet, or a file cannot be read or written.
    """
    if dtype not in DTYPES:
        raise ConfigError("dtype", dtype, f"must be one of {', '.join(sorted(DTYPES))}")
    if out.is_dir():
        raise ConfigError("out", str(out), f"is a folder; name the file in it, such as {out / 'model.safetensors'}")
    stores = stores_of(directory) if isinstance(directory, Path) else [[store] for store in directory]
    model = read_model(stores, which)
    tensors = {name: tensor.astype(DTYPES[dtype], copy=False) for name, tensor in model.tensors.items()}
    metadata = {
        "format": "pt",  # what other libraries expect to find: arrays in C order
        "run_id": model.run_id,
        "manifest_digest": model.manifest.digest,
        "fragment_versions": json.dumps(model.versions),
        "fragment_digests": json.dumps([each.digest for each in model.commits]),  # of the float32 bytes
    }
    _save(tensors, out, metadata)
    return Exported(
        path=str(out),
        run_id=model.run_id,
        versions=model.versions,
        parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()),
        file_bytes=out.stat().st_size,
        digest=model.digest,
    )


def _save(tensors: dict[str, NDArray[Any]], out: Path, metadata: dict[str, str]) -> None:
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with mapped(f"cannot write {out}", definite=True):
            temporary.touch(mode=0o644)  # a missing directory or right shows here, as an error with a cause
            save_file(tensors, temporary, metadata=metadata)
            with temporary.open("rb") as file:
                temporary.chmod(0o644)  # some versions of the library leave the file to its owner alone
                os.fsync(file.fileno())
            os.replace(temporary, out)
    except SafetensorError as err:
        cure = "free space there, or choose another --out"
        raise Unavailable(f"cannot write {out}: {err}; {cure}", definite=True) from err
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
