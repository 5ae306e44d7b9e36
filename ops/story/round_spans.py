"""Turns a round into spans of a trace. Pure.

round                   from its opening to the last adoption
open                  to its closing
contribution        to the arrival of an island's answer; one for each
merge                 to the new version in memory
persist               until that is durable everywhere it must be
publish               until a broker says that it has it; one for each
adopt                 until an island says that it trains on it; one for each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ops.story.rounds import Round

Value = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One part of a round; times in seconds since the run began. ``failed`` says why, if it has."""

    name: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    failed: str = ""
    parts: tuple[Span, ...] = ()


def span_of(each: Round) -> Span:
    """Returns a round that is over as a span."""
    attributes = _attributes(each)
    answers = tuple(
        Span(
            name="contribution",
            began_s=each.opened_s,
            ended_s=at_s,
            attributes={"island": note.island, "from_step": note.from_step, "to_step": note.to_step},
        )
        for at_s, note in each.answers
    )
    if each.failed:
        over_s = each.failed_s
        waited = Span(name="open", began_s=each.opened_s, ended_s=over_s, parts=answers)
        return Span(
            name="round",
            began_s=each.opened_s,
            ended_s=over_s,
            attributes=attributes,
            failed=each.failed,
            parts=(waited,),
        )
    assert each.closed_s is not None
    assert each.persisted_s is not None
    computed_s, began_s = each.computed_s or each.closed_s, each.persisted_s
    not_durable = {"not_durable": each.not_durable} if each.not_durable else {}
    after = [
        Span(name="publish", began_s=began_s, ended_s=at_s, attributes={"broker": broker})
        for broker, at_s in each.brokers.items()
    ]
    after += [
        Span(name="adopt", began_s=began_s, ended_s=at_s, attributes={"island": island, "adopted_version": version})
        for island, (at_s, version) in each.adopted.items()
    ]
    parts = (
        Span(name="open", began_s=each.opened_s, ended_s=each.closed_s, parts=answers),
        Span(name="merge", began_s=each.closed_s, ended_s=computed_s),
        Span(name="persist", began_s=computed_s, ended_s=began_s, attributes=not_durable),
        *sorted(after, key=lambda span: span.ended_s),
    )
    attributes["not_adopted"] = tuple(sorted(each.contributors - each.adopted.keys()))
    ended_s = max(part.ended_s for part in parts)
    return Span(name="round", began_s=each.opened_s, ended_s=ended_s, attributes=attributes, parts=parts)


def _attributes(each: Round) -> dict[str, Value]:
    found: dict[str, Value] = {"round": each.number, "fragment": each.fragment}
    if each.opened is not None:
        found |= {"asked": each.opened.asked, "held": each.opened.held, "flush": each.opened.flush}
    if each.closed is not None:
        found |= {"reason": each.closed.reason, "missing": tuple(each.closed.missing)}
    if (version := each.committed) is not None:
        found |= {"version": version.version, "digest": version.digest, "tokens": version.tokens}
        found |= {"staleness_mean": version.staleness_mean, "islands": tuple(sorted(each.contributors))}
    return found
