"""The plan of a fleet: figures that can be checked by hand, the way back, and what is refused."""

import argparse
import json
import math
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.config import BrokerConfig
from broker.errors import ConfigError
from broker.lengths import encoded_bytes
from broker.messages import Codec
from ops import cli
from ops.goodput.simulation import expected_goodput
from ops.planning import command as planning
from ops.planning.choosing import choose
from ops.planning.fleet import MESSAGE_LIMIT_BYTES, Fleet, Site, largest_message_bytes, merging_per_cycle_s
from ops.planning.footprint import contribution_bytes, cut, evenly, version_bytes, wire_of
from ops.planning.links import Assume, Mode
from ops.planning.planner import forecast, plan, utilisation_curve
from ops.planning.sizing import parse_parameters, read_model
from ops.planning.view import notes

N = 1_000_000


def site(**changes):
    return Site(**({"name": "site", "step_s": 0.5, "tokens_per_step": 1000} | changes))


def fleet(sites=4, **changes):
    shared = {name: changes.pop(name) for name in ("step_s", "gbps", "latency_s", "accelerators") if name in changes}
    values = {"parameters": N, "sites": (site(**shared),) * sites}
    return Fleet(**(values | changes))


# --- bytes ----------------------------------------------------------------------------------------------------------


def test_a_round_costs_the_encoded_fragment_and_a_header():
    assert contribution_bytes((1000, 24), Codec.BF16) == 2048 + 270 + 2 * 75
    assert version_bytes((1000, 24), Codec.F32, islands=3) == 4096 + 270 + 2 * 75 + 3 * 200
    assert contribution_bytes((1000,), Codec.INT4) == encoded_bytes(Codec.INT4, 1000) + 345 == 516 + 345


@pytest.mark.parametrize("codec", Codec)
def test_a_cycle_moves_every_parameter_once(codec):
    wire = wire_of(evenly(N + 3, 8), codec=codec, version_codec=Codec.F32, islands=4)
    assert wire.rounds == 8
    bits = {Codec.F32: 32, Codec.BF16: 16, Codec.INT8: 8.125, Codec.INT4: 4.125}[codec]
    assert wire.cycle_up_bytes == pytest.approx(N * bits / 8, rel=0.01)
    assert wire.cycle_down_bytes == pytest.approx(4 * N, rel=0.01)


def test_fragments_cut_by_number_are_even_and_complete():
    payload = evenly(10, 4)
    assert payload.parameters == 10
    assert [sum(f) for f in payload.fragments] == [3, 3, 2, 2]
    assert cut(10, (), 4) == payload


# --- bandwidth and time ---------------------------------------------------------------------------------------------


def test_decoupled_needs_the_model_once_per_interval_in_each_direction():
    found = forecast(fleet(sync_interval_steps=24, fragments=8), Mode.DECOUPLED)
    assert found.up_gbps == pytest.approx(N * 2 * 8e-9 / 12, rel=2e-3)
    assert found.down_gbps == pytest.approx(N * 4 * 8e-9 / 12, rel=4e-3)
    assert found.broker_up_gbps == 4 * found.down_gbps
    assert found.broker_down_gbps == 4 * found.up_gbps
    assert found.utilisation == 1.0
    assert found.rounds_apart_s == pytest.approx(1.5)


def test_one_fragment_goes_up_and_down_one_after_the_other_so_it_needs_the_sum_of_both_flows():
    one = forecast(fleet(fragments=1), Mode.DECOUPLED)
    eight = forecast(fleet(fragments=8), Mode.DECOUPLED)
    assert one.up_gbps == one.down_gbps == pytest.approx(eight.up_gbps + eight.down_gbps, rel=0.02)
    just = forecast(fleet(fragments=1, gbps=one.down_gbps), Mode.DECOUPLED)
    assert (just.fits, just.sync_interval_steps) == (True, pytest.approx(24))


def test_staleness_is_the_journeys_share_of_the_interval():
    fast = forecast(fleet(gbps=1000.0), Mode.DECOUPLED)
    assert fast.staleness == pytest.approx(1 / 24, rel=0.1)  # half a step before the capture, half before adoption
    far = forecast(fleet(gbps=1000.0, latency_s=1.0), Mode.DECOUPLED)
    assert far.staleness == pytest.approx((4 + 1) / 24, rel=0.05)  # there and back: 2 s, 4 steps


def test_a_link_that_is_too_narrow_stretches_the_interval_and_keeps_islands_computing():
    needed = forecast(fleet(), Mode.DECOUPLED)
    found = forecast(fleet(gbps=needed.down_gbps / 2), Mode.DECOUPLED)
    assert found.fits is False
    assert found.utilisation == 1.0
    assert found.sync_interval_steps == pytest.approx(48)
    assert found.tokens_per_day == needed.tokens_per_day
    assert found.traffic_gb_per_day == pytest.approx(needed.traffic_gb_per_day / 2)


def test_diloco_waits_for_the_whole_journey():
    found = forecast(fleet(gbps=0.01, latency_s=0.1), Mode.DILOCO)
    journey_s = (N * 2 + N * 4) * 8e-9 / 0.01 + 0.2
    assert found.round_s == pytest.approx(journey_s, rel=2e-3)
    assert found.utilisation == pytest.approx(12 / (12 + journey_s), rel=1e-3)


@pytest.mark.parametrize("mode", [Mode.DILOCO, Mode.STREAMING, Mode.DP])
@pytest.mark.parametrize("target", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("assume", Assume)
def test_with_the_bandwidth_that_is_required_the_target_is_reached(mode, target, assume):
    asked = fleet(utilisation=target, latency_s=0.001, assume=assume, parameters=10**9, fragments=8)
    needed = forecast(asked, mode)
    wide = replace(asked, sites=tuple(replace(s, gbps=max(needed.up_gbps, needed.down_gbps)) for s in asked.sites))
    found = forecast(wide, mode)
    assert found.fits is True
    assert found.utilisation >= target - 1e-6


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("fragments", [1, 8])
def test_no_narrower_link_than_the_required_one_would_do(mode, fragments):
    needed = forecast(fleet(utilisation=0.9, fragments=fragments), mode)
    narrow = fleet(utilisation=0.9, fragments=fragments, gbps=0.98 * max(needed.up_gbps, needed.down_gbps))
    found = forecast(narrow, mode)
    assert found.fits is False
    assert found.utilisation < 0.9 or found.sync_interval_steps > narrow.sync_interval_steps


@pytest.mark.parametrize("mode", Mode)
def test_a_single_site_is_planned_too(mode):
    assert forecast(fleet(sites=1), mode).tokens_per_day > 0
    assert forecast(fleet(sites=1), Mode.DP).up_gbps == 0


def test_unequal_sites_are_paced_by_the_median_and_synchronous_ones_by_the_slowest():
    unequal = Fleet(parameters=N, sites=(site(step_s=0.5), site(step_s=0.5), site(step_s=0.5), site(step_s=2.0)))
    decoupled, together = forecast(unequal, Mode.DECOUPLED), forecast(replace(unequal, utilisation=0.9), Mode.DILOCO)
    assert decoupled.rounds_apart_s == pytest.approx(1.5)
    assert decoupled.tokens_per_day == pytest.approx(86_400 * 1000 * (3 / 0.5 + 1 / 2.0))
    assert together.tokens_per_day == pytest.approx(86_400 * 1000 * 4 / 2.0 * 0.9)


def test_goodput_and_prices_enter_tokens_and_cost():
    priced = fleet(accelerators=8, price_per_hour=2.0, price_per_gb=0.05, goodput={Mode.DECOUPLED: 0.5})
    found, free = forecast(priced, Mode.DECOUPLED), forecast(fleet(), Mode.DECOUPLED)
    assert found.tokens_per_day == pytest.approx(free.tokens_per_day / 2)
    assert found.cost.accelerators_per_day == 4 * 8 * 2 * 24
    assert found.cost.traffic_per_day == pytest.approx(found.traffic_gb_per_day * 0.05)
    assert found.cost.per_day == found.cost.accelerators_per_day + found.cost.traffic_per_day
    assert found.cost.per_billion_tokens == pytest.approx(found.cost.per_day / (found.tokens_per_day / 1e9))
    assert free.cost is None


def test_traffic_of_a_day_is_what_rounds_add_up_to():
    found = forecast(fleet(), Mode.DECOUPLED)
    rounds = 86_400 / found.rounds_apart_s
    total = 4 * rounds * (found.round_up_bytes + found.round_down_bytes) / 1e9
    assert found.traffic_gb_per_day == pytest.approx(total)


def test_data_parallel_training_has_no_aggregator_whose_memory_could_be_told():
    assert list(plan(fleet(), Mode.DP).memory) == ["island_accelerators"]
    assert "aggregator" in plan(fleet(), Mode.DILOCO).memory


def test_memory_grows_with_the_islands_only_by_their_messages():
    few, many = (plan(fleet(sites=m), Mode.DECOUPLED).memory["aggregator"].bound for m in (4, 12))
    assert many - few == pytest.approx(8 * N / 8 * 4, rel=0.02)
    planned = plan(fleet(), Mode.DECOUPLED).memory
    assert all(each.bound is None or each.expected <= each.bound for each in planned.values())
    assert planned["island_accelerators"].expected == 16 * N


def test_the_curve_has_every_mode_and_grows_with_the_target():
    curve = utilisation_curve(fleet(latency_s=0.01), (0.5, 0.9, 0.99))
    assert set(curve) == {"utilisation", *map(str, Mode)}
    for mode in (Mode.STREAMING, Mode.DILOCO, Mode.DP):
        known = curve[mode][np.isfinite(curve[mode])]
        assert np.all(np.diff(known) > 0)
    assert len(set(curve[Mode.DECOUPLED])) == 1
    assert math.isnan(curve[Mode.DP][-1])  # 3 x 2 x 10 ms of latency in steps of 0.5 s: 89 % at best


# --- the way back ---------------------------------------------------------------------------------------------------


def with_links(gbps, **changes):
    return fleet(gbps=gbps, **changes)


def test_wide_links_keep_their_settings():
    chosen = choose(with_links(10.0), Mode.DECOUPLED)
    assert (chosen.codec, chosen.version_codec) == (Codec.BF16, Codec.F32)
    assert (chosen.sync_interval_steps, chosen.fragments) == (24, 8)


def test_narrow_links_get_a_smaller_codec_first_and_then_a_longer_interval():
    needed = forecast(fleet(), Mode.DECOUPLED).down_gbps
    assert choose(with_links(needed * 0.6), Mode.DECOUPLED).version_codec is Codec.BF16
    far = choose(with_links(needed * 0.2), Mode.DECOUPLED)
    assert far.version_codec is Codec.BF16
    assert far.sync_interval_steps == 100


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3, 0.1, 0.02])
def test_what_is_chosen_fits(share):
    gbps = forecast(fleet(), Mode.DECOUPLED).down_gbps * share
    chosen = choose(with_links(gbps), Mode.DECOUPLED)
    settings = {
        "codec": chosen.codec,
        "version_codec": chosen.version_codec,
        "sync_interval_steps": chosen.sync_interval_steps,
        "fragments": chosen.fragments,
    }
    assert forecast(with_links(gbps, **settings), Mode.DECOUPLED).fits is True


def test_the_brokers_link_is_shared_by_the_sites():
    assert with_links(10.0, broker_gbps=2.0).narrowest_gbps == 0.5


def test_a_bandwidth_below_any_setting_is_refused_with_the_one_that_would_do():
    with pytest.raises(ConfigError, match=r"bandwidth = 1e-06: no codec, H up to 1000 or P is enough") as caught:
        choose(with_links(1e-6), Mode.DECOUPLED)
    least = float(caught.value.cure.split("at least ")[1].split()[0])
    assert choose(with_links(least), Mode.DECOUPLED).sync_interval_steps == 1000


@pytest.mark.parametrize(("parameters", "step_s"), [(5 * 10**9, 1.0), (70 * 10**9, 10.0), (10**9, 60.0)])
@pytest.mark.parametrize("gbps", [1.0, 7.0, 1000.0])
def test_what_is_chosen_is_neither_too_much_for_the_aggregator_nor_for_a_message(parameters, step_s, gbps):
    asked = fleet(sites=8, parameters=parameters, step_s=step_s, gbps=gbps)
    chosen = choose(asked, Mode.DECOUPLED)
    settled = replace(
        asked,
        codec=chosen.codec,
        version_codec=chosen.version_codec,
        sync_interval_steps=chosen.sync_interval_steps,
        fragments=chosen.fragments,
    )
    assert merging_per_cycle_s(settled) <= chosen.sync_interval_steps * step_s
    assert largest_message_bytes(settled) <= MESSAGE_LIMIT_BYTES == BrokerConfig().max_message_bytes
    planned = plan(settled, Mode.DECOUPLED)
    assert notes(settled, planned) == []
    assert planned.chosen.sync_interval_steps == chosen.sync_interval_steps


@pytest.mark.parametrize(
    ("parameters", "step_s", "words"),
    [(10**12, 10.0, "merging every fragment once"), (10**12, 1000.0, "max_message_bytes")],
)
def test_where_nothing_can_be_chosen_the_plan_says_what_is_in_the_way(atoll, parameters, step_s, words):
    asked = ("--params", parameters, "--sites", 8, "--step-time", step_s, "--sync-interval", 1000, "--bandwidth", 1e6)
    document = json.loads(atoll(*asked, "--json")[1])
    assert document["choice"] is None
    assert words in " ".join(document["notes"])
    assert atoll(*asked)[1].splitlines()[-1].startswith("next: no settings tried here are within")


# --- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"utilisation": 1.0}, "utilisation = 1.0: must lie between 0 and 1"),
        ({"utilisation": 0.0}, "utilisation = 0.0: must lie between 0 and 1"),
        ({"fragments": 25}, "fragments = 25: must not exceed sync_interval = 24"),
        ({"fragments": 0}, "fragments = 0: must lie between 1 and"),
        ({"overlap_steps": -1}, "overlap = -1: must lie between 0 and"),
        ({"step_s": 0.0}, "step_time = 0.0: must lie between"),
        ({"gbps": -1.0}, "bandwidth = -1.0: must lie between"),
        ({"sites": 0}, "sites = 0: must be at least 1"),
        ({"parameters": 0}, "params = 0: must lie between"),
        ({"version_codec": Codec.INT4}, "versions travel as f32 or bf16"),
        ({"broker_gbps": 0.0}, "broker_bandwidth = 0.0: must be above 0"),
        ({"accelerator_gb": 0.0}, "memory_gb = 0.0: must be above 0"),
        ({"host_gb": 0.0}, "host_memory_gb = 0.0: must be above 0"),
        ({"price_per_hour": -1.0}, "price = -1.0: must be 0 or more"),
        ({"price_per_gb": -1.0}, "price_per_gb = -1.0: must be 0 or more"),
    ],
)
def test_impossible_settings_are_refused_with_a_cure(changes, words):
    with pytest.raises(ConfigError) as caught:
        fleet(**changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "mode", "words"),
    [
        ({"latency_s": 10.0}, Mode.DECOUPLED, "sync_interval = 24: latency and merging alone take"),
        ({"latency_s": 1.0}, Mode.DP, "dp reaches at most 7.7% here"),
        ({"latency_s": 1.0}, Mode.DILOCO, "diloco reaches at most 85.7% here"),
        ({"latency_s": 1.0}, Mode.STREAMING, "an overlap of 5 steps hides them"),
        ({"price_per_hour": 1.0}, Mode.DECOUPLED, "give --accelerators as well"),
        ({"host_gb": 0.1}, Mode.DECOUPLED, "is too little for the aggregator: it takes 0.2"),
        ({"accelerators": 1, "accelerator_gb": 0.01}, Mode.DECOUPLED, "at least 2 a site"),
    ],
)
def test_fleets_that_cannot_work_are_refused_with_what_could(changes, mode, words):
    with pytest.raises(ConfigError) as caught:
        plan(fleet(**changes), mode)
    assert words in str(caught.value)


def test_a_baseline_that_cannot_work_is_named_beside_the_plan():
    planned = plan(fleet(latency_s=1.0), Mode.DECOUPLED)
    assert "reaches at most" in planned.alternatives[Mode.DP]


@settings(max_examples=60)
@given(
    parameters=st.integers(1, 10**13),
    sites=st.integers(1, 40),
    step_s=st.floats(1e-4, 1e4),
    gbps=st.none() | st.floats(1e-4, 1e6),
    latency_s=st.floats(0, 2),
    interval=st.integers(1, 500),
    fragments=st.integers(1, 100),
    tau=st.integers(0, 50),
    target=st.floats(0.01, 0.9999),
    codec=st.sampled_from(Codec),
    assume=st.sampled_from(Assume),
    mode=st.sampled_from(Mode),
)
def test_whatever_is_asked_gets_finite_figures_or_a_refusal(parameters, sites, interval, fragments, tau, **asked):
    shared = {name: asked.pop(name) for name in ("step_s", "gbps", "latency_s")}
    mode, target = asked.pop("mode"), asked.pop("target")
    try:
        found = forecast(
            fleet(
                sites=sites,
                parameters=parameters,
                sync_interval_steps=interval,
                fragments=fragments,
                overlap_steps=tau,
                utilisation=target,
                **shared,
                **asked,
            ),
            mode,
        )
    except ConfigError:
        return
    figures = [found.up_gbps, found.down_gbps, found.round_s, found.rounds_apart_s, found.tokens_per_day]
    figures += [found.traffic_gb_per_day, found.sync_interval_steps]
    assert all(math.isfinite(each) and each >= 0 for each in figures)
    assert 0 < found.utilisation <= 1
    assert found.staleness >= 0
    if mode is Mode.DECOUPLED:
        assert found.staleness <= 1
        assert found.rounds_open <= fragments + 1e-6


# --- sizes of models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parameters"),
    [("5e9", 5 * 10**9), ("5B", 5 * 10**9), ("125M", 125 * 10**6), ("1_000", 1000), ("1.5k", 1500)],
)
def test_parameters_are_read_as_people_write_them(text, parameters):
    assert parse_parameters(text).parameters == parameters


@pytest.mark.parametrize("text", ["", "5X", "B", "-5B", "0", "nan", "inf", "1e400", "5 B B"])
def test_what_is_no_number_of_parameters_is_refused(text):
    with pytest.raises(ConfigError, match="such as 125M, 5B or 5e9"):
        parse_parameters(text)


def a_safetensors_file(path, tensors):
    header = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def test_the_header_of_a_safetensors_file_is_enough(tmp_path):
    tensors = {
        "model.embed_tokens.weight": {"dtype": "BF16", "shape": [1000, 64], "data_offsets": [0, 128_000]},
        "model.layers.0.mlp.weight": {"dtype": "F32", "shape": [64, 128], "data_offsets": [0, 0]},
        "model.position_ids": {"dtype": "I64", "shape": [512], "data_offsets": [0, 0]},
    }
    model = read_model(a_safetensors_file(tmp_path / "model.safetensors", tensors))
    assert model.parameters == 1000 * 64 + 64 * 128  # integers are never synchronised
    assert {spec.name for spec in model.tensors} == {"model/embed_tokens/weight", "model/layers/0/mlp/weight"}
    assert len(cut(model.parameters, model.tensors, 8)) == 2  # no more fragments than tensors


def test_a_tensor_that_cannot_be_synchronised_is_refused_by_its_dtype(tmp_path):
    tensors = {"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    with pytest.raises(ConfigError, match=r"dtype that cannot be synchronised \(F4\); give --params"):
        read_model(a_safetensors_file(tmp_path / "model.safetensors", tensors))
    tensors = {"w": {"dtype": "F32", "shape": [-2, 3], "data_offsets": [0, 24]}}
    with pytest.raises(ConfigError, match="is no safetensors file"):
        read_model(a_safetensors_file(tmp_path / "model.safetensors", tensors))


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, struct.pack("<Q", 5) + b"nope!", struct.pack("<Q", 2) + b"[]"])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="is no safetensors file"):
        read_model(tmp_path / "model.safetensors")


def test_a_config_json_of_a_known_size_is_estimated(tmp_path):
    # GPT-like figures small enough for a hand: 100 x 8 + 2 x (4 x 8 x 8 + 2 x 8 + 3 x 8 x 16) + 8
    config = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 100, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 16}))
    assert read_model(tmp_path / "config.json").parameters == 800 + 2 * (256 + 16 + 384) + 8
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 16, "tie_word_embeddings": False}))
    assert read_model(tmp_path / "config.json").parameters == 1600 + 2 * (256 + 16 + 384) + 8


def _config(width, depth, vocabulary, heads, hidden, **more):
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "vocab_size": vocabulary, "num_attention_heads": heads}
    return sizes | {"intermediate_size": hidden, "tie_word_embeddings": False} | more


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (_config(4096, 32, 128256, 32, 14336, num_key_value_heads=8), 8.03e9),
        (_config(4096, 32, 32000, 32, 14336, num_key_value_heads=8, num_local_experts=8), 46.7e9),
        (_config(2048, 18, 256000, 8, 16384, num_key_value_heads=1, head_dim=256, tie_word_embeddings=True), 2.51e9),
        (
            _config(2048, 48, 151936, 32, 6144, num_key_value_heads=4, head_dim=128)
            | {"moe_intermediate_size": 768, "num_experts": 128},
            30.5e9,
        ),
        (
            _config(2048, 28, 102400, 16, 10944, moe_intermediate_size=1408)
            | {"n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 1},
            16.4e9,
        ),
        (
            _config(3584, 28, 151936, 28, 18944, num_key_value_heads=4, moe_intermediate_size=2560, num_experts=64)
            | {"shared_expert_intermediate_size": 20480},
            57.4e9,
        ),
        (
            _config(7168, 61, 129280, 128, 18432, moe_intermediate_size=2048)
            | {"n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3},
            671e9,
        ),
    ],
)
def test_the_sizes_of_published_models_come_out(tmp_path, config, published):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path / "config.json").parameters == pytest.approx(published, rel=0.02)


def test_a_transformer_without_heads_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_config(8, 2, 100, 0, 16)))
    with pytest.raises(ConfigError, match="describes no transformer"):
        read_model(tmp_path / "config.json")


def test_experts_of_an_unknown_number_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_config(8, 2, 100, 2, 16, moe_intermediate_size=4)))
    with pytest.raises(ConfigError, match="n_routed_experts"):
        read_model(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["config.json", "gone.safetensors", "model.pt"])
def test_files_that_describe_no_model_are_refused(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="model = "):
        read_model(tmp_path / name)


def test_the_configuration_of_a_run_gives_its_model_and_settings(tmp_path):
    text = (
        '[island]\ntask = "examples.numpy_task:task"\n[task]\nhidden = 32\n[aggregator]\nfragments = 2\nislands = 3\n'
    )
    (tmp_path / "config.toml").write_text(text)
    model = read_model(tmp_path / "config.toml")
    assert model.parameters == 32 * 32 + 32 + 32 * 16 + 16
    assert model.defaults["fragments"] == 2
    assert model.defaults["sites"] == 3
    assert model.defaults["tokens_per_step"] == 64


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def atoll(monkeypatch, capsys):
    """Calls ``atoll plan``; returns exit status, standard output and standard error."""
    command = cli.Command(module="ops.planning.command", summary="plans", example="--params 5B")
    monkeypatch.setitem(cli.COMMANDS, "plan", command)

    def call(*arguments):
        status = cli.main(["plan", *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


PAIR = ("--params", "5e9", "--sites", 8, "--step-time", 1, "--codec", "int4", "--utilisation", 0.95)


def test_json_has_the_documented_keys_and_is_strict(atoll):
    status, out, _ = atoll(*PAIR, "--bandwidth", 2, "--latency-ms", 5, "--price-per-gb", 0.01, "--json")
    document = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert status == 0
    for key in planning._EPILOG.split("one object:")[1].split("bandwidth_gbps is")[0].replace("\n", " ").split(", "):
        assert key.split()[0].strip(" .") in document, key
    bandwidth = document["bandwidth_gbps"]
    assert bandwidth["up"] == bandwidth["site_up"] == bandwidth["per_site"]["up"] == pytest.approx(0.86, abs=0.01)
    assert bandwidth["down"] == bandwidth["per_site"]["down"] == pytest.approx(6.67, abs=0.01)
    assert bandwidth["broker_up"] == 8 * bandwidth["down"]
    assert set(document["alternatives"]) == {"streaming", "diloco", "dp"}
    assert document["choice"]["sync_interval_steps"] > 100  # merging 5e9 parameters takes 117 s
    assert set(document["published"]) == {"decoupled", "streaming", "diloco", "dp"}
    assert document["cost"]["accelerators_per_day"] is None


def test_the_published_pair_is_printed_with_its_assumptions(atoll):
    status, out, _ = atoll(*PAIR, "--assume", "paper")
    assert status == 0
    row = next(line for line in out.splitlines() if line.startswith("Gbit/s needed, site up"))
    assert row.split()[4:] == ["0.841", "0.803", "18.7", "198"]
    assert "f = 1" in out
    assert "128 buckets" in out
    document = json.loads(atoll(*PAIR, "--assume", "paper", "--json")[1])
    assert round(document["bandwidth_gbps"]["up"], 2) == 0.84
    assert round(document["alternatives"]["dp"]["bandwidth_gbps"]["up"]) == 198
    ours = json.loads(atoll(*PAIR, "--json")[1])
    assert round(ours["published"]["dp"]["gbps"]) == 198  # said whatever is assumed
    assert "published" not in document["assumptions"][0]


def test_text_says_what_to_try_next_and_fits_its_width(atoll):
    _, out, _ = atoll(*PAIR, "--bandwidth", 2)
    assert "For these links: --codec" in out
    assert out.splitlines()[-1].startswith("next: ")
    assert max(map(len, out.splitlines())) <= 140


def test_a_link_that_is_enough_is_not_called_too_narrow(atoll):
    diloco = ("--params", "5B", "--step-time", 1, "--mode", "diloco", "--bandwidth", 200)
    document = json.loads(atoll(*diloco, "--json")[1])
    assert document["utilisation"] > 0.95
    assert document["fits"] is True
    assert "narrowest" not in " ".join(document["notes"])
    assert document["choice"]["version_codec"] == "f32"  # its own settings do


@pytest.mark.parametrize("mode", ["dp", "diloco"])
def test_what_to_try_next_is_neither_what_was_given_nor_what_atoll_does_not_run(atoll, mode):
    _, out, _ = atoll("--params", "1M", "--step-time", 1, "--mode", mode, "--bandwidth", 10, "--accelerators", 8)
    assert out.splitlines()[-1] == "next: atoll trains decoupled: leave out --mode to plan for that"


def test_an_interval_of_one_step_leaves_no_step_of_overlap(atoll):
    status, out, _ = atoll("--params", "1M", "--step-time", 1, "--sync-interval", 1, "--json")
    assert status == 0
    assert json.loads(out)["settings"]["overlap"] == 0


def test_hundreds_of_small_sites_have_a_goodput(atoll):
    many = ("--params", "1M", "--step-time", 1, "--sites", 300, "--accelerators", 8, "--json")
    assert 0.99 < json.loads(atoll(*many)[1])["goodput"] < 1.0


@pytest.mark.parametrize(("step_s", "interval"), [(1, 24), (5, 500)])
def test_synchronous_sites_are_expected_to_do_what_simulate_says_of_their_step_and_interval(atoll, step_s, interval):
    asked = ("--params", "5B", "--sites", 8, "--accelerators", 150_000, "--mode", "diloco", "--json")
    document = json.loads(atoll(*asked, "--step-time", step_s, "--sync-interval", interval)[1])
    simulated = expected_goodput(mode="diloco", chips=1_200_000, islands=8, step_s=step_s, sync_interval=interval)
    assert document["goodput"] == simulated
    rare = json.loads(atoll(*asked, "--step-time", 1, "--sync-interval", 2)[1])
    assert rare["goodput"] < document["goodput"]  # who meets more often waits for more pauses


def test_a_site_alone_waits_for_nobody(atoll):
    document = json.loads(atoll("--params", "5B", "--sites", 1, "--step-time", 1, "--mode", "dp", "--json")[1])
    assert document["utilisation"] == 1.0
    assert document["tokens_per_day"] == document["alternatives"]["decoupled"]["tokens_per_day"]


def test_unequal_sites_come_from_a_file(atoll, tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text(
        '[[island]]\nname = "east"\ncount = 2\nstep_time = 1.0\ngbps = 10\nms = 5\naccelerators = 8\n'
        '[[island]]\nname = "west"\nstep_time = 2\ngbps = 4.0\n'
    )
    status, out, _ = atoll("--params", "1B", "--fleet", file, "--json")
    document = json.loads(out)
    assert status == 0
    assert [each["name"] for each in document["sites"]] == ["east", "east", "west"]
    assert document["sites"][2]["link_share_needed"] == pytest.approx(2.5 * document["sites"][0]["link_share_needed"])


@pytest.mark.parametrize("text", ["island = 3", "island = [3]", "island = []"])
def test_a_file_without_tables_of_sites_is_refused(atoll, tmp_path, text):
    (tmp_path / "fleet.toml").write_text(text)
    status, _, err = atoll("--params", "1B", "--fleet", tmp_path / "fleet.toml")
    assert status == 2
    assert "must have a table [[island]] for each site" in err


def test_the_published_table_is_printed(atoll):
    status, out, _ = atoll("--table")
    assert status == 0
    assert "47 of 50 cells are the same" in out
    assert len(json.loads(atoll("--table", "--json")[1])["cells"]) == 50


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--params", "5B", "--step-time", 1, "--overlap", 24), "overlap = 24: must be below sync_interval = 24"),
        (("--params", "5B", "--step-time", 1, "--sites", 10_001), "sites = 10001: must lie between 1 and 10000"),
        ((), "params = None: is needed; give --params 5B"),
        (("--params", "5B"), "step_time = None: is needed"),
        (("--params", "five", "--step-time", 1), "params = 'five'"),
        (("--params", "5B", "--step-time", "fast"), "step_time = 'fast': must be a number"),
        (("--params", "5B", "--step-time", 1, "--sites", 2.5), "sites = '2.5': must be a whole number"),
        (("--params", "5B", "--step-time", 1, "--sites", 0), "sites = 0: must lie between 1 and"),
        (
            ("--params", "5B", "--step-time", 1, "--mode", "decoupld"),
            "mode = 'decoupld': is none; did you mean decoupled?",
        ),
        (("--params", "5B", "--step-time", 1, "--codec", "int5"), "codec = 'int5': is none; did you mean"),
        (("--params", "5B", "--step-time", 1, "--utilisation", 1.2), "utilisation = 1.2: must lie between 0 and 1"),
        (("--params", "5B", "--step-time", 1, "--fragments", 48), "must not exceed sync_interval = 24"),
        (("--params", "5B", "--step-time", 1, "--bandwidth", 1e-4), "needs at least"),
        (("--params", "5B", "--step-time", 1, "--mtbi-years", 1), "give --accelerators too"),
        (
            ("--params", "5B", "--step-time", 0.01, "--latency-ms", 50, "--overlap", 2),
            "overlap = 2: is too short: there and back takes 100 ms of latency, at least 10 steps",
        ),
    ],
)
def test_wrong_command_lines_are_one_line_with_a_cure(atoll, arguments, words):
    status, out, err = atoll(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must have a table [[island]]"),
        ("[[island]]\nstep_tim = 1\n", "did you mean step_time?"),
        ("[[island]]\ngbps = 1\n", "step_time = None: is needed"),
        ('[[island]]\nstep_time = "1"\n', "must be a number"),
        ("[[island]]\nstep_time = 1\ncount = 0\n", "count = 0: must lie between"),
        ("[[isle]]\n", "did you mean island?"),
        ("[[", "is not TOML"),
    ],
)
def test_wrong_fleet_files_are_refused(tmp_path, text, words):
    (tmp_path / "fleet.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        planning.read_fleet(tmp_path / "fleet.toml")
    assert words in str(caught.value)


def test_a_fleet_file_and_flags_for_sites_do_not_mix(atoll, tmp_path):
    (tmp_path / "fleet.toml").write_text("[[island]]\nstep_time = 1\n")
    assert "leave the flag out" in atoll("--params", "1B", "--fleet", tmp_path / "fleet.toml", "--sites", 2)[2]


def test_help_has_the_flags_that_were_promised(capsys):
    parser = argparse.ArgumentParser(epilog="example:", formatter_class=argparse.RawDescriptionHelpFormatter)
    planning.add_arguments(parser)
    text = parser.format_help()
    for flag in (
        "params",
        "sites",
        "step-time",
        "mode",
        "codec",
        "sync-interval",
        "fragments",
        "overlap",
        "utilisation",
    ):
        assert f"--{flag} " in text
    assert "--json" in text
