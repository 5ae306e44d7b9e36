"""Follows a run and writes its rows into one library, until the run has ended.

A follower remembers nothing: the library tells when opened which rows it has, and all else is on the tapes. So a
follower that was killed, or whose library failed, starts again from the beginning.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from broker.base.errors import ConfigError, Unavailable
from broker.process import logs
from broker.process.signals import Interrupted
from ops.sinks.sink import NewRows, Sink, reason
from ops.sinks.sources import Source
from ops.sinks.target import Target

log = logs.get(__name__)

LOOK_EVERY_S = 1.0
#: Between attempts: this, and twice as long each time.
AGAIN_S, AGAIN_AT_MOST_S = 5.0, 300.0
#: Attempts once the run has ended, and between them.
ATTEMPTS_AT_THE_END, AT_THE_END_S = 2, 1.0
#: A wait is cut into pieces, so that a signal is noticed.
NAP_S = 0.2


class Follower:
    """One run and one library.

    Args:
        target: Where rows go, for people.
        open_sink: Opens the library; may raise anything.
        open_source: Returns the rows of the run from their beginning.
        check: Called often; what it raises ends the following.
    """

    def __init__(
        self,
        target: Target,
        *,
        open_sink: Callable[[], Sink],
        open_source: Callable[[], Source],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._target, self._check = target, check
        self._open_sink, self._open_source = open_sink, open_source
        self.written = 0  #: rows, by this process
        self._failures = 0  # in a row

    def follow(self) -> None:
        """Returns when the run has ended and its last row was written.

        Raises:
            ConfigError: The run is none.
            Unavailable: The run has ended, and the library does not take its rows.
        """
        failures_at_the_end = 0
        while True:
            source = self._open_source()
            try:
                sink = self._open_sink()
            except Exception as err:  # noqa: BLE001 (a library may raise anything)
                failed: Exception = err
            else:
                try:
                    self._write(source, sink)
                except (ConfigError, Interrupted):
                    raise
                except Exception as err:  # noqa: BLE001 (likewise)
                    failed = err
                else:
                    return
                finally:
                    _close(sink)
            self._tell(failed)
            self._read(source)
            if source.over():
                failures_at_the_end += 1
                if failures_at_the_end == ATTEMPTS_AT_THE_END:
                    said = f"{self._target} does not take the rows of the run ({reason(failed)}): {self._target.cure}"
                    raise Unavailable(said, definite=False) from failed
            self._wait_for_end(source, min(AGAIN_S * 2 ** (self._failures - 1), AGAIN_AT_MOST_S))

    def _write(self, source: Source, sink: Sink) -> None:
        """Writes rows until the run has ended; raises whatever source and library raise."""
        new = NewRows(sink)
        while True:
            self._check()
            over = source.over()  # asked before reading: what is read then is all
            try:
                rows = source.rows()
            except Unavailable as err:  # Redis, which comes back
                if over:
                    raise
                self._tell(err, cure="its Redis does not answer; goes on when it does")
                self._wait(AGAIN_S)
                continue
            for row in rows:
                self.written += new.write(row)
            if rows:
                sink.flush()
                self._failures = 0
            if over:
                return
            self._wait(LOOK_EVERY_S)

    @staticmethod
    def _read(source: Source) -> None:
        """Reads on without writing, to see whether the run has ended."""
        with contextlib.suppress(Unavailable):  # Redis
            source.rows()

    def _tell(self, err: Exception, cure: str = "") -> None:
        """Logs a failure, if it is the first in a row."""
        self._failures += 1
        if self._failures == 1:
            log.warning("log.failing", to=str(self._target), reason=reason(err), cure=cure or self._target.cure)

    def _wait_for_end(self, source: Source, seconds: float) -> None:
        """Waits for ``seconds`` or the end of the run, so that the end is not held up for long."""
        ends_at_s = time.monotonic() + seconds
        self._wait(AT_THE_END_S)
        while time.monotonic() < ends_at_s and not source.over():
            self._read(source)
            self._wait(AT_THE_END_S)

    def _wait(self, seconds: float) -> None:
        ends_at_s = time.monotonic() + seconds
        while (left_s := ends_at_s - time.monotonic()) > 0:
            self._check()
            time.sleep(min(NAP_S, left_s))


def _close(sink: Sink) -> None:
    try:
        sink.close()
    except Exception as err:  # noqa: BLE001 (a library may raise anything)
        log.warning("log.not_closed", reason=reason(err))
