"""What a chaos run looks like while it goes on: the display of ``up``, and a line for each fault."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ops.chaos.records import Happening, Recording
from ops.inspect.run_status import Status
from ops.run.display import Display, Rate, progress_of, trained_tokens

SHOW_EVERY_S = 1.0


class ChaosView:
    """Shows a run on a display."""

    def __init__(self, display: Display, recording: Recording) -> None:
        self._display = display
        self._recording = recording
        self._rate = Rate()
        self._next_s = 0.0

    def note(self, text: str) -> None:
        """Writes a line that stays, with the time since the beginning."""
        began_s = self._recording.began_s
        since = f"[{time.monotonic() - began_s:6.1f} s] " if began_s else ""
        self._display.note(f"{since}{text}")

    def show(self, status: Status | None, active: Sequence[Happening], now_s: float) -> None:
        """Shows where the run stands, once a second."""
        if status is None or now_s < self._next_s:
            return
        self._next_s = now_s + SHOW_EVERY_S
        progress = progress_of(status, self._rate.update(now_s, trained_tokens(status)))
        lasting = ", ".join(f"{each.fault.kind} {' + '.join(each.processes)}" for each in active)
        self._display.show(status, progress, now_s, also=f"faults: {lasting}" if lasting else "")
