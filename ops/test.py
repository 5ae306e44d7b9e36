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

from broker.base.errors import ConfigError
from ops.launcher import ROOT, TORCH_ENVIRONMENT, LauncherError, torch_environment

#: Those that need PyTorch, or other large libraries.
TORCH_TESTS = ("tests/torch", "tests/integration/test_sinks.py")

GATES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("lint", ("-m", "ruff", "check", ".")),
    ("format", ("-m", "ruff", "format", "--check", ".")),
    ("imports", ("-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-logo", "--no-cache")),
    ("types", ("-m", "mypy")),
)

#: A file is run by one worker, since its tests often share a run. Those that start processes mostly wait for them while
#: others compute: there are more workers than processors.
WORKERS = ("-n", str(2 * (os.cpu_count() or 1)), "--dist", "loadfile", "--no-loadscope-reorder")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``test``."""
    parser.add_argument("--full", action="store_true", help="every test, also those that take long or need PyTorch")
    parser.add_argument("--rest", dest="only_rest", action="store_true", help="with --full: what test alone leaves out")
    parser.add_argument("--gates", action="store_true", help="lint, format, imports and types only")
    torch_help = f"the tests of islands.torch and of --log-to, in {TORCH_ENVIRONMENT}, which this builds"
    parser.add_argument("--torch", action="store_true", help=torch_help)
    parser.epilog = f"{parser.epilog}\n\nWith arguments of pytest only those tests are run."


def run(args: argparse.Namespace) -> int:
    """Runs the chosen tests and gates; returns 0 if all passed, else the first failure's exit status.

    Raises:
        ConfigError: This is no checkout, the tools are not installed, or flags contradict each other.
    """
    if not (ROOT / "tests").is_dir():
        raise ConfigError("tests", os.fspath(ROOT), "has no tests: run this in a checkout of the sources")
    if args.only_rest and not args.full:
        raise ConfigError("rest", True, "needs --full: run test alone first, then test --full --rest")
    if args.rest:
        return _run(("-m", "pytest", *args.rest), _torch_python() if args.torch else sys.executable)
    if args.torch:
        return _torch()
    failed = 0 if args.only_rest else _run_all(GATES)
    if failed or args.gates:
        return failed
    profile = "fast" if not args.full else "rest" if args.only_rest else "full"
    failed = _run_all([(f"{profile} profile", ("-m", "pytest", "--profile", profile, *WORKERS))])
    without = _torch() if args.full else 0
    return failed or without


def _torch() -> int:
    return _run_all([("torch", ("-m", "pytest", *WORKERS, *TORCH_TESTS))], _torch_python())


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
        status = _run(command, python)
        print(f"{name}: {'passed' if status == 0 else 'FAILED'} in {time.monotonic() - started_s:.1f} s", flush=True)
        failed = failed or status
    return failed


def _run(arguments: Sequence[str], python: str = sys.executable) -> int:
    """Runs Python in a process group of its own and leaves nothing of it behind."""
    environment = os.environ | {"ATOLL_NO_VENV": "1"}  # tests start our commands with this interpreter, as it is
    process = subprocess.Popen([python, *arguments], cwd=ROOT, env=environment, process_group=0)
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
