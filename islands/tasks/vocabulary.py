"""Byte-pair vocabularies: trained on the text, lossless, equal on every machine for equal text.

Pair merging (Gage, 1994; Sennrich et al., 2016, https://arxiv.org/abs/1508.07909) over *bytes*, as GPT-2 does it: all
256 bytes are pieces, so any text can be encoded, and decoding gives it back byte for byte. Nothing here asks whether
text is UTF-8. Decoding it first would force a choice for what is not (refuse, replace, or escape), and the library's
own mark for a space, U+2581, would come back as a space from a text that contains it. The price: a letter outside
ASCII takes two to four bytes, which are merged only if it is frequent.

:mod:`sentencepiece` trains and segments in C++; it works on characters, so each byte is handed over as one:

    printable ASCII as itself, space as U+2581, control bytes as their pictures (newline as U+240A),
    bytes from 0x80 as U+0180 and up: letters to the library, so that UTF-8 sequences grow together within words

What may grow together: letters, digits (never: each is a piece), and everything else, each with spaces before it. A
newline ends a piece. Measured on the interpreter's sources with one core of two: 4,096 pieces, trained on 4 MiB in
1.4 s, make 3.4 bytes per token; 32,768 make 3.9. Text is encoded at 3 to 5 MB/s.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from broker.base.errors import ConfigError
from broker.process import logs

log = logs.get(__name__)

#: All bytes, the library's own piece for unknown characters, and pairs enough to be worth it.
MIN_SIZE: Final = 512
MAX_SIZE: Final = 2**16
#: More text changes the last few pieces only, and training takes time in proportion.
SAMPLE_BYTES: Final = 4 * 2**20
_SAMPLED_TOGETHER_BYTES: Final = 2**16
#: Encoded in one call: the library's queue of pairs stays in the cache (16 lines are 1.5 times as fast as one line, and
#: 3 times as fast as 500 KB), and a line without end costs no more than others.
_ENCODED_TOGETHER_BYTES: Final = 512
_MAX_LINE_BYTES: Final = 4096
#: Files kept in the cache, the most recently used ones.
_CACHED_FILES: Final = 16

_CHARACTERS: Final = np.arange(0x100, 0x200, dtype="<u2")
_CHARACTERS[:0x20] = np.arange(0x2400, 0x2420)
_CHARACTERS[0x20] = 0x2581
_CHARACTERS[0x21:0x7F] = np.arange(0x21, 0x7F)
_CHARACTERS[0x7F] = 0x2421
_ALL_BYTES: Final = [bytes([byte]) for byte in range(256)]
_BYTE_OF: Final = {int(character): byte for byte, character in enumerate(_CHARACTERS)}

_OPTIONS: Final[dict[str, Any]] = {
    "model_type": "bpe",
    "hard_vocab_limit": False,  # too few pairs: we find out and say so ourselves
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,  # indentation is one token
    "split_digits": True,
    "character_coverage": 1.0,
    "max_sentence_length": 4 * _MAX_LINE_BYTES,  # longer ones are dropped; a character takes 3 bytes at most
    "unk_id": 0,
    "bos_id": -1,
    "eos_id": -1,
    "pad_id": -1,
    "num_threads": 1,
    "minloglevel": 2,  # errors only
}


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """A byte-pair vocabulary: pieces of text by token id, and the encoder.

    Attributes:
        pieces: The bytes of each token; of token 0, which is never used, none.
    """

    pieces: tuple[bytes, ...]
    _processor: Any = field(repr=False)

    @property
    def digest(self) -> str:
        """A digest of the pieces in their order: 32 hexadecimal digits."""
        return xxhash.xxh3_128_hexdigest(b"".join(len(piece).to_bytes(2, "little") + piece for piece in self.pieces))

    @property
    def size(self) -> int:
        """Number of token ids."""
        return len(self.pieces)

    def encode(self, text: bytes) -> npt.NDArray[np.uint16]:
        """Returns the token ids of ``text``, shape (n,); their pieces joined are the text."""
        encoded = [np.empty(0, np.uint16)]
        chunks = map(_as_characters, _cut(text, _ENCODED_TOGETHER_BYTES))
        while some := list(itertools.islice(chunks, 4096)):
            ids = self._processor.encode(some, out_type="numpy", num_threads=1)
            encoded.append(np.concatenate(ids, dtype=np.uint16, casting="unsafe"))
        return np.concatenate(encoded)


def train(texts: Sequence[bytes], size: int, *, cache: Path | None = None) -> Vocabulary:
    """Returns a vocabulary of ``size`` pieces, trained on a sample of ``texts``.

    The same texts in the same order give the same vocabulary; it takes one thread and no randomness. The sample,
    :data:`SAMPLE_BYTES` at most, is spread evenly over all texts.

    Args:
        texts: Training texts only, never held-out ones.
        size: Number of token ids.
        cache: Folder in which vocabularies are remembered by their sample and size; None: none is.

    Raises:
        ConfigError: If there can be no such vocabulary: the size is out of bounds, or the texts have too few pairs.
    """
    if not MIN_SIZE <= size <= MAX_SIZE:
        cure = f"must be 0, for bytes, or from {MIN_SIZE} to {MAX_SIZE} pieces; 4096 suits small models"
        raise ConfigError("bpe", size, cure)
    import sentencepiece  # here, not above: 50 ms that models of bytes need not wait for

    sample = _sample(b"".join(texts))
    # Another release of the library may break ties otherwise.
    recipe = repr((sentencepiece.__version__, sorted(_OPTIONS.items()))).encode() + _CHARACTERS.tobytes()
    key = f"vocabulary-{size}-{xxhash.xxh3_128_hexdigest(recipe + sample)}"
    model = remembered(cache, key, lambda: _train(sample, size))
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    if len(processor) < size:
        found = f"{len(sample)} bytes of text have pairs for {len(processor)} pieces only"
        raise ConfigError("bpe", size, f"{found}: give more text, or lower it")
    pieces = (b"", *(_as_bytes(processor.id_to_piece(token)) for token in range(1, size)))
    assert set(_ALL_BYTES) <= set(pieces), "a byte that is no piece would be lost"
    return Vocabulary(pieces, processor)


def _train(sample: bytes, size: int) -> bytes:
    """Returns the library's own form of a trained vocabulary."""
    import sentencepiece

    written = io.BytesIO()
    # Each byte is a sentence once: what the library has not seen it leaves out, required_chars or not.
    sentences = map(_as_characters, itertools.chain(_cut(sample, 1), _ALL_BYTES))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_writer=written, vocab_size=size, **_OPTIONS
    )
    return written.getvalue()


def _sample(text: bytes) -> bytes:
    """Returns stretches of ``text``, evenly spaced; all of it when it is short."""
    if len(text) <= SAMPLE_BYTES:
        return text
    starts = np.linspace(0, len(text) - _SAMPLED_TOGETHER_BYTES, SAMPLE_BYTES // _SAMPLED_TOGETHER_BYTES).astype(int)
    return b"".join([text[start : start + _SAMPLED_TOGETHER_BYTES] for start in starts.tolist()])


def _cut(text: bytes, at_least: int) -> Iterator[bytes]:
    """Yields ``text`` in chunks that end at newlines, which no piece crosses; long lines are cut."""
    start = 0
    while start < len(text):
        limit = start + _MAX_LINE_BYTES
        end = text.find(b"\n", start + at_least - 1, limit) + 1 or limit
        yield text[start:end]
        start = end


def _as_characters(text: bytes) -> str:
    return _CHARACTERS[np.frombuffer(text, np.uint8)].tobytes().decode("utf-16-le")


def _as_bytes(piece: str) -> bytes:
    return bytes([_BYTE_OF[ord(character)] for character in piece])


# --- on disk ---------------------------------------------------------------------------------------------------


def remembered(folder: Path | None, key: str, build: Callable[[], bytes]) -> bytes:
    """Returns the result of ``build``, from a cache file in ``folder`` if there is one.

    Islands of one machine start together and want the same: the first one builds, the others wait for it. A file is
    replaced as a whole and carries a checksum; one that is damaged is built again. A folder that cannot be used costs
    the time of building, nothing else.
    """
    if folder is None:
        return build()
    path, content = folder / key, None
    try:
        content = _read(path)
        if content is None:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("wb") as lock:  # the kernel lets go of it should this process die
                fcntl.flock(lock, fcntl.LOCK_EX)
                content = _read(path)
                if content is None:
                    content = build()
                    _write(path, content)
                    _forget_old(folder)
    except OSError as err:
        log.warning("cache.unusable", folder=str(folder), error=str(err))
    return build() if content is None else content


def _read(path: Path) -> bytes | None:
    """Returns the content of a complete and undamaged file, else None."""
    try:
        written = path.read_bytes()
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):  # a folder that may only be read still serves
        os.utime(path)
    checksum, content = written[:16], written[16:]
    return content if xxhash.xxh3_128_digest(content) == checksum else None


def _write(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(xxhash.xxh3_128_digest(content) + content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _forget_old(folder: Path) -> None:
    """Deletes all but the most recently used cache files; open ones stay readable."""
    files = [file for file in folder.iterdir() if file.name.startswith(("vocabulary-", "tokens-"))]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)[_CACHED_FILES:]:
        file.unlink(missing_ok=True)
