"""By which broker an island is addressed, and what each broker is sent."""

import asyncio

from aggregator.process.broker_link import Outgoing
from aggregator.rounds.brokers import BrokerVersions
from aggregator.state.fleet import MOST_NAMES, Routes
from broker.routing.resending import REPUBLISH_S, Carried
from broker.wire import messages as m
from tests.aggregator_hand import Desk


def envelope(sender="a", sequence=1, incarnation=1):
    leave = m.Leave(inner_step=0, tokens=0, reason="")
    return m.Envelope(
        run_id="demo", sender=sender, incarnation=incarnation, sequence=sequence, to=m.AGGREGATOR, message=leave
    )


def test_the_newest_message_shows_the_way_whatever_arrives_after_it():
    ways = Routes()
    assert ways.to("a") is None
    assert ways.heard(envelope(sequence=7), 0)
    assert ways.heard(envelope(sequence=9), 1)
    assert not ways.heard(envelope(sequence=8), 0)  # kept by a broker that was frozen
    assert ways.to("a") == 1
    assert ways.heard(envelope(sequence=1, incarnation=2), 0)  # a new life counts from the start
    assert not ways.heard(envelope(sequence=50, incarnation=1), 1)
    assert ways.to("a") == 0


def test_only_so_many_ways_are_remembered_the_latest_ones():
    ways = Routes()
    for n in range(MOST_NAMES + 10):
        ways.heard(envelope(sender=f"join:{n}"), 1)
    assert ways.to("join:9") is None
    assert ways.to("join:10") == 1


def test_a_heartbeat_from_before_the_farewell_does_not_bring_an_island_back():
    made = Desk()
    made.gather("a", "b")
    beat, made.log[:] = made.members["a"].heartbeat, []
    made.say("a", m.Leave(inner_step=0, tokens=0, reason="done"))
    assert made.members["a"].left
    made.sequence -= 2  # an earlier message than the farewell
    made.say("a", beat, broker=1)
    assert made.members["a"].left
    made.sequence += 5
    made.say("a", beat)
    assert not made.members["a"].left


def test_each_broker_has_pauses_of_its_own():
    shelves, newest = BrokerVersions(0.0), {0: (3, 0.5)}
    for broker in (0, 1):
        shelves.answered(broker, (2,), 1.0)
    at_s = 0.5 + REPUBLISH_S
    assert shelves.lacking(0, {0: 2}, newest, at_s - 0.1) == []
    assert shelves.lacking(0, {0: 2}, newest, at_s) == [0]
    assert shelves.lacking(0, {0: 2}, newest, at_s + 1.0) == []  # twice as long now
    assert shelves.lacking(1, {0: 2}, newest, at_s + 1.0) == [0]
    assert shelves.lacking(0, {0: 3}, newest, at_s + 1.1) == []
    assert shelves.lacking(0, {0: 4}, newest, at_s + 3.0) == []


def test_a_broker_that_came_back_empty_gets_everything_at_once_and_over_a_new_connection_what_was_on_its_way():
    shelves, newest = BrokerVersions(0.0), {0: (3, 1.0), 1: (7, 1.0)}

    def lacking(broker, held, now_s, *carried):
        shelves.answered(broker, held, now_s)
        return shelves.lacking(broker, dict(enumerate(held)), newest, now_s, 1 << 40, Carried(*carried))

    assert lacking(0, (3, 7), 1.0, 0, 0, 1) == []
    assert lacking(0, (-1, -1), 2.0, 0, 0, 1) == [0, 1]
    assert lacking(0, (-1, -1), 2.5, 0, 0, 1) == []  # on their way
    assert lacking(1, (3, 6), 1.5, 0, 0, 1) == []
    assert lacking(1, (3, 6), 2.5, 0, 0, 2) == [1]
    assert lacking(1, (3, 6), 3.5, 0, 0, 2) == []
    assert lacking(2, (3, 6), 1.5, 5000, 400, 1) == []
    assert lacking(2, (3, 6), 2.0, 60, 0, 2) == [1]  # what had left this machine went with the connection, too
    assert lacking(2, (3, 6), 2.5, 60, 400, 2) == []


def test_what_this_machine_still_holds_of_a_version_is_not_sent_again():
    """A slow link: until the first copy has left, others would queue behind it."""
    shelves, newest = BrokerVersions(0.0), {0: (3, 1.0)}

    def lacking(now_s, carried, held=2):
        shelves.answered(0, (held,), now_s)
        return shelves.lacking(0, {0: held}, newest, now_s, 1000, carried)

    assert not any(lacking(float(at_s), Carried(30 * at_s, 1000 - 30 * at_s)) for at_s in range(1, 34))
    assert not lacking(33.5, Carried(1000, 0))
    assert lacking(33.0 + REPUBLISH_S, Carried(1000, 0)) == [0]
    assert not lacking(35.0, Carried(1000, 1000))


def test_a_version_is_encoded_once_for_all_brokers():
    calls = []

    async def main():
        def encode():
            calls.append(1)
            return asyncio.get_running_loop().run_in_executor(None, lambda: ("bytes",))

        outgoing = Outgoing(m.BROKER, encode)
        first = asyncio.create_task(outgoing.message())
        await asyncio.sleep(0)
        first.cancel()  # one broker's task ends: the others still get it
        return await asyncio.gather(outgoing.message(), outgoing.message())

    assert asyncio.run(main()) == [("bytes",)] * 2
    assert calls == [1]
