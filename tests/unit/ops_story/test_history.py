"""The history that the page of a run shows: from lines of a tape, bounded, with what is silent or refused."""

import asyncio
import json
import os
import re

import pytest

from aggregator.interface.leader_notes import StandbyCame, StandbyLost
from broker.routing.liveness import Liveness
from ops.dashboard.plot import FILE, MAX_CONTRIBUTIONS, Contributors, WholeRun, report_page, write_report
from ops.inspect import tapes
from ops.inspect.source import FollowedEvents
from ops.inspect.tapes import CHUNK_BYTES, FollowedTape, FollowedTapes
from ops.run_directory import claim
from ops.story.history import MAX_POINTS, History
from ops.story.rounds import MAX_ROUNDS
from tests.noted import line as note
from tests.noted import noted

CONFIG = {"heartbeat_interval_s": 0.5, "suspect_after_s": 2.0, "dead_after_s": 6.0, "total_tokens": 1000}


def start(now_s, **more):
    return {"tape": 11, "now_s": now_s, "epoch": 1, "config": CONFIG, "record": None, "commits": [], **more}


def beat(now_s, island, step, *, loss=None):
    body = {"inner_step": step, "tokens": 10 * step, "loss": loss, "step_time_s": 0.1, "optimizer": "fresh"}
    return {"now_s": now_s, "event": "received", "sender": island, "kind": "heartbeat", "body": body}


def committed(now_s, number, fragment, version, islands):
    contributions = [{"island": name, "staleness": 0.5} for name in islands]
    fields = {"round": number, "fragment": fragment, "version": version, "islands": len(islands), "live": 2}
    return note(now_s, "version.committed", contributions=contributions, **fields)


def joined(now_s, island="a", incarnation=1):
    return note(now_s, "island.joined", island=island, incarnation=incarnation)


def history_of(*lines):
    history = History()
    for line in lines:
        history.take(line)
    return history


def texts(history):
    return [mark["text"] for mark in history.frame()["marks"]]


def test_a_round_is_followed_from_its_opening_to_its_version():
    history = history_of(start(100.0), joined(101.0), note(102.0, "round.opened", round=7, fragment=3))
    frame = history.frame()
    assert frame["rounds"] == [[7, 3, 2.0, None, None, None, 0, 0, 0]]
    history.take(note(103.0, "round.closed", round=7, fragment=3, reason="complete"))
    history.take(committed(103.5, 7, 3, 41, ["a"]))
    later = history.frame(frame["changes"])
    assert later["rounds"] == [[7, 3, 2.0, 3.0, 3.5, 41, 1, 2, 0]]
    assert (later["islands"]["a"]["versions_in"], later["islands"]["a"]["staleness"]) == (1, 0.5)
    assert not history.frame(later["changes"])["rounds"]


def test_of_a_version_alone_the_round_is_told_backwards():
    """So it is with Redis, which has no rounds and no contributions."""
    history = History()
    history.at(1_700_000_000.0)
    history.at(1_700_000_010.0)
    fields = {"round": 7, "fragment": 3, "version": 41, "islands": 2, "live": 2, "took_s": 1.5}
    history.note(noted("version.committed", **fields))
    assert history.frame()["rounds"] == [[7, 3, 8.5, 10.0, 10.0, 41, 2, 2, 0]]


def test_a_round_that_is_cancelled_or_left_open_by_a_life_leads_to_nothing():
    opened = [note(1.0, "round.opened", round=n, fragment=0) for n in (1, 2)]
    history = history_of(start(0.0), *opened, note(2.0, "round.cancelled", round=1, fragment=0), start(3.0))
    assert [row[-1] for row in history.frame()["rounds"]] == [1, 1]


def test_an_island_that_falls_silent_is_marked_and_so_is_its_return():
    history = history_of(start(0.0), joined(0.0), beat(1.0, "a", 5))
    for line, state in (
        ({"now_s": 2.0, "event": "tick"}, Liveness.ALIVE),
        ({"now_s": 3.5, "event": "tick"}, Liveness.SUSPECT),
        ({"now_s": 8.0, "event": "tick"}, Liveness.DEAD),
        (beat(9.0, "a", 6), Liveness.ALIVE),
    ):
        history.take(line)
        assert history.islands["a"].state is state
    assert texts(history) == [
        "a joined",
        "a is silent for 2.5 s",
        "a is silent for 7.0 s: rounds go on without it",
        "a is heard again after 8.0 s",
    ]


def test_only_a_silence_on_the_tape_is_marked_and_not_that_redis_is_read_late():
    history = history_of(start(0.0), joined(0.0), beat(1.0, "a", 5), {"now_s": 1.6, "event": "tick"})
    history.seen("a", Liveness.SUSPECT)
    assert history.islands["a"].state is Liveness.SUSPECT
    history.take(beat(1.7, "a", 6))
    assert texts(history) == ["a joined"]
    history.seen("a", Liveness.SUSPECT)
    history.take({"now_s": 3.9, "event": "tick"})
    history.take(beat(4.0, "a", 7))
    assert texts(history)[1:] == ["a is silent for 2.2 s", "a is heard again after 2.3 s"]
    assert [mark["event"] for mark in history.frame()["marks"]] == ["island.joined", "silent", "heard"]


def test_notes_are_told_in_sentences():
    flushing = {"reason": "its tokens are trained", "trained_tokens": 600064, "target": 600000}
    history = history_of(start(0.0), note(1.0, "run.flushing", **flushing))
    assert texts(history) == ["training ends, its tokens are trained: 600,064 tokens, the target was 600,000"]


def test_the_curve_of_each_island_comes_in_parts_that_fit_the_curve_of_the_fleet():
    history, points = history_of(start(0.0), joined(0.0, "b"), joined(0.0, "a")), {}
    changes = 0
    for second in range(3 * MAX_POINTS):
        history.take(beat(float(second), "b", second, loss=second / 7))
        if second > 5:
            history.take(beat(second + 0.5, "a", second, loss=1.0))
        if second % 100 == 99:
            frame = history.frame(changes)
            changes = frame["changes"]
            assert len(frame["each"]) <= 101
            points |= dict(frame["each"])
    assert frame["names"] == ["b", "a"]
    assert set(frame["curve"][0]) <= set(points), "a page drops what the server has dropped"
    assert points[0.0] == [[0.0, 0, None], [None, 0, None]]
    assert points[frame["curve"][0][-1]][0][0] == pytest.approx(frame["curve"][0][-1] / 7, abs=1e-4)
    assert dict(history.frame()["each"]).keys() == set(frame["curve"][0])


def test_a_refusal_is_counted_and_its_reason_is_shown():
    refused = note(1.0, "contribution.refused", island="a", fragment=2, reason="not_finite", detail="3 NaN in w")
    frame = history_of(start(0.0), joined(0.5), refused).frame()
    island = frame["islands"]["a"]
    assert (island["refusals"], island["last_refusal"]) == ({"not_finite": 1}, "not_finite: 3 NaN in w")
    assert frame["marks"][-1]["kind"] == "refusal"


def test_a_new_life_of_an_island_is_counted():
    assert history_of(start(0.0), joined(1.0), joined(2.0, incarnation=2)).islands["a"].lives == 2


def test_shards_count_their_rounds_by_themselves_and_an_island_that_came_to_all_is_said_once():
    of_two = [start(0.0, config=CONFIG | {"shards": 2, "shard": shard}) for shard in (0, 1)]
    opened = [note(2.0, "round.opened", round=1, fragment=fragment) for fragment in (0, 1)]
    history = history_of(*of_two, *[joined(1.0)] * 2, *opened, start(2.5, config=CONFIG | {"shards": 2, "shard": 1}))
    frame = history.frame()
    assert [(row[0], row[1], row[-1]) for row in frame["rounds"]] == [(1, 0, 0), (1, 1, 1)]
    assert texts(history) == ["a joined"]
    assert frame["islands"]["a"]["lives"] == 1


def test_an_island_that_redis_knew_before_the_tape_told_of_it_is_said_to_join():
    history = history_of(start(0.0))
    history.seen("a", Liveness.ALIVE)
    history.take(joined(1.0))
    history.seen("a", Liveness.LEFT)
    history.take(note(2.0, "island.left", island="a", reason="stopped"))
    assert texts(history) == ["a joined", "a left: stopped"]


def test_of_a_run_that_is_stopped_nobody_is_alive_and_why_is_a_mark():
    ended = note(2.0, "aggregator.finished", reason="stopped by the operator", phase="running")
    history = history_of(start(0.0), joined(1.0), ended)
    frame = history.frame(stopped=True)
    assert (frame["phase"], frame["islands"]["a"]["state"]) == ("stopped", "stopped")
    assert frame["marks"][-1]["text"] == "an aggregator ended: stopped by the operator"
    assert history.frame()["islands"]["a"]["state"] == "alive"
    history.take(note(3.0, "run.ended"))
    assert history.frame(stopped=True)["phase"] == "ended"


def test_a_page_says_that_a_run_is_stopped_once_nobody_holds_its_directory(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text('[run]\nrun_id = "demo"\n')
    (tmp_path / "redis-url").write_text("redis://127.0.0.1:1 demo\n")
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (start(0.0), joined(1.0))))

    def phase():
        return data_of(write_report(WholeRun(tmp_path), tmp_path / FILE))["phase"]

    held = claim(tmp_path)
    assert phase() == "starting"
    os.close(held)
    assert phase() == "stopped"
    with (tmp_path / "events.jsonl").open("a") as tape:
        tape.writelines(json.dumps({"now_s": 2.0 + n, "event": "tick"}) + "\n" for n in range(5))
    monkeypatch.setattr(tapes, "CHUNK_BYTES", 60)
    assert phase() == "stopped", "also of a tape that is read in several parts"


def test_what_became_of_a_process_is_a_mark():
    line = {"now_s": 3.0, "process": "island-1", "text": "island-1 was ended by signal 9; restarting it"}
    (mark,) = history_of(start(1.0), line).frame()["marks"]
    assert (mark["at_s"], mark["kind"], mark["island"], mark["text"]) == (2.0, "fault", "island-1", line["text"])


def test_time_goes_on_over_another_boot_and_a_long_sleep():
    history = history_of(start(5000.0), beat(5001.0, "a", 1), start(12.0), beat(13.0, "a", 2), start(90_000.0))
    assert history.now_s == 2.0


def test_a_long_run_has_a_coarser_curve_and_forgets_its_oldest_rounds():
    history = history_of(start(0.0))
    for second in range(5 * MAX_POINTS):
        history.take(beat(float(second), "a", second, loss=float(second)))
        history.take(note(float(second), "round.opened", round=second, fragment=0))
    times, losses, tokens, living, agreements = history.frame()["curve"]
    assert MAX_POINTS / 2 <= len(times) <= MAX_POINTS
    assert times[0] < 20 < 5 * MAX_POINTS - 20 < times[-1]
    assert losses == times
    assert tokens == [10 * time for time in times]
    assert set(living) == {1}
    assert set(agreements) == {None}
    assert len(history.frame()["rounds"]) == min(MAX_ROUNDS, 5 * MAX_POINTS)


def test_agreement_is_in_the_curve_and_in_each_island_and_a_fall_is_marked():
    history = history_of(start(0.0))
    for n in range(3):
        row = {"island": "a", "staleness": 0.0, "agreement": 0.1 * n, "trust": 1.0 - 0.25 * n}
        fields = {"fragment": 0, "version": n + 1, "round": n, "islands": 1, "live": 1, "agreement": 0.3 + 0.1 * n}
        history.take(note(2.0 * n, "version.committed", **fields, contributions=[row]))
        history.take(beat(2.0 * n, "a", n))
    history.take(note(7.0, "fleet.diverging", agreement=0.1, usual=0.3))
    frame = history.frame()
    assert frame["curve"][4] == pytest.approx([0.3, 0.35, 0.4])
    assert (frame["islands"]["a"]["agreement"], frame["islands"]["a"]["trust"]) == (pytest.approx(0.2), 0.5)
    assert frame["marks"][-1]["text"] == "islands agree by 0.1, usual is 0.3: training begins to diverge"


def test_what_is_not_finite_is_no_number_for_a_page():
    frame = history_of(start(0.0), beat(1.0, "a", 1, loss=float("nan"))).frame()
    assert json.loads(json.dumps(frame, allow_nan=False))["islands"]["a"]["loss"] is None


def test_a_tape_is_read_while_it_grows_and_each_line_once(tmp_path):
    path = tmp_path / "events.jsonl"
    tape = FollowedTape(path)
    assert list(tape.lines()) == []
    path.write_text('{"now_s": 1}\n{"now_s": 2')
    assert [line["now_s"] for line in tape.lines()] == [1]
    with path.open("a") as file:
        file.write('}\nnot json\n{"now_s": 3}\n')
    assert tape.behind
    assert [line["now_s"] for line in tape.lines()] == [2, 3]
    assert not tape.behind


def test_tapes_side_by_side_are_read_in_the_order_of_their_times(tmp_path):
    long, short = tmp_path / "long", tmp_path / "short"
    padding, count = "x" * 10_000, CHUNK_BYTES // 10_000 + 200
    long.write_text("".join(f'{{"now_s": {n}, "x": "{padding}"}}\n' for n in range(count)))
    short.write_text("".join(f'{{"now_s": {n + 0.5}}}\n' for n in range(count)))
    followed = FollowedTapes()
    first = [line["now_s"] for line in followed.lines([long, short])]
    assert followed.behind
    later = [line["now_s"] for line in followed.lines([long, short])]
    assert not followed.behind
    assert first + later == sorted(first + later)
    assert len(first + later) == 2 * count


def test_a_clock_that_starts_anew_is_behind_the_one_before_it(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text('{"now_s": 900}\n{"now_s": 5}\n')
    second.write_text('{"now_s": 901}\n{"now_s": 6}\n')
    assert [line["now_s"] for line in FollowedTapes().lines([first, second])] == [900, 901, 5, 6]


def test_a_report_has_all_in_one_file_and_no_text_ends_its_scripts():
    html = '<link rel="stylesheet" href="page/a.css"><script src="page/b.js"></script>'
    parts = {"index.html": html, "a.css": "p { }", "b.js": "run('</script>')"}
    page = report_page(parts, {"run": "</script><b>"})
    assert "page/" not in page
    assert page.count("</script>") == 2
    assert '"run":"<\\/script><b>"' in page


def data_of(report):
    return json.loads(re.search(r'id="data">(.*?)</script>', report.read_text(encoding="utf-8"), re.DOTALL).group(1))


def test_a_report_knows_who_is_in_a_version_and_what_was_evaluated(tmp_path):
    row = {"island": "a", "incarnation": 1, "steps": [0, 8], "tokens": 80, "staleness": 0.5, "merge_weight": 1.0}
    row |= {"token_weight": 80.0}
    facts = {"round": 7, "fragment": 3, "version": 41, "islands": 1, "live": 2, "reason": "complete", "missing": ["b"]}
    version = note(2.0, "version.committed", **facts, digest="d1", contributions=[row | {"fresh": True}])
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (start(0.0), version)))
    (tmp_path / "config.toml").write_text('[run]\nrun_id = "demo"\n')
    point = {"tokens": 5, "versions": [1], "model": "m", "at": 0.0, "seconds": 1.0, "metrics": {"loss": 2.5}}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(point) + "\n")
    data = data_of(write_report(WholeRun(tmp_path), tmp_path / FILE))
    contributions = [["a", 1, [0, 8], 80, 1.0, 0.5, None, None, True]]
    assert data["versions"] == {"3:41": ["complete", "d1", ["b"], contributions]}
    assert [(each["tokens"], each["metrics"]) for each in data["evaluations"]] == [(5, {"loss": 2.5})]


def test_a_report_of_a_long_run_names_those_in_its_newest_versions():
    contributors = Contributors()
    for version in range(5):
        row = {"island": "a", "incarnation": 1, "steps": [0, 8], "tokens": 80, "staleness": 0.5, "merge_weight": 1.0}
        row |= {"token_weight": 80.0, "fresh": True}
        facts = {"fragment": 0, "version": version, "round": version, "islands": 2, "live": 2}
        contributors.take(note(0.0, "version.committed", **facts, contributions=[row] * (MAX_CONTRIBUTIONS // 2)))
    assert list(contributors.versions) == ["0:3", "0:4"]


def test_events_of_redis_come_once_however_often_they_were_written():
    came, lost = ({"event": f"standby.{how}", "standby": "b"} for how in ("came", "lost"))
    numbered = [((1000, 0), came | {"n": 1}), ((1000, 1), came | {"n": 1})]

    class Reader:
        async def read_events_after(self, after, count):
            return [each for each in numbered if each[0] > after][:count]

    events, reader = FollowedEvents(), Reader()
    assert asyncio.run(events.read(reader, 1)) == ([(1.0, StandbyCame(standby="b"))], True)
    assert asyncio.run(events.read(reader, 1)) == ([], True)
    numbered += [((2500, 0), lost | {"n": 2, "times": 7}), ((2500, 1), {"event": "of.another.release", "n": 3})]
    assert asyncio.run(events.read(reader, 9)) == ([(2.5, StandbyLost(standby="b"))], True)
    assert asyncio.run(events.read(reader, 9)) == ([], False)
