"""A run of a language model, followed by lm-evaluation-harness: its figures are those of the harness by itself."""

import json
import os
import random
import subprocess

import pytest

from ops import launcher
from ops.evaluation.curve_file import read_points
from tests.local_run import Process, Up, ops, wait_for

pytest.importorskip("peft")
from tests.torch import small_models

ENVIRONMENT = launcher.ROOT / launcher.LM_EVAL_ENVIRONMENT
OFFLINE = {"HF_HUB_OFFLINE": "1"}
TASK = """
task: mc
dataset_path: json
dataset_kwargs: {data_files: {test: mc.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
"""

pytestmark = [
    pytest.mark.full("a run, and lm-evaluation-harness beside it"),
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not (ENVIRONMENT / "bin" / "python").exists(),
        reason=f"{ENVIRONMENT.name} is not built: evaluate RUN_DIR --benchmark lm_eval:TASKS builds it",
    ),
]


def questions_in(folder):
    """Writes a task of one's own: which word comes next; every third key is wrong, so that nobody gets all right."""
    folder.mkdir()
    (folder / "mc.yaml").write_text(TASK)
    rows, draw = [], random.Random(1)
    for i in range(40):
        k = draw.randrange(len(small_models.TEXT) - 4)
        right = small_models.TEXT[k + 3]
        choices = [right, *draw.sample([word for word in small_models.TEXT if word != right], 2)]
        rows.append({"query": " ".join(small_models.TEXT[k : k + 3]), "choices": choices, "gold": int(i % 3 == 0)})
    (folder / "mc.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "mc.yaml"


def by_hand(model, task):
    """Returns what the harness's own command says of a directory: (accuracy, its standard error)."""
    out = model.parent / "by-hand.json"
    words = ["--model", "hf", "--model_args", f"pretrained={model}", "--tasks", task.name, "--output_path", out]
    command = [ENVIRONMENT / "bin" / "python", "-m", "lm_eval", *words]
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | OFFLINE
    subprocess.run(command, cwd=task.parent, env=variables, check=True, capture_output=True, timeout=300)
    (found,) = model.parent.glob("by-hand*.json")
    results = json.loads(found.read_text())["results"]["mc"]
    return results["acc,none"], results["acc_stderr,none"]


def test_each_version_is_evaluated_beside_training_and_the_last_figures_are_those_of_the_harness_itself(tmp_path):
    model, texts = small_models.llama(tmp_path / "model"), small_models.texts(tmp_path / "texts.jsonl")
    task = questions_in(tmp_path / "tasks")
    options = [
        "--task-option",
        f"model={model}",
        f"data={texts}",
        "sequence_length=16",
        "batch=8",
        "learning_rate=3e-3",
    ]
    flags = ["--islands", 2, "--tokens", "60K", "--pace", "0.1", *options]
    benchmarks = ["--benchmark", f"lm_eval:{task}", "--benchmark", f"perplexity:{texts}"]
    with Up(tmp_path / "run", *flags, task="islands.hf:task", **OFFLINE) as up:
        wait_for(lambda: (tmp_path / "run" / "config.toml").exists(), "the run's directory")
        follow = ["evaluate", "--follow", tmp_path / "run", "--every", 1, *benchmarks]
        with Process(tmp_path / "follower", *follow, **OFFLINE) as follower:
            assert up.wait(600) == 0, up.err
            assert follower.wait(400) == 0, follower.err
    points = read_points(tmp_path / "run")
    assert len(points) >= 3
    for point in points:
        assert point.failed == {}
        named = {"loss", "mc/acc", "mc/acc_norm", "texts/tokens", "texts/nats_per_token", "texts/perplexity"}
        assert point.metrics.keys() == named
        assert point.stderr.keys() == {"mc/acc", "mc/acc_norm"}
    first, last = points[0], points[-1]
    assert dict(enumerate(last.versions)) == {int(p): v for p, v in up.report()["versions"].items()}
    assert last.metrics["mc/acc"] > first.metrics["mc/acc"]
    assert last.better["mc/acc"] == "max"
    assert ops("export", tmp_path / "run", "--hf", tmp_path / "hf", within_s=300, **OFFLINE).returncode == 0
    assert by_hand(tmp_path / "hf", task) == (last.metrics["mc/acc"], last.stderr["mc/acc"])

    once = ops("evaluate", tmp_path / "run", "--benchmark", f"lm_eval:{task.parent}/,5", within_s=300, **OFFLINE)
    assert once.returncode == 0, once.stderr
    assert f"at {last.tokens:,} tokens" in once.stdout
    assert "mc/acc_norm  " in once.stdout
    status = ops("status", tmp_path / "run", within_s=300)
    assert f"evaluated at {last.tokens:,} tokens: loss" in status.stdout
    assert f"mc/acc {read_points(tmp_path / 'run')[-1].metrics['mc/acc']:.3f} ±" in status.stdout
    for benchmark, why in {
        f"lm_eval:{task}+mcc": "lm-evaluation-harness has no task mcc",
        "lm_eval:piqa": "Couldn't reach 'baber/piqa' on the Hub (OfflineModeIsEnabled) (HF_HUB_OFFLINE is set",
    }.items():
        refused = ops("evaluate", tmp_path / "run", "--benchmark", benchmark, within_s=300, **OFFLINE)
        assert refused.returncode == 2, refused.stderr
        assert why in refused.stderr
