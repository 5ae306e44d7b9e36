"""Who imports whom: read from the sources, and asked of an interpreter."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"broker", "islands", "aggregator", "ops"}
MAY_IMPORT = {
    "broker": set(),
    "islands": {"broker"},
    "aggregator": {"broker"},
    "ops": {"broker", "islands", "aggregator"},
}

#: Modules without socket, file, clock, environment, hidden randomness or logging.
PURE = [
    "broker/errors",
    "broker/masking",
    "broker/redis_address",
    "broker/names",
    "broker/values",
    "broker/complaints",
    "broker/ranges",
    "broker/liveness",
    "broker/fragments",
    "broker/messages",
    "broker/lengths",
    "broker/blockwise",
    "broker/tensors",
    "broker/schema",
    "broker/headers",
    "broker/codec",
    "broker/connections",
    "broker/hearing",
    "broker/rotation",
    "broker/queues",
    "broker/directory",
    "broker/replays",
    "broker/identity",
    "broker/bindings",
    "broker/rights",
    "broker/answers",
    "broker/deliveries",
    "broker/presence",
    "broker/relay",
    "broker/relay_events",
    "broker/resending",
    "broker/under_way",
    "broker/records",
    "islands/adoption",
    "islands/arguments",
    "islands/brokers",
    "islands/core",
    "islands/donation",
    "islands/shares",
    "islands/events",
    "islands/fleet",
    "islands/fragment",
    "islands/hand_over",
    "islands/member",
    "islands/paused",
    "islands/persistence",
    "islands/plain_leaves",
    "islands/misfit",
    "islands/training",
    "aggregator/core",
    "aggregator/replication",
    "aggregator/replication_events",
    "aggregator/candidate",
    "aggregator/candidate_events",
    "aggregator/founding",
    "aggregator/run",
    "aggregator/run_settings",
    "aggregator/fragment",
    "aggregator/roster",
    "aggregator/shelves",
    "aggregator/hearing",
    "aggregator/ways",
    "aggregator/intake",
    "aggregator/rounds",
    "aggregator/commits",
    "aggregator/publishing",
    "aggregator/round",
    "aggregator/membership",
    "aggregator/fleet_state",
    "aggregator/members",
    "aggregator/seeding",
    "aggregator/fitting",
    "aggregator/donation",
    "aggregator/shares",
    "aggregator/ending",
    "aggregator/quorum",
    "aggregator/pacing",
    "aggregator/journeys",
    "aggregator/ledger",
    "aggregator/lives",
    "aggregator/books",
    "aggregator/tally",
    "aggregator/admission",
    "aggregator/staleness",
    "aggregator/outliers",
    "aggregator/quarantine",
    "aggregator/events",
    "aggregator/records",
    "ops/chaos/manners",
    "ops/outer_defaults",
    "aggregator/recovery",
    "aggregator/behind",
    "aggregator/story",
    "broker/trouble",
    "ops/virtual/queue",
    "ops/virtual/clocks",
    "ops/virtual/crash_points",
    "ops/virtual/partitions",
    "ops/virtual/work",
    "ops/virtual/failover",
    "ops/virtual/faults",
    "ops/virtual/packed",
    "ops/virtual/plan",
    "ops/virtual/network",
    "ops/virtual/simulation",
    "ops/virtual/island",
    "ops/virtual/aggregator",
    "ops/virtual/broker",
    "ops/virtual/invariants",
    "ops/chaos/faults",
    "ops/chaos/invariants",
    "ops/chaos/plan",
    "ops/chaos/records",
    "ops/chaos/stepping",
    "ops/links/condition",
    "ops/links/lane",
    "ops/links/link",
    "ops/links/region",
    "ops/links/wiring",
    "ops/goodput/fleet",
    "ops/goodput/caveats",
    "ops/goodput/timeline",
    "ops/goodput/barrier",
    "ops/goodput/availability",
    "ops/goodput/staleness",
    "ops/goodput/renewal",
    "ops/goodput/simulation",
    "ops/goodput/estimate",
    "ops/shards",
    "ops/text",
    "ops/status/run_status",
    "ops/planning/fleet",
    "ops/planning/utilisation",
    "ops/planning/bandwidth_table",
    "ops/planning/footprint",
    "ops/planning/arrival",
    "ops/planning/links",
    "ops/planning/choosing",
    "ops/planning/forecast",
    "ops/planning/planner",
    "ops/planning/notes",
    "ops/planning/expectation",
    "ops/lab/settings",
    "ops/lab/experiment",
]
SHELL = {"asyncio", "zmq", "redis", "socket", "time", "os", "logging", "threading", "subprocess", "secrets", "io"}

MODULES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def imports(path):
    """Top-level names and full names that a module imports while it runs, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_imports_only_what_it_may(path):
    package = path.relative_to(ROOT).parts[0]
    used = {name.split(".")[0] for name in imports(path)} & OURS
    assert used <= MAY_IMPORT[package] | {package}


#: What is set, and how it is read from flags and files: pure modules know the values.
CONFIGURATIONS = ("aggregator/config", "islands/config", "broker/settings", "broker/toml")


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_imports_no_shell(name):
    path = ROOT / f"{name}.py"
    assert not {each.split(".")[0] for each in imports(path)} & SHELL
    for each in imports(path):
        local = each.replace(".", "/")
        if local.split("/")[0] in OURS and (ROOT / f"{local}.py").exists():
            assert local in PURE or local in CONFIGURATIONS, f"{name} imports {local}"


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_draws_no_hidden_randomness(name):
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            assert node.attr == "Random", f"{name}: random.{node.attr}"


@pytest.mark.parametrize(
    "name", ["islands", "islands.core", "aggregator.core", "aggregator.daemon", "broker.server", "ops.cli"]
)
def test_what_a_light_process_imports_does_not_import_jax(name):
    code = f"import sys, {name}; sys.exit(sorted({{'jax', 'optax'}} & set(sys.modules)) or None)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=50)
