"""Outliers and quarantine on one aggregator core: what is merged, who hears what, and what survives a restart."""

import pytest

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Flaw, Merge, SaveRun
from aggregator.rules.quarantine import RELEASE_AFTER
from aggregator.state.summary import totals
from broker.base.errors import ConfigError
from broker.wire.messages import Fate, Reason
from tests.aggregator_hand import Desk, notes, of, resolutions

NAN = Flaw(reason=Reason.NOT_FINITE, detail="NaN in w0")
ISLANDS = ("a", "b", "c", "d")


def desk(*island_ids, **settings):
    made = Desk(**{"quarantine_s": 30.0, "quorum": 3, **settings})
    made.gather(*(island_ids or ISLANDS))
    made.take()
    return made


def play_round(made, first, *, bad=(), norm=4.0, bad_norm=4000.0, flaw=None):
    """One round of four steps from ``first`` on; the islands in ``bad`` send what is given for them."""
    made.now_s += 0.4
    made.open_round(*ISLANDS, step=first + 4)
    said = []
    for island in ISLANDS:
        wrong = island in bad
        said += made.offer(island, first, first + 4, norm=bad_norm if wrong else norm, flaw=flaw if wrong else None)
    return said


def merged(made):
    return [m.island_id for m in made.contributions()]


def test_an_outlier_is_refused_when_its_round_closes_and_the_round_goes_on_without_it():
    made = desk()
    said = play_round(made, 0, bad="d")
    assert merged(made) == ["a", "b", "c"]
    (note,) = notes(said, "contribution.refused")
    assert (note["island"], note["reason"]) == ("d", Reason.OUTLIER)
    assert note["detail"] == "its norm is 4e+03 after 4 steps, at most 400 is plausible"
    (resolution,) = resolutions(made.beat("d", 4), "d")
    assert (resolution.fate, resolution.reason, resolution.detail) == (Fate.REFUSED, Reason.OUTLIER, note["detail"])
    assert made.refusals == {Reason.OUTLIER: 1}
    assert made.tokens("d")["wasted"] == {"outlier": 40}
    made.check_books()


def test_a_round_that_holds_nothing_but_an_outlier_is_cancelled():
    made = desk(quorum=1)
    play_round(made, 0)
    made.open_round(*ISLANDS, step=8)
    for island in "abc":
        made.nothing(island)
    said = made.offer("d", 4, 8, norm=1e6)
    assert notes(said, "round.cancelled")
    assert made.versions == (1,)
    assert not made.open_rounds


def test_when_the_whole_fleet_jumps_its_step_is_shortened_and_said_so():
    made = desk()
    for n in range(8):
        play_round(made, 4 * n)
    made.take()
    said = play_round(made, 32, norm=160.0)
    (merge,) = of(said, Merge)
    assert [part.staleness_weight for part in merge.parts] == pytest.approx([0.25] * 4)
    assert [m.merge_weight for m in made.contributions()] == pytest.approx([1 / 16] * 4)
    (note,) = notes(said, "norms.restarted")
    assert note["norms"] == dict.fromkeys(ISLANDS, 160.0)
    assert made.refusals == {}


def offend(made, *, first=0):
    """Three rounds in which one island sends NaN; returns the step at which they ended."""
    for n in range(3):
        play_round(made, first + 4 * n, bad="d", flaw=NAN)
    return first + 12


def test_a_repeated_offender_is_quarantined_told_so_and_seen_in_the_totals():
    made = desk()
    step = offend(made)
    (note,) = notes(made.take(), "island.quarantined")
    assert (note["island"], note["reason"]) == ("d", Reason.NOT_FINITE)
    assert note["detail"] == "for 30.0 s more, after not_finite"
    assert totals(made.core.run, made.now_s).quarantined == {"d": {"for_s": 30.0, "reason": "not_finite", "times": 1}}
    (resolution,) = resolutions(play_round(made, step), "d")
    assert (resolution.fate, resolution.reason) == (Fate.REFUSED, Reason.QUARANTINED)
    assert resolution.detail == "for 29.6 s more, after not_finite"
    assert merged(made) == ["a", "b", "c"]
    assert made.tokens("d")["wasted"] == {"not_finite": 120, "quarantined": 40}
    made.check_books()


def test_a_restart_of_the_island_does_not_free_it_and_its_flaw_is_told_so_that_it_can_recover():
    made = desk()
    step = offend(made)
    made.join("d")
    made.beat("d", step)
    for first, flaw, reason in [(step, None, Reason.QUARANTINED), (step + 4, NAN, Reason.NOT_FINITE)]:
        (resolution,) = resolutions(play_round(made, first, bad="d", bad_norm=4.0, flaw=flaw), "d")
        assert resolution.reason is reason


def test_after_its_time_an_island_is_merged_again_and_released():
    made = desk(quarantine_s=4.0)
    step = offend(made)
    made.now_s += 4.0
    made.take()
    for n in range(RELEASE_AFTER):
        assert not notes(made.take(), "island.released")
        play_round(made, step + 4 * n)
        assert merged(made) == list(ISLANDS)
    log = made.take()
    assert notes(log, "island.released") == [{"island": "d"}]
    assert of(log, SaveRun)[-1].record["quarantine"] == {}


def test_a_restart_of_the_aggregator_frees_nobody_and_forgets_no_norm():
    made = desk()
    step = offend(made)
    after = made.restarted()
    after.tick()
    assert after.quarantined == ["d"]
    assert after.core.run.model.fragments[0].norms.record() == made.core.run.model.fragments[0].norms.record()
    for island in ISLANDS:
        after.beat(island, step)
    play_round(after, step, bad="c")
    assert merged(after) == ["a", "b"]


def test_lies_in_heartbeats_lead_to_quarantine_too():
    made = desk()
    for _ in range(3):
        made.beat("d", 4, tokens=10**9)
    assert made.quarantined == ["d"]


@pytest.mark.parametrize(("name", "value"), [("outlier_factor", 1.0), ("outlier_factor", -1.0), ("quarantine_s", -1.0)])
def test_settings_that_cannot_work_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        AggregatorConfig(**{name: value})


def test_both_can_be_switched_off():
    made = desk(outlier_factor=0.0, quarantine_s=0.0)
    for n in range(4):
        play_round(made, 4 * n, bad="d")
    assert merged(made) == list(ISLANDS)
    offend(made, first=16)
    assert not notes(made.take(), "island.quarantined")


def test_a_quarantined_island_is_given_nothing_of_one_that_is_gone():
    made = desk("a", "b", "c", share_takeover_s=6.0, quarantine_s=60.0)
    made.core.run.fleet.quarantine.restore({"b": [0, 1, 60.0, "outlier", 0]}, made.now_s)
    given = []
    for n in range(8):
        made.now_s += 1.0
        for name in "bc":
            last = max((block.number for block in made.blocks(name)), default=0)
            given += notes(made.beat(name, n, block=last), "block.given")
    assert {each["before"] for each in notes(made.log, "block.ended")} == {"a"}
    assert {each["owner"] for each in given} == {"c"}
