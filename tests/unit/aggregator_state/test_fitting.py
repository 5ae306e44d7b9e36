"""What an aggregator says of a model that its limits keep out: each cure that it names is tried."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.interface.config import AggregatorConfig
from aggregator.state.model_limits import HEADER_BYTES, fragments_of, least_message_bytes, misfit
from broker.gateway.config import BrokerConfig
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.headers import DEFAULT_LIMITS
from broker.wire.schema import MAX_TEXT
from islands.interface.config import IslandConfig

MIB = 1 << 20
#: Forty tensors of 4 MiB, of which a message holds few.
MANY, FEW = [MIB] * 40, AggregatorConfig(fragments=2, max_message_bytes=24 * MIB)


def tensors(*sizes, kind=Kind.RDA):
    return tuple(TensorSpec(name=f"layers/{i}/w", shape=(n,), dtype="float32", kind=kind) for i, n in enumerate(sizes))


def founded(model, config):
    return fragments_of(model, replace(config, merge="rda"), config)


def said(model, config, **options):
    return str(misfit(founded(model, config), config, **options) or "")


def figure(before, text):
    """The figure that a text names after these words."""
    return int(re.search(before + r" (\d+)", text)[1])


def test_one_tensor_that_is_too_large_is_cut_and_let_in_where_its_sections_have_fragments_enough():
    """Of 300 M elements, 1.2 GB, more than the largest message."""
    model, config = tensors(300_000_000, 1000), AggregatorConfig(islands=2, fragments=4, held_bytes=2 << 30)
    assert said(model, config) == ""
    config = replace(config, max_message_bytes=1 << 30)
    assert said(model, config) == ""
    names = sorted(founded(model, config).tensors())
    assert names == ["layers/0/w#0of2", "layers/0/w#1of2", "layers/1/w"]
    assert list(founded(model, config).whole) == ["layers/1/w", "layers/0/w"]
    one = replace(config, fragments=1)
    fragments = figure("or cut the model into", said(model, one))
    assert said(model, replace(one, fragments=fragments)) == ""


@pytest.mark.parametrize("shape", [(1, 300_000_000), (2, 300_000_000)])
def test_a_tensor_whose_rows_are_too_large_is_named_and_more_fragments_are_no_cure(shape):
    (other,) = tensors(1000)
    model = (replace(other, name="wide", shape=shape), other)
    config = AggregatorConfig(islands=2, max_message_bytes=1 << 30, held_bytes=1 << 30)
    text = said(model, config)
    assert "more fragments do not help, for wide is cut along its first axis alone: make several of it" in text
    assert "raise it at every broker (with peer_queue_bytes and total_queue_bytes), aggregator and island" in text
    message_bytes = figure("must be at least", text)
    held_bytes = figure("held_bytes at the aggregator to", text)
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
        assert said(model, replace(config, max_message_bytes=figure("must be at least", text))) == ""


def test_a_name_without_room_for_the_number_of_a_section_is_refused_by_name():
    model = (replace(tensors(3 * MIB)[0], name="w" * (MAX_TEXT - 3)),)
    config = AggregatorConfig(fragments=2, max_message_bytes=HEADER_BYTES + 8 * MIB)
    with pytest.raises(ValueError, match=r"tensor 'w+' is cut, and no room is left"):
        founded(model, config)
    assert said((replace(model[0], name="w" * (MAX_TEXT - 6)),), config) == ""


def test_where_more_fragments_help_the_fewest_that_do_are_named():
    model, text = tensors(*MANY), said(tensors(*MANY), FEW)
    fragments = figure("or cut the model into", text)
    assert f"{fragments} fragments or more (--fragments)" in text
    assert said(model, replace(FEW, fragments=fragments)) == ""
    assert said(model, replace(FEW, fragments=fragments - 1)) != ""
    text = said(model, FEW, begun=True)  # such a run keeps its fragments
    assert "must be at least" in text
    assert "fragments or more" not in text


def test_where_only_more_fragments_than_h_would_help_h_is_named_too():
    model, config = tensors(*MANY), replace(FEW, sync_interval=4)
    assert "or raise sync_interval = 4 as well, and take more fragments than that" in said(model, config)
    assert said(model, replace(config, sync_interval=24, fragments=24)) == ""


def test_what_is_frozen_has_as_many_fragments_as_messages_can_hold():
    frozen = [replace(tensor, name=f"frozen/{i}") for i, tensor in enumerate(tensors(*MANY, kind=Kind.FROZEN))]
    model, config = (*frozen, *tensors(MIB)), AggregatorConfig(max_message_bytes=24 * MIB)
    assert said(model, config) == ""
    manifest = founded(model, config)
    assert manifest.moving == (0,)
    assert manifest.sizes[1:] == (5 * MIB,) * 8
    one = (replace(frozen[0], shape=(40 * MIB,)), *tensors(MIB))
    assert said(one, config) == ""
    assert len(founded(one, config)) == 1 + 8


def test_a_fragment_of_more_tensors_than_a_message_has_buffers_is_refused():
    model, config = tensors(*[1] * (DEFAULT_LIMITS.max_buffers + 1)), AggregatorConfig(fragments=1)
    assert "take more fragments" in said(model, config)
    assert said(model, replace(config, fragments=2)) == said(model[1:], config) == ""


def test_a_model_whose_names_fill_a_run_record_is_refused_where_standbys_would_need_it():
    model = tuple(replace(each, name=f"{i:0>900}") for i, each in enumerate(tensors(*[1] * 1200)))
    assert "failover = True" in said(model, AggregatorConfig(failover=True))
    assert said(model, AggregatorConfig(failover=True), begun=True) == ""
    assert said(model, AggregatorConfig()) == ""
