"""The way back: what a plan chooses for the links that there are, and what it refuses, with a cure."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.base.errors import ConfigError
from broker.gateway.config import BrokerConfig
from broker.wire.messages import Codec
from islands.interface.config import IslandConfig
from ops.forecast.fleet import PLANNED, Assume, Mode, limits_to_raise
from ops.forecast.links import merging_steps
from ops.forecast.pace import forecast
from ops.forecast.planner import choose, notes, plan
from tests.planned_fleets import fleet
from tests.profiles import examples


@pytest.mark.parametrize(
    ("share", "codec", "interval"),
    [
        (0.6, Codec.BF16, 24),
        (0.3, Codec.INT8, 24),
        (0.2, Codec.INT4, 24),
        (0.05, Codec.INT4, 100),
    ],
)
def test_narrow_links_get_a_smaller_codec_first_and_then_a_longer_interval(share, codec, interval):
    needed = forecast(fleet(), Mode.DECOUPLED).down_gbps
    found = choose(fleet(), needed * share).fleet
    assert (found.codec, found.version_codec, found.sync_interval) == (codec, codec, interval)


@pytest.mark.parametrize("codec", [Codec.F32, Codec.INT4])
@pytest.mark.parametrize("fragments", [2, 8])
def test_what_shards_get_leaves_the_brokers_host_again_and_their_versions_enter_it(codec, fragments):
    def found(**changes):
        return forecast(fleet(codec=codec, fragments=fragments, **changes), Mode.DECOUPLED)

    one, two = found(), found(shards=2)
    assert (one.broker_up_gbps, one.broker_down_gbps) == (4 * one.down_gbps, 4 * one.up_gbps)
    assert (two.up_gbps, two.down_gbps) == (one.up_gbps, one.down_gbps)
    assert two.broker_up_gbps == pytest.approx(one.broker_up_gbps + 4 * one.up_gbps)
    assert two.broker_down_gbps == pytest.approx(one.broker_down_gbps + one.down_gbps)


def test_a_bandwidth_below_any_setting_is_refused_with_the_one_that_would_do():
    with pytest.raises(ConfigError, match=r"bandwidth = 1e-06: no codec, H up to 1000 or P is enough") as caught:
        choose(fleet(), 1e-6)
    least = float(caught.value.cure.split("at least ")[1].split()[0])
    assert choose(fleet(), least).fleet.sync_interval == 1000


@pytest.mark.parametrize(("parameters", "step_s"), [(5 * 10**9, 1.0), (70 * 10**9, 10.0), (10**9, 60.0)])
@pytest.mark.parametrize("gbps", [1.0, 7.0, 1000.0])
def test_what_is_chosen_is_neither_too_much_for_the_aggregator_nor_for_a_message(parameters, step_s, gbps):
    asked = fleet(sites=8, parameters=parameters, step_s=step_s, gbps=gbps, held_bytes=1 << 40)
    settled = choose(asked, gbps).fleet
    assert merging_steps(settled) <= settled.sync_interval
    assert limits_to_raise(settled) == {}
    assert settled.max_message_bytes == BrokerConfig().max_message_bytes == IslandConfig().max_message_bytes
    planned = plan(settled)
    assert notes(settled, planned) == []
    assert planned.chosen.sync_interval_steps == settled.sync_interval


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"utilisation": 1.0}, "utilisation = 1.0: must be at least 1e-06 and below 1"),
        ({"fragments": 25}, "fragments = 25: must lie between 1 and 24: at most one falls due"),
        ({"shards": 9}, "shards = 9: must lie between 1 and 8: each has at least one of the fragments"),
        ({"overlap": -1}, "overlap = -1: must lie between 0 and"),
        ({"step_s": 0.0}, "step_time = 0.0: must lie between"),
        ({"sites": 0}, "sites = 0: must be at least 1"),
        ({"parameters": 0}, "params = 0: must lie between"),
        ({"host_memory_gb": 0.0}, "host_memory_gb = 0.0: must lie between 1e-09 and"),
    ],
)
def test_impossible_settings_are_refused_with_a_cure(changes, words):
    with pytest.raises(ConfigError) as caught:
        fleet(**changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "mode", "words"),
    [
        (
            {"latency_s": 10.0},
            Mode.DECOUPLED,
            "sync_interval = 24: latency alone takes 20 s of a round, and H steps 12 s",
        ),
        ({"latency_s": 1.0}, Mode.DP, "dp reaches at most 7.7% here"),
        ({"latency_s": 1.0}, Mode.DILOCO, "diloco reaches at most 85.7% here"),
        ({"latency_s": 1.0}, Mode.STREAMING, "an overlap of 5 steps hides it"),
        ({"host_memory_gb": 0.1}, Mode.DECOUPLED, "is too little for the aggregator beside the broker: it takes 0.2"),
    ],
)
def test_fleets_that_cannot_work_are_refused_with_what_could(changes, mode, words):
    with pytest.raises(ConfigError) as caught:
        plan(fleet(**changes)) if mode is Mode.DECOUPLED else forecast(fleet(**changes), mode)
    assert words in str(caught.value)


@examples(60)
@given(
    st.fixed_dictionaries(
        {
            "parameters": st.integers(1, 10**13),
            "sites": st.integers(1, 40),
            "step_s": st.floats(1e-4, 1e4),
            "gbps": st.none() | st.floats(1e-4, 1e6),
            "latency_s": st.floats(0, 2),
            "sync_interval": st.integers(1, 500),
            "fragments": st.integers(1, 100),
            "overlap": st.integers(0, 50),
            "utilisation": st.floats(0.01, 0.9999),
            "codec": st.sampled_from(Codec),
            "assume": st.sampled_from(Assume),
        }
    ),
    st.sampled_from(PLANNED),
)
@example(  # a median link that is too narrow, and one fragment
    {
        "parameters": 15_623_914,
        "sites": 40,
        "step_s": 1.0,
        "gbps": 1.0,
        "sync_interval": 1,
        "fragments": 1,
        "overlap": 0,
        "utilisation": 0.5,
        "codec": Codec.F32,
    },
    Mode.DECOUPLED,
)
def test_whatever_is_asked_gets_finite_figures_or_a_refusal(asked, mode):
    try:
        found = forecast(fleet(**asked), mode)
    except ConfigError:
        return
    figures = [found.up_gbps, found.down_gbps, found.round_s, found.rounds_apart_s, found.tokens_per_day]
    figures += [found.traffic_gb_per_day, found.sync_interval_steps]
    assert all(math.isfinite(each) and each >= 0 for each in figures)
    assert 0 < found.utilisation <= 1
    assert found.staleness >= 0
    if mode is Mode.DECOUPLED:
        # Older than a version: where merging comes between up and down, and the next round has begun meanwhile; or a
        # link that is always full has a contribution under way up while the last version still comes down.
        one_after_the_other = (found.round_s / asked["step_s"] + 2) / found.sync_interval_steps
        assert found.staleness <= max(1, one_after_the_other, *(each.age for each in found.arrivals))
        assert sum(found.open_shares) <= asked["fragments"] + 1e-6
