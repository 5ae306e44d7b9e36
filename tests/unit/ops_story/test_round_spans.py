"""The spans of rounds, from the events and decisions of a core that is driven by hand."""

from dataclasses import replace

from aggregator.interface.events import Note, PersistFailed, Received
from aggregator.store.tape import event_line
from broker.wire.messages import Attached, Envelope
from ops.story.round_spans import span_of
from ops.story.rounds import ADOPTED_WITHIN_S, Rounds
from tests.aggregator_hand import Desk, beat


class Traced(Desk):
    """A desk whose core is followed, as its tape would be."""

    def __init__(self, **settings):
        self.rounds, self.over = Rounds(int), []
        self.rounds.over = lambda each: self.over.append(span_of(each))
        super().__init__(**settings)

    def hear(self, event, now_s):
        if isinstance(event, Received) and hasattr(event.envelope.message, "payload"):  # none that a tape could have
            message = replace(event.envelope.message, payload=())
            event = replace(event, envelope=replace(event.envelope, message=message))
        self.rounds.event(event_line(event, now_s), now_s)

    def feed(self, event):
        self.hear(event, self.now_s)
        return super().feed(event)

    def take(self):
        over, self.over = self.over, []
        return over

    def _perform(self, actions):
        for action in actions:
            if isinstance(action, Note):
                self.rounds.note(action, self.now_s)
        super()._perform(actions)


def opened():
    """Two islands, for whom a round has opened."""
    made = Traced()
    made.gather("a", "b")
    made.open_round("a", "b", step=4)
    made.opened_s = made.now_s
    return made


def with_a_version():
    """A round of two islands that opened at once, got its answers a second later, and led to version 1."""
    made = opened()
    made.now_s += 1.0
    made.offer("a", 0, 4)
    made.now_s += 0.5
    made.offer("b", 0, 4)
    return made


def heard_later(made, message, sender, after_s):
    """Returns what is over when the spans, and they alone, hear a message so long after the version."""
    sent = Envelope(run_id="demo", sender=sender, incarnation=1, sequence=99, to="aggregator", message=message)
    made.take()
    made.hear(Received(envelope=sent), made.opened_s + 1.5 + after_s)
    return made.take()


def adopts(made, island, version, after_s):
    return heard_later(made, beat(9, versions=(version,)), island, after_s)


def arrives(made, version, after_s):
    """A broker says that it has a version."""
    return heard_later(made, Attached(versions=(version,)), "broker", after_s)


def parts_of(span):
    return [(part.name, part.attributes.get("island", part.attributes.get("broker"))) for part in span.parts]


def test_a_round_has_every_part_from_its_opening_to_the_last_adoption():
    made = with_a_version()
    assert made.over == []
    assert arrives(made, 1, 0.25) == []
    assert arrives(made, 1, 0.3) == []  # said again: once is enough
    assert adopts(made, "a", 0, 0.4) == []
    assert adopts(made, "a", 1, 0.5) == []
    (found,) = adopts(made, "b", 1, 0.75)
    assert parts_of(found)[:3] == [("open", None), ("merge", None), ("persist", None)]
    assert parts_of(found)[3:] == [("publish", 0), ("adopt", "a"), ("adopt", "b")]
    since = {part.name: (part.began_s - made.opened_s, part.ended_s - made.opened_s) for part in found.parts}
    assert since["open"] == (0.0, 1.5)
    assert since["publish"] == (1.5, 1.75)
    assert since["adopt"] == (1.5, 2.25)
    answers = [(each.name, each.attributes["island"], each.ended_s - made.opened_s) for each in found.parts[0].parts]
    assert answers == [("contribution", "a", 1.0), ("contribution", "b", 1.5)]
    facts = found.attributes
    assert (facts["fragment"], facts["version"], facts["islands"], facts["not_adopted"]) == (0, 1, ("a", "b"), ())
    assert found.failed == ""


def test_a_round_is_over_when_islands_and_a_broker_have_its_version_in_whichever_order():
    made = with_a_version()
    assert adopts(made, "a", 1, 0.1) == []
    assert adopts(made, "b", 1, 0.2) == []
    (found,) = arrives(made, 1, 0.3)
    assert parts_of(found)[3:] == [("adopt", "a"), ("adopt", "b"), ("publish", 0)]
    assert found.ended_s - made.opened_s == 1.5 + 0.3


def test_a_later_version_adopts_an_earlier_one_and_who_is_gone_holds_nothing_up():
    made = with_a_version()
    assert adopts(made, "a", 2, 0.5) == []
    assert arrives(made, 2, 0.6) == []
    (found,) = adopts(made, "c", -1, ADOPTED_WITHIN_S)
    assert found.attributes["not_adopted"] == ("b",)
    (adopted,) = (part for part in found.parts if part.name == "adopt")
    assert (adopted.attributes["island"], adopted.attributes["adopted_version"]) == ("a", 2)


def test_a_round_that_is_cancelled_has_failed_with_its_reason():
    made = opened()
    made.run_to(made.now_s + 100.0)
    (found, *_) = made.take()
    assert found.failed
    assert [part.name for part in found.parts] == ["open"]


def test_a_write_that_failed_is_told_in_the_part_that_it_delayed():
    made = opened()
    made.writes = False
    made.offer("a", 0, 4)
    made.offer("b", 0, 4)
    made.feed(PersistFailed(fragment_id=0, fragment_version=1, detail="the disk is full"))
    made.writing.clear()
    made.writes = True
    made.run_to(made.now_s + 5.0)
    made.rounds.end(made.now_s)
    found = made.take()[0]
    (persisted,) = (part for part in found.parts if part.name == "persist")
    assert persisted.attributes == {"not_durable": "the disk is full"}
    assert persisted.ended_s > made.opened_s


def test_at_the_end_nothing_is_left_over():
    made = with_a_version()
    made.rounds.end(made.now_s)
    ended = made.take()
    assert [each.name for each in ended] == ["round"] * len(ended)
    assert ended[0].attributes["not_adopted"] == ("a", "b")
    made.rounds.end(made.now_s)
    assert made.take() == []


def test_another_life_ends_the_rounds_of_its_own_fragments_alone():
    made = opened()
    made.rounds.end(made.now_s, lambda fragment: fragment != 0)
    assert made.take() == []
    made.rounds.end(made.now_s, lambda fragment: fragment == 0)
    (found, *_) = made.take()
    assert found.failed == "the aggregator ended"
