"""Observers at a broker: who may ask, how often, what becomes of answers, and that records come back as they were."""

import random
import zlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import Unavailable
from broker.routing.events import AllowListChanged, LookedUp, LookUp
from broker.routing.observers import MOST_OBSERVERS, QUESTIONS_AT_ONCE, QUESTIONS_PER_S, Observers
from broker.wire import messages as m
from broker.wire import packed_records
from broker.wire.frames import decode, encode
from broker.wire.headers import Limits
from broker.wire.identity import Identity, KeyRole
from broker.wire.messages import AGGREGATOR, BROKER, Channel, Envelope, Inquiry, Reason
from broker.wire.records import KeptVersion, LeaseView, Snapshot
from tests.aggregator_hand import beat
from tests.profiles import examples
from tests.relay_bench import RUN, version

ASK = m.Observe(about=Inquiry.SNAPSHOT)
WATCH = m.observing("w")
KEYS = {
    "watch": Identity(role=KeyRole.OBSERVER, name="watch"),
    "paris": Identity(role=KeyRole.ISLAND, name="paris"),
    "any": Identity(role=KeyRole.ISLAND, name="*"),
    "hub": Identity(role=KeyRole.AGGREGATOR, name="hub"),
}


def looked_up(driver):
    return [action for action in driver.actions if isinstance(action, LookUp)]


def test_a_question_is_looked_up_and_its_answer_sent_over_the_same_connection_or_dropped_and_counted(led):
    led.receive(WATCH, ASK, route=b"r")
    (question,) = looked_up(led)
    assert (question.peer, question.envelope.message) == (b"r", ASK)
    answer = m.Observed(question=question.envelope.sequence, detail="", record=b"x" * 10)
    led.event(LookedUp(peer=b"r", to=WATCH, message=answer))
    (sent,) = led.sends
    assert (sent.channel, sent.peer, sent.envelope.sender, sent.envelope.to) == (Channel.BULK, b"r", BROKER, WATCH)
    assert sent.envelope.message == answer
    assert led.relay.counters.sent_bytes == 10
    before = led.relay.counters.sent_messages
    led.block(sent)
    led.event(LookedUp(peer=b"r", to=WATCH, message=answer))
    led.unreachable(sent)
    assert led.sends == []
    assert led.relay.counters.dropped == {"blocked": 1, "unreachable": 1}
    assert led.relay.counters.sent_messages == before - 1


def test_an_observer_is_no_peer_and_is_answered_whatever_run_it_names_for_the_answer_says_which_it_is(led):
    before = led.relay.num_peers
    led.receive(WATCH, ASK, run="other")
    assert led.relay.num_peers == before
    assert [type(each) for each in led.actions] == [LookUp]
    led.receive(AGGREGATOR, version())  # goes to islands that want it, not to observers
    assert led.sent == []
    led.receive("a", beat(), run="other")
    assert led.reason() is Reason.WRONG_RUN


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        *((sender, ASK) for sender in ("a", AGGREGATOR, "standby:s", "join:n", BROKER)),
        (WATCH, beat()),
        (WATCH, m.Observed(question=1, detail="", record=b"")),
    ],
)
def test_nobody_else_may_ask_and_an_observer_may_say_nothing_else(led, sender, message):
    led.receive(sender, message)
    assert led.reason() is Reason.WRONG_ROLE
    led.receive(WATCH, ASK, channel=Channel.CONTROL)
    assert led.reason() is Reason.WRONG_ROLE


@pytest.mark.parametrize("key", ["watch", "paris", "any", "hub", ""])
def test_with_keys_only_an_observers_is_good_for_questions(led, key):
    led.event(AllowListChanged(allowed=KEYS))
    led.receive(WATCH, ASK, key=key)
    if key == "watch":
        assert looked_up(led)
    else:
        assert led.reason() is Reason.WRONG_KEY
        assert not looked_up(led)
    led.receive("paris", beat(), key="watch")
    assert led.reason() is Reason.WRONG_KEY


def test_so_many_questions_at_once_and_then_so_many_a_second():
    observers = Observers()
    heard = [observers.hear(b"r", n, 5.0) for n in range(QUESTIONS_AT_ONCE + 1)]
    assert heard[:-1] == [None] * QUESTIONS_AT_ONCE
    assert heard[-1][0] is Reason.QUEUE_FULL
    assert observers.hear(b"other", 0, 5.0) is None  # by connection
    answered = sum(observers.hear(b"r", 1000 + n, 5.0 + n / 10) is None for n in range(200))  # 10 a second
    assert answered == pytest.approx(20 * QUESTIONS_PER_S, abs=1)


def test_a_number_that_came_before_is_refused_and_a_clock_that_goes_back_gives_nothing():
    observers = Observers()
    assert observers.hear(b"r", 1, 5.0) is None
    assert observers.hear(b"r", 1, 6.0)[0] is Reason.REPLAYED
    for number in range(2, 2 + QUESTIONS_AT_ONCE):
        assert observers.hear(b"r", number, 4.0) is None
    assert observers.hear(b"r", 90, 3.0) is not None


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300), st.floats(0, 2)), max_size=400))
def test_whoever_asks_what_is_remembered_is_bounded_and_nobody_is_answered_too_often(asked):
    observers, now_s, answered = Observers(), 0.0, {}
    for who, number, after_s in asked:
        now_s += after_s
        refusal = observers.hear(bytes([who]), number, now_s)
        assert len(observers) <= MOST_OBSERVERS
        if refusal is None:
            answered.setdefault(who, []).append(now_s)
    if len({who for who, _, _ in asked}) <= MOST_OBSERVERS:
        for times in answered.values():
            assert len(times) <= QUESTIONS_AT_ONCE + QUESTIONS_PER_S * (times[-1] - times[0]) + 1


TEXTS = st.text(max_size=10)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
TABLES = st.dictionaries(TEXTS, PLAIN, max_size=3)
LEASES = st.builds(
    LeaseView,
    holder=TEXTS,
    epoch=st.integers(0, 9),
    in_sync=st.frozensets(TEXTS, max_size=3),
    standbys=st.frozensets(TEXTS, max_size=3),
    age_s=st.floats(-5, 5),
    ended=st.booleans(),
)
SNAPSHOTS = st.builds(
    Snapshot,
    run_id=TEXTS,
    now_s=st.floats(0, 1e10),
    heard_at_s=st.dictionaries(TEXTS, st.floats(0, 1e10), max_size=3),
    members=st.dictionaries(TEXTS, TABLES, max_size=3),
    fragments=st.dictionaries(st.integers(0, 99), TABLES, max_size=3),
    totals=st.lists(TABLES, max_size=2),
    brokers=st.dictionaries(TEXTS, TABLES, max_size=2),
    refusals=st.dictionaries(TEXTS, st.dictionaries(TEXTS, TABLES, max_size=2), max_size=2),
    leases=st.dictionaries(st.integers(0, 63), LEASES, max_size=2),
    evaluation=TABLES,
)
VERSIONS = st.builds(KeptVersion, fragment_id=st.integers(0, 9), found=st.none() | TABLES, known=st.just((1, 2, 3)))


EVENTS = st.lists(
    st.tuples(st.tuples(st.integers(0, 2**60), st.integers(0, 99)), TABLES), unique_by=lambda each: each[0]
).map(lambda events: sorted(events, key=lambda each: each[0]))


@examples(50)
@given(SNAPSHOTS, EVENTS, VERSIONS)
def test_records_come_back_as_they_were(snapshot, events, kept):
    assert packed_records.unpack_snapshot(packed_records.pack_snapshot(snapshot)) == snapshot
    assert packed_records.unpack_version(packed_records.pack_version(kept)) == kept
    record, count = packed_records.pack_events(events)
    assert count == len(events)
    assert packed_records.unpack_events(record) == events


def noise(count):
    """Text that no deflating makes shorter than half."""
    return random.Random(count).randbytes(count // 2).hex()


def test_of_events_that_are_too_many_the_first_are_told_and_a_record_that_is_too_large_is_not():
    events = [((n, 0), {"detail": noise(20_000 + n)}) for n in range(100)]
    record, count = packed_records.pack_events(events)
    assert 0 < count < len(events)
    assert len(record) <= packed_records.MOST_BYTES
    assert packed_records.unpack_events(record) == events[:count]
    too_much = {"detail": noise(4 * packed_records.MOST_BYTES)}
    for pack in (
        lambda: packed_records.pack_events([((1, 0), too_much)]),
        lambda: packed_records.pack_version(KeptVersion(fragment_id=0, found=too_much, known=())),
    ):
        with pytest.raises(packed_records.TooLarge):
            pack()


def test_the_largest_record_passes_the_codec_of_whoever_reads_it():
    """Deflated bytes look like maps and arrays here and there, and a header may have so many only."""
    for seed in range(3):
        record = random.Random(seed).randbytes(packed_records.MOST_BYTES)
        message = m.Observed(question=1, detail="", record=record)
        sent = Envelope(run_id=RUN, sender=BROKER, incarnation=0, sequence=1, to=WATCH, message=message)
        assert decode(encode(sent), Limits()).message == message


BOMB = zlib.compress(bytes(packed_records.MOST_PLAIN_BYTES + 1), 9)


PACKED = [None, {"leases": 3}, {"known": [["x"]]}, [[2, 0, {}], [1, 0, {}]], [1, 2]]


@pytest.mark.parametrize(
    "read", [packed_records.unpack_snapshot, packed_records.unpack_events, packed_records.unpack_version]
)
@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"noise",
        BOMB,
        zlib.compress(b""),
        zlib.compress(b"\xc1"),
        zlib.compress(msgpack.packb({"a": 1}))[:-3],
        *(zlib.compress(msgpack.packb(each)) for each in PACKED),
    ],
    ids=lambda each: f"{len(each)} bytes",
)
def test_a_record_that_is_none_is_an_error_that_says_so(read, record):
    with pytest.raises(Unavailable, match="answer cannot be read"):
        read(record)
