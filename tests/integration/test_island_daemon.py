"""The island daemon and the example loop as processes, against a real broker and a real aggregator."""

import contextlib
import datetime
import json
import re
import signal
import time

import pytest

from ops.processes.cluster import free_ports
from tests.local_run import NUMPY_TASK, ROOT, Process, wait_for

WAIT_S = 200.0  # for what must happen; nothing here depends on how long it takes
RUN = "daemons"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def spawn(tmp_path):
    """Starts processes of this program, each with a name; none is left at the end."""
    usual = {
        "ATOLL_LOG": "json",
        "JAX_PLATFORMS": "cpu",
        "REDIS_URL": f"redis://127.0.0.1:{free_ports(1)}",  # where none is: training does not need it
    }
    with contextlib.ExitStack() as stack:

        def start(name, *words, module="ops", **variables):
            return stack.enter_context(Process(tmp_path / name, *words, module=module, **(usual | variables)))

        yield start


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
        self.broker = self.spawn("broker", "broker", "--run", RUN, "--port", self.port)
        flags = [word for name, value in self.settings.items() for word in (f"--{name.replace('_', '-')}", value)]
        where = ("--run", RUN, "--broker", self.address, "--store", self.store)
        self.aggregator = self.spawn("aggregator", "aggregator", *where, *flags)

    def stop(self):
        for process in (self.aggregator, self.broker):
            process.signal(signal.SIGTERM)
        for process in (self.aggregator, self.broker):
            process.wait(WAIT_S)


def island(spawn, address, *words, task=NUMPY_TASK, name="island", **variables):
    flags = ("--run", RUN, "--broker", address, "--join-timeout-s", 30, "--task", task)
    return spawn(name, "island", *flags, *words, **variables)


def events(process, name, **fields):
    """The events of a name, and with these fields, that a process has logged so far."""
    found = []
    for line in process.err.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [event for event in found if event["event"] == name and fields.items() <= event.items()]


def wait_for_event(process, name, **fields):
    def logged():
        found = events(process, name, **fields)
        assert found or process.is_running(), process.err
        return found

    return wait_for(logged, name, WAIT_S, evidence=lambda: process.err)[0]


def test_an_island_trains_to_the_end_of_the_run_and_exits_with_0(spawn, hub):
    process = island(spawn, hub(tokens=20_000), "--pace", 0.002)
    assert process.wait(WAIT_S) == 0, process.err
    (left,) = events(process, "island.left")
    assert left["reason"] == "the run has ended"
    assert left["tokens"] >= 20_000
    said = events(process, "island.progress")[-1]
    assert {"step", "loss", "tokens_per_s", "sync_share", "versions"} <= said.keys()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_island_in_order_and_soon(spawn, hub, number):
    process = island(spawn, hub(), "--pace", 50)
    wait_for_event(process, "island.restored")
    began_s = time.monotonic()
    process.signal(number)
    assert process.wait(WAIT_S) == 128 + number
    assert time.monotonic() - began_s < 40  # before the step is over; 2 s on a machine of one's own
    assert events(process, "island.left")


def test_an_island_that_is_told_to_end_goes_on_from_its_last_step_and_loses_nothing(spawn, tmp_path):
    run = Hub(spawn, tmp_path / "store")
    words = ("--pace", 0.01, "--state-dir", tmp_path, "--island-id", "paris")
    first = island(spawn, run.address, *words, name="first")
    wait_for_event(run.aggregator, "version.committed", version=1)
    run.stop()
    first.signal(signal.SIGTERM)
    assert first.wait(WAIT_S) == 128 + signal.SIGTERM
    (left,), (kept,) = events(first, "island.left"), events(first, "progress.kept")
    assert kept["step"] == left["step"]
    assert kept["contributions"] > 0
    run.settings["tokens"] = left["tokens"] + 10_000
    run.start()
    second = island(spawn, run.address, *words, name="second")
    joined, restored = wait_for_event(second, "island.joined"), wait_for_event(second, "island.restored")
    assert (joined["incarnation"], joined["start_step"]) == (1, left["step"])
    assert (restored["optimizer"], restored["detail"]) == ("checkpoint", f"of step {left['step']}, life 1")
    assert not list(tmp_path.glob("*.unmerged"))
    assert second.wait(WAIT_S) == 0, second.err
    assert run.aggregator.wait(WAIT_S) == 0
    (ended,) = events(run.aggregator, "run.ended")
    assert (ended["trained"], ended["wasted"]) == (ended["merged"], {})


@pytest.mark.full("three islands, one after the other")
def test_tasks_that_are_not_what_they_should_be_end_with_2_and_the_cure_and_data_that_end_begin_anew(
    spawn, hub, tmp_path
):
    (tmp_path / "broken_task.py").write_text(BROKEN_TASK)
    address, path = hub(tokens=20_000), f"{tmp_path}:{ROOT}"

    def ended_with(status, name):
        process = island(spawn, address, task=f"broken_task:{name}", name=name, PYTHONPATH=path)
        assert process.wait(WAIT_S) == status, process.err
        return process

    assert "params = 'hidden/bias'" in ended_with(2, "nan").err
    assert "task.data = 'part 0 of 1, from batch 0 on'" in ended_with(2, "empty").err
    short = ended_with(0, "short")
    (ended,) = events(short, "data.ended")
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


@pytest.mark.full("an island says every five seconds that it trains on")
def test_the_file_for_health_checks_stays_young_until_the_broker_is_lost(spawn, tmp_path):
    file, run = tmp_path / "health", Hub(spawn, tmp_path / "store")
    process = island(spawn, run.address, "--pace", 0.01, "--health", file)

    def marked_after(time_s):
        """Returns the modification time of the file once it is later than that."""
        return wait_for(lambda: process.is_running() and (at_s := modified_s()) > time_s and at_s, "mark", WAIT_S)

    def modified_s():
        return file.stat().st_mtime if file.exists() else 0.0

    def trained_at_s():
        times = [datetime.datetime.fromisoformat(each["time"]) for each in events(process, "island.progress")]
        return times[-1].timestamp() if times else 0.0

    first_s = marked_after(0.0)
    marked_after(first_s + 1.0)
    run.broker.signal(signal.SIGSTOP)  # connections stand, and nothing comes
    wait_for(lambda: trained_at_s() > modified_s() + 3.0, "training that goes on unheard", WAIT_S)
    run.broker.signal(signal.SIGCONT)
    marked_after(time.time())


@pytest.mark.full("five processes, one after the other")
def test_islands_of_one_host_name_that_see_no_common_lock_both_train_and_come_back_as_themselves(spawn, hub, tmp_path):
    """As in containers on the host's network, under PrivateTmp, or on cloned machines."""
    address = hub(islands=2)

    def joined(name, place, island_id, incarnation):
        (tmp_path / place).mkdir(exist_ok=True)
        process = island(spawn, address, "--pace", 0.01, name=name, TMPDIR=str(tmp_path / place))
        told = wait_for_event(process, "island.joined")
        assert (told["island"], told["incarnation"]) == (island_id, incarnation)
        return process

    first, second = joined("first", "one", "island-0", 1), joined("second", "other", "island-1", 1)
    for process in (first, second):
        wait_for_event(process, "island.restored")
    first.signal(signal.SIGKILL)
    again = joined("again", "one", "island-0", 2)
    assert wait_for_event(again, "island.progress")["tokens"] > 0
    assert second.is_running(), second.err


def test_settings_that_cannot_work_and_models_that_differ_end_with_2_and_the_cure(spawn, hub, tmp_path):
    wrong = island(spawn, "tcp://127.0.0.1:7001", task="nowhere:task", name="wrong")
    assert wrong.wait(WAIT_S) == 2
    assert "task = 'nowhere:task'" in wrong.err

    address = hub()
    wait_for_event(island(spawn, address, name="first"), "island.restored")
    config = tmp_path / "other.toml"
    config.write_text("[task]\nhidden = 65\n")
    other = island(spawn, address, "--config", config, name="other")
    assert other.wait(WAIT_S) == 2
    assert "tensor 'hidden/bias' has shape (65,), the run has (64,)" in other.err


def test_a_silent_run_ends_with_1_and_the_address(spawn):
    address = f"tcp://127.0.0.1:{free_ports(2)}"
    process = spawn("alone", "island", "--run", RUN, "--broker", address, "--join-timeout-s", 0.2, "--task", NUMPY_TASK)
    assert process.wait(WAIT_S) == 1
    assert f"{address} was silent for 0.2 s while connecting to the broker" in process.err


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
    words = (hub(), RUN, tmp_path / "state")

    def interrupted(name, after):
        process = spawn(name, *words, module="hooked_loop", PYTHONPATH=f"{tmp_path}:{ROOT}")

        def printed():
            assert process.is_running(), process.err
            return after in process.out

        wait_for(printed, after, WAIT_S)
        process.signal(signal.SIGINT)
        assert process.wait(WAIT_S) != 0
        assert process.err.rstrip().endswith("KeyboardInterrupt")
        assert 'island.left reason="interrupted by SIGINT"' in process.err
        return process.err, [tuple(map(int, each)) for each in re.findall(r"steps (\d+) of (\d+)", process.out)]

    _, counted = interrupted("first", "steps 5 of")
    assert all(steps == inner for steps, inner in counted)
    said, again = interrupted("second", "of")
    assert "island.restored optimizer=checkpoint" in said
    # The last step of the first process was saved, and raised before it was printed.
    assert again[0][0] == counted[-1][0] + 2
