"""What a stranger gets: our own packages under their names, a lock that pins everything, no private address."""

import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ops
from broker.process import release
from ops import launcher
from ops.run import daemons
from ops.sinks import target

#: In a child: the current folder is where modules are found, too.
FIND = "from ops.launcher import find_modules_here; find_modules_here()"
ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements.lock").read_text()
RUNTIME_LOCK = (ROOT / "requirements-runtime.lock").read_text()
TORCH_LOCKS = [(ROOT / name).read_text() for name in ("requirements-torch.lock", "requirements-torch-cpu.lock")]
LM_EVAL_LOCK = (ROOT / launcher.LM_EVAL_LOCK).read_text()


def test_the_checkout_wins_over_an_unrelated_package_named_ops(tmp_path):
    decoy = tmp_path / "ops"
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise ImportError('this is the other ops')\n")
    # As the launcher starts it: the checkout first on the path, whatever else is installed and wherever we stand.
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "ATOLL_NO_VENV": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "ops", "--help"], cwd="/", env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert "Atoll trains one model" in done.stdout
    assert Path(ops.__file__).parent == ROOT / "ops"


@pytest.fixture
def folder_of_homonyms(tmp_path, monkeypatch):
    """A user's folder whose files have names of ours, and of what we need; and a PYTHONPATH as if we were installed."""
    (tmp_path / "ops").mkdir()
    for name in ("ops/__init__", "broker", "redis", "zmq"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    (tmp_path / "users_own.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "ROOT", tmp_path / "site-packages")  # no checkout
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (daemons.our_command("--version"), ""),
        ([sys.executable, "-P", "-c", f"{FIND}; import users_own, ops.cli, redis; print(redis.__file__)"], "packages"),
    ],
)
def test_files_of_the_current_folder_hide_nothing_of_ours_and_are_found(folder_of_homonyms, command, said):
    environment = os.environ | daemons.our_environment("")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_a_loop_beside_a_file_that_hides_ours_is_told_which(folder_of_homonyms):
    (folder_of_homonyms / "broker.py").write_text("")
    command = [sys.executable, "-c", "import islands; islands.join"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert f"ImportError: {folder_of_homonyms / 'broker.py'} has the name of a package of Atoll" in done.stderr


def names_of(requirements):
    names = [re.match(r"[A-Za-z0-9_.-]+", each) for each in requirements if isinstance(each, str)]
    return {name.group().lower().replace("_", "-") for name in names}


def test_every_dependency_and_tool_is_pinned():
    pinned = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", LOCK, re.M))
    groups = PROJECT["dependency-groups"]
    assert names_of([*PROJECT["project"]["dependencies"], *groups["test"], *groups["dev"]]) <= pinned.keys()


def test_the_environment_with_torch_has_the_same_versions_of_everything_else():
    def pinned(lock):
        return set(re.findall(r"^([a-z0-9-]+==[^ +]+)", lock, re.M))

    with_gpus, for_cpus = map(pinned, TORCH_LOCKS)
    assert pinned(LOCK) < for_cpus < with_gpus
    assert [each for each in for_cpus if each.startswith("torch==")]


def test_the_lock_of_the_image_has_the_same_files_of_what_runs_need_and_no_tools():
    def files(lock):
        blocks = re.split(r"^(?=[a-z0-9-]+==)", lock, flags=re.M)[1:]
        return {each.splitlines()[0]: frozenset(re.findall(r"sha256:\w+", each)) for each in blocks}

    assert files(RUNTIME_LOCK).items() < files(LOCK).items()
    extras = PROJECT["project"]["optional-dependencies"]
    used = [extras[name] for name in ("dashboard", "metrics", "objects", "otel")]
    needed = names_of([*PROJECT["project"]["dependencies"], *(each for extra in used for each in extra)])
    pinned = set(re.findall(r"^([a-z0-9-]+)==", RUNTIME_LOCK, re.M))
    assert needed <= pinned
    groups = PROJECT["dependency-groups"]
    assert pinned & names_of([*groups["test"], *groups["dev"]]) <= needed


def test_the_environment_of_lm_eval_has_the_same_versions_as_that_with_torch_which_has_its_torch():
    torch, ours = (
        dict(re.findall(r"^([a-z0-9-]+)(?:\[\w+\])?==(\S+)", lock, re.M)) for lock in (TORCH_LOCKS[1], LM_EVAL_LOCK)
    )
    assert {name: torch.get(name, version) for name, version in ours.items()} == ours
    assert "torch" in torch.keys() - ours.keys()
    (wanted,) = PROJECT["project"]["optional-dependencies"]["lm-eval"]
    assert wanted == f"lm-eval[hf]=={ours['lm-eval']}"


@pytest.mark.parametrize(
    "lock",
    [LOCK, RUNTIME_LOCK, *TORCH_LOCKS, LM_EVAL_LOCK],
    ids=["main", "image", "torch", "torch-cpu", "lm-eval"],
)
def test_a_lock_has_the_hashes_of_everything_and_names_no_address(lock):
    for block in re.split(r"^(?=[a-z0-9-]+(?:\[\w+\])?==)", lock, flags=re.M)[1:]:
        assert "--hash=sha256:" in block, block.splitlines()[0]
    for address in ("://", "--index-url", "--find-links"):
        assert address not in lock


def test_every_dependency_has_a_reason_beside_it():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    start = lines.index("dependencies = [")
    for line in lines[start + 1 : lines.index("]", start)]:
        assert "#" in line, line


def test_no_cure_names_a_package_of_ours_on_an_index():
    places = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    for package in ("broker", "islands", "aggregator", "ops"):
        places += (ROOT / package).rglob("*.py")
    said = re.compile(r"pip install [^\n]*?['\" ]atoll\b(?!\.)|pip install atoll\b")
    assert [str(path) for path in places if said.search(path.read_text())] == []


@pytest.mark.parametrize("pip", [True, False])
def test_a_missing_package_is_installed_into_the_environment_that_lacks_it(monkeypatch, pip):
    monkeypatch.setattr(release, "find_spec", lambda name: pip or None)
    monkeypatch.setattr(sys, "executable", "/an env/bin/python")
    found = {True: "'/an env/bin/python' -m pip install", False: "uv pip install --python '/an env/bin/python'"}
    assert release.install("tensorboard", "jax[tpu]==1") == f"{found[pip]} tensorboard 'jax[tpu]==1'"


def test_the_packages_that_cures_name_are_those_of_the_extras():
    wanted = [each for extra in PROJECT["project"]["optional-dependencies"].values() for each in extra]
    named = {*itertools.chain(*target.PACKAGES.values()), "prometheus-client", "obstore", "torch", "starlette"}
    assert named <= {re.split(r"[>=]", each)[0] for each in wanted}


def test_the_wheel_holds_all_packages_that_are_imported():
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["broker", "islands", "aggregator", "ops"]
    for package in packages:
        assert (ROOT / package / "__init__.py").is_file(), package
        assert (ROOT / package / "py.typed").is_file(), package
    assert PROJECT["project"]["scripts"]["atoll"] == "islands.interface.installation:main"
