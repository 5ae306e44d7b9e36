"""What waits for an island's connection: in which order it goes, and that nothing waits twice."""

import asyncio

from broker.wire import messages as m
from broker.wire.ranges import StepRange
from islands.session.connections import MOST_STATE_PARTS, Outbox, Posted


def put(outbox, *messages, to="aggregator"):
    for message in messages:
        outbox.put(Posted(message, to, sender="a", incarnation=1))


def left(outbox):
    """All that waits, in the order in which it goes."""
    return [each.message for each in left_to_whom(outbox)]


def left_to_whom(outbox):
    async def taken():
        envelopes = []
        while not outbox.empty.is_set():
            envelopes.append(await outbox.next())
            outbox.sent()
        return envelopes

    return asyncio.run(taken())


def contribution(from_step):
    steps = StepRange(from_step=from_step, to_step=from_step + 1, from_tokens=from_step, to_tokens=from_step + 1)
    trained_on = (m.TrainedOn(fragment_version=0, steps=1),)
    return m.Contribution(round_id=1, fragment_id=0, steps=steps, trained_on=trained_on, payload="")


def part(index, state_id="s"):
    return m.StatePart(state_id=state_id, part=index, num_parts=99, state_bytes=99, payload=())


def test_of_wants_that_wait_the_newest_says_it_all():
    outbox = Outbox()
    put(outbox, m.Want(versions=(1,)), m.Want(versions=(2,)))
    assert left(outbox) == [m.Want(versions=(2,))]


def test_a_contribution_that_waits_already_is_put_in_once():
    outbox, first, second = Outbox(), contribution(0), contribution(1)
    put(outbox, first, second, first)
    assert left(outbox) == [first, second]
    put(outbox, first)
    assert left(outbox) == [first]


def test_a_seed_that_is_made_anew_takes_the_place_of_the_one_that_waits():
    """Each reconnection of a link that is too narrow for version 0 has all its missing fragments made anew."""
    outbox = Outbox()
    put(outbox, *(m.Seed(fragment_id=p, payload=f"{p}, {time}") for time in range(3) for p in range(2)))
    assert [each.payload for each in left(outbox)] == ["0, 2", "1, 2"]


def test_parts_of_a_state_go_last_and_never_pile_up():
    outbox, late = Outbox(), contribution(0)
    put(outbox, *map(part, range(MOST_STATE_PARTS + 5)), late)
    assert left(outbox) == [late, *map(part, range(MOST_STATE_PARTS))]


def test_islands_that_ask_for_parts_get_one_each_in_turn():
    """On a narrow link the second one would hear nothing while the first one gets four, and again, and again."""
    outbox = Outbox()
    for to in "bcd":
        put(outbox, *map(part, range(3)), to=to)
    assert [(each.to, each.message.part) for each in left_to_whom(outbox)] == [
        (to, index) for index in range(3) for to in "bcd"
    ]
