"""Who is kept out, for how long, and how they come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.rules.quarantine import LONGEST_S, OFFENCES, RELEASE_AFTER, STRIKES, Quarantine
from broker.wire.messages import RETRY_REASONS, Reason


def offend(quarantine, now_s=0.0, *, times=STRIKES, reason=Reason.OUTLIER):
    """Offends so many times, each time with steps that began after the last answer; returns the last answer."""
    answers = []
    for n in range(times):
        at = int(10 * now_s) + 24 * n
        answers.append(quarantine.offended("a", reason, from_step=at, at_step=at + 24, now_s=now_s))
    assert not any(answers[:-1])
    return answers[-1]


def test_the_third_offence_is_one_too_many():
    quarantine = Quarantine(30.0)
    assert not offend(quarantine, times=STRIKES - 1)
    assert not quarantine.holds("a", 0.0)
    assert offend(quarantine, 10.0, times=1)
    assert quarantine.holds("a", 39.9)
    assert not quarantine.holds("a", 40.0)
    assert not quarantine.holds("b", 10.0)
    assert quarantine.why("a", 15.0) == "for 25.0 s more, after outlier"
    assert quarantine.why("a", 40.0) == ""


def test_contributions_that_were_under_way_when_the_first_was_refused_are_one_incident():
    quarantine = Quarantine(30.0)
    for fragment in range(8):
        from_step = 3 * fragment  # each fragment was handed over last at another step, all before the answer at 24
        assert not quarantine.offended("a", Reason.NOT_FINITE, from_step=from_step, at_step=24 + fragment, now_s=1.0)


@pytest.mark.parametrize("reason", sorted({*Reason} - OFFENCES | RETRY_REASONS))
def test_what_may_befall_a_sound_island_is_no_offence(reason):
    assert not offend(Quarantine(30.0), reason=reason, times=100)


def test_each_quarantine_in_a_row_is_twice_as_long_up_to_an_hour_and_takes_one_offence_on_probation():
    quarantine, now_s, lengths = Quarantine(30.0), 0.0, []
    for n in range(10):
        assert offend(quarantine, now_s, times=1 if n else STRIKES)
        held = quarantine.now(now_s)["a"]
        assert held.times == n + 1
        lengths.append(held.until_s - now_s)
        now_s = held.until_s
    assert lengths == [min(LONGEST_S, 30.0 * 2**n) for n in range(10)]


def test_good_contributions_on_probation_earn_a_release_and_a_clean_slate():
    quarantine = Quarantine(30.0)
    offend(quarantine)
    released = [quarantine.behaved("a", 30.0) for _ in range(RELEASE_AFTER)]
    assert released == [False] * (RELEASE_AFTER - 1) + [True]
    assert not offend(quarantine, 100.0, times=STRIKES - 1)
    assert offend(quarantine, 200.0, times=1)
    assert quarantine.why("a", 200.0) == "for 30.0 s more, after outlier"


def test_a_new_life_has_the_same_past_and_its_own_steps():
    quarantine = Quarantine(30.0)
    offend(quarantine, 100.0, times=2)
    quarantine.joined("a")
    assert quarantine.offended("a", Reason.NOT_FINITE, from_step=0, at_step=1, now_s=200.0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.floats(0, 50)), max_size=60), st.integers(0, 60))
def test_a_record_read_back_decides_the_same(story, cut):
    """But for what began before the record, which counts as an incident of its own."""
    now_s, apart = 0.0, 1000.0  # another clock
    kept, restored = Quarantine(10.0), Quarantine(10.0)
    for n, (island, offends, pause_s) in enumerate(story):
        if n == cut:
            restored.restore(kept.record(now_s), now_s + apart)
        now_s += pause_s
        for each, at_s in [(kept, now_s), (restored, now_s + apart)][: 2 if n >= cut else 1]:
            if each.holds(island, at_s):
                continue
            if offends:
                each.offended(island, Reason.OUTLIER, from_step=n, at_step=n, now_s=at_s)
            else:
                each.behaved(island, at_s)
        if n >= cut:
            ours, theirs = kept.now(now_s), restored.now(now_s + apart)
            assert [(name, q.times) for name, q in ours.items()] == [(name, q.times) for name, q in theirs.items()]
