"""What islands have trained and sent over all their lives, by lines of a tape."""

from aggregator.state.summary import Traffic, report
from broker.wire.messages import Leave
from ops.story.history import History
from tests.taped import Taped


def read(tape):
    history = History()
    for line in tape:
        history.take(line)
    return history


def as_reported(taped):
    """Tokens of each island by the aggregator's own report."""
    return {name: each["tokens"] for name, each in report(taped.core.run, Traffic())["islands"].items()}


def on_page(taped):
    return {name: each.tokens for name, each in read(taped.tape).islands.items()}


def trained():
    """Two islands hand over four steps each, and train on."""
    made = Taped()
    made.gather("a", "b")
    made.round(1, "a", "b")
    made.beat("a", 7, bytes_up=70, bytes_down=7)
    made.beat("b", 6)
    return made


def test_a_page_counts_what_a_killed_life_had_not_handed_over_as_the_report_does():
    made = trained()
    made.join("a")
    made.beat("a", 5, bytes_up=3, bytes_down=2)
    assert as_reported(made) == on_page(made) == {"a": 80, "b": 60}
    a = read(made.tape).islands["a"]
    assert (a.step, a.lives, a.bytes_up, a.bytes_down) == (5, 2, 73, 9)


def test_lives_that_hand_nothing_over_begin_where_the_one_before_did():
    made = trained()
    for step in (5, 6, 7):
        made.join("a")
        made.beat("a", step, tokens=9 * step)
    assert as_reported(made) == on_page(made)


def test_the_last_word_of_an_island_counts():
    made = trained()
    made.say("a", Leave(inner_step=9, tokens=90, reason="goodbye"))
    assert as_reported(made) == on_page(made) == {"a": 90, "b": 60}


def test_a_claim_that_is_refused_does_not_count():
    made = trained()
    made.beat("a", 8, tokens=10**12)
    assert as_reported(made) == on_page(made) == {"a": 70, "b": 60}


def test_a_restarted_aggregator_and_the_page_go_on_from_the_same_counts():
    made = trained()
    again = Taped(tape=made.tape, record=made.record, commits=made.commits, now_s=100.0)
    assert on_page(again) == as_reported(again)
    again.beat("a", 8)
    assert on_page(again)["a"] == as_reported(again)["a"] == 80
