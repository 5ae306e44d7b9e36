"""What aggregators of several shards have counted, put together as if it had been one."""

import pytest

from ops.story.shards import one_report, one_total


def report(trained, merged, *, parameters=1, phase="ended", versions=(), rounds=None, islands=None, **wasted):
    """What one shard writes; tokens of its fragments, which have so many parameters in all."""
    tokens = {"trained": trained, "merged": merged, "in_flight": trained - merged - sum(wasted.values())}
    return {
        "tokens": {},
        "books": {
            **{name: count * parameters for name, count in tokens.items()},
            "wasted": {reason: count * parameters for reason, count in wasted.items()},
            "scale": parameters,
        },
        "versions": dict(versions),
        "rounds": rounds or {"1": 2},
        "participation": 1.0,
        "staleness_mean": 0.0,
        "islands": islands or {"a": {"inner_steps": trained // 10, "tokens": trained, "bytes_up": 5}},
        "phase": phase,
        "refusals": {"stale": 1},
    }


def test_the_report_of_one_shard_stays_as_it_is():
    alone = report(100, 100)
    assert one_report([alone]) == alone


def test_tokens_are_weighted_by_the_parameters_of_each_shard():
    one = one_report([report(100, 100, parameters=3), report(100, 60, parameters=1, stale=40)])
    assert one["tokens"] == {"trained": 100, "merged": 90, "wasted": {"stale": 10}, "in_flight": 0}


def test_each_shard_has_the_versions_of_its_fragments_and_counts_add_up():
    first = report(100, 100, versions={"0": 7, "1": -1}, rounds={"1": 2, "2": 4})
    second = report(100, 100, versions={"0": -1, "1": 9}, rounds={"2": 2})
    one = one_report([first, second])
    assert one["versions"] == {"0": 7, "1": 9}
    assert one["rounds"] == {"1": 2, "2": 6}
    assert one["refusals"] == {"stale": 2}


@pytest.mark.parametrize("knows_more", [0, 1])
def test_what_one_shard_never_heard_of_an_island_that_died_is_lost_with_it(knows_more):
    reports = [report(100, 100), report(100, 100)]
    reports[knows_more] = report(120, 100, island_lost=20)
    one = one_report(reports)
    assert one["tokens"] == {"trained": 120, "merged": 100, "wasted": {"island_lost": 20}, "in_flight": 0}
    assert one["islands"] == {"a": {"inner_steps": 12, "tokens": 120, "bytes_up": 5}}


def test_while_a_run_goes_on_it_is_in_flight():
    one = one_report([report(120, 100, phase="running"), report(100, 90, phase="running")])
    assert one["tokens"] == {"trained": 120, "merged": 95, "wasted": {}, "in_flight": 25}


def test_of_each_island_the_shard_counts_that_knows_most():
    first = {"a": {"inner_steps": 10, "tokens": 100}, "b": {"inner_steps": 5, "tokens": 50}}
    second = {"a": {"inner_steps": 9, "tokens": 90}, "b": {"inner_steps": 8, "tokens": 80}}
    one = one_report([report(150, 150, islands=first), report(170, 160, islands=second, island_lost=10)])
    assert {name: each["tokens"] for name, each in one["islands"].items()} == {"a": 100, "b": 80}
    tokens = one["tokens"]
    assert tokens["trained"] == 180 == tokens["merged"] + sum(tokens["wasted"].values()) + tokens["in_flight"]


def test_an_island_that_only_shard_0_has_heard_of_is_in_the_report():
    second = report(0, 0, islands={"z": {"inner_steps": 0, "tokens": 0}}, phase="seeding")
    assert set(one_report([report(10, 0, phase="seeding"), second])["islands"]) == {"a"}


def test_totals_name_the_shard_whose_trouble_it_is_and_the_longest_interval_and_the_least_trust():
    counted = {"merged_tokens": 100, "in_flight_tokens": 0, "trained_tokens": 100, "wasted_tokens": {}}
    total = report(100, 100) | counted | {"model_version": 4, "quarantined": {}, "troubles": []}
    one = one_total([total, total | {"troubles": ["its disk is full"]}])
    assert one["troubles"] == ["shard 1: its disk is full"]
    assert (one["model_version"], one["trained_tokens"], one["interval"]) == (8, 100, {})
    rows = [{"a": {"trust": 0.2}}, {"a": {"trust": 0.1}, "b": {"trust": 0.5}}, {"a": {"trust": 0.3}}]
    shards = [total | {"trust": each, "agreement": 0.2 * n} for n, each in enumerate(rows)]
    one = one_total([*shards, total])
    assert (one["trust"], one["agreement"]) == ({"a": {"trust": 0.1}, "b": {"trust": 0.5}}, pytest.approx(0.2))
    assert one["momentum_cosine"] is None
    intervals = [{}, {"steps": 30, "because": "of this"}, {"steps": 60, "because": "of that"}]
    assert one_total([total | {"interval": each} for each in intervals])["interval"] == intervals[-1]
