"""Passes data between the training thread and the communication thread.

Neither thread ever waits for the other while training goes on. Each field has one writer, but for ``snapshot_wanted``
and ``state_found``: the communication thread sets these, the training thread takes them back. What is in a field is
immutable, and replaced as a whole. Two deques carry what must not be missed: installations to the training thread,
moments back.

The order in which the training thread writes matters: a moment first, then the counters. The communication
thread reads them the other way round, so that it never believes in a step whose moment it has not seen.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from broker.base.errors import LocalProtocolError
from broker.process import logs
from broker.wire.messages import OWN_PASS, Block, Refused, RunSettings, StateSource
from islands.protocol.data_shares import DataShare, TrainedBatch
from islands.protocol.fleet import Progress
from islands.protocol.fragment import Fragment
from islands.session.checkpoint import Checkpoint
from islands.session.machine import THIS, Machine, News
from islands.session.training_state import ORIGIN, Array, Leaf, Needed, Position, Snapshot

log = logs.get(__name__)

#: What an island does first, for people who wait.
CONNECTING = "connecting to the broker"
#: While the training thread waits: how often it looks for signals.
LOOK_EVERY_S = 0.2
#: This many moments that nobody waits for may pile up, and then the other thread is woken, at most this often.
MOST_WAITING, WAKE_EVERY_S = 8, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """A version, ready to be installed.

    Attributes:
        fragment_id: Of the fragment.
        fragment_version: Which version of it.
        keep: Share of the local progress that survives.
        placed: Per tensor, what :func:`islands.arrays.placement.install` adds, or with ``keep = 0`` puts in place.
        shift: The same on the host, before it was placed.
        dtypes: Of the local parameters.
        mixes: ``keep`` is the share of the local value itself.
        rounds: A cast rounds, so the reference needs what is replaced as well (:mod:`islands.arrays.reference`).
        places: Tensors to sample, by number -> positions in them (:mod:`islands.arrays.persistence`), on their device.
        flaw: What was found corrupt, and why ``keep`` is 0; empty: nothing.
    """

    fragment_id: int
    fragment_version: int
    keep: float
    placed: tuple[Leaf, ...]
    shift: tuple[Array, ...]
    dtypes: tuple[np.dtype[Any], ...]
    mixes: bool = False
    rounds: bool = False
    places: Mapping[int, Any] = field(default_factory=dict)
    flaw: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Versions that are installed at one boundary, together.

    ``fresh_optimizer``: the local state was spoilt, and after this the inner optimizer must start afresh.
    """

    installs: tuple[Install, ...]
    fresh_optimizer: bool = False


class Frozen(NamedTuple):
    """Elements of a frozen parameter: as training began, and now, perhaps still on a device."""

    name: str
    began: Array
    now: Leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The work of the training thread between two inner steps: installations, then copies.

    Attributes:
        at: Counters of the boundary.
        installed: Each with the parameters that it replaced, where it ``rounds``; where it overwrites, with a copy of
            those that it left, or nothing.
        copied: Fragment -> copies of its leaves.
        frozen: Where something was copied: elements of parameters that nobody copies.
        snapshot: For a checkpoint, if one was asked for.
        stopped: No further step will be run.
    """

    at: Position
    installed: tuple[tuple[Install, tuple[Leaf, ...]], ...] = ()
    copied: Mapping[int, tuple[Leaf, ...]] = field(default_factory=dict)
    frozen: tuple[Frozen, ...] = ()
    snapshot: Snapshot | None = None
    stopped: bool = False


@dataclass(slots=True, kw_only=True)
class Returned:
    """Elements of the parameters around one adoption, perhaps still on their way from a device.

    Attributes:
        fragment_id: Of the version.
        step: At which it was installed.
        first: It was what restore returned.
        before: Of each sampled tensor, before it was replaced.
        installed: In its place.
        following: After the caller's next step.
        later: After the one after it.
        names: Of the sampled tensors.
    """

    fragment_id: int
    step: int
    first: bool
    before: tuple[Leaf, ...]
    installed: tuple[Leaf, ...]
    following: tuple[Leaf, ...] = ()
    later: tuple[Leaf, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRun:
    """The run's answer to this island's join."""

    run_id: str
    island_id: str
    incarnation: int
    start: Position
    settings: RunSettings
    num_fragments: int
    moving: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFound:
    """An optimizer state to begin with, or None for a fresh one; ``detail`` says why.

    What the communication thread has found is a donor's; or, at a host that does not speak, what the speaker has begun
    with.
    """

    found: Checkpoint | None
    detail: str
    source: StateSource = StateSource.DONOR


@dataclass(slots=True)
class Due:
    """Orders and news for the training thread at its next boundary.

    Of an island of one host the communication thread writes it. Of several, every host's own is written by the plans
    that they carry out (:mod:`islands.hosts.plans`), and the speaker's communication thread writes another one, of
    which the plans are made.
    """

    blocks: tuple[Block, ...] = ()  #: of the data
    life: int = 0  #: incarnation that these are of; written before them
    progress: Progress = field(default_factory=Progress)  #: of the whole run
    ready: deque[Batch] = field(default_factory=deque)
    watched: frozenset[int] = frozenset()  #: copy these where a round waits for them, and ahead where steps are long
    snapshot_wanted: bool = False
    done: bool = False  #: the training loop should end


@dataclass(slots=True)
class Exchange:
    """The shared state of the two threads, and the ``machine`` that they run on."""

    machine: Machine = THIS

    # Written by the communication thread.
    due: Due = field(default_factory=Due)
    membership: JoinedRun | None = None
    urgent: frozenset[int] = frozenset()  #: rounds wait for copies of these; another object after each look
    held_back: bool = False  #: versions wait until others are known to be installed
    state_found: StateFound | None = None  #: answers ``state_needed``
    startable: bool = False  #: version 0 of every fragment is ready
    delivered: bool = False  #: a stopped island has nothing left that the aggregator is not known to have
    finished: bool = False  #: everything is handed over and the final versions are installed
    heard_at_s: float | None = None  #: when the run last said anything but that it takes no join, monotonic
    broker_heard_at_s: float | None = None  #: when anything last came over the broker's connections, monotonic
    doing: str = CONNECTING  #: for people who wait
    refused: Refused | None = None  #: what the run or its broker said last to its join; None once it is let in
    suspected: bool = False  #: the last adoption that was judged was not in the caller's next parameters
    error: BaseException | None = None  #: what ends training: the communication thread failed, or the caller goes wrong
    news: News = field(init=False)  #: something above has changed

    # Written by the training thread.
    state_needed: Needed | None = None  #: it waits for another island's optimizer state
    begun: StateFound | None = None  #: what it has begun with
    shows_state: bool = False  #: its loop passes the optimizer's state, so that this island can give it
    position: Position = ORIGIN
    moments: deque[Moment] = field(default_factory=deque)
    trained: deque[tuple[int, TrainedBatch]] = field(
        default_factory=deque
    )  #: (step from 0, its batch), before its moment
    returned: deque[Returned] = field(default_factory=deque)  #: adoptions to be judged; after their moments
    losses: deque[Any] = field(default_factory=deque)  #: of the steps since they were last looked at
    step_time_s: float | None = None  #: moving average of the time between two steps
    sync_share: float = 0.0  #: part of the training thread's time spent in here
    wake: Callable[[], None] = lambda: None  #: tells the communication thread of a moment; set by it once

    waked_at_s: float = 0.0
    dealt: tuple[Block, ...] = ()  #: the blocks that the training thread has seen
    repeats: bool = False  #: it has trained batches of a pass of its own

    def __post_init__(self) -> None:
        self.news = self.machine.news()

    def wait(self, check: Callable[[], None]) -> None:
        """Waits in the training thread until something has changed, for a moment at most.

        Raises what ends training, or what ``check`` raises, which looks for signals.
        """
        if self.error is not None:
            raise self.error
        check()
        self.news.wait(LOOK_EVERY_S)
        self.news.clear()

    def forked(self, island_id: str) -> LocalProtocolError:
        """Ends training in a forked child, which has no communication thread; returns the error to raise."""
        cure = "call its methods, and share.take(), there; a process that is to train, too, joins by itself"
        here = f"process {os.getppid()}, and process {os.getpid()} was forked from it"
        self.error = error = LocalProtocolError(f"island {island_id} lives in {here}: {cure}")
        return error

    def data_share(self) -> DataShare:
        """Returns the training thread's view of the data, once this island is a member."""
        assert self.membership is not None
        member, self.dealt = self.membership, self.due.blocks
        return DataShare.of(self.dealt, member.settings.seed, life=self.due.life, own=member.start.step)

    def deal(self, share: DataShare) -> None:
        """Gives the view this island's present data; asks for the next block as it begins the last one."""
        if self.due.blocks is not self.dealt:
            self.dealt = self.due.blocks
            share.hold(self.dealt, self.due.life)
        if share.runs_short():
            self.wake()
        if share.cursor >= OWN_PASS and not self.repeats:
            self.repeats = True
            detail = "whenever no further block is dealt to it in time, it trains on all data in an order of its own"
            log.info("data.own_pass", detail=detail)

    def tell(self, moment: Moment, now_s: float) -> None:
        """Hands a moment over, and wakes the communication thread if something waits for this.

        What nobody waits for is seen with the next message or heartbeat. A thread that wakes up may take this one's
        processor, and did: waking it for each moment doubled the time of a step on a busy machine.
        """
        self.moments.append(moment)
        wanted = moment.stopped or (self.held_back and moment.installed) or not self.urgent.isdisjoint(moment.copied)
        if wanted or (len(self.moments) > MOST_WAITING and now_s > self.waked_at_s + WAKE_EVERY_S):
            self.waked_at_s = now_s
            self.wake()


def take_newest(losses: deque[Any]) -> float | None:
    """Returns the newest loss already computed, and drops it and all before it; None if there is none.

    Called by the communication thread: reading a device value that is ready costs microseconds, waiting for one could
    take a step. Dropping one is left to it as well, because JAX gives the GIL away in that moment.
    """
    waiting: list[Any] = []
    while losses:
        loss = losses.pop()
        deleted, ready = getattr(loss, "is_deleted", None), getattr(loss, "is_ready", None)
        if deleted is not None and deleted():
            continue
        if ready is None or ready():
            losses.clear()
            losses.extend(reversed(waiting))
            return float(loss)
        waiting.append(loss)
    losses.extend(reversed(waiting))
    return None


class Offers:
    """Versions for the training thread, as they are prepared: at once, or all together in a recovery.

    For the communication thread only. What is not finite spreads to every fragment with the next step. So the global
    parameters that replace a spoilt state wait for each other, and for a fresh optimizer.
    """

    def __init__(self, exchange: Exchange, due: Due) -> None:
        self._exchange, self._due = exchange, due
        self._recovering = False
        self._held: dict[int, Install] = {}  # of a recovery, until every fragment is there

    def recover(self) -> None:
        """Collects the versions that replace everything into one batch, with a fresh optimizer."""
        self._recovering = True

    def offer(self, install: Install, fragments: Collection[Fragment]) -> None:
        """Lets the training thread have a version, or holds it until its batch is whole.

        Args:
            install: What was prepared.
            fragments: All that the run has, as the core knows them.
        """
        batch = Batch(installs=(install,))
        if self._recovering and install.keep == 0:
            self._held[install.fragment_id] = install
            if len(self._held) < len(fragments):
                return
            batch = Batch(installs=tuple(self._held.values()), fresh_optimizer=True)
            self._held.clear()
            self._recovering = False
        self._due.ready.append(batch)
        here = sum(fragment.newest >= 0 for fragment in fragments)
        missing = f"waiting for version 0: {here} of {len(fragments)} fragments are here"
        self._exchange.doing = missing if here < len(fragments) else "every fragment is here: to be adopted"
        self._exchange.news.set()
