"""The progress display of a run: a live table on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from broker.routing.liveness import Liveness
from broker.wire.messages import Phase
from ops.inspect.status_view import island_table
from ops.story.run_status import Status
from ops.terminal import Screen
from ops.text import age

#: Tokens per second are measured over this long: shorter is restless, longer hides that an island stopped.
RATE_WINDOW_S = 15.0
#: After this a line is said again in which nothing has changed.
SAME_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A run at one moment, as people want to see it.

    Attributes:
        alive: Islands that are heard from.
        known: Islands that have ever joined and not left.
        fraction: Part of the run's tokens that is trained, 0 to 1; None for a run that goes on until it is stopped.
        versions: Of all fragments, lowest and highest; None before there are any.
        tokens_per_s: Trained by all islands; None while it cannot be told.
        loss: Mean of the islands' training losses.
        staleness: Mean of merged contributions, in versions; None where it is not reported.
        remaining_s: Until the last token is trained, at the present rate.
    """

    phase: str
    alive: int
    known: int
    fraction: float | None
    trained_tokens: int
    merged_tokens: int
    versions: tuple[int, int] | None
    tokens_per_s: float | None
    loss: float | None
    staleness: float | None
    remaining_s: float | None
    max_inner_step: int


class Rate:
    """Tokens per second over the last :data:`RATE_WINDOW_S` of one life of a run."""

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[float, int]] = collections.deque()
        self._epoch = 0

    def update(self, now_s: float, status: Status) -> float | None:
        """Adds a sample and returns the rate; None until there are two, or after another aggregator counted."""
        total, epoch = trained_tokens(status), int(status.totals.get("epoch", 0))
        if epoch != self._epoch or (self._samples and total < self._samples[-1][1]):
            self._samples.clear()
        self._epoch = epoch
        self._samples.append((now_s, total))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - RATE_WINDOW_S:
            self._samples.popleft()
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


def progress_of(status: Status, rate: float | None) -> Progress:
    """Returns what matters of a status; ``rate`` in tokens per second, as :class:`Rate` has it."""
    totals = status.totals
    target, trained = int(totals.get("target_tokens", 0)), trained_tokens(status)
    endless = "target_tokens" in totals and not target
    present = [each for each in status.islands.values() if each.state is not Liveness.LEFT]
    losses = [each.loss for each in present if each.loss is not None]
    versions = [each.version for each in status.fragments.values()]
    return Progress(
        phase=str(totals.get("phase", "starting")),
        alive=sum(each.state is Liveness.ALIVE for each in present),
        known=len(present),
        fraction=None if endless else min(1.0, trained / target) if target else 0.0,
        trained_tokens=trained,
        merged_tokens=int(totals.get("merged_tokens", 0)),
        versions=(min(versions), max(versions)) if versions else None,
        tokens_per_s=rate,
        loss=totals.get("loss") if totals.get("loss") is not None else (fmean(losses) if losses else None),
        staleness=totals.get("staleness_mean"),
        remaining_s=max(0, target - trained) / rate if target and rate else None,
        max_inner_step=max((each.inner_step for each in status.islands.values()), default=0),
    )


def trained_tokens(status: Status) -> int:
    """Returns the tokens trained: the aggregator's count or the islands' sum, the larger of both."""
    return max(int(status.totals.get("trained_tokens", 0)), sum(each.tokens for each in status.islands.values()))


def line(progress: Progress) -> str:
    """Returns a moment of the run in one line."""
    words = [progress.phase if progress.fraction is None else f"{progress.phase} {progress.fraction:4.0%}"]
    if progress.known:
        words.append(f"{progress.alive} of {progress.known} islands")
    elif progress.phase != Phase.ENDED:
        words.append("no island yet")
    words += [f"{label} {text}" for label, text in _figures(progress)]
    return "  ".join(words)


def _figures(progress: Progress) -> list[tuple[str, str]]:
    """Returns the figures that are known already."""
    figures = []
    if progress.versions is not None:
        low, high = progress.versions
        figures.append(("versions", str(low) if low == high else f"{low}-{high}"))
    figures.append(("merged", f"{progress.merged_tokens:,}"))
    if progress.tokens_per_s is not None:
        figures.append(("tokens/s", f"{progress.tokens_per_s:,.0f}"))
    if progress.loss is not None:
        figures.append(("loss", f"{progress.loss:.3f}"))
    if progress.staleness is not None:
        figures.append(("staleness", f"{progress.staleness:.2f}"))
    if progress.remaining_s is not None:
        figures.append(("left", age(progress.remaining_s)))
    if progress.phase == Phase.ENDED and progress.alive:
        figures.append(("islands fetch", "the last versions"))
    return figures


class Display:
    """Shows progress on a stream; a context manager. Notes (a process died) stay; the table is redrawn.

    Nobody's run ends because nobody can read of it: once the stream takes nothing, nothing more is shown.
    """

    def __init__(self, stream: TextIO | None = None, *, every_s: float = 5.0) -> None:
        """Chooses the form by whether ``stream`` (standard error, if not given) is a terminal.

        Args:
            stream: Where to write.
            every_s: Seconds between two lines when it is none.
        """
        self._console = Screen(file=sys.stderr if stream is None else stream, soft_wrap=True)
        live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live = live if self._console.can_redraw else None
        self._every_s = every_s
        self._next_s = self._same_until_s = float("-inf")
        self._said = ""
        self._broken = False

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._broken = True

    def __enter__(self) -> Display:
        if self._live is not None:
            with self._writing():
                self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            with self._writing():
                self._live.stop()

    def note(self, text: str) -> None:
        """Writes a line that stays."""
        if not self._broken:
            with self._writing():
                self._console.print(f"atoll: {text}", markup=False)

    def show(self, status: Status, progress: Progress, now_s: float, *, also: str = "") -> None:
        """Shows the run, and ``also`` below it; as a line only every few seconds."""
        if self._broken:
            return
        with self._writing():
            if self._live is not None:
                self._live.update(Group(table(status, progress), Text(also, style="bold yellow")), refresh=True)
            elif now_s >= self._next_s:
                self._next_s = now_s + self._every_s
                said = f"{line(progress)}  {also}".rstrip()
                if said != self._said or now_s >= self._same_until_s:
                    self._said, self._same_until_s = said, now_s + SAME_EVERY_S
                    self._console.print(said, markup=False)


def table(status: Status, progress: Progress) -> RenderableType:
    """Returns the live table: a bar, the figures of the run, one row per island."""
    figures = Text("  ").join(Text.assemble((f"{label} ", "dim"), text) for label, text in _figures(progress))
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(progress.phase, style="bold"),
        "" if progress.fraction is None else ProgressBar(total=1.0, completed=progress.fraction, width=32),
        "" if progress.fraction is None else Text(f"{progress.fraction:.0%}"),
        figures,
    )
    return Group(head, Text(""), island_table(status))
