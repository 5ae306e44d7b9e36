"""The task ``islands.hf:task``: fine-tunes a Hugging Face model with its own libraries."""

from __future__ import annotations

try:
    import datasets as _datasets
    import peft as _peft
    import torch as _torch
    import transformers as _transformers
except ModuleNotFoundError as err:
    from broker.process.release import install

    cure = install("torch", "transformers", "peft", "datasets")
    raise ModuleNotFoundError(f"islands.hf needs {err.name}: {cure}", name=err.name) from err

from islands.hf.tasks import task

del _datasets, _peft, _torch, _transformers

__all__ = ["task"]
