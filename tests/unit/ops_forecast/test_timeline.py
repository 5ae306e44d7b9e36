"""Failures of a fleet, and what islands and jobs make of them."""

import itertools

import numpy as np
import pytest

from ops.forecast.failures import FailureModel, Loss, SimulatedFleet, interruptions
from ops.forecast.timeline import Cause, elastic_line, not_handed_over_s, noticed_s, rigid_line

#: Easy to compute with by hand.
PLAIN = FailureModel(
    check_s=0.0, scale_down_s=20.0, scale_up_s=10.0, rejoin_wait_s=50.0, repair_s=1000.0, restart_s=80.0
)


def losses(*hits):
    """Losses of a slice at given times, and none after them that matters."""
    given = [hit if isinstance(hit, Loss) else Loss(hit, 0.99) for hit in hits]
    return itertools.chain(given, (Loss(1e12 * k, 0.99) for k in itertools.count(1)))


def idle_s(line, cause):
    return np.diff(line.idle[cause]).sum()


def intervals(line):
    return [tuple(each) for each in zip(line.from_s.tolist(), line.to_s.tolist(), strict=True)]


def test_a_failure_pauses_once_to_scale_down_and_once_to_scale_up_with_fewer_slices_between():
    line = elastic_line(losses(100.0), 10, PLAIN, 5000.0)
    assert intervals(line) == [(0, 100), (120, 1150), (1160, 5000)]
    assert line.share.tolist() == pytest.approx([1.0, 0.9, 1.0])
    assert idle_s(line, Cause.PAUSED) == pytest.approx(30.0)


def test_what_happens_in_a_pause_takes_no_other_one():
    line = elastic_line(losses(100.0, 110.0, 119.0), 10, PLAIN, 1000.0)
    assert intervals(line) == [(0, 100), (120, 1000)]
    assert line.share.tolist() == pytest.approx([1.0, 0.7])
    line = elastic_line(losses(100.0, 1120.0), 10, PLAIN, 2000.0)
    assert intervals(line) == [(0, 100), (120, 1120), (1140, 2000)]
    assert line.share.tolist() == pytest.approx([1.0, 0.9, 0.9]), "one slice is back, another one has gone"


def test_interruptions_since_the_last_check_take_effect_together_at_the_next():
    model = FailureModel(check_s=8.0, scale_down_s=20.0)
    line = elastic_line(losses(17.0, 23.0), 10, model, 1000.0)
    assert intervals(line)[0] == (0, 24)
    assert line.share.tolist()[1] == pytest.approx(0.8)
    assert noticed_s(33.0, 30.0, 8.0) == 38.0, "checks count from when training went on"


def test_a_failure_that_hits_a_slice_which_is_away_changes_nothing():
    hits_away = Loss(200.0, 0.05)  # of ten slices the first is away
    assert intervals(elastic_line(losses(100.0, hits_away), 10, PLAIN, 1000.0)) == [(0, 100), (120, 1000)]


def test_an_island_without_slices_is_down_until_one_is_back_and_restarts():
    line = elastic_line(losses(100.0), 1, PLAIN, 5000.0)
    assert intervals(line) == [(0, 100), (1180, 5000)]
    assert idle_s(line, Cause.ISLAND_DOWN) == pytest.approx(1080.0)
    assert idle_s(line, Cause.PAUSED) == 0.0
    assert line.down_from_s.tolist() == [100.0]
    assert line.lost_s.tolist() == pytest.approx([12.0]), "half of the interval of 24 s is not handed over"


def test_what_is_not_handed_over_grows_to_half_an_interval():
    assert not_handed_over_s(0.0, 24.0) == 0.0
    assert not_handed_over_s(12.0, 24.0) == pytest.approx(9.0)
    assert not_handed_over_s(24.0, 24.0) == not_handed_over_s(1e6, 24.0) == pytest.approx(12.0)


def test_a_rigid_job_restarts_whole_after_any_loss():
    line = rigid_line(losses(100.0, 150.0, 500.0), PLAIN, 2000.0)
    assert intervals(line) == [(0, 100), (180, 500), (580, 2000)]
    assert idle_s(line, Cause.PAUSED) == pytest.approx(160.0)
    assert set(line.share.tolist()) == {1.0}, "a spare replaces what is away"


def test_a_life_ends_on_time_in_training_and_in_a_pause():
    assert intervals(elastic_line(losses(), 10, PLAIN, 50.0)) == [(0, 50)]
    line = elastic_line(losses(45.0), 10, PLAIN, 50.0)
    assert intervals(line) == [(0, 45)]
    assert idle_s(line, Cause.PAUSED) == pytest.approx(5.0)
    assert line.gaps() == [(45.0, 5.0)]


def test_interruptions_are_a_poisson_process_at_the_rate_of_all_chips():
    model = FailureModel(mtbi_years=1.0)
    drawn = interruptions(1_200_000, model, seed=0)
    gaps = np.diff([each.at_s for each in itertools.islice(drawn, 20_000)])
    assert np.mean(gaps) == pytest.approx(26.3, rel=0.03)  # paper, section 4.1: 26.3 s at 1.2 M chips
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.03)


def test_the_same_seed_draws_the_same_and_each_island_draws_its_own():
    first, again, other_seed, other_island = (
        next(interruptions(1000, FailureModel(), seed, island)) for seed, island in ((3, 1), (3, 1), (4, 1), (3, 2))
    )
    assert first == again
    assert len({first, other_seed, other_island}) == 3


def test_chips_are_shared_out_completely():
    fleet = SimulatedFleet(chips=1003, islands=4)
    assert [fleet.chips_of(i) for i in range(4)] == [251, 251, 251, 250]
