"""The task ``islands.hf:task``: fine-tunes a Hugging Face model, whole or by LoRA adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

import islands.torch
from broker.base.errors import ConfigError
from islands import DataShare, Schedule, Task
from islands.hf import examples, saving
from islands.hf.directory import ModelDirectory
from islands.hf.objectives import Batch, Causal, Columns, Objective, objective_of
from islands.tasks.benchmarks import FIELD, Measured
from islands.tasks.sources import batches
from islands.torch.ranks import DDP, world

#: Held-out examples that are evaluated, at most.
MOST_HELD_OUT = 2048
_DTYPES = ("f32", "bf16")


def task(
    *,
    model: str,
    data: str,
    objective: str = "",
    held_out: str = "0.05",
    text: str = "text",
    label: str = "label",
    first: str = "first",
    second: str = "second",
    sequence_length: int = 256,
    batch: int = 16,
    accumulation: int = 1,
    learning_rate: float = 2e-5,
    warm_up_steps: int = 10,
    weight_decay: float = 0.01,
    dtype: str = "f32",
    gradient_checkpointing: bool = False,
    lora_rank: int | None = None,
    lora_targets: str = "",
    local_data: bool = False,
    ranks: int = 0,
    spread: str = DDP,
) -> Task:
    """Returns a task that fine-tunes a model.

        python3 -m ops up --task islands.hf:task --task-option model=DIR data=texts.jsonl

    Args:
        model: Directory of the model, or its id on the hub. Its code is never run.
        data: Texts, JSON lines or Parquet: a file or a folder of them; or the id of a dataset, ``org/name:split``.
        objective: ``causal``, ``masked``, ``classify`` or ``contrastive`` (default: by the model's architecture).
        held_out: Share of the rows to evaluate on, or data of their own.
        text: Column of the text.
        label: Column of the class, for ``classify``.
        first: Column of one text of a pair, for ``contrastive``.
        second: Column of the other.
        sequence_length: Most tokens of an example; packed sequences of language models have exactly this length.
        batch: Examples of an inner step.
        accumulation: Parts that a batch is computed in, one after another.
        learning_rate: The highest learning rate of AdamW; it falls to a tenth by a cosine over the whole run.
        warm_up_steps: Steps to the highest rate.
        weight_decay: The weight decay of AdamW, for matrices.
        dtype: ``bf16`` computes in bfloat16; parameters and the optimizer stay in float32. A base that does not train
            is held in it.
        gradient_checkpointing: Compute activations anew in the backward pass: less memory, more time.
        lora_rank: Train adapters of this rank alone (LoRA, https://arxiv.org/abs/2106.09685); they alone travel.
        lora_targets: Modules that get one, with commas (default: as peft chooses for the architecture).
        local_data: Each island has data of its own; else all must have the same.
        ranks: Processes that train together on an island's machine, each with a GPU and its part of every batch. 0: one
            for each GPU. ``atoll island`` starts them; under torchrun they are those of the job.
        spread: ``ddp``: each has all of the model. ``fsdp``: parameters, gradients and the optimizer's state are spread
            over them, for models that one GPU has no room for.

    Raises:
        ConfigError: An option cannot work, or model and data do not fit; names it and the cure.
    """
    _check(batch=batch, accumulation=accumulation, sequence_length=sequence_length, learning_rate=learning_rate)
    if dtype not in _DTYPES:
        raise ConfigError("dtype", dtype, f"must be one of {', '.join(_DTYPES)}")
    if lora_rank is not None and lora_rank < 1:
        raise ConfigError(
            "lora_rank", lora_rank, "must be at least 1, such as 8; leave it out to train the whole model"
        )
    if batch % accumulation:
        raise ConfigError("accumulation", accumulation, f"must divide batch = {batch}")
    if batch % (accumulation * world()):
        raise ConfigError("batch", batch, f"must be a multiple of accumulation x ranks = {accumulation} x {world()}")
    directory = ModelDirectory.find(model)
    learner = objective_of(objective, directory, Columns(text, label, first, second), sequence_length)
    rows, kept = _rows(data, held_out)
    train, test = learner.prepared(rows, data), learner.prepared(kept, held_out if Path(held_out).exists() else data)
    adapter = None if lora_rank is None else _Adapter(lora_rank, tuple(filter(None, lora_targets.split(","))))
    inputs = directory.inputs(lora=adapter is not None) | {"sequence_length": str(sequence_length)}
    if not local_data:
        inputs["data"] = examples.digest_of(train)

    described: dict[str, bytes] = {}

    def build() -> Any:
        module = _loaded(directory, learner, dtype=dtype, adapter=adapter)
        described.update(described or saving.described(module, model))
        if gradient_checkpointing:
            _saves_memory(module)
            if adapter is not None:
                module.enable_input_require_grads()
        return module

    def loss(module: Any, batch: Batch) -> torch.Tensor:
        with _computing(module, dtype):
            return learner.loss(module, batch)

    def dealt(share: DataShare) -> Iterator[Batch]:
        return batches(train, share, batch=batch, collate=learner.collate, own=local_data)

    def evaluate(module: Any) -> Mapping[str, float]:
        device = next(module.parameters()).device
        with _computing(module, dtype):
            return learner.evaluate(module, _held_out(test, learner, batch, device, MOST_HELD_OUT))

    def perplexity(file: str) -> Callable[[Any], Mapping[str, Measured]]:
        if not isinstance(learner, Causal):
            cure = f"is of language models: this run's objective is {type(learner).__name__.lower()}"
            raise ConfigError(FIELD, f"perplexity:{file}", cure)
        rows = learner.prepared(examples.rows_of(file, field=FIELD), file, rest=True)
        whole = len(rows) - (len(rows[-1]["input_ids"]) < sequence_length)  # the last one may be shorter
        parts = [rows.select(range(*ends)) for ends in ((0, whole), (whole, len(rows))) if ends[0] < ends[1]]

        def measured(module: Any) -> Mapping[str, Measured]:
            device = next(module.parameters()).device
            with _computing(module, dtype):
                found = learner.perplexity(
                    module, (each for part in parts for each in _held_out(part, learner, batch, device, len(part)))
                )
            return {
                f"{Path(file).stem}/{name}": Measured(value, "" if name == "tokens" else "min")
                for name, value in found.items()
            }

        return measured

    tokens = batch * sequence_length * learner.sides
    made = islands.torch.task(
        model=build,
        loss=loss,
        optimizer=lambda module: _optimizer(module, learning_rate, weight_decay),
        data=dealt,
        evaluate=evaluate,
        tokens_per_step=tokens,
        learning_rate=_rate(learning_rate, warm_up_steps),
        accumulation=accumulation,
        spread=spread,
        describe=f"{Path(model).name}, {len(train):,} examples, {tokens} tokens per step",
        metrics=learner.metrics,
        inputs=inputs,
        save=saving.of(directory, lambda: _loaded(directory, learner, dtype="f32", adapter=adapter)),
        benchmarks={"perplexity": perplexity},
    )
    return replace(made, files=directory.small_files | described)


@dataclass(frozen=True, slots=True)
class _Adapter:
    rank: int
    targets: tuple[str, ...]


def _loaded(directory: ModelDirectory, learner: Objective, *, dtype: str, adapter: _Adapter | None) -> Any:
    """Returns the module with the weights of its files, and with new adapters if asked for."""
    wanted = torch.bfloat16 if adapter is not None and dtype == "bf16" else torch.float32
    options = {"dtype": wanted, "trust_remote_code": False, "local_files_only": True}
    try:
        module = learner.auto.from_pretrained(directory.path, **options)
    except (ValueError, OSError, KeyError, RuntimeError) as err:
        line = str(err).strip().partition("\n")[0][:200]
        raise ConfigError("model", directory.name, f"cannot be loaded by transformers ({line})") from err
    if adapter is None:
        return module
    try:
        config = LoraConfig(r=adapter.rank, lora_alpha=2 * adapter.rank, target_modules=list(adapter.targets) or None)
        return get_peft_model(module, config)
    except ValueError as err:
        names = sorted(
            {name.rpartition(".")[2] for name, m in module.named_modules() if isinstance(m, torch.nn.Linear)}
        )
        cure = f"peft finds nothing to adapt ({str(err)[:120]}): name some of {', '.join(names)}"
        raise ConfigError("lora_targets", ",".join(adapter.targets), cure) from err


def _saves_memory(module: Any) -> None:
    """Turns on gradient checkpointing; transformers 5.20 has another name for it."""
    options = {"use_reentrant": False}
    if hasattr(module, "activation_checkpointing_enable"):
        module.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _rows(data: str, held_out: str) -> tuple[Dataset, Dataset]:
    rows = examples.rows_of(data)
    try:
        share = float(held_out)
    except ValueError:
        return rows, examples.rows_of(held_out, field="held_out")
    if not 0 < share < 1:
        raise ConfigError("held_out", held_out, "must be a share between 0 and 1, such as 0.05, or a file")
    return examples.split_off(rows, share)


def _held_out(rows: Dataset, learner: Objective, batch: int, device: torch.device, most: int) -> Iterator[Batch]:
    most = min(len(rows), most)
    for start in range(0, most, batch):
        made = learner.collate(list(rows.__getitems__(list(range(start, min(start + batch, most))))))
        yield {name: torch.from_numpy(array).to(device) for name, array in made.items()}


def _computing(module: Any, dtype: str) -> contextlib.AbstractContextManager[Any]:
    device = next(module.parameters()).device.type
    computing: contextlib.AbstractContextManager[Any] = torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16")
    return computing


def _optimizer(module: Any, rate: float, decay: float) -> torch.optim.Optimizer:
    trained = [each for each in module.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": decay},
        {"params": [each for each in trained if each.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate)


def _rate(peak: float, warm_up_steps: int) -> Callable[[Schedule], float]:
    def rate(schedule: Schedule) -> float:
        warm = min(1.0, (schedule.step + 1) / max(1, warm_up_steps))
        done = min(1.0, schedule.step / schedule.total_steps) if schedule.total_steps else 0.0
        return float(peak * warm * (0.1 + 0.9 * (1 + np.cos(np.pi * done)) / 2))

    return rate


def _check(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise ConfigError(name, value, "must be above 0")
