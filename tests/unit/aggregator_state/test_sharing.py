"""When data move, and when that is written down."""

import copy
import random

import pytest

from aggregator.interface.events import Note, SaveRun
from aggregator.state.sharing import SAVED_APART_S, SAVED_AT_ONCE, Sharing
from broker.wire import messages as m
from tests.aggregator_hand import Desk, notes, of


def test_in_a_large_fleet_blocks_that_were_given_are_written_down_together():
    names = [f"island-{i:03}" for i in range(SAVED_AT_ONCE + 20)]
    made = Desk(islands=len(names), data_ahead_s=10.0)
    made.gather(*names)
    made.run_to(10.0)
    given, saved = [], 0
    for name in names[:9]:  # each begins its last block, a millisecond after the other
        made.now_s += 0.001
        known = made.blocks(name)
        said = made.beat(name, 0, block=known[-1].number)
        given += notes(said, "block.given")
        saved += len(of(said, SaveRun))
    assert [each["owner"] for each in given] == names[:9]
    assert saved == 1  # with the first
    after_s = made.core.next_deadline_s()
    assert after_s == pytest.approx(10.001 + 20 * SAVED_APART_S)
    (record,) = of(made.run_to(after_s), SaveRun)
    assert {str(each["block"]) for each in given} <= record.record["shares"]["given"].keys()
    assert all(len(made.blocks(name)) == 2 for name in names[:9])


@pytest.mark.rotating(4)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_may_move_is_overlooked(seed):
    """The twin knows nothing of before, and looks at everybody."""
    draw, names = random.Random(seed), list("abcdef")
    made = Desk(islands=len(names), data_ahead_s=4.0, share_takeover_s=8.0)
    made.gather(*names)
    moved: list[str] = []
    for step in range(250):
        made.now_s += draw.choice((0.01, 0.2, 0.2, 1.0))
        name = draw.choice(names[: 3 if step % 90 < 60 else 6])  # the others are silent for long
        kind = draw.random()
        if kind < 0.9:
            blocks = made.blocks(name)
            seen = made.beat(name, step, block=draw.choice(blocks).number if blocks else 0)
        elif kind < 0.95:
            seen = made.say(
                name, m.Leave(inner_step=step, tokens=step, reason="", departure=draw.choice(list(m.Departure)))
            )
        else:
            seen = made.join(name)
        seen += [each for _ in range(3) for each in made.tick()]  # what has moved may move other things
        moved += [each.name for each in of(seen, Note) if each.name.startswith("block.")]
        twin = copy.deepcopy(made.core.run)
        Sharing(twin).advance()
        assert not [each for each in twin.outbox if isinstance(each, Note)]
    assert moved
