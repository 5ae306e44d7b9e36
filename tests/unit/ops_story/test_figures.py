"""The figures that a tape comes to, and rows of them."""

import itertools
import math
import random

import pytest

from ops.story.figures import Figures
from ops.story.rows import row
from tests.noted import line as note

CONFIG = {"heartbeat_interval_s": 0.5, "suspect_after_s": 2.0, "dead_after_s": 5.0, "total_tokens": 1000}


def beat(now_s, sender, tokens, loss, step_time_s=0.1):
    body = {"inner_step": tokens // 10, "tokens": tokens, "loss": loss, "step_time_s": step_time_s}
    return {"now_s": now_s, "event": "received", "kind": "heartbeat", "sender": sender, "body": body}


def committed(now_s, version, islands, live, staleness_mean):
    contributions = [{"island": name, "staleness": staleness_mean} for name in ("a", "b")[:islands]]
    what = {"fragment": 0, "version": version, "round": version, "islands": islands, "live": live}
    return note(now_s, "version.committed", **what, staleness_mean=staleness_mean, contributions=contributions)


TAPE = [
    {"tape": 11, "now_s": 100.0, "epoch": 1, "config": CONFIG, "record": None, "commits": []},
    note(100.1, "island.joined", island="a", incarnation=1),
    note(100.1, "island.joined", island="b", incarnation=1),
    note(100.2, "run.seeded"),
    beat(100.5, "a", 10, 3.0),
    beat(100.6, "b", 20, 2.0),
    committed(101.0, 1, 2, 2, 0.5),
    committed(102.0, 2, 1, 2, 2.0),
    note(102.5, "contribution.refused", island="a", fragment=0, reason="stale", detail="too old"),
    beat(103.0, "a", 100, 2.0),
    beat(104.9, "b", 120, 1.0),
    beat(105.1, "a", 180, 1.5),
    beat(107.0, "b", 240, 1.0),
    note(108.0, "run.ended"),
    beat(109.0, "b", 260, 0.5),
]


def samples_of(lines, every_s=5.0):
    figures = Figures(every_s)
    return [sample for line in lines if (sample := figures.take(line)) is not None]


def test_a_tape_comes_to_samples_of_loss_speed_versions_staleness_participation_and_refusals():
    first, last = samples_of(TAPE)
    assert (first.run_s, first.tokens) == (pytest.approx(5.1), 300)
    assert first.values["fleet/loss"] == pytest.approx((1.5 + 1.0) / 2)
    assert first.values["fleet/tokens_per_s"] == pytest.approx(300 / 5.1)
    assert first.values["fleet/islands"] == 2
    assert first.values["fleet/model_version"] == 2
    assert first.values["fleet/staleness"] == pytest.approx((2 * 0.5 + 1 * 2.0) / 3)
    assert first.values["fleet/participation"] == pytest.approx(3 / 4)
    assert first.values["fleet/refusals"] == first.values["fleet/refusals/stale"] == 1
    assert first.values["islands/a/tokens_per_s"] == pytest.approx(180 / 5.1)
    assert first.values["islands/a/refusals"] == 1
    # The run's end makes the last one, and what comes behind it none.
    assert (last.run_s, last.tokens) == (pytest.approx(8.0), 420)
    assert last.values["fleet/tokens_per_s"] == pytest.approx(120 / 2.9)
    assert last.values["fleet/staleness"] is None  # no version since
    assert last.values["fleet/refusals"] == 1  # counted from the beginning


def test_how_far_islands_agree_is_a_mean_over_the_versions_of_a_sample():
    versions = [committed(102.1, n, 1, 2, 0.0) for n in (3, 4)]
    versions[0]["fields"] |= {"agreement": 0.3, "momentum_cosine": 0.5}
    versions[1]["fields"] |= {"agreement": 0.1}
    versions[1]["fields"]["contributions"][0] |= {"agreement": 0.2, "trust": 0.5}
    found = samples_of([*TAPE[:8], *versions, *TAPE[8:]])[0].values
    assert (found["fleet/agreement"], found["fleet/momentum_cosine"]) == (pytest.approx(0.2), 0.5)
    assert (found["islands/a/agreement"], found["islands/a/trust"]) == (0.2, 0.5)
    assert "fleet/agreement" not in samples_of(TAPE)[0].values


def test_an_island_that_falls_silent_has_a_gap_and_the_fleet_goes_on_without_it():
    silent = [beat(105.2 + t, "b", 130 + 10 * t, 1.0) for t in range(20)]
    last = samples_of([*TAPE[:-3], *silent])[-1]
    assert last.values["fleet/islands"] == 1
    assert last.values["fleet/loss"] == 1.0
    assert "islands/a/loss" not in last.values


def test_nothing_is_sampled_while_nothing_is_trained_and_steps_only_grow_and_are_the_same_whenever_they_are_read():
    rng = random.Random(7)
    tokens, lines = {"a": 0, "b": 0}, TAPE[:4]
    for k in range(400):
        name = rng.choice("ab")
        tokens[name] = max(0, tokens[name] + rng.choice((0, 10, 30, -20)))  # a restart gives some up
        lines = [*lines, beat(101 + k / 4, name, tokens[name], 1.0)]
    samples = samples_of(lines, every_s=1.0)
    assert len(samples) > 20
    assert all(a.tokens < b.tokens for a, b in itertools.pairwise(samples))
    assert samples_of(lines, every_s=1.0) == samples
    assert [each.tokens for each in samples_of(TAPE, every_s=0.1)] == [10, 30, 120, 220, 300, 420]


def test_a_row_has_finite_values_and_its_marker_last():
    values = {"fleet/tokens": 1, "fleet/loss": math.nan, "fleet/x": math.inf, "fleet/y": 2, "z": None}
    made = row("fleet", 7, 12.5, values)
    assert list(made.values.items()) == [("fleet/y", 2.0), ("fleet/tokens", 7.0)]
