"""What directions change in a run: weights of later rounds, quarantine, and what a restart and other shards know."""

from itertools import combinations

import pytest

from aggregator.interface.events import Merge
from aggregator.rules.divergence import SHORT, TIMES
from aggregator.rules.trust import NEWCOMER
from aggregator.state.summary import Traffic, report, totals
from broker.wire.messages import Fate, Reason, Standings
from tests.aggregator_hand import notes, of, sent
from tests.shard_bench import Shards
from tests.unit.aggregator_rounds.test_rogues import ISLANDS, desk, merged, play_round, resolutions


def pointing(value):
    """The cosines of a merge whose islands agree by 0.3, all but ``d``, whose cosines are ``value``."""

    def cosines(merge):
        names = [merge.parts[i].island_id for i in merge.compared]
        return tuple(value if "d" in pair else 0.3 for pair in combinations(names, 2))

    return cosines


def agreeing(value):
    """The cosines of a merge whose islands all agree by the same."""
    return lambda merge: tuple(value for _ in combinations(merge.compared, 2))


def weights(said):
    """Token weights of the merge among some actions, by island; equal ones are 1."""
    (merge,) = of(said, Merge)
    most = max(part.token_weight for part in merge.parts)
    return {part.island_id: part.token_weight / most for part in merge.parts}


def test_an_island_that_points_against_the_others_loses_its_weight_and_then_its_place():
    made = desk()
    made.cosines = pointing(-0.3)
    seen, step = [], 0
    while not (out := notes(made.take(), "island.quarantined")):
        seen.append(weights(play_round(made, step)))
        step += 4
    weights_of_d = [each["d"] for each in seen]
    assert weights_of_d == sorted(weights_of_d, reverse=True)
    assert (weights_of_d[0], set(weights_of_d[3:])) == (1.0, {0.0})
    assert all(each[island_id] == 1.0 for each in seen for island_id in ISLANDS[:3])
    (note,) = out
    assert (note["island"], note["reason"], note["for_s"]) == ("d", "opposed", 30.0)
    assert note["detail"].startswith("its pseudo-gradients point against the fleet's: agreement -")
    (resolution,) = resolutions(play_round(made, step), "d")
    assert (resolution.fate, resolution.reason) == (Fate.REFUSED, Reason.QUARANTINED)
    assert merged(made) == ["a", "b", "c"]
    made.check_books()


def test_without_trust_it_keeps_both():
    made = desk(trust=False)
    made.cosines = pointing(-0.3)
    for n in range(10):
        assert set(weights(play_round(made, 4 * n)).values()) == {1.0}
    assert not notes(made.take(), "island.quarantined")


def test_a_commit_says_what_each_island_agreed_by_and_was_trusted_with():
    made = desk()
    made.cosines = pointing(0.0)
    for n in range(20):
        made.take()
        play_round(made, 4 * n)
    (note,) = notes(made.take(), "version.committed")
    assert note["agreement"] == 0.3
    assert {each["island"]: (each["agreement"], each["trust"]) for each in note["contributions"]} == {
        **dict.fromkeys(ISLANDS[:3], (0.3, 1.0)),
        "d": (0.0, 0.0),
    }
    assert {each.island_id: each.merge_weight for each in made.contributions()} == pytest.approx(
        dict.fromkeys("abc", 1 / 3) | {"d": 0}
    )


def test_a_restart_forgets_nothing_and_a_newcomer_begins_small():
    made = desk()
    made.cosines = pointing(0.0)
    for n in range(20):
        play_round(made, 4 * n)
    after = made.restarted()
    assert after.core.run.books.trust.record() == made.core.run.books.trust.record()
    assert after.core.run.books.trust.factor("e") == NEWCOMER


def test_a_round_of_an_island_without_weight_alone_takes_no_step():
    made = desk()
    made.cosines = pointing(0.0)
    for n in range(20):
        play_round(made, 4 * n)
    made.now_s += 2.0
    round_id = made.open_round("d", step=88)
    made.offer("d", 80, 88, round_id=round_id)
    made.run_to(made.now_s + 20.0)
    assert [each.merge_weight for each in made.contributions()] == [0.0]


def troubles(made):
    return [each.partition(" s: ")[2] for each in made.core.run.troubles.sentences(made.now_s)]


def test_a_sudden_fall_of_agreement_is_a_trouble_until_it_is_over_over_a_restart_too():
    made, step = desk(), 0
    for n in range(TIMES * SHORT):
        made.cosines = agreeing(0.4 - 0.001 * n)  # this slow one is none
        play_round(made, step := 4 * n)
    assert not troubles(made)
    made.take()
    made.cosines = agreeing(0.02)
    while not (found := notes(made.take(), "fleet.diverging")) and step < 4000:
        play_round(made, step := step + 4)
    assert found == [{"agreement": pytest.approx(0.13, abs=0.03), "usual": pytest.approx(0.31, abs=0.03)}]
    (sentence,) = troubles(made)
    assert sentence.startswith("the islands' directions agree by 0.1")
    assert "begins to diverge" in sentence
    assert "outer_learning_rate" in sentence
    assert made.core.run.books.course.fallen == made.restarted().core.run.books.course.fallen
    made.cosines = agreeing(0.4)
    while not (found := notes(made.take(), "fleet.agrees")) and step < 8000:
        play_round(made, step := step + 4)
    assert found[0]["after_s"] > 0
    assert not troubles(made)


def test_status_has_how_far_islands_agree_and_who_has_not_all_of_its_weight():
    made = desk()
    made.cosines, made.momentum_cosine = pointing(0.0), 0.5
    before = totals(made.core.run, made.now_s)
    assert (before.agreement, before.momentum_cosine, before.trust) == (None, None, {})
    for n in range(12):
        play_round(made, 4 * n)
    made.join("e")
    found = totals(made.core.run, made.now_s)
    assert (found.agreement, found.momentum_cosine) == (pytest.approx(0.3), pytest.approx(0.5))
    assert found.trust == {
        "d": {"trust": 0.0, "agreement": pytest.approx(0.0, abs=0.05), "usual": pytest.approx(0.3), "new": False},
        "e": {"trust": NEWCOMER, "agreement": None, "usual": None, "new": True},
    }
    counted = report(made.core.run, Traffic())
    assert (counted["agreement"], counted["momentum_cosine"]) == (found.agreement, found.momentum_cosine)
    untrusting = desk(trust=False)
    untrusting.cosines = pointing(0.0)
    for n in range(12):
        play_round(untrusting, 4 * n)
    assert totals(untrusting.core.run, untrusting.now_s).trust == {}


def test_shards_share_their_verdicts():
    made = Shards(2)
    made.gather("a", "b", "c", "d")
    told = [[], []]
    for desk_ in made.desks:
        desk_.cosines = pointing(-0.3) if desk_ is made.desks[1] else pointing(0.3)
    for n in range(20):
        made.beat("a", 4 * n + 4)
        for island_id in ("b", "c", "d"):
            made.beat(island_id, 4 * n + 4)
        for p in range(2):
            for island_id in ("a", "b", "c", "d"):
                made.offer(island_id, 4 * n, 4 * n + 4, p)
        made.run_to(made.now_s + 1.0)
    for shard, desk_ in enumerate(made.desks):
        told[shard] = notes(made.said[shard], "island.quarantined")
        assert [each["island"] for each in told[shard]] == ["d"], shard
        assert desk_.core.run.books.trust.factor("d") == 0.0
    assert told[0][0]["detail"].endswith("shard 1 has found it")
    assert sent(made.said[1], Standings)
