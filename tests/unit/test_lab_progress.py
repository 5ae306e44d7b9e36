"""What a long run says of itself on the way."""

import math

import numpy as np
import pytest

from ops.lab import running
from ops.lab.progress import Progress, latest, note
from ops.lab.running import BLOCKS, run_cell
from ops.lab.settings import cell_settings


def test_nothing_is_known_before_the_first_point(tmp_path):
    assert latest(tmp_path / "run.progress") is None


def test_the_last_whole_line_counts(tmp_path):
    path = tmp_path / "run.progress"
    for points in (1, 2):
        note(path, Progress(points=points, of=6, loss=1.5))
    assert latest(path) == Progress(points=2, of=6, loss=1.5)
    with path.open("a") as file:
        file.write('{"points": 3, "of"')
    assert latest(path) == Progress(points=2, of=6, loss=1.5)


def test_a_disk_that_is_full_costs_the_line_and_nothing_else(tmp_path):
    note(tmp_path / "gone" / "run.progress", Progress(points=1, of=6, loss=1.5))
    torn = tmp_path / "run.progress"
    torn.write_text('{"points": 3, "of"{"points": 4, "of": 6, "loss": 1.5}\n')
    assert latest(torn) is None


def test_a_sentence_says_what_is_left_at_the_pace_so_far():
    assert Progress(points=2, of=6, loss=1.52).sentence(600) == "33 % in 10 min, loss 1.5200 so far; about 20 min to go"


@pytest.mark.parametrize("mode", ["decoupled", "diloco", "data-parallel"])
def test_a_run_tells_every_point_of_its_curve_but_the_last(mode):
    cell = cell_settings(
        {"task": "examples.numpy_task:task", "mode": mode, "steps": 24, "fragments": 2, "sync_interval": 4}
    )
    told = []
    record = run_cell(cell, 0, watch=told.append)
    assert [(each.points, each.of) for each in told] == [(n, cell.evaluations) for n in range(1, cell.evaluations)]
    assert [each.loss for each in told] == [loss for _, _, loss in record.curve[:-1]]


@pytest.mark.parametrize("losses", [[2.0] * (2 * BLOCKS - 1), [2.0] * 99 + [math.inf], []], ids=["few", "lost", "none"])
def test_there_are_no_blocks_of_too_few_sequences_or_of_a_run_that_went_wrong(losses):
    assert running._blocks(np.array(losses)) == ()


def test_a_record_has_the_loss_of_every_part_of_the_held_out_text():
    cell = cell_settings(
        {"mode": "data-parallel", "steps": 2, "held_out_sequences": 101, "task.model": "tiny", "task.context": 64}
    )
    record = run_cell(cell, 0)
    assert (record.sequences, len(record.blocks)) == (101, BLOCKS)
    sizes = [4] * (101 % BLOCKS) + [3] * (BLOCKS - 101 % BLOCKS)  # neighbours, as even as they can be
    assert np.average(record.blocks, weights=sizes) == pytest.approx(record.loss, abs=1e-6)
    assert len(set(record.blocks)) == BLOCKS
