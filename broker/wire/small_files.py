"""The small files of a model directory, such as configuration and tokenizer; no weights. Pure.

An island that begins a run brings them, 32 MB at most, packed as one msgpack map of name and bytes (PROTOCOL.md,
``files_part``). Names are plain relative paths. What a peer sends is checked again, and weights are never among it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgpack
import xxhash

from broker.wire.messages import Codec, Encoded, Payload

MOST_BYTES, MOST_FILES = 32 << 20, 1024
#: Bytes of a part on the wire, except the last; and the most parts, enough for the largest files with names.
PART_BYTES = 1 << 20
MOST_PARTS = MOST_BYTES // PART_BYTES + 1
WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ot"),
    *(".npz", ".tflite", ".safetensors.index.json", ".bin.index.json"),
)
#: Their digest, their bytes when packed, and these in parts for the wire.
Packed = tuple[str, int, tuple[Payload, ...]]
NO_FILES: Packed = ("", 0, ())
#: A part of a name: printable, not hidden, and no way up.
_PART = re.compile(r"[^\x00-\x1f\x7f\\/:.][^\x00-\x1f\x7f\\/:]*")


def flaw_in(sizes: Mapping[str, int]) -> str:
    """Returns why files with these names and sizes are refused; empty if they are fine."""
    if len(sizes) > MOST_FILES:
        return f"has {len(sizes)} files, more than {MOST_FILES}: move files that are not part of the model elsewhere"
    for name in sizes:
        if len(name) > 255 or not all(map(_PART.fullmatch, name.split("/"))):
            return f"has a file {name!r}, which is no plain relative name: rename it"
        if name.endswith(WEIGHTS):
            return f"has {name} among its small files, and weights travel as tensors: leave it out"
    if (total := sum(sizes.values())) > MOST_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        what = f"{total / 2**20:.1f} MB beside its weights, more than {MOST_BYTES >> 20} MB"
        cure = f"{largest} has {sizes[largest] / 2**20:.1f}; move files that are not part of the model elsewhere"
        return f"has {what}: {cure}"
    return ""


def pack(files: Mapping[str, bytes]) -> bytes:
    """Returns files packed into bytes, the same for the same files."""
    packed: bytes = msgpack.packb(dict(sorted(files.items())))
    return packed


def unpack(packed: bytes) -> dict[str, bytes]:
    """Returns the files of packed bytes, checked; the inverse of :func:`pack`.

    Raises:
        ValueError: It is no such thing, or breaks a rule of :func:`flaw_in`.
    """
    try:
        found = msgpack.unpackb(packed, max_map_len=MOST_FILES)
    except (ValueError, msgpack.UnpackException) as err:
        raise ValueError(f"no packed files ({type(err).__name__})") from err
    if not isinstance(found, dict) or not all(type(n) is str and type(b) is bytes for n, b in found.items()):
        raise ValueError("no map of names and bytes")
    if flaw := flaw_in({name: len(content) for name, content in found.items()}):
        raise ValueError(flaw)
    return found


def digest_of(packed: bytes) -> str:
    """Returns the digest of packed files, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(packed)


def packed_for_wire(files: Mapping[str, bytes]) -> Packed:
    """Returns files cut into parts of one buffer each, labelled float32 whatever the bytes are."""
    if not files:
        return NO_FILES
    packed = pack(files)
    whole = memoryview(packed + bytes(-len(packed) % 4))
    pieces = [whole[i : i + PART_BYTES] for i in range(0, len(whole), PART_BYTES)]
    parts = tuple(
        (Encoded(codec=Codec.F32, shape=(len(p) // 4,), checksum=xxhash.xxh3_64_intdigest(p), data=p),) for p in pieces
    )
    return digest_of(packed), len(packed), parts


def joined(parts: Sequence[Payload], size: int) -> bytes:
    """Returns the joined parts, cut to ``size`` bytes."""
    return b"".join(bytes(each.data) for part in parts for each in part)[:size]
