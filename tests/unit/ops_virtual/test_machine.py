"""The training thread of a simulated island: it runs only while it has the baton, and ends with its process."""

import asyncio
import threading

import pytest

from broker.process import clocks
from ops.virtual.loop import Killed, VirtualTime
from ops.virtual.machine import SimMachine


@pytest.fixture
def virtual():
    before = threading.active_count()
    with VirtualTime(1) as time:
        yield time
    assert threading.active_count() == before


@pytest.fixture
def machine(virtual):
    return SimMachine(virtual.process("a"), object)


def test_time_passes_where_the_training_thread_waits_and_the_process_goes_on_meanwhile(virtual, machine):
    seen = []

    async def ticks():
        for _ in range(3):
            await asyncio.sleep(1.0)
            seen.append(("tick", round(clocks.monotonic(), 2)))

    def train():
        for _ in range(3):
            machine.sleep(0.75)
            seen.append(("step", round(clocks.monotonic(), 2)))

    machine._process.start(ticks())
    machine.train(train)
    virtual.run_until(10.0)
    steps = [("step", 0.75), ("tick", 1.0), ("step", 1.5), ("tick", 2.0), ("step", 2.25), ("tick", 3.0)]
    assert seen == steps
    assert virtual.failures == []


def test_news_wakes_it_at_once_and_only_who_waits_for_them(virtual, machine):
    news, seen = machine.news(), []

    def train():
        seen.append((news.wait(5.0), round(clocks.monotonic(), 2)))
        news.clear()
        seen.append((news.wait(2.0), round(clocks.monotonic(), 2)))
        machine.sleep(4.0)  # what is set meanwhile is there afterwards
        seen.append((news.wait(5.0), round(clocks.monotonic(), 2)))

    machine.train(train)
    for at_s in (1.0, 4.0):
        virtual.at(at_s, news.set)
    virtual.run_until(20.0)
    assert seen == [(True, 1.0), (False, 3.0), (True, 7.0)]


def test_it_waits_for_the_end_of_what_it_has_begun_and_hears_how_that_ended(virtual, machine):
    ended, seen = [], []

    async def serve():
        await asyncio.sleep(2.0)
        raise OSError("no room")

    def train():
        running = machine.serve(serve, ended.append)
        running.join(1.0)
        seen.append((running.is_alive(), round(clocks.monotonic(), 2)))
        running.join(5.0)
        seen.append((running.is_alive(), round(clocks.monotonic(), 2)))

    machine.train(train)
    virtual.run_until(10.0)
    assert seen == [(True, 1.0), (False, 2.0)]
    assert [str(error) for error in ended] == ["no room"]


def test_a_bell_rings_in_the_process(virtual, machine):
    seen = []

    async def serve():
        bell = machine.bell(lambda: seen.append(asyncio.get_running_loop() is machine._process))
        machine.train(bell.ring)
        await asyncio.sleep(1.0)

    machine._process.start(serve())
    virtual.run_until(2.0)
    assert seen == [True]


@pytest.mark.parametrize("at_s", [0.0, 0.5])
def test_a_killed_process_takes_its_training_thread_with_it_and_nothing_of_that_is_heard(virtual, machine, at_s):
    seen = []

    def train():
        try:
            machine.sleep(1.0)
            seen.append("slept")
        finally:
            machine.within(1.0, lambda: seen.append("written"))

    machine.train(train)
    virtual.at(at_s, machine._process.kill)
    virtual.run_until(5.0)
    assert (seen, virtual.failures) == ([], [])


def test_a_training_thread_may_kill_its_process_and_what_it_raises_fails_the_seed(virtual, machine):
    def dies():
        raise Killed

    machine.train(dies)
    virtual.run_until(1.0)
    assert not machine._process.alive
    other = SimMachine(virtual.process("b"), object)
    other.train(lambda: 1 // 0)
    virtual.run_until(2.0)
    assert "ZeroDivisionError" in virtual.failures[0]
