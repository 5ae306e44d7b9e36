"""The supervisor with real, tiny processes: nothing outlives it, and what dies comes back."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from broker.base.errors import Unavailable
from ops.processes.child_process import ProcessSpec, last_lines
from ops.processes.cluster import START_WITHIN_S, Change, LocalCluster, are_free, free_ports, wait_until_listening
from ops.processes.numeric import one_thread_environment
from ops.processes.supervision import RestartPolicy
from tests.local_run import descendants, is_alive, wait_for

EAGER = RestartPolicy(first_delay_s=0.0, settled_after_s=0.0)


def shell(name, script, **options):
    return ProcessSpec(name=name, command=["sh", "-c", script], **options)


def poll_until(cluster, change):
    seen = []
    wait_for(lambda: seen.extend(cluster.poll()) or any(event.change is change for event in seen), change)
    return seen


def test_a_killed_process_is_restarted_and_counted(tmp_path):
    with LocalCluster(tmp_path, policy=EAGER) as cluster:
        cluster.start([shell("island", "exec sleep 100")])
        first = cluster.pid("island")
        os.kill(first, signal.SIGKILL)
        events = poll_until(cluster, Change.STARTED)
        assert "was killed by signal 9" in events[0].detail
        assert cluster.pid("island") != first
        assert cluster.restarts("island") == 1


def test_a_process_that_is_killed_on_purpose_is_held_down_for_so_long(tmp_path):
    clock = iter(range(10_000))  # a second passes with each look at it
    policy = RestartPolicy(first_delay_s=0.0, young_deaths=1)
    with LocalCluster(tmp_path, policy=policy, clock=lambda: float(next(clock))) as cluster:
        cluster.start([shell("island", "exec sleep 100")])
        cluster.kill("island", down_s=50.0)
        wait_for(lambda: not is_alive(cluster.pid("island")), "end")
        looks = 0
        while cluster.pid("island") is None or not looks:
            looks += 1
            cluster.poll()
        assert 45 <= looks <= 55
        assert cluster.restarts("island") == 1


def test_a_process_that_cannot_start_is_given_up_with_its_last_words(tmp_path):
    policy = RestartPolicy(first_delay_s=0.0, max_delay_s=0.0, young_deaths=3)
    with LocalCluster(tmp_path, policy=policy) as cluster:
        cluster.start([shell("aggregator", "echo no store; exit 7")])
        events = poll_until(cluster, Change.GAVE_UP)
        assert [event.change for event in events].count(Change.STARTED) == 2
        assert "ended with status 7, 3 times in a row" in events[-1].detail
        assert "no store" in events[-1].detail
        assert cluster.running() == set()


def test_a_process_that_dies_without_a_sign_of_its_work_is_given_up_however_long_it_lived(tmp_path):
    policy = RestartPolicy(first_delay_s=0.0, max_delay_s=0.0, young_deaths=3, settled_after_s=0.0)
    steps = tmp_path / "steps"
    with LocalCluster(tmp_path, policy=policy) as cluster:
        mark = "echo >> lives; [ -e still ] || touch -d @$(wc -l < lives) steps"
        cluster.start([shell("island", f"cd {tmp_path}; {mark}; exit 7", progress=steps)])
        wait_for(lambda: (cluster.poll(), cluster.restarts("island") >= 6)[1], "lives with steps")
        (tmp_path / "still").touch()
        poll_until(cluster, Change.GAVE_UP)


def test_work_that_is_done_is_not_begun_again(tmp_path):
    with LocalCluster(tmp_path) as cluster:
        cluster.start([shell("aggregator", "exit 0", ends_by_itself=True)])
        assert poll_until(cluster, Change.ENDED)[-1].process == "aggregator"
        assert cluster.running() == set()


def test_stopping_goes_in_order_and_kills_what_refuses(tmp_path):
    # Each says when it stops; "stubborn" ignores the request, and its own child would, too.
    notes = tmp_path / "notes"
    with LocalCluster(tmp_path) as cluster:
        polite = "trap 'echo {0} >> {1}; exit 0' TERM; echo up; sleep 100 & wait"
        cluster.start(
            [
                shell("redis", polite.format("redis", notes), stop_order=2),
                shell("island", polite.format("island", notes), stop_order=0),
                shell("stubborn", "trap '' TERM; echo up; while :; do sleep 0.01; done", stop_order=1),
            ]
        )
        for name in ("redis", "island", "stubborn"):
            wait_for(lambda name=name: "up" in last_lines(tmp_path / f"{name}.log"), name)
        started_s = time.monotonic()
        assert cluster.stop(within_s=2.4) == ["stubborn"]
        assert time.monotonic() - started_s < 20.0  # 1.2 s, if the machine has time for it
        assert notes.read_text().split() == ["island", "redis"]
        assert cluster.poll() == []


UP = """
import pathlib, sys, time
from ops.processes.cluster import LocalCluster
from ops.processes.numeric import one_thread_environment
from ops.processes.child_process import ProcessSpec

folder = pathlib.Path(sys.argv[1])
script = f"trap '' TERM INT HUP; sleep 100 & echo $$ $! >> {folder}/pids; wait; sleep 100"
with LocalCluster(folder) as cluster:
    cluster.start([ProcessSpec(name=f"island-{i}", command=["sh", "-c", script]) for i in range(2)])
    if "two guards" in sys.argv:
        import os, signal
        os.kill(cluster._guard._process.pid, signal.SIGKILL)
        cluster._guard._process.wait()
    print("ready", flush=True)
    cluster.poll()
    print("polled", flush=True)
    while True:
        cluster.poll()
        time.sleep(0.05)
"""


@pytest.mark.parametrize("trouble", ["", "two guards"])
def test_nothing_survives_a_kill_of_the_supervisor_not_even_grandchildren(tmp_path, trouble):
    up = subprocess.Popen([sys.executable, "-c", textwrap.dedent(UP), str(tmp_path), trouble], stdout=subprocess.PIPE)
    try:
        assert up.stdout.readline() == b"ready\n"
        file = tmp_path / "pids"
        wait_for(lambda: file.exists() and len(file.read_text().split()) == 4, "four processes")
        pids = [int(word) for word in file.read_text().split()]
        assert all(map(is_alive, pids))
        assert up.stdout.readline() == b"polled\n"
        if trouble:  # a poll replaces the guard that was killed, and tells the next one whom to kill
            wait_for(lambda: any("guard.py" in line for line in descendants(up.pid).values()), "new guard")
    finally:
        up.kill()
        up.wait()
        up.stdout.close()
    wait_for(lambda: not any(map(is_alive, pids)), "end of all")


def test_a_process_gets_its_processors_and_its_environment(tmp_path):
    cpu = min(os.sched_getaffinity(0))
    script = "import os; print(os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'], os.getpid() == os.getpgid(0))"
    spec = ProcessSpec(
        name="island",
        command=[sys.executable, "-c", script],
        environment=one_thread_environment({"XLA_FLAGS": "--mine"}),
        cpus=(cpu,),
        ends_by_itself=True,
    )
    with LocalCluster(tmp_path) as cluster:
        cluster.start([spec])
        poll_until(cluster, Change.ENDED)
    assert last_lines(tmp_path / "island.log") == f"{{{cpu}}} 1 True"
    assert spec.environment["XLA_FLAGS"].startswith("--mine --xla_cpu_multi_thread_eigen=false")


def test_free_ports_are_adjacent_and_taken_ones_are_seen():
    first = free_ports(2)
    assert are_free(range(first, first + 2))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first + 1))
        listener.listen()
        assert not are_free(range(first, first + 2))
        assert wait_until_listening(first + 1)
    assert not wait_until_listening(first, within_s=0.0)


def test_a_process_that_ends_before_it_listens_is_not_waited_for(tmp_path):
    with LocalCluster(tmp_path, policy=EAGER) as cluster:
        cluster.start([shell("broker", "echo the port is taken; exit 3")])
        began_s = time.monotonic()
        with pytest.raises(Unavailable, match=r"broker did not start on port \d+; its log ends:\nthe port is taken"):
            cluster.wait_for_port("broker", free_ports(1))
        assert time.monotonic() - began_s < START_WITHIN_S
