"""The event loop of virtual time: order, timers, threads, clocks that are wrong, and processes that die."""

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from broker.process import chance, clocks
from ops.virtual.loop import Killed, VirtualTime
from ops.virtual.queue import ClockTrouble


@pytest.fixture
def virtual():
    with VirtualTime(1) as time:
        yield time


def test_callbacks_run_in_order_and_timers_at_their_times(virtual):
    process, seen = virtual.process("a"), []

    def note(what):
        seen.append((what, round(clocks.monotonic(), 2)))

    async def main():
        loop = asyncio.get_running_loop()
        loop.call_later(2.0, note, "two")
        loop.call_later(1.0, note, "one")
        loop.call_later(1.5, note, "never").cancel()
        loop.call_soon(note, "first")
        loop.call_soon(note, "second")
        await asyncio.sleep(3.0)
        note("end")

    process.start(main())
    virtual.run_until(10.0)
    assert seen == [("first", 0), ("second", 0), ("one", 1), ("two", 2), ("end", 3)]
    assert virtual.now_s == 10.0
    assert clocks.wall() == 1_700_000_010.0


def test_what_asyncio_offers_works(virtual):
    async def main():
        queue, event = asyncio.Queue(1), asyncio.Event()

        async def fill():
            for number in range(5):
                await queue.put(number)
            event.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(fill())
            found = [await queue.get() for _ in range(5)]
            await event.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 1.0)
        return found, await asyncio.gather(asyncio.sleep(1.0, "x"), asyncio.to_thread(str, 7))

    done = virtual.process("a").start(main())
    virtual.run_until(10.0)
    assert done.result() == (list(range(5)), ["x", "7"])
    assert virtual.failures == []


def test_each_process_has_its_own_loop_and_clock(virtual):
    late = virtual.process("late", (ClockTrouble(process="late", at_s=0.0, jump_s=100.0, rate=0.5, for_s=10.0),))
    right, seen = virtual.process("right"), {}

    async def main(process):
        assert asyncio.get_running_loop() is process
        began_s = clocks.monotonic()
        await asyncio.sleep(1.0)
        seen[process.name] = round(clocks.monotonic() - began_s, 2), round(virtual.now_s, 2)

    for process in (late, right):
        process.start(main(process))
    virtual.run_until(5.0)
    assert seen == {"right": (1.0, 1.0), "late": (1.0, 2.0)}
    assert late.run(clocks.monotonic) == 102.5
    assert virtual.failures == []


def test_a_clock_that_goes_back_stands_still_and_its_wall_clock_goes_back(virtual):
    process = virtual.process("a", (ClockTrouble(process="a", at_s=2.0, jump_s=-100.0),))
    readings = []

    async def main():
        for _ in range(4):
            readings.append(clocks.monotonic())
            await asyncio.sleep(1.0)

    process.start(main())
    virtual.run_until(20.0)
    assert len(readings) == 4
    assert readings == sorted(readings)
    assert process.run(clocks.wall) == 1_700_000_000.0 + 20.0 - 100.0


def test_a_killed_process_does_nothing_more_and_is_not_told(virtual):
    process, seen = virtual.process("a"), []

    async def main():
        asyncio.get_running_loop().call_later(2.0, seen.append, "timer")
        job = asyncio.to_thread(seen.append, "job")
        try:
            await asyncio.gather(job, asyncio.sleep(2.0))
        finally:
            seen.append("finally")

    process.start(main())
    process.job_s = lambda pool: 1.0
    virtual.at(0.5, process.kill)
    virtual.run_until(5.0)
    assert seen == []
    virtual.close()
    assert seen == ["finally"]
    assert virtual.failures == []


def test_a_process_can_die_in_the_middle_of_what_it_does(virtual):
    process, seen = virtual.process("a"), []

    def write():
        seen.append("half")
        raise Killed

    async def main():
        try:
            await asyncio.to_thread(write)
        finally:
            seen.append("finally")

    process.start(main())
    virtual.run_until(5.0)
    assert (process.alive, seen) == (False, ["half"])


def test_the_jobs_of_a_pool_have_their_effect_when_they_end_and_in_order(virtual):
    process, seen = virtual.process("a"), []
    process.job_s = lambda pool: {"disk": 1.0, "": 0.25}[pool]

    async def main():
        loop, disk = asyncio.get_running_loop(), ThreadPoolExecutor(1, "disk")
        jobs = [loop.run_in_executor(disk, lambda n=n: seen.append((n, clocks.monotonic()))) for n in range(3)]
        jobs[2].cancel()
        await asyncio.to_thread(seen.append, "beside")
        await jobs[1]
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(disk, lambda: 1 // 0)
        disk.shutdown()
        with pytest.raises(RuntimeError, match="shutdown"):
            loop.run_in_executor(disk, print)

    process.start(main())
    virtual.run_until(10.0)
    assert [each if isinstance(each, str) else (each[0], round(each[1], 2)) for each in seen] == [
        "beside",
        (0, 1.0),
        (1, 2.0),
    ]
    assert virtual.failures == []


def test_what_no_task_catches_is_a_failure_of_the_seed(virtual):
    async def wrong():
        raise ValueError("broken")

    virtual.process("a").start(wrong())
    virtual.process("b").call_soon(wrong, "one argument too many")
    virtual.run_until(1.0)
    of_callback, of_task = virtual.failures
    assert "s b: Exception in callback" in of_callback
    assert "TypeError" in of_callback
    assert "s a: main failed" in of_task
    assert of_task.endswith("ValueError: broken\n")


def test_a_frozen_process_goes_on_with_what_came_meanwhile(virtual):
    process, seen = virtual.process("a"), []
    process.freeze(3.0)
    process.call_later(1.0, lambda: seen.append(virtual.now_s))
    virtual.run_until(5.0)
    assert seen == [pytest.approx(3.0, abs=1e-3)]


def test_a_signal_reaches_its_handler_or_ends_the_process(virtual):
    polite, rude = virtual.process("polite"), virtual.process("rude")
    stop = asyncio.Event()
    polite.add_signal_handler(15, stop.set)
    for process in (polite, rude):
        process.signal(15)
    virtual.run_until(1.0)
    assert (stop.is_set(), polite.alive, rude.alive) == (True, True, False)


_RUN = """
import asyncio, sys
from broker.process import chance, clocks
from ops.virtual.loop import VirtualTime

async def main(name):
    async def child(number):
        await asyncio.sleep(chance.bits(16) / 65536)
        return number
    while True:
        tasks = {asyncio.create_task(child(number)) for number in range(6)}
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        seen.append((name, clocks.monotonic(), [task.result() for task in done]))
        for task in tasks:
            await asyncio.sleep(0)
            seen.append((name, clocks.monotonic(), await task))
        seen.append(await asyncio.to_thread(lambda: {name, str(clocks.monotonic())} and name))

seen = []
with VirtualTime(int(sys.argv[1])) as virtual:
    virtual.on_turn = lambda *turn: seen.append(turn)
    for name in "abc":
        virtual.process(name).start(main(name))
    virtual.run_until(20.0)
    assert not virtual.failures
print(len(seen), "\\n".join(map(str, seen)))
"""


def test_a_seed_gives_the_same_run_in_any_process():
    def run(seed, hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.check_output([sys.executable, "-c", _RUN, str(seed)], env=environment, timeout=60)

    assert run(3, "1") == run(3, "2") != run(4, "1")


def test_random_bits_are_drawn_by_the_process_that_asks(virtual):
    a, b = virtual.process("a"), virtual.process("b")
    drawn = [a.run(chance.bits, 64), b.run(chance.bits, 64), a.run(chance.bits, 128)]
    assert len(set(drawn)) == 3
    assert len(a.run(chance.hexadecimal, 6)) == 12
    with VirtualTime(1) as again:
        assert again.process("a").run(chance.bits, 64) == drawn[0]


@pytest.mark.filterwarnings("error")
def test_tasks_that_had_not_begun_or_were_about_to_go_on_end_with_their_process(virtual):
    process, seen = virtual.process("a"), []
    process.turn_s = (1.0, 1.0)

    async def child():
        seen.append("child")

    async def main():
        async with asyncio.TaskGroup() as group:
            group.create_task(child())
            try:
                await asyncio.sleep(0)
            finally:
                seen.append("finally")

    process.start(main())
    virtual.at(1.5, process.kill)
    virtual.run_until(5.0)
    assert seen == []
    virtual.close()
    assert seen == ["finally"]
