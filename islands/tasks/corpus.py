"""Opens the data named by ``--data`` (text, folders, packages, token arrays), and holds a part out.

Text becomes bytes, vocabulary 256, or pieces of several bytes (:mod:`islands.tasks.vocabulary`); a zero byte after each
file. Arrays (``.npy``; ``.bin``: little-endian uint16) are memory-mapped. Files of text are held out one in twenty by
a hash of their content, the same file in every island and at any path; of an array, and of text in which the hash
picks nothing, the last twentieth is held out.

``python:stdlib`` names the Python sources that came with the interpreter and ``python:PACKAGE`` those of an installed
package, without tests: text of some size on every machine, without a download. Sources differ between releases, so
the same names are the same text only where the same releases are installed.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from broker.base.errors import ConfigError, cure_of
from broker.process.user_files import cache_folder
from islands.tasks.vocabulary import Vocabulary, remembered, train

#: A one-dimensional array of token ids: uint8 of text, uint16 of its pieces, or whatever integers a token array holds.
Tokens = npt.NDArray[np.integer[Any]]

#: Before the name of an installed package whose sources are meant: such a name is no path.
PYTHON: Final = "python:"
BYTE_VOCABULARY: Final = 256
HELD_OUT_ONE_IN: Final = 20
#: Text is held in memory, in every island; more than this belongs into a token array.
MAX_TEXT_BYTES: Final = 256 * 2**20
#: An array is scanned up to here when it is opened, 0.1 s; what lies beyond is checked batch by batch.
SCANNED_TOKENS: Final = 64 * 2**20

_SKIPPED_FOLDERS: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})
#: Python sources to skip: generated tables, and tests, which some distributions leave out.
_SKIPPED_SOURCES: Final = frozenset({"test", "tests", "idle_test", "encodings", "pydoc_data", "lib-dynload"})
#: Text files hold no zero byte; looked for at the start, as git does.
_SNIFFED_BYTES: Final = 8192
#: Hashed together: a copy of them is all the memory it takes.
_HASHED_TOKENS: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Token arrays for training and for held-out evaluation.

    Attributes:
        train: Token arrays.
        held_out: Token arrays that are never trained on.
        vocabulary: Every token id is below it.
        sources: Where the tokens came from, for messages.
        bytes_per_token: The bytes per token of the held-out text; 1 for bytes, 0 when arrays are among it.
    """

    train: tuple[Tokens, ...]
    held_out: tuple[Tokens, ...]
    vocabulary: int
    sources: str
    bytes_per_token: float = 0.0

    @property
    def digest(self) -> str:
        """A digest of the training and held-out tokens in their order: 32 hexadecimal digits.

        The same for the same tokens whatever holds them: an array of bytes is as good as the text. Of a memory-mapped
        array beyond :data:`SCANNED_TOKENS` its length and stretches evenly spread count. 0.07 s for 10 MB of text.
        """
        digest = xxhash.xxh3_128()
        for name, arrays in (("train", self.train), ("held out", self.held_out)):
            for array in arrays:
                digest.update(f"{name} {len(array)} ".encode())
                last = max(0, len(array) - _HASHED_TOKENS)
                stretches = -(-len(array) // _HASHED_TOKENS)
                if isinstance(array, np.memmap):
                    stretches = min(stretches, SCANNED_TOKENS // _HASHED_TOKENS)
                for start in np.linspace(0, last, stretches).astype(int).tolist():
                    digest.update(array[start : start + _HASHED_TOKENS].astype("<u4").tobytes())
        return digest.hexdigest()


def load_corpus(paths: Sequence[str | os.PathLike[str]] = (), *, vocabulary: int = 0, bpe: int = 0) -> Corpus:
    """Opens files and folders; a folder's text files come in the order of paths, without hidden ones.

    Args:
        paths: Files, folders, and ``python:stdlib`` or ``python:PACKAGE``; empty means ``python:stdlib``.
        vocabulary: Number of token ids; 0 takes 256 for text, and for arrays the highest id found plus one, rounded
            up to a multiple of 64.
        bpe: 0: a token of text is a byte. Otherwise the number of pieces, of which a vocabulary is trained on what is
            not held out. Vocabulary and tokens are remembered in the user's cache folder.

    Raises:
        ConfigError: If ``paths`` is one path and no list; if a path cannot be read, holds nothing, or holds a token id
            outside the vocabulary; or if there can be no vocabulary of ``bpe`` pieces.
    """
    if isinstance(paths, str | os.PathLike):  # whose letters would be taken for paths
        raise ConfigError("data", str(paths), f'must be a list: write ["{paths}"]')
    files = [file for path in paths or [f"{PYTHON}stdlib"] for file in files_of(path)]
    named = ", ".join(str(p) for p in paths) or "the interpreter's sources"
    arrays = [_open_array(file) for file in files if is_array(file)]
    texts, held_out_texts = _split_texts(
        _read_texts([f for f in files if not is_array(f)], given={Path(p) for p in paths})
    )
    if not (texts or arrays):
        raise ConfigError("data", named, "holds no text: name files or folders with text, or .npy or .bin token arrays")
    if bpe and arrays:
        cure = f"{named} holds token arrays, whose ids are given: set bpe = 0, or name the text they were made of"
        raise ConfigError("bpe", bpe, cure)
    pieces = train([texts], bpe, cache=cache_folder()) if bpe else None
    trained, held_out = [_tokens(texts, pieces)], [_tokens(held_out_texts, pieces)]
    bytes_per_token = 0.0 if arrays else len(held_out_texts) / max(1, len(held_out[0]))
    for array in arrays:
        cut = len(array) - len(array) // HELD_OUT_ONE_IN
        trained.append(array[:cut])
        held_out.append(array[cut:])
    needed = max((_highest_id(array) + 1 for array in arrays), default=0)
    if texts:
        needed = max(needed, BYTE_VOCABULARY if pieces is None else pieces.size)
    if vocabulary and vocabulary < needed:
        raise ConfigError("vocabulary", vocabulary, f"{named} needs at least {needed}; 0 finds out by itself")
    return Corpus(
        train=tuple(array for array in trained if len(array)),
        held_out=tuple(array for array in held_out if len(array)),
        vocabulary=vocabulary or -(-needed // 64) * 64,
        sources=named,
        bytes_per_token=bytes_per_token,
    )


def _tokens(text: bytes, pieces: Vocabulary | None) -> Tokens:
    """Returns the token ids of text: its bytes, or its pieces, which are cached."""
    if pieces is None:
        return np.frombuffer(text, np.uint8)
    key = f"tokens-{pieces.digest}-{xxhash.xxh3_128_hexdigest(text)}"
    return np.frombuffer(remembered(cache_folder(), key, lambda: pieces.encode(text).astype("<u2").tobytes()), "<u2")


def is_array(file: Path) -> bool:
    """Returns whether a file's name says that it holds token ids."""
    return file.suffix in (".npy", ".bin")


def holds_text(content: bytes) -> bool:
    """Returns whether the content of a file, or its first bytes, is text to train on."""
    return bool(content) and b"\0" not in content[:_SNIFFED_BYTES]


def files_of(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields the files of one entry of ``data``, in reading order.

    Raises:
        ConfigError: It is not there.
    """
    if not (isinstance(path, str) and path.startswith(PYTHON)):
        yield from _files(Path(path), _SKIPPED_FOLDERS)
        return
    for place in _python_places(path):
        yield from (f for f in _files(place, _SKIPPED_FOLDERS | _SKIPPED_SOURCES) if f.suffix == ".py")


def _python_places(path: str) -> list[Path]:
    """Returns the folders or file with the sources of ``python:NAME``; imports nothing.

    Raises:
        ConfigError: If no package of that name with sources is installed.
    """
    name = path.removeprefix(PYTHON)
    if name == "stdlib":
        return [Path(sysconfig.get_path("stdlib"))]
    if not name.isidentifier():
        cure = "must read python:stdlib, or python: and the name a package is imported by, without dots or versions"
        raise ConfigError("data", path, cure)
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module made by hand, such as __main__
        spec = None
    if spec is None:
        cure = f"no package is imported as {name} here: pip install it, on every island, or name text files"
        raise ConfigError("data", path, cure)
    places = [Path(place) for place in spec.submodule_search_locations or []]
    if not places and spec.has_location and spec.origin is not None and spec.origin.endswith(".py"):
        places = [Path(spec.origin)]
    if not places:
        raise ConfigError("data", path, f"{name} has no Python sources: name a package that has, or python:stdlib")
    return places


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
    """Reads text files; a binary one is skipped in a folder, and refused if it was ``given`` by name."""
    texts, size = [], 0
    for file in files:
        try:
            with file.open("rb") as opened:
                text = opened.read(_SNIFFED_BYTES)
                binary = bool(text) and not holds_text(text)
                text += b"" if binary else opened.read()
        except OSError as err:
            raise ConfigError("data", str(file), f"cannot be read ({err.strerror}): {cure_of(err)}") from err
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


def _split_texts(texts: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Joins texts into one for training and one held out; both empty if there are no texts."""
    held_out = [text for text in texts if xxhash.xxh3_64_intdigest(text) % HELD_OUT_ONE_IN == 0]
    if held_out and len(held_out) < len(texts):
        trained = [text for text in texts if xxhash.xxh3_64_intdigest(text) % HELD_OUT_ONE_IN]
        return _join(trained), _join(held_out)
    whole = _join(texts)
    cut = len(whole) - len(whole) // HELD_OUT_ONE_IN
    return whole[:cut], whole[cut:]


def _join(texts: Sequence[bytes]) -> bytes:
    return b"\0".join([*texts, b""])


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
