"""The island's state machine: what it leaves to its next process, and how that goes on with it."""

from dataclasses import replace

import numpy as np
import pytest

from broker.base.errors import Unavailable
from broker.wire import messages as m
from broker.wire.headers import Limits
from broker.wire.tensors import encode_tensor
from islands.protocol.data_shares import TrainedBatch
from islands.protocol.events import Boundary, Capture, Captured, Fail, Joined
from islands.protocol.fragment import Point
from islands.session import paused_file
from tests.aggregator_hand import notes, of
from tests.island_hand import Hand, sent


def stopped(hand, steps=3):
    """Runs steps, and stops before the run has ended, with all captured."""
    hand.boundary(steps, copied=tuple(range(hand.num)), stopped=True)
    return [action for p in range(hand.num) for action in hand.captured(p)]


def test_an_island_that_stops_before_the_end_hands_over_unasked_what_it_has():
    hand = Hand(fragments=2)
    captures = of(hand.boundary(3, copied=(0, 1), stopped=True), Capture)
    assert [(c.fragment_id, c.step) for c in captures] == [(0, 3), (1, 3)]
    assert not hand.core.delivered
    given = [contribution for p in (0, 1) for contribution in sent(hand.captured(p), m.Contribution)]
    assert [(c.round_id, c.steps.from_step, c.steps.to_step) for c in given] == [(0, 0, 3), (0, 0, 3)]
    assert not hand.core.delivered
    for each in given:
        hand.resolve(each, m.Fate.WAITING)
    assert hand.core.delivered


def test_it_hands_over_too_what_came_behind_a_contribution_that_nobody_is_known_to_have():
    hand = Hand()
    hand.hand_over(2, 1)
    (second,) = sent(stopped(hand), m.Contribution)
    assert (second.steps.from_step, second.steps.to_step) == (2, 5)


def paused(hand):
    return hand.core.pause("demo", 17)


def test_the_next_process_asks_for_the_same_life_and_goes_on_at_the_same_step():
    hand = Hand()
    (contribution,) = sent(stopped(hand), m.Contribution)
    kept = paused(hand)
    assert (kept.island_id, kept.incarnation, kept.nonce, kept.sequence) == ("a", 1, "n", 17)
    assert (kept.at, kept.contributions, kept.overwritten_tokens) == (Point(3, 30), (contribution,), (0,))
    hand.resolve(contribution, m.Fate.MERGED)
    assert paused(hand).contributions == (), "known to be merged"

    later = Hand(joined=False, paused=kept)
    (join,) = sent(later.log, m.Join)
    assert (join.resumes, join.nonce) == ("n", "n-again")
    (joined,) = of(later.welcome(incarnation=1), Joined)
    assert (joined.start_step, joined.start_tokens) == (3, 30)
    later.version(5)
    later.step = 3
    later.boundary(installed=(0,))
    later.now_s += 1.0
    (beat,) = sent(later.feed(Boundary(inner_step=3, tokens=30)), m.Heartbeat)
    assert [(o.from_step, o.to_step) for o in beat.outstanding] == [(0, 3)]
    assert sent(later.resolve(contribution, m.Fate.UNKNOWN), m.Contribution) == [contribution]
    later.resolve(contribution, m.Fate.MERGED)
    assert not later.core.fragments[0].outstanding
    (new,) = sent(stopped(later, 2), m.Contribution)
    assert (new.steps.from_step, new.steps.to_step, new.trained_on[0].fragment_version) == (3, 5, 5)


def test_steps_that_are_in_no_contribution_when_the_process_ends_are_given_up_by_the_life_that_ran_them():
    hand = Hand(fragments=2)
    hand.boundary(3, copied=(0,))
    hand.state(rounds=((1, 0),))  # being captured as the process ends
    hand.boundary(2)
    kept = paused(hand)
    assert (kept.at, kept.contributions, kept.overwritten_tokens) == (Point(5, 50), (), (50, 50))
    later = Hand(fragments=2, joined=False, paused=kept)
    later.welcome(incarnation=1)
    assert [f.overwritten_tokens for f in later.core.fragments.values()] == [50, 50]


def test_a_process_that_is_given_another_life_drops_what_was_kept_and_says_so():
    hand = Hand()
    stopped(hand)
    later = Hand(joined=False, paused=paused(hand))
    said = later.welcome(incarnation=2)
    (note,) = notes(said, "progress.dropped")
    assert (note["steps"], note["contributions"]) == (3, 1)
    assert of(said, Joined)[0].start_step == 0
    assert not later.core.fragments[0].outstanding


def test_a_process_that_must_join_anew_does_not_claim_the_kept_life_again():
    hand = Hand()
    stopped(hand)
    later = Hand(joined=False, paused=paused(hand))
    later.welcome(incarnation=1)
    later.hear(m.Refused(kind="heartbeat", sequence=1, reason=m.Reason.UNKNOWN_ISLAND, detail=""))
    later.now_s += 1.0
    (join,) = sent(later.boundary(), m.Join)
    assert join.resumes == ""


def test_its_data_go_on_where_the_last_process_stopped_although_the_aggregator_knows_less():
    hand = Hand()
    for step in range(3):
        hand.step += 1
        taken = ((step, TrainedBatch(1, step)),)
        hand.feed(Boundary(inner_step=hand.step, tokens=10 * hand.step, trained=taken))
    kept = paused(hand)
    assert kept.cursors == {1: 3}
    later = Hand(joined=False, paused=kept)
    later.welcome(incarnation=1)
    later.state(blocks=(m.Block(number=1, from_batch=0, to_batch=9), m.Block(number=2, from_batch=9, to_batch=12)))
    assert [block.from_batch for block in later.core.blocks] == [3, 9]


def test_whoever_comes_after_the_end_hears_that_it_is_over():
    hand = Hand(joined=False)
    said = hand.hear(m.Refused(kind="join", sequence=1, reason=m.Reason.RUN_ENDED, detail=""))
    assert [fail.reason for fail in of(said, Fail)] == [m.Reason.RUN_ENDED]


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept():
    hand = Hand()
    trained = tuple((step, TrainedBatch(2, 4 + step)) for step in range(3))
    hand.feed(Boundary(inner_step=3, tokens=30, copied=(0,), trained=trained, stopped=True))
    hand.feed(Captured(fragment_id=0, payload=(encode_tensor(np.ones((8, 8), np.float32), m.Codec.BF16),)))
    return paused(hand)


def test_what_is_kept_comes_back_from_the_file_as_it_was(tmp_path, kept):
    path = paused_file.path_of(tmp_path, "demo", "host/0")
    assert path.parent == tmp_path
    paused_file.save(path, kept)
    found = paused_file.load(path, Limits())
    (contribution,) = found.contributions
    (tensor,), (was,) = contribution.payload, kept.contributions[0].payload
    assert bytes(tensor.data) == bytes(was.data)
    bare = replace(contribution, payload=kept.contributions[0].payload)
    assert replace(found, contributions=(bare,)) == kept
    paused_file.remove(path)
    assert paused_file.load(path, Limits()) is None


@pytest.mark.parametrize("at", [0, 5, 12, 40, -1])
def test_a_damaged_file_is_refused_by_name(tmp_path, kept, at):
    path = tmp_path / "demo.a.unmerged"
    paused_file.save(path, kept)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(Unavailable, match=r"demo\.a\.unmerged is damaged"):
        paused_file.load(path, Limits())
    path.write_bytes(content[:7])
    with pytest.raises(Unavailable, match="is damaged"):
        paused_file.load(path, Limits())


def test_a_file_that_cannot_be_written_says_why(tmp_path, kept):
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="cannot write"):
        paused_file.save(tmp_path / "file" / "demo.a.unmerged", kept)
