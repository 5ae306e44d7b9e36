"""The closed form of a link against a simulation of it, and both where the answer is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.forecast.utilisation import Traffic, closed_form, crossing_steps, released, required_gbps
from tests.link_simulation import by_layer, simulate

GRID = np.logspace(-1, 3, 50)


def traffic(**changes):
    values = {"payload_gbit": 80.0, "step_s": 1.0, "releases": (released(16),)}
    return Traffic(**(values | changes))


shapes = st.builds(
    lambda fragments, per, layered, spare, tau, payload: traffic(
        payload_gbit=payload,
        releases=by_layer(fragments * per, fragments) if layered else (released(per),) * fragments,
        sync_interval_steps=fragments + spare,
        overlap_steps=tau,
    ),
    st.integers(1, 6),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 12),
    st.integers(0, 3),
    st.floats(0.1, 200.0),
)


@pytest.mark.parametrize("tau", [0, 1, 2, 3])
@pytest.mark.parametrize(("fragments", "interval"), [(1, 1), (1, 30), (8, 24), (24, 24), (8, 100), (36, 108)])
def test_the_closed_form_agrees_with_the_simulation(tau, fragments, interval):
    releases = by_layer(3 * fragments, fragments)
    load = traffic(releases=releases, sync_interval_steps=interval, overlap_steps=tau)
    # 2,000 steps hold no whole number of some intervals, and the first transfers find an empty link: 0.3 % together.
    np.testing.assert_allclose(closed_form(load, GRID), simulate(load, GRID), atol=3e-3)


def test_the_closed_form_stays_close_where_fragments_cannot_be_spaced_evenly():
    """H / P = 2.78: two steps apart or three, and with tau = 2 the link rests before some transfers and not others."""
    load = traffic(releases=by_layer(108, 36), sync_interval_steps=100, overlap_steps=2)
    np.testing.assert_allclose(closed_form(load, GRID), simulate(load, GRID), rtol=0.05)


@given(shapes)
def test_utilisation_is_a_share_and_grows_with_the_bandwidth(load):
    found = closed_form(load, GRID)
    assert np.all((found > 0) & (found <= 1))
    assert np.all(np.diff(found) >= -1e-12)


@given(shapes, st.floats(0.05, 0.99))
def test_the_required_bandwidth_is_the_least_that_reaches_the_target(load, target):
    gbps = required_gbps(load, target)
    assert closed_form(load, gbps)[0] >= target - 1e-9
    assert closed_form(load, gbps * 0.999)[0] < target + 1e-9


def test_data_parallel_hides_the_backward_pass_and_waits_for_the_rest():
    # 160 Gbit in steps of 1 s at 96 Gbit/s: 5/3 s on the link, of which 2/3 s are hidden. Utilisation 1/2.
    load = traffic(payload_gbit=160.0, releases=(released(20_000),))
    assert closed_form(load, 96.0)[0] == pytest.approx(0.5, abs=1e-3)
    assert required_gbps(load, 0.95) == pytest.approx(160 / (1 / 0.95 - 1 / 3), rel=1e-4)


def test_an_even_flow_needs_the_utilisation_times_its_rate():
    load = traffic(releases=(released(),) * 24, sync_interval_steps=24, overlap_steps=2)
    for target in (0.5, 0.8, 0.95):
        assert required_gbps(load, target) == pytest.approx(target * 80 / 24, rel=1e-6)
    assert simulate(load, 1e6)[0] == closed_form(load, 1e6)[0] == 1.0


def test_buckets_cross_one_after_the_other():
    # Released at 0.6, 0.8 and 1.0, each 0.5 on the link: the last is through at 0.6 + 1.5.
    load = traffic(payload_gbit=1.5, releases=((0.6, 0.8, 1.0),))
    (crossed,) = crossing_steps(load, np.array([1.0, 1e9]))
    assert crossed == pytest.approx([2.1, 1.0], abs=1e-6)


def test_buckets_of_a_whole_gradient_are_released_in_the_middle_of_their_part_of_the_backward_pass():
    assert released(3) == pytest.approx([1 / 3 + 2 / 3 * k / 3 for k in (0.5, 1.5, 2.5)])
