"""``atoll export``: writes the global model as one safetensors file, also during a run.

The file's metadata says which version each fragment has (:mod:`ops.inspect.global_model`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from aggregator.store.layout import mapped
from broker.process import sources
from broker.wire.errors import ConfigError, Unavailable
from ops.inspect.global_model import Which, read_model, stores_of

DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The file that was written.

    Attributes:
        path: Where.
        run_id: Whose model.
        versions: Fragment version of each fragment.
        parameters: Elements of all tensors.
        file_bytes: Size of the file.
        digest: Names the model, whatever the number format (:attr:`ops.inspect.global_model.GlobalModel.digest`).
    """

    path: str
    run_id: str
    versions: tuple[int, ...]
    parameters: int
    file_bytes: int
    digest: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll export``."""
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="directory of a run, or a store by itself")
    parser.add_argument(
        "--out", type=sources.as_path, metavar="FILE", help="file to write (default: model.safetensors in RUN_DIR)"
    )
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default="f32", help="number format of the tensors (default: f32)"
    )
    parser.add_argument("--seed-version", action="store_true", help="write the model before training")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Writes the file and says what is in it; returns the exit code.

    Raises:
        ConfigError: If the directory holds no store.
        Unavailable: If the store has no model yet, or a file cannot be read or written.
    """
    which = Which.SEED if args.seed_version else Which.NEWEST
    out = args.out if args.out is not None else args.directory / "model.safetensors"
    exported = export(args.directory, out, which=which, dtype=args.dtype)
    if args.json:
        print(json.dumps(asdict(exported)))
    else:
        size = f"{exported.parameters:,} parameters as {args.dtype}, {exported.file_bytes / 1e6:.1f} MB"
        print(f"{exported.path}: run {exported.run_id}, {size}")
        print("fragment versions: " + " ".join(map(str, exported.versions)))
    return 0


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
