"""Slopes and lines over sizes, against NumPy's and against values worked out by hand."""

import math

import numpy as np
import pytest

from ops.lab.trends import level_at, plane, trend


def test_a_trend_is_the_slope_per_tenfold():
    found = trend([1e6, 1e7, 1e8], [0.03, 0.02, 0.01])
    assert found.mean == pytest.approx(-0.01)
    assert found.half_width == pytest.approx(0, abs=1e-12)


def test_a_trend_by_hand():
    # x = 0, 1, 2; y = 0, 2, 1: slope 1/2, residuals -1/2, 1, -1/2, squares 3/2; 1 degree: 12.7062 * sqrt(1.5 / 1 / 2)
    found = trend([1, 10, 100], [0.0, 2.0, 1.0])
    assert found.mean == pytest.approx(0.5)
    assert found.half_width == pytest.approx(12.7062 * math.sqrt(0.75), rel=1e-5)


def test_groups_share_a_slope_and_have_levels_of_their_own():
    # Within a: x = 0, 1; y = 0, 1. Within b: x = 1, 2, 3; y = 10, 9, 11. Centred: slope (1/2 + 1) / (1/2 + 2) = 0.6.
    sizes, gaps, groups = [1, 10, 10, 100, 1000], [0.0, 1.0, 10.0, 9.0, 11.0], ["a", "a", "b", "b", "b"]
    found = trend(sizes, gaps, groups)
    assert found.mean == pytest.approx(0.6)
    # Residuals -0.2, 0.2, 0.6, -1, 0.4: squares 1.6; 5 - 2 - 1 = 2 degrees: 4.302653 * sqrt(1.6 / 2 / 2.5)
    assert found.half_width == pytest.approx(4.302653 * math.sqrt(0.32), rel=1e-5)
    assert trend([1, 10, 10], [0.0, 1.0, 5.0], ["a", "a", "b"]).mean == pytest.approx(1.0)  # b alone says nothing
    with pytest.raises(ValueError, match="two sizes"):
        trend([1, 10], [0.0, 1.0], ["a", "b"])


def test_two_points_have_a_slope_without_an_interval_and_one_size_has_none():
    assert trend([10, 1000], [0.0, 1.0]).half_width == math.inf
    with pytest.raises(ValueError, match="two sizes"):
        trend([10, 10], [0.0, 1.0])


def test_a_plane_is_that_of_least_squares():
    rng = np.random.default_rng(0)
    first, second = 10 ** rng.uniform(5, 8, 9), 10 ** rng.uniform(0, 2, 9)
    gaps = 0.1 - 0.02 * np.log10(first) + 0.03 * np.log10(second) + rng.normal(0, 0.004, 9)
    design = np.column_stack([np.ones(9), np.log10(first), np.log10(second)])
    best, rest, *_ = np.linalg.lstsq(design, gaps, rcond=None)
    errors = np.sqrt(np.diag(np.linalg.inv(design.T @ design)) * rest[0] / 6)
    slopes = plane(first, second, gaps)
    assert [each.mean for each in slopes] == pytest.approx(best[1:])
    assert [each.half_width for each in slopes] == pytest.approx(2.4469 * errors[1:], rel=1e-4)


def test_a_plane_needs_two_sizes_that_differ():
    with pytest.raises(ValueError, match="neither follows"):
        plane([1e5, 1e6, 1e7, 1e8], [1e2, 1e3, 1e4, 1e5], [0.1, 0.2, 0.1, 0.2])
    assert plane([1e5, 1e6, 1e7], [1.0, 10.0, 1.0], [0.1, 0.2, 0.1])[0].half_width == math.inf


def test_the_height_of_a_line_is_least_certain_far_from_its_points():
    sizes, gaps = [1e6, 1e7, 1e8, 1e9], [0.031, 0.029, 0.011, 0.009]
    xs = np.log10(sizes)
    cov = np.polyfit(xs, gaps, 1, cov="unscaled")[1]
    slope, level = np.polyfit(xs, gaps, 1)
    error = math.sqrt(np.sum((np.polyval([slope, level], xs) - gaps) ** 2) / 2)
    found = level_at(1e5, sizes, gaps)
    at = np.array([5.0, 1.0])
    assert found.mean == pytest.approx(5 * slope + level)
    assert found.half_width == pytest.approx(4.3027 * error * math.sqrt(at @ cov @ at), rel=1e-4)
