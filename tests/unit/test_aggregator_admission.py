"""What is let in, what is not, and why: every reason is produced, and reaches its sender by name."""

import pytest

from aggregator.events import Flaw
from aggregator.ledger.ledger import Ledger
from aggregator.rounds.admission import admit, too_stale
from aggregator.state.run import MOST_WAITING
from broker.wire.messages import Contribution, Fate, Outstanding, Reason, Refused, TrainedOn
from broker.wire.ranges import StepRange
from tests.aggregator_hand import Desk, notes, resolutions, sent, steps


def ask(of, trained_on=None, ledger=None, **facts):
    """Admits a range of an island that trains 10 tokens a step and began at step 0."""
    ledger = ledger or books()
    known = {
        "flaw": None,
        "quarantined": "",
        "current_version": 5,
        "max_staleness": 2,
        "tokens_per_step": 10,
        "most_steps": 1000,
        "free_bytes": 1000,
        "payload_bytes": 100,
        **facts,
    }
    base = known["current_version"] if trained_on is None else None
    contribution = Contribution(
        round_id=1,
        fragment_id=0,
        steps=of,
        trained_on=(TrainedOn(fragment_version=base, steps=of.steps),) if trained_on is None else trained_on,
        payload=None,
    )
    return admit(contribution, life=ledger.life("a", 1), account=ledger.account("a", 1, 0), **known)


def books(start_step=0):
    ledger = Ledger({0: 1})
    ledger.begin("a", 1, start_step, start_step * 10)
    return ledger


def on(*pairs):
    return tuple(TrainedOn(fragment_version=v, steps=s) for v, s in pairs)


def tokens(from_step, to_step, from_tokens, to_tokens):
    return StepRange(from_step=from_step, to_step=to_step, from_tokens=from_tokens, to_tokens=to_tokens)


def test_a_sound_contribution_waits_to_be_merged():
    admission = ask(steps(0, 4))
    assert (admission.fate, admission.reason, admission.first) == (Fate.WAITING, None, True)


@pytest.mark.parametrize(
    ("of", "trained_on", "detail"),
    [
        (steps(4, 4), on((5, 1)), "holds nothing"),
        (steps(4, 2), on((5, 1)), "holds nothing"),
        (tokens(0, 4, 40, 0), None, "holds nothing"),
        (steps(0, 4), on((5, 3)), "accounts for 3 steps of 4"),
        (steps(0, 4), (), "accounts for 0 steps of 4"),
        (steps(0, 4), on((5, 4), (5, 0)), "accounts for"),
        (steps(0, 4), on((-1, 4)), "accounts for"),
        (tokens(0, 4, 0, 41), None, "41 tokens in 4 steps of 10"),
        (tokens(2, 4, 21, 41), None, "token counter 41 at step 4, at most 40"),
    ],
)
def test_counters_that_do_not_fit_each_other_are_implausible(of, trained_on, detail):
    admission = ask(of, trained_on)
    assert (admission.fate, admission.reason) == (Fate.REFUSED, Reason.IMPLAUSIBLE)
    assert detail in admission.detail


def test_steps_before_the_incarnation_began_are_implausible():
    admission = ask(steps(4, 12), ledger=books(start_step=8))
    assert admission.reason is Reason.IMPLAUSIBLE
    assert "before this incarnation began at 8" in admission.detail


def test_more_tokens_than_a_heartbeat_reported_for_that_step_are_implausible():
    ledger = books()
    ledger.report("a", 1, 10, 20)
    assert ask(tokens(0, 10, 0, 100), ledger=ledger).reason is Reason.IMPLAUSIBLE
    assert ask(tokens(0, 10, 0, 20), ledger=ledger).fate is Fate.WAITING


def test_steps_handed_over_before_are_refused_as_overlap_wherever_they_are():
    ledger = books()
    ledger.wait("a", 1, 0, steps(0, 4))
    ledger.merge("a", 1, 0, steps(0, 4))
    ledger.wait("a", 1, 0, steps(4, 8))
    ledger.refuse("a", 1, 0, steps(8, 12), Reason.STALE)
    for of in (steps(2, 6), steps(6, 9), steps(11, 14), steps(0, 14)):
        admission = ask(of, ledger=ledger)
        assert (admission.fate, admission.reason) == (Fate.REFUSED, Reason.OVERLAP), of


def test_copies_are_recognised_with_the_fate_and_the_reason_of_the_first():
    ledger = books()
    ledger.wait("a", 1, 0, steps(0, 4))
    ledger.merge("a", 1, 0, steps(0, 4))
    ledger.wait("a", 1, 0, steps(4, 8))
    ledger.refuse("a", 1, 0, steps(8, 12), Reason.NOT_FINITE)
    seen = [ask(of, ledger=ledger) for of in (steps(0, 4), steps(4, 8), steps(8, 12))]
    assert [(a.fate, a.reason) for a in seen] == [
        (Fate.MERGED, None),
        (Fate.WAITING, None),
        (Fate.REFUSED, Reason.NOT_FINITE),
    ]
    assert not any(a.first for a in seen)


def test_a_future_version_is_refused():
    admission = ask(steps(0, 4), on((5, 2), (6, 2)))
    assert (admission.fate, admission.reason) == (Fate.REFUSED, Reason.FUTURE_VERSION)
    assert admission.detail == "trained on version 6, the newest is 5"


def test_the_oldest_step_decides_whether_a_contribution_is_stale():
    assert ask(steps(0, 4), on((3, 1), (5, 3))).fate is Fate.WAITING
    admission = ask(steps(0, 4), on((2, 1), (5, 3)))
    assert (admission.fate, admission.reason) == (Fate.REFUSED, Reason.STALE)
    assert "3 behind; the limit is 2" in admission.detail
    assert too_stale(on((3, 1)), 5, 2) == ""


def test_one_island_cannot_fill_a_version_with_more_than_a_message_holds():
    """A version repeats who is in it: what is merged and cannot be said could never be published."""
    made = Desk()
    made.gather("a", "b")
    for n in range(MOST_WAITING):
        assert not resolutions(made.offer("a", n, n + 1, round_id=0), "a")
    (resolution,) = resolutions(made.offer("a", MOST_WAITING, MOST_WAITING + 1, round_id=0), "a")
    assert (resolution.fate, resolution.reason) == (Fate.RETRY, Reason.QUEUE_FULL)
    assert "16 of this island wait" in resolution.detail
    assert not resolutions(made.offer("b", 0, 4, round_id=0), "b"), "the others have their own room"


def test_a_full_pool_asks_for_the_same_bytes_again():
    admission = ask(steps(0, 4), payload_bytes=1001)
    assert (admission.fate, admission.reason) == (Fate.RETRY, Reason.QUEUE_FULL)
    assert ask(steps(0, 4), payload_bytes=1000).fate is Fate.WAITING


@pytest.mark.parametrize("reason", [Reason.WRONG_SHAPE, Reason.WRONG_DTYPE, Reason.NOT_FINITE])
def test_a_flawed_payload_is_refused_for_good(reason):
    admission = ask(steps(0, 4), flaw=Flaw(reason=reason, detail="of w0"))
    assert (admission.fate, admission.reason, admission.detail) == (Fate.REFUSED, reason, "of w0")


def test_a_damaged_payload_is_asked_for_again():
    admission = ask(steps(0, 4), flaw=Flaw(reason=Reason.CHECKSUM, detail="of w0"))
    assert (admission.fate, admission.reason) == (Fate.RETRY, Reason.CHECKSUM)


def test_steps_that_cannot_have_been_run_by_now_are_implausible():
    said = ask(steps(0, 8), most_steps=7)
    assert said.reason is Reason.IMPLAUSIBLE
    assert "at most 7" in said.detail


# --- the way back to the sender -------------------------------------------------------------------------------

REFUSALS = {
    Reason.IMPLAUSIBLE: {"steps_": tokens(0, 4, 0, 400)},
    Reason.FUTURE_VERSION: {"base": 9},
    Reason.NOT_FINITE: {"flaw": Flaw(reason=Reason.NOT_FINITE, detail="NaN in w0")},
    Reason.WRONG_SHAPE: {"flaw": Flaw(reason=Reason.WRONG_SHAPE, detail="(2,)")},
    Reason.WRONG_DTYPE: {"flaw": Flaw(reason=Reason.WRONG_DTYPE, detail="int8")},
    Reason.CHECKSUM: {"flaw": Flaw(reason=Reason.CHECKSUM, detail="of w0")},
    Reason.QUEUE_FULL: {"payload_bytes": 10_000},
}


@pytest.mark.parametrize("reason", REFUSALS, ids=str)
def test_a_refusal_reaches_its_sender_the_log_and_the_counters(reason):
    desk = Desk(held_bytes=1000)
    desk.gather("a", "b")
    desk.open_round("a", "b", step=4)
    said = desk.offer("a", 0, 4, **REFUSALS[reason])
    (resolution,) = resolutions(said, "a")
    retry = reason in (Reason.CHECKSUM, Reason.QUEUE_FULL)
    assert (resolution.reason, resolution.fate) == (reason, Fate.RETRY if retry else Fate.REFUSED)
    assert resolution.detail
    (note,) = notes(said, "contribution.retry" if retry else "contribution.refused")
    assert (note["island"], note["reason"]) == ("a", reason)
    assert desk.run.refusals[reason] == (0 if retry else 1)
    assert desk.run.members["a"].refusals.get(reason, 0) == (0 if retry else 1)
    desk.run.ledger.check()
    assert desk.run.ledger.books().balanced()


def test_a_refused_island_does_not_hold_up_the_round():
    desk = Desk()
    desk.gather("a", "b")
    desk.open_round("a", "b", step=4)
    desk.offer("b", 0, 4)
    desk.offer("a", 0, 4, flaw=Flaw(reason=Reason.NOT_FINITE, detail="NaN in w0"))
    assert desk.run.versions == (1,)
    assert [c.island_id for c in desk.run.fragments[0].contributions] == ["b"]


def test_an_unknown_fragment_is_refused_by_message():
    desk = Desk()
    desk.gather("a")
    (refused,) = sent(desk.offer("a", 0, 4, fragment=7), Refused, "a")
    assert (refused.reason, refused.kind) == (Reason.UNKNOWN_FRAGMENT, "contribution")


def test_an_ended_run_refuses_whatever_still_comes():
    desk = Desk(total_tokens=40)
    desk.gather("a")
    desk.beat("a", 4)
    desk.beat("a", 4, stopped=True)
    desk.offer("a", 0, 4)
    assert desk.run.phase == "ended"
    (resolution,) = resolutions(desk.offer("a", 4, 6), "a")
    assert (resolution.fate, resolution.reason) == (Fate.REFUSED, Reason.RUN_ENDED)


def test_a_refusal_whose_news_was_lost_is_told_again_with_its_own_reason():
    """The reason decides what the island does: after "not finite" it must take the global parameters."""
    desk = Desk()
    desk.gather("a", "b")
    desk.open_round("a", "b", step=4)
    desk.offer("a", 0, 4, flaw=Flaw(reason=Reason.NOT_FINITE, detail="NaN in w0"))  # this answer is lost
    said = desk.beat("a", 5, outstanding=(Outstanding(fragment_id=0, from_step=0, to_step=4),))
    (resolution,) = resolutions(said, "a")
    assert (resolution.fate, resolution.reason) == (Fate.REFUSED, Reason.NOT_FINITE)
