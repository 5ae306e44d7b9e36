"""The set that the repository keeps is read, replayed and written by this tree as by the one that made it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frozen import comparing, making

SET, ROOT = Path(__file__).parent / "set", Path(__file__).parents[2]
pytestmark = pytest.mark.full("replays three runs with their payloads; the rules and the codec have fast tests")


@pytest.mark.parametrize("difference_of", [pytest.param(call, id=name) for name, call in comparing.items(SET)])
def test_the_frozen_set_is_equal(difference_of):
    assert difference_of() == ""


def test_the_set_is_small():
    assert sum(path.stat().st_size for path in SET.rglob("*") if path.is_file()) < 2_000_000


def test_a_run_leaves_the_same_files_under_another_hash_seed(tmp_path):
    code = "import sys; from pathlib import Path; from tests.frozen.taped_runs import RUNS, record\n"
    code += "record(Path(sys.argv[1]), print, **RUNS['resumed'])"
    found = []
    for seed in ("7", "8"):
        folder, environment = tmp_path / seed, os.environ | {"PYTHONHASHSEED": seed}
        again = subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, env=environment, timeout=120)
        assert again.returncode == 0
        found.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    assert found[0] == found[1]


def test_every_difference_is_named(tmp_path, capsys):
    changed = shutil.copytree(SET, tmp_path / "set")
    expected = json.loads((changed / "expected.json").read_text())
    expected["tapes"]["plain"]["said"]["coverage"]["versions"] += 1
    expected["store"]["run"] = "another"
    (changed / "expected.json").write_text(json.dumps(expected))
    (changed / making.CHECKPOINT).write_bytes(b"nothing")
    frames = (changed / "frames.txt").read_text()
    lines = [line for line in frames.splitlines() if not line.startswith("welcome ")]
    (changed / "frames.txt").write_text("\n".join([*lines, frames.splitlines()[0][:-2], "gossip 00"]))
    (changed / "help").mkdir()
    (changed / "help" / "gone.txt.gz").write_bytes(gzip.compress(b"of old"))
    assert not comparing.compare(changed)
    said = capsys.readouterr().out
    for what in ("tape plain: line", "store: line", "checkpoint: Unavailable", "frames of welcome: the set has no"):
        assert f"DIFFERS  {what}" in said
    for what in ("frames of heartbeat: Unreadable", "frames of gossip: Unreadable", "help gone: \n"):
        assert f"DIFFERS  {what}" in said
    assert said.count("DIFFERS  ") == 7 + len(making.helps())
    assert "equal    tape failover" in said
    assert comparing.compare(changed, ["help "])
    assert not comparing.compare(changed, ["help "], strict=True)
