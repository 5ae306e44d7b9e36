"""Several ranks of one island of the Hugging Face task: they train as one process does, and end and return together."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("peft")
pytest.importorskip("datasets")

from tests.hub import RUN, Hub
from tests.local_run import Process, descendants, environment, is_alive, wait_for
from tests.several_hosts import merged_of
from tests.torch import small_models

PATIENCE_S = 150.0  # of one test; nothing here depends on how long it takes
pytestmark = pytest.mark.timeout(400)
LORA = {"lora_rank": 2, "lora_targets": "q_proj,v_proj"}


@pytest.fixture
def variables(tmp_path):
    small_models.llama(tmp_path / "llama")
    small_models.texts(tmp_path / "texts.jsonl")
    found = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    return found | {"TMPDIR": os.environ["TMPDIR"]}


def options(tmp_path, **changes):
    usual = {"model": str(tmp_path / "llama"), "data": str(tmp_path / "texts.jsonl"), "held_out": "0.25"}
    return usual | {"sequence_length": 16, "batch": 8, "learning_rate": 3e-3} | changes


@pytest.mark.full("starts three processes that load PyTorch")
def test_two_ranks_lose_and_learn_what_one_process_does_with_the_same_batches(tmp_path, variables):
    small_models.bert(tmp_path / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    pairs = {"model": str(tmp_path / "bert"), "data": str(small_models.pairs(tmp_path / "pairs.jsonl"))}
    cases = {
        "whole": options(tmp_path),
        "adapters": options(tmp_path, **LORA, accumulation=2),
        "contrastive": options(tmp_path, **pairs, objective="contrastive"),
    }
    both = {f"{name} {way}": {**given, "spread": way} for name, given in cases.items() for way in ("ddp", "fsdp")}
    for ranks, tasks in ((1, cases), (2, both)):
        spec = {"ranks": ranks, "steps": 6, "tasks": tasks, "out": str(tmp_path)}
        command = [sys.executable, "-m", "tests.hf_ranks", json.dumps(spec)]
        done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr[-3000:]
    for name in both:
        one, two = np.load(tmp_path / f"{name.partition(' ')[0]}.npz"), np.load(tmp_path / f"{name}.npz")
        assert one.keys() == two.keys()
        for key in one:
            np.testing.assert_allclose(two[key], one[key], rtol=1e-5, atol=3e-6, err_msg=f"{name}: {key}")


def island(tmp_path, hub, name, variables, **changes):
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    values = {"task": "islands.hf:task", "run_id": RUN, "broker": hub.address, "island_id": name}
    values["pace"] = 1.0 if name == "b" else 0.1  # the run must not end before the other has come back
    values |= {"state_dir": str(folder / "state"), "checkpoint_interval_s": 0.5, "donor_wait_s": 0.0}
    tables = {"island": values, "task": options(tmp_path, **changes)}
    lines = [
        f"[{table}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in of.items()) for table, of in tables.items()
    ]
    (folder / "island.toml").write_text("".join(lines))
    return Process(folder, "island", "--config", folder / "island.toml", **variables)


@pytest.mark.full("starts five processes that load PyTorch")
@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_an_island_starts_its_ranks_ends_with_a_lost_one_and_goes_on_when_started_anew(tmp_path, variables, spread):
    store, two = tmp_path / "store", {"ranks": 2, "spread": spread, **(LORA if spread == "fsdp" else {})}
    one = {name: value for name, value in two.items() if name not in ("ranks", "spread")}
    with Hub(store, islands=2, sync_interval=4, total_tokens=50_000) as hub:
        with island(tmp_path, hub, "b", variables, **one) as other:
            with island(tmp_path, hub, "a", variables, **two) as first:
                checkpoint = tmp_path / "a" / "state" / "a.checkpoint"
                ready = lambda: merged_of(store, "a", 1) and checkpoint.exists()  # noqa: E731
                wait_for(ready, "merge of the island of two ranks", PATIENCE_S, evidence=lambda: first.err[-3000:])
                (rank,) = (pid for pid, line in descendants(first.pid).items() if "island.toml" in line)
                os.kill(rank if spread == "ddp" else first.pid, signal.SIGKILL)
                if spread == "ddp":
                    assert first.wait(PATIENCE_S) == 75
                    assert f"rank 1 of this island, process {rank}, was ended by SIGKILL" in first.err
                    assert "start all its hosts again" in first.err
                wait_for(lambda: not is_alive(rank), "end of the other rank", PATIENCE_S)
            with island(tmp_path, hub, "a", variables, **two) as again:
                for each in (again, other):
                    assert each.wait(PATIENCE_S) == 0, each.err[-3000:]
                assert "island.restored" in again.err
                assert "optimizer=checkpoint" in again.err
        books = hub.tokens()
    assert books["merged"] + sum(books["wasted"].values()) == books["trained"] >= 50_000
    step, tokens = re.findall(r"island.left .*step=(\d+) tokens=(\d+)", again.err)[0]
    assert int(tokens) == 8 * 16 * int(step), "two ranks count a batch once"
