"""Several shards end a run as one, and none of them waits for ever for another."""

import pytest

from aggregator.rounds.ending import FLUSH_TIMEOUTS, LINGER_MOST_S, LINGER_S
from aggregator.rounds.roster import AGAIN_S
from broker.wire.messages import Leave, Phase
from tests.aggregator_hand import TOKENS_PER_STEP
from tests.shard_bench import shards


def ending(**settings):
    """Island a has trained the target, and brought all of it but what it has of fragment 1."""
    made = shards("a", total_tokens=40, **settings)
    made.beat("a", 4)
    assert made.phases == [Phase.FLUSHING] * 2
    made.beat("a", 4, stopped=True)
    made.offer("a", 0, 4, fragment=0)
    return made


def end(made):
    """It brings the rest."""
    made.offer("a", 0, 4, fragment=1)
    made.nothing("a")
    made.beat("a", 4, stopped=True)
    assert made.phases == [Phase.ENDED] * 2
    return made


def test_phases_follow_shard_0_and_it_ends_when_every_shard_has_done_its_flush():
    made = ending()
    made.run_to(1.0)
    made.beat("a", 4, stopped=True)
    assert made.phases == [Phase.FLUSHING] * 2
    end(made)
    assert [desk.tokens()["in_flight"] for desk in made.desks] == [0, 0]
    assert [desk.disk.record["phase"] for desk in made.desks] == ["ended", "ended"]


def slow_flush(silent_after_s=1e9):
    """Island a brings what it has of shard 0 at once, and of each fragment of shard 1 just before patience ends."""
    made = ending(fragments=6, sync_interval=6, round_timeout_s=2.0, dead_after_s=1000.0)
    for p in (2, 4):
        made.offer("a", 0, 4, fragment=p)
    for p in (1, 3, 5):
        for _ in range(18):
            made.run_to(made.now_s + 0.5)
            if made.now_s >= silent_after_s:
                made.cut = {1}
            made.beat("a", 4, stopped=True)
        if made.phases[0] is not Phase.ENDED:
            made.offer("a", 0, 4, fragment=p)
    made.beat("a", 4, stopped=True)
    return made


def test_shard_0_waits_while_another_one_is_heard_that_still_flushes():
    made = slow_flush()
    made.run_to(made.now_s + 1.0)
    assert made.now_s > 2 * FLUSH_TIMEOUTS * 2.0
    assert made.phases == [Phase.ENDED] * 2
    assert made.desks[1].tokens()["merged"] == 40


@pytest.mark.parametrize("succeeded", [False, True])
def test_shard_0_or_its_successor_stays_until_a_shard_that_was_away_at_the_end_has_heard_of_it(succeeded):
    made = slow_flush(silent_after_s=9.0)
    if succeeded:
        made.restart(0)
    made.run_to(made.now_s + 2 * LINGER_S)
    assert not made.desks[0].core.finished
    made.cut.clear()
    made.run_to(made.now_s + 2 * AGAIN_S)
    assert made.phases == [Phase.ENDED] * 2
    made.run_to(made.now_s + LINGER_S)
    assert made.desks[0].core.finished


def test_shard_0_does_not_stay_for_ever_for_one_that_never_comes_back():
    made = slow_flush(silent_after_s=9.0)
    made.run_to(made.now_s + LINGER_MOST_S + 1.0)
    assert made.desks[0].core.finished


@pytest.mark.parametrize("says", [True, False])
def test_a_shard_whose_islands_have_all_gone_ends_without_shard_0_when_it_has_no_patience_left(says):
    made = ending(round_timeout_s=2.0, dead_after_s=3.0)
    made.offer("a", 0, 4, fragment=1)
    made.cut = {0}
    for half_seconds in range(12 * FLUSH_TIMEOUTS):
        if half_seconds == 4 * FLUSH_TIMEOUTS:
            made.restart(1)
        made.run_to(made.now_s + 0.5)
        made.beat("a", 4, stopped=True)
    assert made.phases[1] is Phase.FLUSHING, "its island is there"
    if says:
        made.say("a", Leave(inner_step=4, tokens=4 * TOKENS_PER_STEP, reason="the run has ended"))
    made.run_to(made.now_s + 4.0)
    assert made.phases[1] is Phase.ENDED


def test_a_shard_that_starts_for_a_higher_target_waits_for_what_shard_0_says_now():
    further = end(ending()).desks[1].restarted(shards=2, fragments=2, shard=1, total_tokens=80)
    further.run_to(3.0)
    assert further.phase is Phase.RUNNING
