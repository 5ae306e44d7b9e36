"""Trainers of Hugging Face and TRL are islands by a callback: workers, accumulation, schedulers, streams."""

import collections

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

pytest.importorskip("trl")

from datasets import load_dataset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import islands.torch
from broker.base.errors import ConfigError
from islands.torch.trainer import Atoll, Shared
from tests.hub import RUN, WAIT_S, Hub
from tests.torch import small_models

LENGTH, EXAMPLES = 8, 40
pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]  # of forks, and of libraries


class Numbered(Dataset):
    """Examples that carry their number, which the model is shown as its first tokens."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, number):
        ids = torch.full((LENGTH,), 5 + number % 7)
        ids[0], ids[1] = number // 8, number % 8
        return {"input_ids": ids, "labels": ids}


class Stream(IterableDataset):
    def __iter__(self):
        return (Numbered()[i] for i in range(EXAMPLES))


@pytest.fixture
def model(tmp_path):
    return LlamaForCausalLM.from_pretrained(small_models.llama(tmp_path / "model"))


def trainer_of(model, tmp_path, atoll, dataset, **options):
    """A trainer, and the numbers of the examples that its model is shown."""
    seen = []

    def note(module, args, given):
        if module.training:
            seen.extend((given["input_ids"][:, 0] * 8 + given["input_ids"][:, 1]).tolist())

    model.register_forward_pre_hook(note, with_kwargs=True)
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_steps": 1000, "save_strategy": "no"}
    usual |= {"report_to": "none", "disable_tqdm": True, "logging_steps": 2, "use_cpu": True}
    args = TrainingArguments(output_dir=str(tmp_path / "out"), **usual | options)
    return Trainer(model=model, args=args, train_dataset=dataset, callbacks=[atoll]), seen


def callback(hub, examples, **options):
    return Atoll(hub.address, run=RUN, timeout_s=WAIT_S, tokens_per_step=examples * LENGTH, **options)


@pytest.mark.parametrize(
    ("workers", "start"),
    [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.full("starts processes anew"))],
)
def test_examples_are_dealt_once_an_epoch_whatever_loads_them(tmp_path, model, monkeypatch, workers, start):
    if start == "spawn":
        usual = torch.utils.data.DataLoader.__init__

        def init(self, *args, **options):
            usual(self, *args, **options | {"multiprocessing_context": start if options.get("num_workers") else None})

        monkeypatch.setattr(torch.utils.data.DataLoader, "__init__", init)
    with Hub(tmp_path / "store", total_tokens=20 * 8 * LENGTH) as hub:
        options = {"gradient_accumulation_steps": 2, "dataloader_num_workers": workers}
        trainer, seen = trainer_of(model, tmp_path, callback(hub, 8), Numbered(), **options)
        trainer.train()
        books = hub.tokens()
    counts = collections.Counter(seen)
    assert set(counts) == set(range(EXAMPLES))
    if not workers:  # which look ahead, here past the few batches of a first block of data
        assert max(counts.values()) - min(counts.values()) <= 1
    assert books["trained"] == books["merged"] == len(seen) * LENGTH >= 20 * 8 * LENGTH


def test_a_stream_is_dealt_by_shared_and_refused_alone(tmp_path, model):
    with Hub(tmp_path / "store", total_tokens=10 * 4 * LENGTH) as hub:
        atoll = callback(hub, 4)
        trainer, _ = trainer_of(model, tmp_path, atoll, Stream())
        with pytest.raises(ConfigError, match=r"train_dataset = 'Stream': .*Shared\(dataset, atoll"):
            trainer.train()
        atoll.island.leave()
        atoll = callback(hub, 4, island_id="b")
        trainer, seen = trainer_of(model, tmp_path, atoll, Shared(Numbered(), atoll, batch=4))
        trainer.train()
        assert len(seen) >= 10 * 4


def test_sft_of_trl_is_an_island_by_the_same_callback(tmp_path):
    folder, data = small_models.llama(tmp_path / "model"), small_models.texts(tmp_path / "texts.jsonl")
    rows = load_dataset("json", data_files=str(data), split="train", cache_dir=str(tmp_path / "cache"))
    with Hub(tmp_path / "store", total_tokens=10 * 4 * 16) as hub:
        atoll = Atoll(hub.address, run=RUN, timeout_s=WAIT_S, tokens_per_step=4 * 16)
        options = {"max_length": 16, "per_device_train_batch_size": 4, "max_steps": 500, "save_strategy": "no"}
        options |= {"report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True}
        args = SFTConfig(output_dir=str(tmp_path / "out"), **options)
        SFTTrainer(model=str(folder), args=args, train_dataset=rows, callbacks=[atoll]).train()
        assert atoll.island.done
        assert hub.tokens()["merged"] >= 10 * 4 * 16


def test_a_scheduler_goes_on_where_a_killed_process_was(tmp_path):
    def begun(hub):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        given = {"run": RUN, "timeout_s": WAIT_S, "tokens_per_step": 4, "island_id": "a", "donor_wait_s": 0}
        given |= {"scheduler": scheduler, "state_dir": tmp_path / "state", "background_copies": False}
        return islands.torch.join(hub.address, model, optimizer, **given), model, optimizer, scheduler

    with Hub(tmp_path / "store") as hub:
        island, model, optimizer, scheduler = begun(hub)
        for _ in range(5):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            scheduler.step()
            island.step(0.5)
        island.save()
        island.leave("as if it were killed")
        again, _, optimizer, later = begun(hub)
        assert again.restored == "checkpoint"
        assert later.state_dict() == scheduler.state_dict()
        assert later.get_last_lr() == [0.25] == [group["lr"] for group in optimizer.param_groups]
        later.step()
        assert later.get_last_lr() == [0.125]
        again.leave()
        with pytest.raises(ConfigError, match=r"scheduler = 'str': must be a torch\.optim"):
            islands.torch.join(hub.address, model, optimizer, scheduler="x")
