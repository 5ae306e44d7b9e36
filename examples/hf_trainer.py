"""A Hugging Face ``Trainer`` as an island: :class:`Atoll` is a callback to copy, used at ``# atoll``.

    .venv-torch/bin/python -m examples.hf_trainer                        # a hub and one island
    .venv-torch/bin/python -m examples.hf_trainer tcp://127.0.0.1:7001   # another island, or any run that is there

It needs ``pip install transformers accelerate``. The model is a GPT-2 of two layers with random weights, the data are
bytes of Python's own library: nothing is fetched. The run says when training ends, so ``max_steps`` is only more than
enough, and the learning rate is constant.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import islands.torch  # atoll
from examples import local_hub
from examples.torch_loop import HISTORY, windows

BATCH, LENGTH = 16, HISTORY + 1


class Atoll(TrainerCallback):
    """Joins a run as training begins, steps with the optimizer, and leaves with the final parameters.

    Args:
        address: The broker's.
        tokens_per_step: Of a step of the optimizer, whatever it accumulates.
        **options: All else that :func:`islands.torch.join` takes.
    """

    def __init__(self, address: str, *, tokens_per_step: int, **options: Any) -> None:
        self.address, self.tokens, self.loss = address, tokens_per_step, None
        self.options = {"tokens_per_step": tokens_per_step, **options}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
        self.island = islands.torch.join(self.address, model, optimizer, **self.options)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.island.step(tokens=self.tokens, loss=self.loss)
        control.should_training_stop = control.should_training_stop or self.island.done

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        self.loss = logs.get("loss", self.loss)  # callbacks are told the loss only here, after the step

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.island.close()


class Shared(IterableDataset[Any]):
    """The examples of a dataset that are this island's: shuffled, and dealt among all islands, by the run.

    Args:
        dataset: With a length and examples by number.
        atoll: Which has joined when the first example is asked for.
        batch: Examples of an optimizer's step: ``per_device_train_batch_size`` times ``gradient_accumulation_steps``.
    """

    def __init__(self, dataset: Any, atoll: Atoll, batch: int) -> None:
        self.dataset, self.atoll, self.batch = dataset, atoll, batch

    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is None, "keep dataloader_num_workers at 0: the share of the data is in this process"
        for examples in islands.batches(self.dataset, self.atoll.island, batch=self.batch, collate=list):
            yield from examples


class Bytes(Dataset[Any]):
    """Texts of LENGTH bytes, as the Trainer takes them."""

    def __init__(self, step: int = 1) -> None:
        self.windows = windows()[::step]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        text = torch.from_numpy(self.windows[number].astype("int64"))
        return {"input_ids": text, "labels": text}


def main(address: str) -> None:
    """Trains until the run ends."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    atoll = Atoll(address, tokens_per_step=BATCH * LENGTH)  # atoll
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=BATCH,
                per_device_eval_batch_size=64,
                learning_rate=3e-3,
                lr_scheduler_type="constant",
                max_steps=1_000_000,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Shared(Bytes(), atoll, batch=BATCH),  # atoll
            eval_dataset=Bytes(step=20_000),
            callbacks=[atoll],  # atoll
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    print(f"loss on a sample: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with local_hub.at(local_hub.parser(__doc__).parse_args().address, tokens=100 * BATCH * LENGTH) as found:
        main(found)
