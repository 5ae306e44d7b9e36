"""What the papers say about bandwidth, a test per claim."""

from dataclasses import replace

import numpy as np
import pytest

from broker.wire.messages import Codec
from ops.forecast.fleet import PLANNED, Assume, Fleet, Mode, Site
from ops.forecast.links import load_of, required
from ops.forecast.pace import forecast
from ops.forecast.planner import plan
from ops.forecast.utilisation import Traffic
from tests.link_simulation import by_layer, required_on_grid


def eight_data_centres(**changes):
    site = Site(step_time=1.0, tokens_per_step=1)
    values = {
        "parameters": 5_000_000_000,
        "sites": (site,) * 8,
        "fragments": 24,
        "sync_interval": 24,
        "codec": Codec.INT4,
        "assume": Assume.PAPER,
    }
    return Fleet(**(values | changes))


def test_198_against_084_gbps_for_eight_data_centres():
    """Decoupled DiLoCo, published pair: 5 B parameters, steps of 1 s, 95 % utilisation; bfloat16 against int4."""
    planned = plan(eight_data_centres())
    assert round(planned.chosen.up_gbps, 2) == round(planned.chosen.down_gbps, 2) == 0.84
    assert round(planned.alternatives[Mode.DP].up_gbps) == 198
    assert planned.alternatives[Mode.DP].up_gbps / planned.chosen.up_gbps == pytest.approx(235, abs=1)


def test_104_against_1_7_gbps_in_another_published_cell():
    """Decoupled DiLoCo, figure 13: steps of 1 s; two sites, 90 %.

    How many bits decoupled sends is not known; int8 through a hub gives 1.7, whatever the target.
    """
    fleet = eight_data_centres(utilisation=0.9, codec=Codec.INT8, version_codec=Codec.INT8)
    assert forecast(fleet, Mode.DECOUPLED).up_gbps == pytest.approx(1.68, abs=0.01)
    found = forecast(replace(fleet, sites=fleet.sites[:2], codec=Codec.BF16), Mode.DP)
    assert round(found.up_gbps) == 104
    assert found.exact_gbps == pytest.approx(103.2, abs=0.02)


@pytest.mark.parametrize(
    ("mode", "sites", "codec", "expected"),
    [
        (Mode.DP, 2, Codec.BF16, (48, 80, 88, 104, 112, 119)),
        (Mode.DP, 4, Codec.BF16, (72, 121, 132, 155, 168, 179)),
        (Mode.DP, 8, Codec.BF16, (84, 141, 154, 181, 196, 209)),
        (Mode.STREAMING, 8, Codec.BF16, (1.66, 2.50, 2.66, 2.99, 3.16, 3.29)),
        (Mode.STREAMING, 8, Codec.INT4, (0.416, 0.624, 0.665, 0.748, 0.790, 0.823)),
    ],
)
def test_values_recomputed_by_others_from_the_same_rules(mode, sites, codec, expected):
    """Six targets for 5 B parameters and steps of 1 s, found independently before this program existed."""
    fleet = eight_data_centres(codec=codec)
    load = load_of(replace(fleet, sites=fleet.sites[:sites]), mode)
    found = [required(load, target).exact_gbps for target in (0.5, 0.75, 0.8, 0.9, 0.95, 0.99)]
    # Printed with two or three digits, from simulations of finite length, whose buckets are released a little later.
    assert found == pytest.approx(expected, rel=0.008)


def test_everything_scales_with_parameters_over_step_time():
    """Decoupled DiLoCo, the rules behind figure 13."""
    fleet = eight_data_centres()
    slower = replace(fleet, sites=tuple(replace(site, step_time=2.0) for site in fleet.sites))
    larger = replace(slower, parameters=10_000_000_000)
    for mode in PLANNED:
        assert required(load_of(larger, mode), 0.9).exact_gbps == pytest.approx(
            required(load_of(fleet, mode), 0.9).exact_gbps, rel=1e-6
        )


def test_two_orders_of_magnitude_less_than_data_parallel():
    """Decoupled DiLoCo, figure 5."""
    fleet = eight_data_centres(codec=Codec.BF16)
    ratio = forecast(fleet, Mode.DP).up_gbps / forecast(fleet, Mode.DECOUPLED).up_gbps
    assert 50 < ratio < 250


# --- the table of Streaming DiLoCo (https://arxiv.org/abs/2501.18512) -----------------------------------------------
#
# The least Gbit/s that keeps accelerators busy for 50 to 99 % of the time, for two sizes and five methods. The paper
# states the step times, the layers, fragments of three layers and the grid of bandwidths. The rest that reproduces it
# was found by trying: two islands, H = 100, fragments strided over the layers, one step of overlap (tau = 1), a bucket
# per layer, released when that layer's backward pass is done, bfloat16, and "FP4" as 4 bits and a float32 scale for 256
# elements. PAYLOAD_SHARE is a fit without a known cause: nearly the same as listing the bandwidth one step of the grid
# (a factor of 1.207) below the first that suffices.

UTILISATIONS = (0.50, 0.80, 0.90, 0.95, 0.99)
GRID = np.logspace(-1, 3, 50)  # Gbit/s
PAYLOAD_SHARE = 0.834  # of the nominal payload
SIZES = {"1B": (1e9, 24, 0.1), "100B": (1e11, 108, 4.9)}  # parameters, layers, step time in seconds
METHODS = {  # bits, whether fragments are streamed, H, tau
    "data parallel": (16, False, 1, 0),
    "DiLoCo": (16, False, 100, 0),
    "streaming": (16, True, 100, 0),
    "+ overlap": (16, True, 100, 1),
    "+ FP4": (4.125, True, 100, 1),
}
PUBLISHED = {
    ("1B", "data parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "DiLoCo"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "+ overlap"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "+ FP4"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("100B", "data parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "DiLoCo"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100B", "+ overlap"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "+ FP4"): (0.5, 0.9, 1.1, 1.1, 1.4),
}

#: Cells that are one step of the grid apart, as (size, method, utilisation): (published, here) in Gbit/s.
#: The first and third lie at 50 %, where the link never rests and a cell is decided by single transfers at the ends of
#: an interval of 100 steps; the second is decided by the few fragments with the shortest backward pass behind
#: them, and the published one has fewer or other such fragments than strides of three layers give.
APART = {
    ("1B", "+ FP4", 0.5): (0.4, 0.309),
    ("100B", "streaming", 0.99): (19.3, 23.3),
    ("100B", "+ overlap", 0.5): (1.7, 2.02),
}


def printed_as(published):
    """Indices of the grid that are printed so. The table rounded twice: 0.954 became 0.95 and then 0.9."""
    exact = [k for k, gbps in enumerate(GRID) if round(round(float(gbps), 2), 1) == published]
    return exact or [int(np.argmin(np.abs(GRID - published)))]


def recompute(payload_share=PAYLOAD_SHARE):
    """Returns (size, method, utilisation) -> (published, simulated, steps of the grid that the latter is higher)."""
    cells = {}
    for (size, method), row in PUBLISHED.items():
        (parameters, layers, step_s), (bits, streamed, interval, tau) = SIZES[size], METHODS[method]
        traffic = Traffic(
            payload_gbit=parameters * bits / 1e9 * payload_share,  # a ring of two moves each byte once
            step_s=step_s,
            releases=by_layer(layers, layers // 3 if streamed else 1),
            sync_interval_steps=interval,
            overlap_steps=tau,
        )
        found = required_on_grid(traffic, UTILISATIONS, GRID)
        for utilisation, published, gbps in zip(UTILISATIONS, row, found, strict=True):
            index = int(np.searchsorted(GRID, gbps * (1 - 1e-9)))
            apart = min((index - k for k in printed_as(published)), key=abs)
            cells[size, method, utilisation] = (published, gbps, apart)
    return cells


@pytest.fixture(scope="module")
def cells():
    return recompute()


def test_47_of_50_cells_are_the_same_and_the_others_one_step_of_the_grid_apart(cells):
    """Streaming DiLoCo, required bandwidth; the grid is logspace(-1, 3, 50)."""
    assert len(cells) == 50
    differ = {key: (published, gbps) for key, (published, gbps, apart) in cells.items() if apart}
    assert {key: pytest.approx(each, rel=5e-3) for key, each in APART.items()} == differ
    assert all(abs(apart) <= 1 for _, _, apart in cells.values())


def test_without_the_fitted_payload_nearly_every_cell_is_one_step_higher():
    """Streaming DiLoCo, required bandwidth, from the rules alone: the fit is worth one step of the grid, no more."""
    apart = [steps for _, _, steps in recompute(payload_share=1.0).values()]
    assert all(0 <= each <= 2 for each in apart)
    assert sum(each <= 1 for each in apart) == 48


def test_each_method_of_the_table_needs_less_than_the_one_before(cells):
    """Streaming DiLoCo, the point of the table."""
    for size in SIZES:
        for target in UTILISATIONS:
            row = [cells[size, method, target][1] for method in METHODS]
            assert row == sorted(row, reverse=True)
