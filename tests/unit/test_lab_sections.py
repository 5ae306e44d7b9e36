"""What the results page says of simulate and plan."""

import pytest

from ops.lab import sections


@pytest.fixture(scope="module")
def bodies():
    return {section.title: section.body("pictures") for section in sections.sections()}


def test_the_published_pair_stands_beside_ours(bodies):
    text = bodies["Bandwidth"]
    assert "| 8 sites, 95 %, int4 | 198 | 198 (195.3) | 0.84 | 0.841 (0.8333) | 236 | 234 |" in text
    assert "| 2 sites, 90 %, int8 | 104 | 104 (103.2) | 1.7 | 1.68 (1.667) | 61 | 62 |" in text


def test_every_published_cell_stands_on_the_page(bodies):
    for cell in ("72", "27", "88", "58", "94", "54", "98", "80"):
        assert f"/ {cell} (" in bodies["Goodput under failures"]
    assert bodies["Bandwidth"].count(" / ") >= 50


def test_every_plot_that_is_linked_is_drawn(bodies):
    for section in sections.sections():
        for file, draw in section.plots.items():
            assert f"pictures/{file}" in bodies[section.title]
            assert draw().startswith(b"<?xml")
