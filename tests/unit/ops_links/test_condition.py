"""Conditions, region files and wirings: what they mean, that they survive being written, and what they refuse."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import ConfigError
from ops.link_proxy.placing import read
from ops.links import region, wiring
from ops.links.condition import FAULTLESS, KEYS, Direction, LinkCondition
from ops.links.link import PARTITION_BREAKS_AFTER_S, Link
from ops.links.wiring import Door, Wire, Wiring

EXAMPLES = Path(__file__).parents[3] / "examples" / "links"

directions = st.builds(
    Direction,
    delay_ms=st.floats(0, 1000),
    jitter_ms=st.floats(0, 1000),
    mbit=st.just(0.0) | st.floats(0.001, 1e5),
    corrupt_per_mb=st.floats(0, 1e5),
    stall=st.booleans(),
    partition=st.booleans(),
)
conditions = st.builds(
    LinkCondition, up=directions, down=directions, reset_every_s=st.just(0.0) | st.floats(0.01, 1000)
)


def test_a_key_alone_is_for_both_directions_and_one_with_a_way_for_that_one():
    made = LinkCondition.of(delay_ms=40, up_delay_ms=10, down_partition=True, up_mbit=100)
    assert made == LinkCondition(up=Direction(delay_ms=10, mbit=100), down=Direction(delay_ms=40, partition=True))
    assert made.up.bytes_per_s == 12_500_000
    assert (made.up.delay_s, made.up.blocked, made.down.blocked) == (0.010, False, True)


def test_a_change_keeps_what_it_does_not_name():
    before = LinkCondition.of(delay_ms=40, up_mbit=100, reset_every_s=60)
    after = before.changed({"partition": True})
    assert after == LinkCondition.of(delay_ms=40, up_mbit=100, reset_every_s=60, partition=True)
    assert after.partitioned
    assert after.changed({"partition": False}) == before


@given(conditions)
def test_a_condition_is_made_again_from_its_table(condition):
    table = condition.table()
    assert set(table) <= set(KEYS)
    assert LinkCondition.of(**table) == condition
    assert FAULTLESS.table() == {}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"delay": 3}, "delay = 3: is nothing that a link has; did you mean delay_ms?"),
        ({"delay_ms": -1}, "must be a number from 0"),
        ({"up_delay_ms": "40"}, "must be a number from 0"),
        ({"delay_ms": float("nan")}, "must be a number from 0"),
        ({"delay_ms": 10**400}, "must be a number from 0"),
        ({"delay_ms": 1e5}, "must be at most 60000, a minute"),
        ({"mbit": float("inf")}, "must be a number from 0"),
        ({"mbit": 1e-9}, "at least 0.001"),
        ({"corrupt_per_mb": 2e5}, "every tenth byte"),
        ({"partition": 1}, "must be true or false"),
        ({"reset_every_s": 1e-5}, "at least 0.01"),
        ({"delay_ms": True}, "must be a number"),
    ],
)
def test_a_condition_that_cannot_be_is_refused(keys, words):
    with pytest.raises(ConfigError, match=words):
        LinkCondition.of(**keys)


def link(usual=FAULTLESS):
    return Link(usual, random_source=random.Random(1), now_s=100.0)


def test_of_the_orders_in_force_the_last_one_counts_and_then_the_plan_again():
    planned, slow, cut = LinkCondition.of(delay_ms=1), LinkCondition.of(delay_ms=500), LinkCondition.of(partition=True)
    way = link(planned)

    def at(now_s):
        way.advance(now_s)
        return way.condition

    way.order(slow, for_s=10.0, now_s=100.0)
    way.order(cut, for_s=3.0, now_s=102.0)
    assert at(102.0) == cut
    assert way.lanes["up"].direction.partition
    assert way.next_s() == 105.0
    assert [at(105.0), at(110.0)] == [slow, planned]
    way.order(cut, for_s=3.0, now_s=110.0)
    way.order(slow, for_s=None, now_s=110.0)
    assert at(120.0) == slow
    way.clear()
    assert at(121.0) == planned


def test_resets_now_and_then_come_at_their_mean_rate():
    way, resets, now_s = link(LinkCondition.of(reset_every_s=2.0)), 0, 100.0
    while now_s < 4100.0:
        now_s = way.next_s()
        resets += way.advance(now_s)
    assert resets == pytest.approx(2000, rel=0.1)
    way.order(FAULTLESS, for_s=None, now_s=now_s)
    assert not way.advance(now_s)
    assert way.next_s() is None


def test_a_long_partition_breaks_connections_as_the_kernels_at_the_ends_would_and_a_stall_never_does():
    way = link()
    way.order(LinkCondition.of(up_partition=True), for_s=None, now_s=100.0)
    assert not way.advance(100.0)
    assert way.next_s() == 100.0 + PARTITION_BREAKS_AFTER_S
    assert way.advance(way.next_s())
    way.order(LinkCondition.of(stall=True), for_s=None, now_s=150.0)
    assert not way.advance(150.0)
    assert way.next_s() is None


CLIENTS = ("aggregator", "island-0", "island-1")


def conditions(text, clients=CLIENTS):
    return region.conditions(region.parse(text, source="region.toml"), clients)


def test_tables_apply_in_order_to_the_clients_that_they_mean():
    found = conditions('[link."island-*"]\ndelay_ms = 40\nup_mbit = 10\n[link."island-1"]\nup_mbit = 5\n')
    assert list(found) == ["island-0", "island-1"]
    assert found["island-0"] == LinkCondition.of(delay_ms=40, up_mbit=10)
    assert found["island-1"] == LinkCondition.of(delay_ms=40, up_mbit=5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no links"),
        ("x", "is not TOML"),
        ("[lnik]\n", r"lnik = .* is nothing that this file has: write \[link.NAME\]"),
        ("[link]\ndelay_ms = 3\n", r"link.delay_ms = 3: must stand in a table of a link"),
        ('[link."*"]\ndelay = 3\n', r'\[link."\*"\] delay = 3: is nothing that a link has; did you mean delay_ms\?'),
        ('[link."*"]\nmbit = "fast"\n', r'\[link."\*"\] mbit = .fast.: must be a number'),
        ('[link."iland-0"]\ndelay_ms = 3\n', "iland-0.* means no link of this run; did you mean island-0"),
    ],
)
def test_a_region_file_that_cannot_be_is_refused_with_the_cure(text, words):
    with pytest.raises(ConfigError, match=words):
        conditions(text)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_are_right_for_a_run_of_four_islands(path):
    assert region.conditions(read(path), ("aggregator", *(f"island-{i}" for i in range(4))))


def test_a_region_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\); give the path"):
        read(tmp_path / "none.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is no text in UTF-8"):
        read(tmp_path / "binary")


def test_a_wiring_is_read_as_it_was_written():
    wire = Wire(doors=(Door(listen=7, host="::1", port=8),), condition=LinkCondition.of(delay_ms=4))
    wired = Wiring(wires={"a": wire})
    assert wiring.load(wired.dump()) == wired
