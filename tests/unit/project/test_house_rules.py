"""What the import contract of pyproject.toml cannot say: floors, sizes of rooms and modules, what a process loads."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from aggregator.interface.reading_notes import NOTES

ROOT = Path(__file__).parents[3]
PACKAGES = ("broker", "islands", "aggregator", "ops")
#: Modules that a core must not even load.
NEVER_LOADED = {"zmq", "redis", "socket", "fcntl", "tempfile", "asyncio", "threading", "logging", "jax", "optax"}
MAX_MODULES, MAX_LINES, MAX_FLOORS = 14, 450, 12
#: First lines that a newcomer has to read twice: clauses as nouns, "Of .." as a subject.
RIDDLE = re.compile(
    r"^(Of|What|Who|Whose|Whom|That|Those|The same|It|They)\b|\b(so many|likewise|whoever|whom|of now|as it stands)\b"
    r"|\b[Ww]hat is no|\b(for|returns|says|tells|takes|remembers) who\b",
    re.IGNORECASE,
)


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@functools.cache
def siblings(name):
    """The modules of its own package that a module imports, wherever in it, those for the type checker included."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {each if each in MODULES else node.module for each in full}
    package = name.partition(".")[0]
    return {each for each in found if each in MODULES and each.partition(".")[0] == package and each != package}


@pytest.mark.parametrize(
    ("names", "never"),
    [
        (
            "aggregator.rounds.core, aggregator.standby.candidate, aggregator.standby.replication, "
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


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_downwards_on_few_floors(package):
    """A module's floor is one above the highest that it imports; a circle has none."""
    floors, under_way = {}, []

    def floor(name):
        assert name not in under_way, " -> ".join([*under_way[under_way.index(name) :], name])
        if name not in floors:
            under_way.append(name)
            floors[name] = 1 + max(map(floor, siblings(name)), default=0)
            under_way.pop()
        return floors[name]

    highest = max((name for name in MODULES if name.startswith(f"{package}.")), key=floor)
    assert floors[highest] <= MAX_FLOORS, highest


def test_the_first_line_of_a_docstring_has_at_most_100_characters_and_is_no_riddle():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    lines = [
        (name, ast.get_docstring(node).partition("\n")[0])
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds) and ast.get_docstring(node)
    ]
    long = [(name, line) for name, line in lines if len(line) > 100]
    riddles = [(name, line) for name, line in lines if RIDDLE.search(line)]
    assert (long, riddles) == ([], [])


def test_whoever_reads_notes_matches_their_classes():
    """A name in a string goes on as if nothing were, when a note or a field of it has another."""
    modules = [name for name in MODULES if name.startswith("ops.") and not name.startswith("ops.virtual.")]
    said = [
        (name, node.value)
        for name in modules
        for node in ast.walk(ast.parse(MODULES[name].read_text()))
        if isinstance(node, ast.Constant) and node.value in NOTES
    ]
    assert said == []


def test_no_daemon_sets_a_timer_by_the_clock_of_its_event_loop():
    """Deadlines are by ``broker.process.clocks.monotonic``, which a drill makes jump."""
    both = [name for name, path in MODULES.items() if re.search(r"\.call_at\(|loop\.time\(", path.read_text())]
    assert [name for name in both if not name.startswith("ops.link_proxy.")] == []  # those have no other clock


def test_no_room_has_too_many_modules_and_no_module_is_too_long():
    rooms = Counter(name.rpartition(".")[0] for name, path in MODULES.items() if path.name != "__init__.py")
    assert {room: modules for room, modules in rooms.items() if modules > MAX_MODULES} == {}
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_purity_goes_by_folder():
    """The contract of pure modules names rooms alone: who adds a module to one need not know of a list."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (pure,) = (each["source_modules"] for each in contracts if each["id"] == "pure")
    assert [name for name in pure if not (ROOT / name.replace(".", "/")).is_dir()] == []
