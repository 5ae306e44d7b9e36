"""Islands train a model and join a run: the public interface, and the parts of a task.

    import islands

    islands.log_to_stderr()
    island, params, opt_state = islands.begin("paris.join", params, opt_state, tokens_per_step=4096)
    ...

Names are loaded when they are first asked for: nothing here imports JAX until :func:`jax_task` or its parts are used.
Loops of PyTorch join with :func:`islands.torch.join`; that package is loaded when it is asked for, too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from islands.interface.installation import explained

if TYPE_CHECKING:
    from broker.process.logs import log_to_stderr as log_to_stderr
    from islands.hook import Hook as Hook
    from islands.joining import begin as begin
    from islands.joining import join as join
    from islands.loop import Island as Island
    from islands.tasks.inner_optimizer import adamw as adamw
    from islands.tasks.inner_optimizer import jax_task as jax_task
    from islands.tasks.inner_optimizer import warm_up_cosine as warm_up_cosine
    from islands.tasks.model_file import load as load
    from islands.tasks.sources import batches as batches
    from islands.tasks.task import DataShare as DataShare
    from islands.tasks.task import Schedule as Schedule
    from islands.tasks.task import Task as Task
    from islands.tasks.task import load_task as load_task

_MODULE_OF = {
    "begin": "islands.joining",
    "join": "islands.joining",
    "Island": "islands.loop",
    "Hook": "islands.hook",
    "batches": "islands.tasks.sources",
    "load": "islands.tasks.model_file",
    "log_to_stderr": "broker.process.logs",
    "Task": "islands.tasks.task",
    "Schedule": "islands.tasks.task",
    "DataShare": "islands.tasks.task",
    "load_task": "islands.tasks.task",
    "jax_task": "islands.tasks.inner_optimizer",
    "adamw": "islands.tasks.inner_optimizer",
    "warm_up_cosine": "islands.tasks.inner_optimizer",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "torch":
        return importlib.import_module("islands.torch")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'islands' has no attribute {name!r}")
    with explained():
        return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
