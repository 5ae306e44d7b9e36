"""Threads that work for an event loop, and end with their process."""

import asyncio
import threading

import pytest

from islands.session.workers import Workers

WAIT_S = 40.0  # for what must happen; nothing here depends on how long it takes


def test_one_thread_does_its_jobs_in_the_order_given_and_passes_on_what_they_raise():
    done = []

    def fail():
        raise OSError("no room")

    async def main():
        workers = Workers(1, "clerk")
        first = [asyncio.create_task(workers.do(done.append, i)) for i in range(20)]
        with pytest.raises(OSError, match="no room"):
            await workers.do(fail)
        await asyncio.gather(*first)
        assert await workers.do(divmod, 7, 2) == (3, 1)
        workers.close()

    asyncio.run(main())
    assert done == list(range(20))


def test_what_still_waits_when_they_are_closed_is_dropped_and_what_is_being_done_is_finished():
    begun, released, done = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        assert released.wait(WAIT_S)
        done.append("first")

    async def main():
        workers = Workers(1, "clerk")
        doing, waiting = asyncio.create_task(workers.do(first)), asyncio.create_task(workers.do(done.append, "second"))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        workers.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        released.set()
        await doing
        with pytest.raises(RuntimeError, match="clerk has ended"):
            await workers.do(first)

    asyncio.run(main())
    assert done == ["first"]
