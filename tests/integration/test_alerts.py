"""A real Prometheus server with the rules that we ship: an island that is killed makes its alert fire."""

import json
import shutil
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from ops.processes.cluster import free_ports
from tests.local_run import Up, wait_for

pytestmark = [
    pytest.mark.full("a Prometheus server, and a whole run"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is a package of Debian"),
]

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "atoll.json"
PANELS = {
    panel["title"]: [target["expr"] for target in panel["targets"]]
    for panel in json.loads(DASHBOARD.read_text())["panels"]
}
RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"


@contextmanager
def prometheus(folder, targets):
    """Starts a server that scrapes every second; yields what answers questions to its API."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "atoll-local", "file_sd_configs": [{"files": [str(targets)]}]}],
    }
    folder.mkdir()
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_ports(1)}"
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)

    def ask(path):
        with suppress(URLError, ConnectionError), urlopen(f"http://{address}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    try:
        yield ask
    finally:
        server.terminate()
        try:
            server.wait(20)
        finally:
            server.kill()


def shown(ask, panel):
    """Says whether every query of a panel has a result; one that cannot be read fails."""
    results = []
    for expression in PANELS[panel]:
        found = ask(f"query?query={quote(expression.replace('$run', '.*'))}")
        assert found is not None, expression
        results.append(found["result"])
    return all(results)


def test_an_island_that_is_killed_makes_its_alert_fire_and_its_return_ends_that(tmp_path):
    run_dir = tmp_path / "run"
    quickly = tmp_path / "quickly.toml"
    quickly.write_text("[run]\nheartbeat_interval_s = 0.2\nsuspect_after_s = 0.8\ndead_after_s = 2\n")
    flags = ["--islands", "2", "--tokens", "0", "--metrics", free_ports(4), "--config", quickly]
    with Up(run_dir, *flags) as up:
        up.wait_for_progress()
        with prometheus(tmp_path / "prometheus", run_dir / "metrics.json") as ask:

            def healthy():
                found = ask("targets?state=active") or {"activeTargets": []}
                return [each["health"] for each in found["activeTargets"]] == ["up"] * 4

            def firing():
                return {
                    each["labels"]["alertname"]: each["labels"]
                    for each in (ask("alerts") or {"alerts": []})["alerts"]
                    if each["state"] == "firing"
                }

            wait_for(healthy, "four healthy targets", evidence=lambda: (tmp_path / "prometheus" / "log").read_text())
            with_data = PANELS.keys() - {"Refusals", "Standbys in sync", "Tokens that were not merged"}
            assert all(shown(ask, panel) is not None for panel in PANELS)  # each query can be read
            wait_for(lambda: all(shown(ask, panel) for panel in with_data), "data in every panel")
            rules = ask("rules")["groups"][0]["rules"]
            assert {each["health"] for each in rules} <= {"ok", "unknown"}
            assert firing() == {}
            with up.nobody_restarts():
                up.kill("island-1")
                found = wait_for(lambda: firing().get("AtollIslandSilent"), "alert of the silent island")
                assert found["island"] == "island-1"
                assert found["run"] == "run"
            wait_for(lambda: "AtollIslandSilent" not in firing(), "end of the alert")
            assert {each["health"] for each in ask("rules")["groups"][0]["rules"]} == {"ok"}
