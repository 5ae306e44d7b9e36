"""What is far too long for its fleet, and what is not: healthy islands are never refused, thirtyfold is always."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.rules.outliers import WARM_UP_ROUNDS, WINDOW, FragmentNorms
from tests.aggregator_hand import offer

FACTOR = 10.0
FLEET = ("a", "b", "c", "d")


def norm_of(steps, rate=1.0):
    """What random steps beside directed ones add up to: half of each in 24 steps."""
    return rate * steps * max(1.0, math.sqrt(24 / steps))


def samples(*rates, steps=24, islands=FLEET):
    return [offer(island_id=i, norm=rate * steps, steps=steps) for i, rate in zip(islands, rates, strict=False)]


def settled():
    norms = FragmentNorms()
    for _ in range(WARM_UP_ROUNDS):
        assert_let_in(norms.judge(samples(1, 1, 1, 1), FLEET, FACTOR))
    assert not norms.warming_up
    return norms


def assert_let_in(findings):
    assert [(f.refused, f.scale) for f in findings] == [("", 1.0)] * len(findings)


def refused(findings):
    return [i for i, f in zip(FLEET, findings, strict=False) if f.refused]


def test_a_contribution_thirty_times_as_long_as_usual_is_refused_with_the_figures():
    norms = settled()
    for _ in range(50):  # it teaches nothing
        findings = norms.judge(samples(1, 1, 1, 30), FLEET, FACTOR)
        assert refused(findings) == ["d"]
        assert findings[3].refused == "its norm is 720 after 24 steps, at most 240 is plausible"
    assert not [each for each in norms._known if each.log_rate > 1.0]


def test_what_nobody_has_measured_is_let_in_and_teaches_nothing():
    norms = settled()
    before = norms.record()
    assert_let_in(norms.judge([offer(island_id="d", norm=None, steps=24)], FLEET, FACTOR))
    assert norms.record() == before


def test_a_factor_of_zero_lets_everything_in():
    assert_let_in(settled().judge(samples(1, 1, 1, 1e9), FLEET, 0.0))


@pytest.mark.parametrize(
    ("norms", "rates", "too_long"),
    [
        (FragmentNorms, (1, 1, 1, 1000), ["d"]),  # in the very first round
        (FragmentNorms, (1, 1000), ["b"]),
        (settled, (1, 1, 40, 40), ["c", "d"]),  # half of the fleet is not most of it
        (settled, (1, 40), ["b"]),
    ],
)
def test_what_is_too_long_beside_the_others_is_refused(norms, rates, too_long):
    assert refused(norms().judge(samples(*rates), FLEET[: len(rates)], FACTOR)) == too_long


def test_who_is_alone_before_anything_is_known_is_measured_against_version_0():
    norms = FragmentNorms()
    assert norms.judge([offer(island_id="a", norm=51.0, steps=3)], FLEET, FACTOR, length=5.0)[0].refused
    assert_let_in(norms.judge([offer(island_id="a", norm=49.0, steps=3)], FLEET, FACTOR, length=5.0))


def test_when_most_of_the_fleet_is_too_long_it_is_shortened_and_the_statistics_start_again():
    norms = settled()
    findings = norms.judge(samples(1, 40, 40, 40), FLEET, FACTOR)
    assert [f.refused for f in findings] == [""] * 4
    assert [f.scale for f in findings] == pytest.approx([1, 0.25, 0.25, 0.25])
    assert (norms.restarts, norms.warming_up) == (1, True)
    assert_let_in(norms.judge(samples(40, 40, 40, 40), FLEET, FACTOR))


def test_one_island_in_a_round_of_its_own_does_not_speak_for_those_who_are_away():
    norms = settled()
    for _ in range(5):
        assert norms.judge([offer(island_id="d", norm=2400.0, steps=24)], FLEET, FACTOR)[0].refused
    assert norms.restarts == 0


def test_votes_of_several_rounds_count_together():
    """Rounds of one island each, and all norms have risen: nobody is refused for ever."""
    norms = settled()
    findings = [norms.judge([offer(island_id=i, norm=960.0, steps=24)], FLEET, FACTOR)[0] for i in FLEET]
    assert [bool(f.refused) for f in findings] == [True, True, False, False]
    assert findings[2].scale == pytest.approx(0.25)
    assert_let_in(findings[3:])


drift = st.lists(st.floats(math.log(0.5), math.log(2.0)), min_size=1, max_size=60)
unequal = st.lists(st.floats(0.6, 1.6), min_size=4, max_size=4)
lengths = st.lists(st.sampled_from([1, 2, 5, 24, 24, 48, 120]), min_size=4, max_size=4)


@given(drift, unequal, lengths)
def test_a_healthy_fleet_is_never_refused_nor_shortened(changes, spread, steps):
    """Rates double or halve from round to round; islands differ by 2.7 and have ranges of 1 to 120 steps."""
    norms, rate = FragmentNorms(), 1.0
    for change in changes:
        rate = min(1e6, max(1e-6, rate * math.exp(change)))
        round_ = [
            offer(island_id=i, norm=norm_of(s, rate * own), steps=s)
            for i, own, s in zip(FLEET, spread, steps, strict=True)
        ]
        assert not refused(norms.judge(round_, FLEET, FACTOR))


@given(unequal, st.floats(30.0, 1e30), st.integers(WARM_UP_ROUNDS, 40), st.floats(-0.2, 0.2))
def test_thirtyfold_is_refused_after_the_warm_up_whatever_the_spread_and_the_drift(spread, factor, rounds, drift_):
    norms, rate = FragmentNorms(), 1.0
    for _ in range(rounds):
        assert not refused(norms.judge(samples(*[rate * own for own in spread]), FLEET, FACTOR))
        rate *= math.exp(drift_ / 4)
    usual = sorted(spread)[1:3]
    liar = factor * rate * max(usual) * 1.25
    assert refused(norms.judge(samples(rate, rate, rate, liar), FLEET, FACTOR)) == ["d"]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=100), st.integers(0, 100))
def test_statistics_read_back_judge_the_same(rates, cut):
    kept = FragmentNorms(seed_norm=3.0)
    for rate in rates[:cut]:
        kept.judge(samples(rate), ["a"], FACTOR)
    read = FragmentNorms.restored(kept.record())
    for rate in rates[cut:]:
        assert read.judge(samples(rate), ["a"], FACTOR) == kept.judge(samples(rate), ["a"], FACTOR)
    assert len(kept.record()["known"]) <= WINDOW


def test_the_very_first_step_of_a_newcomer_condemns_nobody_who_has_trained_for_a_while():
    """Seen on a busy machine: the first step has a hundredth of the learning rate that others have by then."""
    norms = FragmentNorms(seed_norm=8.7)
    fleet = ["early", "late"]
    norms.judge([offer(island_id="late", norm=0.000128, steps=1)], fleet, 10.0, length=8.7)
    early = offer(island_id="early", norm=0.882, steps=65)
    assert norms.judge([early], fleet, 10.0, length=8.7)[0].refused == ""
    liar = offer(island_id="late", norm=882.0, steps=65)
    assert norms.judge([liar], [*fleet, "third"], 10.0, length=8.7)[0].refused


def test_nor_does_it_beside_what_is_known_of_one_other_range():
    """Seen where one island had to compile first: of two rates known the lower median takes the newcomer's step."""
    norms = FragmentNorms(seed_norm=8.7)
    fleet = ["early", "late"]
    assert_let_in(norms.judge([offer(island_id="early", norm=0.87, steps=57)], fleet, 10.0, length=8.7))
    late = offer(island_id="late", norm=0.000128, steps=1)
    assert_let_in(norms.judge([late, offer(island_id="early", norm=0.35, steps=23)], fleet, 10.0, length=8.7))
    liar = offer(island_id="early", norm=350.0, steps=23)
    assert norms.judge([liar], [*fleet, "third"], 10.0, length=8.7)[0].refused


def test_nobody_is_longer_than_the_others_of_its_round():
    """By the other islands of the round, at the same steps; by the window where fewer than two others are there."""
    norms = FragmentNorms()
    samples = [
        offer(island_id=name, norm=norm, steps=24) for name, norm in zip("abcd", (1.0, 2.0, 3.0, 8.0), strict=True)
    ]
    findings = norms.judge(samples, "abcd", 10.0, length=1.0, levelled=True)
    assert [finding.scale for finding in findings] == pytest.approx([1, 1, 1, 1.5 * 2 / 8])
    assert not any(finding.refused for finding in findings)
    assert {f.scale for f in FragmentNorms().judge(samples, "abcd", 10.0, length=1.0)} == {1.0}
    two = [offer(island_id="a", norm=1.0, steps=24), offer(island_id="d", norm=8.0, steps=24)]
    assert {f.scale for f in FragmentNorms().judge(two, "ad", 10.0, length=1.0, levelled=True)} == {1.0}
    for _ in range(8):
        norms.judge(samples[:3], "abc", 10.0, levelled=True)
    assert norms.judge(two, "ad", 10.0, levelled=True)[1].scale == pytest.approx(1.5 * 2 / 8)
