"""How many aggregators share a model, where that is left to ``plan``."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.routing.directory import MAX_SHARDS
from ops import cli
from ops.forecast.footprint import shards_for

GB = 10**9


@pytest.mark.parametrize(
    ("parameters", "fragments", "host_bytes", "shards"),
    [
        (10**6, 8, None, 1),
        (10**9, 8, None, 1),
        (5 * 10**9, 8, None, 5),
        (5 * 10**9, 24, 512 * GB, 5),
        (5 * 10**9, 24, 20 * GB, 10),
        (5 * 10**9, 4, None, 4),
        (5 * 10**9, 24, 2 * GB, 24),
    ],
)
def test_aggregators_apart_are_as_many_as_merge_and_hold_the_model(parameters, fragments, host_bytes, shards):
    assert shards_for(parameters, fragments=fragments, host_bytes=host_bytes) == shards


@given(st.integers(1, 10**13), st.integers(1, 1000), st.integers(0, 10**13))
def test_each_aggregator_has_a_fragment_and_there_is_one(parameters, fragments, memory_bytes):
    apart = shards_for(parameters, fragments=fragments, host_bytes=memory_bytes)
    assert 1 <= apart <= min(fragments, MAX_SHARDS)


def test_plan_takes_the_rule(capsys):
    asked = ["plan", "--params", "5B", "--sites", "8", "--step-time", "1", "--shards", "auto", "--json"]
    assert cli.main(asked) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["shards"] == 5


def test_a_word_that_is_neither_names_the_one_there_is(capsys):
    assert cli.main(["plan", "--params", "5B", "--sites", "8", "--shards", "autp"]) == 2
    assert "shards = 'autp': must be a whole number, or auto: by the model" in capsys.readouterr().err
