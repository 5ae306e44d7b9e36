"""What is believed of an island's claims: all that an honest one says, and of a liar no more than the time supports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.rules.claims import GRACE_S, GRACE_STEPS, PACE_MARGIN, Claims
from islands.session.training_state import step_time_s

N = 100  # tokens in a step


def fleet(*names, trusted=None, pace_spread=32.0, amounts=N):
    made = Claims(trusted or {}, pace_spread)
    for name in names:
        made.begin(name, 0, 0, amounts, 0.0)
    return made


def beats(claims, name, *, to_s, pace_s=0.1, says_s=0.1, amount=N, from_s=0.0, step=0):
    """An island that runs a step every ``pace_s``, says that they take ``says_s``, and reports twice a second."""
    doubted, now_s = 0, from_s
    while now_s < to_s:
        now_s += 0.5
        at = step + round((now_s - from_s) / pace_s)
        doubted = claims.report(name, at, at * amount, says_s, now_s)
    return doubted


# --- honest islands -----------------------------------------------------------------------------------------------

#: Seconds that steps take, from microseconds in virtual time to a first one that compiles for a minute.
STEP_S = st.one_of(st.floats(1e-5, 1e-3), st.floats(0.01, 0.3), st.floats(1.0, 60.0))
#: Steps and seconds each: a phase of a training loop that is faster or slower than the one before.
PHASES = st.lists(st.tuples(st.integers(1, 300), st.floats(0.02, 2.0)), min_size=1, max_size=6)


@given(
    st.one_of(st.none(), STEP_S),
    PHASES,
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 30.0)), max_size=4),
    st.floats(0.1, 5.0),
)
def test_an_island_whose_steps_vary_which_pauses_and_is_late_loses_nothing(first_s, phases, pauses, every_s):
    durations = [] if first_s is None else [first_s]
    durations += [each_s for steps, each_s in phases for _ in range(steps)]
    waits = {int(share * (len(durations) - 1)): for_s for share, for_s in pauses}
    claims, now_s, average_s, said_s = fleet("a", "b", "c"), 0.0, None, 0.0
    for step, each_s in enumerate(durations, start=1):
        now_s += each_s + waits.get(step - 1, 0.0)
        average_s = step_time_s(average_s, each_s + waits.get(step - 1, 0.0))
        if now_s - said_s >= every_s:
            said_s = now_s
            assert claims.report("a", step, step * N, average_s, now_s) == 0
            assert claims.pace("a") == 1.0
            assert not claims.doubts("a")


@given(st.lists(st.sampled_from([-3600.0, -3.0, 0.0, 0.5, 3600.0]), max_size=8), st.floats(1e-5, 5.0))
def test_an_aggregator_whose_clock_jumps_doubts_nobody(jumps, pace_s):
    claims, now_s, step = fleet("a", "b", "c"), 100.0, 0
    for jump_s in (*jumps, 0.0, 0.0):
        now_s += jump_s
        for _ in range(3):
            now_s, step = now_s + 0.5, step + round(0.5 / pace_s)
            assert claims.report("a", step, step * N, pace_s, now_s) == 0


def test_an_island_that_was_cut_off_brings_all_that_it_has_trained_and_is_believed():
    claims = fleet("a", "b", "c")
    beats(claims, "a", to_s=5.0)
    assert claims.report("a", 6050, 6050 * N, 0.1, 605.0) == 0
    assert claims.report("a", 6055, 6055 * N, None, 605.5) == 0


def test_an_island_that_was_fast_before_it_was_cut_off_is_believed_though_it_is_slow_when_it_is_back():
    claims = fleet("a", "b", "c")
    step = round(20.0 / 0.1)
    beats(claims, "a", to_s=20.0)
    assert beats(claims, "a", from_s=20.0, to_s=40.0, step=step, pace_s=0.5, says_s=0.5) == 0
    assert claims.report("a", step + 40 + 6000, (step + 40 + 6000) * N, 0.5, 640.0) == 0


def test_batches_of_up_to_twice_the_fleets_are_believed_and_so_is_a_pace_of_thirty_times():
    claims = fleet("a", "b", "c")
    for name in "bc":
        beats(claims, name, to_s=5.0)
    assert beats(claims, "a", to_s=20.0, amount=2 * N, pace_s=0.1 / 15, says_s=0.1 / 15) == 0
    assert claims.bounds("a") == ({"a": pytest.approx(2**0.5 * N)}, {"a": 1.0})  # twice the weight, not four times
    assert claims.bounds("b") == ({"b": 4.0 * N}, {"b": 1.0})
    assert claims.counted("a") == 1.0


def test_a_declaration_of_more_than_is_trained_costs_nothing():
    claims = fleet("b", "c", "d")
    claims.begin("a", 0, 0, 8 * N, 0.0)
    assert beats(claims, "a", to_s=5.0) == 0
    assert claims.bounds("a")[0]["a"] >= N
    assert beats(claims, "a", to_s=15.0, from_s=5.0, step=50) == 0
    assert not claims.doubts("a")


def test_steps_that_no_step_time_is_known_of_are_believed_while_nothing_is_known_of_any():
    claims = fleet("a", "b")
    assert claims.report("a", 500, 500 * N, None, 0.1) == 0


# --- liars --------------------------------------------------------------------------------------------------------


def test_tokens_of_more_than_twice_the_fleets_weigh_and_count_as_the_fleets():
    claims = fleet("a", "b", "c", "d")
    for name in "bcd":
        beats(claims, name, to_s=5.0)
    claims.begin("a", 0, 0, 4 * N, 0.0)
    assert beats(claims, "a", to_s=5.0, amount=4 * N) == 50 * 3 * N
    assert claims.bounds("a")[0] == {"a": N}
    assert claims.counted("a") == 0.25
    assert claims.doubts("a") == (
        "a claims 400 tokens a step, 4.0 times the fleet's 100: weighs and counts as 100; if it is true, allow it with "
        "--trusted-tokens a=400"
    )


@pytest.mark.parametrize("word", [400, 300])
def test_the_operators_word_is_believed_and_no_more_than_that(word):
    claims = fleet("a", "b", "c", trusted={"a": word})
    claims.begin("a", 0, 0, 4 * N, 0.0)
    assert beats(claims, "a", to_s=5.0, amount=4 * N) == 50 * (4 * N - word)
    assert claims.bounds("a")[0] == {"a": 400.0 if word == 400 else 300.0}
    assert bool(claims.doubts("a")) is (word == 300)


@given(st.floats(1.5, 1000.0), st.integers(20, 300))
def test_steps_that_grow_faster_than_they_take_count_as_often_as_the_time_supports(times, to_s):
    claims = fleet("a", "b", "c")
    doubted = beats(claims, "a", to_s=to_s, pace_s=0.1 / times)
    claimed, real = round(to_s / (0.1 / times)), to_s / 0.1
    believed = claimed - doubted / N
    if claimed > PACE_MARGIN * (real + 5) + GRACE_STEPS + GRACE_S / 0.1:  # a report is at most half a second behind
        assert believed <= real + 6
        assert claims.pace("a") == pytest.approx(believed / claimed, abs=0.02)
        assert "more than fit into its time at 0.1 s each: they do not count" in claims.doubts("a")


def test_an_island_that_was_ahead_and_waits_is_believed_in_the_end():
    claims = fleet("a", "b", "c")
    assert beats(claims, "a", to_s=20.0, pace_s=0.02) == 800 * N
    assert claims.report("a", 1000, 1000 * N, 0.1, 60.0) == 400 * N
    assert claims.report("a", 1001, 1001 * N, 0.1, 101.0) == 0
    assert claims.pace("a") == 1.0


def test_an_island_that_joins_again_and_again_has_its_grace_once():
    claims, believed = fleet("a", "b", "c"), 0
    for n in range(20):
        claims.begin("a", 150 * n, 150 * n * N, N, float(n))
        believed += 150 - claims.report("a", 150 * n + 150, 150 * (n + 1) * N, 0.1, n + 0.5) // N
        assert 0.0 <= claims.pace("a") <= 1.0
    assert believed <= 20 / 0.1 + GRACE_STEPS + GRACE_S / 0.1


def test_a_pace_beyond_the_spread_counts_as_the_fleets():
    claims = fleet("a", "b", "c", pace_spread=2.0)
    for name in "bc":
        beats(claims, name, to_s=60.0)
    doubted = beats(claims, "a", to_s=60.0, pace_s=0.025, says_s=0.025)
    assert doubted == pytest.approx(1800 * N, abs=2 * N)
    assert claims.counted("a") == 0.25
    assert "4 times the fleet's 1,000: counts as 1,000; if it is true, give" in claims.doubts("a")


def test_who_has_left_says_nothing_of_the_fleet():
    claims = fleet("a", "b", "c")
    claims.begin("a", 0, 0, 4 * N, 0.0)
    beats(claims, "a", to_s=1.0, amount=4 * N)
    assert claims.doubts("a")
    for name in "bc":
        claims.leave(name)
    assert not claims.doubts("a")


# --- after a restart of the aggregator ------------------------------------------------------------------------------


def restarted(*steps, away=N):
    made = Claims({}, 32.0)
    for name, step in zip("abcd", steps, strict=False):
        made.recall(name, step, step * N, away, 7 if name == "d" else 0, 1000.0)
    return made


def test_what_was_trained_while_no_aggregator_was_there_is_believed_as_far_as_most_say_so():
    claims = restarted(100, 100, 100, 100)
    liar = claims.report("d", 100_100, 100_100 * N, 0.1, 1000.1)
    assert liar == 7 + 99_999 * N  # of all others nothing is known yet: it is kept back, and nobody accused
    assert claims.pace("d") == 1.0
    assert not claims.doubts("d")
    for name in "abc":
        claims.report(name, 6100, 6100 * N, 0.1, 1000.2)
    assert claims.report("a", 6101, 6101 * N, 0.1, 1000.3) == 0
    for name in "abc":
        assert claims.report(name, 6105, 6105 * N, 0.1, 1000.7) == 0
    assert claims.report("d", 100_101, 100_101 * N, 0.1, 1001.0) == pytest.approx(7 + (100_000 - 6240) * N, abs=9 * N)


def test_an_island_that_was_away_meanwhile_takes_nothing_from_the_one_that_trained():
    claims = restarted(100, 100)
    claims.report("a", 100, 100 * N, 0.1, 1000.1)
    claims.report("b", 36_100, 36_100 * N, 0.1, 1000.2)
    assert claims.report("b", 36_104, 36_104 * N, 0.1, 1000.6) == 0


def test_islands_that_do_not_come_back_take_nothing_from_those_that_do():
    claims = restarted(100, 100, 100, 100)
    claims.report("a", 6100, 6100 * N, 0.1, 1000.1)
    assert claims.report("a", 6210, 6210 * N, 0.1, 1011.0) == 0
    assert not claims.doubts("a")
