"""What is sent over a link follows its rate: the meters, the ladder, and the choices of islands and aggregators."""

from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.chunks.choices import BYTES, SHARES, Demand, Ladder, Level, LinkChoice, VersionCodec
from broker.chunks.chunk_heads import Credit
from broker.chunks.meter import SAMPLES, Link, RateMeter, ReceivingMeter, SendingMeter
from broker.chunks.sending import Outflow
from broker.wire.messages import Codec, LinkUse, Pacing, Recipe

WIDE, NARROW = 1e6, 5e4  # bytes/s: one a twentieth of the other
RATES = st.floats(1e2, 1e9)


def look(ladder, rate, demand, seconds, from_s=0.0):
    """Looks twice a second; returns the moments at which the level changed, and to what."""
    found = []
    for k in range(round(2 * seconds)):
        now_s = from_s + k / 2
        if ladder.look(rate, demand, now_s):
            found.append((now_s - from_s, ladder.level))
    return found


# --- meters ---------------------------------------------------------------------------------------------------------


class Wire:
    """A link: a rate and a delay each way. Sends chunks as an outflow would, and notes them."""

    def __init__(self, rate, delay_s, chunk=32 << 10):
        self.rate, self.delay_s, self.chunk, self.now_s, self.free_s = rate, delay_s, chunk, 0.0, 0.0

    def carry(self, meter, chunks, window):
        """A message of so many chunks, of which a few are under way at a time."""
        notes, sent = [], []
        for k in range(chunks):
            now_s = self.now_s if k < window else max(self.now_s, notes[k - window])
            self.free_s = max(self.free_s, now_s) + self.chunk / self.rate
            sent.append(now_s)
            notes.append(self.free_s + 2 * self.delay_s)
        for sent_s, noted_s in zip(sent, notes, strict=True):
            meter.noted(self.chunk, sent_s, noted_s)
        self.now_s = notes[-1] + 1.0


@pytest.mark.parametrize(
    ("rate", "delay_s", "window"),
    [*((rate, s, 16) for rate in (1e4, 1e6, 1e8) for s in (0.0005, 0.04)), (1e8, 0.04, 2)],
)
def test_a_rate_is_measured_through_any_delay_also_where_the_sender_waits_for_notes(rate, delay_s, window):
    meter, wire = SendingMeter(), Wire(rate, delay_s)
    for _ in range(3):
        wire.carry(meter, chunks=16, window=window)
    assert meter.bytes_per_s == pytest.approx(rate, rel=0.3 if window == 16 else 0.01)
    assert meter.round_trip_s == pytest.approx(wire.chunk / rate + 2 * delay_s, rel=0.01)


def test_a_rate_that_changes_is_known_after_three_samples_and_one_is_not_believed():
    meter = RateMeter()
    for _ in range(2):
        meter.moved(1 << 20, 0.1)
    assert meter.bytes_per_s is None
    for _ in range(SAMPLES):
        meter.moved(1 << 20, 0.1)
    meter.moved(1 << 20, 1e-9)
    assert meter.bytes_per_s == pytest.approx(10 * (1 << 20))
    for _ in range(3):
        meter.moved(1 << 16, 0.5)
    assert meter.bytes_per_s == pytest.approx(1 << 17)


def test_what_comes_is_measured_between_the_chunks_of_a_message():
    meter, now_s = ReceivingMeter(), 0.0
    for _ in range(4):
        now_s += 60.0  # nothing was sent: it says nothing of the link
        for k in range(8):
            now_s += 0.1
            meter.arrived(32 << 10, now_s, goes_on=k > 0)
    assert meter.bytes_per_s == pytest.approx((32 << 10) / 0.1)


def test_an_outflow_tells_its_meter_what_is_noted():
    meter = SendingMeter()
    out, now_s, ends = Outflow(meter), 0.0, deque()
    out.put([b"head", bytes(1 << 20)])
    while out or ends:
        while (step := out.next()) is not None:
            out.sent(step, now_s)
            ends.append(out.given_bytes)
        now_s += 0.5  # the link's time of a chunk
        out.credited(Credit(ends.popleft(), 1 << 30), now_s)
    assert meter.bytes_per_s == (32 << 10) / 0.5
    assert meter.round_trip_s == 0.5


# --- the ladder -----------------------------------------------------------------------------------------------------


def test_a_link_that_has_room_or_is_not_known_changes_nothing():
    ladder = Ladder(Codec.BF16, shares=True)
    assert look(ladder, WIDE, 0.1 * WIDE / 2, seconds=60) == []
    assert look(ladder, None, 1e9, 60) == look(ladder, 1.0, None, 60) == []


def test_a_twentieth_of_a_link_is_met_by_narrower_numbers_and_the_old_ones_come_back():
    ladder, demand = Ladder(Codec.BF16, shares=True), 0.08 * WIDE / 2
    assert look(ladder, WIDE, demand, 20) == []
    assert look(ladder, NARROW, demand, 60, from_s=20) == [(2.0, Level(Codec.INT4))]
    assert look(ladder, WIDE, demand, 60, from_s=80) == [(5.0, Level(Codec.BF16))]


def test_what_is_too_narrow_for_the_narrowest_is_used_for_fewer_rounds():
    ladder = Ladder(Codec.BF16, shares=True)
    [(_, level)] = look(ladder, 1e4, 1e5, 60)
    assert level == Level(Codec.INT4, 1 / 16)
    assert Ladder(Codec.INT4, shares=False).look(1.0, 1e9, 0.0) is False


def test_a_moment_is_no_reason():
    ladder = Ladder(Codec.BF16, shares=True)
    for k in range(100):
        assert not ladder.look(NARROW if k % 4 == 0 else WIDE, 0.1 * WIDE, k / 2)


@given(RATES, RATES, st.lists(st.floats(0.9, 1.1), min_size=40, max_size=40))
def test_a_rate_that_wobbles_moves_it_once_at_most(rate, demand, wobbles):
    ladder, changes = Ladder(Codec.F32, shares=True), 0
    for k, wobble in enumerate(wobbles):
        changes += ladder.look(rate * wobble, demand, 10.0 * k)
    assert changes <= 1 + (ladder.level.share < 1 or ladder.level.codec is not Codec.F32)


@given(RATES, RATES)
def test_it_ends_at_what_the_link_carries_or_at_the_least(rate, demand):
    ladder = Ladder(Codec.F32, shares=True)
    look(ladder, rate, demand, 30)
    least = BYTES[Codec.INT4] * SHARES[-1]
    assert ladder.level.price * demand <= 0.8 * rate or ladder.level.price == least


def test_demand_is_what_rounds_ask_for_whatever_their_pace():
    demand = Demand(4)
    for k in range(4):
        demand.asked(1000, 3.0 * k)
        assert demand.elements_per_s is None  # a fragment was not asked for yet
    for k in range(4, 40):
        demand.asked(1000, 3.0 * k)
    assert demand.elements_per_s == pytest.approx(1000 / 3)


def asked(choice, rate, seconds):
    """A round of 10,000 elements each second; the link is looked at with each. Returns when it changed."""
    found = []
    for now_s in map(float, range(seconds)):
        choice.asked(10_000, now_s)
        if choice.look(Link(rate, rate, 0.08), now_s):
            found.append(now_s)
    return found


def test_an_island_says_what_it_sends_and_what_it_knows():
    choice = LinkChoice(Recipe(), 8, shares=True)
    assert choice.use == LinkUse(up=None, down=None, round_trip_s=None, codec=Codec.BF16, share=1.0)
    assert len(asked(choice, 2_000.0, 60)) == 1
    assert choice.use == LinkUse(up=2_000.0, down=2_000.0, round_trip_s=0.08, codec=Codec.INT4, share=1 / 8)
    assert choice.rounds == 8


@pytest.mark.parametrize("recipe", [Recipe(adapt=False), Recipe(pacing=Pacing.LOCKSTEP, quorum=0)])
def test_it_may_be_told_not_to_and_where_islands_wait_all_send_the_same(recipe):
    choice = LinkChoice(recipe, 8, shares=True)
    assert asked(choice, 1.0, 60) == []
    assert choice.codec is recipe.codec


def beat(down):
    return SimpleNamespace(link=LinkUse(up=None, down=down, round_trip_s=None, codec=Codec.BF16, share=1.0))


def merges(choice, beats, seconds, from_s=0.0):
    told = [choice.merges(k % 4, beats, from_s + k) for k in range(seconds)]
    return [each for each in told if each is not None]


def versions(recipe=None, ours=range(4)):
    return VersionCodec(recipe or Recipe(), [10_000] * 4, ours, range(4))


def test_versions_follow_the_narrowest_link_of_those_that_are_here_and_whole_ones_stay_whole():
    choice = versions()
    assert merges(choice, [beat(WIDE), beat(None), None], 30) == []
    assert merges(choice, [beat(WIDE), beat(10_000.0)], 30, from_s=30) == [10_000.0]
    assert choice.codec is Codec.INT4
    assert merges(choice, [beat(WIDE)], 30, from_s=60) == [WIDE]  # the other one has gone
    assert choice.codec is Codec.BF16
    whole = versions(Recipe(version_codec=Codec.F32))
    assert merges(whole, [beat(1.0)], 60) == []
    assert whole.codec is Codec.F32


def test_a_shard_counts_what_the_others_send_over_the_same_link():
    alone, shard = versions(), versions(ours=(0,))
    for k in range(60):
        alone.merges(k % 4, [beat(20_000.0)], float(k))
        shard.merges(0, [beat(20_000.0)], 4.0 * k)
    assert alone.codec is shard.codec is Codec.INT8
