"""The laboratory's command with real processes: run, killed, gone on with, reported."""

import signal

import pytest

from ops import cli
from ops.lab.records import read
from tests.local_run import Process, descendants, is_alive, ops, wait_for

EXPERIMENT = """
question = "Does a run that was stopped go on?"
notes = "A numpy task: seconds."
seeds = 2

[run]
steps = 60
islands = 2
fragments = 2
sync_interval = 6
task = "examples.numpy_task:task"

[grid]
mode = ["decoupled", "diloco"]

[[compare]]
claim = "Decoupled is within 50 % of synchronous DiLoCo"
candidate = { mode = "decoupled" }
baseline = { mode = "diloco" }
margin = 0.5
kind = "not-worse"
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_NO_VENV", "1")  # with this interpreter, also where the checkout has no environment
    path = tmp_path / "stopped.toml"
    path.write_text(EXPERIMENT)
    return path


def lab(*arguments):
    return ops("lab", *arguments, within_s=100)


def here(*arguments):
    """The command in this process."""
    return cli.main(["lab", *map(str, arguments)])


@pytest.mark.timeout(300)
@pytest.mark.full("runs of the laboratory")
def test_a_run_that_was_interrupted_goes_on_where_it_was(experiment, tmp_path, capsys):
    records = tmp_path / "records"
    arguments = ["run", experiment, "--records", records, "--jobs", "1", "--max-seeds", "1"]
    with Process(tmp_path / "said", "lab", *arguments) as process:
        # The first run is done, and the second is on its way.
        wait_for(lambda: (process.out + process.err).count("begins") == 2, "second run", evidence=lambda: process.err)
        process.signal(signal.SIGINT)
        assert process.wait() == 130
    assert "stopped" in process.out + process.err
    assert "Traceback" not in process.err
    kept = read(records, "stopped")
    assert len(kept) == 1

    done = lab(*arguments)
    assert done.returncode == 0, done.stderr
    assert "complete" in done.stdout
    assert read(records, "stopped")[:1] == kept

    assert here("show", experiment, "--records", records) == 0
    shown = capsys.readouterr().out
    assert "stopped: Does a run that was stopped go on?\n  2 runs in " in shown
    assert "; 2 due\n" in shown
    assert "inconclusive: Decoupled is within 50 % of synchronous DiLoCo" in shown
    assert shown.endswith("; one seed decides nothing\n")


@pytest.mark.timeout(300)
@pytest.mark.full("runs of the laboratory")
def test_a_task_that_refuses_its_options_is_named_and_the_rest_goes_on(experiment, tmp_path):
    text = (
        EXPERIMENT.replace("steps = 60", "steps = 6")
        .replace("seeds = 2", "seeds = 1")
        .replace('[grid]\nmode = ["decoupled", "diloco"]', '[grid]\n"task.batch" = [0, 8]')
    )
    experiment.write_text(text.replace('claim = "Decoupled', 'claim = "x"\n#').partition("[[compare]]")[0])
    done = lab("run", experiment, "--records", tmp_path / "records")
    assert done.returncode == 1
    assert "task.batch" in done.stdout
    assert len(read(tmp_path / "records", "stopped")) == 1


@pytest.mark.timeout(150)
@pytest.mark.full("runs of the laboratory")
def test_nothing_is_left_running_when_the_laboratory_is_killed(experiment, tmp_path):
    slow = EXPERIMENT.replace("steps = 60", "steps = 200000")
    experiment.write_text(slow)
    with Process(tmp_path / "said", "lab", "run", experiment, "--records", tmp_path / "records") as process:
        children = wait_for(
            lambda: [pid for pid, line in descendants(process.pid).items() if " ops.lab.worker " in line], "a run"
        )
    wait_for(lambda: not any(map(is_alive, children)), "end of the runs", within_s=30.0)
