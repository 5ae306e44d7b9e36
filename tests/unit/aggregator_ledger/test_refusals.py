"""What is let in, what is not, and why: every reason is produced, and reaches its sender by name."""

import pytest

from aggregator.interface.events import Flaw
from aggregator.ledger.ledger import Ledger
from aggregator.ledger.refusals import admit, too_stale
from aggregator.state.fragment import MOST_WAITING
from broker.wire.messages import Contribution, DataRange, Fate, Reason, Refused, TrainedOn
from broker.wire.ranges import StepRange
from tests.aggregator_hand import desk, notes, resolutions, sent, steps


def ask(of, trained_on=None, ledger=None, *, most_steps=1000, payload_bytes=100):
    """Admits a range of an island that trains 10 tokens a step and began at step 0; the newest version is 5."""
    ledger = ledger or books()
    trained_on = on((5, of.steps)) if trained_on is None else trained_on
    return admit(
        Contribution(round_id=1, fragment_id=0, steps=of, trained_on=trained_on, payload=None),
        life=ledger.life("a", 1),
        account=ledger.account("a", 1, 0),
        flaw=None,
        quarantined="",
        current_version=5,
        oldest_allowed=3,
        tokens_per_step=10,
        most_steps=most_steps,
        free_bytes=1000,
        payload_bytes=payload_bytes,
    )


def books(start_step=0):
    ledger = Ledger({0: 1})
    ledger.begin("a", 1, start_step, start_step * 10)
    return ledger


def known():
    """Four steps were merged, four wait to be, and four were refused."""
    ledger = books()
    ledger.wait("a", 1, 0, steps(0, 4))
    ledger.merge("a", 1, 0, steps(0, 4))
    ledger.wait("a", 1, 0, steps(4, 8))
    ledger.refuse("a", 1, 0, steps(8, 12), Reason.NOT_FINITE)
    return ledger


def on(*pairs):
    return tuple(TrainedOn(fragment_version=v, steps=s) for v, s in pairs)


def tokens(from_step, to_step, from_tokens, to_tokens):
    return StepRange(from_step=from_step, to_step=to_step, from_tokens=from_tokens, to_tokens=to_tokens)


@pytest.mark.parametrize(
    ("of", "facts", "detail"),
    [
        (steps(4, 4), {"trained_on": on((5, 1))}, "holds nothing"),
        (steps(4, 2), {"trained_on": on((5, 1))}, "holds nothing"),
        (tokens(0, 4, 40, 0), {}, "holds nothing"),
        (steps(0, 4), {"trained_on": on((5, 3))}, "accounts for 3 steps of 4"),
        (steps(0, 4), {"trained_on": ()}, "accounts for 0 steps of 4"),
        (steps(0, 4), {"trained_on": on((5, 4), (5, 0))}, "accounts for"),
        (steps(0, 4), {"trained_on": on((-1, 4))}, "accounts for"),
        (tokens(0, 4, 0, 41), {}, "41 tokens in 4 steps of 10"),
        (tokens(2, 4, 21, 41), {}, "token counter 41 at step 4, at most 40"),
        (steps(4, 12), {"ledger": books(start_step=8)}, "before this incarnation began at 8"),
        (steps(0, 8), {"most_steps": 7}, "at most 7"),
    ],
)
def test_counters_that_do_not_fit_each_other_are_implausible(of, facts, detail):
    admission = ask(of, **facts)
    assert (admission.fate, admission.reason) == (Fate.REFUSED, Reason.IMPLAUSIBLE)
    assert detail in admission.detail


def test_more_tokens_than_a_heartbeat_reported_for_that_step_are_implausible():
    ledger = books()
    ledger.report("a", 1, 10, 20)
    assert ask(tokens(0, 10, 0, 100), ledger=ledger).reason is Reason.IMPLAUSIBLE
    assert ask(tokens(0, 10, 0, 20), ledger=ledger).fate is Fate.WAITING


def test_steps_handed_over_before_are_refused_as_overlap_wherever_they_are():
    for of in (steps(2, 6), steps(6, 9), steps(11, 14), steps(0, 14)):
        admission = ask(of, ledger=known())
        assert (admission.fate, admission.reason) == (Fate.REFUSED, Reason.OVERLAP), of


def test_copies_are_recognised_with_the_fate_and_the_reason_of_the_first():
    seen = [ask(steps(first, first + 4), ledger=known()) for first in (0, 4, 8, 12)]
    assert [(a.fate, a.reason, a.first) for a in seen] == [
        (Fate.MERGED, None, False),
        (Fate.WAITING, None, False),
        (Fate.REFUSED, Reason.NOT_FINITE, False),
        (Fate.WAITING, None, True),  # none of a copy
    ]


def test_a_future_version_is_refused():
    admission = ask(steps(0, 4), on((5, 2), (6, 2)))
    assert (admission.fate, admission.reason) == (Fate.REFUSED, Reason.FUTURE_VERSION)
    assert admission.detail == "trained on version 6, the newest is 5"


def test_the_oldest_step_decides_whether_a_contribution_is_stale():
    assert ask(steps(0, 4), on((3, 1), (5, 3))).fate is Fate.WAITING
    admission = ask(steps(0, 4), on((2, 1), (5, 3)))
    assert (admission.fate, admission.reason) == (Fate.REFUSED, Reason.STALE)
    assert "3 behind; the limit is 2" in admission.detail
    assert too_stale(on((3, 1)), 5, 3) == ""


def test_one_island_cannot_fill_a_version_with_more_than_a_message_holds():
    """A version repeats who is in it: what is merged and cannot be said could never be published."""
    made = desk("a", "b")
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


REFUSALS = {
    Reason.IMPLAUSIBLE: {"steps_": tokens(0, 4, 0, 400)},
    Reason.FUTURE_VERSION: {"base": 9},
    Reason.NOT_FINITE: {"flaw": Flaw(reason=Reason.NOT_FINITE, detail="NaN in w0")},
    Reason.WRONG_SHAPE: {"flaw": Flaw(reason=Reason.WRONG_SHAPE, detail="(2,)")},
    Reason.WRONG_DTYPE: {"flaw": Flaw(reason=Reason.WRONG_DTYPE, detail="int8")},
    Reason.CHECKSUM: {"flaw": Flaw(reason=Reason.CHECKSUM, detail="of w0")},
    Reason.SHARE_MOVED: {"data": (DataRange(share=9, share_epoch=0, from_batch=0, to_batch=4),)},
    Reason.QUEUE_FULL: {"payload_bytes": 10_000},
}


@pytest.mark.parametrize("reason", REFUSALS, ids=str)
def test_a_refusal_reaches_its_sender_the_log_and_the_counters(reason):
    made = desk("a", "b", held_bytes=1000)
    made.open_round("a", "b", step=4)
    said = made.offer("a", 0, 4, **REFUSALS[reason])
    (resolution,) = resolutions(said, "a")
    retry = reason in (Reason.CHECKSUM, Reason.QUEUE_FULL)
    assert (resolution.reason, resolution.fate) == (reason, Fate.RETRY if retry else Fate.REFUSED)
    flaw = REFUSALS[reason].get("flaw")
    assert resolution.detail
    assert flaw is None or resolution.detail == flaw.detail
    (note,) = notes(said, "contribution.retry" if retry else "contribution.refused")
    assert (note["island"], note["reason"]) == ("a", reason)
    assert made.refusals[reason] == (0 if retry else 1)
    assert made.members["a"].refusals.get(reason, 0) == (0 if retry else 1)
    made.check_books()


def test_an_unknown_fragment_is_refused_by_message():
    (refused,) = sent(desk("a").offer("a", 0, 4, fragment=7), Refused, "a")
    assert (refused.reason, refused.kind) == (Reason.UNKNOWN_FRAGMENT, "contribution")


def test_an_ended_run_refuses_whatever_still_comes():
    made = desk("a", total_tokens=40)
    made.beat("a", 4)
    made.beat("a", 4, stopped=True)
    made.offer("a", 0, 4)
    assert made.phase == "ended"
    (resolution,) = resolutions(made.offer("a", 4, 6), "a")
    assert (resolution.fate, resolution.reason) == (Fate.REFUSED, Reason.RUN_ENDED)
