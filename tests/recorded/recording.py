"""Runs that are made once for all tests that only read them, whichever process of pytest asks first.

A recording is the directory of a run of ``up``, and what was seen while it trained. Who reads one leaves it as it is,
and works on a copy where it must change something.
"""

import contextlib
import fcntl
import io
import json
import os
import shutil
import traceback

import pytest

from ops import cli
from ops.story import curve
from tests.local_run import RunFiles, descendants, json_lines, wait_for


class Recording(RunFiles):
    """A run that has ended, and what its recorder saw: values that JSON can hold."""

    def __init__(self, folder):
        super().__init__(folder / "run")
        self.folder, self.seen = folder, json.loads((folder / "seen.json").read_text())

    def copy(self, folder):
        """Returns the files of a copy, which may be changed."""
        shutil.copytree(self.run_dir, folder / "run")
        return RunFiles(folder / "run")


def recorded(record, factory):
    """Returns a recording; makes it if no other process of these tests has.

    Args:
        record: Makes a run in ``FOLDER/run``; returns what it saw.
        factory: pytest's ``tmp_path_factory``.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # which all workers of a test run share
    folder = base / f"recorded-{record.__name__}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "failure").exists():
            pytest.fail(f"was not recorded: {(folder / 'failure').read_text()}")
        if not (folder / "seen.json").exists():
            try:
                seen = record(folder)
            except BaseException:
                (folder / "failure").write_text(traceback.format_exc())
                raise
            (folder / "seen.json").write_text(json.dumps(seen))
    return Recording(folder)


def said(*words):
    """Returns what a command says of a run; in this process, for a busy machine takes seconds to start another one.

    Where Redis is too busy to answer in time it is asked again.
    """

    def once():
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = cli.main([str(word) for word in words])
        assert code in (0, 1), words
        return code == 0 and [out.getvalue()]

    return wait_for(once, f"answer to {words}")[0]


def status_of(run_dir):
    return json.loads(said("status", run_dir, "--json"))


def points_in(run_dir):
    return curve.points_of(json_lines(run_dir / curve.FILE))


def process_of(up, words):
    """Returns the id of the process below ``up`` that has become the command with these words, if it runs."""
    found = (pid for pid, line in descendants(up.pid).items() if "child.py" not in line and words in line)
    return next(found, None)


def ports_of_metrics(up):
    """Returns process -> port, as ``up`` has written them for Prometheus."""
    targets = json.loads((up.run_dir / "metrics.json").read_text())
    return {each["labels"]["process"]: int(each["targets"][0].rpartition(":")[2]) for each in targets}
