"""The training loop of every system of the comparison, and its records. Standard library only.

A step is a pause, as where an accelerator computes, and a small change of every tensor; then the system's own call. All
lines have a time of the monotonic clock, which the processes of one machine share.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

TENSORS, COLUMNS = 24, 1024


class System(Protocol):
    """One peer of a system."""

    def change(self) -> None:
        """Changes the parameters a little, as a step of an optimizer does."""

    def step(self) -> None:
        """Calls the system, which may synchronise."""

    def look(self) -> None:
        """Notes what came of that, where it is not noted within; not timed."""

    def poison(self) -> None:
        """Makes all parameters NaN."""

    def finite(self) -> bool:
        """Says whether parameters are finite. One number of each tensor tells: all would be NaN."""


class Lines:
    """The file of what a peer saw: JSON lines."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 (as long as the process)

    def say(self, kind: str, **fields: Any) -> None:
        """Writes a line."""
        self._file.write(json.dumps({"kind": kind, "at_s": time.monotonic(), **fields}) + "\n")


def rows_of(parameters: int) -> int:
    """Returns the rows of each of the model's equal matrices."""
    return max(1, round(parameters / TENSORS / COLUMNS))


def resting_bytes() -> int:
    """Returns the most memory that this process has held so far (VmHWM)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return 0


def train(join: Callable[[argparse.Namespace, Lines], System]) -> None:
    """Joins and trains until it is killed; SIGUSR1 poisons the parameters before the next step.

    What a peer is told: ``number``, ``coordinator`` (address to join at), ``parameters``, ``fragments``, ``interval``
    (steps between two syncs of the whole model), ``delay`` (steps between sending a fragment and adopting it),
    ``step_s``, ``out`` (file of JSON lines).
    """
    args = argparse.Namespace(**json.loads(sys.argv[1]))
    lines = Lines(args.out)
    poisoned = [False]
    signal.signal(signal.SIGUSR1, lambda *_: poisoned.__setitem__(0, True))
    system = join(args, lines)
    lines.say("ready", pid=os.getpid())
    number = 0
    while True:
        time.sleep(args.step_s)
        began_s = time.monotonic()
        system.change()
        changed_s = time.monotonic() - began_s
        if poisoned[0]:
            poisoned[0] = False
            system.poison()
            lines.say("poisoned")
        began_s = time.monotonic()
        try:
            system.step()
        except Exception as err:
            lines.say("failed", error=f"{type(err).__name__}: {err}"[:500])
            raise
        took_s = time.monotonic() - began_s
        system.look()
        number += 1
        times = {"took_s": took_s, "changed_s": changed_s}
        lines.say("step", number=number, **times, finite=system.finite(), peak_bytes=resting_bytes())
