"""Figures in TensorBoard, Weights & Biases and MLflow: read back with their own readers, after kills, beside a run."""

import contextlib
import itertools
import os
import signal
import time

import pytest

from broker.sinks.process import KEPT_ROWS, WAITING_ROWS, SinkProcess
from broker.sinks.rows import Row, row
from broker.sinks.sink import Identity
from broker.sinks.target import Kind, target_of
from ops.sinks.command import claim
from ops.sinks.sources import DirectorySource, key_of
from tests.local_run import ROOT, Process, Up, descendants, is_alive, ops, wait_for

pytestmark = pytest.mark.timeout(240)

EVERY_S = 0.25
#: Nothing of the test's user, and MLflow's plain files, which it keeps for who asks for them.
VARIABLES = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}


# --- what the libraries themselves read -------------------------------------------------------------------------------


def in_tensorboard(folder, name):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return [(each.step, each.value) for each in found.Scalars(name)] if name in found.Tags()["scalars"] else []


def in_wandb(folder, name):
    pytest.importorskip("wandb")
    from broker.sinks.wandb_file import rows_in

    stream = "fleet" if name.startswith("islands/") else name.partition("/")[0]
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    rows = list(itertools.chain.from_iterable(map(rows_in, files)))
    assert [each["_step"] for each in rows] == list(range(len(rows)))  # one run, in parts that fit
    return [(int(each[f"{stream}/tokens"]), each[name]) for each in rows if name in each]


def in_mlflow(folder, name):
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=folder.as_uri())
    experiment = client.get_experiment_by_name("atoll")
    found = client.search_runs([experiment.experiment_id]) if experiment else []
    assert len(found) <= 1
    return [(each.step, each.value) for one in found for each in client.get_metric_history(one.info.run_id, name)]


READERS = {Kind.TENSORBOARD: in_tensorboard, Kind.WANDB: in_wandb, Kind.MLFLOW: in_mlflow}


# --- the fleet --------------------------------------------------------------------------------------------------------


class Logged:
    """A run that is followed into one library, and where that keeps it."""

    def __init__(self, kind, run_dir, folder, every_s=EVERY_S):
        place = {Kind.TENSORBOARD: folder, Kind.WANDB: "atoll", Kind.MLFLOW: folder.as_uri()}[kind]
        self.kind, self.run_dir, self.folder, self.target, self.starts = kind, run_dir, folder, f"{kind}:{place}", 0
        self.every_s = every_s
        folder.mkdir()

    @property
    def key(self):
        return key_of(self.run_dir, self.run_dir.name)

    def command(self):
        return ["log", self.run_dir, "--to", self.target, "--every", self.every_s]

    def start(self):
        self.starts += 1
        output = self.folder.with_name(f"{self.folder.name}-output-{self.starts}")
        return Process(output, *self.command(), **VARIABLES, WANDB_DIR=str(self.folder))

    def read(self, name):
        folder = self.folder / self.key if self.kind is Kind.TENSORBOARD else self.folder
        return READERS[self.kind](folder, name) if folder.exists() else []

    def killed_with_points(self, enough=1):
        """Starts it, kills it as soon as the library has so many rows; returns how many it has then."""
        with self.start() as process:
            wait_for(
                lambda: len(self.read("fleet/tokens")) >= enough, f"points in {self.kind}", evidence=lambda: process.err
            )
            process.signal(signal.SIGKILL)
            process.wait()
        return len(self.read("fleet/tokens"))

    def check(self):
        """Checks that it has every row of the run once, in their order."""
        rows = expected(self.run_dir, self.every_s)
        for name in ("fleet/loss", "fleet/staleness", "islands/island-0/tokens_per_s", "evaluation/loss"):
            wanted = [(each.step, pytest.approx(each.values[name])) for each in rows if name in each.values]
            assert self.read(name) == wanted, name
            assert wanted


def expected(run_dir, every_s=EVERY_S):
    """Every row that the tape and the evaluations come to, read once and without a break."""
    source = DirectorySource(run_dir, every_s)
    rows = source.rows()
    assert source.over()
    return rows + source.rows()


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """A run with figures of the fleet, and of each island, in TensorBoard; an island and a follower were killed."""
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("logged")
    islands, fleet, there, bad = (folder / name for name in ("islands", "fleet", "there", "bad"))
    bad.write_text("in the way of a directory")
    config = folder / "run.toml"
    config.write_text(f'[island]\nlog_to = "tensorboard:{islands}"\n')
    run_dir = folder / "run"
    flags = ["--config", config, "--islands", 2, "--tokens", 60_000, "--pace", 0.08, "--evaluate-every", 10_000]
    flags += ["--sync-interval", 12]  # many versions also where the first merges are late
    with Up(run_dir, *flags, "--log-to", f"tensorboard:{fleet}", f"tensorboard:{bad}") as up:
        wait_for(lambda: (run_dir / "redis-url").exists() and up.versions(), "versions", evidence=lambda: up.err)
        url, _ = (run_dir / "redis-url").read_text().split()
        from_redis = ["log", "--redis", url, "--to", f"tensorboard:{there}", "--every", 1]
        with Process(folder / "log", *from_redis) as process:
            followed = Logged(Kind.TENSORBOARD, run_dir, folder / "followed")
            killed_with = followed.killed_with_points()
            own = islands / "run-island-0"
            wait_for(lambda: own.exists() and in_tensorboard(own, "island/loss"), "a row", evidence=lambda: up.err)
            up.kill("island-0")
            assert up.wait() == 0, up.err
            process.signal(signal.SIGINT)
            assert process.wait() in (0, 130)
    below = [line for pid, line in descendants(os.getpid()).items() if "broker.sinks" in line and is_alive(pid)]
    assert below == []
    return up, followed, killed_with, folder


def test_a_follower_that_was_killed_leaves_no_point_out_and_writes_none_twice(board):
    _, followed, killed_with, _ = board
    assert 0 < killed_with < len([each for each in expected(followed.run_dir) if each.stream == "fleet"])
    with followed.start() as process:
        assert process.wait() == 0, process.err
    followed.check()
    with followed.start() as process:
        assert process.wait() == 0
    assert "log.ended rows=0" in process.err
    followed.check()


@pytest.mark.parametrize("kind", [Kind.WANDB, Kind.MLFLOW])
def test_so_it_is_with_other_libraries(board, kind, tmp_path, monkeypatch):
    """The same run again, as it grows: its follower is killed when half of the tape is there."""
    pytest.importorskip(str(kind))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for the reader here
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    whole = board[0].run_dir
    lines = (whole / "events.jsonl").read_bytes().splitlines(keepends=True)
    half = len(lines) // 2
    (run_dir / "events.jsonl").write_bytes(b"".join(lines[:half]) + lines[half][:20])  # in the middle of a line
    followed = Logged(kind, run_dir, tmp_path / "kept", every_s=1.0)
    # MLflow's plain files may be left without a line where a process is killed that writes: it ends between two rows.
    half_s = len([each for each in DirectorySource(run_dir, followed.every_s).rows() if each.stream == "fleet"])
    assert followed.killed_with_points(half_s if kind is Kind.MLFLOW else 1) > 0
    with (run_dir / "events.jsonl").open("ab") as file:
        file.write(lines[half][20:] + b"".join(lines[half + 1 :]))
    (run_dir / "evaluations.jsonl").write_bytes((whole / "evaluations.jsonl").read_bytes())
    with followed.start() as process:
        assert process.wait() == 0, process.err
    followed.check()


def test_two_at_a_time_into_one_place_are_refused(board):
    followed = board[1]
    identity = Identity(key=followed.key, name="run", group="run", folder=followed.folder)
    held = claim(target_of(followed.target), identity)
    try:
        done = ops(*followed.command())
    finally:
        os.close(held)
    assert done.returncode == 2
    assert "another process writes run run there already" in done.stderr


def test_up_logs_the_run_and_a_library_that_fails_costs_nothing_but_its_figures(board):
    up, _, _, folder = board
    last = [each for each in expected(up.run_dir) if each.stream == "fleet"][-1]
    run_id = up.run_dir.name
    written = in_tensorboard(folder / "fleet" / key_of(up.run_dir, run_id), "fleet/tokens")
    assert written[-1][0] == last.step or "log-1 has not written the last figures" in up.err  # on a busy machine
    said = (up.run_dir / "logs" / "log-2.log").read_text()
    assert 1 <= said.count("log.failing") <= said.count("log.begins")  # once at most in each life
    assert "check that the directory can be written" in said
    assert f"later: python3 -m ops log {up.run_dir} --to tensorboard:{folder / 'bad'}" in up.err


def test_an_island_logs_itself_through_its_own_death(board):
    for name in ("run-island-0", "run-island-1"):
        folder = board[3] / "islands" / name
        tokens = in_tensorboard(folder, "island/tokens")
        assert len(tokens) >= 2
        assert all(a < b for (a, _), (b, _) in itertools.pairwise(tokens))
        assert all(step == value for step, value in tokens)
        assert in_tensorboard(folder, "island/tokens_per_s")[-1][1] > 0


def test_a_run_is_logged_from_its_redis_alone(board):
    folder = board[3] / "there" / board[0].run_dir.name
    tokens = in_tensorboard(folder, "fleet/tokens")
    assert tokens
    assert all(a < b for (a, _), (b, _) in itertools.pairwise(tokens))
    assert in_tensorboard(folder, "islands/island-1/tokens_per_s")[-1][1] > 0


# --- the process beside an island ----------------------------------------------------------------------------------


def sink(folder, **settings):
    identity = Identity(key="run-a", name="run-a", group="run", folder=folder)
    return SinkProcess(target_of(f"tensorboard:{folder}"), identity, **settings)


def made(step):
    return lambda: row("island", step, 1000.0 + step, {"island/loss": 1.0 / step})


@pytest.fixture(autouse=True)
def findable(monkeypatch):
    """Processes that we start find this checkout."""
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))


def test_rows_survive_the_death_of_the_process_that_writes_them(tmp_path):
    pytest.importorskip("tensorboard")
    writing = sink(tmp_path, start_every_s=0.0)
    folder, deaths = tmp_path / "run-a", 0
    for step in range(1, 40):
        writing.offer(made(step))
        if step % 13 == 0:
            wait_for(lambda: folder.exists() and in_tensorboard(folder, "island/loss"), "points")
            with contextlib.suppress(ProcessLookupError):  # the last one has died, and no row was written since
                os.kill(writing.pid, signal.SIGKILL)
                deaths += 1
    assert deaths > 0
    wait_for(lambda: writing.offer(made(40)), "room")
    writing.close(within_s=30)
    assert [step for step, _ in in_tensorboard(folder, "island/loss")] == list(range(1, 41))


def test_a_library_that_hangs_drops_rows_and_nobody_waits_for_it(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    writing = sink(tmp_path)
    writing.offer(made(1))
    pid = wait_for(lambda: writing.pid, "the process")
    os.kill(pid, signal.SIGSTOP)
    try:
        long = {f"island/{k}": 1.0 for k in range(1000)}  # so that the pipe is full soon
        slowest_s, taken = 0.0, 0
        for step in range(2, 3 * WAITING_ROWS):
            began_s = time.perf_counter()
            taken += writing.offer(lambda step=step: Row(stream="island", step=step, at=0.0, values=long))
            slowest_s = max(slowest_s, time.perf_counter() - began_s)
        assert taken < 2 * WAITING_ROWS < KEPT_ROWS
        assert slowest_s < 0.5  # microseconds, but for other processes on this machine
        assert [each.message.split()[0] for each in caplog.records].count("log_to.behind") == 1
        assert "training goes on" in caplog.text
        began_s = time.monotonic()
        writing.close(within_s=0.2)
        assert time.monotonic() - began_s < 5
    finally:
        os.kill(pid, signal.SIGKILL)
        writing.close(within_s=30)  # nothing is started again
    assert writing.pid == pid
