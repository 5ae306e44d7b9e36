"""Tensors of a file are found by name: as they are, with dots for slashes, below one part in front, or as told."""

import pytest

from islands.weights.fitting import fit

WANTED = {"layers/0/w": (3, 4), "head": (2,)}


@pytest.mark.parametrize(
    "has",
    [
        {"layers/0/w": (3, 4), "head": (2,)},
        {"layers.0.w": (3, 4), "head": (2,)},
        {"params.layers.0.w": (3, 4), "params.head": (2,)},
        {"params.layers.0.w": (3, 4), "params.head": (2,), "opt_state.0.mu": (3, 4), "step": ()},
        {"params/layers/0/w": (3, 4), "params/head": (2,), "opt_state/layers/0/w": (3, 4)},
    ],
)
def test_names_fit_by_the_rule_that_finds_most(has):
    found = fit(WANTED, has)
    assert found.whole
    assert found.found.keys() == WANTED.keys()
    assert all("opt_state" not in name for name in found.found.values())


def test_what_does_not_fit_is_named_by_its_sort():
    found = fit(WANTED, {"layers/0/w": (4, 3), "tail": (2,)})
    assert (found.missing, found.unexpected) == (("head",), ("tail",))
    assert str(found) == (
        "1 missing (head); 1 unexpected (tail); 1 of another shape (layers/0/w (3, 4), in the file (4, 3))"
    )


def test_a_tied_tensor_may_stand_under_either_name_or_both():
    tied = {"embed": ["head"]}
    for has in ({"embed": (2,)}, {"head": (2,)}, {"embed": (2,), "head": (2,)}):
        found = fit({"embed": (2,)}, has, aliases=tied)
        assert found.whole, str(found)


def test_what_is_local_may_be_missing_and_is_taken_where_it_is_there():
    assert fit(WANTED, {"head": (2,)}, optional={"layers/0/w"}).whole
    assert "head" in fit(WANTED, {"head": (2,), "layers/0/w": (3, 4)}, optional={"head"}).found
