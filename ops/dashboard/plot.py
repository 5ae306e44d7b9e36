"""``atoll plot``: writes the page of a run as one file, to look at without a server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aggregator.interface.notes import VersionCommitted
from aggregator.interface.reading_notes import note_in
from ops import run_directory
from ops.dashboard.watched_run import WatchedRun
from ops.inspect.tapes import Line
from ops.text import finite

PAGE = Path(__file__).parent / "page"
#: In the run directory.
FILE = "report.html"
#: Contributions that a report lists at most, over all its versions: they are the most of a long run's page.
MAX_CONTRIBUTIONS = 20_000
_CONTRIBUTION = ("island", "incarnation", "steps", "tokens", "merge_weight", "staleness", "agreement", "trust", "fresh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``atoll plot``."""
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="directory of a run of `up` or `hub`, live or ended"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help=f"where to (default: {FILE} in RUN_DIR)")


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints its path.

    Raises ConfigError if there is no run, Unavailable if the page cannot be written.
    """
    print(write_report(WholeRun(args.run_dir), args.out or args.run_dir / FILE), flush=True)
    return 0


class Contributors:
    """The contributions of the newest versions, from a tape: a page without a server cannot ask.

    Attributes:
        versions: Fragment and version -> why its round closed, its digest, who was waited for in vain, and rows of the
            contributions: island, life, steps [from, to), tokens, share, staleness, agreement, trust, whether in time.
    """

    def __init__(self) -> None:
        self.versions: dict[str, list[Any]] = {}
        self._count = 0

    def take(self, line: Line) -> None:
        """Adds the version that a line commits, if it does; the oldest are dropped."""
        note = note_in(line)
        if not isinstance(note, VersionCommitted):
            return
        rows = [[getattr(each, name) for name in _CONTRIBUTION] for each in note.contributions or ()]
        version = [note.reason, note.digest, note.missing, rows]
        self.versions[f"{note.fragment}:{note.version}"] = finite(version, digits=4)
        self._count += len(rows)
        while self._count > MAX_CONTRIBUTIONS and len(self.versions) > 1:
            self._count -= len(self.versions.pop(next(iter(self.versions)))[-1])


class WholeRun(WatchedRun):
    """A run read from its tapes to their ends; raises ConfigError if there is none."""

    def __init__(self, run_dir: Path) -> None:
        self.contributors = Contributors()
        super().__init__(run_dir, None, "", also=self.contributors.take)
        while self.read():
            pass


def write_report(run: WholeRun, out: Path, *, stopped: bool = False) -> Path:
    """Writes a run's page as one file; returns where. ``stopped``: its processes are known to be gone."""
    names = ("index.html", "style.css", "charts.js", "dashboard.js", "vendor/uplot.css", "vendor/uplot.js")
    parts = {name: (PAGE / name).read_text(encoding="utf-8") for name in names}
    frame = run.frame(0, stopped=stopped) | {"versions": run.contributors.versions}
    run_directory.write(out, report_page(parts, frame))
    return out


def report_page(parts: Mapping[str, str], frame: Mapping[str, Any]) -> str:
    """Returns the page's HTML with its styles, scripts and data inside.

    Args:
        parts: ``index.html``, and everything that it refers to under ``page/``, by name.
        frame: As :meth:`ops.dashboard.watched_run.WatchedRun.frame` returns it, of the whole history.
    """
    html = parts["index.html"]
    for name, text in parts.items():
        html = html.replace(f'<link rel="stylesheet" href="page/{name}">', f"<style>\n{text}</style>")
        html = html.replace(f'<script src="page/{name}"></script>', f"<script>\n{_inside(text)}</script>")
    data = _inside(json.dumps(frame, separators=(",", ":")))
    return html.replace("<script>", f'<script type="application/json" id="data">{data}</script>\n<script>', 1)


def _inside(text: str) -> str:
    """Returns text in which no script element finds its own end."""
    return text.replace("</", "<\\/")
