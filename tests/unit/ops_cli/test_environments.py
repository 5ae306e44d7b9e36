"""The launcher chooses the environment by what a command line is about."""

import pytest

from ops import launcher


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["up"], False),
        (["up", "--task", "islands.images:task"], False),
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
        (["status", "redis://nowhere:1", "tcp://a:7001"], False),
    ],
)
def test_pytorch_is_there_for_a_task_that_imports_it_and_for_a_run_of_such_a_task(tmp_path, monkeypatch, words, needed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import numpy\nimport torch\n")
    (tmp_path / "run").mkdir()
    for file in (tmp_path / "run" / "config.toml", tmp_path / "fleet.toml"):
        file.write_text('[island]\ntask = "islands.hf:task"\n')
    assert launcher.needs_torch(words) is needed
