"""Notes about the run, its islands, rounds and versions. Pure.

A note is written under its ``name``, with its fields in the order in which they stand here. A field that is None by
default is left out while it is None; one with another default may be missing on tapes of an earlier release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from aggregator.interface.events import Note, known_of, plain_of

# --- the run ----------------------------------------------------------------------------------------------------


class RecipeSettled(Note, name="recipe.settled"):
    """The recipe is fixed by the first island; ``table`` (name -> value) is written flat."""

    digest: str
    inner_optimizer: str
    table: Mapping[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """Returns its fields as plain data."""
        return {"digest": self.digest, "inner_optimizer": self.inner_optimizer, **self.table}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the note with these fields; raises TypeError if one lacks."""
        own = known_of(cls, fields)
        return cls(**own, table={name: value for name, value in fields.items() if name not in own})


class SeederChosen(Note, name="seeder.chosen"):
    """An island is asked for version 0."""

    island: str
    incarnation: int


class SeederPassedOver(Note, name="seeder.passed_over"):
    """An island has not brought version 0 in time, and another is asked."""

    island: str
    incarnation: int


class RunSeeded(Note, name="run.seeded"):
    """Version 0 is whole, and the run begins."""

    fragments: int
    seconds: float


class RunFlushing(Note, name="run.flushing"):
    """The run ends: what is trained is merged, and no more is trained."""

    reason: str
    trained_tokens: int
    target: int


class RunFlushIncomplete(Note, name="run.flush_incomplete"):
    """Tokens that no island has brought before the end."""

    lost_tokens: int


class RunEnded(Note, name="run.ended"):
    """The run is over; the tokens of this shard's books."""

    trained: int
    merged: int
    wasted: Mapping[str, int]
    in_flight: int


class RunLingers(Note, name="run.lingers"):
    """The aggregator stays for brokers and shards that lack the end."""

    lacking: Sequence[int | None]
    shards: Sequence[int]
    reached: bool


class RolledBack(Note, name="run.rolled_back"):
    """Between two lives the run was rolled back to a snapshot, under new ``versions`` of all fragments."""

    snapshot: str
    versions: Sequence[int]
    at: float


class ModelFilesKept(Note, name="files.kept"):
    """The model's small files stand beside the store."""

    island: str
    digest: str


class ModelFilesNotKept(Note, name="files.not_kept", level="warning"):
    """The model's small files could not be written, or do not have the digest."""

    island: str
    detail: str


class ModelFilesNotGiven(Note, name="files.not_given", level="warning"):
    """An island does not bring them."""

    island: str
    incarnation: int


# --- islands ----------------------------------------------------------------------------------------------------


class JoinRefused(Note, name="join.refused", level="warning"):
    """An island was not let in."""

    island: str
    reason: str
    detail: str = ""


class IslandJoined(Note, name="island.joined"):
    """A new life of an island begins; ``islands`` live now."""

    island: str
    incarnation: int = 1
    start_step: int = 0
    islands: int = 0


class IslandResumed(Note, name="island.resumed"):
    """Another process goes on with a life."""

    island: str
    incarnation: int = 1
    last_step: int = 0
    start_step: int = 0


class IslandLeft(Note, name="island.left"):
    """An island has said that it goes."""

    island: str
    step: int = 0
    reason: str = ""
    departure: str = ""


class IslandStanding(Note, name="island.standing"):
    """An island makes no steps, and rounds do not wait for it."""

    island: str


class IslandAdvancing(Note, name="island.advancing"):
    """An island makes steps again."""

    island: str


class IslandDoubted(Note, name="island.doubted", level="warning"):
    """Its claims are not believed as they are."""

    island: str
    detail: str


class IslandBelieved(Note, name="island.believed"):
    """An island's claims are believed again."""

    island: str


class IslandCorrupted(Note, name="island.corrupted", level="warning"):
    """An island has found a fragment corrupt in its memory, for the ``times``-th time in this life."""

    island: str
    fragment: int
    version: int
    times: int


class IslandQuarantined(Note, name="island.quarantined", level="warning"):
    """Nothing of it is taken for a while."""

    island: str
    reason: str
    for_s: float
    detail: str = ""


class IslandReleased(Note, name="island.released"):
    """Its first contribution after a quarantine was let in."""

    island: str


class IslandRestored(Note, name="island.restored"):
    """Its inner optimizer has begun from this source."""

    island: str
    incarnation: int
    optimizer: str
    donor: str | None = None


class DonorNamed(Note, name="donor.named"):
    """An island is to get its optimizer state from another, after those that it has tried."""

    island: str
    donor: str
    tried: Sequence[str]


class TooManyHeartbeats(Note, name="fleet.too_many_heartbeats", level="warning"):
    """The fleet sends more heartbeats than a hub answers."""

    detail: str


class FleetDiverging(Note, name="fleet.diverging", level="warning"):
    """The islands' directions come apart."""

    agreement: float
    usual: float


class FleetAgrees(Note, name="fleet.agrees"):
    """The islands' directions agree again."""

    agreement: float
    usual: float
    after_s: float


class BlockGiven(Note, name="block.given"):
    """Batches of the data are an island's, from now on."""

    block: int
    to_batch: int
    batch_tokens: int
    from_batch: int
    owner: str


class BlockEnded(Note, name="block.ended"):
    """Batches have no owner any more; they were trained up to ``reached``."""

    block: int
    to_batch: int
    batch_tokens: int
    reached: int
    before: str
    reason: str


# --- rounds and versions ----------------------------------------------------------------------------------------


class RoundOpened(Note, name="round.opened", level="debug"):
    """A round of a fragment begins: how many islands are asked, and contributions held for it."""

    round: int
    fragment: int
    asked: int = 0
    held: int = 0
    flush: bool = False


class RoundClosed(Note, name="round.closed", level="debug"):
    """A round is merged now; ``missing`` were waited for."""

    round: int
    fragment: int
    reason: str = ""
    missing: Sequence[str] = ()


class RoundCancelled(Note, name="round.cancelled"):
    """A round had nothing to merge."""

    round: int
    fragment: int
    reason: str


class ContributionAccepted(Note, name="contribution.accepted", level="debug"):
    """A contribution answers its round in time."""

    island: str
    fragment: int
    round: int
    from_step: int
    to_step: int


class ContributionHeld(Note, name="contribution.held", level="debug"):
    """A contribution is kept for the next round of its fragment."""

    island: str
    fragment: int
    round: int
    from_step: int
    to_step: int


class ContributionRefused(Note, name="contribution.refused", level="warning"):
    """A contribution is never merged; without steps if it was admitted before."""

    island: str
    fragment: int
    from_step: int | None = None
    to_step: int | None = None
    reason: str = ""
    detail: str = ""


class ContributionRetry(Note, name="contribution.retry", level="warning"):
    """A contribution must be sent again."""

    island: str
    fragment: int
    from_step: int
    to_step: int
    reason: str = ""
    detail: str = ""


class NormsRestarted(Note, name="norms.restarted"):
    """The usual norms are learned anew, from those of this round (island -> norm)."""

    fragment: int
    round: int
    norms: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """A contribution in a version, with its weights; ``agreement`` and ``trust`` where known."""

    agreement: float | None = None
    trust: float | None = None
    island: str
    incarnation: int
    steps: tuple[int, int]  #: from, to
    tokens: int
    staleness: float
    token_weight: float
    merge_weight: float
    fresh: bool

    @property
    def key(self) -> tuple[str, int]:
        """Returns what tells it from others of its fragment: island and first step."""
        return self.island, self.steps[0]


class VersionCommitted(Note, name="version.committed"):
    """A version is durable and published.

    ``islands`` counts its contributors, ``live`` the islands that could have been. The event stream has no
    ``contributions``.
    """

    fragment: int
    version: int
    round: int
    islands: int
    live: int
    tokens: int = 0
    staleness_mean: float = 0.0
    staleness_max: float = 0.0
    reason: str = ""
    missing: Sequence[str] = ()
    took_s: float = 0.0
    digest: str = ""
    contributions: Sequence[Merging] | None = None
    agreement: float | None = None
    momentum_cosine: float | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Returns its fields as plain data."""
        return plain_of(self) | (
            {}
            if self.contributions is None
            else {"contributions": [plain_of(each) | {"steps": list(each.steps)} for each in self.contributions]}
        )

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the note with these fields; raises TypeError if one lacks."""
        given = fields.get("contributions")
        read = [Merging(**known_of(Merging, each) | {"steps": tuple(each["steps"])}) for each in given or ()]
        return cls(**known_of(cls, fields) | {"contributions": None if given is None else read})


class VersionDamaged(Note, name="version.damaged"):
    """The store has lost bytes of a fragment's newest version, and a broker is asked for it."""

    fragment: int
    version: int
    detail: str


class VersionMended(Note, name="version.mended"):
    """A damaged version is whole again."""

    fragment: int
    version: int
    after_s: float


class VersionNotDurable(Note, name="version.not_durable", level="warning"):
    """A version could not be written, and is not published."""

    fragment: int
    version: int
    detail: str
    retry_s: float


class VersionsAdapted(Note, name="versions.adapted"):
    """Versions are sent in another number format, which suits links of ``down`` bytes per second."""

    codec: str
    down: float


class IntervalChanged(Note, name="interval.changed"):
    """Islands synchronize every ``steps`` inner steps from now on."""

    steps: int
    was: int
    because: str
