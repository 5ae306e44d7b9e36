"""``up`` exports its model where its task knows how; a failure is said with the command for later."""

from types import SimpleNamespace

import pytest

from aggregator.store.layout import model_path
from broker.base.errors import Unavailable
from broker.process.signals import Interrupted
from ops.run import end_of_run, local_run
from ops.run.end_of_run import EXPORT, GaveUp
from ops.run.local_run import LocalRun


class Said(list):
    note = list.append


def run_in(folder):
    plan = SimpleNamespace(
        run_dir=folder,
        shards={"aggregator": 0},
        store_of=lambda name: folder / "store",
        redis_url="redis://127.0.0.1:1",
    )
    return LocalRun(plan=plan, started_s=0.0, resumed=False, dashboard=None, as_called=lambda command: command)


@pytest.fixture(autouse=True)
def nothing_to_report(monkeypatch):
    monkeypatch.setattr(LocalRun, "report", lambda _run, status, _judged: {"exit": status})


@pytest.mark.parametrize(
    "err", [GaveUp("export ended: no torch; the end of its log"), Unavailable("x", definite=True), Interrupted(2)]
)
def test_a_failing_export_is_said_with_the_command_for_later_and_costs_the_run_nothing(tmp_path, monkeypatch, err):
    monkeypatch.setattr(local_run, "export_model", lambda *_: (_ for _ in ()).throw(err))
    run, display = run_in(tmp_path), Said()
    run.export_model(({}, {}), display, None)
    assert run.exported == ""
    assert f"the model is not exported (later: atoll export {tmp_path} --hf DIR): " in display[0]
    assert run.undone == [end_of_run.in_short(display[0])]


def test_it_is_exported_only_where_islands_have_brought_the_files_and_in_place_of_an_older_one(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(end_of_run, "run_to_the_end", lambda specs, *_: ran.extend(specs))
    run = run_in(tmp_path)
    run.export_model(({}, {}), Said(), None)
    assert (run.exported, ran) == ("", [])
    model_path(tmp_path / "store").mkdir(parents=True)
    (tmp_path / EXPORT).mkdir()
    run.export_model(({}, {}), Said(), None)
    assert run.exported == str(tmp_path / EXPORT)
    assert not (tmp_path / EXPORT).exists()
    assert ran[0].command[-4:] == ["export", str(tmp_path), "--hf", str(tmp_path / EXPORT)]
    assert (tmp_path / "report.json").is_file(), "the card has its metrics"
