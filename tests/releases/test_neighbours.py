"""Neighbouring releases work together: an island of one at the hub of the other; other versions are told apart."""

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest

from broker.wire.messages import PROTOCOL_VERSION
from ops.processes.cluster import free_ports
from tests.local_run import Process, wait_for
from tests.releases.wheels import LAST_WHEEL, ROOT, built, changed, copied_tree, installed, last_tag, minor, version_of

pytestmark = [pytest.mark.timeout(240), pytest.mark.full("wheels of three releases are built, and trained with")]
pytest.importorskip("hatchling")

TOKENS = 6400


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    """Folders with this release, the one before, and one that speaks another version of the protocol."""
    folder = tmp_path_factory.mktemp("releases")
    this = installed(built(copied_tree(folder / "tree"))[0], folder / "this")
    given, tag = os.environ.get(LAST_WHEEL), last_tag()
    before = copied_tree(folder / "tree-before", tag)
    if tag is None:  # no release was made before this one: this tree stands for it
        changed(before, "pyproject.toml", r'^version = ".*"$', 'version = "0.0.9"')
    last = installed(given or built(before)[0], folder / "last")
    other = copied_tree(folder / "tree-other")
    version = f"PROTOCOL_VERSION = {PROTOCOL_VERSION + 1}"
    changed(other, "broker/wire/messages/values.py", r"^PROTOCOL_VERSION = \d+$", version)
    changed(other, "pyproject.toml", r'^version = ".*"$', 'version = "9.9.0"')
    return {"this": this, "last": last, "other": installed(built(other)[0], folder / "other")}


@pytest.fixture
def start(tmp_path):
    """Starts daemons, of which each may be of another release; all of them end with the test."""
    (tmp_path / "numpy_task.py").write_text((ROOT / "examples" / "numpy_task.py").read_text())
    port = free_ports(2)
    broker, redis = f"tcp://127.0.0.1:{port}", f"redis://127.0.0.1:{free_ports(1)}"
    flags = {
        "broker": ["--run", "demo", "--port", port, "--redis-url", redis],
        "aggregator": ["--run", "demo", "--broker", broker, "--redis-url", redis, "--store", tmp_path / "store"],
        "island": ["--run", "demo", "--broker", broker, "--task", "numpy_task:task", "--island-id", "a"],
    }
    flags["aggregator"] += ["--islands", 1, "--tokens", TOKENS, "--tape", tmp_path / "events.jsonl"]

    with contextlib.ExitStack() as stack:

        def begin(release, name):
            variables = {"PYTHONPATH": f"{release}{os.pathsep}{tmp_path}"}
            return stack.enter_context(Process(tmp_path / name, name, *flags[name], cwd=tmp_path, **variables))

        yield begin


def test_what_is_tested_are_two_releases_of_neighbouring_minor_versions(releases):
    versions = {}
    for name, release in releases.items():
        environment = os.environ | {"PYTHONPATH": str(release), "ATOLL_NO_VENV": "1"}
        command = [sys.executable, "-P", "-m", "ops", "--version"]
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=50, check=True)
        versions[name] = done.stdout.split()[1]
    assert versions["this"] == version_of(ROOT)
    assert minor(versions["last"]) < minor(versions["this"])
    assert versions["other"] == "9.9.0"


@pytest.mark.parametrize(("hub", "island"), [("last", "this"), ("this", "last")])
def test_an_island_of_one_release_trains_at_the_hub_of_its_neighbour(releases, start, tmp_path, hub, island):
    broker, aggregator = start(releases[hub], "broker"), start(releases[hub], "aggregator")
    trains = start(releases[island], "island")
    assert trains.wait() == 0, trains.err
    assert aggregator.wait() == 0, aggregator.err
    assert broker.is_running()
    notes = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    last = next(each["fields"] for each in notes if each.get("note") == "run.ended")
    assert last["trained"] == last["merged"] >= TOKENS
    versions = [each["fields"] for each in notes if each.get("note") == "version.committed"]
    assert {each["island"] for fields in versions for each in fields["contributions"]} == {"a"}


def both_versions(text, theirs, ours):
    found = re.search(
        r"it speaks version (\d+) of the wire protocol, and atoll (\S+) here version (\d+): install", text
    )
    assert found is not None, text
    assert (int(found.group(1)), int(found.group(3))) == (theirs, ours)
    return found.group(2)


def test_an_island_of_another_protocol_is_told_so_and_so_is_its_broker(releases, start):
    broker = start(releases["this"], "broker")
    island = start(releases["other"], "island")
    assert island.wait() == 2  # within seconds: starting it again would not help
    assert both_versions(island.err, PROTOCOL_VERSION, PROTOCOL_VERSION + 1) == "9.9.0"
    assert "Traceback" not in island.err
    wait_for(lambda: "it speaks version" in broker.err, "the broker's own words", evidence=lambda: broker.err)
    assert both_versions(broker.err, PROTOCOL_VERSION + 1, PROTOCOL_VERSION) == version_of(ROOT)
    assert broker.is_running()


def test_an_aggregator_of_another_protocol_is_told_so(releases, start):
    broker, aggregator = start(releases["this"], "broker"), start(releases["other"], "aggregator")
    wait_for(lambda: "it speaks version" in aggregator.err, "the cure", evidence=lambda: aggregator.err + broker.err)
    assert both_versions(aggregator.err, PROTOCOL_VERSION, PROTOCOL_VERSION + 1) == "9.9.0"
    assert both_versions(broker.err, PROTOCOL_VERSION + 1, PROTOCOL_VERSION) == version_of(ROOT)
