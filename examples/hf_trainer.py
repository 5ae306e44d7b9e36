"""A Hugging Face ``Trainer`` as an island, by the callback :class:`islands.torch.trainer.Atoll`, at ``# atoll``.

    .venv-torch/bin/python -m examples.hf_trainer                        # a hub and one island
    .venv-torch/bin/python -m examples.hf_trainer tcp://127.0.0.1:7001   # another island, or any run that is there

It needs ``pip install transformers accelerate``. The model is a GPT-2 of two layers with random weights, the data are
bytes of Python's own library: nothing is fetched. The run says when training ends, so ``max_steps`` is only more than
enough, and the learning rate is constant.
"""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from examples import local_hub
from examples.torch_loop import HISTORY, windows
from islands.torch.trainer import Atoll  # atoll

BATCH, LENGTH = 16, HISTORY + 1


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
                dataloader_num_workers=2,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Bytes(),
            eval_dataset=Bytes(step=20_000),
            callbacks=[Atoll(address, tokens_per_step=BATCH * LENGTH)],  # atoll
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    print(f"loss on a sample: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with local_hub.at(local_hub.parser(__doc__).parse_args().address, tokens=100 * BATCH * LENGTH) as found:
        main(found)
