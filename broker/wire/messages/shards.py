"""Messages between the shards of an aggregator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from broker.wire.fragments import TensorSpec
from broker.wire.messages.recipe import Recipe
from broker.wire.messages.values import Channel, Phase, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolled:
    """An island in shard 0's books: its present life, and the start of it once ``begun``."""

    island_id: str
    index: int
    hint: str
    incarnation: int
    nonce: str
    tokens_per_step: int
    left: bool
    begun: bool
    start_step: int
    start_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """Block number ``share`` and its island; empty ``owner``: nobody has it.

    It goes from batch ``cursor`` to ``to_batch``. ``batch_tokens`` is what its owner calls a batch, ``share_epoch`` 0.
    """

    share: int
    owner: str
    share_epoch: int
    cursor: int
    to_batch: int = 0
    batch_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The furthest step of an island known to one shard, with the token counter there."""

    island_id: str
    step: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The end of the furthest batch of a block that one shard has merged or holds."""

    share: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The decisions of shard 0 for all shards: phase, seeding island, members' lives, blocks of data.

    Repeated until :class:`Rostered` says that it is durable there; see :mod:`aggregator.rounds.roster`.

    Attributes:
        epoch: The epoch of the leader of shard 0.
        serial: The serial number of the run record with these decisions; grows under one epoch.
        seeding_id: The number of the present attempt at version 0; 0: none yet.
        seeder: The island that is asked for it, empty for none.
        fragments: The run's manifest; empty before the first island joins, when ``recipe`` is None.
        members: Every island that ever joined.
        tenures: Every block that is in use.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    to_shard: int
    epoch: int
    serial: int
    phase: Phase
    seeding_id: int
    seeder: str
    seeder_incarnation: int
    fragments: tuple[tuple[TensorSpec, ...], ...]
    recipe: Recipe | None
    members: tuple[Enrolled, ...]
    tenures: tuple[Tenure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rostered:
    """Another shard's heartbeat to shard 0: its durable roster, and facts for shard 0's decisions.

    Attributes:
        roster_epoch: With ``roster_serial``: of the newest roster that is durable there; 0: of none in this life.
        seeding_id: The number of the attempt at version 0 that is durable there as a whole; 0: none.
        flushed: Its flush is done, as far as it can be.
        begins: Where islands go on whose new life has not begun.
        reached: How far blocks that belong to nobody were trained.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    shard: int
    epoch: int
    roster_epoch: int
    roster_serial: int
    seeding_id: int
    flushed: bool
    begins: tuple[Begin, ...]
    reached: tuple[Reached, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """An island's trust in one shard, 0 to 1, and its alarms there."""

    island_id: str
    weight: float
    alarms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standings:
    """One shard's trust in islands, for the other shards.

    See :mod:`aggregator.rules.trust`. Said with each merge as long as it matters; it holds until it is said anew.
    """

    channel: ClassVar[Channel] = Channel.CONTROL
    role: ClassVar[Role] = Role.AGGREGATOR
    shard: int
    islands: tuple[Trusted, ...]
