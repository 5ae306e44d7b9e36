"""Bulk messages that one event makes by the hundred, and what gets its turn between them."""

import asyncio
from types import SimpleNamespace

from broker.gateway.turns import AT_ONCE, Outbox


def to(peer, name=0):
    return SimpleNamespace(peer=peer, name=name)


def kept(outbox, count):
    return [i for i in range(count) if outbox.keeps(to(i), i + 1)]


def test_what_comes_behind_another_to_its_peer_does_not_overtake_that_and_all_else_does():
    outbox = Outbox()
    assert kept(outbox, AT_ONCE + 1) == [AT_ONCE], "the first of an event go at once"
    assert outbox.keeps(to(AT_ONCE), 1)
    assert not outbox.keeps(to("aggregator"), 1)


def test_they_go_in_their_order_and_others_have_a_turn_after_each():
    said = []

    async def others(until):
        while len(said) < until:
            said.append("other")
            await asyncio.sleep(0)

    async def both():
        outbox = Outbox()
        for i in range(4):
            outbox.keeps(to("a", i), AT_ONCE + 1)
        sending = asyncio.create_task(outbox.run(lambda send: said.append(send.name)))
        await others(8)
        assert not outbox.keeps(to("a", "at once"), 1)
        outbox.keeps(to("a", 4), AT_ONCE + 1)  # after it had been empty
        await others(12)
        sending.cancel()

    asyncio.run(both())
    assert [each for each in said if each != "other"] == [0, 1, 2, 3, 4]
    assert said[said.index(0) : said.index(3)] == [0, "other", 1, "other", 2, "other"]
