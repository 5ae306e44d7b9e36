"""A client's end of the bulk channel: credit that a connection did not take is given again."""

from broker.chunks import heads
from broker.chunks.heads import Credit
from broker.chunks.sending import Outflow
from broker.transport.chunked import Chunked
from broker.wire.headers import DEFAULT_LIMITS

CONNECTION = 1


def chunks_of(nbytes):
    """The chunks of a message, as far as they go without credit."""
    out, found = Outflow(), []
    out.put([b"header", bytes(nbytes)])
    while (step := out.next()) is not None:
        out.sent(step, 0.0)
        found.append([bytes(memoryview(frame)) for frame in step.frames])
    return found


def test_credit_that_a_connection_did_not_take_is_given_again_soon():
    takes, given = [], []

    def put(frames, subflow):
        if takes:
            given.extend(frames)
        return bool(takes)

    chunked = Chunked(put, DEFAULT_LIMITS)
    first, *_ = chunks_of(1 << 20)
    chunked.take_in(first, CONNECTION, 0.0)
    chunked.go_on(CONNECTION, 0.0)
    assert chunked.full, "its sender may wait for that alone"
    takes.append(True)
    chunked.go_on(CONNECTION, 0.0)
    (credit,) = map(heads.read, given)
    assert isinstance(credit, Credit)
    assert credit.received == sum(map(len, first[1:]))
    assert not chunked.full


def test_without_a_connection_there_is_nothing_to_try_again():
    chunked = Chunked(lambda frames, subflow: False, DEFAULT_LIMITS)
    chunked.take_in(chunks_of(1 << 20)[0], CONNECTION, 0.0)
    chunked.go_on(0, 0.0)
    assert not chunked.full
