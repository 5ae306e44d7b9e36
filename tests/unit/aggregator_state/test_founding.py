"""Lines that no lease vouches for: whose store goes on in whose, and how new a store is."""

import pytest

from aggregator.state.founding import Founding, foundings_in, made_under, stray


def founding(name, after=1, **base):
    return Founding(name=name, after=after, base=at(**base))


def at(**versions):
    """``p0="5x"``: version 5 of fragment 0, with digest x."""
    return {int(p[1:]): (int(each[:-1]), each[-1]) for p, each in versions.items()}


A, B, C = founding("a", p0="5x"), founding("b", p0="7y"), founding("c", p0="3z")


@pytest.mark.parametrize(
    ("stored", "own", "leaders", "erased"),
    [
        (at(p0="9y"), (), (), ""),  # one line: what the leader has not was never published
        (at(p0="9y"), (A,), (A,), ""),
        (at(p0="9y"), (A, B), (A,), "version 9 of fragment 0"),  # made in a line that the leader knows nothing of
        (at(p0="7y"), (A, B), (A,), ""),  # of which nothing was made
        (at(p0="4y"), (), (A,), ""),
        (at(p0="5x"), (), (A,), ""),
        (at(p0="5y"), (), (A,), "other bytes under version 5 of fragment 0"),
        (at(p0="9y"), (), (A,), "version 9 of fragment 0"),
        (at(p1="0y"), (), (A,), "version 0 of fragment 1"),
        (at(p0="6y"), (A,), (A, B), ""),
        (at(p0="6y"), (), (A, B), "version 6 of fragment 0"),  # it was gone by then: the later line is of no help
        (at(p0="3z"), (C,), (A,), ""),
        (at(p0="4z"), (C,), (A,), "version 4 of fragment 0"),
        ({}, (), (A, B), ""),
    ],
)
def test_a_store_goes_on_in_a_line_that_had_all_it_holds(stored, own, leaders, erased):
    assert stray(stored, own, leaders) == erased


@pytest.mark.parametrize(
    ("stored", "foundings", "epoch"),
    [
        (at(p0="5x"), (), 8),
        (at(p0="6x"), (A,), 8),
        (at(p0="5x"), (A,), 1),
        (at(p0="4x"), (A,), 1),  # behind in a line of which nothing was made
        (at(p0="5x"), (A, founding("d", after=1, p0="5x")), 1),
        (at(p0="7y"), (A, founding("d", after=4, p0="7y")), 4),
    ],
)
def test_a_founding_alone_makes_no_store_newer(stored, foundings, epoch):
    assert made_under(8, foundings, stored) == epoch


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x03", b"\x81\xa9foundings\x91\x01"])
def test_what_is_no_run_record_is_said_to_be_none(packed):
    with pytest.raises(ValueError, match="no run record"):
        foundings_in(packed)
