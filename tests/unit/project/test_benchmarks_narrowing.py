"""What the narrowing drill reads out of a run: codecs from a tape, shares, stalls, and when the codec is back."""

import pytest

from aggregator.interface.events import Received
from aggregator.store.tape import event_line
from benchmarks import narrowing
from benchmarks.narrowing import Contributed, Phase
from broker.wire.messages import Codec, Contribution, Encoded, Envelope, TrainedOn
from broker.wire.ranges import StepRange
from ops.chaos.recording import RoundSeen


def encoded(codec, *shape):
    return Encoded(codec=codec, shape=shape, checksum=0, data=b"")


def received(at_s, island, *payload):
    steps = StepRange(from_step=0, to_step=1, from_tokens=0, to_tokens=1)
    trained_on = (TrainedOn(fragment_version=0, steps=1),)
    message = Contribution(round_id=1, fragment_id=0, steps=steps, trained_on=trained_on, payload=payload)
    envelope = Envelope(run_id="r", sender=island, incarnation=1, sequence=1, to="aggregator", message=message)
    return event_line(Received(envelope=envelope), at_s)


def sent(*each):
    return [Contributed(at_s=at_s, island="a", codec=codec) for at_s, codec in each]


def test_the_codec_of_a_contribution_is_that_of_most_of_its_elements_on_the_tape():
    lines = [
        {"tape": 12, "now_s": 0.0},
        received(1.0, "a", encoded(Codec.F32, 40), encoded(Codec.INT8, 8, 8)),
        {"now_s": 2.0, "note": "round.opened", "fields": {}},
        {"now_s": 2.5, "event": "tick"},
        received(3.0, "b", encoded(Codec.BF16, 2)),
    ]
    assert narrowing.contributions_of(lines) == [
        Contributed(at_s=1.0, island="a", codec="int8"),
        Contributed(at_s=3.0, island="b", codec="bf16"),
    ]


@pytest.mark.parametrize(
    ("contributions", "back_s"),
    [
        (sent((9, "int8"), (11, "bf16"), (12, "bf16")), 1.0),
        (sent((11, "int8"), (12, "bf16"), (13, "int8"), (14, "bf16"), (15, "bf16")), 4.0),  # for good
        (sent((9, "bf16"), (11, "bf16"), (12, "int8")), None),
        (sent((9, "bf16")), None),
    ],
)
def test_the_codec_is_back_with_the_first_contribution_that_no_other_codec_follows(contributions, back_s):
    assert narrowing.back_after_s(contributions, 10.0, "bf16") == back_s


def test_a_phase_counts_what_lies_in_it():
    versions = [
        RoundSeen(opened_s=at_s - 1, committed_s=at_s, islands=frozenset(islands))
        for at_s, islands in ((9, "ab"), (11, "ab"), (12, "b"), (13, "b"), (14, "ab"), (20, "ab"))
    ]
    phase = Phase(name="narrow", mbit=8.0, from_s=10.0, to_s=20.0, up_bytes=5_000_000, down_bytes=1_000_000)
    row = narrowing.row_of(
        phase,
        "a",
        pace_s=1.0,
        versions=versions,
        contributions=[*sent((9, "bf16"), (11, "int4"), (15, "int4"), (16, "int8")), *sent((25, "bf16"))],
        steps={"a": [float(i) for i in range(30)], "b": [0.0, 10.0, 11.0, 13.5, *range(14, 30)]},
    )
    assert (row["versions"], row["share"], row["others_share"]) == (4, 0.5, 1.0)
    assert (row["up_fill"], row["down_fill"]) == (0.5, 0.1)
    assert row["codecs"] == "int4 2, int8 1"
    assert (row["stall_ms"], row["others_stall_ms"]) == (0.0, 1500.0)


def test_each_limit_that_is_exceeded_is_said():
    def rows(*, stall_ms=0.0, share=0.5, back_s=30.0):
        good = {"stalls_ms": {"a": 0.0}, "share": 1.0, "back_s": None}
        return [
            good | {"phase": "before"},
            good | {"phase": "narrow", "share": share, "stalls_ms": {"a": stall_ms}},
            good | {"phase": "after", "back_s": back_s},
        ]

    assert narrowing.exceeded(rows(stall_ms=200.0)) == []
    for bad, word in (
        (rows(stall_ms=201.0), "a stood still"),
        (rows(share=0.49), "49%"),
        (rows(share=None), "no version"),
        (rows(back_s=30.1), "30.1 s"),
        (rows(back_s=None), "never"),
    ):
        (said,) = narrowing.exceeded(bad)
        assert word in said
