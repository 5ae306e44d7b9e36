"""``test``: lint, format, types and the test suite, as CI runs them."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

from broker.wire.errors import ConfigError
from ops.launcher import ROOT, TORCH_ENVIRONMENT, LauncherError, torch_environment

#: Those that need PyTorch, or other large libraries.
TORCH_TESTS = ("tests/torch", "tests/integration/test_sinks.py")

GATES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("lint", ("ruff", "check", ".")),
    ("format", ("ruff", "format", "--check", ".")),
    ("types", ("mypy",)),
)

#: Folders that the first suite leaves out: those that start processes, that need PyTorch, or a Docker engine.
APART = ("tests/integration", "tests/torch", "tests/compose")

#: Tests that start no processes of their own share out the processors. Those that do mostly wait for these: two files
#: at a time, each by one worker, since the tests of a file often share a run.
SUITES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("computed", ("-n", "auto", "--dist", "worksteal", *(word for each in APART for word in ("--ignore", each)))),
    ("integration", ("-n", "2", "--dist", "loadfile", "tests/integration")),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``test``."""
    parser.add_argument("--gates", action="store_true", help="lint, format and types only")
    torch_help = f"the tests of islands.torch and of --log-to, in {TORCH_ENVIRONMENT}, which this builds"
    parser.add_argument("--torch", action="store_true", help=torch_help)
    parser.epilog = f"{parser.epilog}\n\nWith arguments of pytest only those tests are run."


def run(args: argparse.Namespace) -> int:
    """Runs what was asked for; returns 0 if all of it passed, else the first failure's exit status.

    Raises:
        ConfigError: This is no checkout, or the tools are not installed.
    """
    if not (ROOT / "tests").is_dir():
        raise ConfigError("tests", os.fspath(ROOT), "has no tests: run this in a checkout of the sources")
    if args.torch:
        return _run_all([("torch", ("pytest", *(args.rest or TORCH_TESTS)))], _torch_python())
    if args.rest:
        return _run("pytest", args.rest)
    failed = _run_all(GATES)
    if failed or args.gates:
        return failed
    return _run_all((name, ("pytest", *flags)) for name, flags in SUITES)


def _torch_python() -> str:
    """Returns the interpreter of the environment with PyTorch, once it is built.

    Raises:
        ConfigError: It cannot be built.
    """
    try:
        return os.fspath(torch_environment() / "python")
    except LauncherError as err:
        raise ConfigError("--torch", TORCH_ENVIRONMENT, str(err)) from err


def _run_all(commands: Iterable[tuple[str, tuple[str, ...]]], python: str = sys.executable) -> int:
    """Runs each, says how it went, and returns the first failure's exit status."""
    failed = 0
    for name, command in commands:
        started_s = time.monotonic()
        status = _run(command[0], command[1:], python)
        print(f"{name}: {'passed' if status == 0 else 'FAILED'} in {time.monotonic() - started_s:.1f} s", flush=True)
        failed = failed or status
    return failed


def _run(module: str, arguments: Sequence[str], python: str = sys.executable) -> int:
    """Runs ``python -m module`` in its own process group and leaves nothing of it behind."""
    environment = os.environ | {"ATOLL_NO_VENV": "1"}  # tests start our commands with this interpreter, as it is
    process = subprocess.Popen([python, "-m", module, *arguments], cwd=ROOT, env=environment, process_group=0)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)  # pytest then says where it was
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
