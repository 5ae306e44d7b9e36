"""The fragments at the aggregator: their newest versions, and rounds and commits under way. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Commit, Merge
from aggregator.rules.outliers import FragmentNorms, Offer
from aggregator.state.round import Round
from broker.base.transitions import Staged, Transitions
from broker.wire.fragments import FragmentManifest, shard_of
from broker.wire.messages import Merged
from broker.wire.schema import MAX_DATA_RANGES

#: Contributions of one island that may wait on one fragment.
MOST_WAITING = 16


class Stage(StrEnum):
    """The stage of a fragment between two versions."""

    IDLE = "idle"
    COLLECTING = "collecting"
    COMPUTING = "computing"
    PERSISTING = "persisting"


#: A round of a fragment, from its opening to its version; version 0 is planted without one.
STAGES = Transitions(
    "a fragment of the run",
    Stage.IDLE,
    {
        Stage.IDLE: {"open": Stage.COLLECTING, "plant": Stage.COMPUTING},
        Stage.COLLECTING: {"cancel": Stage.IDLE, "close": Stage.COMPUTING},
        Stage.COMPUTING: {"computed": Stage.PERSISTING},
        Stage.PERSISTING: {"persisted": Stage.IDLE},
    },
)


@dataclass(slots=True)
class Fragment:
    """One fragment's versions and its current round."""

    at: Staged[Stage] = field(default_factory=lambda: Staged(STAGES))
    version: int = -1  #: the newest durable one
    digest: str = ""
    contributions: tuple[Merged, ...] = ()  #: of the newest durable version
    round: Round | None = None  #: while COLLECTING; while COMPUTING and PERSISTING what it brought
    interval: int = 0  #: that the round of the newest version ended, in inner steps; 0: the recipe's
    closed_at_s: float = 0.0  #: the last round
    write_asked_at_s: float = 0.0  #: last, for the commit
    merge: Merge | None = None  #: while COMPUTING, but of version 0
    merge_again_at_s: float | None = None  #: the store has lost bytes of the newest version, which are to come back
    commit: Commit | None = None  #: while PERSISTING
    persist_again_at_s: float | None = None
    succeeded: deque[tuple[int, float]] = field(default_factory=deque)  #: versions of this life, and when it was
    held: list[Offer] = field(default_factory=list)
    held_bytes: int = 0
    _held_of: dict[str, list[Offer]] = field(default_factory=dict)  # by island
    norms: FragmentNorms = field(default_factory=FragmentNorms)
    rule_state: str = "null"  #: of a merge rule of one's own, as JSON
    flushed: bool = False
    published_at_s: float | None = None  #: the newest version, to all brokers
    on_their_way: dict[int, float] = field(default_factory=dict)  #: versions that no broker has said it has, since when
    undelivered: bool = False  #: one of them for longer than that usually takes

    @property
    def stage(self) -> Stage:
        """Returns the fragment's present stage."""
        return self.at.stage

    def open(self, round_: Round) -> None:
        """Begins a round, which has the held contributions already."""
        self.at.take("open")
        self.round = round_
        self.release()

    def hold(self, contribution: Offer) -> None:
        """Keeps a contribution for the next round."""
        self.held.append(contribution)
        self.held_bytes += contribution.payload_bytes
        self._held_of.setdefault(contribution.island_id, []).append(contribution)

    def release(self) -> None:
        """Drops the held contributions."""
        self.held.clear()
        self._held_of.clear()
        self.held_bytes = 0

    def cancel(self) -> None:
        """Ends a round that closed with nothing to merge."""
        self.at.take("cancel")
        assert self.round is not None
        self.flushed, self.round = self.round.flush, None

    @property
    def stands_still(self) -> bool:
        """True if the next version cannot be made, as the store has lost bytes of the newest."""
        return self.merge is not None and self.merge_again_at_s is not None

    def close(self, merge: Merge, interval: int) -> None:
        """Notes that the round has closed, and is being merged; ``interval`` is the one in force."""
        self.at.take("close")
        self.merge, self.interval = merge, interval

    def plant(self, norm: float) -> None:
        """Notes that version 0 has come, and is being made; ``norm`` is its length."""
        self.at.take("plant")
        self.norms.seed_norm = norm

    def computed(self, commit: Commit) -> None:
        """Notes that the next version is in memory, and is being made durable."""
        self.at.take("computed")
        self.commit, self.merge, self.merge_again_at_s = commit, None, None

    def persisted(self, now_s: float, kept_s: float) -> Round | None:
        """Notes that the next version is durable; returns the round that led to it, None for version 0.

        Args:
            now_s: Now.
            kept_s: For how long it is remembered when a version was succeeded.
        """
        self.at.take("persisted")
        commit, round_ = self.commit, self.round
        assert commit is not None
        self.succeeded.append((self.version, now_s))
        while now_s - self.succeeded[0][1] > kept_s:
            self.succeeded.popleft()
        self.version, self.digest, self.contributions = commit.fragment_version, commit.digest, commit.contributions
        self.commit = self.round = None
        return round_

    def oldest_allowed(self, config: AggregatorConfig, now_s: float) -> int:
        """Returns the oldest version that a step may have been trained on to be merged now.

        It is at most ``max_staleness`` versions behind, or was the newest one less than ``max_staleness_s`` ago. When
        versions of an earlier life were succeeded is not known.
        """
        lately = self.version
        for version, at_s in self.succeeded:
            if now_s - at_s < config.max_staleness_s:
                lately = version
                break
        return min(self.version - config.max_staleness, lately)

    def waiting_of(self, island_id: str) -> list[Offer]:
        """Contributions of one island that are held, or in the round."""
        return self._held_of.get(island_id, []) + (self.round.of(island_id) if self.round is not None else [])

    def crowded(self, island_id: str, ranges: int) -> str:
        """Says why no more of an island's contributions may wait; empty if one of ``ranges`` of batches may.

        A version repeats who is in it with which steps and batches. However small contributions are, one island must
        not fill it with more than fits into a message: what was merged already could never be published.
        """
        waiting = self.waiting_of(island_id)
        ranges += sum(len(c.data) for c in waiting)
        if len(waiting) < MOST_WAITING and ranges <= MAX_DATA_RANGES:
            return ""
        return f"{len(waiting)} of this island wait, and {ranges} ranges of batches with this one"

    def in_commit(self, island_id: str, incarnation: int, from_step: int) -> bool:
        """Whether a contribution is in the version that is being made durable right now."""
        parts = self.commit.contributions if self.commit else ()
        return any(
            (m.island_id, m.incarnation, m.steps.from_step) == (island_id, incarnation, from_step) for m in parts
        )


class Model:
    """The fragments of the run, and those of them that this shard owns.

    Attributes:
        manifest: All fragments; None until the first island has joined.
        moving: Ids of the fragments that fall due here.
        fragments: Those of this shard, by id.
        flushed: Each of them is, as far as can be.
        held_bytes: Bytes of contributions that may wait here.
    """

    def __init__(self, shard: int, shards: int, held_bytes: int) -> None:
        self._shard, self._shards = shard, shards
        self.manifest: FragmentManifest | None = None
        self.moving: tuple[int, ...] = ()
        self.fragments: dict[int, Fragment] = {}
        self.flushed = False
        self.held_bytes = held_bytes

    def adopt(self, manifest: FragmentManifest, held_bytes: int) -> None:
        """Fixes the fragments, all without a version."""
        self.manifest, self.held_bytes = manifest, held_bytes
        self.moving = tuple(p for p in manifest.moving if self.owns(p))
        self.fragments = {p: Fragment() for p in range(len(manifest)) if self.owns(p)}

    def owns(self, fragment_id: int) -> bool:
        """Returns True if a fragment is one of this shard's."""
        return shard_of(fragment_id, self._shards) == self._shard

    def of_ours(self, versions: Sequence[int]) -> tuple[int, ...]:
        """Returns versions by fragment with -1 in place of those of other shards."""
        if self._shards == 1:
            return tuple(versions)
        return tuple(version if self.owns(p) else -1 for p, version in enumerate(versions))

    def num_busy(self) -> int:
        """Returns how many fragments have a round in any stage; one that stands still keeps no other from one."""
        return len([f for f in self.fragments.values() if f.at.stage is not Stage.IDLE and f.merge_again_at_s is None])

    def free(self) -> list[int]:
        """Returns the moving fragments without a round, whose newest version was delivered."""
        fragments = self.fragments
        return [p for p in self.moving if not ((f := fragments[p]).undelivered or f.at.stage is not Stage.IDLE)]

    def waiting_bytes(self) -> int:
        """Bytes of the contributions that wait in open rounds or are held."""
        waiting = 0
        for fragment in self.fragments.values():
            waiting += fragment.held_bytes + (fragment.round.waiting_bytes if fragment.round is not None else 0)
        return waiting

    def length(self, fragment_id: int) -> float:
        """Returns a fragment's norm at version 0, at least that of as many average parameters of the model.

        Fragments of biases begin at zero, and so would be measured against nothing. 0 if no norm is known.
        """
        if self.manifest is None:
            return 0.0
        squares, ours, sizes = 0.0, 0, self.manifest.sizes
        for p, fragment in self.fragments.items():
            squares += fragment.norms.seed_norm**2
            ours += sizes[p]
        share = sizes[fragment_id] / ours if ours else 0.0  # a shard may have nothing but empty tensors
        return max(self.fragments[fragment_id].norms.seed_norm, math.sqrt(share * squares))
