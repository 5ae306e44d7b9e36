"""Weights & Biases: one of its runs for each run or island, resumed by its id.

What it has, its server says, by the summary of the run. Offline there is no server: there the files say it that
earlier processes have left (:mod:`ops.sinks.wandb_file`), which may lack the last seconds of one that was killed.
"""

from __future__ import annotations

import os
import re

import wandb

from ops.sinks.rows import Row, marker
from ops.sinks.sink import Identity
from ops.sinks.wandb_file import last_steps

#: Of ids, by the limits of its server.
_NOT_IN_IDS, _MAX_ID = re.compile(r"[^A-Za-z0-9_.-]"), 120


class WandbSink:
    """A run of a project, which :class:`ops.sinks.sink.Sink` describes."""

    def __init__(self, project: str, identity: Identity) -> None:
        """Resumes the run, or begins it; where nobody is logged in, this fails instead of asking."""
        entity, _, project = project.rpartition("/")
        folder = os.environ.get("WANDB_DIR") or os.fspath(identity.folder)
        run_id = _NOT_IN_IDS.sub("-", identity.key)[:_MAX_ID]
        before = last_steps(folder, run_id)
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True)
        self._run = wandb.init(
            entity=entity or None,
            project=project,
            id=run_id,
            name=identity.name,
            group=identity.group,
            dir=folder,
            resume="allow",
            settings=quiet,
        )
        self._offline = self._run.offline
        self._before = before.tokens
        # Numbers of rows go on, so that the files of one run can be uploaded one after the other.
        self._number = before.number + 1 if self._offline else self._run.step

    def written(self, stream: str) -> int:
        """Returns the last step that the server has, or the files."""
        # Its own axis, so that curves are over tokens and not over numbers of rows.
        self._run.define_metric(marker(stream))
        self._run.define_metric(f"{stream}/*", step_metric=marker(stream))
        if stream == "fleet":
            self._run.define_metric("islands/*", step_metric=marker(stream))
        found = self._before.get(stream) if self._offline else self._run.summary.get(marker(stream))
        return -1 if found is None else int(found)

    def write(self, row: Row) -> None:
        """Logs all points of the row at once."""
        self._run.log({**row.values, "_timestamp": row.at}, step=self._number, commit=True)
        self._number += 1

    def flush(self) -> None:
        """Does nothing: its own process uploads, or writes, every few seconds."""

    def close(self) -> None:
        """Uploads what waits, and finishes."""
        self._run.finish()
