"""The page of a run as one file, with the run in it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


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
