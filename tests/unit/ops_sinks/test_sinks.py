"""Figures for other tools: the points that a tape comes to, where a flag says they go, what a library has already."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest

from broker.base.errors import ConfigError
from ops import cli
from ops.sinks import target as targets
from ops.sinks.figures import Figures
from ops.sinks.rows import Row, row
from ops.sinks.sink import NewRows
from ops.sinks.target import Kind, Target, check_installed, target_of

CONFIG = {"heartbeat_interval_s": 0.5, "suspect_after_s": 2.0, "dead_after_s": 5.0, "total_tokens": 1000}


def beat(now_s, sender, tokens, loss, step_time_s=0.1):
    body = {"inner_step": tokens // 10, "tokens": tokens, "loss": loss, "step_time_s": step_time_s}
    return {"now_s": now_s, "event": "received", "kind": "heartbeat", "sender": sender, "body": body}


def note(now_s, name, **fields):
    return {"now_s": now_s, "note": name, "fields": fields}


def committed(now_s, version, islands, live, staleness_mean):
    contributions = [{"island": name, "staleness": staleness_mean} for name in ("a", "b")[:islands]]
    what = {"fragment": 0, "version": version, "round": version, "islands": islands, "live": live}
    return note(now_s, "version.committed", **what, staleness_mean=staleness_mean, contributions=contributions)


TAPE = [
    {"tape": 11, "now_s": 100.0, "epoch": 1, "config": CONFIG, "record": None, "commits": []},
    note(100.1, "island.joined", island="a", incarnation=1),
    note(100.1, "island.joined", island="b", incarnation=1),
    note(100.2, "run.seeded"),
    beat(100.5, "a", 10, 3.0),
    beat(100.6, "b", 20, 2.0),
    committed(101.0, 1, 2, 2, 0.5),
    committed(102.0, 2, 1, 2, 2.0),
    note(102.5, "contribution.refused", island="a", fragment=0, reason="stale", detail="too old"),
    beat(103.0, "a", 100, 2.0),
    beat(104.9, "b", 120, 1.0),
    beat(105.1, "a", 180, 1.5),
    beat(107.0, "b", 240, 1.0),
    note(108.0, "run.ended"),
    beat(109.0, "b", 260, 0.5),
]


def samples_of(lines, every_s=5.0):
    figures = Figures(every_s)
    return [sample for line in lines if (sample := figures.take(line)) is not None]


def test_a_tape_comes_to_samples_of_loss_speed_versions_staleness_participation_and_refusals():
    first, last = samples_of(TAPE)
    assert (first.run_s, first.tokens) == (pytest.approx(5.1), 300)
    assert first.values["fleet/loss"] == pytest.approx((1.5 + 1.0) / 2)
    assert first.values["fleet/tokens_per_s"] == pytest.approx(300 / 5.1)
    assert first.values["fleet/islands"] == 2
    assert first.values["fleet/model_version"] == 2
    assert first.values["fleet/staleness"] == pytest.approx((2 * 0.5 + 1 * 2.0) / 3)
    assert first.values["fleet/participation"] == pytest.approx(3 / 4)
    assert first.values["fleet/refusals"] == first.values["fleet/refusals/stale"] == 1
    assert first.values["islands/a/tokens_per_s"] == pytest.approx(180 / 5.1)
    assert first.values["islands/a/refusals"] == 1
    # The run's end makes the last one, and what comes behind it none.
    assert (last.run_s, last.tokens) == (pytest.approx(8.0), 420)
    assert last.values["fleet/tokens_per_s"] == pytest.approx(120 / 2.9)
    assert last.values["fleet/staleness"] is None  # no version since
    assert last.values["fleet/refusals"] == 1  # counted from the beginning


def test_an_island_that_falls_silent_has_a_gap_and_the_fleet_goes_on_without_it():
    silent = [beat(105.2 + t, "b", 130 + 10 * t, 1.0) for t in range(20)]
    last = samples_of([*TAPE[:-3], *silent])[-1]
    assert last.values["fleet/islands"] == 1
    assert last.values["fleet/loss"] == 1.0
    assert "islands/a/loss" not in last.values


def test_nothing_is_sampled_while_nothing_is_trained_and_steps_only_grow_and_are_the_same_whenever_they_are_read():
    rng = random.Random(7)
    tokens, lines = {"a": 0, "b": 0}, TAPE[:4]
    for k in range(400):
        name = rng.choice("ab")
        tokens[name] = max(0, tokens[name] + rng.choice((0, 10, 30, -20)))  # a restart gives some up
        lines = [*lines, beat(101 + k / 4, name, tokens[name], 1.0)]
    samples = samples_of(lines, every_s=1.0)
    assert len(samples) > 20
    assert all(a.tokens < b.tokens for a, b in itertools.pairwise(samples))
    assert samples_of(lines, every_s=1.0) == samples
    assert [each.tokens for each in samples_of(TAPE, every_s=0.1)] == [10, 30, 120, 220, 300, 420]


def test_a_row_has_finite_values_and_its_marker_last():
    values = {"fleet/tokens": 1, "fleet/loss": math.nan, "fleet/x": math.inf, "fleet/y": 2, "z": None}
    made = row("fleet", 7, 12.5, values)
    assert list(made.values.items()) == [("fleet/y", 2.0), ("fleet/tokens", 7.0)]


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
