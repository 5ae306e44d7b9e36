"""The island daemon and the example loop as processes, against a real broker and a real aggregator."""

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from ops.processes.cluster import free_ports

WAIT_S = 200.0  # for what must happen; nothing here depends on how long it takes
RUN = "daemons"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def spawn(tmp_path):
    """Starts processes of this program, their output in files; kills by its id whatever is left at the end."""
    processes = []

    def start(name, *words, module="ops", **variables):
        usual = {
            "ATOLL_NO_VENV": "1",
            "ATOLL_LOG": "json",
            "JAX_PLATFORMS": "cpu",
            "REDIS_URL": f"redis://127.0.0.1:{free_ports(1)}",  # where none is: training does not need it
        }
        environment = os.environ | usual | variables
        with open(tmp_path / f"{name}.log", "wb") as log:
            process = subprocess.Popen([sys.executable, "-m", module, *words], stdout=log, stderr=log, env=environment)
        process.log = tmp_path / f"{name}.log"
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture
def hub(spawn, tmp_path):
    """Starts a broker and an aggregator with some settings; returns the address."""
    return lambda **settings: Hub(spawn, tmp_path / "store", **settings).address


class Hub:
    """A broker and an aggregator, which can be stopped and started again."""

    def __init__(self, spawn, store, **settings):
        self.spawn, self.store, self.port = spawn, store, free_ports(2)
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.settings = {"islands": 1, "fragments": 2, "sync_interval": 4, "tokens": 0} | settings
        self.start()

    def start(self):
        self.broker = self.spawn("broker", "broker", "--run", RUN, "--port", str(self.port))
        flags = [word for name, value in self.settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        where = ("--run", RUN, "--broker", self.address, "--store", str(self.store))
        self.aggregator = self.spawn("aggregator", "aggregator", *where, *flags)

    def stop(self):
        for process in (self.aggregator, self.broker):
            process.send_signal(signal.SIGTERM)
        for process in (self.aggregator, self.broker):
            process.wait(WAIT_S)


def island(spawn, address, *words, name="island", **variables):
    flags = ("--run", RUN, "--broker", address, "--join-timeout-s", "30")
    return spawn(name, "island", *flags, *words, **variables)


def events(process):
    """The events that a process has logged so far."""
    found = []
    for line in process.log.read_text().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def event_of(ended, name):
    """Returns an event of a process that has ended."""
    return next(event for event in events(ended) if event["event"] == name)


def wait_for_event(process, name, **fields):
    ends_s = time.monotonic() + WAIT_S
    while True:
        for event in events(process):
            if event["event"] == name and fields.items() <= event.items():
                return event
        assert process.poll() is None, process.log.read_text()
        assert time.monotonic() < ends_s, process.log.read_text()
        time.sleep(0.02)


def test_an_island_trains_to_the_end_of_the_run_and_exits_with_0(spawn, hub):
    process = island(spawn, hub(tokens=20_000), "--task", "examples.numpy_task:task", "--pace", "0.002")
    assert process.wait(WAIT_S) == 0, process.log.read_text()
    (left,) = [e for e in events(process) if e["event"] == "island.left"]
    assert left["reason"] == "the run has ended"
    assert left["tokens"] >= 20_000
    progress = [e for e in events(process) if e["event"] == "island.progress"]
    assert {"step", "loss", "tokens_per_s", "sync_share", "versions"} <= progress[-1].keys()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_island_in_order_and_soon(spawn, hub, number):
    process = island(spawn, hub(), "--task", "examples.numpy_task:task", "--pace", "50")
    wait_for_event(process, "island.restored")
    began_s = time.monotonic()
    process.send_signal(number)
    assert process.wait(WAIT_S) == 128 + number
    assert time.monotonic() - began_s < 40  # before the step is over; 2 s on a machine of one's own
    assert "island.left" in [e["event"] for e in events(process)]


def test_an_island_that_is_told_to_end_goes_on_from_its_last_step_and_loses_nothing(spawn, tmp_path):
    run = Hub(spawn, tmp_path / "store", tokens=80_000)
    words = ("--task", "examples.numpy_task:task", "--pace", "0.01", "--state-dir", str(tmp_path))
    first = island(spawn, run.address, *words, "--island-id", "paris", name="first")
    wait_for_event(first, "island.progress")
    run.stop()
    first.send_signal(signal.SIGTERM)
    assert first.wait(WAIT_S) == 128 + signal.SIGTERM
    left, kept = event_of(first, "island.left"), event_of(first, "progress.kept")
    assert kept["step"] == left["step"]
    assert kept["contributions"] > 0
    run.start()
    second = island(spawn, run.address, *words, "--island-id", "paris", name="second")
    joined, restored = wait_for_event(second, "island.joined"), wait_for_event(second, "island.restored")
    assert (joined["incarnation"], joined["start_step"]) == (1, left["step"])
    assert (restored["optimizer"], restored["detail"]) == ("checkpoint", f"of step {left['step']}, life 1")
    assert not list(tmp_path.glob("*.unmerged"))
    assert second.wait(WAIT_S) == 0, second.log.read_text()
    assert run.aggregator.wait(WAIT_S) == 0
    (ended,) = [event for event in events(run.aggregator) if event["event"] == "run.ended"]
    assert (ended["trained"], ended["wasted"]) == (ended["merged"], {})


def test_what_a_preempted_island_trained_is_merged_at_once_and_its_data_go_to_others(spawn, tmp_path):
    run = Hub(spawn, tmp_path / "store", islands=2, tokens=80_000)
    words = ("--task", "examples.numpy_task:task", "--pace", "0.02", "--state-dir", str(tmp_path))
    rome = island(spawn, run.address, *words, "--island-id", "rome", name="rome")
    first = island(spawn, run.address, *words, "--island-id", "paris", name="first")
    wait_for_event(first, "island.progress")
    wait_for_event(rome, "island.progress")
    began_s = time.monotonic()
    first.send_signal(signal.SIGTERM)
    assert first.wait(WAIT_S) == 128 + signal.SIGTERM
    assert (
        time.monotonic() - began_s < 10
    )  # less than every grace period that launchers give; 2 s where nothing else runs
    left = wait_for_event(run.aggregator, "island.left", island="paris")
    assert left["departure"] == "paused"
    given = wait_for_event(run.aggregator, "block.ended", before="paris", reason="its island has left")
    times = [datetime.datetime.fromisoformat(event["time"]) for event in (left, given)]
    assert (times[1] - times[0]).total_seconds() < 60  # its next rounds; half of what a silent island is given
    second = island(spawn, run.address, *words, "--island-id", "paris", name="second")
    joined = wait_for_event(second, "island.joined")
    assert (joined["incarnation"], joined["start_step"]) == (1, left["step"])
    for process in (rome, second, run.aggregator):
        assert process.wait(WAIT_S) == 0, process.log.read_text()
    ended = event_of(run.aggregator, "run.ended")
    assert (ended["trained"], ended["wasted"]) == (ended["merged"], {})


def test_an_island_whose_initial_parameters_are_not_finite_names_the_tensor_and_ends_with_2(spawn, hub, tmp_path):
    (tmp_path / "broken_task.py").write_text(BROKEN_TASK)
    process = island(spawn, hub(), "--task", "broken_task:nan", name="broken", PYTHONPATH=str(tmp_path))
    assert process.wait(WAIT_S) == 2
    assert re.search(r"params = 'hidden/bias'", process.log.read_text())


def test_data_that_end_begin_anew_and_data_that_never_begin_end_the_island_with_2(spawn, hub, tmp_path):
    (tmp_path / "broken_task.py").write_text(BROKEN_TASK)
    address = hub(tokens=20_000)
    empty = island(spawn, address, "--task", "broken_task:empty", name="empty", PYTHONPATH=str(tmp_path))
    assert empty.wait(WAIT_S) == 2
    assert "task.data = 'part 0 of 1, from batch 0 on'" in empty.log.read_text()
    short = island(spawn, address, "--task", "broken_task:short", name="short", PYTHONPATH=str(tmp_path))
    assert short.wait(WAIT_S) == 0, short.log.read_text()
    (ended,) = [event for event in events(short) if event["event"] == "data.ended"]
    assert ended["batches"] == 5


#: Tasks that are not what they should be.
BROKEN_TASK = """
from dataclasses import replace
from itertools import islice

import numpy as np

from examples.numpy_task import task


def nan():
    good = task()

    def init(seed):
        params, state = good.init(seed)
        params["hidden"]["bias"][3] = np.nan
        return params, state

    return replace(good, init=init)


def short():
    good = task()
    return replace(good, data=lambda share: islice(good.data(share), 5))


def empty():
    return replace(task(), data=lambda share: iter(()))
"""


def test_the_file_for_health_checks_stays_young_until_the_broker_is_lost(spawn, tmp_path):
    file, run = tmp_path / "health", Hub(spawn, tmp_path / "store")
    process = island(spawn, run.address, "--task", "examples.numpy_task:task", "--pace", "0.01", "--health", str(file))
    wait_for_event(process, "island.restored")
    first_s = wait_for_mark(file, process, later_than_s=0.0)
    wait_for_mark(file, process, later_than_s=first_s + 1.0)
    run.broker.send_signal(signal.SIGSTOP)  # connections stand, and nothing comes
    wait_until(lambda: last_progress_at_s(process) > file.stat().st_mtime + 3.0)  # trains on, unheard
    run.broker.send_signal(signal.SIGCONT)
    wait_for_mark(file, process, later_than_s=time.time())


def wait_until(condition):
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def wait_for_mark(file, process, *, later_than_s):
    """Returns the modification time of a file once it is later than that."""
    wait_until(lambda: process.poll() is None and file.stat().st_mtime > later_than_s)
    return file.stat().st_mtime


def last_progress_at_s(process):
    times = [each["time"] for each in events(process) if each["event"] == "island.progress"]
    return datetime.datetime.fromisoformat(times[-1]).timestamp() if times else 0.0


def test_islands_of_one_host_name_that_see_no_common_lock_both_train_and_come_back_as_themselves(spawn, hub, tmp_path):
    """As in containers on the host's network, under PrivateTmp, or on cloned machines."""
    address = hub(islands=2)

    def start(name, place):
        (tmp_path / place).mkdir(exist_ok=True)
        words = ("--task", "examples.numpy_task:task", "--pace", "0.01")
        return island(spawn, address, *words, name=name, TMPDIR=str(tmp_path / place))

    first = start("first", "one")
    assert wait_for_event(first, "island.joined")["island"] == "island-0"
    second = start("second", "other")
    assert wait_for_event(second, "island.joined")["island"] == "island-1"
    for process in (first, second):
        wait_for_event(process, "island.restored")

    first.kill()
    again = start("again", "one")
    joined = wait_for_event(again, "island.joined")
    assert (joined["island"], joined["incarnation"]) == ("island-0", 2)
    assert wait_for_event(again, "island.progress")["tokens"] > 0
    assert second.poll() is None, second.log.read_text()


def test_settings_that_cannot_work_and_models_that_differ_end_with_2_and_the_cure(spawn, hub, tmp_path):
    wrong = island(spawn, "tcp://127.0.0.1:7001", "--task", "nowhere:task", name="wrong")
    assert wrong.wait(WAIT_S) == 2
    assert "task = 'nowhere:task'" in wrong.log.read_text()

    address = hub()
    first = island(spawn, address, "--task", "examples.numpy_task:task", name="first")
    wait_for_event(first, "island.restored")
    config = tmp_path / "other.toml"
    config.write_text("[task]\nhidden = 65\n")
    other = island(spawn, address, "--config", str(config), "--task", "examples.numpy_task:task", name="other")
    assert other.wait(WAIT_S) == 2
    assert re.search(r"tensor 'hidden/bias' has shape \(65,\), the run has \(64,\)", other.log.read_text())


def test_a_silent_run_ends_with_1_and_the_address(spawn):
    address = f"tcp://127.0.0.1:{free_ports(2)}"
    process = spawn(
        "alone", "island", "--broker", address, "--join-timeout-s", "0.2", "--task", "examples.numpy_task:task"
    )
    assert process.wait(WAIT_S) == 1
    assert f"{address} was silent for 0.2 s while connecting to the broker" in process.log.read_text()


def test_the_example_of_a_loop_of_ones_own_trains_to_the_end_of_a_run(spawn, hub):
    address = hub(tokens=20_000)
    process = spawn("own", address, "--run", RUN, "--dtype", "bf16", module="examples.own_loop")
    assert process.wait(WAIT_S) == 0, process.log.read_text()
    before, after = map(float, re.search(r"([0-9.]+) before, ([0-9.]+) after", process.log.read_text()).groups())
    assert after < before - 1.0


HOOKED = """
import logging, sys, time
import numpy as np
import islands

logging.basicConfig(level=logging.INFO, format="%(message)s")
with islands.Hook(sys.argv[1], run=sys.argv[2], tokens_per_step=1, state_dir=sys.argv[3], island_id="a") as hook:
    params, state = hook.start({"w": np.zeros((4, 4), np.float32)}, {"steps": np.zeros((), np.int64)})
    while not hook.done:
        params = {"w": params["w"] + np.float32(0.01)}
        params, state = hook.step(params, {"steps": state["steps"] + 1}, loss=0.5)
        print("steps", int(state["steps"]), "of", hook.island.inner_step, flush=True)
        time.sleep(0.01)
"""


def test_a_loop_with_a_hook_pauses_at_ctrl_c_and_goes_on_with_its_own_state(spawn, hub, tmp_path):
    (tmp_path / "hooked_loop.py").write_text(HOOKED)
    words = (hub(), RUN, str(tmp_path / "state"))

    def interrupted(name):
        process = spawn(name, *words, module="hooked_loop", PYTHONPATH=f"{tmp_path}:{os.getcwd()}")
        wait_for_event_text(process, "steps 5 of" if name == "first" else "of")
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) != 0
        text = process.log.read_text()
        assert text.rstrip().endswith("KeyboardInterrupt")
        assert 'island.left reason="interrupted by SIGINT"' in text
        return text

    first = interrupted("first")
    counted = [tuple(map(int, each)) for each in re.findall(r"steps (\d+) of (\d+)", first)]
    assert all(steps == inner for steps, inner in counted)
    second = interrupted("second")
    assert "island.restored optimizer=checkpoint" in second
    steps = int(re.search(r"steps (\d+) of", second)[1])
    assert steps == counted[-1][0] + 2  # the last step of the first process was saved, and raised before it was printed


def wait_for_event_text(process, text):
    ends_s = time.monotonic() + WAIT_S
    while text not in process.log.read_text():
        assert process.poll() is None, process.log.read_text()
        assert time.monotonic() < ends_s, process.log.read_text()
        time.sleep(0.02)
