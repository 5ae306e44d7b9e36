"""Messages between the hosts of an island, and whether hosts make one."""

import pytest

from broker.base.errors import ConfigError
from broker.wire.fragments import Kind, Region, TensorSpec
from broker.wire.messages import Block, Codec
from broker.wire.schema import Unfit
from islands.agreement import messages as m
from islands.arrays.regions import HeldTensor, check_alike, handed_by, owners_of


def tensor(name="w", shape=(4, 6), dtype="float32", kind=Kind.MEAN):
    return TensorSpec(name=name, shape=shape, dtype=dtype, kind=kind)


def held(*starts, shape=(2, 6), of=None):
    return HeldTensor(tensor=of or tensor(), regions=tuple(Region(start, shape) for start in starts))


def hello(*tensors, tokens=10):
    return m.Hello(token="t", tensors=tensors, tokens_per_step=tokens)


@pytest.mark.parametrize(
    "message",
    [
        hello(held((0, 0))),
        m.Proposal(number=3, step=12, plan=m.Plan(copies=(1, 2), blocks=(Block(number=1, from_batch=0, to_batch=9),))),
        m.CaptureRegions(after=2, fragment_id=1, boundary=2, from_step=3, to_step=7, codec=Codec.INT8),
        m.Goodbye(reason="ended", ended=True),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_and_its_buffers_arrive_as_they_were_sent(message):
    buffers = [b"some bytes", b""]
    found, views = m.unpacked([bytes(frame) for frame in m.packed(message, buffers)])
    assert (found, [bytes(view) for view in views]) == (message, buffers)


def test_what_does_not_fit_its_field_is_not_sent():
    with pytest.raises(Unfit, match="integer"):
        m.packed(m.Use(broker=-1))


def test_every_order_of_the_speaker_says_how_far_it_was():
    for order in m.Order.__args__:
        assert "after" in order.__dataclass_fields__, order


def test_hosts_that_train_the_same_are_one_island_and_the_first_that_has_a_region_hands_it_over():
    ours, theirs = (held((0, 0)), held((2, 0)))
    check_alike(1, (ours,), (theirs,), (10, 10))
    owned = owners_of({0: (ours,), 1: (theirs,), 2: (held((0, 0), (2, 0)),)})
    handed = [handed_by(host, owned)["w"] for host in range(3)]
    assert handed == [{Region((0, 0), (2, 6))}, {Region((2, 0), (2, 6))}, set()]


@pytest.mark.parametrize(
    ("theirs", "field", "says"),
    [
        (hello(held((2, 0), of=tensor(dtype="bfloat16"))), "params w", "bfloat16[4, 6] (mean, 0 unit axes) at host 1"),
        (hello(held((2, 0), of=tensor(kind=Kind.RDA))), "params w", "float32[4, 6] (rda, 0 unit axes) at host 1"),
        (hello(held((2, 0), of=tensor(shape=(4, 7)))), "params w", "float32[4, 7]"),
        (hello(held((2, 0)), held((2, 0), of=tensor("v"))), "params v", "only host 1 has it"),
        (hello(), "params w", "only the speaker has it"),
        (hello(held((2, 0)), tokens=20), "tokens_per_step", "10 at the speaker, 20 at host 1"),
    ],
)
def test_a_host_that_trains_something_else_is_refused_by_name(theirs, field, says):
    with pytest.raises(ConfigError) as caught:
        check_alike(1, (held((0, 0)),), theirs.tensors, (10, theirs.tokens_per_step))
    assert caught.value.field == field
    assert says in caught.value.value
    assert caught.value.cure


@pytest.mark.parametrize("second", [held((0, 3), shape=(4, 3)), held(), held((1, 0), shape=(3, 6))])
def test_regions_that_are_not_the_whole_tensor_are_refused(second):
    with pytest.raises(ConfigError, match="params w = 'the regions of 2 hosts do not make it") as caught:
        owners_of({0: (held((0, 0)),), 1: (second,)})
    assert "the same mesh" in caught.value.cure
