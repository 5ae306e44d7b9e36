"""What a forked child has of its parent, or rather has not: handlers, locks, ports, pipes, the end of the process."""

import atexit
import os
import signal
import tempfile
import threading
from concurrent.futures import Future

import pytest

from broker.metrics.serving import MetricsServer
from broker.process import clocks
from broker.process.signals import Signals
from islands.hook import Hook
from islands.hosts import loss
from islands.joining import HostIdentity
from islands.session import workers
from tests.forked import fork, living_child, said


@pytest.fixture(autouse=True)
def usual(monkeypatch):
    """Of the handlers that the runner of the tests may have replaced."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield usual
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("taken", [Signals, lambda: Hook("tcp://hub:7001")], ids=["daemon", "hook"])
def test_a_child_ends_when_it_is_told_to_as_if_we_had_taken_no_signal(taken, usual):
    with taken():
        assert said(lambda: [signal.getsignal(each) for each in usual]) == str(list(usual.values()))
        for _ in range(20):  # at once, too, while it is still being made
            pid = fork()
            while not pid:
                signal.pause()
            os.kill(pid, signal.SIGTERM)
            assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_that_the_program_puts_over_ours_is_its_childrens_and_stays():
    def mine(number, frame):
        pass

    with Signals():
        signal.signal(signal.SIGTERM, mine)
        assert said(lambda: signal.getsignal(signal.SIGTERM) is mine) == "True"
    assert signal.getsignal(signal.SIGTERM) is mine


def test_what_children_that_live_on_would_hold_is_their_parents_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    seat, server = HostIdentity.take("demo"), MetricsServer("127.0.0.1", 0, list)
    port = server.port
    with living_child():
        seat.release()
        server.close()
        again = HostIdentity.take("demo")
        assert again.name == seat.name
        again.release()
        MetricsServer("127.0.0.1", port, list).close()


def test_a_child_waits_for_no_thread_and_no_lock_of_its_parent():
    held, free = threading.Event(), threading.Event()

    def reads():
        with clocks._source.monotonic._lock:
            held.set()
            free.wait(20)

    reader, job = threading.Thread(target=reads), Future()
    reader.start()
    held.wait(20)
    workers._at_work.add(job)
    try:
        assert said(lambda: clocks.monotonic() > 0) == "True"
        assert said(lambda: len(workers._at_work)) == "0"
    finally:
        free.set()
        reader.join()
        workers._at_work.discard(job)


def test_a_child_of_a_host_that_ends_has_an_exit_status_of_its_own():
    def host():
        atexit._clear()  # of the runner of the tests
        loss.end_at_exit(None)
        return said(lambda: atexit._run_exitfuncs() or "its own")

    assert said(host) == "its own"
