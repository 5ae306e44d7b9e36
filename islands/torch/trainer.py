"""Makes a ``Trainer`` of Hugging Face or TRL an island, by the callback :class:`Atoll`.

from islands.torch.trainer import Atoll

trainer = Trainer(model, args, train_dataset=dataset, callbacks=[Atoll("paris.join", tokens_per_step=4096)])
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, Sampler, get_worker_info
from transformers import TrainerCallback

import islands
from broker.base.errors import ConfigError
from islands.torch.joining import join


class Atoll(TrainerCallback):  # type: ignore[misc]  # of no type where transformers is missing
    """Joins a run when training begins, counts optimizer steps, and leaves with the final parameters.

    A dataset with a length is dealt among the islands by the run, in another order in each epoch: the trainer keeps its
    loader, with any number of workers, and only the order in which this asks for examples is ours. Of a stream, or to
    deal it otherwise, give :class:`Shared`. The run ends training: ``max_steps`` is only more than enough.

    Args:
        address: The broker's, or the path of a join file.
        tokens_per_step: Tokens of one optimizer step, accumulated batches included.
        **options: All else that :func:`islands.torch.join` takes.
    """

    def __init__(
        self, address: str | os.PathLike[str] | Sequence[str], *, tokens_per_step: int, **options: Any
    ) -> None:
        self.address, self.options = address, {"tokens_per_step": tokens_per_step, **options}
        self.island: Any = None  # once training has begun
        self._loss: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Joins with the trainer's model, optimizer and scheduler."""
        options = {"scheduler": given.get("lr_scheduler"), **self.options}
        self.island = join(self.address, given["model"], given["optimizer"], **options)
        loader = given["train_dataloader"]
        if isinstance(loader.dataset, Shared):
            return
        sampler = getattr(loader, "batch_sampler", None)
        if isinstance(loader.dataset, IterableDataset) or not isinstance(sampler, BatchSampler):
            cure = "cannot be dealt among islands by its numbers: train_dataset=Shared(dataset, atoll, batch=..)"
            raise ConfigError("train_dataset", type(loader.dataset).__name__, cure)
        batch = args.train_batch_size * args.gradient_accumulation_steps
        sampler.sampler = _Dealt(len(loader.dataset), self.island, batch)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Counts an optimizer step, and ends training with the run."""
        self.island.step(self._loss)
        control.should_training_stop = control.should_training_stop or self.island.done

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        """Keeps the loss, which callbacks get only here, after the step."""
        self._loss = logs.get("loss", self._loss)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hands over the rest; after that the model has the run's final parameters."""
        self.island.close()


class _Dealt(Sampler[int]):  # type: ignore[misc]
    """The numbers of this island's examples, an epoch at a time; used in the trainer's process only.

    Args:
        size: Examples of the dataset.
        island: That has joined.
        batch: Examples of one optimizer step, taken at a time.
    """

    def __init__(self, size: int, island: Any, batch: int) -> None:
        if size < batch:
            cure = f"are fewer than the {batch} of a step of the optimizer: give more, or smaller steps"
            raise ConfigError("train_dataset", f"{size} examples", cure)
        self._island, self._steps, self._batch = island, size // batch, batch
        self._batches = islands.batches(range(size), island, batch=batch, collate=list)

    def __len__(self) -> int:
        return self._steps * self._batch

    def __iter__(self) -> Iterator[int]:
        for _, numbers in zip(range(self._steps), self._batches, strict=False):
            yield from numbers


class Shared(IterableDataset[Any]):  # type: ignore[misc]
    """This island's examples of a dataset, for a loader without workers.

    Args:
        dataset: With examples by number, or a stream (:mod:`islands.tasks.sources`).
        atoll: Which has joined when the first example is asked for.
        batch: Examples of an optimizer's step: ``per_device_train_batch_size`` times ``gradient_accumulation_steps``.
    """

    def __init__(self, dataset: Any, atoll: Atoll, batch: int) -> None:
        self.dataset, self.atoll, self.batch = dataset, atoll, batch

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            cure = "must be 0, as the share of the data is in the trainer's process; what has a length needs no Shared"
            raise ConfigError("dataloader_num_workers", get_worker_info().num_workers, cure)
        for examples in islands.batches(self.dataset, self.atoll.island, batch=self.batch, collate=list):
            yield from examples
