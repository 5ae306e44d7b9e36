"""While no broker answers, or the process stood still, nobody could be heard: no silence counts against anybody."""

from broker.wire.messages import BROKER, Attached, Leave, Phase, Welcome
from tests.aggregator_hand import desk, notes, sent


def answered(made):
    made.say(BROKER, Attached(versions=made.versions))


def test_the_data_of_islands_that_no_broker_lets_be_heard_stay_theirs():
    made = desk("a", "b", islands=2, data_ahead_s=10.0, share_takeover_s=8.0)
    answered(made)
    made.run_to(60.0)
    answered(made)
    made.beat("a", 1)
    assert not notes(made.log, "block.ended"), "what they trained meanwhile would be refused"
    for _ in range(10):
        made.run_to(made.now_s + 1.0)
        answered(made)
        made.beat("a", 1)
    assert {each["before"] for each in notes(made.log, "block.ended")} == {"b"}


def test_a_newcomer_does_not_get_the_id_of_an_island_that_could_not_be_heard():
    made = desk("a", "b")
    (first,) = sent(made.join("", nonce="1", hint="host/0"), Welcome)
    made.beat(first.island_id, 0)
    answered(made)
    made.now_s += 20.0  # the process stood still, and this is the first of what waits for it
    assert not sent(made.join("", nonce="2", hint="host/0"), Welcome)
    answered(made)
    assert not sent(made.join("", nonce="2", hint="host/0"), Welcome)
    made.now_s += 1.0
    made.beat(first.island_id, 1)
    (second,) = sent(made.join("", nonce="2", hint="host/0"), Welcome)
    assert second.island_id != first.island_id


def test_a_flush_waits_for_islands_that_no_broker_lets_be_heard():
    made = desk("a", islands=1, total_tokens=40, round_timeout_s=2.0)
    answered(made)
    made.beat("a", 4)
    assert made.phase is Phase.FLUSHING
    made.run_to(60.0)
    answered(made)
    assert made.phase is Phase.FLUSHING
    made.beat("a", 4, stopped=True)
    made.offer("a", 0, 4)
    made.run_to(made.now_s + 2.0)
    assert made.phase is Phase.ENDED
    assert made.tokens()["merged"] == 40


def test_an_ended_run_stays_for_islands_while_no_broker_answers():
    made = desk("a", islands=1, total_tokens=40)
    answered(made)
    made.beat("a", 4, stopped=True)
    made.offer("a", 0, 4)
    assert made.phase is Phase.ENDED
    made.run_to(60.0)
    assert not made.core.finished
    answered(made)
    made.say("a", Leave(inner_step=4, tokens=40, reason="the run has ended"))
    made.run_to(made.now_s + 1.0)
    assert made.core.finished
