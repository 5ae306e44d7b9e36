"""What is uploaded: the wheel and the sdist have what they should, and nothing that is nobody's business."""

import email
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile

import pytest

from tests.releases.wheels import ROOT, built, copied_tree, version_of

pytest.importorskip("hatchling")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    made = built(copied_tree(tmp_path_factory.mktemp("dist") / "tree"), targets=("sdist", "wheel"))
    by_suffix = {path.suffix: path for path in made}
    return by_suffix[".gz"], by_suffix[".whl"]


def test_the_wheel_has_four_packages_their_data_and_nothing_else(artifacts):
    names = zipfile.ZipFile(artifacts[1]).namelist()
    assert {name.partition("/")[0] for name in names} == {
        *("broker", "islands", "aggregator", "ops"),
        f"atoll-{version_of(ROOT)}.dist-info",
    }
    command = ["git", "ls-files", "broker", "islands", "aggregator", "ops"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(tracked.stdout.split()) <= set(names)  # pages, py.typed, PROTOCOL.md


def test_the_metadata_say_what_the_project_says(artifacts):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = f"atoll-{project['version']}.dist-info/METADATA"
    found = email.message_from_bytes(zipfile.ZipFile(artifacts[1]).read(name))
    assert found["Version"] == project["version"]
    assert found["Requires-Python"] == project["requires-python"]
    assert set(found.get_all("Provides-Extra")) == project["optional-dependencies"].keys()
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().startswith("# Atoll")


def test_a_wheel_can_be_built_from_the_sdist(artifacts, tmp_path):
    with tarfile.open(artifacts[0]) as file:
        file.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    wheel = next(each for each in built(tree) if each.suffix == ".whl")
    assert zipfile.ZipFile(wheel).namelist() == zipfile.ZipFile(artifacts[1]).namelist()


class Environment:
    """An environment of its own that finds the dependencies in the one that tests."""

    def __init__(self, folder):
        self.folder = folder
        self._uv("venv", folder, "--python", sys.executable)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])

    def _uv(self, *arguments):
        command = [sys.executable, "-m", "uv", *map(str, arguments), "--offline"]
        subprocess.run(command, check=True, capture_output=True, timeout=50)

    def pip(self, *arguments):
        self._uv("pip", *arguments, "--python", self.folder / "bin" / "python")

    def install(self, *wheels):
        for wheel in wheels:
            self.pip("install", "--no-deps", "--no-index", "--force-reinstall", wheel)

    def run(self, program, *arguments, **variables):
        left = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"ATOLL_NO_VENV": "1"}
        command = [self.folder / "bin" / program, *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=left | variables, capture_output=True, text=True, timeout=50
        )


def foreign_wheel(folder, name):
    """Writes a distribution with a package of the same name, which ends whoever imports it."""
    info = f"{name}-2.0.dist-info"
    files = {
        f"{name}/__init__.py": f"raise ImportError('the other {name}')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-2.0-py3-none-any.whl", "w") as wheel:
        for each, text in files.items():
            wheel.writestr(each, text)
    return folder / f"{name}-2.0-py3-none-any.whl"


FAULT = (
    "atoll: other distributions have packages of Atoll's names, in their place or mixed with them "
    "(broker has broker, ops has ops): "
)
CURE = "pip uninstall broker ops, and install Atoll again with --force-reinstall --no-deps"


@pytest.mark.parametrize("theirs_last", [False, True], ids=["ours last", "theirs last"])
def test_packages_of_our_names_from_others_are_named_with_the_cure(artifacts, tmp_path, theirs_last):
    environment = Environment(tmp_path / "venv")
    theirs = [foreign_wheel(tmp_path, name) for name in ("ops", "broker")]
    environment.install(*([artifacts[1], *theirs] if theirs_last else [*theirs, artifacts[1]]))

    done = environment.run("atoll", "--version")
    assert done.stderr.startswith(FAULT)
    assert CURE in done.stderr.splitlines()[0]
    if theirs_last:
        assert done.stderr.endswith("ImportError: the other ops\n")
        loop = environment.run("python", "-c", "import islands; islands.join")
        assert CURE in loop.stderr.splitlines()[-1]
    else:
        assert (done.returncode, done.stdout) == (0, f"atoll {version_of(ROOT)}\n")
        mistyped = environment.run("atoll", "statsu")
        assert [line.partition(":")[0] for line in mistyped.stderr.splitlines()] == ["atoll", "atoll"]
        assert mistyped.stderr.startswith(FAULT)
        others = ("jax", "files", "disk", "redis", "broker")
        (found,) = json.loads(environment.run("atoll", "doctor", "--json", "--skip", *others).stdout)["findings"]
        assert (found["subject"], found["verdict"]) == ("Python", "failure")
        assert CURE in found["cure"]

    checkout = environment.run("python", "-m", "ops", "--version", PYTHONPATH=os.fspath(ROOT))
    assert (checkout.returncode, checkout.stderr) == (0, "")  # it shares no folder with them

    environment.pip("uninstall", "ops", "broker")
    assert "files of Atoll are missing" in environment.run("atoll", "--version").stderr
    environment.install(artifacts[1])
    assert environment.run("atoll", "--version").stderr == ""


def test_the_changelog_has_a_dated_section_of_this_version():
    heading = f"## [{version_of(ROOT)}] - 20"
    assert heading in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_script_of_releases_is_one():
    path = ROOT / ".ci" / "release"
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)
