"""The daemons alone, as on machines far apart: started by hand with flags, against one address, in any order."""

import json
import signal
import subprocess

import pytest

from ops.processes.cluster import free_ports, wait_until_listening
from ops.processes.redis_server import server
from tests.local_run import NUMPY_TASK, Process, check_ranges, check_versions, json_lines, ops, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Region:
    """A fleet without ``up``: no configuration file, no Redis at first, and the islands before what they talk to.

    Four islands are expected. Three have no name and start before there is a broker, a fourth is called paris. A fifth
    comes when the run is under way, the first one leaves, another brings the wrong model, and Redis appears at last.
    """

    def __init__(self, folder):
        self.folder, self.started = folder, {}
        self.port, self.redis_port = free_ports(2), free_ports(1)
        self.variables = {"REDIS_URL": f"redis://127.0.0.1:{self.redis_port}"}
        try:
            self.live()
        finally:
            for process in self.started.values():
                process.__exit__()

    def start(self, name, *arguments):
        process = self.started[name] = Process(self.folder / name, *arguments, **self.variables)
        return process

    def start_island(self, name, *flags):
        common = ("--broker", f"tcp://127.0.0.1:{self.port}", "--run", "demo", "--task", NUMPY_TASK, "--pace", 0.02)
        return self.start(name, "island", *common, *flags)

    def log(self, name):
        return self.started[name].out + self.started[name].err

    def ledger(self):
        return json_lines(self.folder / "store" / "ledger.jsonl")

    def notes(self, name):
        return [line["fields"] for line in json_lines(self.folder / "tape.jsonl") if line.get("note") == name]

    def wait_for_versions_of(self, condition, what):
        """Returns when each fragment has got two more versions whose contributors are as described."""
        begin = len(self.ledger())

        def reached():
            rows = [row for row in self.ledger()[begin:] if condition({c["island_id"] for c in row["contributions"]})]
            return all(sum(row["fragment_id"] == p for row in rows) >= 2 for p in range(4))

        wait_for(reached, f"two versions of each fragment {what}", evidence=lambda: self.log("aggregator"))

    def whole_status(self):
        """What status says, once everybody has written what it knows into a Redis that was empty."""
        asked = ops("status", "--json", **self.variables)
        status = json.loads(asked.stdout) if asked.returncode == 0 else {"islands": {}}
        return status if len(status["islands"]) == 5 and len(status["fragments"]) == 4 else None

    def live(self):
        for name in ("first", "second", "third"):
            self.start_island(name)
        for name in ("first", "second", "third"):
            wait_for(lambda name=name: "island.kinds" in self.log(name), f"start of {name}")
        self.start("broker", "broker", "--port", self.port, "--run", "demo")
        self.start(
            *("aggregator", "aggregator", "--broker", f"tcp://127.0.0.1:{self.port}", "--run", "demo"),
            *("--store", self.folder / "store", "--tape", self.folder / "tape.jsonl"),
            *("--report", self.folder / "report.json", "--islands", 4),
        )
        self.start_island("paris", "--island-id", "paris")
        named = {"island-0", "island-1", "island-2"}
        self.wait_for_versions_of(lambda who: named | {"paris"} <= who, "by the four that were expected")

        self.start_island("fifth")
        self.wait_for_versions_of(lambda who: named | {"paris", "island-3"} <= who, "by all five")

        other = self.folder / "other.toml"
        other.write_text("[task]\nhidden = 32\n")
        self.start_island("other", "--config", other)
        self.other_exit = self.started["other"].wait()

        self.leaver = next(row["island"] for row in self.notes("island.joined") if row["island"] in named)
        leaving = next(name for name in ("first", "second", "third") if f"island={self.leaver} " in self.log(name))
        self.started[leaving].signal(signal.SIGTERM)
        self.leaver_exit = self.started[leaving].wait()
        self.left_log = self.log(leaving)
        self.wait_for_versions_of(lambda who: len(who) == 4 and self.leaver not in who, "by the four that stayed")

        self.status_before = ops("status", **self.variables)
        found = server(port=self.redis_port, directory=self.folder)
        with subprocess.Popen(found.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as redis:
            try:
                assert wait_until_listening(self.redis_port)
                for name in ("broker", "aggregator"):
                    wait_for(lambda name=name: "redis.back" in self.log(name), f"Redis at the {name}")
                self.status = wait_for(self.whole_status, "status of everything", evidence=lambda: self.log("broker"))
                for name in ("second", "third", "first", "paris", "fifth", "aggregator", "broker"):
                    if self.started[name].is_running():
                        self.started[name].signal(signal.SIGTERM)
                        self.started[name].wait()
                self.exits = {name: process.wait() for name, process in self.started.items()}
            finally:
                redis.kill()
        self.report = json.loads((self.folder / "report.json").read_text())


@pytest.fixture(scope="module")
def region(tmp_path_factory):
    return Region(tmp_path_factory.mktemp("region"))


def test_daemons_with_flags_alone_form_a_run_in_any_order(region):
    check_versions(region.ledger())
    check_ranges(region.ledger())
    assert region.report["phase"] == "running"
    tokens = region.report["tokens"]
    assert tokens["trained"] == tokens["merged"] + sum(tokens["wasted"].values()) + tokens["in_flight"]
    # Who leaves says so over another connection than it handed its last steps over: they may come when its share of the
    # data is in other hands already.
    assert set(tokens["wasted"]) <= {"island_lost", "share_moved"}


def test_islands_get_names_from_the_run(region):
    joined = [row["island"] for row in region.notes("island.joined")]
    assert sorted(joined) == ["island-0", "island-1", "island-2", "island-3", "paris"]
    assert all(row["incarnation"] == 1 for row in region.notes("island.joined"))


def test_an_island_that_leaves_holds_nobody_up(region):
    assert region.leaver_exit == 128 + signal.SIGTERM
    assert 'island.ended reason="interrupted by SIGTERM"' in region.left_log
    left = next(n for n, row in enumerate(region.notes("island.left")) if row["island"] == region.leaver)
    assert left == 0
    lines = json_lines(region.folder / "tape.jsonl")
    gone = next(n for n, line in enumerate(lines) if line.get("note") == "island.left")
    opened = [line["fields"]["round"] for line in lines[gone:] if line.get("note") == "round.opened"]
    closed = [
        line["fields"]
        for line in lines[gone:]
        if line.get("note") == "round.closed" and line["fields"]["round"] in opened
    ]
    assert closed
    assert all(region.leaver not in fields["missing"] for fields in closed)  # nobody misses it


def test_an_island_with_another_model_is_refused_with_the_tensor(region):
    assert region.other_exit == 2
    assert "tensor 'hidden/bias' has shape (32,), the run has (64,)" in region.log("other")
    assert "use the run's model settings" in region.log("other")
    # It asks again, after ever longer pauses, until it has the answer: which a busy machine may take seconds for.
    assert 1 <= len(region.notes("join.refused")) <= 8


def test_without_redis_training_goes_on_after_one_warning(region):
    for name in ("broker", "aggregator"):
        before = region.log(name).partition("redis.back")[0]
        assert before.count("redis.lost") == 1
        assert "training goes on; status is blind until it is back" in before
    assert region.status_before.returncode == 1
    assert region.status_before.stderr.count("\n") == 1


def test_a_redis_that_comes_late_knows_everything_at_once(region):
    states = {name: island["state"] for name, island in region.status["islands"].items()}
    assert states.pop(region.leaver) == "left"
    assert len(states) == 4
    assert set(states.values()) <= {"alive", "suspect"}
    assert set(region.status["fragments"]) == {"0", "1", "2", "3"}
    assert all(fragment["version"] >= 6 for fragment in region.status["fragments"].values())


def test_daemons_end_in_order_on_sigterm(region):
    expected = {"broker": 0, "other": 2}
    assert region.exits == {name: expected.get(name, 143) for name in region.exits}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["broker", "--port", "70000"], "port = 70000: must be from 1 to 65534"),
        (["broker", "--port", "many"], "port = 'many': must be a whole number"),
        (["broker", "--host", "no.such.host.invalid", "--insecure"], "host = 'no.such.host.invalid': is no address"),
        (["broker", "--run", "a b"], "run_id = 'a b': must be 1 to 64 of the characters"),
        (["aggregator", "--quorum", "9"], "quorum = 9: must not exceed islands = 4"),
        (["aggregator", "--broker", "hub"], "broker = 'hub': must be"),
        (["aggregator", "--seed", "-1"], "seed = -1: must not be negative"),
        (["aggregator", "--tokens", "1" + 20 * "0"], "total_tokens = 1" + 20 * "0" + ": must be at most 2**63 - 1"),
        (["island", "--pace", "inf"], "pace = inf: must be a number that is not infinite"),
        (["island", "--island-id", "paris 1"], "island_id = 'paris 1': must be 1 to 64 of the characters"),
        (
            ["island", "--state-dir", "/dev/null/x", "--task", "examples.numpy_task:task"],
            "state_dir = '/dev/null/x': no checkpoint can be written there",
        ),
        (["island", "--broker", "hub:7001"], "broker = 'hub:7001': must be"),
        (["island", "--pace", "-1"], "pace = -1.0: must be a number of seconds"),
        (["island", "--task", "examples.numpy_tsk:task"], "task = 'examples.numpy_tsk:task': "),
        (["island", "--tasks", "x"], "argument = '--tasks': is no flag; did you mean --task?"),
        (["island", "--config", "/no/such/file"], "config = '/no/such/file': cannot be read"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_daemon_with_a_wrong_setting_ends_with_status_2_and_a_cure(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    done = ops(*arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
