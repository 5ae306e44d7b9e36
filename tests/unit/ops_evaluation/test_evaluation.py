"""Following a run: what is evaluated when, what a restart takes up again, and how it ends."""

import json
import os
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest

from aggregator.ledger.ledger import tokens_trained
from broker.base.errors import ConfigError, Unavailable
from islands.tasks.benchmarks import Judgement
from ops import cli
from ops.evaluation.curve_file import CurveFile, read_points
from ops.evaluation.follower import Follower
from ops.models.global_model import Which
from ops.story import curve


def model(tokens):
    named = {"digest": f"model of {tokens}", "run_id": "demo"}
    return SimpleNamespace(tokens=tokens, versions=(tokens // 10,), tensors={"w": tokens}, **named)


class Run:
    """A run whose newest model has the next of these tokens each time that somebody waits; None: there is no model."""

    def __init__(self, *tokens, ends="ended"):
        self._tokens, self._ends, self._at = tokens, ends, 0

    def sleep(self, seconds):
        assert seconds > 0
        self._at += 1

    def tokens(self):
        return self._tokens[self._at]

    def model(self, which=Which.NEWEST):
        now = self.tokens()
        return None if now is None else model(0 if which is Which.SEED else now)

    def has_ended(self):
        return self._is_over("ended")

    def is_abandoned(self):
        return self._is_over("abandoned")

    def _is_over(self, how):
        return self._ends == how and self._at == len(self._tokens) - 1


class Told:
    """What the follower says, publishes, and asks to be judged."""

    def __init__(self):
        self.lines, self.published, self.judged = [], [], []

    def judge(self, tensors, source):
        assert source == "run demo"
        self.judged.append(tensors["w"])
        return Judgement(metrics={"loss": 1000.0 - tensors["w"]}, better={"loss": "min"})


def follow(directory, run, *, judge=None):
    told = Told()
    with closing(CurveFile(directory)) as file:
        judge, publish, say = judge or told.judge, told.published.append, told.lines.append
        Follower(run, file, every=100, judge=judge, publish=publish, say=say, sleep=run.sleep).follow()
    return told


def test_version_0_each_multiple_and_the_last_model_are_evaluated(tmp_path):
    told = follow(tmp_path, Run(None, None, 0, 40, 110, 190, 450, 460, 480))
    assert told.judged == [0, 110, 450, 480]
    points = read_points(tmp_path)
    assert [each.tokens for each in points] == told.judged
    assert [each.metrics["loss"] for each in points] == [1000.0, 890.0, 550.0, 520.0]
    assert told.lines[-1] == "evaluated at 480 tokens: loss 520.000"
    assert told.published[-1] == points[-1]


@pytest.mark.parametrize("stopped_after", range(1, 6))
def test_after_a_restart_no_model_is_evaluated_twice(tmp_path, stopped_after):
    steps = (0, 110, 190, 210, 330, 340)
    first = follow(tmp_path, Run(*steps[:stopped_after], ends="abandoned")).judged
    again = follow(tmp_path, Run(*steps[stopped_after - 1 :])).judged
    assert len(set(first + again)) == len(first + again)
    assert set(first + again) >= {0, 110, 210, 330, 340}


def test_a_run_that_was_never_seeded_ends_without_a_point_and_one_that_was_evaluated_costs_nothing(tmp_path):
    assert follow(tmp_path, Run(None, None, ends="abandoned")).judged == []
    assert read_points(tmp_path) == []
    assert follow(tmp_path, Run(0, 130)).judged == [0, 130]
    assert follow(tmp_path, Run(130)).judged == []


def test_once_the_newest_model_is_evaluated_even_if_it_was_before(tmp_path):
    follow(tmp_path, Run(0, 130))
    told, run = Told(), Run(130)
    with closing(CurveFile(tmp_path)) as file:
        follower = Follower(run, file, every=100, judge=told.judge, publish=told.published.append, say=print)
        assert follower.once().tokens == 130
        assert [each.tokens for each in read_points(tmp_path)] == [0, 130, 130]
        empty = Follower(Run(None), file, every=100, judge=told.judge, publish=print, say=print)
        with pytest.raises(Unavailable, match="the run has no model yet"):
            empty.once()
    assert told.judged == [130]


def test_what_cannot_be_written_is_told_once_and_evaluation_goes_on(tmp_path, monkeypatch):
    def full(self, point):
        self.points.append(point)
        raise Unavailable("cannot write curve: No space left; free space", definite=True)

    monkeypatch.setattr(CurveFile, "append", full)
    told = follow(tmp_path, Run(0, 110, 250))
    assert told.judged == [0, 110, 250]
    assert [line for line in told.lines if "No space left" in line] == told.lines[:1]


def test_a_model_of_which_nothing_can_be_measured_is_an_error(tmp_path):
    def judge(tensors, source):
        raise ConfigError("model", source, "lacks everything")

    with pytest.raises(ConfigError, match="lacks everything"):
        follow(tmp_path, Run(0, 10), judge=judge)


def test_a_line_that_a_crash_cut_short_is_no_point_and_spoils_no_other(tmp_path):
    follow(tmp_path, Run(0, 130))
    path = tmp_path / curve.FILE
    path.write_bytes(path.read_bytes() + b'{"tokens": 140, "met')
    follow(tmp_path, Run(150, 160))
    assert [each.tokens for each in read_points(tmp_path)] == [0, 130, 160]
    assert json.loads(path.read_text().splitlines()[-1])["tokens"] == 160


def test_two_do_not_follow_one_run(tmp_path):
    with closing(CurveFile(tmp_path)), pytest.raises(ConfigError, match="another process follows this run already"):
        CurveFile(tmp_path)
    CurveFile(tmp_path).close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--follow", "nowhere"], "follow = 'nowhere': must be the directory of a run"),
        (["--follow", "store"], "config = None: is needed where RUN_DIR is a store by itself; name the task"),
        (["--follow", "store", "--every", "0"], "every = 0: must be at least 1 token, such as 500K"),
        (["--follow", "store", "--every", "few"], "every = 'few': must be a whole number, such as 5000 or 5K"),
        (["--model", "x", "--every", "5"], "every = '5': goes with --follow RUN_DIR"),
        (["--follow", "run", "--config", "c.toml"], "config = 'c.toml': does not go with the directory of a run"),
        (["--follow", "run", "--benchmark", "json"], "benchmark = 'json': must read package.module:function"),
        (["--follow", "run", "--benchmark", "jsom:x"], "benchmark = 'jsom:x': there is no module jsom"),
        (["--follow", "run", "--benchmark", "json:x"], "benchmark = 'json:x': module json has no function x"),
        (["--follow", "run", "--benchmark", "os:getpid"], "benchmark = 'os:getpid': must take the parameters alone"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, monkeypatch, capsys, words, said):
    (tmp_path / "store" / "fragments").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text('[run]\nrun_id = "demo"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.nice", lambda by: 0)
    monkeypatch.setattr("os.environ", dict(os.environ))
    assert cli.main(["evaluate", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"atoll: {said}")
    assert err.count("\n") == 1


def test_the_tokens_of_a_commit_are_those_of_all_lives():
    def life(start, last):
        return {"life": [0, start, 9, last, False], "merged": []}

    accounts = {"a": {"3": life(700, 900)}, "b": {"1": life(0, 50)}}
    assert tokens_trained({"past": {"a": [[2, 10, 700, 9, 600], 650, {}]}, "accounts": accounts}) == 700 + 200 + 50
    assert tokens_trained({}) == 0


def test_the_command_limits_threads_before_anything_that_computes_is_loaded():
    code = "import sys, ops.evaluation.command; print({'numpy', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "set()", done.stderr
