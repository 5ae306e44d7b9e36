"""A store that has lost bytes of a fragment's newest version: that one stands still, the others go on."""

import pytest

from aggregator.interface.events import Merge, MergeFailed
from aggregator.rounds.commits import MERGE_RETRY_S
from broker.wire.messages import AGGREGATOR, BROKER, Phase, Version, WantBack
from tests.aggregator_hand import desk, notes, of, sent


def fails(made):
    """The merge that is asked for finds a damaged file."""
    merge = made.computing.popleft()
    return made.feed(MergeFailed(fragment_id=merge.fragment_id, fragment_version=1, detail="x.commit is damaged"))


def holds(made, fragment_version=0, digest="0.0", base=None):
    said = Version(
        epoch=1,
        fragment_id=0,
        fragment_version=fragment_version,
        digest=digest,
        contributions=(),
        base=base,
        payload=("bytes of a broker",),
    )
    return made.say(AGGREGATOR, said)


@pytest.fixture
def made():
    """Version 1 of fragment 0 cannot be made."""
    made = desk("a", fragments=2, islands=1, rounds_in_flight=1)
    made.computes = False
    made.open_round("a", step=4)
    made.offer("a", 0, 4)
    assert sent(fails(made), WantBack, BROKER) == [WantBack(fragment_id=0)]
    assert notes(made.log, "version.damaged") == [{"fragment": 0, "version": 0, "detail": "x.commit is damaged"}]
    assert "fragment 0 stands still" in made.troubles[0]
    made.take()
    return made


def test_the_other_fragments_go_on(made):
    made.computes = True
    made.beat("a", 8)
    made.offer("a", 0, 8, fragment=1)
    assert made.versions == (0, 1)


def test_the_same_merge_is_made_with_the_bytes_that_a_broker_gives_back(made):
    assert not of(holds(made, digest="0.x") + holds(made, 1) + holds(made, base=-1), Merge), "another version"
    (merge,) = of(holds(made), Merge)
    assert (merge.fragment_version, merge.given_back) == (1, ("bytes of a broker",))
    made.compute()
    assert made.versions == (1, 0)
    assert made.tokens("a")["merged"] == 20  # four steps on one of two fragments
    assert [each["version"] for each in notes(made.log, "version.mended")] == [0]
    assert not made.troubles
    assert not of(holds(made), Merge), "a copy"


def test_it_is_tried_again_and_asked_for_again_while_nothing_comes(made):
    assert not of(made.run_to(made.now_s + MERGE_RETRY_S - 0.1), Merge)
    (merge,) = of(made.run_to(made.now_s + 0.2), Merge)
    assert merge.given_back is None, "somebody may have put a copy in its place"
    assert sent(fails(made), WantBack, BROKER)
    assert not notes(made.log, "version.damaged"), "said once"


def test_the_run_ends_without_it_when_its_time_is_over():
    made = desk("a", islands=1, total_tokens=80, round_timeout_s=2.0)
    made.computes = False
    made.open_round("a", step=4)
    made.offer("a", 0, 4)
    fails(made)
    made.beat("a", 8, stopped=True)
    for _ in range(30):
        made.run_to(made.now_s + 1.0)
        made.beat("a", 8, stopped=True)
    assert made.phase is Phase.ENDED
    made.check_books()
    assert not of(holds(made), Merge)
