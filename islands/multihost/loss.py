"""The end of an island that has lost a host: no other one can go on, and each process ends. Shell."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time

from broker.process import logs
from broker.wire.errors import Unavailable

log = logs.get(__name__)

#: The training thread may wait for the lost host in a collective that never returns: it gets so long to raise.
END_WITHIN_S = 3.0
#: Exit status, for whoever starts processes again: EX_TEMPFAIL of sysexits.h.
STATUS = 75


def lost(what: str) -> Unavailable:
    """Returns the error that the training thread is to raise; either way the process ends soon."""
    error = Unavailable(f"{what}: this island ends, start all its hosts again", definite=True)
    log.error("hosts.lost", detail=what, ends_within_s=END_WITHIN_S)
    threading.Thread(target=_end_soon, name="atoll-end", daemon=True).start()
    return error


def end_at_exit(*, ending: bool) -> None:
    """Has the process end at once, with :data:`STATUS`, when it comes to its end; ``ending``: now.

    The framework that has brought the hosts together would wait there for those that are gone: ``jax.distributed`` for
    a minute, with the interpreter's lock held.
    """
    if ending:
        _end()
    atexit.register(_end)


def _end_soon() -> None:
    time.sleep(END_WITHIN_S)
    log.error("hosts.ends", status=STATUS, detail="a host was lost: the process ends without waiting for what it does")
    _end()


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(STATUS)


os.register_at_fork(after_in_child=lambda: atexit.unregister(_end))  # the status of a child is its own
