"""Benchmarks: the user's functions that evaluate a model, beside the task's own evaluation.

``benchmark = "package.module:function"`` names a function of the parameters alone. It returns a number, which goes by
the function's name, or a mapping of names to numbers. One that fails costs its own numbers and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from broker.base.errors import ConfigError
from islands.tasks.options import module_and_function
from islands.tasks.task import Params, Task, broken, evaluated, named_function

FIELD = "benchmark"
#: Name of the task's own evaluation among those that failed.
TASK_EVALUATE = "task.evaluate"


class Measured(NamedTuple):
    """One result: value; direction that is better (``max``, ``min`` or empty); standard error or None."""

    value: float
    better: str = ""
    stderr: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A function that evaluates parameters, named by ``path`` as ``package.module:function``."""

    path: str
    function: Callable[[Params], Any]

    @property
    def name(self) -> str:
        """The function's name, also that of its result if this is a single number."""
        return module_and_function(self.path, field=FIELD)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All results for one model.

    Attributes:
        metrics: Name -> number, of the task first.
        better: Name -> ``max`` or ``min``, of the metrics of which that is known.
        stderr: Name -> standard error, of the metrics of which that is known.
        failed: Benchmark, or ``task.evaluate`` -> why there is no number of it.
    """

    metrics: Mapping[str, float]
    better: Mapping[str, str] = field(default_factory=dict)
    stderr: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)


def load_benchmarks(paths: Iterable[str]) -> tuple[Benchmark, ...]:
    """Imports benchmarks.

    Raises:
        ConfigError: There is no such module or function, importing it fails, it does not take the parameters alone, or
            one is named twice.
    """
    found: dict[str, Benchmark] = {}
    for path in paths:
        if path in found:
            raise ConfigError(FIELD, path, "is named twice: leave one out")
        function = named_function(path, field=FIELD, kind="a function of the parameters, which returns a number")
        try:
            inspect.signature(function).bind(None)
        except TypeError as err:
            raise ConfigError(FIELD, path, f"must take the parameters alone, f(params): {err}") from err
        except ValueError:  # a function without a signature, of an extension module
            pass
        found[path] = Benchmark(path=path, function=function)
    return tuple(found.values())


def judged(task: Task, params: Params, benchmarks: Sequence[Benchmark]) -> Judgement:
    """Returns the results of the task's evaluation and of the benchmarks.

    Raises:
        ConfigError: Nothing could be measured: why the first of them failed.
    """
    metrics: dict[str, Measured] = {}
    failed: dict[str, str] = {}
    first: ConfigError | None = None
    judges: list[tuple[str, Callable[[], dict[str, Measured]]]] = [(TASK_EVALUATE, lambda: _by_task(task, params))]
    judges += [(each.path, lambda each=each: _by_benchmark(each, params)) for each in benchmarks]  # type: ignore[misc]
    for name, judge in judges:
        try:
            found = judge()
            twice = sorted(metrics.keys() & found.keys())
            if twice:
                cure = f"returned the metric {twice[0]}, which there is already: give it another name"
                raise ConfigError(FIELD, name, cure)
        except ConfigError as err:
            first = first or err
            failed[name] = f"{err.cure}" if err.value == name else str(err)
        else:
            metrics |= found
    if not metrics:
        assert first is not None
        raise first
    better = {name: how for name, each in metrics.items() if (how := each.better or task.better(name))}
    stderr = {name: each.stderr for name, each in metrics.items() if each.stderr is not None}
    values = {name: each.value for name, each in metrics.items()}
    return Judgement(metrics=values, better=better, stderr=stderr, failed=failed)


def _by_task(task: Task, params: Params) -> dict[str, Measured]:
    try:
        return {name: Measured(value) for name, value in evaluated(task, params).items()}
    except ConfigError:
        raise
    except Exception as err:
        raise broken(task.describe, err, field=TASK_EVALUATE) from err


def _by_benchmark(benchmark: Benchmark, params: Params) -> dict[str, Measured]:
    try:
        found = benchmark.function(params)
    except ConfigError:
        raise
    except Exception as err:
        raise broken(benchmark.path, err, field=FIELD) from err
    named = found if isinstance(found, Mapping) else {benchmark.name: found}
    if not named or not all(isinstance(name, str) and name and name.isprintable() for name in named):
        raise ConfigError(FIELD, benchmark.path, f"returned {found!r}: must map names of metrics to numbers")
    try:
        return {
            name: value if isinstance(value, Measured) else Measured(float(np.asarray(value).item()))
            for name, value in named.items()
        }
    except (TypeError, ValueError) as err:
        cure = f"returned {found!r}: must return a number, or a mapping of names to numbers"
        raise ConfigError(FIELD, benchmark.path, cure[:300]) from err
