"""Figures for other tools: where a flag says they go, and what a library has already."""

from types import SimpleNamespace

import pytest

from broker.base.errors import ConfigError
from ops import cli
from ops.sinks import target as targets
from ops.sinks.sink import NewRows
from ops.sinks.target import Kind, Target, check_installed, target_of
from ops.story.rows import Row


def test_only_rows_that_the_library_lacks_are_written_each_stream_for_itself():
    """It has fleet up to step 20."""
    rows = []
    new = NewRows(SimpleNamespace(written=lambda stream: 20 if stream == "fleet" else -1, write=rows.append))
    steps = [(stream, step) for step in (0, 10, 20, 30) for stream in ("fleet", "evaluation")]
    given = [Row(stream=stream, step=step, at=0.0, values={}) for stream, step in steps]
    assert [new.write(each) for each in given + given].count(True) == 5
    assert [(each.stream, each.step) for each in rows] == [
        each for each in steps if each[0] != "fleet" or each[1] == 30
    ]


def test_a_target_is_a_library_and_a_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert target_of("tensorboard:board") == Target(kind=Kind.TENSORBOARD, place=str(tmp_path / "board"))
    assert str(target_of("wandb:team/project")) == "wandb:team/project"
    assert target_of("mlflow:http://127.0.0.1:5000").place == "http://127.0.0.1:5000"
    assert target_of("mlflow:").place == "http://tracking:5000"
    assert target_of("otlp:http://hub:4318").place == "http://hub:4318/v1/traces"
    assert target_of("otlp:https://hub/own/path").place == "https://hub/own/path"


@pytest.mark.parametrize(
    "text",
    [
        *("", "tensorboard", "tensorboard:", "wandb:", "mlflow:", "neptune:x", "wandb:a,mlflow:b"),
        *("otlp:", "otlp:localhost:4318", "otlp:grpc://hub:4317", "otlp:http://", "otlp:http://me:secret@hub:4318"),
    ],
)
def test_what_is_no_target_is_refused_with_the_cure(text, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError) as refused:
        target_of(text, field="log_to")
    assert refused.value.field == "log_to"
    assert len(refused.value.cure) > 10
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("kind", Kind)
def test_a_library_that_is_not_installed_is_said_with_its_package(kind, monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install .*{targets.PACKAGES[kind][-1]}$"):
        check_installed(Target(kind=kind, place="x"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{tmp}", "--to", "tensorboard:{tmp}/board"], "has no event tape"),
        (["--to", "tensorboard:{tmp}/board"], "name the directory of a run, or --redis URL"),
        (["{tmp}", "--to", "neptune:x"], "must be tensorboard:DIR"),
        (["--redis", "redis://127.0.0.1:1", "--to", "otlp:http://hub:4318"], "needs the directory of the run"),
        (["{tmp}", "--to", "tensorboard:x", "--every", "0"], "above 0"),
        (["{tmp}/none", "--to", "tensorboard:x"], "must be the directory of a run"),
    ],
)
def test_what_cannot_be_logged_is_said_with_the_cure(tmp_path, arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(targets, "find_spec", lambda name: True)
    assert cli.main(["log", *(each.format(tmp=tmp_path) for each in arguments)]) == 2
    assert said in capsys.readouterr().err
