"""Lineage of stores: tells if one store continues another's history without a lease. Pure.

As long as Redis keeps the lease, whoever takes over has all that was published, and a store may give up whatever its
leader does not have. A Redis that comes back empty knows nothing of that: whoever leads then *founds* a line anew, on
what its store holds, which may be less than another store that is not there yet. So each such beginning stands in the
run record, with the versions that it began from, and goes with it to every standby:

* a store follows a leader only if all that it holds was in the lines of that leader's run when they were founded
  (:func:`stray`); else it keeps what it has, and says so;
* the epoch of a founder that has made nothing says nothing: its store is as new as it was before
  (:func:`made_under`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

#: Foundings that stand in a run record: more than a store misses while it is away.
MAX_FOUNDINGS = 16

#: A fragment version and the name of its bytes.
Key = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Founding:
    """The beginning of a line that no lease vouches for.

    Attributes:
        name: Unique: the epoch, and the name of the store.
        after: The epoch under which the last version of ``base`` was made.
        base: Fragment -> the version that the store held.
    """

    name: str
    after: int
    base: Mapping[int, Key]

    def holds(self, stored: Mapping[int, Key]) -> bool:
        """Returns True if a store has nothing beyond what this line began with."""
        return not _beyond(stored, self.base)

    def row(self) -> list[Any]:
        """Returns the founding as plain data, for the run record."""
        return [self.name, self.after, [[p, *key] for p, key in sorted(self.base.items())]]


def foundings_of(record: Mapping[str, Any] | None) -> tuple[Founding, ...]:
    """Returns the foundings in a run record, oldest first."""
    rows = [] if record is None else record.get("foundings", [])
    return tuple(
        Founding(
            name=str(name), after=int(after), base={int(p): (int(version), str(digest)) for p, version, digest in base}
        )
        for name, after, base in rows
    )


def foundings_in(packed: bytes) -> tuple[Founding, ...]:
    """Returns the foundings in a run record as sent to standbys; raises ValueError if it is malformed."""
    try:
        return foundings_of(msgpack.unpackb(packed))
    except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as err:
        raise ValueError(f"no run record: {type(err).__name__}") from err


def shards_in(packed: bytes) -> int:
    """Returns the number of shards in a run record that :func:`foundings_in` has read; 0 if not given."""
    return int(msgpack.unpackb(packed).get("shard", (0, 0))[1])


def made_under(run_epoch: int, foundings: Sequence[Founding], stored: Mapping[int, Key]) -> int:
    """Returns the last epoch under which the versions in a store can have been made."""
    epoch = run_epoch
    for founding in reversed(foundings):
        if not founding.holds(stored):
            break
        epoch = min(epoch, founding.after)
    return epoch


def stray(stored: Mapping[int, Key], own: Sequence[Founding], leaders: Sequence[Founding]) -> str:
    """Names a store's part that was never in a leader's line: following would erase it; empty if none.

    Args:
        stored: Fragment -> version in the store.
        own: Foundings in its run record.
        leaders: Foundings in the leader's run record.
    """
    names = [each.name for each in leaders]
    shared = [i for i, each in enumerate(own) if each.name in names]
    ours = own[shared[-1] + 1 :] if shared else own
    theirs = leaders[names.index(own[shared[-1]].name) + 1 :] if shared else leaders
    beyond = _beyond(stored, ours[0].base) if ours else ""
    if not beyond and theirs:
        beyond = _beyond(stored, theirs[0].base)
    return beyond


def _beyond(stored: Mapping[int, Key], base: Mapping[int, Key]) -> str:
    for p, (version, digest) in sorted(stored.items()):
        had, name = base.get(p, (-1, ""))
        if version > had:
            return f"version {version} of fragment {p}"
        if version == had and digest != name:
            return f"other bytes under version {version} of fragment {p}"
    return ""
