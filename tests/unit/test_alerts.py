"""The alert rules, the example of a scrape configuration and the dashboard: valid, and about metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from broker.metrics.family import Kind
from tests.metric_snapshots import ALL_FAMILIES

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = (PROMETHEUS / "alerts.yml").read_text()
ALERTS = re.findall(r"- alert: (\w+)", RULES)
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "atoll.json").read_text())
FAMILIES = {each.name: each for each in ALL_FAMILIES}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool comes with Debian's package prometheus"
)


def promtool(*arguments):
    return subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=30)


@needs_promtool
@pytest.mark.parametrize("arguments", [["rules", "alerts.yml"], ["config", "prometheus.yml"]], ids=["rules", "config"])
def test_promtool_finds_them_valid(arguments):
    done = promtool("check", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_when_they_should_and_not_before():
    done = promtool("test", "rules", "alerts_test.yml")
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


def names_in(text):
    """Names of our metrics in a PromQL text, with the labels that each is selected by."""
    return re.findall(r"\b(atoll_[a-z_]+)(?:\{([^}]*)\})?", text)


def test_alerts_ask_for_metrics_that_exist_with_labels_that_they_have():
    expressions = re.sub(r"(?m)^ +(#|summary:|cure:|runbook:|- alert:).*$", "", RULES)
    found = names_in(expressions)
    assert len({name for name, _ in found}) >= 9
    for name, labels in found:
        assert name in FAMILIES, name
        for label in re.findall(r"(\w+)[=!]", labels):
            assert label in FAMILIES[name].labels, (name, label)


def test_what_alerts_take_the_rate_of_is_a_counter():
    rated = re.findall(r"(?:rate|increase)\((atoll_[a-z_]+)", RULES)
    assert rated
    assert all(FAMILIES[name].kind is Kind.COUNTER for name in rated)


# --- the dashboard ---------------------------------------------------------------------------------------------------


PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}


def expressions_of(panel):
    return [target["expr"] for target in panel["targets"]]


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
    for title, metric in wanted.items():
        assert metric in " ".join(expressions_of(PANELS[title])), title
    assert PANELS["Islands"]["type"] == "table"


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda each: each["title"])
def test_a_panel_asks_for_metrics_that_exist_with_labels_that_they_have(panel):
    assert panel["description"].endswith(".")
    for target in panel["targets"]:
        found = names_in(target["expr"])
        assert found
        has = set()
        for name, labels in found:
            assert name in FAMILIES, name
            has |= {*FAMILIES[name].labels, "instance"}
            assert 'run=~"$run"' in labels
            assert set(re.findall(r"(\w+)[=!]", labels)) <= set(FAMILIES[name].labels)
        grouped = {each.strip() for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for each in by.split(",")}
        assert grouped <= has
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= (grouped or has)
        rated = re.findall(r"(?:rate|increase)\((\w+)", target["expr"])
        assert all(name.endswith("_total") for name in rated)
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
