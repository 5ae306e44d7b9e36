"""Commits and manifests as plain data, for the store, and back.

Plain data is what msgpack writes: maps with text keys, lists, text, numbers. The forms here are part of the store's
format (:data:`aggregator.store.commit_file.FORMAT`); the parts that also travel over the wire have the same form there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from aggregator.interface.events import Commit
from broker.wire.fragments import FragmentManifest, TensorSpec
from broker.wire.messages import Merged
from broker.wire.ranges import StepRange
from broker.wire.schema import Record, Unfit

#: Keys of the run record that ``export`` relies on; the other keys are the core's own.
RUN_ID = "run_id"
MANIFEST = "manifest"

_MERGED = Record(Merged)
_TENSOR = Record(TensorSpec)
#: Of a contribution in a line of the ledger, and of its range.
_FIELDS = frozenset(each.name for each in dataclasses.fields(Merged)) - {"data"}
_STEPS = frozenset(each.name for each in dataclasses.fields(StepRange))
_NUMBERS = ("fragment_id", "fragment_version", "epoch", "round_id")


def commit_to_map(commit: Commit) -> dict[str, Any]:
    """Returns a commit as plain data; ``ledger`` must be plain data already.

    Raises:
        Unfit: If a contribution holds a value that may not be written, such as a NaN.
    """
    numbers: dict[str, Any] = {name: getattr(commit, name) for name in _NUMBERS}
    return numbers | {
        "digest": commit.digest,
        "contributions": [_MERGED.write(merged) for merged in commit.contributions],
        "ledger": dict(commit.ledger),
    }


def commit_from_map(row: Mapping[str, Any]) -> Commit:
    """Returns the commit that :func:`commit_to_map` wrote.

    Raises:
        Unfit: If a field is missing or does not fit.
    """
    for name in (*_NUMBERS, "digest", "contributions", "ledger"):
        if name not in row:
            raise Unfit("missing", "to be there", at=name)
    for name in _NUMBERS:
        if type(row[name]) is not int:
            raise Unfit(row[name], "an integer", at=name)
    return Commit(
        **{name: row[name] for name in _NUMBERS},
        digest=row["digest"],
        contributions=tuple(_MERGED.read(merged) for merged in row["contributions"]),
        ledger=row["ledger"],
    )


def ledger_line(commit: Commit) -> dict[str, Any]:
    """Returns the ledger's line of one version: its contributions, with weight and staleness.

    The accounts of all islands (``commit.ledger``) stay in the commit: they are the state, this is the history.
    """
    row = commit_to_map(commit)
    del row["ledger"]
    return row


def check_ledger_line(line: Mapping[str, Any]) -> None:
    """Raises Unfit if a line is not one that :func:`ledger_line` writes."""
    commit_from_map({**line, "ledger": {}})


def is_ledger_line(line: Mapping[str, Any]) -> bool:
    """Returns True if a line has the fields of a ledger line; values are not checked."""
    if any(type(line.get(name)) is not int for name in _NUMBERS) or type(line.get("digest")) is not str:
        return False
    merged = line.get("contributions")
    return isinstance(merged, list) and all(
        isinstance(each, dict)
        and each.keys() >= _FIELDS
        and isinstance(each["steps"], dict)
        and each["steps"].keys() >= _STEPS
        for each in merged
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The newest version of a fragment that has its line before a segment.

    Attributes:
        merged: Island -> tokens merged by then, by the books of that version; None where these were not at hand.
    """

    version: int
    digest: str
    epoch: int
    merged: Mapping[str, int] | None

    @classmethod
    def behind(cls, row: Mapping[str, Any]) -> Carried:
        """Returns the version of a ledger line, as it is carried over behind the line."""
        return cls(version=row["fragment_version"], digest=row["digest"], epoch=row.get("epoch", 0), merged=None)


def manifest_to_rows(manifest: FragmentManifest) -> list[list[list[Any]]]:
    """Returns a manifest as plain data: per fragment, rows of name, shape, dtype, kind and unit axes."""
    return [[list(_TENSOR.write(tensor).values()) for tensor in fragment] for fragment in manifest.fragments]


def manifest_from_rows(rows: Sequence[Sequence[Sequence[Any]]]) -> FragmentManifest:
    """Returns the manifest that :func:`manifest_to_rows` wrote.

    Raises:
        Unfit: If a tensor does not fit.
    """
    names = [field.name for field in dataclasses.fields(TensorSpec)]
    return FragmentManifest(
        tuple(tuple(_TENSOR.read(dict(zip(names, row, strict=False))) for row in fragment) for fragment in rows)
    )
