"""What one fault did: when it was noticed, when what died was back, when the run was whole again. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ops.chaos.faults import Kind, Role, role_of
from ops.chaos.records import Change, Happening, Recording, VersionSeen
from ops.chaos.tapes import NoteSeen, Tapes

#: What happens so long after a fault's end is no longer put down to it.
CONCERNS_S = 5.0

_MISBEHAVING = (Kind.NAN, Kind.SCALE, Kind.REPLAY, Kind.GARBAGE)
_KILLING = (Kind.KILL, Kind.OUTAGE, Kind.WIPE, Kind.STALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A fault and what came of it; times in seconds since the fault, None for what was not seen.

    Attributes:
        detected_s: Until somebody noticed: the supervisor a death, the aggregator an island that it missed or refused,
            or a full disk, or that its lease is unknown.
        restarted_s: Until every process that died of it was started again.
        healed_s: Until the first version with the struck island in it (a new life of it, if it was killed); until the
            first version under a new epoch, or after the fault's end, for aggregators; after it for brokers; until
            status was whole again for Redis.
    """

    happening: Happening
    detected_s: float | None
    restarted_s: float | None
    healed_s: float | None

    @property
    def role(self) -> Role:
        """Of whom it befell first."""
        return role_of(self.happening.processes[0])

    @property
    def heals_after(self) -> float | None:
        """Seconds until healed, from the moment when that became possible: the restart, or the fault's end."""
        if self.healed_s is None:
            return None
        ended_s = 0.0
        if self.happening.ended_s is not None:
            ended_s = self.happening.ended_s - self.happening.at_s
        possible_s = self.restarted_s if self.restarted_s is not None else ended_s
        return max(0.0, self.healed_s - possible_s)


def outcome(happening: Happening, recording: Recording, tapes: Tapes) -> Outcome:
    """Returns what came of a fault that was injected."""
    at_s = happening.at_s
    restarted_s = _restarted(happening, recording)
    healed_s = _healed(happening, recording, restarted_s)
    detected_s = _detected(happening, recording, tapes.notes)

    def since(moment_s: float | None) -> float | None:
        return None if moment_s is None else round(moment_s - at_s, 3)

    return Outcome(
        happening=happening, detected_s=since(detected_s), restarted_s=since(restarted_s), healed_s=since(healed_s)
    )


def _detected(happening: Happening, recording: Recording, notes: Iterable[NoteSeen]) -> float | None:
    if happening.fault.kind in _KILLING:
        died = (c.at_s for c in recording.changes if c.change is Change.DIED and c.process in happening.processes)
        return _first(died, happening.at_s)
    until_s = (happening.ended_s or happening.at_s) + CONCERNS_S
    shows = _shows(happening)
    return next((note.at_s for note in notes if happening.at_s <= note.at_s < until_s and shows(note)), None)


def _shows(happening: Happening) -> Callable[[NoteSeen], bool]:
    """Returns what tells whether a note shows that a fault was noticed."""
    struck = set(happening.processes)
    kind = happening.fault.kind
    if kind is Kind.DISK_FULL:
        return lambda note: note.name in ("version.not_durable", "run_record.failed")
    if kind is Kind.CUT_REDIS:
        return lambda note: note.name == "lease.unknown"
    if kind in _MISBEHAVING:
        return lambda note: (
            "refused" in note.name and bool(struck & {note.fields.get("island"), note.fields.get("sender")})
        )
    roles = {role_of(name) for name in struck}
    if Role.BROKER in roles:
        return lambda note: note.name == "broker.back"
    if Role.AGGREGATOR in roles:
        return lambda note: note.name == "aggregator.started"
    return lambda note: note.name == "round.closed" and bool(struck & set(note.fields.get("missing", ())))


def _restarted(happening: Happening, recording: Recording) -> float | None:
    """When every process that the fault killed was started again."""
    if happening.fault.kind not in _KILLING:
        return None
    moments = []
    for process in happening.processes:
        started = (c.at_s for c in recording.changes if c.change is Change.STARTED and c.process == process)
        moments.append(_first(started, happening.at_s))
    known = [moment for moment in moments if moment is not None]
    return max(known) if len(known) == len(moments) and known else None


def _healed(happening: Happening, recording: Recording, restarted_s: float | None) -> float | None:
    kind, versions = happening.fault.kind, recording.versions
    if kind in _MISBEHAVING:
        return None  # it is not to be healed but kept out
    killed = kind in _KILLING
    over_s = restarted_s if killed else happening.ended_s
    roles = {role_of(name) for name in happening.processes}
    if over_s is None:
        return None
    if roles == {Role.REDIS}:
        return _first((at_s for at_s, whole in recording.redis if whole), over_s)
    if Role.AGGREGATOR in roles:
        epoch = max((v.epoch for v in versions if v.at_s < happening.at_s), default=0)
        return _first((v.at_s for v in versions if v.epoch > epoch or v.at_s >= over_s), happening.at_s)
    if Role.BROKER in roles:
        return _first((v.at_s for v in versions), over_s)
    moments = [_with_island(name, happening.at_s, over_s, versions, killed) for name in happening.processes]
    known = [moment for moment in moments if moment is not None]
    return max(known) if len(known) == len(moments) and known else None


def _with_island(
    island: str, at_s: float, over_s: float, versions: Iterable[VersionSeen], killed: bool
) -> float | None:
    before = [v for v in versions if v.at_s < at_s]
    lives = (each["incarnation"] for v in before for each in v.contributions if each["island_id"] == island)
    last_life = max(lives, default=0) if killed else 0
    return _first((v.at_s for v in versions if v.has(island, above_incarnation=last_life)), over_s)


def _first(moments: Iterable[float], from_s: float) -> float | None:
    return next((moment for moment in moments if moment >= from_s), None)
