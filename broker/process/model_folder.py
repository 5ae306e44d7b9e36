"""Reads and writes the small files of a model's directory (:mod:`broker.wire.small_files`)."""

from __future__ import annotations

import shutil
from pathlib import Path

from broker.base.errors import ConfigError
from broker.wire.small_files import WEIGHTS, flaw_in, unpack


def read(folder: Path, *, within: Path | None = None) -> dict[str, bytes]:
    """Returns name -> bytes of a directory's files, without weights and what is hidden.

    Args:
        folder: The directory.
        within: Where links of it may lead; None: the directory itself.

    Raises:
        ConfigError: They are too many or too large, or a link leads elsewhere; names the file and the cure.
        OSError: A file cannot be read.
    """
    paths: dict[str, Path] = {}
    inside = (within or folder).resolve()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name.endswith(WEIGHTS) or any(part.startswith(".") for part in name.split("/")):
            continue
        if not path.resolve().is_relative_to(inside):
            raise ConfigError("model", str(path), f"leads out of {folder}: put a copy there")
        paths[name] = path
    if flaw := flaw_in({name: path.stat().st_size for name, path in paths.items()}):
        raise ConfigError("model", str(folder), flaw)
    return {name: path.read_bytes() for name, path in paths.items()}


def write(folder: Path, packed: bytes) -> None:
    """Writes packed files as a directory, whole or not at all; replaces one that is there.

    Raises:
        ValueError: As :func:`unpack` does.
        OSError: It cannot be written.
    """
    files = unpack(packed)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        for name, content in files.items():
            path = part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
