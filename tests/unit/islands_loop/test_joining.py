"""Between the arguments of a join and the first version."""

import threading
from types import SimpleNamespace

import pytest

from broker.base.errors import Unavailable
from broker.process import clocks
from islands.interface.config import IslandConfig
from islands.joining import _name_others, _wait_until_startable
from islands.session.exchange import Exchange


def test_silence_is_measured_by_the_clock_that_says_when_the_run_was_heard(monkeypatch):
    """A drill sets that clock an hour ahead while an island joins; the run is heard then, and never again."""
    now_s = 100.0
    looked_at_s = []

    def look():
        nonlocal now_s
        now_s += 1.0
        looked_at_s.append(now_s)
        if len(looked_at_s) == 5:
            now_s += 3600.0
            exchange.heard_at_s = now_s
        assert len(looked_at_s) < 100

    monkeypatch.setattr(clocks, "monotonic", lambda: now_s)
    exchange = Exchange()
    exchange.news.wait = lambda timeout: True
    with pytest.raises(Unavailable, match="was silent for 10 s"):
        _wait_until_startable(exchange, IslandConfig(join_timeout_s=10.0), look)
    assert looked_at_s[-1] - exchange.heard_at_s == 11.0


def test_a_thread_that_has_joined_the_run_before_is_told_of_the_island_that_it_left_behind(monkeypatch, caplog):
    here = threading.get_ident()
    places = [("first", "demo", here), ("of-another-run", "other", here), ("of-another-thread", "demo", here + 1)]
    made = [SimpleNamespace(id=name, inner_step=7, left=False) for name, _, _ in places]
    made.append(SimpleNamespace(id="gone", inner_step=7, left=True))
    by = [(run, thread) for _, run, thread in [*places, ("", "demo", here)]]
    joined = [(lambda island=island: island, *of) for island, of in zip(made, by, strict=True)]
    monkeypatch.setattr("islands.joining._joined", joined)
    _name_others("demo")
    assert len(caplog.records) == 1
    assert "island.joined_before run=demo island=first" in caplog.text
    assert "at step 7: call its leave() first" in caplog.text
