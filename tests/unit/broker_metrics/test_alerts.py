"""The alert rules, the example of a scrape configuration and the dashboard: valid, and about metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.metric_snapshots import ALL_FAMILIES

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = (PROMETHEUS / "alerts.yml").read_text()
ALERTS = re.findall(r"- alert: (\w+)", RULES)
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "atoll.json").read_text())
FAMILIES = {each.name: each for each in ALL_FAMILIES}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool comes with Debian's package prometheus"
)


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["check", "rules", "alerts.yml"], id="the rules are valid"),
        pytest.param(["check", "config", "prometheus.yml"], id="the example is valid"),
        pytest.param(["test", "rules", "alerts_test.yml"], id="alerts fire when they should and not before"),
    ],
)
def test_promtool_agrees_that(arguments):
    done = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_tests_that_it_fires_and_that_it_does_not():
    tests = (PROMETHEUS / "alerts_test.yml").read_text()
    for alert in ALERTS:
        assert re.search(rf"alertname: {alert}\n +exp_alerts: \[\]", tests), alert
        assert re.search(rf"alertname: {alert}\n +exp_alerts:\n", tests), alert


def test_each_alert_has_a_summary_a_cure_and_a_line_in_the_runbook():
    table = (ROOT / "docs" / "operate.md").read_text().partition("### Alerts\n")[2]
    blocks = RULES.split("- alert: ")[1:]
    assert len(blocks) == len(ALERTS) >= 6
    for alert, block in zip(ALERTS, blocks, strict=True):
        for annotation in ("summary: ", "cure: ", "runbook: docs/operate.md#alerts"):
            assert annotation in block, (alert, annotation)
        assert "severity: " in block
        assert f"| `{alert}` |" in table


def asked_of(expression):
    """The names of our metrics in a PromQL text, and how each is selected: they exist and have the labels for it."""
    found = dict.fromkeys(re.findall(r"\b(atoll_[a-z_]+)((?:\{[^}]*\})?)", expression))
    for name, selected in found:
        assert name in FAMILIES
        assert set(re.findall(r"(\w+)[=!]", selected)) <= set(FAMILIES[name].labels), name
    rated = re.findall(r"(?:rate|increase)\((\w+)", expression)
    assert all(name.endswith("_total") for name in rated)
    return found


def test_alerts_ask_for_metrics_that_exist_with_labels_that_they_have():
    expressions = re.sub(r"(?m)^ +(#|summary:|cure:|runbook:|- alert:).*$", "", RULES)
    assert "rate(" in expressions
    assert len({name for name, _ in asked_of(expressions)}) >= 9


def test_the_dashboard_shows_what_an_operator_asks_for():
    wanted = {
        "Loss": "atoll_aggregator_loss",
        "Tokens per second": "atoll_aggregator_island_tokens_total",
        "Versions": "atoll_aggregator_fragment_version",
        "Islands": "atoll_aggregator_island_heard_timestamp_seconds",
        "Staleness": "atoll_aggregator_staleness_versions_total",
        "Refusals": "atoll_aggregator_refused_messages_total",
        "Round time": "atoll_aggregator_round_seconds",
        "Memory of the hub": "process_resident_memory_bytes",
        "Processors of the hub": "process_cpu_seconds_total",
        "Disk of the store": "atoll_aggregator_store_free_bytes",
    }
    panels = {panel["title"]: panel for panel in DASHBOARD["panels"]}
    for title, metric in wanted.items():
        assert metric in " ".join(target["expr"] for target in panels[title]["targets"]), title
    assert panels["Islands"]["type"] == "table"


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda each: each["title"])
def test_a_panel_asks_for_metrics_that_exist_with_labels_that_they_have(panel):
    assert panel["description"].endswith(".")
    for target in panel["targets"]:
        found = asked_of(target["expr"])
        assert found
        assert all('run=~"$run"' in selected for _, selected in found)
        has = {"instance"}.union(*(FAMILIES[name].labels for name, _ in found))
        grouped = {each.strip() for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for each in by.split(",")}
        assert grouped <= has
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= (grouped or has)
        others = set(re.findall(r"\bprocess_\w+", target["expr"]))
        assert others <= {"process_resident_memory_bytes", "process_cpu_seconds_total"}


def test_panels_have_numbers_of_their_own_and_do_not_overlap():
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
