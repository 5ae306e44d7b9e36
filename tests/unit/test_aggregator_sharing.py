"""When data move, and when that is written down."""

import pytest

from aggregator.events import SaveRun
from aggregator.state.sharing import SAVED_APART_S, SAVED_AT_ONCE
from tests.aggregator_hand import Desk, notes, of


def test_in_a_large_fleet_blocks_that_were_given_are_written_down_together():
    names = [f"island-{i:03}" for i in range(SAVED_AT_ONCE + 20)]
    made = Desk(islands=len(names), data_ahead_s=10.0)
    made.gather(*names)
    made.run_to(10.0)
    given, saved = [], 0
    for name in names[:9]:  # each begins its last block, a millisecond after the other
        made.now_s += 0.001
        known = made.run.shares.told(name, 0).blocks
        said = made.beat(name, 0, block=known[-1].number)
        given += notes(said, "block.given")
        saved += len(of(said, SaveRun))
    assert [each["owner"] for each in given] == names[:9]
    assert saved == 1  # with the first
    after_s = made.core.next_deadline_s(made.now_s)
    assert after_s == pytest.approx(10.001 + 20 * SAVED_APART_S)
    (record,) = of(made.run_to(after_s), SaveRun)
    assert {str(each["block"]) for each in given} <= record.record["shares"]["given"].keys()
    assert all(len(made.run.shares.told(name, 0).blocks) == 2 for name in names[:9])
