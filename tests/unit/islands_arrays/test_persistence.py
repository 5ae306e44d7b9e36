"""The verdict on adoptions: by numbers alone, and in real training with every way of losing what was adopted."""

import ml_dtypes
import numpy as np
import pytest

from islands.arrays.persistence import IN_A_ROW, LEAST_MOVED, Persistence, Verdict, jumped, positions, verdict
from islands.arrays.reference import adopted

KEPT, UNDONE, UNCLEAR = Verdict.KEPT, Verdict.UNDONE, Verdict.UNCLEAR

# --- by numbers -------------------------------------------------------------------------------------------------------


def judged(before, installed, following):
    """The verdict where the step after it moves nothing more."""
    return verdict(before, installed, following, following)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("step", [0.0, 0.01, 0.1, 0.3])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_step_from_what_was_installed_is_told_from_one_that_ignores_it(dtype, step, scale):
    rng = np.random.default_rng(0)
    before, shift, move = ([rng.normal(size=shape) * scale for shape in ((12, 40), (5,), (2, 2, 2))] for _ in range(3))
    before = [x.astype(dtype) for x in before]
    installed = [(x + s).astype(dtype) for x, s in zip(before, shift, strict=True)]
    for start, expected in ((installed, KEPT), (before, UNDONE)):
        following = [(x + step * y).astype(dtype) for x, y in zip(start, move, strict=True)]
        assert judged(before, installed, following) is expected


@pytest.mark.parametrize(
    ("moved", "step", "told"),
    [
        (1.0, 0.01, True),  # a checkpoint of another model
        (0.05, 0.001, True),
        (0.01, 0.001, False),  # a first step that is longer than the second
        (0.005, 1e-6, False),  # it hardly moved
        (1.0, 0.0, False),  # a step that did nothing, as where a scaler skips it, is no measure
        (0.0, 0.0, False),
        (np.inf, 0.01, False),
        (np.nan, 0.01, False),
    ],
)
def test_values_that_were_written_over_are_told_from_a_step(moved, step, told):
    installed = np.random.default_rng(0).normal(size=500).astype(np.float32)
    following = installed + np.float32(moved)
    assert jumped(installed, following, following - np.float32(step)) is told


def test_leaves_that_begin_at_zero_are_written_over_by_no_step_that_is_like_the_next():
    assert not jumped(np.zeros(9), np.full(9, 0.01), np.full(9, 0.02))


@pytest.mark.parametrize("back", [0.0, 0.2, 0.5, 0.8])
def test_training_that_pulls_back_most_of_an_adoption_does_not_undo_it(back):
    before, installed = np.random.default_rng(0).normal(size=(2, 500))
    assert judged([before], [installed], [installed - back * (installed - before)]) is not UNDONE


@pytest.mark.parametrize(
    ("before", "installed", "following"),
    [
        (np.zeros(9), np.zeros(9), np.zeros(9)),  # the adoption moved nothing
        (np.zeros(9), np.ones(9) * (np.arange(9) < LEAST_MOVED - 1), np.zeros(9)),  # or hardly anything
        (np.full(9, np.nan), np.zeros(9), np.zeros(9)),  # spoilt parameters that were replaced
        (np.zeros(9), np.ones(9), np.full(9, np.inf)),
        (np.zeros(9), np.full(9, 1e300), np.zeros(9)),
        (np.zeros(0), np.zeros(0), np.zeros(0)),
    ],
)
def test_what_cannot_be_judged_is_unclear(before, installed, following):
    assert judged([before], [installed], [following]) is UNCLEAR


def test_a_step_that_happens_to_lead_back_is_told_from_one_that_stands_still():
    """As where each version takes back a step's worth of steady progress, and the next step makes it again."""
    before, steady = np.zeros(500), np.full(500, -0.01)
    installed = before - 1.17 * steady
    following = installed + steady
    assert verdict([before], [installed], [following], [following + steady]) is UNCLEAR
    assert verdict([before], [installed], [following], [following + 0.1 * steady]) is UNDONE


def test_a_suspicion_grows_with_steps_and_not_with_fragments_and_ends_with_one_that_was_kept():
    persistence = Persistence()
    assert not any(persistence.lost(p, 5, UNDONE) for p in range(20))  # at one boundary
    assert persistence.suspected
    assert not persistence.lost(0, 9, UNDONE)
    assert not any(persistence.lost(p, 9, KEPT) for p in range(20))
    assert not persistence.suspected
    verdicts = [(step % 3, step, UNDONE) for step in range(20, 20 + IN_A_ROW)]
    verdicts.insert(1, (1, 20, UNCLEAR))
    assert [persistence.lost(*each) for each in verdicts] == [False] * IN_A_ROW + [True]


# --- in training ------------------------------------------------------------------------------------------------------

SIZES = {"hidden": (16, 24), "bias": (24,), "head": (24, 6)}


def gradients(params, x, y):
    """Of the cross-entropy of a network with one hidden layer."""
    hidden = np.tanh(x @ params["hidden"] + params["bias"])
    logits = hidden @ params["head"]
    found = np.exp(logits - logits.max(1, keepdims=True))
    found /= found.sum(1, keepdims=True)
    found[np.arange(len(y)), y] -= 1
    found /= len(y)
    back = (found @ params["head"].T) * (1 - hidden * hidden)
    return {"hidden": x.T @ back, "bias": back.sum(0), "head": hidden.T @ found}


class Loop:
    """One island's training loop on noisy batches, and what it keeps of its own."""

    def __init__(self, params, optimizer, rate, way, seed):
        self.masters = {name: x.astype(np.float32) for name, x in params.items()}
        self.average = dict(self.masters)
        self._moments = {name: [np.zeros_like(x), np.zeros_like(x)] for name, x in self.masters.items()}
        self._optimizer, self._rate, self._way, self._steps = optimizer, rate, way, 0
        self._rng = np.random.default_rng(seed)
        self._truth = np.random.default_rng(0).normal(size=(16, 6))

    def step(self, params):
        """Returns what the loop hands to the island after one more step, given what this gave it."""
        dtype = params["bias"].dtype
        if self._way == "right":
            self.masters = {name: x.astype(np.float32) for name, x in params.items()}
        x = self._rng.normal(size=(8, 16))
        seen = {name: each.astype(dtype).astype(np.float32) for name, each in self.masters.items()}
        slopes = gradients(seen, x, (x @ self._truth).argmax(1))
        self._steps += 1
        self.masters = {
            name: (w - self._update(name, slopes[name])).astype(np.float32) for name, w in self.masters.items()
        }
        self.average = {name: 0.99 * self.average[name] + 0.01 * x for name, x in self.masters.items()}
        shown = self.average if self._way == "average" else self.masters
        return {name: x.astype(dtype) for name, x in shown.items()}

    def _update(self, name, slope):
        first, second = self._moments[name]
        first[:] = 0.9 * first + (slope if self._optimizer == "momentum" else 0.1 * slope)
        second[:] = 0.95 * second + 0.05 * slope**2
        if self._optimizer == "adam":
            corrected = first / (1 - 0.9**self._steps), second / (1 - 0.95**self._steps)
            return self._rate * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
        return self._rate * (first if self._optimizer == "momentum" else slope)


def trained(optimizer, rate, *, way="right", dtype=np.float32, islands=3, interval=8, keep=1.0):
    """Returns the number of the adoption at which each island was told that none stays; None: it never was."""
    rng = np.random.default_rng(0)
    run = {name: (rng.normal(size=shape) / 4).astype(np.float32) for name, shape in SIZES.items()}
    local = [{name: x.astype(dtype) for name, x in run.items()} for _ in range(islands)]
    reference = [{name: x.astype(np.float32) for name, x in each.items()} for each in local]
    loops = [Loop(each, optimizer, rate, way, i) for i, each in enumerate(local)]
    judges, told = [Persistence() for _ in range(islands)], [None] * islands
    for number in range(12):
        for i, loop in enumerate(loops):
            for _ in range(interval):
                local[i] = loop.step(local[i])
        wide = [{name: x.astype(np.float32) for name, x in each.items()} for each in local]
        progress = [{name: wide[i][name] - reference[i][name] for name in run} for i in range(islands)]
        run = {name: run[name] + np.mean([each[name] for each in progress], axis=0) for name in run}
        for i, loop in enumerate(loops):
            before = loop.step(local[i])  # one step passes between capture and adoption
            shifts = {name: run[name] - keep * wide[i][name] for name in run}
            places = {name: tuple(positions(x)) for name, x in shifts.items()}
            after = {name: adopted(before[name], x.astype(np.float32), keep) for name, x in shifts.items()}
            for name, x in after.items():
                own = before[name].astype(np.float32) - wide[i][name]
                reference[i][name] = x.astype(np.float32) - keep * own
            following = loop.step(after)
            local[i] = loop.step(following)
            seen = (before, after, following, local[i])
            found = verdict(*([each[name][places[name]] for name in run] for each in seen))
            if judges[i].lost(0, number, found) and told[i] is None:
                told[i] = number
    return told


TRAINING = [
    *(("sgd", rate) for rate in (0.01, 0.3, 3.0)),
    *(("momentum", rate) for rate in (0.003, 0.1, 1.0)),
    *(("adam", rate) for rate in (1e-4, 3e-3, 0.1)),
]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("optimizer", "rate"), TRAINING)
@pytest.mark.parametrize(
    ("islands", "interval", "keep"), [(1, 8, 1.0), (2, 1, 1.0), (3, 8, 1.0), (3, 8, 0.0), (3, 8, 0.5)]
)
def test_training_that_goes_on_from_what_was_adopted_is_never_told_otherwise(
    optimizer, rate, dtype, islands, interval, keep
):
    told = trained(optimizer, rate, dtype=dtype, islands=islands, interval=interval, keep=keep)
    assert told == [None] * islands


@pytest.mark.parametrize("way", ["masters", "average"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("optimizer", "rate"), TRAINING)
def test_training_whose_next_parameters_come_from_elsewhere_is_told_at_the_first_adoptions(way, optimizer, rate, dtype):
    """From masters in the optimizer's state, as from a loop's old tree; or from a running average of such ones."""
    told = trained(optimizer, rate, way=way, dtype=dtype)
    assert all(number is not None and number < 3 * IN_A_ROW for number in told), told
