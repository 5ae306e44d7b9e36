"""``atoll plot``: writes the page of a run as one file, to look at without a server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ops import run_directory
from ops.dashboard.watched_run import WatchedRun

PAGE = Path(__file__).parent / "page"
#: In the run directory.
FILE = "report.html"


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
    print(write_report(args.run_dir, args.out), flush=True)
    return 0


def write_report(run_dir: Path, out: Path | None = None, *, stopped: bool = False) -> Path:
    """Writes a run's page as one file; returns where. ``stopped``: its processes are known to be gone."""
    watched = WatchedRun(run_dir, None, "")
    while watched.read():
        pass
    names = ("index.html", "style.css", "dashboard.js", "vendor/uplot.css", "vendor/uplot.js")
    parts = {name: (PAGE / name).read_text(encoding="utf-8") for name in names}
    out = out or run_dir / FILE
    run_directory.write(out, report_page(parts, watched.frame(0, stopped=stopped)))
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
    """Returns text that no script element takes for its own end."""
    return text.replace("</", "<\\/")
