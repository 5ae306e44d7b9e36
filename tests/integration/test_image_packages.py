"""An environment with the packages of requirements-runtime.lock alone, as the image has it, trains and shows a run."""

import re
import subprocess
import sys
from importlib import metadata

import pytest

from ops.processes.cluster import free_ports
from tests.local_run import PATIENCE_S, ROOT, environment

pytestmark = [pytest.mark.timeout(240), pytest.mark.full("a whole run with JAX")]
NAMES = re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements-runtime.lock").read_text(), re.M)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter that finds what the lock names, linked from this environment, and nothing else."""
    place = tmp_path_factory.mktemp("image") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=60)
    (packages,) = place.glob("lib/python*/site-packages")
    for name in NAMES:
        try:
            files = metadata.distribution(name).files
        except metadata.PackageNotFoundError:  # for another platform or Python
            continue
        for each in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (packages / each).exists():
                (packages / each).symlink_to(metadata.distribution(name).locate_file(each))
    return place / "bin" / "python"


def run(*words):
    done = subprocess.run(
        list(map(str, words)), env=environment(), capture_output=True, text=True, timeout=2 * PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_default_task_trains_with_all_that_an_operator_turns_on(python, tmp_path):
    ops, port = (python, "-P", "-m", "ops"), free_ports(4)
    flags = ("--islands", 1, "--model", "tiny", "--tokens", 5_000, "--copy-to", f"file://{tmp_path}/copy")
    run(*ops, "up", "--run-dir", tmp_path / "run", *flags, "--dashboard", port, "--metrics", port + 1)
    assert "island-0  left" in run(*ops, "status", tmp_path / "run")
    assert (tmp_path / "copy").is_dir()


def test_traces_have_their_packages_and_tools_of_development_are_gone(python):
    run(python, "-c", "import opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http")
    tools = ("pytest", "ruff", "mypy", "playwright", "uv", "flax")
    found = f"import importlib.util; print([each for each in {tools} if importlib.util.find_spec(each)])"
    assert run(python, "-c", found) == "[]\n"
