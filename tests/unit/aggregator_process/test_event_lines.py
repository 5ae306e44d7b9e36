"""Two lines of events for one reader: what carries tensors waits behind all else, but not for ever."""

import asyncio

import pytest

from aggregator.process.leader import AT_A_TIME, IN_A_ROW, EventLines


def test_the_second_line_waits_for_the_first_but_only_so_long():
    async def read():
        lines = EventLines((100, 100))
        for i in range(3):
            await lines.put(f"tensors {i}", behind=True)
        for i in range(IN_A_ROW + 2):
            await lines.put(i)
        return [lines.get_nowait() for _ in range(IN_A_ROW + 5)], lines.empty()

    found, empty = asyncio.run(read())
    assert found[:IN_A_ROW] == list(range(IN_A_ROW))
    assert found[IN_A_ROW:] == ["tensors 0", IN_A_ROW, IN_A_ROW + 1, "tensors 1", "tensors 2"]
    assert empty


def test_a_reader_waits_for_either_line():
    async def read(behind):
        lines = EventLines((1, 1))
        reading = asyncio.create_task(lines.get())
        await asyncio.sleep(0)
        assert not reading.done()
        await lines.put("news", behind=behind)
        return await reading, lines.empty()

    assert [asyncio.run(read(behind)) for behind in (False, True)] == [("news", True)] * 2


def test_a_full_line_holds_up_its_own_writers_alone():
    async def write():
        lines = EventLines((2, 1))
        await lines.put("tensors", behind=True)
        waiting = asyncio.create_task(lines.put("more tensors", behind=True))
        await lines.put("heartbeat")
        assert not waiting.done()
        assert [lines.get_nowait(), lines.get_nowait()] == ["heartbeat", "tensors"]
        await waiting
        assert lines.get_nowait() == "more tensors"
        with pytest.raises(asyncio.QueueEmpty):
            lines.get_nowait()

    asyncio.run(write())


def test_a_reader_of_what_is_there_gives_others_their_turn_after_some():
    async def read():
        lines, turns = EventLines((100, 1)), 0
        assert await lines.get_there() is None

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        for i in range(4 * AT_A_TIME):
            await lines.put(i)
        task = asyncio.create_task(other())
        found = [await lines.get_there() for _ in range(4 * AT_A_TIME)]
        task.cancel()
        return found, turns

    assert asyncio.run(read()) == (list(range(4 * AT_A_TIME)), 4)
