"""A run from the installed wheel, in a folder whose files have the names of our packages."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.hub import Hub
from tests.local_run import ROOT, check_report
from tests.releases.wheels import built, copied_tree, installed

pytestmark = [pytest.mark.timeout(180), pytest.mark.full("builds a wheel and trains with it")]
pytest.importorskip("hatchling")


LOOP = """
import sys
import numpy as np
import islands

params = {"w": np.zeros((4, 3), np.float32)}
island = islands.join(sys.argv[1], params, run="demo", tokens_per_step=10)
params, _ = island.restore(params)
for batch in islands.batches(np.ones((1000, 4, 3), np.float32), island, batch=10):
    params = island.step({"w": params["w"] + 0.1 * (batch.mean(0) - params["w"])}, tokens=10)
params = island.close(params)
print(islands.__file__, bool(np.allclose(params["w"], 1, atol=0.1)))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    return installed(built(copied_tree(folder / "tree"))[0], folder / "installed")


def test_a_loop_of_ones_own_joins_from_a_folder_of_its_own_with_the_installed_wheel(package, tmp_path):
    (tmp_path / "my_loop.py").write_text(LOOP)
    with Hub(tmp_path / "store", islands=1, total_tokens=3_000) as hub:
        command = [sys.executable, "my_loop.py", hub.address]
        variables = os.environ | {"PYTHONPATH": os.fspath(package)}
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == [os.fspath(package / "islands" / "__init__.py"), "True"], done.stderr


def test_a_run_of_the_wheel_in_a_folder_with_files_of_our_names(package, tmp_path):
    here = tmp_path / "here"
    (here / "ops").mkdir(parents=True)
    for name in ("ops/__init__", "broker", "aggregator", "islands"):
        (here / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    shutil.copy(ROOT / "examples" / "numpy_task.py", here)
    variables = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "ATOLL_NO_VENV")}
    flags = ("--task", "numpy_task:task", "--islands", "2", "--tokens", "4000", "--pace", "0.005", "--json")
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import sys; from ops.cli import main; sys.exit(main())", "up", *flags],
        cwd=here, env=variables | {"PYTHONPATH": os.fspath(package)}, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_report(json.loads(done.stdout))
