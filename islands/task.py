"""What an island trains: one value that holds a model, its data and its inner optimizer.

``task = "package.module:function"`` names a function that returns a :class:`Task`; its keyword arguments are the
options of the table ``[task]``. :mod:`islands.inner` builds a task from a JAX loss function; ``examples/`` has one
with Equinox and one in plain numpy. This module does not import JAX, and neither does a task that does not need it.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from broker.errors import ConfigError
from islands import arguments
from islands.options import check_options, module_and_function, no_module
from islands.shares import DataShare as DataShare  # where tasks look for it

#: Of files that are not the task's own.
_ELSEWHERE = re.compile(r"[/\\]((site|dist)-packages|importlib)[/\\]|^<frozen")

#: Parameters, optimizer state and batches are the task's own; an island knows parameters as a tree of arrays.
Params = Any
OptState = Any
Batch = Any


class Schedule(NamedTuple):
    """How far the whole run is, counted in this island's own steps: what learning rates follow (design: publish).

    Attributes:
        step: The tokens of the whole fleet over those of one step of each expected island, had all this one's
            ``tokens_per_step``; where that was declared, it never decreases.
        total_steps: The same at the end of the run; 0 when it is not known: the rate stays constant after warm-up.
    """

    step: int
    total_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, its data and its inner optimizer, as functions.

    Attributes:
        init: seed -> parameters and optimizer state. The same seed gives the same parameters everywhere.
        train: One inner step: (params, opt_state, batch, schedule) -> (params, opt_state, loss). Under JAX it is
            jitted, donates the first two, takes the schedule's numbers as dynamic values and returns the loss, in
            nats per token, as a device scalar.
        data: share -> batches without end, from ``share.cursor`` on; batch k is a pure function of the share and k.
            Data-parallel runs of the laboratory join those of all islands: each leaf along its first axis.
        evaluate: params -> held-out loss in nats per token, over a fixed set of examples.
        tokens_per_step: Tokens in one batch: the unit of progress, weights and the ledger.
        fresh_optimizer: params -> optimizer state of an optimizer that has seen no step.
        kinds: Regular expression over parameter names -> ``rda``, ``mean``, ``local`` or ``frozen``; the first that is
            found in a name wins, other names go by the default rules of :mod:`islands.partition`.
        unit_axes: Regular expression -> how many leading axes of a tensor count layers or experts.
        describe: One line: parameters, tokens per step, vocabulary.
        losses: params -> mean loss in nats per token of each held-out sequence, float32 (sequences,), always the same
            sequences in the same order; ``evaluate`` is their mean. Two models' losses are paired by sequence, which
            tells a small difference from chance. None when the task cannot say.
        bytes_per_token: Of the held-out text: a loss divided by it is in nats per byte, which compares models of
            unlike vocabularies. 1 for a model of bytes; 0 when it is not known.
        corpus: Digest of the data, train and held out, so that results can say on what; empty when it is not known.
        pure: Whether ``train`` is a function of its arguments alone, which JAX can trace. Then the laboratory may run
            steps in a row as one computation (:mod:`ops.lab.strides`); it takes what ``jax.jit`` returns for pure.
    """

    init: Callable[[int], tuple[Params, OptState]]
    train: Callable[[Params, OptState, Batch, Schedule], tuple[Params, OptState, Any]]
    data: Callable[[DataShare], Iterator[Batch]]
    evaluate: Callable[[Params], float]
    tokens_per_step: int
    fresh_optimizer: Callable[[Params], OptState]
    kinds: Mapping[str, str] = field(default_factory=dict)
    unit_axes: Mapping[str, int] = field(default_factory=dict)
    describe: str = ""
    losses: Callable[[Params], npt.NDArray[np.float32]] | None = None
    bytes_per_token: float = 0.0
    corpus: str = ""
    pure: bool = False

    def __post_init__(self) -> None:
        """Checks what can be checked without calling anything.

        Raises:
            ConfigError: If a step trains no tokens, ``bytes_per_token`` is negative or not finite, or what must be a
                function or a mapping is none.
        """
        cure = "must be at least 1; count examples where there are no tokens"
        tokens = arguments.whole("tokens_per_step", self.tokens_per_step, cure, least=1, may_wait=True)
        object.__setattr__(self, "tokens_per_step", tokens)
        cure = "must be positive, or 0 when it is not known"
        nbytes = arguments.number("bytes_per_token", self.bytes_per_token, cure)
        if not 0 <= nbytes < math.inf:
            raise ConfigError("bytes_per_token", self.bytes_per_token, cure)
        object.__setattr__(self, "bytes_per_token", nbytes)
        for name in ("init", "train", "data", "evaluate", "fresh_optimizer"):
            arguments.function(name, getattr(self, name), "must be a function: see islands.Task")
        for name in ("kinds", "unit_axes"):
            object.__setattr__(self, name, arguments.mapping(name, getattr(self, name)))


def load_task(path: str, options: Mapping[str, Any]) -> Task:
    """Returns ``function(**options)`` of ``path = "package.module:function"``.

    Raises:
        ConfigError: If there is no such module, function or option, an option is missing, or the function returns
            something else; if the function refuses an option; or if the task's own code fails, with the line where.
    """
    function = task_function(path)
    check_options(path, inspect.signature(function), options)
    try:
        task = function(**options)
    except ConfigError as err:
        # A task knows its options by name, and need not know the table that they stand in.
        raise ConfigError(f"task.{err.field.removeprefix('task.')}", err.value, err.cure) from err
    except Exception as err:
        raise _broken(path, err) from err
    if not isinstance(task, Task):
        raise ConfigError("task", path, f"returned {type(task).__name__}: it must return an islands.task.Task")
    return task


def task_function(path: str) -> Callable[..., Any]:
    """Returns the function that ``path = "package.module:function"`` names.

    Raises:
        ConfigError: If there is no such module or function, or importing it fails, with the line where.
    """
    module_name, function_name = module_and_function(path)
    function = getattr(_import(module_name, path), function_name, None)
    if not callable(function):
        cure = f"module {module_name} has no function {function_name}: name one that returns an islands.task.Task"
        raise ConfigError("task", path, cure)
    return function  # type: ignore[no-any-return]


def held_out_loss(task: Task, params: Params) -> float:
    """Returns what the task evaluates as a plain number, whatever array of one element it comes in.

    Raises:
        ConfigError: If it is no number.
    """
    loss: Any = task.evaluate(params)
    try:
        return float(np.asarray(loss).item())
    except (TypeError, ValueError) as err:
        raise ConfigError("task.evaluate", loss, "returned this: it must return the held-out loss, a number") from err


def _import(module_name: str, path: str) -> Any:
    """Imports the module, telling a task that is not there from one whose own imports are not."""
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as err:
        missing = err.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            raise no_module(path, missing) from err
        cure = f"module {module_name} imports {missing}, which is not installed: pip install it, on every island"
        raise ConfigError("task", path, cure) from err
    except Exception as err:
        raise _broken(path, err) from err


def _broken(path: str, err: Exception) -> ConfigError:
    """The error of a task's own code, with the line it comes from: starting it again would not help."""
    frames = traceback.extract_tb(err.__traceback__)
    own = [each for each in frames if not _ELSEWHERE.search(each.filename) and each.filename != __file__]
    where = own or ([] if isinstance(err, SyntaxError) else frames)  # rather the task's line than a library's
    lines = "".join(f" ({each.filename}, line {each.lineno})" for each in where[-1:])
    return ConfigError("task", path, f"{type(err).__name__}: {err}{lines}")
