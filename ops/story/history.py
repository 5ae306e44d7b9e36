"""The history of a run as a page shows it: a curve, islands, rounds and marks. Pure.

It is built line by line from event tapes (:mod:`aggregator.store.tape`), or from what stands in Redis, and holds a
bounded number of each: of a long run the curve gets coarser, and the oldest rounds and marks fall out. Times are
seconds since the run began, by the clock of its aggregator; what a run slept between two of its lives is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from aggregator.interface.events import Note
from aggregator.interface.leader_notes import MessageRefused
from aggregator.interface.notes import (
    ContributionRefused,
    IslandJoined,
    IslandLeft,
    IslandResumed,
    RunEnded,
    RunFlushing,
    RunSeeded,
    VersionCommitted,
)
from aggregator.interface.reading_notes import note_in
from broker.routing.liveness import Liveness, LivenessConfig, liveness
from broker.wire.fragments import shard_of
from ops.story.counters import Counters
from ops.story.marks import KIND_OF, island_of, text_of
from ops.story.rounds import Round, Rounds
from ops.story.run_status import Status
from ops.text import finite

Line = Mapping[str, Any]

#: How much of each a page gets.
MAX_POINTS, MAX_MARKS = 600, 500
#: Versions over which the fleet's agreement is averaged.
RECENT_VERSIONS = 16
#: Two lives of a run that are farther apart are shown as if they were not.
LONGEST_PAUSE_S = 30.0
#: Of a heartbeat, besides the step.
VITALS = ("tokens", "loss", "step_time_s", "sync_share", "bytes_up", "bytes_down", "optimizer")
#: How often silence is looked for.
LOOK_EVERY_S = 0.25


@dataclass(slots=True)
class IslandHistory:
    """One island over all its lives.

    Attributes:
        state: As its heartbeats say.
        lives: How many it has had.
        tokens: Trained by all of them, as ``bytes_up`` and ``bytes_down`` are sent by all; ``step`` is where it is.
        versions_in: Versions that have something of it.
        versions_of: Versions made since it joined.
        staleness: Staleness of its newest contribution, in versions.
        agreement: Upper median cosine with the other islands of its newest contribution that was compared.
        trust: Factor of the weight of its newest contribution.
        refusals: Reason -> how many of its contributions and messages.
        last_refusal: The last reason given.
    """

    state: Liveness = Liveness.ALIVE
    lives: int = 1
    heard_at_s: float = 0.0
    step: int = 0
    tokens: int = 0
    loss: float | None = None
    step_time_s: float | None = None
    sync_share: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    optimizer: str = ""
    versions_in: int = 0
    versions_of: int = 0
    staleness: float | None = None
    agreement: float | None = None
    trust: float | None = None
    refusals: dict[str, int] = field(default_factory=dict)
    last_refusal: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something to see on the time axis.

    ``event`` is the note that told of it, or ``silent``, ``heard`` or ``process``.
    """

    changed: int
    at_s: float
    kind: str
    island: str
    text: str
    event: str


class History:
    """The curve, islands, rounds and marks of one run, kept up to date from lines of its tape.

    Attributes:
        now_s: The newest time that is known.
        phase: Phase of the run.
        fragments: Newest version of each fragment.
    """

    def __init__(self) -> None:
        self.now_s, self.phase = 0.0, "starting"
        self.target_tokens = 0
        self.fragments: dict[int, int] = {}
        self.islands: dict[str, IslandHistory] = {}
        self.rounds = Rounds(self._change)
        self._marks: deque[Mark] = deque(maxlen=MAX_MARKS)
        self._points: list[tuple[float, float | None, int, int, float | None]] = []  # the last: how far islands agree
        self._each: list[tuple[int, list[Any]]] = []  # beside each point: its change, and what the islands had
        self._silent: dict[str, Liveness] = {}  # islands whose silence was marked, and how deep it was
        self._agreements: deque[float] = deque(maxlen=RECENT_VERSIONS)
        self._point_every_s, self._point_at_s = 1.0, -1.0
        self._offset_s: float | None = None
        self._told: dict[str, tuple[str, int]] = {}  # island -> the last coming or going that was marked, and its life
        self._changes, self._looked_at_s = 0, 0.0
        self._allowances = LivenessConfig()
        self._counters = Counters()

    # --- what comes in ----------------------------------------------------------------------------------------

    def take(self, line: Line) -> Note | None:
        """Reads a line of a tape, or of the log of processes; returns the note in it."""
        if "segment" in line:
            if self._offset_s is None and line.get("life"):  # what was before is gone
                self._settings(line["life"]["config"])
                self.phase = "running"
            return None
        self.at(line["now_s"])
        self._look_for_silence()
        note = note_in(line)
        if note is not None:
            self._count(note)
            self.note(note)
        elif "tape" in line:
            self._life(line)
        elif "process" in line:  # of run_directory.tell
            self.mark("fault", line["process"], line["text"], "process")
        elif "event" in line:
            self.rounds.event(line, self.now_s)
            if line["event"] == "received":
                self._received(line)
        return note

    def _received(self, line: Line) -> None:
        self._counters.heard(line)
        island, body = line["sender"], line["body"]
        if line["kind"] == "heartbeat":
            vitals = {name: body.get(name) for name in VITALS}
            up, down = self._counters.sent(island)
            vitals |= {"tokens": self._counters.tokens(island), "bytes_up": up, "bytes_down": down}
            self.heard(island, step=body["inner_step"], **vitals)
        elif line["kind"] == "leave" and island in self.islands:
            left, tokens = self.islands[island], self._counters.tokens(island)
            left.step, left.tokens = body["inner_step"], tokens

    def _count(self, note: Note) -> None:
        match note:
            case IslandJoined(island=island, incarnation=incarnation, start_step=step):
                self._counters.joined(island, incarnation, step)
            case MessageRefused(sender=sender) if sender in self.islands:
                self._counters.refused(sender)
                self.islands[sender].tokens = self._counters.tokens(sender)
            case _:
                pass

    def at(self, clock_s: float) -> None:
        """Sets the time to that of a line; a clock that restarted, or slept long, continues the last one."""
        if self._offset_s is None or not -1.0 < clock_s + self._offset_s - self.now_s < LONGEST_PAUSE_S:
            self._offset_s = self.now_s - clock_s  # of another boot, or after a long sleep
        self.now_s = max(self.now_s, clock_s + self._offset_s)

    def note(self, note: Note) -> None:
        """Takes a decision of the aggregator."""
        self.rounds.note(note, self.now_s)
        match note:
            case VersionCommitted():
                self._committed(note)
            case IslandJoined() | IslandResumed():
                island = self._island(note.island)
                island.lives = max(island.lives, note.incarnation)
                island.state, island.heard_at_s = Liveness.ALIVE, self.now_s
                self._silent.pop(note.island, None)
            case IslandLeft():
                self._island(note.island).state = Liveness.LEFT
            case ContributionRefused() | MessageRefused():
                self._refused(note)
            case RunSeeded():
                self.phase = "running"
            case RunFlushing() | RunEnded():
                self.phase = note.name.partition(".")[2]
            case _:
                pass
        if type(note) in KIND_OF and not self._is_told(note):
            self.mark(KIND_OF[type(note)], island_of(note), text_of(note), note.name)

    def heard(self, island_id: str, *, step: int, tokens: int, loss: float | None, **vitals: Any) -> None:
        """Takes the heartbeat of an island."""
        island = self._island(island_id)
        if self._silent.pop(island_id, None) is not None:
            again = f"{island_id} is heard again after {self.now_s - island.heard_at_s:.1f} s"
            self.mark("island", island_id, again, "heard")
        island.state = Liveness.ALIVE
        island.heard_at_s, island.step, island.tokens = self.now_s, step, tokens
        island.loss = loss if loss is not None else island.loss
        for name, value in vitals.items():
            if value is not None:
                setattr(island, name, value)
        self._sample()

    def present(self, status: Status, now_s: float, heard_within_s: float) -> None:
        """Takes the status from Redis; islands heard within ``heard_within_s`` count as heard now."""
        self.at(now_s)
        for name, each in status.islands.items():
            if each.last_seen_s < heard_within_s:
                self.heard(name, step=each.inner_step, **{vital: getattr(each, vital) for vital in VITALS})
            self.seen(name, each.state)

    def seen(self, island_id: str, state: Liveness) -> None:
        """Takes the state of an island from Redis."""
        island = self._island(island_id)
        island.state = state
        self._mark_silence(island_id, island)

    def mark(self, kind: str, island: str, text: str, event: str = "") -> None:
        """Adds a mark to the time axis."""
        self._marks.append(Mark(self._change(), self.now_s, kind, island, text, event))

    def _look_for_silence(self) -> None:
        if self.now_s < self._looked_at_s + LOOK_EVERY_S:
            return
        self._looked_at_s = self.now_s
        for island_id, island in self.islands.items():
            if island.state in (Liveness.ALIVE, Liveness.SUSPECT):
                state = liveness(max(0.0, self.now_s - island.heard_at_s), self._allowances)
                if state is not Liveness.ALIVE:
                    island.state = state
                    self._mark_silence(island_id, island)

    def _life(self, line: Line) -> None:
        config = line["config"]
        self._settings(config)
        self._counters.begin(line)
        for name, island in self.islands.items():
            island.tokens = self._counters.tokens(name)
        for commit in line["commits"]:
            self.fragments[commit["fragment_id"]] = commit["fragment_version"]
        if line.get("record"):
            self.phase = "running"
        for island in self.islands.values():
            island.heard_at_s = self.now_s
        shards, shard = config.get("shards", 1), config.get("shard", 0)
        self.rounds.end(self.now_s, lambda fragment: shard_of(fragment, shards) == shard)  # nobody closes them

    def _settings(self, config: Line) -> None:
        self._allowances = LivenessConfig(
            heartbeat_interval_s=config["heartbeat_interval_s"],
            suspect_after_s=config["suspect_after_s"],
            dead_after_s=config["dead_after_s"],
        )
        self.target_tokens = config["total_tokens"]

    def _is_told(self, note: Note) -> bool:
        """Returns True if this coming or going of an island was marked before: each shard notes it.

        Only what was marked counts: Redis often knows an island before the tape tells that it joined.
        """
        if not isinstance(note, IslandJoined | IslandLeft):
            return False
        life = note.incarnation if isinstance(note, IslandJoined) else self.islands[note.island].lives
        before, self._told[note.island] = self._told.get(note.island), (note.name, life)
        return before == (note.name, life)

    def _committed(self, note: VersionCommitted) -> None:
        self.fragments[note.fragment] = note.version
        if note.agreement is not None:
            self._agreements.append(note.agreement)
        if note.contributions is None:
            return
        for island in self.islands.values():
            island.versions_of += island.state is not Liveness.LEFT
        for each in note.contributions:
            island = self._island(each.island)
            island.staleness = each.staleness
            island.agreement = island.agreement if each.agreement is None else each.agreement
            island.trust = island.trust if each.trust is None else each.trust
        for name in {each.island for each in note.contributions}:
            self._island(name).versions_in += 1

    def _refused(self, note: ContributionRefused | MessageRefused) -> None:
        island = self.islands.get(island_of(note))
        if island is not None:
            reason = str(note.reason)
            island.refusals[reason] = island.refusals.get(reason, 0) + 1
            island.last_refusal = f"{reason}: {note.detail}".rstrip(": ")

    def _mark_silence(self, island_id: str, island: IslandHistory) -> None:
        """Marks that an island falls silent, and again when it is given up.

        Only a silence on this clock counts: Redis is read a moment later than the tape, and may still miss a heartbeat.
        """
        silent_s, state = self.now_s - island.heard_at_s, island.state
        if state not in (Liveness.SUSPECT, Liveness.DEAD) or silent_s < self._allowances.suspect_after_s:
            return
        if self._silent.get(island_id) is not state:
            self._silent[island_id] = state
            without = ": rounds go on without it" if state is Liveness.DEAD else ""
            self.mark("island", island_id, f"{island_id} is silent for {silent_s:.1f} s{without}", "silent")

    def _island(self, island_id: str) -> IslandHistory:
        return self.islands.setdefault(island_id, IslandHistory(heard_at_s=self.now_s))

    def _change(self) -> int:
        self._changes += 1
        return self._changes

    def _sample(self) -> None:
        """Adds a point to the curve, if it is time; a curve that has grown long loses every other one."""
        if self.now_s < self._point_at_s + self._point_every_s:
            return
        self._point_at_s = self.now_s
        (living, loss), agreements = self.living(), self._agreements
        agreement = sum(agreements) / len(agreements) if agreements else None
        self._points.append((self.now_s, loss, self.tokens, living, agreement))
        each = [[i.loss if i.state is Liveness.ALIVE else None, i.tokens, i.agreement] for i in self.islands.values()]
        self._each.append((self._change(), [round(self.now_s, 7), finite(each, digits=4)]))
        if len(self._points) >= MAX_POINTS:
            self._points, self._each = self._points[1::2], self._each[1::2]
            self._point_every_s *= 2

    # --- what is known ------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Returns the tokens that all islands have trained."""
        return sum(each.tokens for each in self.islands.values())

    def living(self) -> tuple[int, float | None]:
        """Returns the number of live islands, and the mean of their losses."""
        living = [each for each in self.islands.values() if each.state is Liveness.ALIVE]
        losses = [each.loss for each in living if each.loss is not None]
        return len(living), sum(losses) / len(losses) if losses else None

    # --- what a page gets -------------------------------------------------------------------------------------

    def frame(self, since: int = 0, *, stopped: bool = False) -> dict[str, Any]:
        """Returns the changes after ``since``, for ``json.dumps``: islands and curve whole, the rest in part.

        Of a run that is ``stopped``, with no process left, nobody is alive; one that has ended stays as it is.
        Rounds are rows of number, fragment, times of opening, closing and commit, version, contributors, living
        islands, and whether it was cancelled. The curve has columns of time, loss, tokens, living islands, agreement.
        New points of it are in ``each``: time, and of every island in ``names`` its loss, tokens and agreement.
        """
        stopped = stopped and self.phase != "ended"
        frame = {
            "changes": self._changes,
            "now_s": self.now_s,
            "phase": "stopped" if stopped else self.phase,
            "target_tokens": self.target_tokens,
            "tokens": self.tokens,
            "fragments": [self.fragments[p] for p in sorted(self.fragments)],
            "islands": {name: _fields(each, stopped) for name, each in sorted(self.islands.items())},
            "curve": [list(column) for column in zip(*self._points, strict=True)] or [[]] * 5,
            "names": list(self.islands),
            "rounds": [_row(each) for each in self.rounds.known.values() if each.changed > since],
            "marks": [asdict(each) for each in self._marks if each.changed > since],
        }
        return dict(finite(frame, digits=7)) | {"each": [row for changed, row in self._each if changed > since]}


def _fields(island: IslandHistory, stopped: bool) -> dict[str, Any]:
    gone = stopped and island.state is not Liveness.LEFT
    return asdict(island) | ({"state": "stopped"} if gone else {})


def _row(each: Round) -> list[Any]:
    times = (each.opened_s, each.closed_s, each.committed_s)
    shown = [None if time is None else round(time, 2) for time in times]
    made = each.committed
    version, islands, live = (None, 0, 0) if made is None else (made.version, made.islands, made.live)
    return [each.number, each.fragment, *shown, version, islands, live, int(each.cancelled)]
