"""A real ``up`` for tests: started as a user would, watched through its files and /proc, and killed piece by piece.

Everything is waited for by condition, with limits that only a broken program meets. Processes are found among the
descendants of the one that we started, and signalled by their ids.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aggregator.store.ledger_file import read_rows
from aggregator.store.tape import read_lines
from ops.chaos.verify import verify
from ops.processes import redis_server
from ops.processes.cluster import free_ports

ROOT = Path(__file__).resolve().parent.parent
NUMPY_TASK = "examples.numpy_task:task"
#: For whatever takes seconds on a machine at rest.
PATIENCE_S = 90.0

Line = dict[str, Any]


def command(*arguments: object, module: str = "ops") -> list[str]:
    """Returns the command line of ``python3 -m ops``, or another module, in this environment."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """Returns our variables without those that would lead to somebody else's Redis."""
    kept = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    return kept | {"ATOLL_NO_VENV": "1", "PYTHONPATH": str(ROOT), "ATOLL_LOG": "text"} | more


def ops(*arguments: object, within_s: float = PATIENCE_S, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    return subprocess.run(
        command(*arguments), env=environment(**variables), capture_output=True, text=True, timeout=within_s
    )


def wait_for(
    condition: Callable[[], Any],
    what: str,
    within_s: float = PATIENCE_S,
    *,
    evidence: Callable[[], str] = lambda: "",
) -> Any:
    """Returns the first true value of ``condition``; fails with ``evidence`` if there is none in time."""
    ends_s = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < ends_s, f"in {within_s:g} s there was no {what}\n{evidence()}"
        time.sleep(0.02)
    return value


def json_lines(path: Path) -> list[Line]:
    """Returns the objects in a file of JSON lines; none if there is no file yet."""
    return list(read_lines(path)) if path.exists() else []


# --- processes ------------------------------------------------------------------------------------------------------


def is_alive(pid: int) -> bool:
    """Says whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> dict[int, str]:
    """Returns the ids of all processes below ``pid``, with their command lines."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            with contextlib.suppress(OSError):
                found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found |= descendants(child)
    return found


class Process:
    """A command of ours that runs: its output in files, nothing of it left when the ``with`` block ends."""

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        module: str = "ops",
        open_files: int = 0,
        cwd: Path | None = None,
        **variables: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        limited = ["sh", "-c", 'ulimit -n $0; exec "$@"', str(open_files)] if open_files else []
        self.out_file, self.err_file = folder / "out", folder / "err"
        with self.out_file.open("wb") as out, self.err_file.open("wb") as err:
            self._process = subprocess.Popen(
                [*limited, *command(*arguments, module=module)],
                env=environment(**variables),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # a group of its own, as a shell gives it
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def out(self) -> str:
        return self.out_file.read_text()

    @property
    def err(self) -> str:
        return self.err_file.read_text()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def signal_group(self, number: int) -> None:
        os.killpg(self.pid, number)

    def wait(self, within_s: float = PATIENCE_S) -> int:
        """Returns the exit status; negative if a signal ended it."""
        return self._process.wait(within_s)


class RedisServer:
    """A Redis server that can be stopped, suspended, and started again empty on the same port."""

    def __init__(self, directory: Path, *options: str) -> None:
        found = redis_server.server(port=free_ports(1), directory=directory)
        self.url, self._command = found.url, [*found.command, *options]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisServer:
        """Returns itself when it answers."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self._answers, "answer of Redis", 20.0)
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, "the server ended at once"
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), timeout=1.0) as connection,
        ):
            connection.sendall(b"PING\r\n")
            return connection.recv(5) in (b"+PONG", b"-NOAU")
        return False

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()  # works on a suspended process too
            self.process.wait()
            self.process = None


class RunFiles:
    """What a run of ``up`` leaves in its directory, while it trains and afterwards."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.outputs = run_dir.with_name(f"{run_dir.name}-output")

    @property
    def out(self) -> str:
        return (self.outputs / "out").read_text()

    @property
    def err(self) -> str:
        return (self.outputs / "err").read_text()

    def versions(self) -> dict[int, int]:
        """Returns the newest durable version of each fragment, from the ledger on disk."""
        return {row["fragment_id"]: row["fragment_version"] for row in self.ledger()}

    def ledger(self) -> list[Line]:
        ledger = self.run_dir / "store" / "ledger.jsonl"
        return list(read_rows(ledger)) if ledger.exists() else []

    def folder(self, aggregator: str = "aggregator") -> Path:
        """Returns the place of the store and the tape of one of several aggregators."""
        return self.run_dir if aggregator == "aggregator" else self.run_dir / aggregator

    def tape(self, aggregator: str = "aggregator") -> list[Line]:
        return json_lines(self.folder(aggregator) / "events.jsonl")

    def notes(self, name: str, aggregator: str = "aggregator", since_s: float = 0.0) -> list[Line]:
        """Returns what an aggregator noted under a name, with the time as ``now_s``."""
        noted = (each for each in self.tape(aggregator) if each.get("note") == name and each["now_s"] > since_s)
        return [{"now_s": each["now_s"], **each["fields"]} for each in noted]

    def report(self) -> Line:
        return dict(json.loads((self.run_dir / "report.json").read_text()))


class Up(Process, RunFiles):
    """``up`` with the light task, in a directory of its own."""

    def __init__(self, run_dir: Path, *flags: object, task: str | None = NUMPY_TASK, **variables: str) -> None:
        RunFiles.__init__(self, run_dir)
        chosen = ["--task", task] if task is not None else []
        Process.__init__(self, self.outputs, "up", *chosen, "--run-dir", run_dir, *flags, **variables)

    def __enter__(self) -> Up:
        return self

    def process(self, name: str) -> int | None:
        """Returns the id of ``redis``, ``broker``, an aggregator or an island, if it runs."""
        # A Redis server shows its address in place of its arguments: "redis-server 127.0.0.1:6379", or "valkey-server".
        mark = {"redis": "-server 127.0.0.1:", "broker": " ops broker ", "aggregator": " ops aggregator "}
        if name.startswith("broker-"):  # of several
            mark[name] = f" --broker-name {name} "
        if name.startswith(("aggregator-", "standby-")):  # of several: the first alone has its store from the file
            mark[name] = f" --store {self.folder(name)}/store "
        for pid, line in descendants(self.pid).items():
            # Until it has become its command (ops/processes/child.py), the process is not yet what we look for.
            if name == "aggregator" and " --store " in line:
                continue
            if "child.py" not in line and mark.get(name, f" --island-id {name} ") in f"{line} ":
                return pid
        return None

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Kills one process, as a power cut would unless told otherwise; returns its id."""
        pid = wait_for(lambda: self.process(name), f"process {name}")
        os.kill(pid, number)
        return int(pid)

    def kill_all(self) -> None:
        """Ends the whole run at once; returns when nothing of it lives."""
        below = descendants(self.pid)
        for pid in (self.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()
        wait_for(lambda: not any(map(is_alive, below)), f"end of all of {below}")

    @contextlib.contextmanager
    def nobody_restarts(self) -> Iterator[None]:
        """Makes what is killed stay dead: the supervisor stands still.

        Else a leader that is killed may be back before its lease has run out, and lead again.
        """
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def restarted(self, name: str, old: int) -> int:
        """Returns the id of the process that took the place of ``old``."""
        return int(wait_for(lambda: (pid := self.process(name)) != old and pid, f"new {name}"))

    def wait_for_progress(self, versions: int = 1) -> None:
        """Returns when every fragment has got so many versions more."""
        before = self.versions()
        goal = {p: version + versions for p, version in before.items()}

        def reached() -> bool:
            assert self.is_running(), f"up ended early:\n{self.err}\n{self.out}"
            now = self.versions()
            return bool(now) and all(now[p] >= goal.get(p, versions) for p in now)

        wait_for(reached, f"{versions} more versions after {before}", evidence=lambda: self.err)


def merged_tokens(ledger: Iterable[Line]) -> int:
    """Returns how many tokens islands had trained when they handed over what they did last, all of them together."""
    merged = (each for row in ledger for each in row["contributions"])
    ends: dict[str, int] = {}
    for each in merged:
        ends[each["island_id"]] = max(ends.get(each["island_id"], 0), each["steps"]["to_tokens"])
    return sum(ends.values())


# --- what always holds ----------------------------------------------------------------------------------------------


def check_invariants(run_dir: Path) -> None:
    """Every invariant holds of which ledgers, stores and tapes tell: no version missing, no step merged twice, .."""
    assert [(check.name, check.examples) for check in verify(run_dir) if not check.holds] == []


def end_by_signal(up: Up, number: int, send: Callable[[int], None]) -> Line:
    """Interrupts a run that goes on; returns its report, after what every interrupted run must show."""
    below = descendants(up.pid)
    assert len(below) >= 6, below  # a guard, Redis, broker, aggregator, two islands
    send(number)
    # Users were promised 5 s, most of them for whoever does not end by itself; here other tests run beside it.
    assert up.wait(within_s=20.0) == 128 + number
    assert not any(map(is_alive, below)), up.err
    report = json.loads(up.out.splitlines()[-1])
    assert report == up.report()
    assert report["exit"] == 128 + number
    assert report["note"] == f"interrupted by {signal.Signals(number).name}"
    assert report["phase"] == "running"
    assert report["tokens"]["merged"] > 0
    check_report(report, ended=False)
    check_invariants(up.run_dir)
    return dict(report)


def check_report(report: Mapping[str, Any], *, ended: bool = True) -> None:
    """The books balance, and after the end nothing is on its way."""
    tokens = report["tokens"]
    assert tokens["trained"] == tokens["merged"] + sum(tokens["wasted"].values()) + tokens["in_flight"], tokens
    assert tokens["trained"] == sum(each["tokens"] for each in report["islands"].values())
    if ended:
        assert tokens["in_flight"] == 0
        assert all(version > 0 for version in report["versions"].values()), report["versions"]
        assert sum(report["rounds"].values()) == sum(report["versions"].values())
