"""Figures in TensorBoard, Weights & Biases and MLflow: read back with their own readers, after kills, beside a run."""

import itertools
import os
import signal

import pytest

from ops.sinks.command import claim
from ops.sinks.sink import Identity
from ops.sinks.sources import DirectorySource, key_of
from ops.sinks.target import Kind, target_of
from tests.local_run import Process, Up, ops, wait_for

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
    from ops.sinks.wandb import rows_in

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
    """A run with figures of the fleet in TensorBoard; an island and a follower were killed."""
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("logged")
    fleet, there, bad = (folder / name for name in ("fleet", "there", "bad"))
    bad.write_text("in the way of a directory")
    run_dir = folder / "run"
    flags = ["--islands", 2, "--tokens", 60_000, "--pace", 0.08, "--evaluate-every", 10_000]
    flags += ["--sync-interval", 12]  # many versions also where the first merges are late
    with Up(run_dir, *flags, "--log-to", f"tensorboard:{fleet}", f"tensorboard:{bad}") as up:
        wait_for(lambda: (run_dir / "redis-url").exists() and up.versions(), "versions", evidence=lambda: up.err)
        url, _ = (run_dir / "redis-url").read_text().split()
        from_redis = ["log", "--redis", url, "--to", f"tensorboard:{there}", "--every", 1]
        with Process(folder / "log", *from_redis) as process:
            followed = Logged(Kind.TENSORBOARD, run_dir, folder / "followed")
            killed_with = followed.killed_with_points()
            up.kill("island-0")
            assert up.wait() == 0, up.err
            process.signal(signal.SIGINT)
            assert process.wait() in (0, 130)
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


def test_a_run_is_logged_from_its_redis_alone(board):
    folder = board[3] / "there" / board[0].run_dir.name
    tokens = in_tensorboard(folder, "fleet/tokens")
    assert tokens
    assert all(a < b for (a, _), (b, _) in itertools.pairwise(tokens))
    assert in_tensorboard(folder, "islands/island-1/tokens_per_s")[-1][1] > 0
