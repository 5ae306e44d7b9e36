"""A tape in segments reads as one tape: whatever was closed, compressed, cut short or killed in between."""

import contextlib
import gzip
import json
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.store import rotation, segments
from aggregator.store.segments import TapeReader, closed_of, header_of, packed_name, plain_name, segments_of
from aggregator.store.tape import Tape, numbered_lines, read_lines
from ops.inspect.dropped import gone_of
from ops.inspect.tapes import FollowedTape
from tests.profiles import examples


def put(tape, numbers):
    """Writes lines of these numbers, flush by flush."""
    for n in numbers:
        tape.write({"now_s": n, "n": n})
        tape.flush()


def filled(path, lines, *, segment_bytes=200, keep=0, start=0):
    tape = Tape(path, segment_bytes, keep)
    put(tape, range(start, start + lines))
    tape.close()


def numbers_of(lines):
    """The numbers of the lines that :func:`put` has written, without the lines of the segments themselves."""
    return [line["n"] for line in lines if line is not None and "segment" not in line]


def spoil(path, number):
    """Cuts the end off a compressed segment."""
    packed = packed_name(path, number)
    packed.write_bytes(packed.read_bytes()[:-12])


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A busy machine may take longer for the thread, which has a low priority, than the end of a run waits for it."""
    monkeypatch.setattr(rotation, "LAST_WAIT_S", 60.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "events.jsonl"


def test_a_long_tape_is_closed_in_segments_whose_lines_have_the_numbers_that_zcat_gives_them(path):
    filled(path, 100)
    there = segments_of(path)
    files = list(there.values())
    assert list(there) == list(range(1, len(files) + 1))
    assert len(files) > 5
    assert {each.name[-9:] for each in files[:-1]} == {".jsonl.gz"}
    assert sorted(os.listdir(path.parent)) == sorted(each.name for each in files)
    assert numbers_of(read_lines(path)) == list(range(100))
    said = [each.read_bytes() for each in files]
    whole = b"".join([*map(gzip.decompress, said[:-1]), said[-1]]).split(b"\n")
    numbered = list(numbered_lines(path))
    assert [json.loads(whole[number - 1]) for number, _ in numbered] == [line for _, line in numbered]
    for number in (1, 2):
        packed_name(path, number).unlink()
    kept = list(numbered_lines(path))
    assert kept[0][1].pop("missing") == 2
    assert kept == numbered[-len(kept) :]


def test_only_the_newest_segments_are_kept_and_what_is_gone_is_said(path):
    filled(path, 100, keep=3)
    there = segments_of(path)
    assert len(there) == 4
    kept = numbers_of(read_lines(path))
    assert kept == list(range(kept[0], 100))
    gone = gone_of(path)
    assert gone.segments == tuple(range(1, min(there)))
    assert gone.by_rule
    assert gone.lines == next(number for number, _ in numbered_lines(path)) - 1
    said = f"segments 1 to {min(there) - 1} of the tape ({gone.lines:,} lines) are dropped by the rule tape_segments"
    assert said in gone.sentence()
    packed_name(path, min(there)).unlink()
    assert "no rule dropped them" in gone_of(path).sentence()


def test_what_names_a_tape_stays_when_its_first_line_was_dropped(path):
    filled(path, 100)
    begun = segments.first_digest(next(read_lines(path)))
    filled(path, 100, keep=2, start=100)
    assert gone_of(path) is not None
    assert segments.first_digest(next(read_lines(path))) == begun != ""


def test_a_tape_without_a_limit_stays_one_file_to_the_byte(path):
    filled(path, 100, segment_bytes=0)
    assert os.listdir(path.parent) == [path.name]
    assert path.read_text() == "".join(f'{{"now_s":{n},"n":{n}}}\n' for n in range(100))


def test_the_header_tells_of_the_life_that_goes_on_in_it_and_of_how_many_there_were(path):
    config = {"dead_after_s": 7.0, "padding": "x" * 300}
    for epoch in (1, 2):
        tape = Tape(path, 400)
        tape.write({"tape": 11, "now_s": 0.0, "epoch": epoch, "config": config, "record": None, "commits": []})
        tape.flush()
        for n in range(40):
            tape.write({"n": n, "text": '\n{"tape":'})
            tape.flush()
        tape.close()
    headers = [header_of(each) for each in segments_of(path).values()]
    assert headers[0] == segments.Header(segment=1)
    assert headers[1].life == {"tape": 11, "epoch": 1, "config": config}
    assert (headers[1].lives, headers[-1].lives) == (1, 2)
    assert headers[-1].life["epoch"] == 2


# --- failures -----------------------------------------------------------------------------------------------------


def refuse(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_segment_that_cannot_be_compressed_stays_and_is_reported_once_and_compressed_later(path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(rotation.Rotation, "_write_packed", refuse)
        filled(path, 60)
    assert [r.getMessage().split()[0] for r in caplog.records] == ["tape.segments_failing"]
    assert all(each.suffix == ".jsonl" for each in segments_of(path).values())
    assert numbers_of(read_lines(path)) == list(range(60))
    Tape(path, 200).close()
    assert {each.suffix for each in list(segments_of(path).values())[:-1]} == {".gz"}
    assert numbers_of(read_lines(path)) == list(range(60))


@pytest.mark.parametrize("call", ["rename", "open"])
def test_a_tape_that_cannot_be_closed_goes_on_in_its_file_and_costs_no_line(path, monkeypatch, caplog, call):
    tape = Tape(path, 200)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        put(tape, range(60))
    assert [r.getMessage().split()[0] for r in caplog.records] == ["tape.segments_failing"]
    assert list(closed_of(path)) == []
    caplog.set_level("INFO")
    put(tape, range(60, 120))
    tape.close()
    assert "tape.segments_back" in caplog.text
    assert numbers_of(read_lines(path)) == list(range(120))
    assert tape.dropped == 0


def test_one_segment_by_itself_is_read_with_the_numbers_that_its_lines_have(path):
    filled(path, 60)
    whole = list(numbered_lines(path))
    for number in (1, 3):
        alone = list(numbered_lines(packed_name(path, number)))
        assert alone[0][1].pop("missing", 0) == number - 1
        assert alone == [each for each in whole if alone[0][0] <= each[0] <= alone[-1][0]]


def test_a_compressed_segment_that_is_damaged_is_named(path):
    filled(path, 60)
    spoil(path, 2)
    with pytest.raises(OSError, match="damaged") as caught:
        list(read_lines(path))
    assert caught.value.filename == str(packed_name(path, 2))


def test_a_power_failure_that_took_the_file_and_damaged_the_one_before_stops_no_start(path, caplog):
    filled(path, 60)
    spoil(path, max(closed_of(path)))
    path.write_bytes(b"")
    filled(path, 10, start=60)
    assert "tape.segment_damaged" in caplog.text
    assert list(closed_of(path)) == list(range(1, header_of(path).segment))


def test_a_file_that_lost_its_header_gets_it_back_and_keeps_its_lines(path):
    filled(path, 60)
    whole = list(numbered_lines(path))
    path.write_bytes(path.read_bytes().partition(b"\n")[2])
    filled(path, 1, start=60)
    again = list(numbered_lines(path))
    assert [number for number, _ in again] == [number for number, _ in whole] + [whole[-1][0] + 1]
    assert numbers_of(line for _, line in again) == list(range(61))


def test_killed_between_the_two_renamings_a_tape_goes_on_in_the_segment_that_it_had(path):
    filled(path, 60)
    before, number = list(numbered_lines(path)), header_of(path).segment
    path.rename(plain_name(path, number))
    follower = TapeReader(path)
    while follower.read():
        pass
    assert follower.segment == number
    tape = Tape(path, 10_000)
    assert (header_of(path).segment, max(closed_of(path))) == (number, number - 1)
    put(tape, [60])
    assert [json.loads(text)["n"] for _, text in follower.read()] == [60]
    tape.close()
    assert list(numbered_lines(path))[:-1] == before


def test_the_segment_that_is_being_closed_is_not_compressed_yet_for_it_may_get_its_name_back(path):
    filled(path, 60)
    number = header_of(path).segment
    path.rename(plain_name(path, number))
    made = rotation.Rotation(path, 200, 0)
    made._header, made._untidy = segments.Header(segment=number), True
    made.tidy()
    assert plain_name(path, number).exists()


def test_a_tape_that_is_not_there_is_no_empty_tape(path):
    with pytest.raises(FileNotFoundError):
        list(read_lines(path))


# --- any sequence ---------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What a process does not come back from."""


class World:
    """A tape that is written, closed and killed, beside the numbers that must be on it, and who follows it."""

    def __init__(self, folder, keep=0):
        self.path, self.lines, self.keep = Path(folder) / "events.jsonl", [], keep
        self.tape = Tape(self.path, 120, keep)
        self.dashboard, self.chaos = FollowedTape(self.path), FollowedTape(self.path)
        self.seen, self.noted = [], []

    def more(self, count):
        """Further numbers, each as it is written."""
        for _ in range(count):
            self.lines.append(len(self.lines))
            yield self.lines[-1]

    def write(self, count):
        for n in self.more(count):
            self.tape.write({"now_s": n, "n": n})
        self.tape.flush()

    def look(self):
        while (new := list(self.dashboard.lines())) or self.dashboard.behind:
            self.seen += new
        self.noted += self.chaos.news()

    @contextlib.contextmanager
    def stopped(self):
        """The next life begins with what is on the disk then."""
        self.tape.close()
        yield
        self.tape = Tape(self.path, 120, self.keep)

    def restart(self):
        with self.stopped():
            pass

    def torn(self):
        """A crash cuts a line short that nobody has counted on."""
        with self.stopped(), self.path.open("ab") as file:
            file.write(b'{"now_s": 1, "n": 99')

    def killed_at(self, what, nth):
        """The process dies at the n-th call of a function; what it wrote whole stays."""
        calls, real = [], getattr(os, what)

        def dying(*args, **more):
            calls.append(args)
            if len(calls) >= nth:
                raise Killed
            return real(*args, **more)

        with self.stopped():
            tape = Tape(self.path, 120, self.keep)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, what, dying)
                with contextlib.suppress(Killed):
                    put(tape, self.more(8))
                with contextlib.suppress(Exception):
                    tape._rotation.close()

    def both(self):
        """It died between the writing of a compressed segment and the removal of the plain one."""
        with self.stopped():
            for number in list(closed_of(self.path))[-2:]:
                plain_name(self.path, number).write_bytes(gzip.decompress(packed_name(self.path, number).read_bytes()))
            assert numbers_of(read_lines(self.path)) == self.lines

    def half_packed(self):
        """It died while it compressed."""
        with self.stopped():
            for number in list(closed_of(self.path))[-1:]:
                packed = packed_name(self.path, number)
                plain_name(self.path, number).write_bytes(gzip.decompress(packed.read_bytes()))
                packed.with_name(packed.name + ".new").write_bytes(packed.read_bytes()[:20])
                packed.unlink()


STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 12)),
    st.tuples(st.sampled_from(["look", "restart", "torn", "both", "half_packed"])),
    st.tuples(st.just("killed_at"), st.sampled_from(["rename", "fsync"]), st.integers(1, 3)),
)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@examples(30)
@given(steps=st.lists(STEPS, max_size=14))
def test_whatever_happens_all_lines_are_there_once_and_in_order(steps):
    with tempfile.TemporaryDirectory() as folder:
        world = World(folder)
        for name, *args in steps:
            getattr(world, name)(*args)
        world.write(1)
        world.look()
        world.tape.close()
        numbered = list(numbered_lines(world.path))
        assert numbers_of(line for _, line in numbered) == world.lines
        assert all(a < b for (a, _), (b, _) in pairwise(numbered))
        assert numbers_of(world.seen) == numbers_of(world.noted) == world.lines
        times = [line["now_s"] for line in world.seen]
        assert times == sorted(times)
        found = [line["segment"] for _, line in numbered if line is not None and "segment" in line]
        assert found == list(range(2, len(found) + 2))
        closed = list(segments_of(world.path).values())[:-1]
        assert all(each.suffix == ".gz" for each in closed)


@examples(15)
@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=8), keep=st.integers(1, 4))
def test_with_a_rule_what_is_there_is_the_end_and_what_is_gone_is_counted(counts, keep):
    with tempfile.TemporaryDirectory() as folder:
        world = World(folder, keep)
        for count in counts:
            world.write(count)
            world.restart()
        world.tape.close()
        numbered = list(numbered_lines(world.path))
        kept = numbers_of(line for _, line in numbered)
        assert kept == world.lines[len(world.lines) - len(kept) :]
        assert len(segments_of(world.path)) <= keep + 1
        gone = gone_of(world.path)
        assert (0 if gone is None else gone.lines) == numbered[0][0] - 1


# --- while it is written --------------------------------------------------------------------------------------------


def test_a_reader_beside_a_writer_that_closes_and_compresses_all_the_time_sees_each_line_once(path):
    """Threads race for real: reading by a follower, and again and again from the beginning."""
    count, done = 1500, threading.Event()
    path.parent.mkdir()

    def write():
        tape = Tape(path, 2000, aside=ThreadPoolExecutor(1).submit)
        for n in range(count):
            tape.write({"now_s": n, "n": n})
            if n % 7 == 0:
                tape.flush()
        tape.close()
        done.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    follower, seen, longest = FollowedTape(path), [], 0
    while True:
        last = done.is_set()
        seen += numbers_of(follower.lines())
        with contextlib.suppress(FileNotFoundError):
            now = numbers_of(read_lines(path))
            assert now == list(range(len(now)))
            assert len(now) >= longest
            longest = len(now)
        if last and not follower.behind:
            break
    writer.join(20)
    assert seen == list(range(count))
    assert longest == count
    assert len(closed_of(path)) > 10


@pytest.mark.parametrize("look", range(7))
def test_a_tape_that_begins_while_a_reader_looks_for_it_is_read_from_its_first_segment(path, monkeypatch, look):
    looks = []

    def late(where):
        found = closed_of(where)
        looks.append(found)
        if len(looks) == look + 1:
            filled(path, 50)
        return found

    monkeypatch.setattr(segments, "closed_of", late)
    reader, seen = TapeReader(path), []
    for _ in range(40):
        seen += [json.loads(text) for _, text in reader.read()]
    assert numbers_of(seen) == list(range(50))
    assert reader.missed == 0


def test_what_is_written_between_the_end_of_a_file_and_its_closing_is_read(path, monkeypatch):
    tape, reader = Tape(path, 40), TapeReader(path)
    tape.write({"n": 1})
    tape.flush()
    assert [text for _, text in reader.read()] == [b'{"n":1}']

    def late(where):
        monkeypatch.setattr(segments, "segments_of", segments_of)
        tape.write({"n": 2, "text": "x" * 40})  # after the reader has met the end
        tape.flush()
        return segments_of(where)

    monkeypatch.setattr(segments, "segments_of", late)
    assert [json.loads(text)["n"] for _, text in reader.read()] == [2]
    tape.close()


def test_a_write_that_a_full_disk_took_back_does_not_put_a_follower_out_of_step(path, monkeypatch):
    tape, reader = Tape(path, 10_000), TapeReader(path)
    put(tape, [1])
    assert [text for _, text in reader.read()] == [b'{"now_s":1,"n":1}']
    write = os.write

    def half(fd, data):
        if len(data) > 4:
            written = write(fd, data[:4])
            assert reader.read() == []  # in this moment
            return written
        return refuse()

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        tape.write({"n": 2})
        tape.flush()
    tape.write({"n": 3})
    tape.close()
    assert [json.loads(text) for _, text in reader.read() if text] == [{"gap": 1}, {"n": 3}]
