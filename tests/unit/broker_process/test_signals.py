"""Signals are remembered, and a hang-up that nobody is to hear is not."""

import os
import signal

import pytest

from broker.process.signals import Interrupted, Signals


@pytest.fixture(autouse=True)
def _heard():
    """A hang-up is heard, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_told_when_it_is_asked_for_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with Signals() as signals:
        signals.check()
        os.kill(os.getpid(), number)
        with pytest.raises(Interrupted) as caught:
            signals.check()
    assert caught.value.number == number
    assert signal.getsignal(number) == before


def test_a_hang_up_that_nohup_made_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            signals.check()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
