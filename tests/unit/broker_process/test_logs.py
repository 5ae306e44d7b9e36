"""Logs: text that people can read and split again, or JSON that is always JSON."""

import io
import json
import logging
import sys

import pytest

from broker.process import logs


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("broker", "islands"):
        ours = logging.getLogger(name)
        ours.handlers[:], ours.propagate = [], True
        ours.setLevel(logging.NOTSET)


@pytest.fixture
def written(monkeypatch):
    """Has this process log to a stream, in a form that the environment names."""

    def to(form=None, stream=None):
        stream = stream or io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        (monkeypatch.setenv if form else monkeypatch.delenv)("ATOLL_LOG", *([form] if form else [False]))
        logs.configure("aggregator")
        return stream

    return to


def test_a_text_line_has_time_process_event_and_fields_and_is_one_line(written):
    stream = written("text")
    logs.get("core").info("round.committed", round=31, late=0.123456789, islands=("a", "b"), why="two words", none=None)
    clock, rest = stream.getvalue().split(" ", 1)
    assert len(clock) == len("12:03:04.512")
    assert rest == ('aggregator round.committed round=31 late=0.123457 islands=a,b why="two words" none=none\n')
    logs.get("core").info("odd", text="a\nb")
    assert stream.getvalue().count("\n") == 2


def test_a_json_line_has_fixed_keys_that_fields_cannot_replace(written):
    stream = written("json")
    logs.get("core").info("round.committed", event="mine", round=31, bad=float("nan"), path=logs, deep={"x": (1.5,)})
    line = json.loads(stream.getvalue(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert line["event"] == "round.committed"
    assert line["field_event"] == "mine"
    assert (line["process"], line["level"], line["logger"]) == ("aggregator", "info", "core")
    assert (line["round"], line["bad"], line["deep"]) == (31, "nan", {"x": [1.5]})
    assert line["time"].endswith("+00:00")


def test_no_terminal_means_json_unless_the_environment_says_text(written):
    stream = written()
    logs.get("core").info("started")
    assert json.loads(stream.getvalue())["event"] == "started"
    stream = written("text")
    logs.get("core").info("started")
    assert stream.getvalue().endswith("aggregator started\n")


@pytest.mark.parametrize("form", ["text", "json"])
def test_exceptions_come_with_their_traceback_and_nothing_comes_of_a_closed_stream(written, form):
    stream = written(form)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("core").exception("crashed")
    assert "ValueError: boom" in stream.getvalue()
    assert "crashed" in stream.getvalue()
    errors = io.StringIO()
    sys.stderr = errors  # the fixture puts it back
    stream.close()
    logs.get("core").info("late")
    assert errors.getvalue() == "", "no error of logging"


def test_a_full_disk_costs_lines_and_nothing_else(written):
    class Disk(io.StringIO):
        full = False

        def write(self, text):
            if self.full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    stream = written("text", Disk())
    log = logs.get("core")
    log.info("before")
    stream.full = True
    log.error("lost")
    stream.full = False
    log.info("after")
    lines = [line.split(" ", 2)[2] for line in stream.getvalue().splitlines()]
    assert lines == ["before", "after"]


def test_a_program_with_logging_of_its_own_sees_the_fields_in_the_message():
    stream = io.StringIO()
    logging.basicConfig(stream=stream, level=logging.INFO, format="%(levelname)s:%(name)s:%(message)s", force=True)
    logs.get("islands.loop").info("island.restored", optimizer="fresh", detail="no checkpoint yet")
    logs.get("islands.loop").warning("odd", text="a\nb", none=None)
    assert stream.getvalue().splitlines() == [
        'INFO:islands.loop:island.restored optimizer=fresh detail="no checkpoint yet"',
        'WARNING:islands.loop:odd text="a\\nb" none=none',
    ]
