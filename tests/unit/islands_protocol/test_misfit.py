"""What an aggregator's message says that cannot be, and that no such message ends an island."""

from dataclasses import replace

import pytest

from broker.wire import messages as m
from broker.wire.fragments import cut
from islands.protocol.events import Note
from tests.aggregator_hand import of
from tests.island_hand import SETTINGS, Hand

STALE = m.Resolution(fragment_id=200, from_step=0, to_step=4, fate=m.Fate.REFUSED, reason=m.Reason.STALE)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"resolutions": (STALE,)}, "fragment 200 is named, of 2"),
        ({"seed": (2,)}, "fragment 2 is named, of 2"),
        ({"rounds": ((1, 7),)}, "fragment 7 is named, of 2"),
        ({"shards": 0}, "shard is 0, must be below shards, 0"),
        ({"shard": 2, "shards": 2}, "shard is 2, must be below shards, 2"),
    ],
)
def test_a_state_of_another_fleet_is_noted_and_nothing_follows_from_it(changes, complaint):
    hand = Hand(fragments=2)
    (note,) = of(hand.state(phase=m.Phase.FLUSHING, **changes), Note)
    assert (note.name, note.fields) == ("message.misfit", {"kind": "FleetState", "detail": complaint})
    assert not hand.core.done
    hand.state(phase=m.Phase.FLUSHING)
    assert hand.core.done


@pytest.mark.parametrize(
    ("settings", "tensors", "complaint"),
    [
        ({"heartbeat_interval_s": 0.0}, None, "settings.heartbeat_interval_s is 0.0, must be above 0"),
        ({}, ("w0",), "fragments has other tensors than this island asked to join with"),
        ({}, ("w0", "w1", "w2"), "fragments has other tensors than this island asked to join with"),
    ],
)
def test_a_welcome_to_another_run_is_noted_and_the_island_asks_on(settings, tensors, complaint):
    hand = Hand(fragments=2, joined=False)
    own = hand.tensors
    hand.settings = replace(SETTINGS, **settings)
    if tensors is not None:
        hand.tensors = tuple(replace(own[0], name=name) for name in tensors)
    (note,) = of(hand.welcome(), Note)
    assert (note.name, note.fields) == ("message.misfit", {"kind": "Welcome", "detail": complaint})
    assert not hand.core.joined
    hand.settings, hand.tensors = SETTINGS, own
    hand.welcome()
    assert hand.core.joined


def test_a_welcome_with_its_tensors_cut_is_taken_if_all_sections_are_there():
    hand = Hand(fragments=2, joined=False)
    own = hand.tensors
    sections = cut(own, own[0].size - 1)
    assert len(sections) > len(own)
    hand.tensors = sections[1:]
    (note,) = of(hand.welcome(), Note)
    assert note.fields["detail"] == "fragments has other tensors than this island asked to join with"
    hand.tensors = (*sections, sections[0])
    assert of(hand.welcome(), Note)
    assert not hand.core.joined
    hand.tensors = sections
    hand.welcome()
    assert hand.core.joined
    assert hand.core.manifest.whole == {tensor.name: tensor for tensor in own}


def test_a_next_life_begins_with_no_more_tokens_than_its_steps_had():
    hand = Hand(fragments=2)
    hand.boundary(4)
    hand.hear(m.Refused(kind="heartbeat", sequence=1, reason=m.Reason.UNKNOWN_ISLAND, detail=""))
    welcome = m.Welcome(
        nonce=hand.core.nonce,
        island_id="a",
        incarnation=2,
        epoch=1,
        fragments=tuple((t,) for t in hand.tensors),
        settings=SETTINGS,
        start_step=4,
        start_tokens=41,
    )
    (note,) = of(hand.hear(welcome), Note)
    assert note.fields["detail"] == "start_tokens is 41 at step 4, of 40 at step 4"
    assert not hand.core.joined
    hand.hear(replace(welcome, start_tokens=40))
    assert hand.core.joined
