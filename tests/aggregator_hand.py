"""One aggregator core, driven by hand: the test plays every island, message by message.

:class:`Desk` opens no socket, reads no clock and does not sleep.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aggregator.interface import events as agg
from aggregator.interface.config import AggregatorConfig
from aggregator.rounds.core import Aggregator
from aggregator.rules.outliers import Offer
from broker.wire import messages as m
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.ranges import StepRange
from islands.protocol import events as ie
from tests.run_reading import Reading

T = TypeVar("T")

TOKENS_PER_STEP = 10
NEWEST = 1000


def tensors(num_fragments: int = 2) -> tuple[TensorSpec, ...]:
    """One tensor for each fragment, all of one size."""
    return tuple(TensorSpec(name=f"w{i}", shape=(8, 8), dtype="float32", kind=Kind.RDA) for i in range(num_fragments))


def id_of(value: object) -> str:
    """Names a value in the name of a test, on which two processes must agree: without its place in memory."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(value))


def beat(inner_step: int = 0, **fields: Any) -> m.Heartbeat:
    """A heartbeat after so many steps of ten tokens each; the other fields say nothing unless they are given."""
    silent: dict[str, Any] = {
        "tokens": inner_step * TOKENS_PER_STEP,
        "loss": None,
        "step_time_s": None,
        "sync_share": 0.0,
        "bytes_up": 0,
        "bytes_down": 0,
        "versions": (),
        "overwritten_tokens": (),
        "outstanding": (),
        "stopped": False,
    }
    return m.Heartbeat(inner_step=inner_step, **{**silent, **fields})


def steps(from_step: int, to_step: int, tokens_per_step: int = TOKENS_PER_STEP) -> StepRange:
    """A range of an island that trained the same number of tokens in every step."""
    return StepRange(
        from_step=from_step,
        to_step=to_step,
        from_tokens=from_step * tokens_per_step,
        to_tokens=to_step * tokens_per_step,
    )


def offer(island_id: str = "a", tokens: int = 100, steps: int = 10, staleness: int = 0, **fields: Any) -> Offer:
    """A contribution that waits to be merged into version :data:`NEWEST`."""
    told: dict[str, Any] = {
        "incarnation": 1,
        "round_id": 7,
        "fragment_id": 0,
        "steps": StepRange(from_step=0, to_step=steps, from_tokens=0, to_tokens=tokens),
        "trained_on": (m.TrainedOn(fragment_version=NEWEST - staleness, steps=steps),),
        "payload": (),
        "payload_bytes": 1,
    }
    return Offer(island_id=island_id, **{**told, **fields})


def config(**settings: Any) -> AggregatorConfig:
    """Settings for tests: one fragment, H = 4, unless said otherwise."""
    return AggregatorConfig(**{"run_id": "demo", "fragments": 1, "sync_interval": 4, "islands": 3, **settings})


@dataclass(slots=True)
class Disk:
    """What survives a crash of the aggregator."""

    record: dict[str, Any] | None = None
    commits: dict[int, agg.Commit] = field(default_factory=dict)


class Desk(Reading):
    """One aggregator core, driven by hand.

    Merges and writes complete at once unless ``computes`` or ``writes`` is False; then they pile up in ``computing``
    and ``writing``, for :meth:`compute` and :meth:`write` to complete.

    Attributes:
        log: Every action since the last :meth:`take`.
        by: Island -> the broker that it speaks through, where that is not the first.
        cosines: What a merge finds of the directions of its parts.
        momentum_cosine: What each merge finds of its own and the momentum's.
    """

    def __init__(self, *, disk: Disk | None = None, now_s: float = 0.0, **settings: Any) -> None:
        self.config = settings.pop("config", None) or config(**settings)
        self.disk = disk or Disk()
        self.now_s = now_s
        self.computes = self.writes = True
        self.computing: deque[agg.Plant | agg.Merge] = deque()
        self.writing: deque[agg.Persist | agg.SaveRun] = deque()
        self.log: list[agg.Action] = []
        self.sequence = self.saved_serial = 0
        self.incarnations: dict[str, int] = {}
        self.by: dict[str, int] = {}
        self.cosines: Callable[[agg.Merge], tuple[float, ...]] = lambda _: ()
        self.momentum_cosine: float | None = None
        self.core = Aggregator(self.config, now_s=now_s, record=self.disk.record, commits=self.disk.commits)
        self._perform(self.core.start(now_s))

    # --- events -----------------------------------------------------------------------------------------------

    def feed(self, event: agg.Event) -> list[agg.Action]:
        """Hands one event to the core; returns every action that followed, completions included."""
        before = len(self.log)
        self._perform(self.core.handle(event, self.now_s))
        return self.log[before:]

    def tick(self, at_s: float | None = None) -> list[agg.Action]:
        """Moves the time and tells the core."""
        self.now_s = self.now_s if at_s is None else at_s
        return self.feed(agg.Tick())

    def run_to(self, at_s: float) -> list[agg.Action]:
        """Moves the time from deadline to deadline, as a driver would."""
        before = len(self.log)
        for _ in range(10_000):
            deadline_s = self.core.next_deadline_s()
            if deadline_s is None or deadline_s > at_s:
                self.now_s = at_s
                return self.log[before:]
            self.now_s = max(self.now_s, deadline_s)
            self.feed(agg.Tick())
        raise AssertionError(f"the core asks to be woken again and again at {self.now_s}")

    def say(
        self,
        island_id: str,
        message: m.Message,
        *,
        incarnation: int | None = None,
        flaw: agg.Flaw | None = None,
        payload_bytes: int = 256,
        broker: int | None = None,
        norm: float | None = None,
    ) -> list[agg.Action]:
        """Lets an island say something."""
        self.sequence += 1
        envelope = m.Envelope(
            run_id=self.config.run_id,
            sender=island_id,
            incarnation=self.incarnations.get(island_id, 0) if incarnation is None else incarnation,
            sequence=self.sequence,
            to=m.AGGREGATOR,
            message=message,
        )
        size = payload_bytes if hasattr(message, "payload") else 0
        by = self.by.get(island_id, 0) if broker is None else broker
        return self.feed(agg.Received(envelope=envelope, flaw=flaw, payload_bytes=size, norm=norm, broker=by))

    # --- what islands say -------------------------------------------------------------------------------------

    def join(
        self, island_id: str, *, nonce: str = "", hint: str = "", model: Any = None, resumes: str = "", **asks: Any
    ) -> list[agg.Action]:
        """Joins as ``island_id``, as a new process unless ``nonce`` is one that joined before."""
        life = self.incarnations.get(island_id, 0) + 1
        nonce = nonce or f"{island_id}-{life}"
        join = m.Join(
            nonce=nonce,
            island_id=island_id,
            hint=hint,
            tensors=model or tensors(self.config.fragments),
            resumes=resumes,
            **{"tokens_per_step": TOKENS_PER_STEP, **asks},
        )
        said = self.say(m.joining(nonce), join, incarnation=0)
        for welcome in sent(said, m.Welcome):
            self.incarnations[welcome.island_id] = welcome.incarnation
        return said

    def beat(self, island_id: str, step: int = 0, *, versions: tuple[int, ...] | None = None, **more: Any) -> list[Any]:
        """Sends a heartbeat."""
        held = self.versions if versions is None else versions
        more = {"step_time_s": 0.1, "overwritten_tokens": (0,) * len(self.versions), **more}
        return self.say(island_id, beat(step, versions=held, **more))

    def offer(
        self,
        island_id: str,
        from_step: int,
        to_step: int,
        *,
        fragment: int = 0,
        base: int | None = None,
        round_id: int | None = None,
        trained_on: tuple[m.TrainedOn, ...] | None = None,
        steps_: StepRange | None = None,
        data: tuple[m.DataRange, ...] = (),
        **more: Any,
    ) -> list[agg.Action]:
        """Hands over a range of steps, trained on ``base`` (default: the newest), in the open round of the fragment."""
        if base is None:
            base = max(0, self.versions[fragment]) if fragment < len(self.versions) else 0
        contribution = m.Contribution(
            round_id=(self.rounds_of(fragment) or [0])[0] if round_id is None else round_id,
            fragment_id=fragment,
            steps=steps_ or steps(from_step, to_step),
            trained_on=trained_on or (m.TrainedOn(fragment_version=base, steps=to_step - from_step),),
            payload=(island_id, from_step, to_step),
            data=data,
        )
        return self.say(island_id, contribution, **more)

    def nothing(self, island_id: str, round_id: int | None = None, fragment: int = 0) -> list[agg.Action]:
        """Says that there is nothing to hand over in an open round."""
        round_id = round_id or self.rounds_of(fragment)[0]
        return self.say(island_id, m.Nothing(round_id=round_id, fragment_id=fragment))

    def gather(self, *island_ids: str) -> None:
        """Joins islands, gets version 0 from the first, and lets all of them report step 0."""
        for island_id in island_ids:
            self.join(island_id)
        for p in range(len(self.versions)):
            self.say(island_ids[0], m.Seed(fragment_id=p, payload=f"seed {p} of {island_ids[0]}"))
        for island_id in island_ids:
            self.beat(island_id, 0)

    def open_round(self, *island_ids: str, step: int) -> int:
        """Lets islands report ``step``, which makes fragment 0 due; returns the id of its round."""
        for island_id in island_ids:
            self.beat(island_id, step)
        open_ = self.rounds_of(0)
        assert open_, f"nothing is due at step {step}"
        return open_[-1]

    # --- slow completions, crashes ----------------------------------------------------------------------------

    def compute(self) -> list[agg.Action]:
        """Completes the oldest merge or planting."""
        action = self.computing.popleft()
        version = action.fragment_version if isinstance(action, agg.Merge) else 0
        digest = f"{action.fragment_id}.{version}"
        p, cosines = action.fragment_id, self.cosines(action) if version else ()
        momentum = self.momentum_cosine if version else None
        return self.feed(
            agg.Computed(
                fragment_id=p, fragment_version=version, digest=digest, cosines=cosines, momentum_cosine=momentum
            )
        )

    def write(self, fails: str = "") -> list[agg.Action]:
        """Completes the oldest write, or lets it fail."""
        action = self.writing.popleft()
        if isinstance(action, agg.SaveRun):
            if fails:
                return self.feed(agg.RunSaveFailed(serial=action.serial, detail=fails))
            if action.serial > self.saved_serial:  # what is written while another write is told of comes first here
                self.saved_serial, self.disk.record = action.serial, dict(action.record)
            return self.feed(agg.RunSaved(serial=action.serial))
        p, version = action.commit.fragment_id, action.commit.fragment_version
        if fails:
            return self.feed(agg.PersistFailed(fragment_id=p, fragment_version=version, detail=fails))
        self.disk.commits[p] = action.commit
        return self.feed(agg.Persisted(fragment_id=p, fragment_version=version))

    def restarted(self, **settings: Any) -> Desk:
        """The next life of the aggregator, from what is on the disk."""
        made = Desk(disk=self.disk, now_s=self.now_s, **(settings or {"config": self.config}))
        made.incarnations, made.sequence = dict(self.incarnations), self.sequence
        return made

    def take(self) -> list[agg.Action]:
        """Returns the log and empties it."""
        log, self.log = self.log, []
        return log

    def _perform(self, actions: Iterable[agg.Action]) -> None:
        for action in actions:
            self.log.append(action)
            match action:
                case agg.Plant() | agg.Merge():
                    self.computing.append(action)
                    if self.computes:
                        self.compute()
                case agg.Persist() | agg.SaveRun():
                    self.writing.append(action)
                    if self.writes:
                        self.write()
                case _:
                    pass


def desk(*island_ids: str, **settings: Any) -> Desk:
    """A desk of islands that hold version 0, ``a``, ``b`` and ``c`` unless they are named, and its log empty."""
    made = Desk(**settings)
    made.gather(*(island_ids or ("a", "b", "c")))
    made.take()
    return made


def of(actions: Iterable[Any], kind: type[T]) -> list[T]:
    """Actions of one kind."""
    return [a for a in actions if isinstance(a, kind)]


def sent(actions: Iterable[Any], kind: type[T], to: str | None = None) -> list[T]:
    """Messages of one kind among actions, to anybody or to one party."""
    return [a.message for a in of(actions, agg.Send) if isinstance(a.message, kind) and to in (None, a.to)]


def notes(actions: Iterable[Any], name: str) -> list[dict[str, Any]]:
    """Fields of the notes of one name."""
    return [dict(a.fields) for a in actions if isinstance(a, agg.Note | ie.Note) and a.name == name]


def resolutions(actions: Iterable[Any], to: str) -> list[m.Resolution]:
    """What one island is told about its contributions."""
    return [r for state in sent(actions, m.FleetState, to) for r in state.resolutions]
