"""What a run says of itself while it goes on: a line in a file for every point of its loss curve.

The laboratory reads it, since a run of half an hour that says nothing looks like one that hangs.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ops.lab.markdown import duration

#: Between two lines of one run, and from its beginning to the first.
SPEAK_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come.

    Attributes:
        points: Of its loss curve, that are there.
        of: Points, the last one included.
        loss: At the latest of them; of fewer sequences than the loss of the record.
    """

    points: int
    of: int
    loss: float

    def sentence(self, elapsed_s: float) -> str:
        """Says it, with what is left if the rest takes as long as what is done."""
        left_s = elapsed_s * (self.of - self.points) / self.points
        share = f"{100 * self.points / self.of:.0f} % in {duration(round(elapsed_s))}"
        return f"{share}, loss {self.loss:.4f} so far; about {duration(round(left_s))} to go"


def note(path: Path, progress: Progress) -> None:
    """Adds a line. A full disk costs the line, and not a run of an hour."""
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(asdict(progress))}\n")


def latest(path: Path) -> Progress | None:
    """Returns what was noted last; None before the first point. A line that is not whole does not count."""
    try:
        lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        return Progress(**json.loads(lines[-1])) if lines else None
    except (OSError, ValueError):
        return None
