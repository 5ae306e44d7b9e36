"""The island daemon and the example loop as processes, against a real broker and a real aggregator."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from ops.cluster import free_ports

WAIT_S = 50.0  # for what must happen; nothing here depends on how long it takes
RUN = "daemons"


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
        path = tmp_path / f"{name}.log"
        with open(path, "wb") as log:
            process = subprocess.Popen([sys.executable, "-m", module, *words], stdout=log, stderr=log, env=environment)
        process.log = path
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

    def start(**settings):
        port = free_ports(2)
        address = f"tcp://127.0.0.1:{port}"
        spawn("broker", "broker", "--run", RUN, "--port", str(port))
        usual = {"islands": 1, "fragments": 2, "sync_interval": 4, "tokens": 0} | settings
        flags = [word for name, value in usual.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        spawn("aggregator", "aggregator", "--run", RUN, "--broker", address, "--store", str(tmp_path / "store"), *flags)
        return address

    return start


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


def wait_for_event(process, name):
    ends_s = time.monotonic() + WAIT_S
    while True:
        for event in events(process):
            if event["event"] == name:
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


def test_an_island_that_is_told_to_end_goes_on_from_its_last_step(spawn, hub, tmp_path):
    address, words = hub(), ("--task", "examples.numpy_task:task", "--island-id", "paris", "--state-dir", str(tmp_path))
    first = island(spawn, address, *words, name="first")
    wait_for_event(first, "island.progress")
    first.send_signal(signal.SIGTERM)
    assert first.wait(WAIT_S) == 128 + signal.SIGTERM
    left = wait_for_event(first, "island.left")
    second = island(spawn, address, *words, name="second")
    restored = wait_for_event(second, "island.restored")
    assert (restored["optimizer"], restored["detail"]) == ("checkpoint", f"of step {left['step']}, life 1")


@pytest.mark.slow
@pytest.mark.timeout(240)
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
        wait_for_event(process, "island.progress")

    first.kill()
    again = start("again", "one")
    joined = wait_for_event(again, "island.joined")
    assert (joined["island"], joined["incarnation"]) == ("island-0", 2)
    since = len(events(second))
    while not any(event["event"] == "island.progress" for event in events(second)[since:]):
        assert second.poll() is None, second.log.read_text()
        time.sleep(0.05)
    assert wait_for_event(again, "island.progress")["tokens"] > 0


def test_a_signal_ends_an_island_that_still_waits_for_its_run(spawn):
    process = island(spawn, f"tcp://127.0.0.1:{free_ports(2)}", "--task", "examples.numpy_task:task")
    wait_for_event(process, "island.waiting")
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 128 + signal.SIGTERM


def test_settings_that_cannot_work_and_models_that_differ_end_with_2_and_the_cure(spawn, hub, tmp_path):
    wrong = island(spawn, "tcp://127.0.0.1:7001", "--task", "nowhere:task", name="wrong")
    assert wrong.wait(WAIT_S) == 2
    assert "task = 'nowhere:task': there is no module nowhere" in wrong.log.read_text()

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


@pytest.mark.slow
def test_the_example_of_a_loop_of_ones_own_trains_to_the_end_of_a_run(spawn, hub):
    address = hub(tokens=20_000)
    process = spawn("own", address, "--run", RUN, "--dtype", "bf16", module="examples.own_loop")
    assert process.wait(WAIT_S) == 0, process.log.read_text()
    loss = float(re.search(r"done: loss ([0-9.]+) nats per byte", process.log.read_text())[1])
    assert loss < 4.5  # from 5.55, the logarithm of 256
