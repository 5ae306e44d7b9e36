"""Children that a test forks: what they say, how they end."""

import contextlib
import os
import signal
import warnings

LIMIT_S = 2  # a child that hangs ends by SIGALRM


def fork():
    """As os.fork; what JAX and newer Pythons have to say about threads is not meant for these few lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
    return pid


def said(call):
    """What ``call`` returns or raises in a forked child, as text; "ended by N" where it hangs."""
    read, write = os.pipe()
    pid = fork()
    if not pid:
        try:
            text = str(call())
        except BaseException as err:  # noqa: BLE001 (told to the parent)
            text = f"{type(err).__name__}: {err}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        text = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return text if status == 0 else f"ended by {-status}"


@contextlib.contextmanager
def living_child():
    """A forked child that lives until the end of the block, as a worker of a pool does."""
    read, write = os.pipe()
    pid = fork()
    if not pid:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        yield pid
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(pid, 0)
