"""MLflow: a run of an experiment for each run or island, found again by a tag."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from ops.sinks.sink import Identity
from ops.story.rows import Row, marker

#: Names a run by our key; MLflow's own id of it is random.
TAG = "atoll.key"
#: Where MLFLOW_EXPERIMENT_NAME names none.
EXPERIMENT = "atoll"
#: That one request may have.
MOST_AT_ONCE = 1000
_NOT_IN_NAMES = re.compile(r"[^\w\-./ ]")


class MlflowSink:
    """A run of an experiment, which :class:`ops.sinks.sink.Sink` describes."""

    def __init__(self, uri: str, identity: Identity) -> None:
        """Finds the run, or makes it."""
        self._client = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([experiment_id], f"tags.`{TAG}` = '{identity.key}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {TAG: identity.key, "atoll.run": identity.group}
            self._run_id = self._client.create_run(experiment_id, run_name=identity.name, tags=tags).info.run_id
        # A request is kept whole or not at all by a database. In plain files the first row may be there in part.
        self._looks = bool(found) and urlsplit(uri).scheme in ("", "file")

    def written(self, stream: str) -> int:
        """Returns the last step that the server has, by the marker, which is the last value of a row."""
        return self._last_step(marker(stream))

    def write(self, row: Row) -> None:
        """Logs all points of the row, in one request where they fit."""
        names = {name: _NOT_IN_NAMES.sub("_", name) for name in row.values}
        if self._looks:
            names = {name: there for name, there in names.items() if self._last_step(there) < row.step}
        self._looks = False
        at_ms = int(row.at * 1000)
        points = [Metric(there, row.values[name], at_ms, row.step) for name, there in names.items()]
        for first in range(0, len(points), MOST_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=points[first : first + MOST_AT_ONCE])

    def flush(self) -> None:
        """Does nothing: a request has been answered, or has failed."""

    def close(self) -> None:
        """Marks the run as finished; it may be resumed."""
        self._client.set_terminated(self._run_id)

    def _last_step(self, name: str) -> int:
        return max((each.step for each in self._client.get_metric_history(self._run_id, name)), default=-1)
