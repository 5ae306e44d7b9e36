"""The notes that a page marks on its time axis, in words. Pure."""

from __future__ import annotations

from aggregator.interface import leader_notes as leader
from aggregator.interface import notes
from aggregator.interface.events import Note

#: What is marked -> sort of the mark.
_KINDS: dict[str, tuple[type[Note], ...]] = {
    "leader": (
        *(leader.AggregatorStarted, leader.LeaderFollowed, leader.AggregatorFenced),
        *(leader.StandbyCame, leader.StandbyLost),
    ),
    "run": (
        *(notes.RunSeeded, notes.RolledBack, notes.RunFlushing, notes.RunEnded),
        leader.AggregatorFinished,
    ),
    "island": (notes.IslandJoined, notes.IslandResumed, notes.IslandLeft, notes.IslandBelieved, notes.IslandReleased),
    "refusal": (
        *(notes.IslandQuarantined, notes.IslandDoubted, notes.ContributionRefused, notes.JoinRefused),
        leader.MessageRefused,
    ),
    "round": (notes.RoundCancelled, notes.IntervalChanged, notes.FleetAgrees, notes.NormsRestarted),
    "fault": (
        *(notes.IslandStanding, notes.IslandCorrupted, notes.FleetDiverging, notes.VersionNotDurable),
        *(leader.StoreFallenBehind, leader.RunRecordFailed, leader.BrokerBack),
    ),
}
KIND_OF = {note: kind for kind, marked in _KINDS.items() for note in marked}

#: What most of them say, with their fields in braces.
_SENTENCES: dict[type[Note], str] = {
    leader.AggregatorStarted: "an aggregator leads, epoch {epoch}",
    leader.AggregatorFinished: "an aggregator ended: {reason}",
    leader.AggregatorFenced: "the aggregator of epoch {epoch} is replaced by a later one: {detail}",
    leader.LeaderFollowed: "a standby follows the leader of epoch {epoch}",
    leader.StandbyCame: "{standby} stands by",
    leader.StandbyLost: "{standby} stands by no more",
    notes.RunSeeded: "the first model is there, in {fragments} fragments: training begins",
    notes.RunFlushing: "training ends, {reason}: {trained_tokens:,} tokens, the target was {target:,}",
    notes.RunEnded: "the run has ended: {trained:,} tokens trained, {merged:,} of them merged",
    notes.IslandResumed: "{island} is connected again, and goes on at step {start_step}",
    notes.IslandReleased: "{island} takes part again after its quarantine",
    notes.IslandStanding: "{island} makes no more steps",
    notes.IslandDoubted: "doubted: {detail}",
    notes.IslandBelieved: "{island} is believed again",
    leader.MessageRefused: "{kind} of {sender} refused, {reason}: {detail}",
    notes.JoinRefused: "{island} may not join, {reason}: {detail}",
    notes.RoundCancelled: "round {round} of fragment {fragment} cancelled: {reason}",
    notes.IntervalChanged: "a round every {steps} steps, not {was}: {because}",
    notes.FleetDiverging: "islands agree by {agreement}, usual is {usual}: training begins to diverge",
    notes.FleetAgrees: "islands agree as usual again: by {agreement}",
    notes.NormsRestarted: "fragment {fragment}: the usual length of contributions is learnt anew",
    leader.StoreFallenBehind: "the store is behind the islands: {detail}",
    notes.VersionNotDurable: "version {version} of fragment {fragment} cannot be written: {detail}",
    leader.RunRecordFailed: "the record of the run cannot be written: {detail}",
    leader.BrokerBack: "{broker} is back",
}


def island_of(note: Note) -> str:
    """Returns the island that a note is about; empty if it is about none."""
    return str(getattr(note, "island", "") or getattr(note, "sender", ""))


def text_of(note: Note) -> str:
    """Returns a note in words."""
    match note:
        case notes.IslandJoined(island=island, incarnation=life):
            return f"{island} joined" + ("" if life == 1 else f", life {life}")
        case notes.IslandLeft(island=island, reason=reason):
            return f"{island} left: {reason or 'no reason given'}"
        case notes.ContributionRefused(fragment=p, island=island, reason=reason, detail=detail):
            return f"fragment {p} of {island} refused, {reason}: {detail}".rstrip(": ")
        case notes.IslandQuarantined(island=island, for_s=for_s, reason=reason):
            return f"{island} quarantined for {for_s:.0f} s: {reason}"
        case notes.IslandCorrupted(island=island, fragment=p, version=version):
            return f"{island} corrupt in its memory, fragment {p} after version {version}: adopted anew"
        case _ if type(note) in _SENTENCES:
            return _SENTENCES[type(note)].format_map(note.fields).rstrip(": ")
        case _:
            said = [f"{name} {value}" for name, value in note.fields.items() if isinstance(value, str | int | float)]
            return ": ".join(filter(None, (note.name.replace(".", " ").replace("_", " "), ", ".join(said))))
