"""The clock of daemons: it never goes back, and jumps only where it was told to."""

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import ConfigError
from broker.process import clocks
from islands.session.thread import CommunicationThread


@given(readings=st.lists(st.floats(0, 1e6), min_size=2))
def test_a_steady_clock_never_goes_back_and_goes_forward_as_its_source_does(readings):
    source = iter(readings)
    clock = clocks.SteadyClock(lambda: next(source))
    seen = [clock() for _ in readings[1:]]
    assert seen == sorted(seen)
    forward = sum(max(0.0, b - a) for a, b in pairwise(readings))
    assert seen[-1] - readings[0] == pytest.approx(forward, abs=1e-3)


def test_without_a_file_it_is_the_clock_itself():
    assert clocks.shifted(None) is time.monotonic
    assert clocks.shifted("") is time.monotonic


def test_an_offset_file_makes_it_jump_while_it_runs(tmp_path):
    path = tmp_path / "clock"
    clocks.write_offset(path, 0.0)
    clock = clocks.shifted(str(path), lambda: 5.0)
    for offset_s in (0.0, 30.5, -2.0):
        clocks.write_offset(path, offset_s)
        assert clock() == 5.0 + offset_s


@pytest.mark.parametrize("content", [None, b""])
def test_a_file_that_cannot_hold_an_offset_is_refused(tmp_path, content):
    path = tmp_path / "clock"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="8 bytes"):
        clocks.shifted(str(path))


def test_a_timer_of_an_islands_thread_goes_by_the_clock_of_its_deadlines():
    """Those of the event loop and of the island differ by an hour, after a drill."""
    delays = []
    loop = SimpleNamespace(call_later=lambda delay_s, *_: delays.append(delay_s))
    thread = SimpleNamespace(_loop=loop, _clock=lambda: 3600.0, _guarded=None)
    for at_s in (3602.0, 1.0):
        CommunicationThread._ring(thread, at_s, lambda: None)
    assert delays == [2.0, 0.001]
