"""When a round closes: every row of the truth table, and what holds for all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.rules.interval import RoundTimes
from aggregator.rules.outliers import Offer
from aggregator.rules.quorum import RoundView, Verdict, Waits, decide, effective_quorum
from aggregator.state.round import Round
from broker.wire.messages import TrainedOn
from tests.aggregator_hand import config, steps

WAITS = Waits(quorum=2, grace_s=1.0, arrivals_s=0.0, timeout_s=30.0)
EVERYBODY = frozenset("abcd")


def view(fresh="", held="", owing=None, met=None, flush=False):
    missing = EVERYBODY - frozenset(fresh) if owing is None else frozenset(owing)
    return RoundView(
        opened_at_s=0.0, fresh=frozenset(fresh), held=frozenset(held), owing=missing, quorum_met_at_s=met, flush=flush
    )


@pytest.mark.parametrize(
    ("now_s", "seen", "verdict", "reason"),
    [
        pytest.param(5.0, view("a"), Verdict.WAIT, "below quorum 2: 1 of 4 live islands", id="below its quorum"),
        pytest.param(0.1, view("abcd", met=0.1), Verdict.CLOSE, "complete: 4 of 4 live islands", id="nobody owes"),
        pytest.param(0.1, view(owing=""), Verdict.CANCEL, "nobody has anything to hand over", id="nothing came"),
        pytest.param(29.0, view(held="abc"), Verdict.WAIT, "below quorum 2", id="held ones close no round"),
        pytest.param(
            30.0, view(held="abc"), Verdict.CLOSE, "timeout: 0 of 4 live islands and 3 held over", id="held, at timeout"
        ),
        pytest.param(20.0, view("abc", met=1.0, flush=True), Verdict.WAIT, "flush waits for 1", id="beyond grace"),
        pytest.param(30.0, view("abc", met=1.0, flush=True), Verdict.CLOSE, "timeout: 3 of 4", id="a flush at timeout"),
    ],
)
def test_a_round_waits_closes_or_is_cancelled_by_what_came_and_says_why(now_s, seen, verdict, reason):
    decision = decide(now_s, seen, 4, WAITS)
    assert decision.verdict is verdict
    assert decision.reason.startswith(reason)
    assert decision.recheck_at_s == (30.0 if verdict is Verdict.WAIT else None)


def test_a_round_waits_in_its_grace_window_and_says_until_when():
    decision = decide(5.5, view("ab", met=5.0), 4, WAITS)
    assert (decision.verdict, decision.recheck_at_s) == (Verdict.WAIT, 6.0)
    assert decision.reason == "in grace window: 2 of 4 live islands"


def test_a_round_closes_at_the_timeout_with_what_is_there_and_names_who_is_missing():
    decision = decide(30.0, view("a"), 4, WAITS)
    assert decision.verdict is Verdict.CLOSE
    assert decision.reason == "timeout: 1 of 4 live islands, missing b, c, d"


@pytest.mark.parametrize(("quorum", "live", "effective"), [(1, 4, 1), (4, 4, 4), (4, 2, 2), (4, 0, 1), (1, 0, 1)])
def test_the_quorum_shrinks_to_the_live_islands_and_never_below_one(quorum, live, effective):
    assert effective_quorum(quorum, live) == effective


names = st.frozensets(st.sampled_from("abcdef"))
seconds = st.floats(0.0, 100.0)


@given(names, names, names, st.integers(0, 6), seconds, seconds, seconds, seconds, st.integers(1, 6), st.booleans())
def test_no_decision_breaks_the_rules(fresh, held, owing, live, now_s, met_s, grace_s, arrivals_s, quorum, flush):
    waits = Waits(quorum=quorum, grace_s=grace_s, arrivals_s=arrivals_s, timeout_s=50.0)
    met = min(met_s, now_s) if len(fresh) >= effective_quorum(quorum, live) else None
    seen = view(fresh, held, owing - fresh, met, flush=flush)
    decision = decide(now_s, seen, live, waits)
    assert decision.reason
    if decision.verdict is Verdict.CLOSE:
        assert fresh | held, "an empty round has nothing to merge"
        if now_s < 50.0 and seen.owing:
            assert len(fresh) >= effective_quorum(quorum, live), "closed early, below the quorum"
            assert not flush
    if decision.verdict is Verdict.CANCEL:
        assert not fresh | held, "what arrived must be merged"
    if decision.verdict is Verdict.WAIT:
        assert seen.owing
        assert now_s < 50.0
        # Asked again at the named moment, the same round decides: no call is needed in between.
        assert now_s < decision.recheck_at_s <= 50.0
        again = decide(decision.recheck_at_s, seen, live, waits)
        assert again.verdict is not Verdict.WAIT
    else:
        assert decision.recheck_at_s is None


@given(names, names, st.integers(1, 6))
def test_a_held_contribution_never_brings_a_close_forward(fresh, held, quorum):
    waits = Waits(quorum=quorum, grace_s=1.0, arrivals_s=0.0, timeout_s=50.0)
    owing = frozenset("z")
    with_held = decide(3.0, view(fresh, held, owing, met=2.5), 7, waits)
    without = decide(3.0, view(fresh, "", owing, met=2.5), 7, waits)
    assert (with_held.verdict, with_held.recheck_at_s) == (without.verdict, without.recheck_at_s)


# --- the round that asks --------------------------------------------------------------------------------------


def admitted(island_id, round_id=7, from_step=0):
    return Offer(
        island_id=island_id,
        incarnation=1,
        round_id=round_id,
        fragment_id=0,
        steps=steps(from_step, from_step + 4),
        trained_on=(TrainedOn(fragment_version=0, steps=4),),
        payload=None,
        payload_bytes=1,
    )


def a_round():
    return Round(round_id=7, fragment_id=0, opened_at_s=0.0, asked=frozenset("abc"))


def test_two_ranges_of_one_island_are_one_island_towards_the_quorum():
    round_ = a_round()
    for from_step in (0, 4):
        round_.offer(admitted("a", from_step=from_step))
    assert "below quorum 2: 1 of" in round_.look(1.0, frozenset("abc"), 3, WAITS).reason


def test_contributions_are_merged_in_the_order_of_islands_and_steps():
    round_ = a_round()
    for contribution in (admitted("b"), admitted("a", from_step=4), admitted("a")):
        round_.offer(contribution)
    assert [(c.island_id, c.steps.from_step) for c in round_.in_merge_order()] == [("a", 0), ("a", 4), ("b", 0)]


def test_a_quorum_that_shrank_and_grew_again_is_waited_for_again():
    round_ = a_round()
    round_.offer(admitted("a"))
    assert "grace" in round_.look(1.0, frozenset("abc"), 1, WAITS).reason
    assert "below quorum" in round_.look(1.5, frozenset("abc"), 3, WAITS).reason
    assert round_.quorum_met_at_s == 1.0


# --- how long rounds take, and what follows ------------------------------------------------------------------------


def journeys(**settings):
    return RoundTimes(config(**{"sync_interval": 24, "overlap": 2, "grace_factor": 0.5, **settings}))


def test_the_grace_window_shrinks_by_what_quorum_and_publication_take():
    made = journeys()
    assert made.waits(1.0, 24).grace_s == 1.0  # gamma * tau * step
    made.quorum_met(0.4)
    assert made.waits(1.0, 24).grace_s == pytest.approx(0.5 * (2.0 - 0.4))
    made.committed(opened_at_s=0.0, closed_at_s=0.5, now_s=1.1)
    assert made.waits(1.0, 24).grace_s == pytest.approx(0.5 * (2.0 - 0.4 - 0.6))


def test_the_wait_for_arrivals_is_their_ninetieth_percentile_and_a_step():
    made = journeys()
    made.opened(1, 0.0)
    assert made.waits(0.25, 24).arrivals_s == 0.25
    for i in range(1, 11):
        made.arrived(1, i / 10)
    assert made.arrivals_s(0.9) == 0.9
    assert made.waits(0.25, 24).arrivals_s == 0.9 + 0.25, "answers are given at the ends of steps"


@pytest.mark.parametrize(
    ("far", "waited_s"),
    [(1, 12.0), (2, 12.0), (3, 14.0), (4, 14.0)],
    ids=["one of four is far: half of the interval", "two", "most are far: as long as they take", "all"],
)
def test_a_round_waits_longer_than_half_of_the_interval_where_most_contributions_take_as_long(far, waited_s):
    """Else nearly all of a fleet with journeys of half of the interval would come too late, each time."""
    made = journeys()
    for round_id in range(10):
        made.opened(round_id, 24.0 * round_id)
        for i in range(4):
            made.arrived(round_id, 24.0 * round_id + (13.0 if i < far else 1.0))
    assert made.waits(1.0, 24).arrivals_s == waited_s


def test_longer_journeys_open_more_rounds_and_never_more_than_there_are_fragments():
    made = journeys(rounds_in_flight=2)
    assert made.rounds_allowed(8, 0.1, 24) == 2
    made.committed(opened_at_s=0.0, closed_at_s=1.0, now_s=1.2)
    # 12 steps of 0.1 s, 8 fragments in 24 steps: four are under way at any time, and one opens.
    assert made.rounds_allowed(8, 0.1, 24) == 5
    assert made.rounds_allowed(2, 0.01, 24) == 2
    assert made.rounds_allowed(8, 0.0, 24) == 2
