"""The island's state machine: by itself, against a naive model of steps, and wired to the aggregator's."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aggregator.events import Flaw
from broker import messages as m
from broker.fragments import Kind
from broker.hearing import Carried
from broker.resending import Backoff
from islands.core import Island
from islands.events import (
    Boundary,
    Capture,
    Captured,
    CopyState,
    Fail,
    Joined,
    Leaving,
    Prepare,
    Prepared,
    Received,
    RefreshOptimizer,
    Restored,
    Send,
    Tick,
    Watch,
)
from islands.fragment import Pending, Stage
from islands.shares import Taken
from tests.helpers import TOKENS_PER_STEP, LinkedCluster, notes, of, tensors

SETTINGS = m.RunSettings(
    sync_interval_steps=4,
    keep=1.0,
    codec=m.Codec.F32,
    heartbeat_interval_s=0.5,
    total_tokens=0,
    tokens_per_fleet_step=TOKENS_PER_STEP,
    seed=0,
)
SHARE = m.Share(index=0, count=1, share_epoch=0)


class Hand:
    """One island core with one fragment, whose messages and boundaries the test makes by hand."""

    def __init__(self, *, keep=1.0, fragments=1, joined=True, kinds=None):
        kinds = kinds or (Kind.RDA,) * fragments
        self.tensors = tuple(replace(t, kind=kind) for t, kind in zip(tensors(fragments), kinds, strict=True))
        self.core = Island(island_id="", hint="", nonce="n", tensors=self.tensors, tokens_per_step=TOKENS_PER_STEP)
        self.now_s, self.sequence, self.step, self.epoch = 0.0, 0, 0, 1
        self.num = fragments
        self.settings = m.RunSettings(**{f: getattr(SETTINGS, f) for f in SETTINGS.__slots__} | {"keep": keep})
        self.log = self.core.start(0.0)
        if joined:
            self.welcome()
            for p in range(fragments):
                self.version(0, p)
            self.boundary(installed=tuple(range(fragments)))

    def feed(self, event):
        said = self.core.handle(event, self.now_s)
        self.log += said
        for action in said:
            if isinstance(action, Prepare):
                version = action.version
                prepared = Prepared(fragment_id=version.fragment_id, fragment_version=version.fragment_version)
                said = said + self.feed(prepared)
        return said

    def hear(self, message, flaw="", sequence=None, carried=None):
        self.sequence += 1
        envelope = m.Envelope(
            run_id="demo",
            sender="aggregator",
            incarnation=0,
            sequence=self.sequence if sequence is None else sequence,
            to="a",
            message=message,
        )
        return self.feed(Received(envelope=envelope, flaw=flaw, carried=carried))

    def welcome(self, incarnation=1, nonce=None, start=0):
        manifest = tuple((t,) for t in self.tensors)
        return self.hear(
            m.Welcome(
                nonce=nonce or self.core.nonce,
                island_id="a",
                incarnation=incarnation,
                epoch=self.epoch,
                fragments=manifest,
                settings=self.settings,
                share=SHARE,
                start_step=start,
                start_tokens=start * TOKENS_PER_STEP,
            )
        )

    def state(self, *, rounds=(), resolutions=(), sequence=None, carried=None, **more):
        fields = {
            "phase": m.Phase.RUNNING,
            "due_soon": (),
            "versions": self.core.published,
            "seed": (),
            "trained_tokens": 0,
            "fleet_ratio": 1.0,
            **more,
        }
        open_ = tuple(m.OpenRound(round_id=r, fragment_id=p) for r, p in rounds)
        state = m.FleetState(epoch=self.epoch, rounds=open_, resolutions=tuple(resolutions), share=SHARE, **fields)
        return self.hear(state, sequence=sequence, carried=carried)

    def version(self, number, p=0, merged=(), flaw=""):
        return self.hear(
            m.Version(
                epoch=self.epoch,
                fragment_id=p,
                fragment_version=number,
                digest=f"{p}.{number}",
                contributions=tuple(merged),
                payload=None,
            ),
            flaw,
        )

    def boundary(self, steps=0, *, installed=(), copied=(), stopped=False):
        self.step += steps
        return self.feed(
            Boundary(
                inner_step=self.step,
                tokens=self.step * TOKENS_PER_STEP,
                installed=installed,
                copied=copied,
                stopped=stopped,
            )
        )

    def hand_over(self, steps, round_id, p=0):
        """Runs steps, is asked, copies, captures; returns the contribution."""
        self.boundary(steps)
        self.state(rounds=((round_id, p),))
        assert of(self.boundary(copied=(p,)), Capture)
        (contribution,) = sent(self.captured(p), m.Contribution)
        return contribution

    def captured(self, p=0):
        return self.feed(Captured(fragment_id=p, payload=f"at {self.step}"))

    def resolve(self, contribution, fate, reason=None, carried=None):
        steps = contribution.steps
        resolution = m.Resolution(
            fragment_id=contribution.fragment_id,
            from_step=steps.from_step,
            to_step=steps.to_step,
            fate=fate,
            reason=reason,
        )
        return self.state(resolutions=(resolution,), carried=carried)


def sent(actions, kind):
    """Messages of one kind among an island's actions."""
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


# --- joining --------------------------------------------------------------------------------------------------


def test_a_join_is_repeated_with_growing_pauses_until_it_is_answered():
    hand = Hand(joined=False)
    assert len(sent(hand.log, m.Join)) == 1
    times = []
    for i in range(200):
        hand.now_s = i / 10
        if sent(hand.feed(Tick()), m.Join):
            times.append(hand.now_s)
    assert times[:4] == [0.5, 1.5, 3.5, 7.5]
    assert hand.core.next_deadline_s() > 19.0
    assert of(hand.welcome(), Joined)


def test_a_welcome_for_somebody_else_is_ignored():
    hand = Hand(joined=False)
    assert hand.welcome(nonce="other") == []
    assert not hand.core.joined


def test_an_island_starts_once_every_fragment_has_a_version():
    hand = Hand(joined=False, fragments=2)
    hand.welcome()
    hand.version(3, 0)
    assert not hand.core.startable
    hand.version(0, 1)
    assert hand.core.startable


def test_an_island_goes_on_at_the_counters_it_is_welcomed_with():
    hand = Hand(joined=False)
    (joined,) = of(hand.welcome(start=40), Joined)
    assert (joined.start_step, joined.start_tokens) == (40, 400)
    assert hand.core.fragments[0].handed.step == 40


def test_a_run_that_does_not_fit_is_given_up_with_the_cure():
    hand = Hand(joined=False)
    refused = m.Refused(kind="join", sequence=-1, reason=m.Reason.MANIFEST, detail="tensor 'w0' is missing")
    (fail,) = of(hand.hear(refused), Fail)
    assert (fail.reason, fail.cure) == ("manifest", "tensor 'w0' is missing")


def test_a_model_that_is_too_large_for_the_run_is_given_up_with_the_cure():
    hand = Hand(joined=False)
    refused = m.Refused(kind="join", sequence=-1, reason=m.Reason.OVERSIZE, detail="use more fragments")
    assert of(hand.hear(refused), Fail) == [Fail(reason="oversize", cure="use more fragments")]
    contribution = m.Refused(kind="contribution", sequence=3, reason=m.Reason.OVERSIZE, detail="use more fragments")
    assert of(Hand().hear(contribution), Fail) == []


def test_an_island_that_the_aggregator_does_not_know_joins_again_as_the_next_life():
    hand = Hand()
    hand.hand_over(4, 1)
    hand.boundary(2)
    refused = m.Refused(kind="heartbeat", sequence=3, reason=m.Reason.UNKNOWN_ISLAND, detail="join again")
    (join,) = sent(hand.hear(refused), m.Join)
    assert (join.island_id, join.nonce) == ("a", "n.1")
    assert not hand.core.fragments[0].outstanding, "its bytes belong to a life that is over"
    assert not of(hand.welcome(incarnation=2), Joined), "the training loop goes on: it is no new process"
    (prepare,) = of(hand.version(0), Prepare)
    assert prepare.keep == 0.0


def test_a_new_life_books_only_what_it_dropped_itself():
    hand = Hand(keep=0.0)
    hand.boundary(6)
    hand.version(1)
    hand.boundary(installed=(0,))
    assert hand.core.fragments[0].overwritten_tokens == 60
    hand.hear(m.Refused(kind="heartbeat", sequence=3, reason=m.Reason.UNKNOWN_ISLAND, detail=""))
    hand.welcome(incarnation=2, start=8)
    hand.boundary(4)  # at 10; the new life began at 8
    hand.version(2)
    hand.boundary(installed=(0,))
    assert hand.core.fragments[0].overwritten_tokens == 20


def test_one_refusal_as_fenced_may_be_old_news_and_two_over_a_second_are_not():
    hand = Hand()
    fenced = m.Refused(kind="heartbeat", sequence=3, reason=m.Reason.FENCED, detail="2 has joined")
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


# --- handing over ---------------------------------------------------------------------------------------------


def test_an_island_answers_an_open_round_from_the_copy_at_hand():
    hand = Hand()
    assert of(hand.state(due_soon=(0,)), Watch) == [Watch(fragments=frozenset({0}))]
    hand.boundary(3, copied=(0,))
    (capture,) = of(hand.state(rounds=((1, 0),)), Capture)  # in mid-step
    assert capture.step == 3
    (contribution,) = sent(hand.captured(), m.Contribution)
    assert (contribution.round_id, contribution.steps.from_step, contribution.steps.to_step) == (1, 0, 3)
    assert (contribution.steps.from_tokens, contribution.steps.to_tokens) == (0, 30)
    assert contribution.trained_on == (m.TrainedOn(fragment_version=0, steps=3),)


def test_without_a_copy_the_next_boundary_answers():
    hand = Hand()
    hand.boundary(3)
    assert not of(hand.state(rounds=((1, 0),)), Capture)
    assert hand.core.fragments[0].asked == 1
    assert of(hand.boundary(1, copied=(0,)), Capture)


def test_with_nothing_new_the_answer_is_nothing():
    hand = Hand()
    hand.state(rounds=((1, 0),))
    (nothing,) = sent(hand.boundary(copied=(0,)), m.Nothing)
    assert (nothing.round_id, nothing.fragment_id) == (1, 0)


def test_a_copy_that_was_handed_over_does_not_make_steps_run_since_nothing():
    """The announcement of the next round was lost: the only copy at hand is the one of the last round."""
    hand = Hand()
    hand.resolve(hand.hand_over(4, 1), m.Fate.MERGED)
    hand.boundary(4)
    said = hand.state(rounds=((2, 0),))
    assert not sent(said, m.Nothing)
    assert of(hand.boundary(1, copied=(0,)), Capture)
    (contribution,) = sent(hand.captured(), m.Contribution)
    assert (contribution.steps.from_step, contribution.steps.to_step) == (4, 9)


def test_a_nothing_that_got_lost_is_said_again():
    hand = Hand()
    hand.state(rounds=((1, 0),))
    assert sent(hand.boundary(copied=(0,)), m.Nothing)
    assert not sent(hand.state(rounds=((1, 0),)), m.Nothing)
    hand.now_s = 1.1
    assert sent(hand.state(rounds=((1, 0),)), m.Nothing)


def test_a_round_is_answered_once_however_often_it_is_announced():
    hand = Hand()
    hand.hand_over(4, 1)
    hand.boundary(1, copied=(0,))
    assert not of(hand.state(rounds=((1, 0),)), Capture)
    assert not of(hand.state(rounds=((0, 0),)), Capture), "nor an older one"


def test_ranges_follow_each_other_and_name_the_versions_trained_on():
    hand = Hand()
    hand.resolve(hand.hand_over(4, 1), m.Fate.WAITING)
    hand.boundary(2)
    hand.version(1)
    hand.boundary(1, installed=(0,))
    contribution = hand.hand_over(3, 2)
    assert (contribution.steps.from_step, contribution.steps.to_step) == (4, 10)
    assert contribution.trained_on == (
        m.TrainedOn(fragment_version=0, steps=3),
        m.TrainedOn(fragment_version=1, steps=3),
    )


def test_copies_are_dropped_by_an_installation():
    hand = Hand()
    hand.boundary(2, copied=(0,))
    hand.version(1)
    hand.boundary(1, installed=(0,))
    assert not of(hand.state(rounds=((1, 0),)), Capture)
    assert hand.core.fragments[0].copy is None


def test_no_copy_is_captured_between_preparing_and_installing():
    hand = Hand()
    hand.boundary(2, copied=(0,))
    hand.version(1)
    assert hand.core.fragments[0].stage is Stage.READY
    assert not of(hand.state(rounds=((1, 0),)), Capture)
    hand.boundary(1, installed=(0,), copied=(0,))
    assert hand.core.fragments[0].capturing is not None


def test_a_version_that_comes_while_a_copy_is_encoded_waits_for_it():
    hand = Hand()
    hand.state(rounds=((1, 0),))
    hand.boundary(4, copied=(0,))
    assert not of(hand.version(1), Prepare)
    assert of(hand.captured(), Prepare)


# --- outstanding contributions --------------------------------------------------------------------------------


def test_a_heartbeat_names_what_is_outstanding():
    hand = Hand()
    hand.hand_over(4, 1)
    hand.now_s = 0.5
    (beat,) = sent(hand.feed(Tick()), m.Heartbeat)
    assert beat.outstanding == (m.Outstanding(fragment_id=0, from_step=0, to_step=4),)
    assert (beat.inner_step, beat.tokens, beat.versions) == (4, 40, (0,))


def test_a_heartbeat_asks_about_the_oldest_of_each_fragment_where_not_all_have_room(monkeypatch):
    monkeypatch.setattr("islands.member.MAX_OUTSTANDING", 3)
    hand = Hand(fragments=2)
    for round_id in range(3):
        for p in (0, 1):
            hand.resolve(hand.hand_over(4, 2 * round_id + 1 + p, p), m.Fate.WAITING)
    hand.now_s = 0.5
    (beat,) = sent(hand.feed(Tick()), m.Heartbeat)
    assert [(o.fragment_id, o.from_step) for o in beat.outstanding] == [(0, 0), (1, 0), (0, 4)]


def test_a_contribution_that_never_arrived_is_sent_again_with_growing_pauses():
    hand = Hand()
    contribution = hand.hand_over(4, 1)
    times = []
    for i in range(1, 1300):
        hand.now_s = i / 10
        if sent(hand.resolve(contribution, m.Fate.UNKNOWN), m.Contribution):
            times.append(hand.now_s)
    assert times == [2.0, 6.0, 14.0, 30.0, 62.0, 122.0]


def test_a_contribution_that_this_machine_still_holds_is_not_sent_again():
    hand = Hand()
    contribution = hand.hand_over(4, 1)
    for i in range(1, 1300):
        hand.now_s = i / 10
        assert not sent(hand.resolve(contribution, m.Fate.UNKNOWN, carried=Carried(0, 0, 7)), m.Contribution)
    hand.now_s += 2.0
    assert sent(hand.resolve(contribution, m.Fate.UNKNOWN, carried=Carried(7, 0, 0)), m.Contribution) == [contribution]


def test_what_has_arrived_and_is_unknown_again_is_not_taken_for_being_here_still():
    """An aggregator that had it has died; the uplink is busy with other things."""
    hand = Hand()
    contribution = hand.hand_over(4, 1)
    hand.now_s = 1.0
    hand.resolve(contribution, m.Fate.WAITING, carried=Carried(0, 0, 7))
    hand.now_s = 40.0
    assert sent(hand.resolve(contribution, m.Fate.UNKNOWN, carried=Carried(0, 0, 7)), m.Contribution) == [contribution]


def test_over_another_bulk_connection_it_says_what_it_wants_and_sends_again_what_is_unknown():
    """The broker sends versions to nobody who has not spoken over that connection."""
    hand = Hand()
    contribution = hand.hand_over(4, 1)
    hand.now_s = 0.5
    assert not sent(hand.state(carried=Carried(10, 10, 7, 1)), m.Want)
    hand.now_s = 1.0
    said = hand.resolve(contribution, m.Fate.UNKNOWN, carried=Carried(1, 1, 7, 2))
    assert sent(said, m.Want)
    assert sent(said, m.Contribution) == [contribution]
    hand.now_s = 1.5
    assert not sent(hand.resolve(contribution, m.Fate.UNKNOWN, carried=Carried(1, 1, 7, 2)), m.Contribution)


def test_the_same_bytes_are_sent_again_on_retry():
    hand = Hand()
    contribution = hand.hand_over(4, 1)
    hand.boundary(3, copied=(0,))
    hand.now_s = 2.5
    assert sent(hand.resolve(contribution, m.Fate.RETRY, m.Reason.QUEUE_FULL), m.Contribution) == [contribution]


def test_a_contribution_that_waits_is_not_sent_again():
    hand = Hand()
    contribution = hand.hand_over(4, 1)
    hand.now_s = 30.0
    assert not sent(hand.resolve(contribution, m.Fate.WAITING), m.Contribution)
    hand.now_s = 31.0
    assert not sent(hand.resolve(contribution, m.Fate.UNKNOWN), m.Contribution), "its pause starts over"
    assert hand.core.fragments[0].outstanding


@pytest.mark.parametrize(
    ("again_at_s", "arrived_at_s", "pause_s"),
    [
        pytest.param(None, 10.0, 30.0, id="three journeys"),
        pytest.param(2.0, 3.0, 4.0, id="needed a second attempt: not measured, and its pause is kept"),
    ],
)
def test_pauses_follow_the_journeys_of_the_link(again_at_s, arrived_at_s, pause_s):
    hand = Hand()
    first = hand.hand_over(4, 1)
    if again_at_s is not None:
        hand.now_s = again_at_s
        assert sent(hand.resolve(first, m.Fate.UNKNOWN), m.Contribution)
    hand.now_s = arrived_at_s
    hand.resolve(first, m.Fate.MERGED)
    second = hand.hand_over(4, 2)
    hand.now_s = arrived_at_s + pause_s - 0.1
    assert not sent(hand.resolve(second, m.Fate.UNKNOWN), m.Contribution)
    hand.now_s = arrived_at_s + pause_s
    assert sent(hand.resolve(second, m.Fate.UNKNOWN), m.Contribution)


def test_a_version_that_an_earlier_want_is_answered_with_is_not_wanted_again_while_it_is_on_its_way():
    hand = Hand()
    hand.now_s = 100.0
    assert not sent(hand.state(versions=(1,)), m.Want), "the Want of the beginning stands"
    hand.now_s = 101.9
    assert not sent(hand.state(versions=(1,)), m.Want)
    hand.now_s = 102.0
    assert sent(hand.state(versions=(1,)), m.Want), "one of them may be lost"
    hand.now_s = 105.9
    assert not sent(hand.state(versions=(1,)), m.Want)


def test_on_a_slow_way_down_wants_are_repeated_as_slowly():
    hand = Hand()
    hand.now_s = 100.0
    hand.state(versions=(1,))
    hand.now_s = 101.5
    hand.version(1)
    hand.boundary(1, installed=(0,))
    hand.now_s = 200.0
    hand.state(versions=(2,))
    hand.now_s = 200.0 + 4.4
    assert not sent(hand.state(versions=(2,)), m.Want)
    hand.now_s = 200.0 + 4.5
    assert sent(hand.state(versions=(2,)), m.Want)


def test_while_a_contribution_is_on_its_way_no_further_ones_pile_up_behind_it():
    """Control gets through and bulk does not: captured each time, what is kept would grow by a model per interval."""
    hand = Hand(fragments=2)
    first = hand.hand_over(4, 1)
    for round_id in range(2, 100):
        hand.boundary(4, copied=(0,))
        said = hand.state(rounds=((round_id, 0),))
        assert not of(said, Capture)
        assert [nothing.round_id for nothing in sent(said, m.Nothing)] == [round_id], "no round waits for it"
    assert len(hand.core.fragments[0].outstanding) == 1
    assert hand.hand_over(4, 100, p=1).steps.from_step == 0, "the other fragment is another matter"
    hand.resolve(first, m.Fate.WAITING)
    assert of(hand.state(rounds=((101, 0),)), Capture)
    (later,) = sent(hand.captured(), m.Contribution)
    assert (later.steps.from_step, later.steps.to_step) == (4, 396), "nothing is lost by it"


def test_what_a_new_aggregator_has_not_got_counts_as_on_its_way_again():
    hand = Hand()
    first = hand.hand_over(4, 1)
    hand.resolve(first, m.Fate.WAITING)
    hand.resolve(first, m.Fate.UNKNOWN)
    hand.boundary(4, copied=(0,))
    assert sent(hand.state(rounds=((2, 0),)), m.Nothing)


def test_the_flush_gets_everything_whatever_is_still_on_its_way():
    """There, "nothing" would mean that no steps are left."""
    hand = Hand()
    hand.hand_over(4, 1)
    hand.state(phase=m.Phase.FLUSHING)
    hand.boundary(1, copied=(0,), stopped=True)
    said = hand.state(phase=m.Phase.FLUSHING, rounds=((2, 0),))
    assert not sent(said, m.Nothing)
    (contribution,) = sent(hand.captured(), m.Contribution)
    assert (contribution.steps.from_step, contribution.steps.to_step) == (4, 5)


def test_a_version_resolves_the_contributions_in_it():
    hand = Hand()
    contribution = hand.hand_over(4, 1)
    merged = m.Merged(
        island_id="a",
        incarnation=1,
        steps=contribution.steps,
        staleness=0.0,
        token_weight=1.0,
        staleness_weight=1.0,
        merge_weight=1.0,
        fresh=True,
    )
    hand.version(1, merged=(merged,))
    assert not hand.core.fragments[0].outstanding


def test_after_stale_the_fragment_takes_the_global_parameters_once():
    hand = Hand()
    contribution = hand.hand_over(4, 1)
    hand.version(1)
    hand.boundary(1, installed=(0,))
    said = hand.resolve(contribution, m.Fate.REFUSED, m.Reason.STALE)
    assert notes(said, "contribution.refused")
    hand.state(versions=(1,))
    assert sent(hand.log, m.Want)[-1].versions == (-1,), "the version at hand is wanted once more"
    (prepare,) = of(hand.version(1), Prepare)
    assert prepare.keep == 0.0
    hand.boundary(2, installed=(0,))
    assert hand.core.fragments[0].overwritten_tokens == 30
    (prepare,) = of(hand.version(2), Prepare)
    assert prepare.keep == 1.0


def test_while_a_version_is_wanted_once_more_older_ones_are_not_taken():
    hand = Hand()
    contribution = hand.hand_over(4, 1)
    hand.version(3)
    hand.boundary(1, installed=(0,))
    hand.resolve(contribution, m.Fate.REFUSED, m.Reason.STALE)
    assert not of(hand.version(2), Prepare)
    hand.state(versions=(3,))
    assert of(hand.version(3), Prepare)


def test_spoilt_steps_are_never_handed_over():
    hand = Hand()
    contribution = hand.hand_over(4, 1)
    hand.resolve(contribution, m.Fate.REFUSED, m.Reason.STALE)
    hand.boundary(3, copied=(0,))
    assert sent(hand.state(rounds=((2, 0),)), m.Nothing)
    assert hand.core.fragments[0].overwritten_tokens == 30


def test_after_not_finite_every_fragment_takes_the_global_parameters_and_a_fresh_optimizer():
    hand = Hand(fragments=2)
    contribution = hand.hand_over(4, 1, p=1)
    said = hand.resolve(contribution, m.Fate.REFUSED, m.Reason.NOT_FINITE)
    assert of(said, RefreshOptimizer)
    assert [of(hand.version(0, p), Prepare)[0].keep for p in range(2)] == [0.0, 0.0]


def test_contributions_from_before_a_recovery_do_not_start_another():
    hand = Hand(fragments=2)
    first, second = hand.hand_over(4, 1, p=0), hand.hand_over(4, 2, p=1)
    assert of(hand.resolve(first, m.Fate.REFUSED, m.Reason.NOT_FINITE), RefreshOptimizer)
    assert not of(hand.resolve(second, m.Fate.REFUSED, m.Reason.NOT_FINITE), RefreshOptimizer)
    for p in range(2):
        hand.version(1, p)
    hand.boundary(1, installed=(0, 1))
    late = m.Resolution(fragment_id=1, from_step=0, to_step=4, fate=m.Fate.REFUSED, reason=m.Reason.NOT_FINITE)
    hand.core.fragments[1].outstanding[(0, 4)] = Pending(second, Backoff(1.0, 1.0), sent_at_s=0.0)
    assert not of(hand.state(resolutions=(late,)), RefreshOptimizer)
    assert not any(f.overwrite for f in hand.core.fragments.values())


@pytest.mark.parametrize("reason", [m.Reason.OVERLAP, m.Reason.IMPLAUSIBLE, m.Reason.RUN_ENDED])
def test_other_refusals_leave_the_local_parameters_alone(reason):
    hand = Hand()
    contribution = hand.hand_over(4, 1)
    said = hand.resolve(contribution, m.Fate.REFUSED, reason)
    assert not of(said, RefreshOptimizer)
    assert of(hand.version(1), Prepare)[0].keep == 1.0


def test_a_resolution_of_something_else_is_ignored():
    hand = Hand()
    contribution = hand.hand_over(4, 1)
    other = m.Resolution(fragment_id=5, from_step=0, to_step=4, fate=m.Fate.MERGED)
    hand.state(resolutions=(other,))
    hand.resolve(contribution, m.Fate.MERGED)
    assert hand.resolve(contribution, m.Fate.REFUSED, m.Reason.STALE) == []


def test_what_was_trained_is_forgotten_once_the_fragments_that_move_have_handed_it_over():
    """A frozen one never does: what an heir trained, a few batches of each share in turn, would be kept for ever."""
    hand = Hand(fragments=2, kinds=(Kind.RDA, Kind.FROZEN))
    for round_id in range(1, 40):
        steps = range(hand.step, hand.step + 4)
        trained = tuple((step, Taken(share=step % 2, share_epoch=0, batch=step // 2)) for step in steps)
        hand.step += 4
        tokens = hand.step * TOKENS_PER_STEP
        hand.feed(Boundary(inner_step=hand.step, tokens=tokens, copied=(0,), trained=trained))
        assert of(hand.state(rounds=((round_id, 0),)), Capture)
        (contribution,) = sent(hand.captured(), m.Contribution)
        assert sum(each.to_batch - each.from_batch for each in contribution.data) == 4
        hand.resolve(contribution, m.Fate.MERGED)
        assert hand.core.remembered_runs <= 8


# --- adopting -------------------------------------------------------------------------------------------------


def test_overwriting_counts_the_steps_it_drops():
    hand = Hand(keep=0.0)
    hand.resolve(hand.hand_over(4, 1), m.Fate.WAITING)
    hand.version(1)
    hand.boundary(3, installed=(0,))
    fragment = hand.core.fragments[0]
    assert fragment.overwritten_tokens == 30
    assert fragment.handed.step == 7
    assert hand.hand_over(2, 2).trained_on == (m.TrainedOn(fragment_version=1, steps=2),)


def test_keeping_drops_nothing():
    hand = Hand(keep=1.0)
    hand.version(1)
    hand.boundary(3, installed=(0,))
    assert hand.core.fragments[0].overwritten_tokens == 0
    assert hand.core.fragments[0].handed.step == 0


def test_the_newest_of_several_versions_is_adopted():
    hand = Hand()
    hand.version(1)
    for number in (2, 4, 3):
        hand.version(number)
    (prepare,) = of(hand.boundary(1, installed=(0,)), Prepare)
    assert prepare.version.fragment_version == 4


def test_a_damaged_version_is_not_taken_and_asked_for_again():
    hand = Hand()
    said = hand.version(1, flaw="digest")
    assert notes(said, "version.refused")
    assert not of(said, Prepare)
    hand.now_s = 5.0
    assert sent(hand.state(versions=(1,)), m.Want)[0].versions == (0,)


def test_a_want_that_brought_nothing_is_sent_again_after_a_pause():
    hand = Hand()
    times = []
    for i in range(200):
        hand.now_s = i / 10
        times += [hand.now_s for _ in sent(hand.state(versions=(1,)), m.Want)]
    assert times[:2] == [2.0, 6.0]  # then the connection itself comes into question: test_islands_hearing.py


def test_each_version_that_arrives_grants_the_next_transfer():
    assert sent(Hand(fragments=2).version(1, 0), m.Want)[0].versions == (1, 0)


# --- state ----------------------------------------------------------------------------------------------------


def test_news_that_is_older_than_what_is_known_is_ignored():
    hand = Hand()
    hand.state(phase=m.Phase.FLUSHING, sequence=50)
    hand.state(phase=m.Phase.RUNNING, sequence=49)
    assert hand.core.phase is m.Phase.FLUSHING


def test_a_new_leader_counts_its_messages_anew():
    hand = Hand()
    hand.state(sequence=500)
    hand.epoch = 2
    hand.state(phase=m.Phase.FLUSHING, sequence=1)
    assert hand.core.phase is m.Phase.FLUSHING
    hand.epoch = 1
    hand.state(phase=m.Phase.RUNNING, sequence=501)
    assert hand.core.phase is m.Phase.FLUSHING


def test_seeds_are_encoded_once_and_again_only_after_silence():
    hand = Hand(joined=False)
    hand.welcome()
    said = [type(a).__name__ for a in hand.state(phase=m.Phase.SEEDING, seed=(0,))]
    assert "EncodeSeed" in said
    assert "EncodeSeed" not in [type(a).__name__ for a in hand.state(phase=m.Phase.SEEDING, seed=(0,))]


def test_progress_follows_the_fleet_and_never_decreases():
    hand = Hand()
    hand.boundary(4)
    hand.state(trained_tokens=400, fleet_ratio=10.0)
    assert hand.core.schedule_tokens(40) == 400
    assert hand.core.schedule_tokens(60) == 600  # 20 own tokens since, ten islands' worth
    hand.boundary(2)
    hand.state(trained_tokens=500, fleet_ratio=1.0)  # it was less than extrapolated
    assert hand.core.schedule_tokens(60) == 600
    assert hand.core.schedule_tokens(170) == 610


def test_a_farewell_names_the_last_counters():
    hand = Hand()
    hand.boundary(7)
    (leave,) = sent(hand.feed(Leaving(reason="SIGTERM")), m.Leave)
    assert (leave.inner_step, leave.tokens, leave.reason) == (7, 70, "SIGTERM")
    assert Hand(joined=False).feed(Leaving(reason="SIGTERM")) == []


def test_the_end_of_training_is_reported_at_once_and_the_island_finishes_with_the_last_versions():
    hand = Hand()
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


# --- several shards -------------------------------------------------------------------------------------------


def of_shard(hand, shard, shards=2, **more):
    """What the aggregator of one shard says: its own count of messages, its own fragments."""
    return hand.state(shard=shard, shards=shards, **more)


def test_each_shard_speaks_of_its_own_fragments_alone():
    hand = Hand(fragments=3)
    of_shard(hand, 0, versions=(5, -1, 6), due_soon=(0, 2))
    of_shard(hand, 1, versions=(-1, 7, -1), due_soon=(1,))
    assert hand.core.published == (5, 7, 6)
    of_shard(hand, 0, versions=(5, 99, 6), due_soon=(1,))
    assert hand.core.published == (5, 7, 6)


def test_copies_are_kept_for_what_any_shard_has_announced():
    hand = Hand(fragments=2)
    of_shard(hand, 0, due_soon=(0,))
    of_shard(hand, 1, due_soon=(1,))
    assert of(hand.log, Watch)[-1].fragments == {0, 1}
    of_shard(hand, 0, due_soon=())
    assert of(hand.log, Watch)[-1].fragments == {1}


def test_a_round_of_one_shard_is_not_closed_by_news_of_another():
    hand = Hand(fragments=2)
    hand.boundary(4)
    of_shard(hand, 1, rounds=((7, 1),))
    of_shard(hand, 0)
    assert [c.fragment_id for c in of(hand.boundary(1, copied=(1,)), Capture)] == [1]
    (contribution,) = sent(hand.captured(1), m.Contribution)
    assert (contribution.round_id, contribution.fragment_id) == (7, 1)


def test_rounds_of_two_shards_may_have_the_same_number():
    hand = Hand(fragments=2)
    hand.boundary(4)
    of_shard(hand, 0, rounds=((1, 0),))
    of_shard(hand, 1, rounds=((1, 1),))
    hand.boundary(1, copied=(0, 1))
    said = sent(hand.captured(0), m.Contribution) + sent(hand.captured(1), m.Contribution)
    assert [(each.round_id, each.fragment_id) for each in said] == [(1, 0), (1, 1)]


def test_only_shard_0_speaks_of_the_phase_the_shares_and_the_progress():
    hand = Hand(fragments=2)
    hand.boundary(4)
    of_shard(hand, 0, trained_tokens=400, fleet_ratio=10.0)
    shares = hand.core.shares
    of_shard(hand, 1, phase=m.Phase.FLUSHING, trained_tokens=9_999, fleet_ratio=99.0, taken_over=(SHARE, SHARE))
    assert (hand.core.phase, hand.core.done) == (m.Phase.RUNNING, False)
    assert hand.core.shares == shares
    assert hand.core.schedule_tokens(40) == 400
    of_shard(hand, 0, phase=m.Phase.FLUSHING)
    assert (hand.core.phase, hand.core.done) == (m.Phase.FLUSHING, True)


def test_epochs_and_sequences_are_compared_within_a_shard():
    hand = Hand(fragments=2)
    hand.epoch = 9
    of_shard(hand, 0, versions=(5, -1), sequence=500)
    hand.epoch = 1
    of_shard(hand, 1, versions=(-1, 7), sequence=3)
    assert hand.core.published == (5, 7)
    of_shard(hand, 1, versions=(-1, 6), sequence=2)
    of_shard(hand, 0, versions=(4, -1), sequence=501)  # of an earlier epoch
    assert hand.core.published == (5, 7)


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


def test_a_backoff_doubles_up_to_its_longest_pause():
    backoff = Backoff(2.0, 8.0)
    pauses = []
    for _ in range(4):
        backoff.tried(0.0)
        pauses.append(backoff.due_at_s)
    assert pauses == [2.0, 4.0, 8.0, 8.0]


# --- against a naive model ------------------------------------------------------------------------------------


class IslandAgainstSteps(RuleBasedStateMachine):
    """Random news and boundaries; the model remembers of each step of each fragment what became of it."""

    @initialize(keep=st.sampled_from([0.0, 0.5, 1.0]))
    def start(self, keep):
        self.hand = Hand(keep=keep, fragments=2)
        self.rounds, self.newest, self.round_id = {}, {0: 0, 1: 0}, 0
        self.copies, self.ready, self.fates = {}, [], {0: {}, 1: {}}
        self.sent, self.forgotten = [], {0: 0, 1: 0}
        self.progress = 0.0

    def note(self, said):
        for action in said:
            if isinstance(action, Capture):
                assert self.copies[action.fragment_id] == action.step, "captures a copy that is gone"
            if isinstance(action, Prepare):
                self.ready.append(action.version.fragment_id)
        for contribution in sent(said, m.Contribution):
            steps, fates = contribution.steps, self.fates[contribution.fragment_id]
            if contribution in self.sent:
                continue
            assert steps.steps == sum(t.steps for t in contribution.trained_on) > 0
            assert steps.tokens == steps.steps * TOKENS_PER_STEP
            for step in range(steps.from_step, steps.to_step):
                assert fates.setdefault(step, "handed") == "handed"
                assert (contribution.fragment_id, step) not in self.handed_steps(), f"step {step} is handed over twice"
            self.sent.append(contribution)

    def handed_steps(self):
        return {(c.fragment_id, s) for c in self.sent for s in range(c.steps.from_step, c.steps.to_step)}

    @rule(steps=st.integers(1, 3), watched=st.booleans())
    def boundary(self, steps, watched):
        installed, self.ready = tuple(dict.fromkeys(self.ready)), []
        for p in installed:
            self.copies.pop(p, None)
        copied = tuple(p for p in (0, 1) if watched)
        self.copies.update(dict.fromkeys(copied, self.hand.step + steps))
        self.note(self.hand.boundary(steps, installed=installed, copied=copied))

    @rule(p=st.integers(0, 1))
    def open_round(self, p):
        self.round_id += 1
        self.rounds[p] = self.round_id
        self.tell()

    @rule()
    def tell(self):
        self.note(self.hand.state(rounds=tuple((r, p) for p, r in self.rounds.items())))

    @rule(p=st.integers(0, 1), skip=st.integers(0, 2))
    def publish(self, p, skip):
        self.newest[p] += 1 + skip
        self.note(self.hand.version(self.newest[p], p))

    @rule(p=st.integers(0, 1), back=st.integers(0, 2))
    def a_late_copy_of_a_version(self, p, back):
        self.note(self.hand.version(max(0, self.newest[p] - back), p))

    @precondition(lambda self: any(f.capturing for f in self.hand.core.fragments.values()))
    @rule()
    def encoded(self):
        for p, fragment in self.hand.core.fragments.items():
            if fragment.capturing:
                self.note(self.hand.captured(p))

    @precondition(lambda self: self.sent)
    @rule(
        data=st.data(),
        fate=st.sampled_from([m.Fate.MERGED, m.Fate.UNKNOWN, m.Fate.WAITING, m.Fate.REFUSED]),
        reason=st.sampled_from([m.Reason.STALE, m.Reason.NOT_FINITE, m.Reason.OVERLAP]),
    )
    def resolve(self, data, fate, reason):
        contribution = data.draw(st.sampled_from(self.sent))
        self.forgotten[contribution.fragment_id] += fate is m.Fate.UNKNOWN  # by an aggregator that had it
        self.note(self.hand.resolve(contribution, fate, reason if fate is m.Fate.REFUSED else None))

    @rule(seconds=st.floats(0.1, 5.0))
    def wait(self, seconds):
        self.hand.now_s += seconds
        self.note(self.hand.feed(Tick()))

    @rule(trained=st.integers(0, 10_000), ratio=st.floats(0.5, 8.0))
    def progress_reported(self, trained, ratio):
        self.note(self.hand.state(trained_tokens=trained, fleet_ratio=ratio))

    @invariant()
    def every_step_is_handed_over_dropped_or_still_here(self):
        if not hasattr(self, "hand"):
            return
        core, handed = self.hand.core, self.handed_steps()
        progress = core.schedule_tokens(self.hand.step * TOKENS_PER_STEP)
        assert progress >= self.progress
        self.progress = progress
        for p, fragment in core.fragments.items():
            sent_steps = sum(1 for q, _ in handed if q == p)
            captured = fragment.capturing.steps if fragment.capturing else 0
            here = self.hand.step - fragment.handed.step
            dropped = fragment.overwritten_tokens // TOKENS_PER_STEP
            assert sent_steps + captured + dropped + here == self.hand.step, (p, fragment)
            assert fragment.version <= self.newest[p]
            assert all(key[1] <= fragment.handed.step for key in fragment.outstanding)
            on_their_way = [pending for pending in fragment.outstanding.values() if not pending.arrived]
            assert len(on_their_way) <= 1 + self.forgotten[p], "contributions pile up"


TestIslandAgainstSteps = IslandAgainstSteps.TestCase
TestIslandAgainstSteps.settings = settings(max_examples=60, stateful_step_count=40)


# --- both sides -----------------------------------------------------------------------------------------------


def test_two_islands_and_an_aggregator_merge_every_step():
    cluster = LinkedCluster("a", "b", total_tokens=1000)
    cluster.train(80)
    assert all(island.core.finished for island in cluster.islands.values())
    books = cluster.aggregator.run.ledger.books().tokens()
    assert books["merged"] == books["trained"] >= 1000
    assert {i.core.fragments[0].version for i in cluster.islands.values()} == set(cluster.aggregator.run.versions)


def test_a_lost_contribution_is_sent_again_and_merged():
    cluster = LinkedCluster("a", total_tokens=400)
    dropped = []

    def lose_the_first(sender, to, message):
        if isinstance(message, m.Contribution) and not dropped:
            dropped.append(message)
            return True
        return False

    cluster.lose = lose_the_first
    cluster.train(120)
    assert dropped
    books = cluster.aggregator.run.ledger.books().tokens()
    assert books["merged"] == books["trained"]


def test_nothing_hangs_when_every_kind_of_message_is_lost_once():
    cluster = LinkedCluster("a", "b", fragments=2, total_tokens=1200)
    seen = set()

    def lose_once(sender, to, message):
        key = sender, type(message)
        return key not in seen and not seen.add(key)

    cluster.lose = lose_once
    cluster.train(150)
    assert cluster.aggregator.run.phase is m.Phase.ENDED
    assert all(island.core.finished for island in cluster.islands.values())
    books = cluster.aggregator.run.ledger.books()
    assert books.in_flight == 0
    assert books.balanced()


def test_a_broker_that_comes_back_empty_loses_nothing():
    cluster = LinkedCluster("a", "b", total_tokens=800)
    cluster.train(10)
    cluster.restart_broker()
    cluster.train(80)
    books = cluster.aggregator.run.ledger.books().tokens()
    assert books["merged"] == books["trained"]


def test_an_island_that_plays_back_all_that_it_has_said_changes_nothing():
    cluster = LinkedCluster("a", "b", total_tokens=2000)
    carry, recorded = cluster._carry, []

    def record(peer, envelope):
        if envelope.sender == "a":
            recorded.append((peer, envelope))
        carry(peer, envelope)

    cluster._carry = record
    cluster.train(60)
    cluster._carry = carry
    assert {type(envelope.message) for _, envelope in recorded} >= {m.Contribution, m.Heartbeat, m.Want}
    versions, books = list(cluster.aggregator.run.versions), cluster.aggregator.run.ledger.books("a").tokens()
    for _ in range(3):
        for peer, envelope in recorded:
            carry(peer, envelope)
        cluster.settle()
    assert list(cluster.aggregator.run.versions) == versions
    assert cluster.aggregator.run.ledger.books("a").tokens() == books
    assert cluster.relay.counters.repeated_messages == 3 * len(recorded)
    cluster.train(120)
    assert all(island.core.finished and island.failed is None for island in cluster.islands.values())
    books = cluster.aggregator.run.ledger.books().tokens()
    assert books["merged"] == books["trained"]


def test_an_island_that_diverged_is_set_back_to_the_global_parameters():
    cluster = LinkedCluster("a", "b")
    cluster.train(2)
    flaw = Flaw(reason=m.Reason.NOT_FINITE, detail="NaN in w0")
    cluster.flaw = lambda message: flaw if isinstance(message, m.Contribution) and message.payload[0] == "a" else None
    cluster.train(6)
    cluster.flaw = lambda message: None
    assert cluster["a"].refreshes >= 1
    cluster.train(20)
    assert 0.0 in cluster["a"].keeps[1:], "the first version is always taken whole"
    books = cluster.aggregator.run.ledger.books("a").tokens()
    assert books["wasted"].get("not_finite", 0) > 0
    assert books["merged"] > 0


def test_a_replaced_process_gives_up_and_its_successor_goes_on():
    cluster = LinkedCluster("a", "b")
    cluster.train(10)
    old = cluster["a"]
    new = cluster.start_island("a")
    old.alive = True  # it was only cut off
    cluster.run_to(cluster.now_s + 1.0)
    new.boundary()
    for _ in range(8):
        cluster.run_to(cluster.now_s + 0.5)
        old.handle(Tick())
        cluster.settle()
    assert old.failed is not None
    assert "another process has joined as 'a'" in old.failed.reason
    cluster.train(10)
    assert new.failed is None
    assert (new.core.incarnation, new.step) == (2, new.core.at.step)
    assert any(m.island_id == "a" and m.incarnation == 2 for m in cluster.aggregator.run.fragments[0].contributions)


def test_an_island_whose_optimizer_was_fresh_gives_it_after_a_sync_interval():
    island = Hand()
    island.feed(Restored(source=m.StateSource.FRESH))
    for step, trained in ((SETTINGS.sync_interval_steps - 1, False), (1, True)):
        island.boundary(step)
        actions = island.hear(m.FetchState(state_id="", parts=(0,)))
        declined = [part for part in sent(actions, m.StatePart) if not part.num_parts]
        assert bool(declined) is not trained
        assert bool(of(actions, CopyState)) is trained
