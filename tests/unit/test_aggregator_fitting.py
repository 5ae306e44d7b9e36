"""What an aggregator says of a model that its limits keep out: each cure that it names is tried."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.config import AggregatorConfig
from aggregator.state.model_limits import HEADER_BYTES, fragments_of, least_message_bytes, misfit
from broker.config import BrokerConfig
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.headers import DEFAULT_LIMITS
from broker.wire.schema import MAX_TEXT
from islands.config import IslandConfig

MIB = 1 << 20


def tensors(*sizes, kind=Kind.RDA):
    return tuple(TensorSpec(name=f"layers/{i}/w", shape=(n,), dtype="float32", kind=kind) for i, n in enumerate(sizes))


def founded(model, config):
    return fragments_of(model, replace(config, merge="rda"), config)


#: The largest message where it is given.
GIVEN = 1 << 30


def said(model, config, **options):
    found = misfit(founded(model, config), config, **options)
    return "" if found is None else str(found)


def test_one_tensor_that_is_too_large_is_cut_and_let_in_where_its_sections_have_fragments_enough():
    """Of 300 M elements, 1.2 GB, more than the largest message."""
    model, config = tensors(300_000_000, 1000), AggregatorConfig(islands=2, fragments=4, held_bytes=2 << 30)
    assert said(model, config) == ""
    config = replace(config, max_message_bytes=GIVEN)
    assert said(model, config) == ""
    names = sorted(founded(model, config).tensors())
    assert names == ["layers/0/w#0of2", "layers/0/w#1of2", "layers/1/w"]
    assert list(founded(model, config).whole) == ["layers/1/w", "layers/0/w"]
    one = replace(config, fragments=1)
    fragments = int(re.search(r"or cut the model into (\d+) fragments or more", said(model, one))[1])
    assert said(model, replace(one, fragments=fragments)) == ""


@pytest.mark.parametrize("shape", [(1, 300_000_000), (2, 300_000_000)])
def test_a_tensor_whose_rows_are_too_large_is_named_and_more_fragments_are_no_cure(shape):
    (other,) = tensors(1000)
    model = (replace(other, name="wide", shape=shape), other)
    config = AggregatorConfig(islands=2, max_message_bytes=GIVEN, held_bytes=1 << 30)
    text = said(model, config)
    assert "more fragments do not help, for wide is cut along its first axis alone: make several of it" in text
    assert "raise it at every broker (with peer_queue_bytes and total_queue_bytes), aggregator and island" in text
    message_bytes = int(re.search(r"must be at least (\d+)", text)[1])
    held_bytes = int(re.search(r"held_bytes at the aggregator to (\d+)", text)[1])
    raised = replace(config, max_message_bytes=message_bytes, held_bytes=held_bytes)
    assert said(model, raised) == ""
    assert said(model, replace(raised, held_bytes=held_bytes - 1)) != ""
    # Broker and island take the same figures.
    BrokerConfig(max_message_bytes=message_bytes, peer_queue_bytes=message_bytes)
    IslandConfig(max_message_bytes=message_bytes)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 4), st.integers(1, 30))
def test_the_limit_that_is_named_lets_the_model_in_however_it_is_cut_then(sizes, fragments, most):
    model = tensors(*sizes)
    config = AggregatorConfig(fragments=fragments, max_message_bytes=least_message_bytes(most))
    text = said(model, config)
    if text:
        assert said(model, replace(config, max_message_bytes=int(re.search(r"must be at least (\d+)", text)[1]))) == ""


def test_a_name_without_room_for_the_number_of_a_section_is_refused_by_name():
    model = (replace(tensors(3 * MIB)[0], name="w" * (MAX_TEXT - 3)),)
    config = AggregatorConfig(fragments=2, max_message_bytes=HEADER_BYTES + 8 * MIB)
    with pytest.raises(ValueError, match=r"tensor 'w+' is cut, and no room is left"):
        founded(model, config)
    assert said((replace(model[0], name="w" * (MAX_TEXT - 6)),), config) == ""


def test_where_more_fragments_help_the_fewest_that_do_are_named():
    model = tensors(*[MIB] * 40)
    config = AggregatorConfig(fragments=2, max_message_bytes=24 * MIB)
    fragments = int(re.search(r"or cut the model into (\d+) fragments or more \(--fragments\)", said(model, config))[1])
    assert said(model, replace(config, fragments=fragments)) == ""
    assert said(model, replace(config, fragments=fragments - 1)) != ""


def test_where_only_more_fragments_than_h_would_help_h_is_named_too():
    model = tensors(*[MIB] * 40)
    config = AggregatorConfig(fragments=2, sync_interval=4, max_message_bytes=24 * MIB)
    assert "or raise sync_interval = 4 as well, and take more fragments than that" in said(model, config)
    assert said(model, replace(config, sync_interval=24, fragments=24)) == ""


def test_what_is_frozen_has_as_many_fragments_as_messages_can_hold():
    frozen = [replace(tensor, name=f"frozen/{i}") for i, tensor in enumerate(tensors(*[MIB] * 40, kind=Kind.FROZEN))]
    model, config = (*frozen, *tensors(MIB)), AggregatorConfig(max_message_bytes=24 * MIB)
    assert said(model, config) == ""
    manifest = founded(model, config)
    assert manifest.moving == (0,)
    assert manifest.sizes[1:] == (5 * MIB,) * 8
    one = (replace(frozen[0], shape=(40 * MIB,)), *tensors(MIB))
    assert said(one, config) == ""
    assert len(founded(one, config)) == 1 + 8


def test_a_run_that_has_begun_keeps_its_fragments():
    text = said(tensors(*[MIB] * 40), AggregatorConfig(fragments=2, max_message_bytes=24 * MIB), begun=True)
    assert "must be at least" in text
    assert "fragments or more" not in text


@pytest.mark.parametrize(
    ("count", "told"), [(DEFAULT_LIMITS.max_buffers, False), (DEFAULT_LIMITS.max_buffers + 1, True)]
)
def test_a_fragment_of_more_tensors_than_a_message_has_buffers_is_refused(count, told):
    model, config = tensors(*[1] * count), AggregatorConfig(fragments=1)
    text = said(model, config)
    assert bool(text) is told
    if told:
        assert "take more fragments" in text
        assert said(model, replace(config, fragments=2)) == ""


def test_a_model_whose_names_fill_a_run_record_is_refused_where_standbys_would_need_it():
    model = tuple(replace(each, name=f"{i:0>900}") for i, each in enumerate(tensors(*[1] * 1200)))
    assert "failover = True" in said(model, AggregatorConfig(failover=True))
    assert said(model, AggregatorConfig(failover=True), begun=True) == ""
    assert said(model, AggregatorConfig()) == ""
