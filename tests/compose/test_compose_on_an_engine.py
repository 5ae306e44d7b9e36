"""The compose files on a real engine: build, up, scale, kill, stop, down, another region, a run that has ended.

One story in parts, in the order of the file; each takes the run as the one before has left it. They need a Docker
engine that answers, Compose, and free ports 7001 and 7002; elsewhere they are skipped. Everything is made under a
project and an image of its own, and is removed at the end. The islands train the numpy example, at a pace at which
eight fit two processors; every other word of their command is the file's.
"""

import ipaddress
import json
import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = f"atoll-test-{secrets.token_hex(3)}"
IMAGE = f"{NAME}:latest"
WAIT_S = 120.0  # for what must happen; nothing here depends on how long it takes
#: A task that trains in milliseconds, without JAX.
EASY = ["--task", "examples.numpy_task:task", "--pace", "0.03"]


def engine():
    """Says why there is no engine to run on; empty if there is one."""
    if shutil.which("docker") is None:
        return "there is no docker here"
    for words in (["info"], ["compose", "version"]):
        try:
            tried = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=30)
        except subprocess.TimeoutExpired:
            return f"docker {' '.join(words)} does not answer"
        if tried.returncode:
            return f"docker {' '.join(words)}: {tried.stderr.strip()}"
    return ""


WHY_NOT = engine()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.timeout(300),
    pytest.mark.full("builds an image"),
]


class Compose:
    """A project of Compose: a file, with another command for its islands."""

    def __init__(self, directory, file, project, scratch, **variables):
        self.project = project
        self._environment = os.environ | {"ATOLL_IMAGE": IMAGE} | {name: str(v) for name, v in variables.items()}
        self._files = ["--project-directory", str(directory), "--file", str(directory / file)]
        self._override = scratch / f"{project}.override.json"
        self._override.write_text("{}")
        self._adjust()

    def _adjust(self):
        services = json.loads(self("config", "--format", "json"))["services"]
        words = {
            name: {"command": [*services[name]["command"], *EASY]}
            for name in ("island", "settings")
            if name in services
        }
        self._override.write_text(json.dumps({"services": words}))

    def __call__(self, *words, within_s=WAIT_S, check=True):
        command = [
            "docker",
            "compose",
            "--project-name",
            self.project,
            *self._files,
            "--file",
            str(self._override),
            *words,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, env=self._environment)
        assert done.returncode == 0 or not check, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def variables(self, **variables):
        """Goes on with other variables, as another shell would."""
        self._environment |= {name: str(value) for name, value in variables.items()}
        self._override.write_text("{}")
        self._adjust()

    def ids(self, service):
        return self("ps", "--all", "--quiet", service).split()

    def status(self):
        """What Redis knows of the run; empty while there is nothing."""
        said = self("exec", "-T", "broker", "python3", "-m", "ops", "status", "--json", check=False)
        return json.loads(said) if said.strip().startswith("{") else {}

    def trains(self, count):
        """Waits until so many islands live and more of their tokens are merged; returns the status with that.

        A look costs a second of processor time, or ten on a busy machine: so each is one question.
        """
        before = self.status().get("totals", {}).get("merged_tokens", 0)

        def more():
            now = self.status()
            return now if len(trained(now)) == count and now["totals"]["merged_tokens"] > before else None

        return until(more, f"{count} islands train")


def trained(status):
    """Island id -> what is known of it, of those that live and have trained."""
    return {k: v for k, v in status.get("islands", {}).items() if v["state"] == "alive" and v["inner_step"]}


def inspect(container, form):
    return subprocess.run(
        ["docker", "inspect", "--format", form, container], capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()


def until(holds, what):
    """Waits for something to hold, and returns what it says."""
    ends_s = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < ends_s, what
        time.sleep(1.0)
    return found


def kill_nine(container, command):
    """Kills the process of ours in a container as a crash would: what Docker itself kills it does not start again."""
    seek = f"""
import os, pathlib, signal
for each in pathlib.Path('/proc').glob('[0-9]*'):
    ours = b'ops\\0{command}\\0' in (each / 'cmdline').read_bytes()
    if ours and each.name not in ('1', str(os.getpid())):
        os.kill(int(each.name), signal.SIGKILL)
        print(each.name)
"""
    done = subprocess.run(
        ["docker", "exec", container, "python3", "-I", "-S", "-c", seek], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip(), done.stderr


@pytest.fixture(scope="module")
def gateway():
    """An address of this host that containers reach, and nobody else."""
    command = ["docker", "network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Subnet}}"]
    subnet = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    return str(next(ipaddress.ip_network(subnet).hosts()))  # the engine's own; not every engine says so


@pytest.fixture(scope="module")
def hub(gateway, tmp_path_factory):
    """The whole compose file; nothing of it is left at the end."""
    # Its build context is the checkout, and so is its directory.
    folder = tmp_path_factory.mktemp("hub")
    made = Compose(ROOT, "docker-compose.yml", NAME, folder, ATOLL_RUN="long", ATOLL_TOKENS=0, ATOLL_BIND=gateway)
    yield made
    made("down", "--volumes", "--timeout", "5", check=False)
    subprocess.run(["docker", "image", "rm", "--force", IMAGE], capture_output=True, timeout=60, check=False)


def test_the_image_is_built_from_the_dockerfile(hub):
    hub("build", within_s=290)
    assert inspect(IMAGE, "{{.Config.User}}") == "10001:10001"


def test_up_brings_a_hub_and_four_islands_that_train(hub):
    hub("up", "--detach", "--no-build")
    assert set(trained(hub.trains(4))) == {"island-0", "island-1", "island-2", "island-3"}
    until(lambda: all(inspect(each, "{{.State.Health.Status}}") == "healthy" for each in hub.ids("island")), "healthy")


def test_eight_islands_are_a_matter_of_scale(hub):
    hub("up", "--detach", "--no-build", "--scale", "island=8")
    hub.trains(8)


def test_whoever_is_killed_comes_back_as_the_same_and_training_goes_on(hub):
    first = hub.ids("island")[0]
    kill_nine(first, "island")
    kill_nine(hub.ids("aggregator")[0], "aggregator")
    until(lambda: inspect(first, "{{.RestartCount}}") == "1", "Docker starts the island again")
    until(
        lambda: [v["incarnation"] for v in trained(hub.status()).values() if v["incarnation"] > 1] == [2], "a new life"
    )
    (shard,) = hub.trains(8)["shards"].values()
    assert shard["epoch"] > 1


#: Why tokens of an island that was away are lost.
LOST = ("island_lost", "share_moved")


def test_stop_and_start_lose_nothing(hub):
    before = hub.status()["totals"]["wasted_tokens"]
    hub("stop")
    for each in hub.ids("island"):
        assert inspect(each, "{{.State.ExitCode}}") == "143", "it was not told to end, or not in time"
    hub("start")
    status = hub.trains(8)
    assert sorted(v["incarnation"] for v in trained(status).values()) == [1] * 7 + [2], "the same lives go on"
    after = status["totals"]["wasted_tokens"]
    assert {each: after.get(each, 0) for each in LOST} == {each: before.get(each, 0) for each in LOST}


def test_down_and_up_go_on_with_the_same_run(hub):
    before = hub.status()
    hub("down")
    hub("up", "--detach", "--no-build")
    after = hub.trains(4)
    assert after["totals"]["merged_tokens"] > before["totals"]["merged_tokens"]
    for p, fragment in before["fragments"].items():
        assert after["fragments"][p]["version"] >= fragment["version"]


def test_a_region_joins_with_a_key_of_its_own(hub, gateway, tmp_path):
    hub("run", "--rm", "--no-deps", "-T", "keys", "new", "island", "paris", "--dir", "/etc/atoll")
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("island-paris.secret", "broker.public"):
        hub("cp", f"broker:/etc/atoll/{name}", str(keys / name))
        os.chown(keys / name, 10001, 10001)
    (tmp_path / "examples").mkdir()
    address = {"ATOLL_BROKER": f"tcp://{gateway}:7001", "ATOLL_KEY_FILE": "island-paris.secret", "ATOLL_RUN": "long"}
    file = ROOT / "examples" / "compose.region.yml"
    region = Compose(tmp_path / "examples", file, f"{NAME}-region", tmp_path, **address)
    try:
        region("up", "--detach", "--no-build", check=False)
        assert "are right" in region("logs", "settings"), region("logs")
        until(lambda: "paris" in trained(hub.status()), "it has joined under the name of its key, and trains")
        region("stop")
        (island,) = region.ids("island")
        assert inspect(island, "{{.State.ExitCode}}") == "143"
    finally:
        region("down", "--volumes", "--timeout", "5", check=False)


def test_a_run_that_has_ended_says_so_to_a_second_up(hub):
    hub("down")
    hub.variables(ATOLL_RUN="short", ATOLL_TOKENS=20_000, ATOLL_ISLANDS=2)
    for _ in range(2):
        hub("up", "--detach", "--no-build", "--scale", "island=2")
        waiting = [*hub.ids("aggregator"), *hub.ids("island")]
        until(lambda ids=waiting: all(inspect(each, "{{.State.Status}}") == "exited" for each in ids), "all have ended")
        assert [inspect(each, "{{.State.ExitCode}}") for each in waiting] == ["0"] * 3
        hub("down")
