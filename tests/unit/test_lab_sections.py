"""What the results page says of simulate and plan."""

import pytest

from ops.lab import sections


@pytest.fixture(scope="module")
def bodies():
    return {section.title: section.body("pictures") for section in sections.sections()}


def test_the_published_pair_stands_beside_ours(bodies):
    text = bodies["Bandwidth"]
    assert "| dp | 198 | 198 |" in text
    assert "| decoupled | 0.84 | 0.841 |" in text


def test_every_published_cell_stands_on_the_page(bodies):
    for cell in ("72", "27", "88", "58", "94", "54", "98", "80"):
        assert f"/ {cell} (" in bodies["Goodput under failures"]
    assert bodies["Bandwidth"].count(" / ") >= 50


def test_every_plot_that_is_linked_is_drawn(bodies):
    for section in sections.sections():
        for file, draw in section.plots.items():
            assert f"pictures/{file}" in bodies[section.title]
            assert draw().startswith(b"<?xml")
