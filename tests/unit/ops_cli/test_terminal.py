"""Tables for any width, and a screen whose reader may go away."""

import io
import os

import pytest
from rich.console import Console
from rich.text import Text

from ops.run.display import Display, progress_of
from ops.story.run_status import Status
from ops.terminal import Column, Fitted, Screen

COLUMNS = (
    Column("island", number=False),
    Column("state", number=False),
    Column("step", rank=1),
    Column("up", rank=3),
    Column("refused", number=False, wraps=True, rank=2),
)
ROWS = [("island-0", "alive", "1,234", "76.0 MB", "outlier 3, stale 12"), ("island-1", "dead", "7", "1.0 kB", "")]
NOTHING = Status(run_id="demo", islands={}, fragments={}, totals={}, broker_age_s=0.1, broker_is_silent=False)


def drawn(width, rows=ROWS):
    console = Console(file=io.StringIO(), width=width)
    console.print(Fitted(COLUMNS, rows))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (100, "island state step up refused"),
        (40, "island state step up refused"),  # the last one in several lines
        (39, "island state step refused"),
        (30, "island state step"),
        (21, "island state"),
    ],
)
def test_columns_without_room_are_left_out_and_the_others_are_whole(width, titles):
    text = drawn(width)
    assert text.splitlines()[0].split() == titles.split()
    assert "…" not in text
    assert "island-0" in text
    assert ("1,234" in text) == ("step" in titles)
    assert ("outlier" in text and "12" in text) == ("refused" in titles)


def test_without_any_room_something_is_drawn():
    assert drawn(5)


def test_a_column_that_is_empty_is_left_out_however_wide_it_is():
    assert drawn(100, rows=[ROWS[1]]).splitlines()[0].split() == ["island", "state", "step", "up"]


class Gone(io.StringIO):
    """A stream that cannot be written any more."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left"), OSError(5, "I/O")])
def test_progress_that_cannot_be_shown_ends_nothing(error):
    with Display(Gone(error)) as display:
        display.note("a process died")
        display.show(NOTHING, progress_of(NOTHING, None), 0.0)
        display.note("and came back")


def test_a_line_in_a_file_is_one_line_however_long():
    file = io.StringIO()
    Screen(file=file).print(Text("refused stale 12, " * 40))
    Screen(file=file).print(Fitted(COLUMNS, [("island-0", "alive", "1", "2", "outlier 3, stale 12, " * 20)]))
    assert len(file.getvalue().splitlines()) == 3


def test_a_screen_whose_reader_went_away_says_so():
    with pytest.raises(BrokenPipeError):
        Screen(file=Gone(BrokenPipeError(32, "Broken pipe"))).print("x")


@pytest.mark.parametrize(("term", "redraws"), [("xterm", True), ("dumb", False)])
def test_only_a_terminal_that_can_move_its_cursor_is_redrawn(monkeypatch, term, redraws):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as stream:
        assert Screen(file=stream).can_redraw == redraws
    os.close(ours)
    assert not Screen(file=io.StringIO()).can_redraw, "a file is no terminal"
