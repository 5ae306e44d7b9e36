"""State machines as tables: illegal transitions, and the diagrams in docs/reference.md."""

from enum import StrEnum
from pathlib import Path

import pytest

from aggregator.standby import candidate
from aggregator.state import fragment as aggregators_fragment
from aggregator.state import members
from broker.base.transitions import IllegalTransition, Staged, Transitions
from islands.agreement import gate_rules, speaker_rules
from islands.protocol import donation
from islands.protocol import fragment as islands_fragment

REFERENCE = Path(__file__).parents[3] / "docs" / "reference.md"
CORES = islands_fragment, aggregators_fragment, members, candidate, donation, speaker_rules, gate_rules
TABLES = [each.STAGES for each in CORES]


class Door(StrEnum):
    OPEN = "open"
    SHUT = "shut"


DOOR = Transitions("the door", Door.SHUT, {Door.SHUT: {"push": Door.OPEN}, Door.OPEN: {"pull": Door.SHUT}})


def test_an_illegal_transition_raises_with_the_story_and_changes_nothing():
    door = Staged(DOOR)
    assert [door.take("push"), door.take("pull")] == [Door.OPEN, Door.SHUT]
    with pytest.raises(IllegalTransition, match=r"the door is shut: 'pull' .* push -> pull"):
        door.take("pull")
    assert door.stage is Door.SHUT
    assert door.take("push") is Door.OPEN


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_stage_of_a_table_can_be_reached_and_its_diagram_is_that_in_the_reference(table):
    stages, reached = set(type(table.start)), {table.start}
    for _ in stages:
        reached |= {target for stage in reached for target in table.edges.get(stage, {}).values()}
    assert reached == stages
    assert f"```mermaid\n{table.diagram()}\n```" in REFERENCE.read_text(), f"put this there:\n{table.diagram()}"
