"""What is uploaded: the wheel and the sdist have what they should, and nothing that is nobody's business."""

import email
import subprocess
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


def test_the_changelog_has_a_dated_section_of_this_version():
    heading = f"## [{version_of(ROOT)}] - 20"
    assert heading in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_script_of_releases_is_one():
    path = ROOT / ".ci" / "release"
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)
