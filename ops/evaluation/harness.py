"""Benchmarks of lm-evaluation-harness, ``lm_eval:TASKS[,LIMIT]``, in an environment of its own.

A task is one of the harness's own by its name, or a file or a folder of them; several are joined by ``+``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.base.errors import ConfigError
from ops.launcher import LauncherError, lm_eval_environment
from ops.processes.child_process import tied

if TYPE_CHECKING:  # what follows a run limits its threads before anything is loaded that computes
    from islands.tasks.benchmarks import Measured
    from islands.tasks.task import Params, Task

FIELD = "benchmark"
LM_EVAL, PERPLEXITY = "lm_eval", "perplexity"
_WORKER = Path(__file__).with_name("harness_worker.py")


def check(path: str) -> bool:
    """Returns True if a benchmark is one of those that have a kind; nothing is loaded.

    Raises:
        ConfigError: It is one, and does not read so, or names a file that is not there.
    """
    kind, colon, text = path.partition(":")
    if colon and kind == PERPLEXITY and not Path(text).expanduser().exists():
        raise ConfigError(
            FIELD, path, f"there is no file {text!r}: name texts, JSON lines or Parquet, or a folder of them"
        )
    if colon and kind == LM_EVAL:
        parsed(path)
    return bool(colon) and kind in (LM_EVAL, PERPLEXITY)


def parsed(path: str) -> dict[str, Any]:
    """Reads ``lm_eval:TASKS[,LIMIT]``.

    Returns:
        ``names`` of tasks, ``files`` and a ``folder`` of them (absolute; None: none), and ``limit`` (None: none).

    Raises:
        ConfigError: LIMIT is no whole number, a task has no name, a path leads nowhere, or paths lead to two folders.
    """
    tasks, comma, limit = path.partition(":")[2].partition(",")
    if comma and not (limit.isdecimal() and int(limit)):
        cure = f"LIMIT is {limit!r}: must be a whole number of examples above 0; several tasks are joined by +, as a+b"
        raise ConfigError(FIELD, path, cure)
    names: list[str] = []
    files: list[str] = []
    folders: list[str] = []
    for task in tasks.split("+"):
        at = Path(task).expanduser().resolve()
        if not task:
            raise ConfigError(FIELD, path, "must read lm_eval:TASKS[,LIMIT], such as lm_eval:piqa+arc_easy,100")
        if "/" not in task and not task.endswith((".yaml", ".yml")):
            names.append(task)
        elif at.exists():
            (folders if at.is_dir() else files).append(os.fspath(at))
        else:
            raise ConfigError(FIELD, path, f"there is no task file and no folder {task!r}: check the path")
    if len(folders) + len({*map(os.path.dirname, files)}) > 1:
        cure = "has task files of several folders, whose data would not be found: give --benchmark once for each"
        raise ConfigError(FIELD, path, cure)
    folder = folders[0] if folders else None
    return {"names": names, "files": files, "folder": folder, "limit": int(limit) if comma else None}


def by_task(path: str, task: Task) -> Callable[[Params], Any]:
    """Returns the function of a benchmark that a task makes itself, ``perplexity:FILE``.

    Raises:
        ConfigError: The task makes none such, or the file does not suit it.
    """
    kind, _, text = path.partition(":")
    if kind not in task.benchmarks:
        cure = f"is for language models of islands.hf:task; this run trained another ({task.describe})"
        raise ConfigError(FIELD, path, cure)
    return task.benchmarks[kind](text)


class Harness:
    """One benchmark, and the process that runs it on one model after another.

    Args:
        path: ``lm_eval:TASKS[,LIMIT]``.

    Raises:
        ConfigError: The harness cannot be installed here, or does not find the tasks or their data.
    """

    def __init__(self, path: str) -> None:
        self._path, self._wanted = path, parsed(path)
        self._start()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:  # closes its pipes, and waits
            pass
        self._errors.close()

    def judge(self, task: Task) -> Callable[[Params], Mapping[str, Measured]]:
        """Returns a function of parameters, which gives figures ``TASK/METRIC[/FILTER]``.

        Raises:
            ConfigError: The task has no form for Hugging Face; of the function, the harness fails; says why.
        """
        from islands.tasks.benchmarks import Measured

        save = saver(self._path, task)

        def measured(params: Params) -> Mapping[str, Measured]:
            if self._process.poll() is not None:
                self.close()
                self._start()
            with tempfile.TemporaryDirectory(prefix="atoll-lm-eval-") as temporary:
                folder = Path(temporary, "model")
                save(params, folder)
                rows = self._asked(os.fspath(folder))["rows"]
            return {name: Measured(value, better, stderr) for name, value, better, stderr in rows}

        return measured

    def _start(self) -> None:
        files, folder = self._wanted["files"], self._wanted["folder"]
        command = tied([_python(self._path), "-P", os.fspath(_WORKER), json.dumps(self._wanted)])
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (close())
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=folder or (os.path.dirname(files[0]) if files else None),  # where paths of data begin
            env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")},
        )
        try:
            self._asked(None)
        except ConfigError:
            self.close()
            raise

    def _asked(self, model: str | None) -> dict[str, Any]:
        """Hands over a model's directory, or nothing at the start, and returns the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if model is not None:
                print(model, file=self._process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self._process.stdout.readline() or "{}")
        except BrokenPipeError:
            answer = {}
        if not answer:
            status = self._process.wait()
            self._errors.seek(0)
            said = [line for line in self._errors.read().splitlines() if line.strip()]
            answer = {"error": f"its process ended with status {status}: {said[-1] if said else 'it said nothing'}"}
        if "error" in answer:
            why = " ".join(answer["error"].split())[:500]
            offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
            cure = " (HF_HUB_OFFLINE is set: fetch it before, or use a task file with its data beside it)"
            raise ConfigError(FIELD, self._path, why + cure if offline and "Offline" in why else why)
        return answer


def saver(path: str, task: Task) -> Any:
    """Returns a function that writes parameters to a new folder as ``export --hf`` does, merged.

    Raises:
        ConfigError: The task does not know its model.
    """
    from broker.process.demands import has_base
    from broker.wire.fragments import Kind
    from islands.arrays import placement
    from islands.arrays.partition import tensor_specs

    write = task.save
    if write is None:
        cure = f"needs a task that knows its model, as islands.hf:task does; this run trained another ({task.describe})"
        raise ConfigError(FIELD, path, cure)

    def save(params: Params, folder: Path) -> None:
        names = [each.name for each in tensor_specs(params, task.kinds) if each.kind is not Kind.LOCAL]
        folder.mkdir()
        write({name: placement.to_host(params[name]) for name in names}, folder, "f32", has_base(task.inputs))
        made = str(json.loads((folder / "config.json").read_text("utf-8")).get("architectures"))
        if not any(kind in made for kind in ("CausalLM", "LMHead", "ConditionalGeneration")):
            raise ConfigError(FIELD, path, f"is for models that generate text: this run trained {made}")

    return save


def _python(path: str) -> str:
    """Returns the interpreter that has the harness; its environment is built if need be."""
    if find_spec("lm_eval") is not None:
        return sys.executable
    try:
        return os.fspath(lm_eval_environment() / "python")
    except LauncherError as err:
        raise ConfigError(FIELD, path, str(err)) from err
