"""A meeting of the processes of a side, compiled, before anything of theirs is on the clock."""

from __future__ import annotations

import time
from pathlib import Path

MEET_WITHIN_S = 300.0
_LOOK_S = 0.05


def meet(folder: Path, number: int, count: int) -> None:
    """Waits until all have compiled: machines are busy, and gloo gives up on a partner half a minute late.

    Args:
        folder: Of this run.
        number: Of this process.
        count: Processes.

    Raises:
        TimeoutError: One has not come.
    """
    (folder / f"compiled-{number}").touch()
    until_s = time.monotonic() + MEET_WITHIN_S
    while not all((folder / f"compiled-{other}").exists() for other in range(count)):
        if time.monotonic() > until_s:
            raise TimeoutError(f"not all {count} processes have compiled within {MEET_WITHIN_S:g} s")
        time.sleep(_LOOK_S)
