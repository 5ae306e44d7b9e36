"""An explanation, as a value and as text: who is in a version, and why others are not."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from aggregator.rounds.recovery import Lineage
from ops.story.absence import Absence
from ops.story.directions import fleet_line, weight_line
from ops.text import PLAIN_WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """One contribution in a version.

    Attributes:
        steps: Inner steps [from, to) that it brought.
        share: Its merge weight: share of the step after staleness; the sum over a version is at most 1.
        staleness: In versions.
        fresh: It answered this very round; else it came too late for an earlier one, and was held.
        codec: Its number format on the wire; empty if the tape does not tell.
        doubted: Why its tokens weighed less than claimed; empty: they did not, or the tape does not tell.
        agreement: Its upper median cosine with the other islands in the version; None if nobody has noted it.
        trust: Factor of its weight, 0 to 1; None if unknown.
    """

    island: str
    incarnation: int
    steps: tuple[int, int]
    tokens: int
    share: float
    token_weight: float
    staleness: float
    fresh: bool
    codec: str = ""
    doubted: str = ""
    agreement: float | None = None
    trust: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One version, or one round that led to none.

    Attributes:
        version: None if the round was cancelled.
        closed: Why the round closed when it did; empty if it is not known.
        took_s: From its opening to its closing; None if it is not known.
        absent: The other islands known then; None if the tape does not tell of this round.
        lineage: The new lineage that the version begins, or that gave it up; None for any other version.
        counted_as: With a lineage: the cause under which the books have what was merged into versions given up.
        left_out: Contributions that are not listed, the lightest of a large fleet; only Redis leaves out any.
        from_redis: Neither ledger nor tape was read: ``absent`` has only the islands that were waited for in vain.
        agreement: Median over islands of their agreements; None if nobody has noted it.
        momentum_cosine: Cosine of the merge with the momentum before it; None if unknown.
        gone: The missing parts of the tape that would have told more, in words; empty: none.
    """

    fragment: int
    version: int | None
    round_id: int
    epoch: int | None
    digest: str
    flush: bool
    closed: str
    took_s: float | None
    contributors: tuple[Contributor, ...]
    absent: tuple[Absence, ...] | None
    lineage: Lineage | None = None
    counted_as: str = ""
    left_out: int = 0
    from_redis: bool = False
    agreement: float | None = None
    momentum_cosine: float | None = None
    gone: str = ""


_COLUMNS = ("in it", "steps", "tokens", "weight", "staleness", "sent as", "agrees", "")


def render(found: Explanation) -> str:
    """Returns the explanation as text for people."""
    lines = [_headline(found)]
    if found.lineage is not None and found.lineage.version != found.version:
        again = f"which is {found.lineage.original} again"
        lines.append(f"it was given up: a new lineage began with version {found.lineage.version}, {again}")
        lines.append(f"what was merged into it is counted as {found.counted_as}")
    if found.closed:
        took = "" if found.took_s is None else f" {found.took_s:.2f} s after its opening"
        lines.append(
            f"round {found.round_id}{', the flush at the end,' if found.flush else ''} closed{took}: {found.closed}"
        )
    if directions := fleet_line({"agreement": found.agreement, "momentum_cosine": found.momentum_cosine}):
        lines.append(f"directions: {directions}")
    if found.contributors:
        rows = [
            (
                each.island,
                f"{each.steps[0]}-{each.steps[1]}",
                f"{each.tokens:,}",
                f"{each.share:.1%}",
                f"{each.staleness:.2f}",
                each.codec or "-",
                "-" if each.agreement is None else f"{each.agreement:.2f}",
                _remarks(each, found.agreement),
            )
            for each in sorted(found.contributors, key=lambda each: (each.island, each.steps))
        ]
        lines += ["", _table(_COLUMNS, rows, numbers=(1, 2, 3, 4, 6))]
        lines += sorted({each.doubted for each in found.contributors if each.doubted})
    if found.absent:
        lines += ["", _table(("not in it", "why", ""), [(each.island, each.why, each.detail) for each in found.absent])]
    elif found.absent is not None and not found.from_redis:
        lines += ["", "every island that was known is in it"]
    elif found.contributors and not found.from_redis:
        lines += ["", "why others are not in it is not known: the event tape does not tell of this round"]
    if found.left_out:
        lines += ["", f"{found.left_out} lighter contributions are not listed"]
    if found.from_redis:
        others = "others were not waited for" if found.absent else "nobody was waited for in vain"
        lines += ["", f"{others}: why somebody is not in it says the event tape, where the aggregator is"]
    if found.gone:
        partly = "; islands that it had not heard since then are not listed" if found.absent is not None else ""
        lines += ["", f"{found.gone}{partly}"]
    return "\n".join(lines)


def _remarks(each: Contributor, usual: float | None) -> str:
    when = "fresh" if each.fresh else "held: it came too late for an earlier round"
    if each.trust is None or each.trust == 1:
        return when
    return f"{when}; {weight_line(each.agreement, usual, each.trust)}"


def _headline(found: Explanation) -> str:
    if found.version is None:
        return f"round {found.round_id} of fragment {found.fragment} led to no version"
    name = f"version {found.version} of fragment {found.fragment}"
    if found.version == 0:
        return f"{name} is the beginning: the parameters of one island, merged with nothing; digest {found.digest}"
    if found.lineage is not None and found.lineage.version == found.version:
        what = f"{name} begins a new lineage: it is {found.lineage.original} under a number that nobody had seen"
        lost = ", ".join(map(str, found.lineage.given_up))
        return f"{what}; given up: {lost or 'nothing'}; digest {found.digest}"
    islands = len({each.island for each in found.contributors})
    tokens = sum(each.tokens for each in found.contributors)
    return f"{name}: {islands} islands, {tokens:,} tokens; digest {found.digest}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=None if os.isatty(1) else PLAIN_WIDTH, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
