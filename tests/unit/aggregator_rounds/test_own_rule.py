"""A merge rule of one's own: what it is asked, what becomes of its answer, and how a wrong one is told."""

import json
from itertools import combinations

import numpy as np
import pytest

from aggregator.interface.events import Computed, Manifested, Merge
from aggregator.interface.merge_rule import MAX_STATE_BYTES, MergeRound, Offered
from aggregator.merge import versions
from aggregator.merge.fragment_state import FragmentState
from aggregator.merge.kernels import compare, merge_fragment
from aggregator.rounds.core import Aggregator
from aggregator.state.run_settings import changes, settled
from aggregator.store.tape import read_start, start_line
from broker.base.errors import ConfigError
from broker.process.demands import demands_of
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.messages import AGGREGATOR, Codec, Reason, Refused, Roster, own_rule
from broker.wire.ranges import StepRange
from broker.wire.tensors import encode_tensor
from examples.geometric_median import GeometricMedian
from tests.aggregator_hand import Desk, config, notes, of, sent
from tests.unit.aggregator_rounds.test_rogues import ISLANDS, desk, play_round

MEDIAN = "examples.geometric_median:GeometricMedian"
#: Gives every island half of its weight, d none, and counts its rounds. Writes down what it was asked.
COUNTING = """
from aggregator.interface.merge_rule import RoundRule

asked = []

class Counting(RoundRule):
    compares = True

    def factors(self, round, state):
        asked.append((round, state))
        factors = [0.0 if each.island_id == "d" else 0.5 for each in round.contributions]
        return factors, {"rounds": 1 + (state or {"rounds": 0})["rounds"]}
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a module of a name of its own, and returns it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        name = f"rule_{abs(hash(tmp_path))}_{len(list(tmp_path.iterdir()))}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def halves(merge):
    """Cosines of a merge: any two agree by one half."""
    return (0.5,) * (len(merge.parts) * (len(merge.parts) - 1) // 2)


def counting(written, **settings):
    module = written(COUNTING)
    made = desk(merge=f"{module}:Counting", **settings)
    made.cosines = halves
    return made, __import__(module).asked


def test_weights_of_a_merge_and_of_its_books_are_multiplied_by_the_same_factors(written):
    made, asked = counting(written)
    (merge,) = of(play_round(made, 0), Merge)
    (question, state) = asked[0]
    assert (question.shard, question.fragment_id, question.fragment_version, state) == (0, 0, 1, None)
    assert [(o.island_id, o.share, o.length, o.steps, o.tokens) for o in question.contributions] == [
        (name, 0.25, 4.0, 4, 40) for name in ISLANDS
    ]
    assert question.products == tuple(tuple(16.0 if i == j else 8.0 for j in range(4)) for i in range(4))
    assert [part.staleness_weight for part in merge.final_parts(halves(merge))] == [0.5, 0.5, 0.5, 0.0]
    assert [m.merge_weight for m in made.contributions()] == [0.125, 0.125, 0.125, 0.0]
    assert len(asked) == 1  # the merge and the core have one answer
    made.check_books()


def test_the_state_of_a_fragment_is_in_its_commit_and_goes_on_after_a_restart(written):
    made, asked = counting(written)
    play_round(made, 0)
    play_round(made, 4)
    assert made.disk.commits[0].ledger["rule"]["state"] == {"rounds": 2}
    again = made.restarted()
    again.cosines = halves
    for island_id in ISLANDS:
        again.beat(island_id, 8)
    play_round(again, 8)
    assert asked[-1][1] == {"rounds": 2}
    assert again.disk.commits[0].ledger["rule"]["state"] == {"rounds": 3}


def test_it_stands_in_the_place_of_trust(written):
    made, _ = counting(written)
    made.cosines = lambda merge: tuple(
        -0.9 if "d" in pair else 0.9 for pair in combinations([p.island_id for p in merge.parts], 2)
    )
    for n in range(20):
        play_round(made, 4 * n)
    assert not notes(made.take(), "island.quarantined")
    assert made.core.run.books.trust.standing("d").agreement < 0  # which is known all the same


def test_a_run_without_one_commits_nothing_of_it():
    made = desk()
    play_round(made, 0)
    assert "rule" not in made.disk.commits[0].ledger


RULE = """
from aggregator.interface.merge_rule import RoundRule

class Wrong(RoundRule):
    def factors(self, round, state):
        {}
"""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("return [1.0], None", "returned 1 factors for 4 contributions for version 1 of fragment 0, one for each"),
        ("return [float('nan')] * 4, None", r"returned the factors \[nan, nan, nan, nan\] .*finite and not negative"),
        ("return [-1.0, 1, 1, 1], None", r"returned the factors \[-1.0, 1.0, 1.0, 1.0\] .*not negative"),
        ("return [2.0, 1, 1, 1], None", "factors whose mean by shares is 1.25 .* at most 1"),
        ("return ['x'] * 4, None", "ValueError: could not convert .*factors and a state of plain data are needed"),
        ("return None", "TypeError: .*factors and a state of plain data are needed"),
        ("raise OSError('no luck')", r"OSError: no luck \(.*rule_.*\.py, line 6\)"),
        ("return [1.0] * 4, {1: object()}", "Error: .*JSON .*a state of plain data"),
        ("return [1.0] * 4, float('inf')", "Error: .*JSON .*a state of plain data"),
        ("return [1.0] * 4, 'x' * 20000", f"a state of 20002 bytes as JSON .*at most {MAX_STATE_BYTES}"),
    ],
)
def test_an_answer_that_cannot_be_used_is_told_with_round_value_and_cure(written, line, told):
    made = desk(merge=f"{written(RULE.format(line))}:Wrong")
    with pytest.raises(ConfigError, match=told) as refused:
        play_round(made, 0)
    assert refused.value.field == "merge"
    assert "mend it, and start again: that names the new digest" in refused.value.cure


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        (None, "nowhere.at_all:Rule", "cannot be imported .*No module named 'nowhere'.*as for each standby and replay"),
        ("import nothing_of_the_kind", "{}:Rule", r"ModuleNotFoundError: .*nothing_of_the_kind.*rule_.*\.py, line 1"),
        ("Rule = 3", "{}:Rule", "is no merge rule: name a class that derives from"),
        ("", "{}:Rule", "is no merge rule"),
        (RULE.format("pass") + "    kernel = 'mode'", "{}:Wrong", "has kernel 'mode': it must be one of rda, mean"),
        (
            RULE.format("pass") + "    def __init__(self, x): pass",
            "{}:Wrong",
            "TypeError: .*a class without arguments",
        ),
    ],
)
def test_what_is_no_rule_is_refused_at_the_start_with_the_cure(written, text, name, told):
    merge = name if text is None else name.format(written(text))
    with pytest.raises(ConfigError, match=told) as refused:
        settled({"run_id": "demo", "merge": merge}, None)
    assert (refused.value.field, refused.value.value) == ("merge", merge)


def test_a_text_that_names_neither_kernel_nor_class_is_refused():
    with pytest.raises(ConfigError, match=r"must be one of rda, mean, or package\.module:Class"):
        config(merge="median")


def test_a_run_has_the_digest_of_its_rule_and_another_file_is_refused_unless_it_is_named():
    named = settled({"run_id": "demo", "merge": MEDIAN}, None).merge
    kernel, path, digest = own_rule(named)
    assert (kernel, path, len(digest)) == ("rda", MEDIAN, 16)
    made = Desk(merge=MEDIAN)
    made.join("a")
    record = made.disk.record
    assert record["settings"]["merge"] == named
    for given in ({}, {"merge": MEDIAN}, {"merge": named}):
        assert settled({"run_id": "demo", **given}, record).merge == named
    older = json.loads(json.dumps(record))
    older["settings"]["merge"] = f"rda+{MEDIAN}#{'0' * 16}"
    for given in ({}, {"merge": MEDIAN}):  # a standby has the record of the one that leads
        with pytest.raises(ConfigError, match=f"has digest {digest}: put that file back; .* --merge {MEDIAN}#{digest}"):
            settled({"run_id": "demo", **given}, older)
    going_on = settled({"run_id": "demo", "merge": f"{MEDIAN}#{digest}"}, older)
    assert [each.field for each in changes(going_on, older)] == ["merge"]
    older["settings"]["merge"] = "rda"
    with pytest.raises(ConfigError, match="the run has rda, from its beginning to its end"):
        settled({"run_id": "demo", "merge": MEDIAN}, older)


def test_a_replay_with_another_file_is_refused():
    line = json.loads(json.dumps(start_line(config(merge=f"rda+{MEDIAN}#{'0' * 16}"), 0.0, None, {}), default=str))
    with pytest.raises(ConfigError, match=rf"{'0' * 16}': the file .*geometric_median\.py here has digest"):
        Aggregator(**read_start(line))


def test_an_island_may_ask_for_the_rule_that_the_run_has_and_cannot_bring_one():
    named = settled({"run_id": "demo", "merge": MEDIAN}, None).merge
    made = Desk(merge=MEDIAN)
    for demand in (MEDIAN, named):
        assert of(made.join("a", demands=demands_of({"merge": demand})), Manifested) or made.incarnations["a"] == 2
    (refused,) = sent(made.join("b", demands=demands_of({"merge": f"{MEDIAN}#{'0' * 16}"})), Refused)
    assert refused.reason == Reason.RECIPE
    (refused,) = sent(Desk().join("a", demands=demands_of({"merge": "os:path"})), Refused)
    assert "is the aggregator's to import: start it with --merge" in refused.detail


@pytest.mark.parametrize("merges", [(MEDIAN, None), (None, MEDIAN)])
def test_shards_of_one_run_have_the_same_rule(merges):
    first, second = (Desk(shards=2, shard=i, fragments=2, merge=merge) for i, merge in enumerate(merges))
    first.join("a")
    roster = sent(first.log, Roster)[-1]
    with pytest.raises(ConfigError, match="start every shard with the same --merge"):
        second.say(AGGREGATOR, roster)


# --- the example, and the merge -----------------------------------------------------------------------------------


def vectors(k, seed=0):
    return np.random.default_rng(seed).standard_normal((k, 64)).astype(np.float32)


def median_weights(points, shares):
    products = points.astype(np.float64) @ points.T
    offered = tuple(
        Offered(island_id=str(i), tokens=1, steps=1, staleness=0.0, share=share, length=products[i, i] ** 0.5)
        for i, share in enumerate(shares)
    )
    asked = MergeRound(
        shard=0, fragment_id=0, fragment_version=1, contributions=offered, products=tuple(map(tuple, products))
    )
    factors, state = GeometricMedian().factors(asked, None)
    assert state is None
    return np.array(factors) * shares


@pytest.mark.parametrize("k", [1, 2, 3, 5, 9])
def test_the_example_finds_the_point_of_the_least_sum_of_distances(k):
    points, shares = vectors(k), np.full(k, 1 / k)
    points[0] += 3
    weights = median_weights(points, shares)
    assert weights.sum() == pytest.approx(1)

    def distances(point):
        return float(shares @ np.linalg.norm(points - point, axis=1))

    found, rng = weights @ points, np.random.default_rng(1)
    others = [found + rng.standard_normal(64) * size for size in (0.01, 0.1, 1.0) for _ in range(50)]
    assert all(distances(found) <= distances(other) + 1e-6 for other in [*others, points.mean(axis=0)])


def test_the_example_gives_a_far_one_no_more_than_a_near_one_and_nothing_to_who_has_no_share():
    points = np.ones((5, 64), np.float32) + 0.1 * vectors(5)
    points[4] *= -100
    weights = median_weights(points, np.array([0.25, 0.25, 0.25, 0.0, 0.25]))
    assert weights[4] < 0.01 * weights[0]
    assert weights[3] == 0
    assert median_weights(0 * points, np.full(5, 0.2)).tolist() == [0.2] * 5


def test_a_merge_asks_by_its_own_cosines_and_reports_these():
    tensors = (TensorSpec(name="w", shape=(64,), dtype="float32", kind=Kind.MEAN, unit_axes=0),)
    points = vectors(4)
    made = desk(merge=MEDIAN, fragments=1)
    made.cosines = halves
    made.computes = False
    play_round(made, 0)
    (merge,) = made.computing
    steps = StepRange(from_step=0, to_step=4, from_tokens=0, to_tokens=40)
    parts = tuple(
        type(part)(
            island_id=part.island_id,
            steps=steps,
            payload=(encode_tensor(point, Codec.F32),),
            token_weight=part.token_weight,
            staleness_weight=part.staleness_weight,
        )
        for part, point in zip(merge.parts, points, strict=True)
    )
    order = Merge(
        round_id=1,
        fragment_id=0,
        fragment_version=1,
        parts=parts,
        outer_rule=(1.0, 0.0),
        factors=merge.factors,
        compares=merge.compares,
    )
    before = FragmentState(np.zeros(64, np.float32), np.zeros(64, np.float32), 0)
    version, merged = versions.merge(tensors, order, before)
    cosines = merge_fragment(tensors, parts).cosines
    assert compare(tensors, parts) == pytest.approx(cosines, abs=1e-6)
    assert version.cosines == pytest.approx(cosines, abs=1e-6)
    decided = order.final_parts(version.cosines)
    assert merged.delta == pytest.approx(merge_fragment(tensors, decided).delta)
    made.feed(Computed(fragment_id=0, fragment_version=1, digest="x", cosines=version.cosines))
    assert [m.staleness_weight for m in made.contributions()] == [part.staleness_weight for part in decided]
