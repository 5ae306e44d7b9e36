"""The end of an island that has lost a host: no other one can go on, and each process ends. Shell."""

from __future__ import annotations

import os
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
    """Returns the error that the training thread is to raise; the process ends soon, whether it does or not."""
    error = Unavailable(f"{what}: this island ends, start all its hosts again", definite=True)
    log.error("hosts.lost", detail=what, ends_within_s=END_WITHIN_S)
    threading.Thread(target=_end, name="atoll-end", daemon=True).start()
    return error


def _end() -> None:
    time.sleep(END_WITHIN_S)
    log.error("hosts.ends", status=STATUS, detail="a host was lost: the process ends without waiting for what it does")
    os._exit(STATUS)
