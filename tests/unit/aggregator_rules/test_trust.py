"""Trust: what directions say of the islands that sent them, and what follows."""

import random
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.rules.quarantine import Quarantine
from aggregator.rules.trust import FEWEST, KNOWN, NEWCOMER, RATE, Trust, agreements_of

FLEET = ("a", "b", "c", "d", "liar")
#: Of pseudo-gradients of honest islands, and of theirs with the liar's.
USUAL = 0.3


def learn(trust, cosine, islands=FLEET):
    """One round with each island; ``cosine`` is a function of two of them."""
    found = [cosine(a, b) for a, b in combinations(islands, 2)]
    return trust.learn(islands, found)


def liar_at(value):
    return lambda a, b: value if "liar" in (a, b) else USUAL


def factors(trust, islands=FLEET):
    return {island_id: trust.factor(island_id) for island_id in islands}


def test_where_all_agree_alike_weights_stay_what_tokens_say_to_the_last_bit():
    trust = Trust()
    assert set(factors(trust).values()) == {1.0}
    for _ in range(40):
        learn(trust, lambda a, b: USUAL)
        assert set(factors(trust).values()) == {1.0}


@pytest.mark.parametrize("value", [-USUAL, 0.0, -1.0])
def test_one_that_points_elsewhere_has_no_weight_after_a_few_rounds_and_the_others_all_of_theirs(value):
    trust = Trust()
    for _ in range(8):
        learn(trust, liar_at(value))
    assert factors(trust) == dict.fromkeys(FLEET[:4], 1.0) | {"liar": 0.0}


def test_one_with_other_data_that_agrees_half_as_much_keeps_its_weight():
    trust = Trust()
    for _ in range(40):
        assert not learn(trust, liar_at(USUAL / 2)).opposed
    assert set(factors(trust).values()) == {1.0}


def test_a_fleet_whose_islands_hardly_agree_expects_little():
    trust = Trust()
    for _ in range(150):
        learn(trust, lambda a, b: 0.02 if "liar" not in (a, b) else 0.01)
    assert set(factors(trust).values()) == {1.0}
    noise = Trust()
    for _ in range(40):
        learn(noise, lambda a, b: 0.001 if "liar" not in (a, b) else -0.001)
    assert set(factors(noise).values()) == {1.0}


def test_only_against_is_evidence_for_quarantine():
    trust, alarms = Trust(), []
    for round_ in range(30):
        found = learn(trust, liar_at(-USUAL))
        alarms += [round_] * ("liar" in found.opposed)
        assert set(found.opposed) <= {"liar"}
    assert alarms[0] == 6  # e ** (2 * 7) is beyond a million
    for value in (0.0, -0.3 * USUAL):
        for _ in range(200):
            assert not learn(trust, liar_at(value)).opposed


@pytest.mark.parametrize(("level", "noise"), [(0.3, 0.02), (0.3, 0.1), (0.3, 0.2), (0.05, 0.02), (0.05, 0.05)])
def test_noise_neither_accuses_an_honest_island_nor_hides_one_that_lies(noise, level):
    """Cosines in the noise of small fragments: what one round cannot tell, many do."""
    rng, trust, alarms = random.Random(1), Trust(), Counter()
    rounds = 400 + round(20 * (noise / level) ** 2 * 10)

    def cosine(a, b):
        return (-level if "liar" in (a, b) else level) + rng.gauss(0, noise)

    least = 1.0
    for round_ in range(rounds):
        alarms.update(learn(trust, cosine).opposed.keys())
        if round_ > rounds / 2:
            assert trust.factor("liar") < 0.2
            least = min(least, *(trust.factor(each) for each in FLEET[:4]))
    assert set(alarms) == {"liar"}
    assert least > 0.9


def test_an_island_that_is_tolerated_raises_no_alarm():
    """At the bound itself, by fresh noise in each round: one alarm in a million rounds is what may be."""
    rng, alarms = random.Random(0), 0
    trust = Trust()
    for _ in range(20_000):
        found = learn(trust, lambda a, b: (-0.35 if "liar" in (a, b) else 1) * USUAL + rng.gauss(0, 0.1))
        alarms += len(found.opposed)
    assert alarms == 0


def test_the_way_back_leads_through_agreement():
    trust = Trust()
    for _ in range(20):
        learn(trust, liar_at(-USUAL))
    for _ in range(20):
        before = trust.factor("liar")
        learn(trust, liar_at(USUAL))
        assert trust.factor("liar") >= before
    assert trust.factor("liar") == 1.0


def test_a_newcomer_begins_with_a_part_of_its_weight():
    trust = Trust()
    for _ in range(20):
        learn(trust, lambda a, b: USUAL, FLEET[:4])
    assert trust.factor("new") == NEWCOMER
    rounds, known = 0, 0.0
    while known < KNOWN:
        known += RATE * (1 - known)
        learn(trust, lambda a, b: USUAL, (*FLEET[:4], "new"))
        rounds += 1
        assert (trust.factor("new") == 1.0) == (known >= KNOWN)
    assert rounds == 4


def test_of_two_islands_nothing_is_concluded():
    trust = Trust()
    for _ in range(20):
        found = learn(trust, lambda a, b: -1.0, FLEET[:2])
        assert (found.level, found.opposed) == (-1.0, {})
    assert set(factors(trust, FLEET[:2]).values()) == {1.0}
    assert trust.learn(["a"], []) is None
    assert FEWEST == 3


@given(
    honest=st.integers(2, 8),
    data=st.data(),
)
def test_fewer_than_half_cannot_move_what_is_found_of_the_others(honest, data):
    """Whatever liars say of each other, and however they point to the honest: they are outvoted."""
    liars = data.draw(st.integers(1, honest - 1))
    islands = [f"h{i}" for i in range(honest)] + [f"l{i}" for i in range(liars)]
    lies = st.floats(-1, 1)
    cosines = [USUAL if a[0] == b[0] == "h" else data.draw(lies) for a, b in combinations(islands, 2)]
    found = agreements_of(islands, cosines)
    for island_id in islands[:honest]:
        assert found[island_id] >= USUAL
    against = [USUAL if a[0] == b[0] == "h" else 1.0 if a[0] == b[0] else -0.1 for a, b in combinations(islands, 2)]
    found = agreements_of(islands, against)
    assert all(found[island_id] == (USUAL if island_id[0] == "h" else -0.1) for island_id in islands)


def test_several_contributions_of_an_island_are_one_voice():
    found = agreements_of(["a", "a", "b", "c"], [1.0, 0.2, 0.4, 0.4, 0.6, -0.5])
    assert found == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.5})


def test_a_record_goes_on_and_the_newest_counts():
    trust, old = Trust(), {}
    for _ in range(5):
        old = trust.record()
        learn(trust, liar_at(-USUAL))
    again = Trust()
    again.restore([trust.record(), old, Trust().record()])
    assert again.record() == trust.record()
    assert factors(again) == factors(trust)
    again.restore([])
    assert again.record() == trust.record()


def test_an_opposed_island_is_kept_out_at_once_and_twice_as_long_the_next_time():
    quarantine = Quarantine(30.0)
    assert quarantine.opposed("liar", 0.0)
    assert not quarantine.opposed("liar", 10.0)
    assert "after opposed" in quarantine.why("liar", 10.0)
    assert not quarantine.holds("liar", 30.0)
    assert quarantine.opposed("liar", 40.0)
    assert quarantine.until_s("liar", 41.0) == 100.0
    assert not Quarantine(0.0).opposed("liar", 0.0)
