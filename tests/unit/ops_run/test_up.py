"""``up`` while it waits: a healthy start is told from a run of which nothing can be seen any more."""

import asyncio
import importlib.util
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from broker.base.errors import Unavailable
from broker.process import release
from ops import cli
from ops.run.local_run import NO_REPORT, StatusWatch


@pytest.mark.parametrize(
    ("read", "missing"),
    [
        ({"return_value": SimpleNamespace(empty=True, members={}, fragments={})}, NO_REPORT),
        ({"side_effect": Unavailable("Redis is away", definite=True)}, "Redis is away"),
    ],
)
def test_what_there_is_no_status_for_is_said(read, missing):
    watch = StatusWatch("redis://127.0.0.1:6379", "demo")
    watch._registry = SimpleNamespace(read=AsyncMock(**read))
    asyncio.run(watch._look())
    assert (watch.now, watch.missing) == (None, missing)


def test_a_page_that_cannot_be_served_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run_dir = tmp_path / "run"
    assert cli.main(["up", "--dashboard", "0", "--run-dir", str(run_dir)]) == 2
    said = capsys.readouterr().err
    assert "dashboard = 0: needs packages that are not installed (starlette, uvicorn): " in said
    assert said.endswith(f"{release.install('starlette', 'uvicorn')}\n")
    assert not run_dir.exists()
