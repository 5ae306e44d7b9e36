"""Islands train a model and join a run: the public interface, and the parts of a task.

    import islands

    islands.log_to_stderr()
    with islands.join("tcp://hub:7001", params, run="demo") as island:
        params, opt_state = island.restore(params, opt_state)
        ...

Names are loaded when they are first asked for: nothing here imports JAX until :func:`jax_task` or its parts are used.
Loops of PyTorch join with :func:`islands.torch.join`; that package is loaded when it is asked for, too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from islands.interface.installation import explained

if TYPE_CHECKING:
    from broker.process.logs import log_to_stderr
    from islands.arrays.model_file import load
    from islands.hook import Hook
    from islands.joining import join
    from islands.loop import Island
    from islands.tasks.inner_optimizer import adamw, jax_task, warm_up_cosine
    from islands.tasks.sources import batches
    from islands.tasks.task import DataShare, Schedule, Task, load_task

__all__ = [
    "join",
    "Island",
    "Hook",
    "batches",
    "load",
    "log_to_stderr",
    "Task",
    "Schedule",
    "DataShare",
    "load_task",
    "jax_task",
    "adamw",
    "warm_up_cosine",
]

_MODULE_OF = {
    "join": "islands.joining",
    "Island": "islands.loop",
    "Hook": "islands.hook",
    "batches": "islands.tasks.sources",
    "load": "islands.arrays.model_file",
    "log_to_stderr": "broker.process.logs",
    "Task": "islands.tasks.task",
    "Schedule": "islands.tasks.task",
    "DataShare": "islands.tasks.task",
    "load_task": "islands.tasks.task",
    "jax_task": "islands.tasks.inner_optimizer",
    "adamw": "islands.tasks.inner_optimizer",
    "warm_up_cosine": "islands.tasks.inner_optimizer",
}


def __getattr__(name: str) -> Any:
    if name == "torch":
        return importlib.import_module("islands.torch")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'islands' has no attribute {name!r}")
    with explained():
        return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
