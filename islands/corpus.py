"""Opens what ``--data`` names: text files, folders and token arrays, with a part held out.

Text becomes bytes: vocabulary 256, a zero byte after each file. Arrays (``.npy``; ``.bin``: little-endian uint16) are
memory-mapped. Files of text are held out one in twenty by a hash of their content, the same file in every island
and at any path; of an array, and of text in which the hash picks nothing, the last twentieth is held out.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from broker.errors import ConfigError

#: A one-dimensional array of token ids: uint8 of text, or whatever integers a token array holds.
Tokens = npt.NDArray[np.integer[Any]]

BYTE_VOCABULARY: Final = 256
HELD_OUT_ONE_IN: Final = 20
#: Text is held in memory, in every island; more than this belongs into a token array.
MAX_TEXT_BYTES: Final = 256 * 2**20
#: An array is scanned up to here when it is opened, 0.1 s; what lies beyond is checked batch by batch.
SCANNED_TOKENS: Final = 64 * 2**20

_SKIPPED_FOLDERS: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})
#: Of the interpreter's sources: generated tables, and tests, which some distributions leave out.
_SKIPPED_SOURCES: Final = frozenset({"test", "tests", "idle_test", "encodings", "pydoc_data", "lib-dynload"})
#: Text files hold no zero byte; looked for at the start, as git does.
_SNIFFED_BYTES: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Token arrays to train on and to be judged by.

    Attributes:
        train: Token arrays.
        held_out: The same, never trained on.
        vocabulary: Every token id is below it.
        sources: Where the tokens came from, for messages.
    """

    train: tuple[Tokens, ...]
    held_out: tuple[Tokens, ...]
    vocabulary: int
    sources: str


def load_corpus(paths: Sequence[str | os.PathLike[str]] = (), *, vocabulary: int = 0) -> Corpus:
    """Opens files and folders; folders are searched for text in the order of their paths, hidden files skipped.

    Args:
        paths: Files and folders; none stands for the Python sources that came with this interpreter.
        vocabulary: Number of token ids; 0 takes 256 for text, and for arrays the highest id found plus one, rounded
            up to a multiple of 64.

    Raises:
        ConfigError: If a path cannot be read, holds nothing, or holds a token id outside the vocabulary.
    """
    if paths:
        files = [file for path in paths for file in _files(Path(path), _SKIPPED_FOLDERS)]
    else:
        sources = Path(sysconfig.get_path("stdlib"))
        files = [f for f in _files(sources, _SKIPPED_FOLDERS | _SKIPPED_SOURCES) if f.suffix == ".py"]
    named = ", ".join(str(p) for p in paths) or "the interpreter's sources"
    arrays = [_open_array(file) for file in files if _is_array(file)]
    train, held_out = _split_texts(_read_texts([f for f in files if not _is_array(f)], given={Path(p) for p in paths}))
    for array in arrays:
        cut = len(array) - len(array) // HELD_OUT_ONE_IN
        train, held_out = [*train, array[:cut]], [*held_out, array[cut:]]
    if not train:
        raise ConfigError("data", named, "holds no text: name files or folders with text, or .npy or .bin token arrays")
    needed = max((_highest_id(array) + 1 for array in arrays), default=0)
    if len(train) > len(arrays):
        needed = max(needed, BYTE_VOCABULARY)
    if vocabulary and vocabulary < needed:
        raise ConfigError("vocabulary", vocabulary, f"{named} needs at least {needed}; 0 finds out by itself")
    return Corpus(
        train=tuple(train), held_out=tuple(held_out), vocabulary=vocabulary or -(-needed // 64) * 64, sources=named
    )


def _is_array(file: Path) -> bool:
    return file.suffix in (".npy", ".bin")


def _files(path: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Yields ``path`` itself, or the visible files under it in the order of their relative paths.

    Raises:
        ConfigError: If it is not there.
    """
    if not path.exists():
        raise ConfigError("data", str(path), "does not exist: name text files, folders, or .npy or .bin token arrays")
    if not path.is_dir():
        yield path
        return
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _read_texts(files: Iterable[Path], given: set[Path]) -> list[bytes]:
    """Reads the files that are text; binary ones are passed over in folders and refused when ``given`` by name."""
    texts, size = [], 0
    for file in files:
        try:
            with file.open("rb") as opened:
                text = opened.read(_SNIFFED_BYTES)
                binary = b"\0" in text
                text += b"" if binary else opened.read()
        except OSError as err:
            raise ConfigError("data", str(file), f"cannot be read ({err.strerror}): check its permissions") from err
        if file in given and binary:
            raise ConfigError("data", str(file), "is not text: give text, or token ids as .npy or .bin (uint16)")
        if file in given and not text:
            raise ConfigError("data", str(file), "is empty: give a file with text in it")
        if binary or not text:
            continue
        texts.append(text)
        size += len(text)
        if size > MAX_TEXT_BYTES:
            limit = f"the text up to here is more than {MAX_TEXT_BYTES >> 20} MiB, and every island holds it in memory"
            cure = "make it a token array, np.save('tokens.npy', np.fromfile(FILE, np.uint8)), which is memory-mapped"
            raise ConfigError("data", str(file), f"{limit}: {cure}")
    return texts


def _split_texts(texts: Sequence[bytes]) -> tuple[list[Tokens], list[Tokens]]:
    """Joins texts into one array to train on and one held out; none of either when there is no text."""
    if not texts:
        return [], []
    held_out = [text for text in texts if xxhash.xxh3_64_intdigest(text) % HELD_OUT_ONE_IN == 0]
    if held_out and len(held_out) < len(texts):
        train = [text for text in texts if xxhash.xxh3_64_intdigest(text) % HELD_OUT_ONE_IN]
        return [_join(train)], [_join(held_out)]
    whole = _join(texts)
    cut = len(whole) - len(whole) // HELD_OUT_ONE_IN
    return [whole[:cut]], [whole[cut:]]


def _join(texts: Sequence[bytes]) -> Tokens:
    return np.frombuffer(b"\0".join([*texts, b""]), np.uint8)


def _open_array(path: Path) -> Tokens:
    """Memory-maps a token array.

    Raises:
        ConfigError: If it is not a one-dimensional array of integers, or empty.
    """
    try:
        if path.suffix == ".bin":
            array = np.memmap(path, "<u2", mode="r")
        else:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as err:
        cure = "a .npy holds a one-dimensional integer array, a .bin plain little-endian uint16"
        raise ConfigError("data", str(path), f"cannot be opened as token ids ({err}): {cure}") from err
    if array.ndim != 1 or array.dtype.kind not in "iu":
        cure = "token ids are one dimension of integers; flatten and convert it"
        raise ConfigError("data", str(path), f"holds {array.dtype} of shape {array.shape}: {cure}")
    if not len(array):
        raise ConfigError("data", str(path), "is empty: give an array with token ids in it")
    lowest = int(array[:SCANNED_TOKENS].min()) if array.dtype.kind == "i" else 0
    if lowest < 0:
        raise ConfigError("data", str(path), f"holds the token id {lowest}: ids count from 0")
    return array


def _highest_id(array: Tokens) -> int:
    return int(array[:SCANNED_TOKENS].max())
