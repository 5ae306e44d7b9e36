"""The house rules: who imports whom, which rooms are pure, how large rooms and modules are. Read from the sources."""

import ast
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "broker": set(),
    "islands": {"broker"},
    "aggregator": {"broker"},
    "ops": {"broker", "islands", "aggregator"},
}
#: Folders without socket, file, clock, environment, hidden randomness or logging, also through what they import.
PURE_ROOMS = [
    "broker.wire",
    "broker.wire.messages",
    "broker.chunks",
    "broker.routing",
    "islands.hosts",
    "islands.protocol",
    "aggregator.rules",
    "aggregator.ledger",
    "aggregator.state",
    "aggregator.rounds",
    "aggregator.merge",
    "aggregator.standby",
    "ops.virtual",
]
#: Pure modules that live beside their shell.
PURE_MODULES = {
    "aggregator.copies.place",
    "aggregator.copies.planning",
    "aggregator.copies.sets",
    "aggregator.copies.shards",
    "aggregator.core",
    "aggregator.events",
    "aggregator.process.metrics",
    "aggregator.store.segment_count",
    "aggregator.tracing.round_spans",
    "broker.gateway.connections",
    "broker.gateway.bonds",
    "broker.gateway.flows",
    "broker.metrics.family",
    "broker.metrics.relay_families",
    "broker.observing.answers",
    "broker.observing.rules",
    "broker.process.transitions",
    "broker.sinks.rows",
    "broker.transport.address_rotation",
    "islands.arguments",
    "islands.arrays.persistence",
    "islands.arrays.plain_leaves",
    "islands.arrays.rows",
    "islands.metrics",
    "ops.chaos.plan",
    "ops.curve",
    "ops.doctor.broker_findings",
    "ops.doctor.finding",
    "ops.doctor.machine_findings",
    "ops.dashboard.history",
    "ops.faults",
    "ops.goodput.accounts",
    "ops.goodput.caveats",
    "ops.goodput.fleet",
    "ops.goodput.renewal",
    "ops.goodput.simulation",
    "ops.goodput.timeline",
    "ops.inspect.absence",
    "ops.inspect.run_status",
    "ops.inspect.shards",
    "ops.invariants",
    "ops.lab.experiment",
    "ops.lab.settings",
    "ops.links.condition",
    "ops.links.lane",
    "ops.links.link",
    "ops.links.region",
    "ops.links.wiring",
    "ops.planning.fleet",
    "ops.planning.footprint",
    "ops.planning.forecast",
    "ops.planning.links",
    "ops.planning.notes",
    "ops.planning.planner",
    "ops.planning.utilisation",
    "ops.run.devices",
    "ops.sinks.figures",
    "ops.text",
}
#: The values of settings. They are declared beside flags and files, which pure modules never touch.
SETTINGS = {
    "aggregator.config",
    "islands.config",
    "broker.process.declaring",
    "broker.process.demands",
    "broker.process.settings",
    "broker.process.toml",
    "broker.process.values",
}
SHELL = {"asyncio", "zmq", "redis", "socket", "time", "os", "logging", "threading", "subprocess", "secrets", "io"}
#: What a core must not even load, whoever imports it.
NEVER_LOADED = {"zmq", "redis", "socket", "fcntl", "tempfile", "asyncio", "threading", "logging", "jax", "optax"}

MAX_MODULES, MAX_LINES, MAX_FLOORS = 14, 450, 12


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))}
PURE = sorted(name for name in MODULES if name in PURE_MODULES or name.rpartition(".")[0] in PURE_ROOMS)


@functools.cache
def imports(name):
    """Every module that a module imports, wherever in it, those for the type checker included."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else node.module)
    return frozenset(found)


def ours(name):
    """The modules of the same package that a module imports."""
    package = name.partition(".")[0]
    return {each for each in imports(name) if each in MODULES and each.partition(".")[0] == package and each != package}


@pytest.mark.parametrize("name", MODULES)
def test_a_package_imports_only_what_it_may(name):
    package = name.partition(".")[0]
    used = {each.partition(".")[0] for each in imports(name)} & MAY_IMPORT.keys()
    assert used <= MAY_IMPORT[package] | {package}


def test_every_pure_module_exists():
    assert MODULES.keys() >= PURE_MODULES
    assert all(room in MODULES for room in PURE_ROOMS)


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_imports_no_shell(name):
    assert not {each.partition(".")[0] for each in imports(name)} & SHELL
    for each in imports(name) & MODULES.keys():
        assert each in PURE or each in SETTINGS or MODULES[each].name == "__init__.py", f"{name} imports {each}"


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_draws_no_hidden_randomness(name):
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            assert node.attr == "Random", f"{name}: random.{node.attr}"


@pytest.mark.parametrize(
    ("names", "never"),
    [
        (
            "aggregator.core, aggregator.standby.candidate, aggregator.standby.replication, "
            "islands.protocol.core, broker.routing.relay",
            NEVER_LOADED,
        ),
        (
            "islands, islands.daemon, islands.joining, aggregator.daemon, broker.server, ops.cli",
            {"jax", "optax", "torch"},
        ),
    ],
    ids=["cores", "light processes"],
)
def test_what_a_process_imports_does_not_load(names, never):
    code = f"import sys\nbefore = set(sys.modules)\nimport {names}\nprint({never!r} & set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_downwards_on_few_floors(package):
    """A module's floor is one above the highest that it imports; a circle has none."""
    floors, under_way = {}, []

    def floor(name):
        assert name not in under_way, " -> ".join([*under_way[under_way.index(name) :], name])
        if name not in floors:
            under_way.append(name)
            floors[name] = 1 + max(map(floor, ours(name)), default=0)
            under_way.pop()
        return floors[name]

    highest = max((name for name in MODULES if name.startswith(f"{package}.")), key=floor)
    assert floors[highest] <= MAX_FLOORS, highest


def test_no_room_has_too_many_modules():
    rooms = Counter(name.rpartition(".")[0] for name, path in MODULES.items() if path.name != "__init__.py")
    assert {room: modules for room, modules in rooms.items() if modules > MAX_MODULES} == {}


def test_no_module_is_too_long():
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


@pytest.mark.parametrize("name", MODULES)
def test_torch_is_imported_by_the_package_that_is_called_so_alone(name):
    if not name.startswith("islands.torch"):
        assert not {each for each in imports(name) if each.partition(".")[0] == "torch"}
    if name.partition(".")[0] != "islands":
        assert not {each for each in imports(name) if each.startswith("islands.torch")}
