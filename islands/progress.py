"""The progress of an island in training: a log line every few seconds, a row for ``--log-to``. Shell."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import islands
from broker.process import logs
from broker.sinks.process import SinkProcess
from broker.sinks.rows import Row, row
from broker.sinks.sink import Identity
from broker.sinks.target import target_of
from islands.config import IslandConfig
from islands.tasks.task import OptState, Task

log = logs.get(__name__)

SAY_EVERY_S = 5.0
#: What a library may take at the end of training to write its last points; container engines kill after ten seconds.
CLOSE_WITHIN_S = 4.0


class Progress:
    """Says how far an island is, in its log and where ``config.log_to`` names."""

    def __init__(self, island: islands.Island, task: Task, config: IslandConfig) -> None:
        self._island, self._rate = island, task.learning_rate
        self._said_at_s, self._tokens = time.monotonic(), island.tokens
        self._sink: SinkProcess | None = None
        if config.log_to is not None:
            name = f"{config.run_id}-{island.id}"
            folder = (config.state_dir or Path()).absolute()
            identity = Identity(key=name, name=name, group=config.run_id, folder=folder)
            self._sink = SinkProcess(target_of(config.log_to), identity)

    def prepare(self, opt_state: OptState) -> None:
        """Computes the learning rate once before the first step, which compiles what no step should wait for."""
        if self._sink is not None and self._rate is not None:
            self._rate(opt_state, self._island.schedule)

    def say(self, loss: Any, opt_state: OptState, *, now: bool = False) -> None:
        """Says how far the island is, if it is time; reads the loss, and so waits for a device, only then."""
        now_s, island = time.monotonic(), self._island
        passed_s = now_s - self._said_at_s
        if loss is None or not (now or passed_s >= SAY_EVERY_S):
            return
        tokens_per_s = round((island.tokens - self._tokens) / max(passed_s, 1e-3))
        log.info(
            "island.progress",
            step=island.inner_step,
            loss=round(float(loss), 4),
            tokens=island.tokens,
            tokens_per_s=tokens_per_s,
            sync_share=round(island.sync_share, 5),
            versions=island.versions,
        )
        self._said_at_s, self._tokens = now_s, island.tokens
        if self._sink is not None:
            self._offer(self._sink, loss, opt_state, tokens_per_s)

    def close(self) -> None:
        """Lets the library write its last points, for a few seconds."""
        if self._sink is not None:
            self._sink.close(CLOSE_WITHIN_S)

    def _offer(self, sink: SinkProcess, loss: Any, opt_state: OptState, tokens_per_s: float) -> None:
        island, at = self._island, time.time()
        rate = None if self._rate is None else self._rate(opt_state, island.schedule)  # dispatched; read elsewhere
        step, tokens, versions, sync_share = island.inner_step, island.tokens, island.versions, island.sync_share

        def make() -> Row:
            values = {
                "island/loss": float(loss),
                "island/learning_rate": None if rate is None else float(rate),
                "island/tokens_per_s": tokens_per_s,
                "island/step": step,
                "island/sync_share": sync_share,
                "island/model_version": sum(versions),
            }
            return row("island", tokens, at, values)

        sink.offer(make)
