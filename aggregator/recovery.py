"""A store that is behind its peers: noticed before anything is said, and what an operator may order then. Pure.

Brokers and islands hold versions. A store that has less, because it was lost, emptied or restored from an old copy,
must not go on as if nothing had happened: it would make other bytes under names that are taken (design, section 8). So
the aggregator compares what it hears with what it has, and if it is *behind* it publishes and answers nothing, says so,
and waits; islands train on and keep their bytes. Then there are three ways out:

* restore the store from a copy that is not behind, such as that of a standby that was in sync;
* order a *new lineage* (``--new-lineage``): go on from what this store has, under versions above all that were seen.
  What was merged since is lost, and stands in the books as ``store_lost``;
* begin another run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aggregator.events import Commit
from broker.messages import Reason

#: How long a new lineage listens to every peer before it chooses its versions, in seconds.
LISTEN_S = 2.0
#: What a new lineage adds to its epoch where a broker refuses it: how much higher that one's is, it does not say.
EPOCH_JUMP = 1000

CURE = (
    "nothing is published: restore the store from a copy, such as a standby's; or go on from what it has and lose "
    "the rest, with --new-lineage; or begin another run, with another --run"
)
CURE_EMPTY = (
    "nothing is published: this store holds no model to go on from; restore it from a copy, or begin another run, with "
    "another --run"
)


class Peers:
    """What peers hold, as far as it was heard.

    Attributes:
        versions: Fragment -> highest version that a believed peer holds.
    """

    def __init__(self) -> None:
        self.versions: dict[int, int] = {}
        self._claims: dict[str, dict[int, int]] = {}

    def broker_holds(self, broker: int, versions: Sequence[int], own: Sequence[int]) -> str:
        """Takes the versions on a broker's shelf; says which is ahead of ours, or nothing. Brokers are believed."""
        ahead = _ahead(versions, own)
        self._believe(ahead)
        return _sentence(f"broker {broker}", ahead, own)

    def island_holds(self, island_id: str, versions: Sequence[int], own: Sequence[int], *, live: int) -> str:
        """Takes the versions that an island claims to hold.

        One island may lie, and must not stop a run by it: islands are believed when more than half of those that live
        claim to be ahead. A store that knows no island believes the first.

        Args:
            island_id: Who claims it.
            versions: By fragment.
            own: Likewise.
            live: Islands that live, and are known to this store.
        """
        ahead = _ahead(versions, own)
        if not ahead:
            self._claims.pop(island_id, None)
            return ""
        self._claims[island_id] = ahead
        if 2 * len(self._claims) <= live:
            return ""
        for claim in self._claims.values():
            self._believe(claim)
        return _sentence(f"island {island_id}", ahead, own)

    def _believe(self, ahead: Mapping[int, int]) -> None:
        for p, version in ahead.items():
            self.versions[p] = max(version, self.versions.get(p, -1))


def renumbered(commit: Commit, above: int, epoch: int) -> Commit:
    """Returns the first commit of a new lineage: the same parameters under a version above all that were seen.

    Its books are those of the old commit; from here on, gaps in them are lost with the store.
    """
    return dataclasses.replace(
        commit,
        fragment_version=above + 1,
        epoch=epoch,
        contributions=(),
        ledger={**commit.ledger, "gaps": str(Reason.STORE_LOST)} if commit.ledger else {},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where the history of a fragment goes on from an earlier version under a new number.

    Attributes:
        version: The first one of the new lineage.
        kept: The one that it is, byte for byte; those in between were given up.
    """

    fragment_id: int
    version: int
    kept: int

    @property
    def given_up(self) -> range:
        """The numbers that nobody goes on from; of some, nothing may be known any more."""
        return range(self.kept + 1, self.version)


def lineages(rows: Iterable[Mapping[str, Any]]) -> list[Lineage]:
    """Returns the new lineages in the lines of ledgers, each line at most once per version, versions growing.

    A line is the first of a lineage if nobody contributed to it and it names the bytes of an earlier version. One that
    has neither contributions nor such bytes is a fault, and for others to find.
    """
    found: list[Lineage] = []
    known: dict[tuple[int, str], int] = {}
    for row in rows:
        p, version, digest = row["fragment_id"], row["fragment_version"], row["digest"]
        kept = known.get((p, digest))
        if version > 0 and not row["contributions"] and kept is not None and kept < version:
            found.append(Lineage(fragment_id=p, version=version, kept=kept))
        known[p, digest] = version
    return found


def _ahead(versions: Sequence[int], own: Sequence[int]) -> dict[int, int]:
    return {p: version for p, version in enumerate(versions) if version > (own[p] if p < len(own) else -1)}


def _sentence(who: str, ahead: Mapping[int, int], own: Sequence[int]) -> str:
    if not ahead:
        return ""
    p, version = max(ahead.items(), key=lambda item: item[1] - (own[item[0]] if item[0] < len(own) else -1))
    have = own[p] if p < len(own) and own[p] >= 0 else "none"
    return f"{who} holds version {version} of fragment {p}, this store {have}"
