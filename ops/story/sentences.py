"""Sentences about what happened in a run, one for each note that has something to tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Note -> its sentence, with its fields in braces.
_SENTENCES = {
    "aggregator.started": "an aggregator leads, epoch {epoch}",
    "aggregator.finished": "an aggregator ended: {reason}",
    "aggregator.fenced": "the aggregator of epoch {epoch} is replaced by a later one: {detail}",
    "leader.followed": "a standby follows the leader of epoch {epoch}",
    "standby.came": "{standby} stands by",
    "standby.lost": "{standby} stands by no more",
    "run.seeded": "the first model is there, in {fragments} fragments: training begins",
    "run.flushing": "training ends, {reason}: {trained_tokens:,} tokens, the target was {target:,}",
    "run.ended": "the run has ended: {trained:,} tokens trained, {merged:,} of them merged",
    "island.resumed": "{island} is connected again, and goes on at step {start_step}",
    "island.released": "{island} takes part again after its quarantine",
    "island.standing": "{island} makes no more steps",
    "island.doubted": "doubted: {detail}",
    "island.believed": "{island} is believed again",
    "message.refused": "{kind} of {sender} refused, {reason}: {detail}",
    "join.refused": "{island} may not join, {reason}: {detail}",
    "round.cancelled": "round {round} of fragment {fragment} cancelled: {reason}",
    "interval.changed": "a round every {steps} steps, not {was}: {because}",
    "fleet.diverging": "islands agree by {agreement}, usual is {usual}: training begins to diverge",
    "fleet.agrees": "islands agree as usual again: by {agreement}",
    "norms.restarted": "fragment {fragment}: the usual length of contributions is learnt anew",
    "store.behind": "the store is behind the islands: {detail}",
    "version.not_durable": "version {version} of fragment {fragment} cannot be written: {detail}",
    "run_record.failed": "the record of the run cannot be written: {detail}",
    "broker.back": "{broker} is back",
}


def sentence(name: str, fields: Mapping[str, Any]) -> str:
    """Returns a note in words; one without a sentence, or without a field of it, with its name and fields."""
    try:
        return _SENTENCES[name].format_map(fields)
    except (KeyError, ValueError, TypeError):
        said = ", ".join(f"{_plain(key)} {each}" for key, each in fields.items() if isinstance(each, str | int | float))
        return f"{_plain(name)}{': ' if said else ''}{said}"


def _plain(name: str) -> str:
    return name.replace(".", " ").replace("_", " ")
