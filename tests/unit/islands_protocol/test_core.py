"""The island's state machine: how it joins, what it takes of what it hears, and when it ends."""

import pytest

from broker.wire import messages as m
from islands.protocol import adoption
from islands.protocol.donation import HOLD_S
from islands.protocol.events import (
    CopyState,
    EncodeSeed,
    Fail,
    Joined,
    Leaving,
    Line,
    Prepare,
    Restored,
    Send,
    Settled,
    StateCopied,
    StateNeeded,
    Tick,
)
from tests.aggregator_hand import TOKENS_PER_STEP, notes, of
from tests.island_hand import Hand, sent


@pytest.fixture
def hand():
    return Hand()


def refused(kind, reason, detail=""):
    return m.Refused(kind=kind, sequence=3, reason=reason, detail=detail)


def test_small_files_are_given_part_by_part_to_who_names_their_digest():
    files = "d", 5, (("first",), ("second",))
    hand = Hand(files=files)

    def given(digest, part):
        return sent(hand.hear(m.FetchFiles(digest=digest, part=part)), m.FilesPart)

    assert given("d", 1) == [m.FilesPart(digest="d", part=1, num_bytes=5, payload=("second",))]
    for digest, part in (("d", 2), ("other", 0)):
        assert given(digest, part) == [m.FilesPart(digest=digest, part=part, num_bytes=0, payload=())]


@pytest.mark.parametrize("no_room", [False, True])
def test_a_join_is_repeated_with_growing_pauses_until_it_is_answered(no_room):
    hand = Hand(joined=False)
    assert len(sent(hand.log, m.Join)) == 1
    if no_room:
        assert of(hand.hear(refused("join", m.Reason.QUEUE_FULL, "full")), Fail) == []
    times = []
    for i in range(200):
        hand.now_s = i / 10
        if sent(hand.feed(Tick()), m.Join):
            times.append(hand.now_s)
    assert times[:4] == [0.5, 1.5, 3.5, 7.5]
    assert hand.core.next_deadline_s() > 19.0
    (joined,) = of(hand.welcome(start=40), Joined)
    assert (joined.start_step, joined.start_tokens) == (40, 400)
    assert hand.core.fragments[0].handed.step == 40


def test_an_island_starts_once_it_is_welcomed_itself_and_every_fragment_has_a_version():
    hand = Hand(joined=False, fragments=2)
    assert hand.welcome(nonce="other") == []
    assert not hand.core.joined
    hand.welcome()
    hand.version(3, 0)
    assert not hand.core.startable
    hand.version(0, 1)
    assert hand.core.startable


@pytest.mark.parametrize("reason", [m.Reason.MANIFEST, m.Reason.WRONG_KEY, m.Reason.OVERSIZE, m.Reason.IMPLAUSIBLE])
def test_a_join_that_can_never_succeed_is_given_up_with_the_cure(reason):
    said = Hand(joined=False).hear(refused("join", reason, "use more fragments"))
    assert of(said, Fail) == [Fail(reason=str(reason), cure="use more fragments")]


@pytest.mark.parametrize(
    ("kind", "reason"), [("contribution", m.Reason.OVERSIZE), ("heartbeat", m.Reason.IMPLAUSIBLE)], ids=str
)
def test_a_member_is_not_given_up_for_one_message_that_is_refused(kind, reason):
    assert of(Hand().hear(refused(kind, reason)), Fail) == []


def test_an_island_that_the_aggregator_does_not_know_joins_again_as_the_next_life(hand):
    hand.hand_over(4, 1)
    hand.boundary(2)
    (join,) = sent(hand.hear(refused("heartbeat", m.Reason.UNKNOWN_ISLAND)), m.Join)
    assert (join.island_id, join.nonce) == ("a", "n.1")
    assert not hand.core.fragments[0].outstanding, "its bytes belong to a life that is over"
    assert not of(hand.welcome(incarnation=2), Joined), "the training loop goes on: it is no new process"
    (prepare,) = of(hand.version(0), Prepare)
    assert prepare.keep == 0.0


def test_one_refusal_as_fenced_may_be_old_news_and_two_over_a_second_are_not(hand):
    fenced = refused("heartbeat", m.Reason.FENCED)
    assert not of(hand.hear(fenced), Fail)
    hand.now_s = 0.9
    assert not of(hand.hear(fenced), Fail)
    hand.state()
    hand.now_s = 1.5
    assert not of(hand.hear(fenced), Fail), "an answer came in between"
    hand.now_s = 2.5
    (fail,) = of(hand.hear(fenced), Fail)
    assert "another process has joined as 'a'" in fail.reason
    assert "id of its own" in fail.cure


def test_a_new_broker_hears_of_an_island_at_once_and_then_at_its_usual_times(hand):
    times = []
    for hundredths in range(200):
        hand.now_s = hundredths / 100
        said = hand.feed(Line(stands=True)) if hundredths == 70 else hand.feed(Tick())
        times += [hand.now_s] * len(sent(said, m.Heartbeat))
    assert times == [0.5, 0.7, 1.0, 1.5]


def test_versions_wait_for_room_until_others_are_installed(monkeypatch):
    hand = Hand(fragments=4)
    two = 2 * 4 * 64  # the bytes of two fragments
    monkeypatch.setattr(adoption, "ROOM_BYTES", two)
    monkeypatch.setattr(adoption, "ROOM_SHARE", 100)
    prepared = [p for p in range(4) if of(hand.version(1, p), Prepare)]
    assert (prepared, hand.core.held_back) == ([0, 1], True)
    hand.version(2, 3)  # while it waits a newer one takes its place
    hand.version(1, 3)  # and no older one
    said = of(hand.boundary(1, installed=(0,)), Prepare)
    assert [p.version.fragment_id for p in said] == [2]
    said = of(hand.boundary(1, installed=(1, 2)), Prepare)
    assert [(p.version.fragment_id, p.version.fragment_version) for p in said] == [(3, 2)]
    assert not hand.core.held_back


def test_one_version_is_always_prepared_and_so_are_all_that_replace_what_is_spoilt(monkeypatch):
    hand = Hand(fragments=3)
    monkeypatch.setattr(adoption, "ROOM_BYTES", 1)
    assert [p for p in range(3) if of(hand.version(1, p), Prepare)] == [0]
    for p in range(3):
        hand.boundary(1, installed=(p,))
    contribution = hand.hand_over(1, 1)
    said = of(hand.resolve(contribution, m.Fate.REFUSED, m.Reason.NOT_FINITE), Prepare)
    said += [each for p in range(3) for each in of(hand.version(2, p), Prepare)]
    assert [(p.version.fragment_id, p.keep) for p in said] == [(0, 0.0), (1, 0.0), (2, 0.0)]


def test_a_damaged_version_is_not_taken_and_asked_for_again(hand):
    said = hand.version(1, flaw="digest")
    assert notes(said, "version.refused")
    assert not of(said, Prepare)
    hand.now_s = 5.0
    assert sent(hand.state(versions=(1,)), m.Want)[0].versions == (0,)


def test_a_want_that_brought_nothing_is_sent_again_after_a_pause(hand):
    times = []
    for i in range(200):
        hand.now_s = i / 10
        times += [hand.now_s for _ in sent(hand.state(versions=(1,)), m.Want)]
    assert times[:2] == [2.0, 6.0]  # then the connection itself comes into question


def test_news_that_is_older_than_what_is_known_is_ignored_and_a_new_leader_counts_anew(hand):
    def told(trained_tokens, sequence):
        hand.state(trained_tokens=trained_tokens, sequence=sequence)
        return hand.core.schedule.progress.trained_tokens

    assert [told(10, 500), told(20, 499)] == [10, 10]
    hand.epoch = 2
    assert told(30, 1) == 30
    hand.epoch = 1
    assert told(40, 501) == 30


def test_seeds_are_encoded_once():
    hand = Hand(joined=False)
    hand.welcome()
    encoded = [len(of(hand.state(phase=m.Phase.SEEDING, seed=(0,)), EncodeSeed)) for _ in range(2)]
    assert encoded == [1, 0]


def test_progress_follows_the_fleet_and_never_decreases(hand):
    hand.boundary(4)
    hand.state(trained_tokens=400, fleet_ratio=10.0)
    assert hand.core.schedule.at(40) == 400
    assert hand.core.schedule.at(60) == 600  # 20 own tokens since, ten islands' worth
    hand.boundary(2)
    hand.state(trained_tokens=500, fleet_ratio=1.0)  # it was less than extrapolated
    assert hand.core.schedule.at(60) == 600
    assert hand.core.schedule.at(170) == 610


def test_a_farewell_names_the_last_counters(hand):
    hand.boundary(7)
    (leave,) = sent(hand.feed(Leaving(reason="SIGTERM")), m.Leave)
    assert (leave.inner_step, leave.tokens, leave.reason) == (7, 70, "SIGTERM")
    assert Hand(joined=False).feed(Leaving(reason="SIGTERM")) == []


def test_the_end_of_training_is_reported_at_once_and_the_island_finishes_with_the_last_versions(hand):
    hand.state(phase=m.Phase.FLUSHING)
    assert hand.core.done
    (beat,) = sent(hand.boundary(1, copied=(0,), stopped=True), m.Heartbeat)
    assert beat.stopped
    hand.state(phase=m.Phase.FLUSHING, rounds=((1, 0),))
    hand.captured()
    hand.state(phase=m.Phase.ENDED, versions=(1,))
    assert not hand.core.finished
    (prepare,) = of(hand.version(1), Prepare)
    assert prepare.keep == 0.0, "all is handed over: the global parameters, exactly"
    hand.boundary(installed=(0,))
    assert not hand.core.finished, "the fate of its last contribution is not known yet"
    contribution = sent(hand.log, m.Contribution)[-1]
    hand.resolve(contribution, m.Fate.MERGED)
    hand.state(phase=m.Phase.ENDED, versions=(1,))
    assert hand.core.finished


@pytest.mark.parametrize("shards", [1, 2])
def test_an_island_that_was_away_when_the_run_ended_ends_with_what_it_has(shards):
    hand = Hand(fragments=2)
    hand.hand_over(4, 1)  # nobody says what becomes of it
    hand.state(versions=(1, 0))  # nor does this version come any more
    hand.hear(refused("heartbeat", m.Reason.RUN_ENDED))
    assert (hand.core.done, hand.core.finished) == (True, False)
    if shards == 2:
        hand.state(shard=1, shards=2, phase=m.Phase.FLUSHING, versions=(0, 0))  # this one goes on
    hand.boundary(1, stopped=True)
    assert hand.core.finished
    assert notes(hand.log, "run.deserted") == [{"step": 4, "tokens": 4 * TOKENS_PER_STEP}]


def test_an_island_that_has_heard_of_the_end_waits_for_the_last_versions_though_all_have_gone():
    hand = Hand(fragments=2)
    hand.state(versions=(1, 1), phase=m.Phase.ENDED)
    hand.boundary(1, stopped=True)
    hand.version(1, 0)
    hand.boundary(installed=(0,))
    hand.hear(refused("heartbeat", m.Reason.RUN_ENDED))
    assert not hand.core.finished
    hand.version(1, 1)
    hand.boundary(installed=(1,))
    assert hand.core.finished


# --- several shards ---------------------------------------------------------------------------------------------------


def of_shard(hand, shard, **more):
    """What the aggregator of one of two shards says."""
    return hand.state(shard=shard, shards=2, **more)


def test_each_shard_speaks_of_its_own_fragments_alone():
    hand = Hand(fragments=3)
    of_shard(hand, 0, versions=(5, -1, 6), due_soon=(0, 2))
    of_shard(hand, 1, versions=(-1, 7, -1), due_soon=(1,))
    assert hand.core.published == (5, 7, 6)
    of_shard(hand, 0, versions=(5, 99, 6), due_soon=(1,))
    assert hand.core.published == (5, 7, 6)


def test_only_shard_0_speaks_of_the_phase_the_shares_and_the_progress():
    hand = Hand(fragments=2)
    hand.boundary(4)
    of_shard(hand, 0, trained_tokens=400, fleet_ratio=10.0)
    blocks = hand.core.blocks
    of_shard(
        hand,
        1,
        phase=m.Phase.FLUSHING,
        trained_tokens=9_999,
        fleet_ratio=99.0,
        blocks=(m.Block(number=1, from_batch=0, to_batch=9),),
    )
    assert not hand.core.done
    assert hand.core.blocks == blocks
    assert hand.core.schedule.at(40) == 400
    of_shard(hand, 0, phase=m.Phase.FLUSHING)
    assert hand.core.done


def test_an_island_stays_until_every_shard_has_ended():
    hand = Hand(fragments=2)
    for shard in (0, 1):
        of_shard(hand, shard, phase=m.Phase.FLUSHING)
    hand.boundary(1, copied=(0, 1), stopped=True)
    for shard in (0, 1):
        of_shard(hand, shard, phase=m.Phase.FLUSHING, rounds=((1, shard),))
        (contribution,) = sent(hand.captured(shard), m.Contribution)
        hand.version(1, shard)
        hand.boundary(installed=(shard,))
        hand.resolve(contribution, m.Fate.MERGED)
    of_shard(hand, 0, phase=m.Phase.ENDED, versions=(1, -1))
    assert not hand.core.finished, "shard 1 may make another version"
    of_shard(hand, 1, phase=m.Phase.ENDED, versions=(-1, 1))
    assert hand.core.finished


# --- donations between two lives --------------------------------------------------------------------------------------


def ticks_until(hand, end_s):
    """Feeds a tick at each deadline, as a driver does; returns what is done, and how often it was woken."""
    done, ticks = [], 0
    while (at_s := hand.core.next_deadline_s()) is not None and at_s <= end_s:
        assert at_s > hand.now_s, "the deadline that has just been met stands still"
        hand.now_s = at_s
        done += hand.feed(Tick())
        ticks += 1
    return done, ticks


@pytest.mark.parametrize("fetching", [False, True])
def test_who_looks_for_a_donor_between_two_lives_ends_it_in_time_and_rests_till_then(hand, fetching):
    hand.feed(StateNeeded(most_bytes=1 << 30, patience_s=60.0))
    if fetching:
        assert sent(hand.hear(m.Donor(island_id="b", wait_s=90.0)), m.FetchState)
    hand.now_s = 0.3
    hand.hear(refused("heartbeat", m.Reason.UNKNOWN_ISLAND))  # nor is the next join answered
    done, ticks = ticks_until(hand, 100.0)
    (settled,) = of(done, Settled)
    assert settled.source is m.StateSource.FRESH
    assert "patience ended" in settled.detail
    assert ticks < 200
    assert {type(a.message) for a in of(done, Send)} == {m.Join}, "who is no member is refused whatever else it says"


def test_a_copy_for_others_is_given_up_between_two_lives_too(hand):
    hand.feed(Restored(source=m.StateSource.CHECKPOINT))
    fetch = m.FetchState(state_id="", parts=(0,))
    assert of(hand.hear(fetch), CopyState)
    hand.feed(StateCopied(parts=(("part",),), state_bytes=4))
    hand.hear(refused("heartbeat", m.Reason.UNKNOWN_ISLAND))  # nor is the next join answered
    ticks_until(hand, 2 * HOLD_S)
    hand.welcome(incarnation=2)
    assert of(hand.hear(fetch), CopyState), "the first one is gone"


def takes_whole_and_finishes(hand, number):
    assert not hand.core.finished
    (prepare,) = of(hand.version(number), Prepare)
    assert prepare.keep == 0.0
    assert not sent(hand.boundary(installed=(0,)), m.Want)
    assert hand.core.finished


def test_who_was_away_during_the_flush_ends_with_the_global_parameters_and_not_with_its_own_progress(hand):
    hand.boundary(6)  # and nobody asks for them in time
    hand.state(phase=m.Phase.ENDED, versions=(1,))
    hand.boundary(1, copied=(0,), stopped=True)
    takes_whole_and_finishes(hand, 1)


def test_a_last_version_that_was_installed_before_the_word_of_the_end_is_taken_once_more(hand):
    hand.boundary(6)
    (prepare,) = of(hand.version(1), Prepare)
    assert prepare.keep == 1.0
    hand.boundary(1, installed=(0,))
    hand.state(phase=m.Phase.ENDED, versions=(1,))
    (want,) = sent(hand.boundary(1, copied=(0,), stopped=True), m.Want)
    assert want.versions == (-1,)
    takes_whole_and_finishes(hand, 1)


def test_a_last_contribution_that_is_refused_does_not_stay_in_what_an_island_ends_with(hand):
    hand.state(phase=m.Phase.FLUSHING)
    hand.boundary(4, copied=(0,), stopped=True)
    hand.state(phase=m.Phase.FLUSHING, rounds=((1, 0),))
    (contribution,) = sent(hand.captured(), m.Contribution)
    hand.resolve(contribution, m.Fate.REFUSED, m.Reason.RUN_ENDED)
    hand.state(phase=m.Phase.ENDED, versions=(0,))
    takes_whole_and_finishes(hand, 0)
