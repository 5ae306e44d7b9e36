"""Training objectives: next tokens, masked tokens, classes, or pairs of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from broker.base.errors import ConfigError
from islands.hf import examples
from islands.hf.directory import ModelDirectory
from islands.torch.ranks import gathered

#: Shares of masked tokens by BERT (https://arxiv.org/abs/1810.04805): masked in all; of these unchanged or random.
_MASKED, _KEPT, _OTHER = 0.15, 0.1, 0.1
#: Scale of cosines before the softmax, as in sentence-transformers.
_SCALE = 20.0
_IGNORED = -100

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of columns: of texts, of labels, and of the two texts of a pair."""

    text: str
    label: str
    first: str
    second: str


class Objective:
    """One training objective: turns rows into batches, and a batch into a loss."""

    auto: Any
    metrics: dict[str, str] = {}  # noqa: RUF012 (never written to)
    sides = 1  # texts of a row

    def __init__(self, directory: ModelDirectory, columns: Columns, length: int) -> None:
        self.tokenizer, self.columns, self.length = directory.tokenizer, columns, length
        pad = self.tokenizer.pad_token_id
        self.pad = self.tokenizer.eos_token_id if pad is None else pad
        self.pad = 0 if self.pad is None else self.pad

    def prepared(self, rows: Dataset, data: str) -> Dataset:
        """Returns rows as token ids."""
        raise NotImplementedError

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        """Returns a batch of rows: arrays, int64."""
        raise NotImplementedError

    def loss(self, module: Any, batch: Batch) -> torch.Tensor:
        """Returns the mean loss of a batch, a tensor of one element."""
        raise NotImplementedError

    def evaluate(self, module: Any, batches: Iterator[Batch]) -> dict[str, float]:
        """Returns the mean loss over batches, and further metrics; without gradients."""
        losses = [float(self.loss(module, batch)) for batch in batches]
        return {"loss": float(np.mean(losses))}


class Causal(Objective):
    """Predicts the next token of packed texts."""

    auto = AutoModelForCausalLM

    def prepared(self, rows: Dataset, data: str, *, rest: bool = False) -> Dataset:
        examples.column_of(rows, self.columns.text, field="text", data=data)
        return examples.packed(rows, self.columns.text, self.tokenizer, self.length, rest=rest)

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        return {"input_ids": np.array([row["input_ids"] for row in rows], np.int64)}

    def loss(self, module: Any, batch: Batch, reduction: str = "mean") -> torch.Tensor:
        ids = batch["input_ids"]
        logits = module(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)

    def perplexity(self, module: Any, batches: Iterator[Batch]) -> dict[str, float]:
        """Returns the number of predicted tokens, their mean loss in nats, and its exponential."""
        total, tokens = 0.0, 0
        for batch in batches:
            losses = self.loss(module, batch, reduction="none")
            total, tokens = total + float(losses.double().sum()), tokens + losses.numel()
        return {"tokens": tokens, "nats_per_token": total / tokens, "perplexity": float(np.exp(total / tokens))}


class Masked(Causal):
    """Predicts masked tokens of packed texts."""

    auto = AutoModelForMaskedLM

    def __init__(self, directory: ModelDirectory, columns: Columns, length: int) -> None:
        super().__init__(directory, columns, length)
        if self.tokenizer.mask_token_id is None:
            raise ConfigError("objective", "masked", "needs a tokenizer with a mask token: this model's has none")

    def loss(self, module: Any, batch: Batch, reduction: str = "mean") -> torch.Tensor:
        ids = batch["input_ids"]
        # Held-out examples are masked alike each time; in training torch's own random numbers decide.
        generator = None if module.training else torch.Generator(ids.device).manual_seed(int(ids.sum()))
        drawn = torch.rand(ids.shape, generator=generator, device=ids.device)
        chosen, kind = drawn < _MASKED, drawn / _MASKED
        chosen[:, 0] |= ~chosen.any(1)  # a loss of nothing is no number
        others = torch.randint(0, len(self.tokenizer), ids.shape, generator=generator, device=ids.device)
        shown = torch.where(chosen & (kind >= _KEPT + _OTHER), self.tokenizer.mask_token_id, ids)
        shown = torch.where(chosen & (kind >= _KEPT) & (kind < _KEPT + _OTHER), others, shown)
        logits = module(input_ids=shown, attention_mask=torch.ones_like(ids)).logits.float()
        return F.cross_entropy(logits[chosen], ids[chosen], reduction=reduction)


class Classify(Objective):
    """Predicts the class of a text."""

    auto = AutoModelForSequenceClassification
    metrics = {"accuracy": "max"}  # noqa: RUF012 (never written to)

    def prepared(self, rows: Dataset, data: str) -> Dataset:
        for field, name in (("text", self.columns.text), ("label", self.columns.label)):
            examples.column_of(rows, name, field=field, data=data)
        rows = rows.rename_column(self.columns.label, "labels") if self.columns.label != "labels" else rows
        columns = {"input_ids": self.columns.text}
        return examples.tokenized(rows, columns, self.tokenizer, self.length, keep=("labels",))

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        ids, mask = examples.padded([row["input_ids"] for row in rows], self.length, self.pad)
        return {"input_ids": ids, "attention_mask": mask, "labels": np.array([row["labels"] for row in rows], np.int64)}

    def loss(self, module: Any, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(self._logits(module, batch), batch["labels"])

    def evaluate(self, module: Any, batches: Iterator[Batch]) -> dict[str, float]:
        losses, right, count = [], 0, 0
        for batch in batches:
            logits = self._logits(module, batch)
            losses.append(float(F.cross_entropy(logits, batch["labels"])))
            right += int((logits.argmax(-1) == batch["labels"]).sum())
            count += len(batch["labels"])
        return {"loss": float(np.mean(losses)), "accuracy": right / count}

    @staticmethod
    def _logits(module: Any, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return found.float()


class Contrastive(Objective):
    """Matches first and second texts of a batch, by cosines of mean-pooled vectors.

    The loss is that of multiple negatives (https://arxiv.org/abs/1705.00652), the metric the mean reciprocal rank of
    the right text among all held-out ones.
    """

    auto = AutoModel
    metrics = {"reciprocal_rank": "max"}  # noqa: RUF012 (never written to)
    sides = 2

    def prepared(self, rows: Dataset, data: str) -> Dataset:
        for field, name in (("first", self.columns.first), ("second", self.columns.second)):
            examples.column_of(rows, name, field=field, data=data)
        columns = {"first_ids": self.columns.first, "second_ids": self.columns.second}
        return examples.tokenized(rows, columns, self.tokenizer, self.length, keep=())

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        batch: Batch = {}
        for side in ("first", "second"):
            ids = [row[f"{side}_ids"] for row in rows]
            batch[side], batch[f"{side}_mask"] = examples.padded(ids, self.length, self.pad)
        return batch

    def loss(self, module: Any, batch: Batch) -> torch.Tensor:
        first, second = map(gathered, self._sides(module, batch))
        cosines = first @ second.T * _SCALE
        return F.cross_entropy(cosines, torch.arange(len(first), device=cosines.device))

    def evaluate(self, module: Any, batches: Iterator[Batch]) -> dict[str, float]:
        pairs = [self._sides(module, batch) for batch in batches]
        losses = [float(F.cross_entropy(a @ b.T * _SCALE, torch.arange(len(a), device=a.device))) for a, b in pairs]
        first, second = (torch.cat(side) for side in zip(*pairs, strict=True))
        cosines = first @ second.T
        rank = (cosines > cosines.diagonal()[:, None]).sum(1) + 1
        return {"loss": float(np.mean(losses)), "reciprocal_rank": float((1.0 / rank).mean())}

    def _sides(self, module: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (_pooled(module, batch[side], batch[f"{side}_mask"]) for side in ("first", "second"))
        return first, second


def _pooled(module: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the mean over each text's tokens, normalised to length 1: (texts, width)."""
    states = module(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    weights = mask[..., None].to(states.dtype)
    return F.normalize((states * weights).sum(1) / weights.sum(1).clamp(min=1), dim=-1)


OBJECTIVES: dict[str, Callable[[ModelDirectory, Columns, int], Objective]] = {
    "causal": Causal,
    "masked": Masked,
    "classify": Classify,
    "contrastive": Contrastive,
}
#: End of an architecture's name -> objective.
_BY_ARCHITECTURE = {"ForCausalLM": "causal", "ForMaskedLM": "masked", "ForSequenceClassification": "classify"}


def objective_of(name: str, directory: ModelDirectory, columns: Columns, length: int) -> Objective:
    """Returns the objective with this name, or the default for the model's architecture.

    Raises:
        ConfigError: There is none of that name, or none that the architecture says.
    """
    known = ", ".join(OBJECTIVES)
    if not name:
        architectures = directory.config.architectures or [""]
        name = next((it for end, it in _BY_ARCHITECTURE.items() if architectures[0].endswith(end)), "")
        if not name:
            raise ConfigError("objective", "", f"does not follow from {architectures[0] or 'this model'}: say {known}")
    if name not in OBJECTIVES:
        raise ConfigError("objective", name, f"must be one of {known}")
    return OBJECTIVES[name](directory, columns, length)
