"""What became of the processes of a run, kept beside its tape: who shows the run later reads it there."""

from __future__ import annotations

import json
from pathlib import Path

from broker.process import clocks

FILE = "processes.jsonl"


class Told:
    """The file, one line of JSON for each happening.

    Args:
        run_dir: Of the run; the file is made with the first line.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE

    def write(self, process: str, text: str) -> None:
        """Adds a line, with the time by the clock of the tapes; a disk that is full stops nothing.

        Args:
            process: Whom it is about.
            text: For people.
        """
        line = {"now_s": round(clocks.monotonic(), 3), "process": process, "text": text}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            return
