"""Of the relay: versions that come as differences lead every island to the newest, whatever it has."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.routing.deliveries import WHOLE_AGAIN_S
from broker.routing.queues import VersionShelf
from broker.wire import messages as m
from broker.wire.messages import AGGREGATOR, Codec, Envelope
from broker.wire.number_formats import MERGED_BYTES
from broker.wire.ranges import StepRange
from broker.wire.tensors import encode_tensor
from tests.relay_bench import Driver
from tests.relay_bench import version as bench_version

ELEMENTS = 40
WHOLE_BYTES = 4 * ELEMENTS
STEP_BYTES = 40  # three do not fit into half of a whole version


def merged(island, from_step):
    steps = StepRange(from_step=from_step, to_step=from_step + 4, from_tokens=0, to_tokens=4)
    weights = dict.fromkeys(("token_weight", "staleness_weight", "merge_weight"), 1.0)
    return m.Merged(island_id=island, incarnation=1, steps=steps, staleness=0.0, fresh=True, **weights)


def version(number, base=None, epoch=1, contributions=()):
    payload = (encode_tensor(np.zeros(ELEMENTS, np.float32), Codec.F32 if base is None else Codec.INT8),)
    made = bench_version(0, number, epoch)
    return replace(made, base=base, digest=f"{number}", contributions=contributions, payload=payload)


class Hub(Driver):
    """A relay whose aggregator publishes."""

    def publish(self, number, base=None, epoch=1):
        nbytes = WHOLE_BYTES if base is None else STEP_BYTES
        self.receive(AGGREGATOR, version(number, base, epoch), nbytes=nbytes)

    def want(self, island, number):
        self.receive(island, m.Want(versions=(number,)))

    @property
    def delivered(self):
        """(island, version, base) of the versions sent by the last event."""
        return [
            (peer.decode().split("/")[0], message.fragment_version, message.base)
            for peer, message in self.sent
            if isinstance(message, m.Version)
        ]

    def give_back(self):
        self.receive(AGGREGATOR, m.WantBack(fragment_id=0))
        return self.delivered

    @property
    def asked(self):
        return [message for _, message in self.sent if isinstance(message, m.WantWhole)]


@pytest.fixture
def hub():
    made = Hub()
    made.attach(versions=(-1,))
    return made


def test_an_island_gets_the_differences_since_its_version_in_order_and_a_whole_version_where_it_has_none(hub):
    hub.publish(3)
    hub.want("a", -1)
    assert hub.delivered == [("a", 3, None)]
    hub.want("a", 3)
    hub.publish(4, base=3)
    assert hub.delivered == [("a", 4, 3)]
    hub.publish(5, base=4)  # version 4 is still under way to a
    assert hub.delivered == []
    hub.want("b", 3)
    assert hub.delivered == [("b", 4, 3), ("b", 5, 4)]
    hub.want("b", 4)
    assert hub.delivered == [], "they are one delivery"
    hub.want("c", -1)
    assert hub.delivered == [("c", 3, None), ("c", 4, 3), ("c", 5, 4)]
    assert hub.asked == []


def test_an_island_is_told_of_its_own_contributions_alone(hub):
    all_of_them = (merged("a", 0), merged("b", 0), merged("a", 4))
    hub.receive(AGGREGATOR, version(1, base=0, contributions=all_of_them), nbytes=STEP_BYTES + 3 * MERGED_BYTES)
    assert hub.relay.held_bytes == STEP_BYTES
    for island in "abc":
        hub.want(island, 0)
        ((_, sent),) = hub.sent
        assert sent.contributions == tuple(each for each in all_of_them if each.island_id == island)
        assert (sent.digest, sent.payload) == ("1", version(1, base=0).payload)


def test_differences_that_are_many_give_way_and_the_whole_version_that_led_to_them(hub):
    hub.publish(3)
    assert hub.relay.held_bytes == WHOLE_BYTES
    for number in (4, 5):
        hub.publish(number, base=number - 1)
    assert hub.relay.held_bytes == WHOLE_BYTES + 2 * STEP_BYTES
    hub.publish(6, base=5)
    assert hub.relay.held_bytes == 2 * STEP_BYTES
    hub.want("a", 4)
    assert hub.delivered == [("a", 5, 4), ("a", 6, 5)]
    hub.want("b", 3)
    assert hub.delivered == []
    assert hub.asked == [m.WantWhole(fragment_id=0)]


def test_a_whole_version_is_asked_for_once_and_serves_all_who_lack_one(hub):
    for number in (4, 5):
        hub.publish(number, base=number - 1)
    hub.want("a", -1)
    assert hub.sent == [(b"aggregator/0/control", m.WantWhole(fragment_id=0))]
    hub.want("b", 2)
    assert hub.sent == []
    hub.publish(5)
    assert hub.delivered == [("a", 5, None), ("b", 5, None)]
    hub.want("c", 4)
    assert hub.delivered == [("c", 5, 4)]  # the fewest bytes


def test_a_whole_version_that_does_not_come_is_asked_for_again_ever_more_seldom(hub):
    hub.publish(4, base=3)
    asked = []
    for tick in range(40):
        hub.now_s = 100.0 + 0.5 * tick
        hub.attach(versions=(4,))
        hub.want("a", -1)
        asked += [tick * 0.5] * len(hub.asked)
    assert asked == [0.0, WHOLE_AGAIN_S, 3 * WHOLE_AGAIN_S, 7 * WHOLE_AGAIN_S]
    hub.publish(4)
    assert hub.delivered == [("a", 4, None)]
    for number in (5, 6, 7):
        hub.publish(number, base=number - 1)
        assert hub.asked == []  # a may have it by then
    hub.want("b", -1)
    assert hub.asked == [m.WantWhole(fragment_id=0)]  # the first pause again


def test_a_difference_that_a_full_connection_does_not_take_is_sent_with_what_follows_it(hub):
    hub.publish(3)
    hub.want("a", 3)
    hub.publish(4, base=3)
    hub.block(hub.sends[0])
    hub.publish(5, base=4)
    assert hub.delivered == []
    hub.tick(hub.relay.next_deadline_s())
    assert hub.delivered == [("a", 4, 3), ("a", 5, 4)]


EVENTS = st.lists(st.tuples(st.sampled_from(["merge", "whole", "lose", "lineage", "want"]), st.integers(0, 3)))


@given(EVENTS)
def test_whatever_is_offered_each_way_leads_to_the_newest(events):
    shelf, newest, epoch, published, islands = VersionShelf(), -1, 1, [], [-1] * 4

    def offer(number, base):
        made = version(number, base, epoch)
        envelope = Envelope(run_id="r", sender=AGGREGATOR, incarnation=0, sequence=1, to="", message=made)
        if shelf.offer(envelope, made, WHOLE_BYTES if base is None else STEP_BYTES):
            published.append(number)

    for what, which in events:
        match what:
            case "merge":
                newest += 1
                offer(newest, newest - 1 if newest else None)
            case "whole":
                offer(newest, None)
            case "lose":
                newest += 1  # the broker never sees this one
            case "lineage":
                newest, epoch = newest + 1 + which, epoch + 1
                offer(newest, None)
            case "want":
                way = shelf.choose((islands[which],), {})
                for held in way:
                    assert held.version.base in (None, islands[which])
                    islands[which] = held.version.fragment_version
                if way:
                    assert islands[which] == shelf.versions(1)[0]
                elif published and islands[which] < shelf.versions(1)[0]:
                    assert shelf.without_base((islands[which],)) == [0]
        assert shelf.versions(1)[0] == max(published, default=-1)
        assert 0 <= shelf.held_bytes <= WHOLE_BYTES * 1.5


def test_an_aggregator_gets_a_version_back_that_is_held_whole(hub):
    assert hub.give_back() == []
    hub.publish(3)
    assert hub.give_back() == [("aggregator", 3, None)]
    hub.publish(4, base=3)
    assert hub.give_back() == []  # it would have to be put together
