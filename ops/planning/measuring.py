"""Counts the parameters that a run would train, in a short child process.

``up`` itself never loads the libraries of a task: it would hold a GPU for as long as the run lasts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from broker.wire.errors import ConfigError
from ops.launcher import python_path
from ops.processes.child_process import tied

#: Initial parameters of 10^10 elements take minutes on a CPU.
WITHIN_S = 900.0

_CURE = "give a number"

_SCRIPT = """
import sys, pathlib
from ops.launcher import find_modules_here
find_modules_here()
from ops.planning.sizing import read_model
print(read_model(pathlib.Path(sys.argv[1])).parameters)
"""


def parameters_of(config: str) -> int:
    """Returns the parameters that are synchronised in a run.

    Args:
        config: Its configuration, as ``config.toml`` has it.

    Raises:
        ConfigError: The task does not say, with what it said instead.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-size-") as folder:
        file = Path(folder) / "config.toml"
        file.touch(mode=0o600)  # options of the task may be secret
        file.write_text(config, encoding="utf-8")
        try:
            done = subprocess.run(
                tied([sys.executable, "-P", "-c", _SCRIPT, str(file)]),
                env=dict(os.environ) | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": python_path()},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=WITHIN_S,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                "shards", "auto", f"needs the size of the model, which took {WITHIN_S:g} s: {_CURE}"
            ) from None
    try:
        return int(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise ConfigError("shards", "auto", f"needs the size of the model ({said[0]}): {_CURE}") from None
