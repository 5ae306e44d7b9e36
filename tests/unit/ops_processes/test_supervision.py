"""The supervisor's verdicts, without a process."""

import pytest

from ops.processes.child_process import error_in
from ops.processes.supervision import Ended, GiveUp, Restart, RestartPolicy, Supervision

POLICY = RestartPolicy(first_delay_s=1.0, max_delay_s=5.0, settled_after_s=10.0, young_deaths=5)


def died(supervision, *, status=1, lived_s=0.0, ends_by_itself=False, progressed=None):
    more = {"ends_by_itself": ends_by_itself, "progressed": progressed}
    return supervision.died("x", status=status, lived_s=lived_s, now_s=100.0, **more)


def test_status_zero_is_the_end_only_of_a_process_that_ends_by_itself():
    assert died(Supervision(POLICY), status=0, ends_by_itself=True) == Ended()
    assert isinstance(died(Supervision(POLICY), status=0), Restart)


def test_wrong_settings_are_not_tried_again():
    verdict = died(Supervision(POLICY), status=2)
    assert verdict == GiveUp(reason="x ended with status 2: its settings are wrong", misset=True)


def test_delays_double_up_to_the_limit_and_then_it_is_given_up():
    supervision = Supervision(POLICY)
    verdicts = [died(supervision) for _ in range(5)]
    assert [verdict.at_s for verdict in verdicts[:4]] == [101.0, 102.0, 104.0, 105.0]
    assert verdicts[4] == GiveUp(reason="x ended with status 1, 5 times in a row within 10 s")
    assert supervision.restarts["x"] == 4


def test_a_process_that_is_killed_now_and_then_is_restarted_for_ever():
    supervision = Supervision(POLICY)
    for _ in range(100):
        verdict = died(supervision, status=-9, lived_s=11.0)
        assert verdict == Restart(at_s=101.0, reason="x was killed by signal 9 after 11.0 s")
    assert supervision.restarts["x"] == 100


def test_a_settled_life_forgets_the_deaths_before_it():
    supervision = Supervision(POLICY)
    for _ in range(4):
        died(supervision)
    assert died(supervision, lived_s=10.0) == Restart(at_s=101.0, reason="x ended with status 1 after 10.0 s")
    assert isinstance(died(supervision), Restart)


def test_a_life_counts_by_what_was_done_in_it_where_that_is_known():
    supervision = Supervision(POLICY)
    for _ in range(100):
        assert isinstance(died(supervision, lived_s=0.5, progressed=True), Restart)
    verdicts = [died(supervision, lived_s=1000.0, progressed=False) for _ in range(5)]
    assert [type(verdict) for verdict in verdicts[:4]] == [Restart] * 4
    assert verdicts[4] == GiveUp(reason="x ended with status 1, 5 times in a row before it got anywhere")


TRACEBACK = "Traceback (most recent call last):\n  File 'x.py', line 1, in <module>\n    f()\n"
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "y.py", line 1, in <module>
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "y.py", line 2, in <module>
    | zmq.error.ZMQError: bad
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("\n  \n", ""),
        ("12:00:00.000 island-0 island.starts\natoll: pace = -1.0: too low\n", "atoll: pace = -1.0: too low"),
        (f"{TRACEBACK}TypeError: no\n--------------------\nFor simplicity, JAX has removed frames.\n", "TypeError: no"),
        (f"{TRACEBACK}KeyError: 'a'\n\nDuring handling:\n\n{TRACEBACK}ValueError: b\n  more of b\n", "ValueError: b"),
        (GROUP, "zmq.error.ZMQError: bad"),
        ("Traceback (most recent call last):\n  cut off", "cut off"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_the_line_that_says_why_a_program_failed_is_found(text, error):
    assert error_in(text.splitlines()) == error
