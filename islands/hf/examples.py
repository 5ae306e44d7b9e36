"""Examples of a task: rows of files or of a dataset, as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datasets import Dataset, DatasetDict, load_dataset

from broker.base.errors import ConfigError

_FORMATS = {".txt": "text", ".md": "text", ".py": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def rows_of(data: str, *, field: str = "data") -> Dataset:
    """Returns the rows of a file or a folder of them, or of a dataset of the hub (``org/name:split``).

    Raises:
        ConfigError: They cannot be read, or there are none; names what and the cure.
    """
    path = Path(data).expanduser()
    if path.exists():
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in _FORMATS and p.is_file())
        formats = {_FORMATS.get(each.suffix) for each in files}
        if len(formats) != 1 or None in formats:
            cure = f"must be one file, or a folder of files of one sort: {', '.join(_FORMATS)}"
            raise ConfigError(field, data, cure)
        if not any(each.stat().st_size for each in files):
            raise ConfigError(field, data, "is empty: give a file with examples in it")
        of_hub, options = formats.pop(), {"data_files": [str(each) for each in files], "split": "train"}
        if of_hub == "text" and path.is_dir():
            options["sample_by"] = "document"
    else:
        of_hub, _, split = data.partition(":")
        options = {"split": split or "train"}
    try:
        found: Any = load_dataset(of_hub, **options)
    except Exception as err:
        # Readers, the hub and the network raise what they raise.
        what = "cannot be read" if path.exists() else "is no file here, and no dataset that can be fetched"
        line = str(err).strip().partition("\n")[0][:200]
        raise ConfigError(
            field, data, f"{what} ({type(err).__name__}: {line}): name a file, a folder or an id"
        ) from err
    assert not isinstance(found, DatasetDict)
    if not len(found):
        raise ConfigError(field, data, "has no rows: give a file with examples in it")
    return found


def column_of(rows: Dataset, name: str, *, field: str, data: str) -> None:
    """Raises ConfigError if rows lack a column; the error lists the columns that exist."""
    if name not in rows.column_names:
        cure = f"is no column of {data}; there are {', '.join(rows.column_names)}"
        raise ConfigError(field, name, cure)


def split_off(rows: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """Returns rows for training and held-out rows; every island holds out the same ones."""
    if len(rows) < 2:
        raise ConfigError("data", f"{len(rows)} row", "is too little to hold some out: give more, or held_out=FILE")
    parts = rows.train_test_split(test_size=max(1, round(len(rows) * share)), seed=0)
    return parts["train"], parts["test"]


def packed(rows: Dataset, text: str, tokenizer: Any, length: int, *, rest: bool = False) -> Dataset:
    """Returns sequences of ``length`` tokens from texts joined by the end-of-text token.

    What remains at the end is left out, or with ``rest`` a shorter sequence, of two tokens at least.

    Raises:
        ConfigError: They are too few tokens for one sequence.
    """
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

    def cut(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        ids = tokenizer(batch[text], add_special_tokens=False, verbose=False)["input_ids"]
        flat = [token for each in ids for token in (*each, *end)]
        least = 2 if rest else length
        return {"input_ids": [flat[i : i + length] for i in range(0, len(flat) - least + 1, length)]}

    size = len(rows) if rest else 1000
    found = rows.map(cut, batched=True, batch_size=size, remove_columns=rows.column_names, desc="packing")
    if not len(found):
        wanted = "2 tokens:" if rest else f"sequence_length = {length} tokens: lower it, or"
        cure = f"gives no sequence of {wanted} give more text"
        raise ConfigError("data", f"{len(rows)} rows", cure)
    return found


def tokenized(rows: Dataset, columns: dict[str, str], tokenizer: Any, length: int, keep: tuple[str, ...]) -> Dataset:
    """Returns rows with the token ids of texts, at most ``length`` each; ``columns``: name -> text."""

    def ids(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {
            name: tokenizer(batch[column], truncation=True, max_length=length)["input_ids"]
            for name, column in columns.items()
        }

    drop = [name for name in rows.column_names if name not in keep]
    return rows.map(ids, batched=True, batch_size=1000, remove_columns=drop, desc="tokenizing")


def padded(ids: list[list[int]], length: int, pad: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns token ids and mask, int64 (rows, longest), where ``longest`` is at most ``length``."""
    longest = min(length, max(map(len, ids)))
    found = np.full((len(ids), longest), pad, np.int64)
    mask = np.zeros_like(found)
    for row, each in enumerate(ids):
        found[row, : len(each)] = each[:longest]
        mask[row, : len(each)] = 1
    return found, mask


def digest_of(rows: Dataset) -> str:
    """Returns 32 hex digits over the token ids of all rows."""
    hasher = xxhash.xxh3_128(f"{len(rows)} ".encode())
    for name in sorted(rows.column_names):
        for chunk in rows.data.column(name).chunks:
            flat = chunk.flatten() if hasattr(chunk, "flatten") else chunk
            values = flat.to_numpy(zero_copy_only=False)
            if values.dtype.kind in "iufb":
                wide = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
                hasher.update(wide.tobytes())
    return hasher.hexdigest()
