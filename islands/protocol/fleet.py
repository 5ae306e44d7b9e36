"""The state of the fleet as an island knows it: the newest report of each shard. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from broker.wire.fragments import shard_of
from broker.wire.messages import Block, FleetState, Phase, Welcome


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the whole run, as last heard.

    Attributes:
        trained_tokens: By all islands.
        own_tokens: By this one, then.
        ratio: Tokens of all for each one of its own since.
    """

    trained_tokens: int = 0
    own_tokens: int = 0
    ratio: float = 1.0

    def at(self, own_tokens: int) -> float:
        """Returns the fleet's progress in tokens when this island has trained ``own_tokens``."""
        return self.trained_tokens + (own_tokens - self.own_tokens) * self.ratio


class ScheduleTokens:
    """The fleet's progress in tokens, for learning-rate schedules; it never decreases.

    Tokens the fleet had trained when last reported, plus own tokens since times the fleet's ratio: a rejoining
    island is on the right point at once, and an outage of everybody else does not freeze the rate.
    """

    def __init__(self) -> None:
        self.progress = Progress()
        self._least = 0.0

    def hear(self, progress: Progress, own_tokens: int) -> None:
        """Takes newer figures of the fleet, reported when this island has trained ``own_tokens``."""
        self.at(own_tokens)
        self.progress = progress

    def at(self, own_tokens: int) -> float:
        """Returns the schedule's progress when this island has trained ``own_tokens``."""
        self._least = max(self._least, self.progress.at(own_tokens))
        return self._least


class Fleet:
    """The run, as last heard of.

    Attributes:
        phase: As the first shard, which decides for all, says.
        done: The training loop should end.
        blocks: This island's blocks of the data.
        published: The newest version that there is of each fragment; -1 for none.
        due_soon: Fragments whose rounds open soon.
        deserted: It ended while this island was away, and nobody is left who would tell what became of anything.
    """

    def __init__(self) -> None:
        self.phase = Phase.SEEDING
        self.done = False
        self.blocks: tuple[Block, ...] = ()
        self.published: tuple[int, ...] = ()
        self.due_soon: frozenset[int] = frozenset()
        self.deserted = False
        self._news: dict[int, tuple[int, int]] = {}  # shard -> epoch and sequence of its newest FleetState
        self._open_shards: set[int] = set()  # those that may make another version
        self.schedule = ScheduleTokens()
        self._trained_to: Mapping[int, int] = {}  # block -> by an earlier process of this life

    def resume(self, cursors: Mapping[int, int]) -> None:
        """Skips what an earlier process of this life has trained; the aggregator may not know of it."""
        self._trained_to = cursors
        self.blocks = self._trained(self.blocks)

    def _trained(self, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        """Returns blocks that begin behind what this life has trained of them."""
        done = self._trained_to
        return (
            tuple(replace(b, from_batch=max(b.from_batch, done.get(b.number, 0))) for b in blocks) if done else blocks
        )

    @property
    def ended(self) -> bool:
        """Whether the run is over, and no shard will make another version that this island needs to wait for."""
        return self.deserted or (self.phase is Phase.ENDED and not self._open_shards)

    def welcomed(self, welcome: Welcome) -> None:
        """Begins a life: only figures from now on, of this epoch or a later one, count."""
        self.blocks = self._trained(welcome.blocks)
        self._news = {0: (welcome.epoch, -1)}
        self.published = self.published or tuple(-1 for _ in welcome.fragments)

    def heard(self, state: FleetState, sequence: int, own_tokens: int) -> bool:
        """Takes in a shard's state of the run; returns whether it is newer than the known one.

        Args:
            state: Of one shard; it speaks for its own fragments.
            sequence: Of the message, by its sender.
            own_tokens: Trained here so far.
        """
        news = (state.epoch, sequence)
        if news <= self._news.get(state.shard, (0, -1)):
            return False
        self._news[state.shard] = news
        if state.phase is Phase.ENDED:
            self._open_shards.discard(state.shard)
        else:
            self._open_shards.add(state.shard)
        if state.shard == 0:  # which decides for all
            self.phase = state.phase
            blocks = self._trained(state.blocks)
            self.blocks = blocks if blocks != self.blocks else self.blocks
            self.schedule.hear(Progress(state.trained_tokens, own_tokens, state.fleet_ratio), own_tokens)
            if state.phase in (Phase.FLUSHING, Phase.ENDED):
                self.done = True
        theirs = [p for p in range(len(self.published)) if shard_of(p, state.shards) == state.shard]
        newest = dict(enumerate(state.versions))
        self.published = tuple(newest.get(p, -1) if p in theirs else v for p, v in enumerate(self.published))
        self.due_soon = self.due_soon.difference(theirs).union(p for p in state.due_soon if p in theirs)
        return True

    def desert(self) -> None:
        """Ends without the missing versions: by the broker's word the run is over and has no leader.

        An island that has heard of the end already gets the last versions: they are on their way, from the broker.
        """
        if self.phase is not Phase.ENDED:
            self.published = tuple(-1 for _ in self.published)
        self.phase, self.done, self.deserted = Phase.ENDED, True, True
