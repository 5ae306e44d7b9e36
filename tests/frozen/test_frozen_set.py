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


def test_a_trace_is_the_same_under_another_hash_seed(tmp_path):
    code = f"from tests.frozen import making; print(making.trace({making.SEEDS[0]}), end='')"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    again = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, timeout=120)
    assert again.stdout.decode() == making.trace(making.SEEDS[0]), again.stderr


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
    for name, text in {"traces/1": making.trace(1).replace("joined", "came", 1), "help/gone": "of old"}.items():
        path = changed / f"{name}.txt.gz"
        path.parent.mkdir()
        path.write_bytes(gzip.compress(text.encode()))
    assert not comparing.compare(changed)
    said = capsys.readouterr().out
    for what in ("tape plain: line", "store: line", "checkpoint: Unavailable", "frames of welcome: the set has no"):
        assert f"DIFFERS  {what}" in said
    for what in ("frames of heartbeat: Unreadable", "frames of gossip: Unreadable", "trace 1: line", "help gone: \n"):
        assert f"DIFFERS  {what}" in said
    assert said.count("DIFFERS  ") == 8 + len(making.helps())
    assert "equal    tape failover" in said
    assert comparing.compare(changed, ["help "])
    assert not comparing.compare(changed, ["help "], strict=True)
