"""Compares a frozen set with the code of this tree, item by item."""

from __future__ import annotations

import difflib
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from broker.wire.frames import decode
from broker.wire.messages import KINDS
from tests.frozen import making


def items(of: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields each item of a set: its name, and what returns its first difference, or an empty text."""
    expected = json.loads((of / "expected.json").read_text(encoding="utf-8"))
    for name, outcome in sorted(expected["tapes"].items()):
        yield f"tape {name}", partial(_packed, of / "tapes" / f"{name}.tar.xz", outcome, making.replayed)
    yield "store", partial(_packed, of / "store.tar.xz", expected["store"], making.values_of_store)
    yield "checkpoint", partial(_values, expected["checkpoint"], making.values_of_checkpoint, of / making.CHECKPOINT)
    recorded: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for line in (of / "frames.txt").read_text(encoding="utf-8").splitlines():
        recorded.setdefault(line.partition(" ")[0], []).append(line)
    for kind, lines in sorted(recorded.items()):
        yield f"frames of {kind}", partial(_frames, lines)
    if (of / "help").exists():
        now, was = making.helps(), {path.name.partition(".")[0]: _text(path) for path in (of / "help").iterdir()}
        for name in sorted(now.keys() | was.keys()):
            yield f"help {name}", partial(_diff, was.get(name, ""), now.get(name, ""))


def compare(of: Path, words: Sequence[str] = (), *, strict: bool = False) -> bool:
    """Prints of each item, or of those with one of the words, whether it is equal; returns whether all are.

    Help may differ, unless ``strict``.
    """
    equal = True
    for name, difference_of in items(of):
        if words and not any(word in name for word in words):
            continue
        difference = difference_of()
        equal = equal and (not difference or (name.startswith("help ") and not strict))
        print(f"DIFFERS  {name}: {difference}" if difference else f"equal    {name}", flush=True)
    return equal


def _first_difference(was: str, now: str) -> str:
    for number, (one, other) in enumerate(zip_longest(was.splitlines(), now.splitlines()), start=1):
        if one != other:
            return f"line {number}\n    was {one}\n    is  {other}"
    return ""


def _values(expected: Any, read: Callable[[Path], Any], path: Path) -> str:
    try:
        return _first_difference(making.in_lines(expected), making.in_lines(read(path)))
    except Exception as err:  # noqa: BLE001 - whatever becomes of files that an earlier tree wrote is the difference
        return f"{type(err).__name__}: {err}"


def _packed(packed: Path, expected: Any, read: Callable[[Path], Any]) -> str:
    with making.unpacked(packed) as folder:
        return _values(expected, read, folder)


def _frames(lines: Sequence[str]) -> str:
    for line in lines:
        frames = [bytes.fromhex(text.strip("-")) for text in line.split()[1:]]
        try:
            again = making.frame_line(decode(frames))
        except Exception as err:  # noqa: BLE001 - likewise
            return f"{type(err).__name__}: {err}\n    {line}"
        if again != line:
            return f"is encoded in another way\n    was {line}\n    is  {again}"
    return "" if lines else "the set has no message of this kind, which is new: make it anew"


def _text(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def _diff(was: str, now: str) -> str:
    lines = difflib.unified_diff(was.splitlines(), now.splitlines(), "was", "is", lineterm="", n=1)
    return "".join(f"\n    {line}" for line in lines)
