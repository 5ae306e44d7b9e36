"""Runs lm-evaluation-harness for :mod:`ops.evaluation.harness`, with no package of ours.

The one argument is JSON: ``names`` of tasks, ``files`` of tasks, a ``folder`` of them or null, and ``limit`` or null.
The first line of the output says that the tasks are there. Then each line of the input is a model's directory, and each
line of the output what was measured of it: ``{"rows": [[name, value, better, stderr], ..]}`` or ``{"error": why}``.
"""

import difflib
import json
import math
import os
import sys
from typing import Any


def main() -> None:
    """Answers until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print what they like
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as the harness's own command does
    wanted = json.loads(sys.argv[1])

    def answer(**said: Any) -> None:
        print(json.dumps(said), file=answers, flush=True)

    try:
        manager, tasks = _found(**wanted)
    except Exception as err:  # noqa: BLE001 (told where the process was started)
        answer(error=str(err) if isinstance(err, LookupError) and err.args else f"{type(err).__name__}: {err}")
        return
    answer(tasks=tasks)

    from lm_eval import simple_evaluate

    for line in sys.stdin:
        try:
            found = simple_evaluate(
                model="hf",
                model_args={"pretrained": line.rstrip("\n")},
                device="cuda:0",  # as the harness's own command has it; the CPU where there is none
                tasks=tasks,
                task_manager=manager,
                limit=wanted["limit"],
                log_samples=False,
            )
            answer(rows=_rows(found))
        except Exception as err:  # noqa: BLE001 (likewise)
            answer(error=f"{type(err).__name__}: {err}")


def _found(*, names: list[str], files: list[str], folder: str | None, limit: int | None) -> tuple[Any, list[str]]:
    """Returns the manager of tasks, and those to run; their data are read, to see what is missing."""
    from lm_eval.tasks import TaskManager

    tasks = names + files
    if folder is not None:
        tasks += TaskManager(include_path=folder, include_defaults=False).all_subtasks
        if not tasks:
            raise LookupError(f"{folder} has no task file: *.yaml with the key task")
    manager = TaskManager(include_path=folder, include_defaults=bool(names))
    for name in names:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, 3)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise LookupError(
                f"lm-evaluation-harness has no task {name}{hint}; a folder is named with a slash, ./{name}"
            )
    for task in tasks:
        try:
            loaded = manager.load([task])["tasks"]
        except Exception as err:
            raise LookupError(f"the task {task} cannot be loaded: {type(err).__name__}: {err}") from err
        for each in loaded.values():  # a metric that is not known is no error there, and gives no figure
            metrics = getattr(each, "_metric_fn_list", {})
            if each.config.process_results is None and None in metrics.values():
                unknown = ", ".join(name for name, function in metrics.items() if function is None)
                raise LookupError(f"the task {task} cannot be loaded: it has the unknown metric {unknown}")
    return manager, tasks


def _rows(found: Any) -> list[tuple[str, float, str, float | None]]:
    rows = []
    for task, results in found["results"].items():
        for key, value in results.items():
            metric, comma, way = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = results.get(f"{metric}_stderr,{way}")
            higher = found["higher_is_better"].get(task, {}).get(metric)
            better = "" if higher is None else "max" if higher else "min"
            name = f"{task}/{metric}" if way == "none" else f"{task}/{metric}/{way}"
            known = isinstance(stderr, int | float) and math.isfinite(stderr)  # "N/A" of some metrics
            rows.append((name, float(value), better, float(stderr) if known else None))
    return rows


if __name__ == "__main__":
    main()
