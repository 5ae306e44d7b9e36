"""What a contribution weighs."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.rules import staleness as rules
from aggregator.rules.staleness import mean_staleness, weighed
from broker.wire.messages import TrainedOn
from tests.aggregator_hand import NEWEST, offer

ROUNDS = st.lists(
    st.builds(offer, st.sampled_from("abcdef"), st.integers(0, 10**9), st.integers(1, 10**4), st.integers(0, 100)),
    min_size=1,
    max_size=12,
)


def test_fresh_steps_weigh_one_and_the_default_exponent_takes_the_root():
    assert rules.staleness_weight(0, 0.5) == 1.0
    assert rules.staleness_weight(3, 0.5) == pytest.approx(0.5)


def test_a_full_round_takes_a_full_step_and_exponent_zero_always_does():
    assert rules.presence_factor(3, 3, 1.0) == 1.0
    assert rules.presence_factor(1, 8, 0.0) == 1.0
    assert rules.presence_factor(2, 8, 0.5) == pytest.approx(0.5)
    assert rules.presence_factor(2, 8, 1.0) == pytest.approx(0.25)


def test_a_range_that_straddles_an_adoption_is_a_little_stale_not_a_whole_version():
    on_both = [TrainedOn(fragment_version=version, steps=steps) for version, steps in [(6, 2), (7, 22)]]
    assert mean_staleness(on_both, 7) == pytest.approx(2 / 24)


def test_token_weight_is_amount_times_rate():
    one, two = weighed([offer("a", tokens=100, steps=10), offer("b", tokens=300, steps=10)], NEWEST, 0.5)
    assert (one.token_weight, two.token_weight) == (1_000, 9_000)
    assert (one.merge_weight, two.merge_weight) == pytest.approx((0.1, 0.9))


def test_one_stale_contribution_alone_moves_less_than_one_fresh_one_alone():
    (fresh,) = weighed([offer(staleness=0)], NEWEST, 0.5)
    (stale,) = weighed([offer(staleness=3)], NEWEST, 0.5)
    assert (fresh.merge_weight, stale.merge_weight) == (1.0, 0.5)


@given(ROUNDS, st.floats(0, 4))
def test_merge_weights_never_add_up_to_more_than_one_and_to_one_when_all_are_fresh(offered, exponent):
    weights = weighed(offered, NEWEST, exponent)
    assert math.fsum(w.merge_weight for w in weights) <= 1 + 1e-12
    fresh = [replace(t, trained_on=offer(steps=t.steps.steps).trained_on) for t in offered]
    whole = float(any(t.steps.tokens for t in offered))
    assert math.fsum(w.merge_weight for w in weighed(fresh, NEWEST, exponent)) == pytest.approx(whole)


@given(ROUNDS)
def test_the_cap_equals_the_obvious_iteration(offered):
    """The twin: cut whoever exceeds half of the sum to half of it, until nobody does."""
    islands = sorted({t.island_id for t in offered})
    raw = {i: math.fsum(t.steps.tokens**2 / t.steps.steps for t in offered if t.island_id == i) for i in islands}
    capped = dict(raw)
    if sum(w > 0 for w in raw.values()) >= 3:
        for _ in range(200):
            total = math.fsum(capped.values())
            capped = {i: min(w, total / 2) for i, w in capped.items()}
    weights = weighed(offered, NEWEST, 0.5)
    for island in islands:
        own = math.fsum(w.token_weight for w, t in zip(weights, offered, strict=True) if t.island_id == island)
        assert own == pytest.approx(capped[island], rel=1e-9)


def test_tokens_beyond_what_is_believed_and_steps_that_were_not_run_do_not_weigh():
    """Two islands: there is no half to be cut to, and a claim alone would leave the other one nothing."""
    honest, liar = offer("a", 2400, 24), offer("b", 24_000_000, 24)
    shares = [
        w.merge_weight for w in weighed([honest, liar], NEWEST, 0.5, most_tokens_per_step={"a": 400.0, "b": 200.0})
    ]
    assert shares == pytest.approx([1 / 5, 4 / 5])
    fast = offer("b", 4 * 2400, 4 * 24)
    shares = [w.merge_weight for w in weighed([honest, fast], NEWEST, 0.5, paces={"b": 0.25})]
    assert shares == pytest.approx([1 / 2, 1 / 2])
