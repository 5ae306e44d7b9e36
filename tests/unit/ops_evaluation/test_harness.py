"""Benchmarks of lm-evaluation-harness: how they are named, what is refused, and the process that runs them."""

import json
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from broker.base.errors import ConfigError
from islands.tasks.benchmarks import Measured
from ops import cli
from ops.evaluation import harness, harness_worker
from ops.run import local_plan

#: A stand-in for the process: it knows what it was asked for, and does with a model what the model's folder says.
WORKER = """
import json, sys
wanted = json.loads(sys.argv[1])
print(json.dumps({"error": "no task x"} if "x" in wanted["names"] else {"tasks": []}), flush=True)
for line in sys.stdin:
    what = open(line.strip() + "/what").read()
    if what == "die":
        sys.exit("RuntimeError: out of memory")
    answer = {"rows": [["mc/acc", 0.5, "max", 0.1], ["mc/f1", wanted["limit"], "", None]]}
    print(json.dumps({"error": "ValueError: Offline\\nno"} if what == "fail" else answer), flush=True)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Starts the stand-in in place of the harness; a model is a word that it finds in the model's folder."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(harness, "_WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(harness, "_python", lambda path: sys.executable)

    def save(word, folder):
        folder.mkdir()
        (folder / "what").write_text(word)

    monkeypatch.setattr(harness, "saver", lambda path, task: save)


def test_a_benchmark_names_tasks_files_or_a_folder_and_a_limit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mc.yaml").touch()
    found = harness.parsed("lm_eval:piqa+arc_easy+mine/mc.yaml,100")
    file = str(tmp_path / "mine" / "mc.yaml")
    assert found == {"names": ["piqa", "arc_easy"], "files": [file], "folder": None, "limit": 100}
    found = harness.parsed("lm_eval:./mine")
    assert found == {"names": [], "files": [], "folder": str(tmp_path / "mine"), "limit": None}
    assert harness.parsed("lm_eval:mine")["names"] == ["mine"]
    assert [harness.check(path) for path in ("mine:lm_eval", "lm_eval", "lm_eval:piqa")] == [False, False, True]


REFUSED = [
    ("lm_eval:", "must read lm_eval:TASKS[,LIMIT]"),
    ("lm_eval:piqa+", "must read lm_eval:TASKS[,LIMIT]"),
    ("lm_eval:piqa,many", "LIMIT is 'many': must be a whole number of examples above 0"),
    ("lm_eval:piqa,arc_easy", "several tasks are joined by +"),
    ("lm_eval:piqa,0", "LIMIT is '0'"),
    ("lm_eval:nowhere/mc.yaml", "there is no task file and no folder 'nowhere/mc.yaml'"),
    ("lm_eval:a/mc.yaml+b/mc.yaml", "has task files of several folders"),
    ("perplexity:nowhere.txt", "there is no file 'nowhere.txt'"),
]


@pytest.mark.parametrize(("path", "why"), REFUSED)
def test_what_does_not_read_as_one_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, capsys, path, why):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "run"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mc.yaml").touch()
    assert cli.main(["evaluate", "run", "--benchmark", path]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"atoll: benchmark = '{path}': ")
    assert why in said


@pytest.mark.parametrize("path", ["lm_eval:piqa", "perplexity:model.safetensors"])
def test_a_task_without_a_form_for_them_is_refused_and_no_environment_is_built(tmp_path, monkeypatch, capsys, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(harness, "Harness", None)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.toml").write_text('[island]\ntask = "examples.numpy_task:task"\n')
    words = ["evaluate", "--config", "config.toml", "--model", "model.safetensors", "--benchmark", path]
    assert cli.main(words) == 2
    assert f"benchmark = '{path}': " in (said := capsys.readouterr().err)
    assert "islands.hf:task" in said


def test_up_says_where_they_are_for():
    plan = SimpleNamespace(
        up=SimpleNamespace(benchmark=["lm_eval:piqa"], pace=()),
        aggregator=SimpleNamespace(islands=1, profile=None),
        island=SimpleNamespace(task="examples.numpy_task:task"),
        task={},
        run_dir=Path("runs/a"),
    )
    with pytest.raises(ConfigError, match="evaluate --follow runs/a --benchmark lm_eval:piqa"):
        local_plan._check_islands(plan)


def test_figures_come_with_their_errors_and_a_failure_with_its_reason(stand_in, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with closing(harness.Harness("lm_eval:mc,7")) as found:
        measured = found.judge(None)
        expected = {"mc/acc": Measured(0.5, "max", 0.1), "mc/f1": Measured(7, "", None)}
        assert measured("good") == expected
        with pytest.raises(ConfigError, match=r"ValueError: Offline no \(HF_HUB_OFFLINE is set: fetch it before"):
            measured("fail")
        with pytest.raises(ConfigError, match="ended with status 1: RuntimeError: out of memory"):
            measured("die")
        assert measured("good") == expected, "it is started again"
    with pytest.raises(ConfigError, match="no task x"):
        harness.Harness("lm_eval:x")


class Manager:
    """What the harness knows: two tasks, one with a metric that it does not know; a folder has one."""

    def __init__(self, *, include_path, include_defaults):
        self.task_index = self.all_tasks = ["arc_easy", "vague"] if include_defaults else []
        self.all_subtasks = ["mc"] if include_path == "mine" else []

    def load(self, names):
        if names == ["bad.yaml"]:
            raise KeyError("tset")
        config = SimpleNamespace(process_results=None)
        return {
            "tasks": {
                name: SimpleNamespace(config=config, _metric_fn_list={"m": None if name == "vague" else 1})
                for name in names
            }
        }


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"names": ["arc_esy"]}, "has no task arc_esy (did you mean arc_easy?)"),
        ({"names": ["vague"]}, "the task vague cannot be loaded: it has the unknown metric m"),
        ({"files": ["bad.yaml"]}, "the task bad.yaml cannot be loaded: KeyError: 'tset'"),
        ({"folder": "empty"}, "empty has no task file"),
    ],
)
def test_the_worker_names_what_is_wrong_with_a_task(monkeypatch, wanted, why):
    modules = {"lm_eval": ModuleType("lm_eval"), "lm_eval.tasks": SimpleNamespace(TaskManager=Manager)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    nothing = {"names": [], "files": [], "folder": None, "limit": None}
    assert harness_worker._found(**nothing | {"names": ["arc_easy"], "folder": "mine"})[1] == ["arc_easy", "mc"]
    with pytest.raises(LookupError) as err:
        harness_worker._found(**nothing | wanted)
    assert why in str(err.value)


def test_the_worker_gives_a_row_for_each_task_and_metric():
    results = {
        "mc": {"alias": "mc", "sample_len": 4, "acc,none": 0.5, "acc_stderr,none": 0.25},
        "gsm": {"exact_match,strict": 1, "exact_match_stderr,strict": "N/A", "name": "gsm"},
    }
    found = {"results": results, "higher_is_better": {"mc": {"acc": True}, "gsm": {"exact_match": None}}}
    rows = [["mc/acc", 0.5, "max", 0.25], ["gsm/exact_match/strict", 1.0, "", None]]
    assert json.loads(json.dumps(harness_worker._rows(found))) == rows
