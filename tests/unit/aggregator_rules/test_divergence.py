"""When the fleet's agreement counts as fallen: suddenly, not slowly, not in the beginning, not by chance."""

import json
import math
import random
from dataclasses import asdict

import pytest

from aggregator.rules.divergence import SHORT, TIMES, Course

FRAGMENTS = 8
FULL = TIMES * SHORT  # versions of the long mean


def changes(level, versions, *, noise=0.1, seed=0, fragments=FRAGMENTS):
    """The versions at which agreement fell or came back; ``level``: its mean at each version."""
    random_, course, found = random.Random(seed), Course(), []
    for version in range(versions):
        was = course.fallen
        course.learn(level(version) + random_.gauss(0, noise), fragments)
        found += [version] * (course.fallen != was)
    return found


@pytest.mark.parametrize("share", [0.3, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_a_sudden_fall_is_found_within_two_short_means_and_a_lasting_one_becomes_usual(share, seed):
    fell, *back = changes(lambda v: 0.3 if v < 1000 else 0.3 * share, 3000, seed=seed)
    assert 1000 < fell < 1000 + 2 * SHORT
    assert len(back) == 1
    assert FULL / 2 < back[0] - fell < 4 * FULL


def test_islands_that_point_against_each_other_never_become_usual():
    assert len(changes(lambda v: 0.3 if v < 1000 else -0.2, 4000)) == 1


def test_one_that_is_over_is_over_at_once():
    fell, back = changes(lambda v: 0.02 if 1000 <= v < 1030 else 0.3, 2000)
    assert fell < 1030 < back < 1030 + 2 * SHORT


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(lambda v: 0.15 + 0.4 * math.exp(-v / 20), id="the first rounds"),
        pytest.param(lambda v: 0.15 + 0.6 * math.exp(-v / 200), id="a long beginning"),
        pytest.param(lambda v: 0.05 + 0.25 * math.exp(-v / 1000), id="a slow fall"),
        pytest.param(lambda v: 0.3 if v < 1000 else 0.15, id="to a half"),
        pytest.param(lambda v: 0.3 if v < FULL / 4 else 0.05, id="before anything is usual"),
        pytest.param(lambda v: 0.05, id="low and noisy"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_what_healthy_runs_do_is_no_fall(level, seed):
    assert changes(level, 4000, seed=seed) == []


def test_a_round_of_many_fragments_that_agree_unlike_each_other_is_no_fall():
    unlike = [0.02] * 20 + [0.5] * 20
    assert changes(lambda v: unlike[v % 40], 4000, noise=0.01, fragments=40) == []


def test_the_newest_of_several_records_goes_on():
    course, old = Course(), {}
    assert (course.agreement, course.momentum_cosine) == (None, None)
    for version in range(FULL + 40):
        old = asdict(course)
        course.learn(0.3 if version < FULL else 0.0, FRAGMENTS)
        course.moved(0.5, FRAGMENTS)
    again = Course()
    again.restore([])
    assert again == Course()
    again.restore([old, json.loads(json.dumps(asdict(course)))])
    assert again == course
    assert again.fallen
    assert again.momentum_cosine == pytest.approx(0.5)
