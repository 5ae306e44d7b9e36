"""Claims of tokens on one aggregator core: what they weigh, when the run ends, and who is told."""

import pytest

from broker.base.errors import ConfigError
from broker.wire.messages import FleetState, Leave, Phase
from tests.aggregator_hand import Desk, desk, notes, sent, steps

LIE = 40  # tokens in a step, where the others have ten
SENTENCE = (
    "d claims 40 tokens a step, 4.0 times the fleet's 10: weighs and counts as 10; "
    "if it is true, allow it with --trusted-tokens d=40"
)


def liars_desk(**settings):
    """Three islands of ten tokens a step, and ``d``, which declares four times as many."""
    made = desk("a", "b", "c", **{"islands": 4, "quorum": 4, **settings})
    made.join("d", tokens_per_step=LIE)
    made.beat("d", 0)
    return made


def play(made, first, *, claims=LIE):
    """One round of four steps; returns what was said."""
    made.now_s += 0.4
    said = []
    for island in "abc":
        said += made.beat(island, first + 4)
    said += made.beat("d", first + 4, tokens=(first + 4) * claims)
    for island in "abc":
        said += made.offer(island, first, first + 4)
    return said + made.offer("d", first, first + 4, steps_=steps(first, first + 4, claims))


def test_a_claim_beyond_the_fleets_is_told_as_it_joins_and_weighs_no_more_than_the_others():
    made = liars_desk()
    assert notes(made.log, "island.doubted") == [{"island": "d", "detail": SENTENCE}]
    assert made.troubles == (f"for 0 s: {SENTENCE}",)
    play(made, 0)
    assert [m.token_weight for m in made.contributions()] == [400.0] * 4
    assert made.tokens("d")["trained"] == 4 * LIE, "the books have what it says"
    made.say("d", Leave(inner_step=4, tokens=4 * LIE, reason="bye"))
    assert made.troubles == ()


def test_beside_one_island_alone_it_weighs_as_much_as_that():
    made = desk("a", islands=2, quorum=2)
    made.join("d", tokens_per_step=1000)
    made.beat("d", 0)
    made.beat("a", 4)
    made.beat("d", 4, tokens=4000)
    made.offer("a", 0, 4)
    made.offer("d", 0, 4, steps_=steps(0, 4, 1000))
    assert [m.token_weight for m in made.contributions()] == [400.0, 400.0]


def test_a_run_ends_by_what_counts_and_the_schedules_of_islands_follow_that():
    made = liars_desk(total_tokens=4 * 10 * 20)
    for first in range(0, 16, 4):
        play(made, first)
    (state,) = sent(made.beat("a", 16), FleetState, "a")
    assert (state.trained_tokens, state.fleet_ratio) == (640, 4.0)
    (own,) = sent(made.beat("d", 16, tokens=16 * LIE), FleetState, "d")
    assert own.fleet_ratio == 1.0, "of its tokens a quarter counts"
    assert (made.tokens()["trained"], made.phase) == (3 * 160 + 16 * LIE, Phase.RUNNING)
    play(made, 16)
    assert made.phase is Phase.FLUSHING
    made.check_books()


def test_the_operators_word_is_enough():
    made = liars_desk(trusted_tokens={"d": LIE}, total_tokens=10_000)
    play(made, 0)
    assert made.troubles == ()
    assert [m.token_weight for m in made.contributions()] == [400.0, 400.0, 400.0, 1200.0]
    assert made.core.run.books.ledger.counted_tokens() == made.tokens()["trained"] == 3 * 40 + 4 * LIE


def test_a_restart_of_the_aggregator_forgets_neither_what_counts_nor_what_is_doubted():
    made = liars_desk(total_tokens=4 * 10 * 20)
    for first in range(0, 8, 4):
        play(made, first)
    assert made.core.run.books.ledger.counted_tokens() == 320
    after = made.restarted()
    after.tick()
    assert after.core.run.books.ledger.counted_tokens() == 320
    after.check_books()
    for island in "abc":
        after.beat(island, 8)
    after.beat("d", 8, tokens=8 * LIE)
    assert len(after.troubles) == 1
    play(after, 8)
    assert after.core.run.books.ledger.counted_tokens() == 480


def test_lives_that_are_folded_keep_what_does_not_count():
    made = liars_desk()
    play(made, 0)
    for _ in range(12):
        made.join("d", tokens_per_step=LIE)
        made.beat("d", 4, tokens=4 * LIE)
    assert made.core.run.books.ledger.past("d").doubted_tokens == 120
    assert made.core.run.books.ledger.counted_tokens() == 160
    made.check_books()
    assert made.restarted().core.run.books.ledger.counted_tokens() == 160


def test_steps_that_no_time_supports_are_told_weigh_less_and_end_no_run():
    made = desk(*"abcd", quorum=4, islands=4, total_tokens=4 * 10 * 1000)
    for n in range(1, 41):
        made.now_s += 0.4
        for island in "abc":
            made.beat(island, 4 * n)
        made.beat("d", 400 * n)
    (note,) = notes(made.take(), "island.doubted")
    assert "more than fit into its time at 0.1 s each: they do not count" in note["detail"]
    assert made.core.run.books.ledger.counted_tokens() == pytest.approx(4 * 1600, abs=20)
    assert made.core.run.fleet.claims.pace("d") == pytest.approx(0.01, abs=0.001)
    assert made.phase is Phase.RUNNING
    made.check_books()


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("trusted_tokens.d", {"trusted_tokens": {"d": 0}}),
        ("trusted_tokens.d", {"trusted_tokens": {"d": 1 << 30}}),
        ("trusted_tokens", {"trusted_tokens": {"d d": 10}}),
        ("pace_spread", {"pace_spread": 0.5}),
    ],
)
def test_words_of_the_operator_that_cannot_be_meant_are_refused(field, settings):
    with pytest.raises(ConfigError) as refused:
        Desk(**settings)
    assert refused.value.field == field
