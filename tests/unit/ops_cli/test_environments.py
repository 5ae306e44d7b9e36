"""The launcher chooses the environment by what a command line is about."""

import os
import subprocess
import sys

import pytest

from ops import asked_task, launcher


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["up"], False),
        (["up", "--task", "islands.language:task"], False),
        (["up", "--task", "islands.hf:task", "--task-option", "model=m"], True),
        (["island", "--task=islands.hf:task"], True),
        (["up", "--task", "examples.torch_task:task"], True),
        (["up", "--task", "examples.finetune:task"], True),
        (["up", "--task", "examples.equinox_task:task"], False),
        (["up", "--task", "mine:task"], True),
        (["export", "run", "--hf", "out"], True),
        (["export", "hub", "--hf", "out"], True),
        (["export", "hub"], False),
        (["island", "--config", "fleet.toml"], True),
        (["hub", "--config", "fleet.toml"], False),
        (["status", "run"], False),
        (["status", "redis://nowhere:1", "tcp://a:7001"], False),
    ],
)
def test_pytorch_is_there_for_a_task_that_imports_it_and_for_a_run_of_such_a_task(tmp_path, monkeypatch, words, needed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import numpy\nimport torch\n")
    (tmp_path / "run").mkdir()
    for file in (tmp_path / "run" / "config.toml", tmp_path / "fleet.toml"):
        file.write_text('[island]\ntask = "islands.hf:task"\n')
    assert asked_task.needs_torch(words) is needed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("up --task islands.hf:task", "task.model = None: islands.hf:task needs this option"),
        ("up --task islands.hf:task --model m", "task.data = None: islands.hf:task needs this option"),
        ("up --task=islands.hf:task --model m --data a b", ""),
        ("up --task islands.hf:task --task-option model=m data=d lora_rnak=8", "lora_rnak = '8': "),
        ("up --task islands.hf:task --task-option model=m --task-option data=d", ""),
        ("island --join x.join --config fleet.toml", "task.data = None: islands.hf:task needs this option"),
        ("up --config fleet.toml --task-option data=d", ""),
        ("hub --config fleet.toml", ""),
        ("up --resume run --task islands.hf:task", ""),
        ("up --task mine:task", ""),
        ("up --task", ""),
        ("up --config gone.toml", ""),
        ("up --task islands.hf:task --help", ""),
        ("status", ""),
    ],
)
def test_a_wrong_option_of_a_task_is_said_before_an_environment_is_built(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.toml").write_text('[island]\ntask = "islands.hf:task"\n[task]\nmodel = "m"\n')
    found = asked_task.wrong_option(words.split())
    assert said in found
    assert bool(found) is bool(said)


def test_that_check_needs_the_standard_library_alone():
    """A bare checkout has no more: without site-packages, and before ``.venv`` is there."""
    code = "from ops.asked_task import wrong_option; print(wrong_option(['up', '--task', 'islands.hf:task']))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path = [{os.fspath(launcher.ROOT)!r}, *sys.path]; {code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "needs this option" in done.stdout, done.stderr
