"""Both sides of a donation, wired back to back by hand: a clock, lost parts, and donors that fail in every way."""

import asyncio
import math
from collections import Counter
from functools import partial

import pytest

from broker.wire.messages import AskDonor, Donor, Envelope, FetchState, StatePart, StateSource
from islands.protocol.donation import FETCH_AGAIN_S, MOST_DONORS, PART_BYTES, PARTS_AT_ONCE, Giver, Receiver
from islands.protocol.events import CheckState, CopyState, Note, Send, Settled
from islands.session.connections import Outbox
from ops.virtual.queue import EventQueue

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine

PATIENCE_S = 60.0
WAIT_S = 5.0


class Rejoining:
    """A receiver, and what it has asked for."""

    def __init__(self, donor="", most_bytes=10 * PART_BYTES):
        self.core, self.now_s, self.log = Receiver(), 0.0, []
        self.core.begin(most_bytes, PATIENCE_S, self.now_s, self.log)
        if donor:
            self.named(donor)

    def do(self, call, *args):
        """Calls the receiver and returns what it does."""
        before = len(self.log)
        call(*args, self.now_s, self.log)
        return self.log[before:]

    def named(self, island_id, wait_s=WAIT_S):
        return self.do(self.core.named, Donor(island_id=island_id, wait_s=wait_s))

    def part(self, index, *, sender="a", flaw="", **fields):
        return self.do(self.core.part, sender, part(index, **fields), flaw)

    def at(self, now_s):
        self.now_s = now_s
        return self.do(self.core.advance)

    @property
    def settled(self):
        return next((each for each in self.log if isinstance(each, Settled)), None)


def part(index, num_parts=3, state_bytes=None, state_id="1.40"):
    size = num_parts * PART_BYTES if state_bytes is None else state_bytes
    payload = f"{state_id} part {index}"
    return StatePart(state_id=state_id, part=index, num_parts=num_parts, state_bytes=size, payload=payload)


def whole(state_id, num_parts=3):
    return CheckState(parts=tuple(f"{state_id} part {i}" for i in range(num_parts)), state_bytes=num_parts * PART_BYTES)


def asked(actions):
    return [a.message.tried for a in actions if isinstance(a, Send) and isinstance(a.message, AskDonor)]


def fetched(actions):
    return [(a.to, *a.message.parts) for a in actions if isinstance(a, Send) and isinstance(a.message, FetchState)]


@pytest.fixture
def me():
    return Rejoining("a")


# --- the receiver -------------------------------------------------------------------------------------------------


def test_a_state_is_fetched_in_parts_checked_whole_and_used():
    me = Rejoining()
    assert asked(me.log) == [()]
    assert fetched(me.named("a")) == [("a", 0)]
    assert fetched(me.part(0)) == [("a", 1, 2)]
    assert me.part(2) == []
    assert me.part(1) == [whole("1.40")]
    assert me.do(me.core.checked, "") == [Settled(source=StateSource.DONOR, detail=f"of a, {3 * PART_BYTES} bytes")]
    assert me.core.due_at_s == math.inf


def test_where_nobody_can_give_an_island_starts_fresh_at_once():
    me = Rejoining()
    (settled,) = me.named("")
    assert settled.source is StateSource.FRESH
    assert "no island has trained for long enough" in settled.detail


def test_a_lost_part_is_asked_for_again_and_a_copy_of_one_changes_nothing(me):
    me.part(0)
    me.part(1)
    assert me.part(1) == []
    me.now_s = 1.0
    assert fetched(me.at(FETCH_AGAIN_S)) == [("a", 2)]
    assert me.part(2) == [whole("1.40")]


@pytest.mark.parametrize(("index", "alive"), [(0, True), (40, False)])
def test_a_copy_of_a_part_is_a_sign_of_life_and_one_that_nobody_asked_for_is_none(index, alive):
    me = Rejoining("a", most_bytes=100 * PART_BYTES)
    me.part(0, num_parts=50)
    me.now_s = WAIT_S - 1.0
    me.part(index, num_parts=50)
    assert (asked(me.at(WAIT_S)) == []) == alive


def test_a_donor_that_dies_half_way_is_replaced_by_another(me):
    me.now_s = 1.0
    me.part(0)
    said = me.at(1.0 + WAIT_S)
    assert asked(said) == [("a",)]
    assert [n.fields["donor"] for n in said if isinstance(n, Note)] == ["a"]
    assert me.named("a") == [], "an old answer"
    assert fetched(me.named("b")) == [("b", 0)]
    assert me.part(1, sender="a") == [], "the dead one's last words"
    for i in range(3):
        last = me.part(i, sender="b", state_id="7.9")
    assert last == [whole("7.9")]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([part(0, num_parts=0)], "has none to give"),
        ([part(0, state_bytes=5 * PART_BYTES)], "cannot be"),
        ([part(0, num_parts=20)], "more than"),
        ([part(0), part(1, state_id="2.0")], "another copy"),
    ],
    ids=["declines", "lies", "gives too much", "mixes two copies"],
)
def test_a_donor_that_declines_or_lies_is_replaced(me, parts, why):
    for each in parts:
        said = me.do(me.core.part, "a", each, "")
    assert asked(said) == [("a",)]
    assert why in next(n.fields["reason"] for n in said if isinstance(n, Note))


def test_a_state_that_does_not_fit_sends_the_island_to_the_next_donor(me):
    me.part(0, num_parts=1)
    assert asked(me.do(me.core.checked, "m is not finite")) == [("a",)]


def test_parts_that_nobody_asked_for_are_not_kept():
    me = Rejoining("a", most_bytes=100 * PART_BYTES)
    for unasked in (3, 2, 1):
        assert me.part(unasked, num_parts=50) == []
    me.part(0, num_parts=50)
    for unasked in range(1 + PARTS_AT_ONCE, 50):
        assert me.part(unasked, num_parts=50) == []
    assert fetched(me.at(FETCH_AGAIN_S)) == [("a", *range(1, 1 + PARTS_AT_ONCE))]


def test_after_the_last_donor_an_island_starts_fresh():
    me = Rejoining()
    for donor in range(MOST_DONORS):
        me.named(f"island-{donor}")
        me.part(0, sender=f"island-{donor}", num_parts=0)
    detail = f"no donor: island-{MOST_DONORS - 1}: has none to give"
    assert me.settled == Settled(source=StateSource.FRESH, detail=detail)
    assert me.named("another") == []


def test_patience_ends_whatever_is_under_way():
    asking, fetching = Rejoining(), Rejoining()
    fetching.named("a", wait_s=1e9)
    for me in (asking, fetching):
        me.at(PATIENCE_S - 0.01)
        assert me.settled is None
        me.at(PATIENCE_S)
        assert me.settled.source is StateSource.FRESH
        assert me.core.due_at_s == math.inf


# --- the donor ----------------------------------------------------------------------------------------------------


def give(giver, sender="b", parts=(0,), state_id="", *, trained=True):
    actions = []
    giver.fetch(sender, FetchState(state_id=state_id, parts=parts), "1.40", trained, 0.0, actions)
    return actions


def copied(giver, num_parts=3):
    actions = []
    giver.copied(("part",) * num_parts, num_parts * PART_BYTES, 0.0, actions)
    return actions


def given_to(actions):
    return [(a.to, a.message.part, a.message.num_parts) for a in actions]


def test_one_copy_serves_all_who_ask_at_once():
    giver = Giver()
    assert give(giver, "b") == [CopyState()]
    assert give(giver, "c") == []
    assert give(giver, "b") == [], "asked again, while the copy is made"
    assert given_to(copied(giver)) == [("b", 0, 3), ("c", 0, 3)]
    assert given_to(give(giver, "c", (1, 2), "1.40")) == [("c", 1, 3), ("c", 2, 3)]


def test_an_island_that_has_not_trained_or_whose_loop_shows_no_state_declines():
    giver = Giver()
    assert given_to(give(giver, trained=False)) == [("b", 0, 0)]
    assert give(giver) == [CopyState()]
    assert given_to(copied(giver, num_parts=0)) == [("b", 0, 0)]


def test_a_greedy_question_gets_no_more_than_its_due():
    giver = Giver()
    give(giver)
    copied(giver, num_parts=60)
    assert len(give(giver, parts=tuple(range(60)), state_id="1.40")) == PARTS_AT_ONCE
    assert give(giver, parts=(60, 10**9), state_id="1.40") == []


# --- both ---------------------------------------------------------------------------------------------------------


class NarrowLink:
    """A donor whose way up carries so many bytes a second, and the islands that it gives to, in virtual time.

    ZeroMQ takes four messages and sends them one after the other, whatever was asked for meanwhile; the others wait in
    the outbox.
    """

    HELD, DELAY_S = 4, 0.02

    def __init__(self, bytes_per_s, num_parts, receivers):
        self.queue, self.bytes_per_s, self.num_parts = EventQueue(), bytes_per_s, num_parts
        self.giver, self.outbox, self.held, self.sent = Giver(), Outbox(), [], Counter()
        self.receivers = {f"island-{i}": Receiver() for i in range(receivers)}
        self.sources, self.failed = {}, []
        for name, each in self.receivers.items():
            self.receive(name, each.begin, 1 << 40, 10 * PATIENCE_S)
        self.queue.run_until(10 * PATIENCE_S, lambda: len(self.sources) == receivers)

    def receive(self, name, call, *args):
        actions = []
        call(*args, self.queue.now_s, actions)
        for action in actions:
            match action:
                case Send(message=AskDonor()):
                    donor = Donor(island_id="donor", wait_s=8.0)
                    self.queue.after(self.DELAY_S, partial(self.receive, name, self.receivers[name].named, donor))
                case Send(message=FetchState() as fetch):
                    self.queue.after(self.DELAY_S, partial(self.give, self.giver.fetch, name, fetch, "1.40", True))
                case CheckState():
                    self.receive(name, self.receivers[name].checked, "")
                case Settled():
                    self.sources[name] = action.source
                case Note():
                    self.failed.append(action.fields)
        deadline_s = self.receivers[name].due_at_s
        if deadline_s < math.inf:
            self.queue.at(deadline_s, partial(self.receive, name, self.receivers[name].advance))

    def give(self, call, *args):
        actions = []
        call(*args, self.queue.now_s, actions)
        for action in actions:
            if isinstance(action, CopyState):
                parts = tuple(f"part {i}" for i in range(self.num_parts))
                self.queue.after(0.1, partial(self.give, self.giver.copied, parts, self.num_parts * PART_BYTES))
            else:
                sender = {"run_id": "demo", "sender": "donor", "incarnation": 1, "sequence": 1}
                self.outbox.put(Envelope(**sender, to=action.to, message=action.message))
        self.hand_over()

    def hand_over(self):
        idle = not self.held
        while len(self.held) < self.HELD and not self.outbox.empty.is_set():
            self.held.append(asyncio.run(self.outbox.next()))
            self.outbox.sent()
        if idle and self.held:
            self.queue.after(PART_BYTES / self.bytes_per_s, self.leaves)

    def leaves(self):
        envelope = self.held.pop(0)
        self.sent[envelope.to] += 1
        part = self.receivers[envelope.to].part
        self.queue.after(self.DELAY_S, partial(self.receive, envelope.to, part, "donor", envelope.message, ""))
        if self.held:
            self.queue.after(PART_BYTES / self.bytes_per_s, self.leaves)
        self.hand_over()


@pytest.mark.parametrize(
    ("mbit_per_s", "num_parts", "receivers", "most_copies"),
    [(100, 64, 4, 0), (8, 16, 1, 0), (8, 32, 1, 0), (4, 16, 1, 1), (2, 4, 1, 1), (8, 16, 2, 5), (8, 16, 4, 5)],
)
def test_on_a_narrow_link_parts_go_about_once_and_a_state_takes_no_longer_than_its_bytes(
    mbit_per_s, num_parts, receivers, most_copies
):
    """What was asked for again while it was on its way queued behind itself, until every donor seemed silent."""
    link = NarrowLink(mbit_per_s * 125_000, num_parts, receivers)
    assert link.sources == dict.fromkeys(link.receivers, StateSource.DONOR), link.failed
    assert link.failed == []
    assert sum(link.sent.values()) <= num_parts * receivers + most_copies
    ideal_s = (num_parts * receivers + most_copies) * PART_BYTES / link.bytes_per_s
    assert link.queue.now_s <= ideal_s + 1.0
