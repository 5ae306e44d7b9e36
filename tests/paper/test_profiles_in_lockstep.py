"""Profiles ``diloco`` and ``streaming`` in virtual time against their algorithms, written down once more in numpy.

DiLoCo: https://arxiv.org/abs/2311.08105, algorithm 1. Streaming DiLoCo: https://arxiv.org/abs/2501.18512, algorithm 2.
"""

import numpy as np
import pytest

from broker.wire.messages import Codec, Profile
from tests.paper.test_profile_paper import ISLANDS, SHAPES, STEPS, TOLERANCE, batch, initial, inner_step, produced

H = 6


def transcribed(places, data, *, tau, mix, rate, momentum):
    """Yields (fragment, version, step, value): everybody is at the same step, and waits where it must.

    Args:
        places: Fragment, as the tensors in it -> the step of its first hand-over.
        data: Step -> its batch, for each island.
        tau: Steps between a hand-over and its adoption.
        mix: Share of the local value that is left.
        rate: Of the outer optimizer.
        momentum: Likewise.
    """
    theta = [initial() for _ in range(ISLANDS)]
    value = {p: x.astype(np.float64) for p, x in initial().items()}
    b = {p: np.zeros(shape) for p, shape in SHAPES.items()}
    adopted, version = {}, dict.fromkeys(places, 0)
    for t in range(1, 1 + min(map(len, data))):  # to the last step that was merged
        theta = [inner_step(x, batch(own[t - 1])) for x, own in zip(theta, data, strict=True)]
        for step, names in list(adopted.items()):
            if step == t:
                _adopt(theta, value, names, mix)
                del adopted[step]
        for names, first in places.items():
            if t >= first and (t - first) % H == 0:
                for p in names:
                    delta = np.mean([value[p].astype(np.float32) - x[p] for x in theta], axis=0, dtype=np.float64)
                    b[p] = momentum * b[p] + delta
                    value[p] = value[p] - rate * (delta + momentum * b[p])
                version[names] += 1
                yield names, version[names], t, np.concatenate([value[p].ravel() for p in names])
                if tau:
                    adopted[t + tau] = names
                else:
                    _adopt(theta, value, names, mix)


def _adopt(theta, value, names, mix):
    for x in theta:
        for p in names:
            x[p] = (mix * x[p] + (1 - mix) * value[p]).astype(np.float32)


@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    "step_times_s", [(1.0, 1.0, 1.0), (1.0, 1.7, 5.0)], ids=["equal speeds", "one five times slower"]
)
@pytest.mark.parametrize("profile", [Profile.DILOCO, Profile.STREAMING])
def test_islands_that_wait_for_each_other_learn_as_published(profile, step_times_s):
    changes = {} if profile is Profile.DILOCO else {"fragments": 3, "codec": Codec.F32}
    config, names, commits = produced(step_times_s, profile=profile, sync_interval=H, **changes)
    places = {name: round((k + 1) * H / len(names)) for k, name in enumerate(names)}
    data = [{} for _ in range(ISLANDS)]
    for m in (m for commit, _ in commits for m in commit.contributions):
        batches = (k for each in m.data for k in range(each.from_batch, each.to_batch))
        data[int(m.island_id[-1])].update(enumerate(batches, m.steps.from_step))
    rate, momentum = config.outer_rule
    expected = {
        (name, version): (t, value)
        for name, version, t, value in transcribed(
            places, data, tau=config.overlap, mix=config.mix, rate=rate, momentum=momentum
        )
    }
    compared = 0
    for commit, params in commits:
        name = names[commit.fragment_id]
        steps = {m.steps.to_step for m in commit.contributions}
        if not steps or max(steps) > STEPS - 6:
            continue  # version 0, and the last rounds
        t, value = expected[name, commit.fragment_version]
        assert steps == {t}
        assert len(commit.contributions) == ISLANDS
        distance = np.linalg.norm(params - value) / np.linalg.norm(value)
        assert distance <= TOLERANCE, f"version {commit.fragment_version} of {name} is {distance:.1e} away"
        compared += 1
    assert compared >= (8 if profile is Profile.DILOCO else 20)
