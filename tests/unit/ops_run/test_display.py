"""The live display: what is computed from a status, as lines and as a table."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from broker.routing.liveness import Liveness
from ops.run.display import RATE_WINDOW_S, Display, Rate, line, progress_of, table
from ops.story.run_status import FragmentStatus, IslandStatus, ShardStatus, Status, is_current


def island(state=Liveness.ALIVE, **changes):
    usual = {
        "state": state,
        "incarnation": 1,
        "inner_step": 10,
        "tokens": 5120,
        "loss": 2.0,
        "step_time_s": 0.1,
        "last_seen_s": 0.2,
        "sync_share": 0.004,
        "bytes_up": 1000,
        "bytes_down": 2000,
        "refusals": {},
    }
    return IslandStatus(**usual | changes)


def status(islands, totals=None, fragments=None):
    return Status(
        run_id="demo",
        islands=islands,
        fragments=fragments or {},
        totals=totals or {},
        broker_age_s=0.1,
        broker_is_silent=False,
    )


RUNNING = status(
    {"a": island(), "b": island(Liveness.DEAD, loss=3.0), "c": island(Liveness.LEFT)},
    totals={"phase": "running", "trained_tokens": 40_000, "merged_tokens": 30_000, "target_tokens": 100_000},
    fragments={p: FragmentStatus(version=3 + p, age_s=1.0, contributors=("a",), merged_tokens=1) for p in range(2)},
)


def test_progress_counts_islands_versions_tokens_and_the_time_left_and_its_line_says_all_of_it():
    progress = progress_of(RUNNING, rate=2000.0)
    assert (progress.alive, progress.known) == (1, 2)
    assert progress.versions == (3, 4)
    assert progress.fraction == 0.4
    assert progress.remaining_s == 30.0
    assert progress.loss == 2.5
    assert line(progress) == (
        "running  40%  1 of 2 islands  versions 3-4  merged 30,000  tokens/s 2,000  loss 2.500  left 30.0 s"
    )


@pytest.mark.parametrize(
    ("islands", "says"),
    [({"a": island()}, True), ({"a": island(Liveness.LEFT)}, False), ({}, False)],
    ids=["one is there", "it has left", "none is known"],
)
def test_what_an_ended_run_still_waits_for_is_said(islands, says):
    totals = {"phase": "ended", "trained_tokens": 10, "merged_tokens": 10, "target_tokens": 10}
    said = line(progress_of(status(islands, totals=totals), rate=None))
    assert said.endswith("islands fetch the last versions") == says
    assert "no island yet" not in said


def test_before_anything_is_known_nothing_is_made_up():
    progress = progress_of(status({}), rate=None)
    assert (progress.phase, progress.versions, progress.loss, progress.remaining_s) == ("starting", None, None, None)
    assert line(progress) == "starting   0%  no island yet  merged 0"


def counted(tokens, epoch=1):
    return status({}, totals={"trained_tokens": tokens, "epoch": epoch})


def test_the_rate_is_that_of_the_last_seconds_and_begins_anew_where_a_count_went_back():
    rate = Rate()
    assert rate.update(0.0, counted(0)) is None
    assert rate.update(10.0, counted(1000)) == 100.0
    assert rate.update(10.0 + RATE_WINDOW_S, counted(1000)) == pytest.approx(0.0)
    assert rate.update(11.0 + RATE_WINDOW_S, counted(500)) is None
    assert rate.update(12.0 + RATE_WINDOW_S, counted(600)) == 100.0


def test_what_another_aggregator_has_counted_is_no_rate():
    rate = Rate()
    rate.update(0.0, counted(52_000))
    assert rate.update(1.0, counted(75_000, epoch=2)) is None
    assert rate.update(2.0, counted(76_000, epoch=2)) == 1000.0


def test_totals_of_an_earlier_life_of_the_run_are_not_those_of_now():
    def found(age_s, epoch, counted_under):
        shard = ShardStatus(leader="a", epoch=epoch, age_s=age_s, in_sync=(), standbys=(), ended=False)
        return replace(counted(52_000, counted_under), shards={0: shard})

    assert is_current(found(0.3, 2, 2), since_s=5.0)
    assert not is_current(found(60.0, 1, 1), since_s=5.0)  # from a file: nobody leads yet
    assert not is_current(found(0.3, 2, 1), since_s=5.0)  # its leader has not counted yet
    assert not is_current(counted(52_000), since_s=5.0)


def shown(seconds, rate=lambda second: None):
    """What a display without a terminal says in so many seconds, one status in each."""
    stream = io.StringIO()
    with Display(stream, every_s=5.0) as display:
        for second in range(seconds):
            display.show(RUNNING, progress_of(RUNNING, rate(second)), float(second))
        display.note("island [a] died")
    return stream.getvalue().splitlines()


def test_without_a_terminal_lines_come_every_few_seconds_and_those_that_say_nothing_new_once_a_minute():
    lines = shown(11, rate=lambda second: 1000.0 + second)
    assert len(lines) == 3 + 1
    assert lines[-1] == "atoll: island [a] died"
    assert len(shown(120)) == 2 + 1


def of_table(*what):
    console = Console(file=io.StringIO(), width=120)
    console.print(table(*what))
    return console.file.getvalue()


def test_a_run_without_a_target_has_no_percentage():
    endless = status({"a": island()}, totals={"phase": "running", "target_tokens": 0})
    progress = progress_of(endless, None)
    assert line(progress).startswith("running  1 of 1 islands  ")
    assert "%" not in of_table(endless, progress).splitlines()[0]


def test_the_table_has_a_row_for_each_island():
    text = of_table(RUNNING, progress_of(RUNNING, 2000.0))
    assert [text.count(f"\n{name} ") for name in "abc"] == [1, 1, 1]
    assert "0.100 s" in text
    assert "tokens/s 2,000" in text
