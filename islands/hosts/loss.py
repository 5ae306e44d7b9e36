"""Ends all processes of an island when one was lost or has a wrong setting. Shell."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time

from broker.base.errors import ConfigError, Unavailable
from broker.process import logs

log = logs.get(__name__)

#: The training thread may wait for the lost host in a collective that never returns: it gets so long to raise.
END_WITHIN_S = 3.0
#: Process 0 goes last where the status is to be read: JAX aborts the others, by SIGABRT, once it is gone.
LAST_AFTER_S = END_WITHIN_S + 1.0
#: Exit statuses, for what starts processes again: EX_TEMPFAIL of sysexits.h; and what does not help again.
STATUS, MISTAKEN = 75, 2


def lost(what: str) -> Unavailable:
    """Returns the error that the training thread is to raise; either way the process ends soon."""
    error = Unavailable(f"{what}: this island ends, start all its hosts again", definite=True)
    log.error("hosts.lost", detail=what, ends_within_s=END_WITHIN_S)
    end_soon(STATUS, "a host was lost")
    return error


def end_soon(status: int, why: str) -> None:
    """Has the process end within :data:`END_WITHIN_S`, in whatever its training thread waits."""

    def end() -> None:
        time.sleep(END_WITHIN_S)
        log.error("hosts.ends", status=status, detail=f"{why}: the process ends without waiting for what it does")
        _end(status)

    threading.Thread(target=end, name="atoll-end", daemon=True).start()


def end_at_exit(error: BaseException | None, *, last: bool = False, ending: bool = False) -> None:
    """Has the process end at once when it comes to its end, with an exit status that says why.

    The status is :data:`MISTAKEN` for a wrong setting, else :data:`STATUS`.

    The framework that has brought the hosts together would wait there for those that are gone: ``jax.distributed`` for
    a minute, with the interpreter's lock held.

    Args:
        error: What has ended training, if it was an error.
        last: Where a setting is wrong, this process ends after the others (:data:`LAST_AFTER_S`).
        ending: That end has come.
    """
    status = MISTAKEN if isinstance(error, ConfigError) else STATUS
    wait_s = LAST_AFTER_S if last and status == MISTAKEN else 0.0
    if ending:
        _end(status, wait_s)
    atexit.register(_end, status, wait_s)


def end_if_uncaught(error: ConfigError, *, last: bool) -> None:
    """Has the process end with :data:`MISTAKEN` where this error, of a join, is what ends it."""
    atexit.register(lambda: end_at_exit(error, last=last, ending=True) if uncaught() is error else None)


def uncaught() -> BaseException | None:
    """Returns the exception that ends this process; None as long as there is none."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


def _end(status: int, wait_s: float = 0.0) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(wait_s)
    os._exit(status)


os.register_at_fork(after_in_child=lambda: atexit.unregister(_end))  # the status of a child is its own
