"""The task: a model, its data and its inner optimizer in one value.

``task = "package.module:function"`` names a function that returns a :class:`Task`; its keyword arguments are the
options of the table ``[task]``. :mod:`islands.tasks.inner_optimizer` builds a task from a JAX loss function;
``examples/`` has one with Equinox and one in plain numpy. This module does not import JAX, and neither does a task that
does not need it.
"""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from broker.base.errors import ConfigError
from broker.process import logs
from islands.interface import arguments
from islands.protocol.data_shares import DataShare as DataShare  # where tasks look for it
from islands.tasks.options import check_options, module_and_function, no_module

log = logs.get(__name__)

#: Paths of code that is not the task's own.
_ELSEWHERE = re.compile(r"[/\\]((site|dist)-packages|importlib)[/\\]|^<frozen")

#: The metric that every task may evaluate, and which values of a metric are better.
LOSS, MORE, LESS = "loss", "max", "min"

#: Parameters, optimizer state and batches are the task's own; an island knows parameters as a tree of arrays.
Params = Any
OptState = Any
Batch = Any


class Schedule(NamedTuple):
    """The run's progress in steps of this island, for learning rates (reference.md, section 4.7).

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
        data: share -> batches, from ``share.cursor`` on; batch k is a pure function of the share and k. Where they
            end, it is called again (:func:`endless_batches`): ``k % number`` then begins another epoch. So it is where
            the cursor jumps to another block, unless it calls ``share.take``: reading files belongs outside.
            Data-parallel runs of the laboratory join those of all islands: each leaf along its first axis.
        evaluate: params -> held-out loss in nats per token, over a fixed set of examples; or a mapping of names of
            metrics to numbers, the loss, if it is among them, as ``loss``.
        tokens_per_step: Tokens in one batch: the unit of progress, weights and the ledger.
        fresh_optimizer: params -> optimizer state of an optimizer that has seen no step.
        kinds: Regular expression over parameter names -> ``rda``, ``mean``, ``local`` or ``frozen``; the first that is
            found in a name wins, other names go by the default rules of :mod:`islands.arrays.partition`.
        unit_axes: Regular expression -> how many leading axes of a tensor count layers or experts.
        describe: One line: parameters, tokens per step, vocabulary.
        corpus: Digest of the data, train and held out, so that results can say on what; empty when it is not known.
        metrics: Name of a metric -> ``max`` where more of it is better, ``min`` where less is; ``loss`` is known. With
            one metric here ``evaluate`` may return its number alone: ``metrics={"accuracy": "max"}``.
        inner_optimizer: Its name, ``adamw`` or ``muon``, by which a run chooses what its recipe leaves open.
        inputs: Name -> digest or short value that all islands must share (:func:`islands.join`).
        files: Name -> bytes of the model's small files, also shared: :attr:`save` needs them beside tensors.
        save: Writes the run's tensors as other tools load this model: (name -> values, a new directory, number format,
            whether to merge adapters into their base) -> nothing. None: they are one safetensors file.
        benchmarks: Kind -> (text -> function of the parameters): what this task makes of ``--benchmark KIND:TEXT``.
    """

    init: Callable[[int], tuple[Params, OptState]]
    train: Callable[[Params, OptState, Batch, Schedule], tuple[Params, OptState, Any]]
    data: Callable[[DataShare], Iterator[Batch]]
    evaluate: Callable[[Params], float | Mapping[str, float]]
    tokens_per_step: int
    fresh_optimizer: Callable[[Params], OptState]
    kinds: Mapping[str, str] = field(default_factory=dict)
    unit_axes: Mapping[str, int] = field(default_factory=dict)
    describe: str = ""
    corpus: str = ""
    metrics: Mapping[str, str] = field(default_factory=dict)
    inner_optimizer: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    save: Callable[[Mapping[str, Any], Path, str, bool], None] | None = None
    benchmarks: Mapping[str, Callable[[str], Callable[[Params], Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the fields without calling any function.

        Raises:
            ConfigError: If a step trains no tokens, a metric has no direction, or what must be a function or a mapping
                is none.
        """
        cure = "must be at least 1; count examples where there are no tokens"
        tokens = arguments.whole("tokens_per_step", self.tokens_per_step, cure, least=1, may_wait=True)
        object.__setattr__(self, "tokens_per_step", tokens)
        for name in ("init", "train", "data", "evaluate", "fresh_optimizer"):
            arguments.function(name, getattr(self, name), "must be a function: see islands.Task")
        for name in ("kinds", "unit_axes"):
            object.__setattr__(self, name, arguments.mapping(name, getattr(self, name)))
        for name, better in self.metrics.items():
            if better not in (MORE, LESS):
                cure = f"must be {MORE!r} where more of {name} is better, or {LESS!r} where less is"
                raise ConfigError("metrics", dict(self.metrics), cure)
        if self.metrics.get(LOSS, LESS) != LESS:
            cure = f"must have another name for what is better when there is more of it: less {LOSS} is better"
            raise ConfigError("metrics", dict(self.metrics), cure)

    def better(self, metric: str) -> str:
        """Returns the better direction of a metric, ``max`` or ``min``; empty if the task names none."""
        return self.metrics.get(metric, LESS if metric == LOSS else "")


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
        # A task knows its options by name, and need not know their table.
        raise ConfigError(f"task.{err.field.removeprefix('task.')}", err.value, err.cure) from err
    except Exception as err:
        raise broken(path, err) from err
    if not isinstance(task, Task):
        raise ConfigError("task", path, f"returned {type(task).__name__}: it must return an islands.tasks.task.Task")
    return task


def task_function(path: str) -> Callable[..., Any]:
    """Returns the function at ``path = "package.module:function"``.

    Raises:
        ConfigError: If there is no such module or function, or importing it fails, with the line where.
    """
    return named_function(path, field="task", kind="one that returns an islands.tasks.task.Task")


def named_function(path: str, *, field: str, kind: str) -> Callable[..., Any]:
    """Returns the function at ``path = "package.module:function"``, the value of a setting.

    Args:
        path: The function to import.
        field: The setting, for the error.
        kind: A description of the wanted function, for the error.

    Raises:
        ConfigError: If there is no such module or function, or importing it fails, with the line where.
    """
    module_name, function_name = module_and_function(path, field=field)
    function = getattr(_import(module_name, path, field), function_name, None)
    if not callable(function):
        raise ConfigError(field, path, f"module {module_name} has no function {function_name}: name {kind}")
    return function  # type: ignore[no-any-return]


def endless_batches(task: Task, share: DataShare) -> Iterator[Batch]:
    """Yields a task's data, from the beginning again whenever they end.

    Data that do not ask the share for each batch (:meth:`.DataShare.take`) begin anew where its cursor jumps, too.

    Raises:
        ConfigError: If they end without a batch.
    """
    ended = False
    while True:
        first, jumps, batch, jumped = share.cursor, share.jumps, None, False
        for num, batch in enumerate(task.data(share), start=1):  # noqa: B007 (said at the end)
            yield batch
            jumped = share.jumps != jumps and not share.takes
            if jumped:
                break  # it may count by itself
        if jumped:
            continue
        if batch is None:
            cure = "yielded no batch: it must begin anew where the share's cursor is beyond its end (cursor % batches)"
            raise ConfigError("task.data", f"part {share.index} of {share.count}, from batch {first} on", cure)
        if not ended:
            ended = True
            log.info("data.ended", batches=num, detail="they begin anew, now and whenever they end")


def evaluated(task: Task, params: Params) -> dict[str, float]:
    """Returns the task's metrics as plain numbers, also from arrays of one element.

    Raises:
        ConfigError: If one is no number, or has no name.
    """
    found: Any = task.evaluate(params)
    if not isinstance(found, Mapping):
        if len(task.metrics) > 1:
            cure = f"returned this: it must map the names {', '.join(task.metrics)} to numbers"
            raise ConfigError("task.evaluate", found, cure)
        found = {next(iter(task.metrics), LOSS): found}
    if not found or not all(isinstance(name, str) and name.isprintable() for name in found):
        raise ConfigError("task.evaluate", found, "returned this: it must map names of metrics to numbers")
    return {name: _number(value) for name, value in found.items()}


def held_out_loss(task: Task, params: Params) -> float:
    """Returns the task's held-out loss.

    Raises:
        ConfigError: If it is no number, or what is evaluated is no loss.
    """
    found = evaluated(task, params)
    if LOSS not in found:
        cure = f"returned this: it must return a loss, or one under the name {LOSS!r} among others, to be compared"
        raise ConfigError("task.evaluate", found, cure)
    return found[LOSS]


def _number(value: Any) -> float:
    try:
        return float(np.asarray(value).item())
    except (TypeError, ValueError) as err:
        cure = "returned this: it must return the held-out loss, a number, or a mapping of names to numbers"
        raise ConfigError("task.evaluate", value, cure) from err


def _import(module_name: str, path: str, field: str) -> Any:
    """Imports the module; tells a missing module from a missing import inside it."""
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as err:
        missing = err.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            raise no_module(path, missing, field=field) from err
        where = ", on every island" if field == "task" else ""
        cure = f"module {module_name} imports {missing}, which is not installed: pip install it{where}"
        raise ConfigError(field, path, cure) from err
    except Exception as err:
        raise broken(path, err, field=field) from err


def broken(path: str, err: Exception, *, field: str = "task") -> ConfigError:
    """Returns the error for a failure in the user's code, with its line; a restart would not help."""
    frames = traceback.extract_tb(err.__traceback__)
    own = [each for each in frames if not _ELSEWHERE.search(each.filename) and each.filename != __file__]
    where = own or ([] if isinstance(err, SyntaxError) else frames)  # rather the task's line than a library's
    lines = "".join(f" ({each.filename}, line {each.lineno})" for each in where[-1:])
    return ConfigError(field, path, f"{type(err).__name__}: {err}{lines}")
