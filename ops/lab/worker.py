"""One run in a process of its own: ``python -m ops.lab.worker JOB RESULT PROGRESS``.

Settings in, record out, both as JSON; how far it is in between is in the third file (:mod:`ops.lab.progress`).

A process per run costs two seconds, and buys that no run can disturb another: not its memory, not its threads, not by
crashing.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> int:
    """Runs the job; 2 if its settings are wrong."""
    from broker.wire.errors import ConfigError
    from ops.lab import progress
    from ops.lab.records import Stage
    from ops.lab.running import run_cell
    from ops.lab.settings import cell_settings

    job: dict[str, Any] = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        record = run_cell(
            cell_settings(job["settings"]),
            job["seed"],
            experiment=job["experiment"],
            stage=Stage(job["stage"]),
            fields=job["fields"],
            watch=partial(progress.note, Path(arguments[2])),
        )
    except ConfigError as err:
        print(err, file=sys.stderr)
        return 2
    Path(arguments[1]).write_text(record.to_json(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
