"""Profile ``paper`` in virtual time against algorithms 1 and 2 of Decoupled DiLoCo, written down once more in numpy.

https://arxiv.org/abs/2604.21428. The production cores run in virtual time with real training; the transcription below
shares no code with them but the inner step and the batches of the task. Each version of each fragment is compared.
"""

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import pytest

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Persisted
from aggregator.rules.recipes import begun_with
from aggregator.store.commit_file import read_params
from aggregator.store.layout import commit_path
from broker.wire.messages import Profile
from islands.tasks.task import DataShare, Task
from ops.virtual.plan import IslandPlan, LinkModel, SimulationPlan
from ops.virtual.simulation import Simulation

pytestmark = pytest.mark.timeout(600)

#: P = H; the paper has 24.
H, TAU, ISLANDS, TOKENS, STEPS, RATE = 5, 2, 3, 10, 60, np.float32(0.01)
#: Matrices, which are merged by RDA, and an embedding, which is not.
SHAPES = {"a": (40, 32), "b": (36, 33), "c": (34, 31), "d": (32, 35), "embed": (50, 30)}
#: The production merge computes in float32.
TOLERANCE = 2e-5


# --- the task: each batch pulls the parameters towards a point of its own -------------------------------------------


def initial():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def batch(k):
    rng = np.random.default_rng([7, k])
    return {name: (rng.normal(size=shape) + k % ISLANDS).astype(np.float32) for name, shape in SHAPES.items()}


def inner_step(params, towards):
    """InnerOpt: one step of gradient descent on half the squared distance."""
    return {name: x - RATE * (x - towards[name]) for name, x in params.items()}


def batches(share: DataShare):
    while True:
        _, _, k, _ = share.take()
        yield batch(k)


TASK = Task(
    init=lambda seed: (initial(), ()),
    train=lambda params, state, towards, schedule: (inner_step(params, towards), state, np.float32(0)),
    data=batches,
    evaluate=lambda params: 0.0,
    tokens_per_step=TOKENS,
    fresh_optimizer=lambda params: (),
)


# --- the transcription ------------------------------------------------------------------------------------------------


@dataclass
class Learner:
    """Algorithm 1. Counters s and n are of each fragment, since its last overwrite."""

    data: dict  # step -> its batch
    theta: dict = field(default_factory=initial)
    t: int = 0
    s: dict = field(default_factory=lambda: dict.fromkeys(SHAPES, 0))
    n: dict = field(default_factory=lambda: dict.fromkeys(SHAPES, 0))

    def step(self):
        """Lines 3 and 4."""
        self.theta = inner_step(self.theta, batch(self.data[self.t]))
        self.t += 1
        for p in SHAPES:
            self.s[p] += 1
            self.n[p] += TOKENS

    def overwrite(self, p, value):
        """Line 7."""
        self.theta[p] = value.astype(np.float32)
        self.s[p] = self.n[p] = 0


@dataclass
class Syncer:
    """Algorithm 2, with the outer step as re-implementations have it."""

    rate: float
    momentum: float
    value: dict = field(default_factory=lambda: {p: x.astype(np.float64) for p, x in initial().items()})
    b: dict = field(default_factory=lambda: {p: np.zeros(shape) for p, shape in SHAPES.items()})

    def merge(self, p, pulled):
        """Lines 6 to 10, for what is pulled of the learners that are ready; returns the new value."""
        weights = [n * (n / s) for _, s, n in pulled]  # line 7
        deltas = [self.wire(self.value[p].astype(np.float32) - theta) for theta, _, _ in pulled]  # line 8
        merged = self.mean(deltas, weights) if p == "embed" else self.rda(deltas, weights)  # line 9
        self.b[p] = self.momentum * self.b[p] + merged  # line 10
        self.value[p] = self.value[p] - self.rate * (merged + self.momentum * self.b[p])
        return self.value[p]

    @staticmethod
    def wire(delta):
        """Pseudo-gradients travel as bfloat16."""
        return delta.astype(ml_dtypes.bfloat16).astype(np.float64)

    @staticmethod
    def mean(deltas, weights):
        return sum(w * d for w, d in zip(weights, deltas, strict=True)) / sum(weights)

    @classmethod
    def rda(cls, deltas, weights):
        """Appendix D.2: the mean of lengths along the mean of directions."""
        lengths = [np.linalg.norm(d) for d in deltas]
        length = sum(w * r for w, r in zip(weights, lengths, strict=True)) / sum(weights)
        direction = cls.mean([d / r for d, r in zip(deltas, lengths, strict=True)], weights)
        return length * direction / np.linalg.norm(direction)


@dataclass
class Tape:
    """The decisions of a run: who was in each merge, captured after which step, and when each value was adopted.

    The paper logs them likewise, for without them an asynchronous run cannot be repeated (section 1.6 of our notes).
    """

    merges: list  # (fragment, version, {island: step of capture}), in order
    overwrites: dict  # island -> step -> [(fragment, version)]
    data: dict  # island -> step -> its batch

    @classmethod
    def of(cls, commits, names):
        merges, overwrites, before = [], {i: {} for i in range(ISLANDS)}, set()
        trained = {i: {} for i in range(ISLANDS)}
        for commit, _ in commits:
            (p,), captured = names[commit.fragment_id], {}
            for merged in commit.contributions:
                island = int(merged.island_id[-1])
                captured[island] = merged.steps.to_step
                of_steps = (k for data in merged.data for k in range(data.from_batch, data.to_batch))
                trained[island].update(enumerate(of_steps, merged.steps.from_step))
                if (island, p) in before:  # a range begins with the value that it was trained on
                    version = commit.fragment_version - 1 - round(merged.staleness)
                    overwrites[island].setdefault(merged.steps.from_step, []).append((p, version))
                before.add((island, p))
            if captured:
                merges.append((p, commit.fragment_version, captured))
        return cls(merges, overwrites, trained)


def transcribed(tape, rate, momentum):
    """Runs both algorithms along a tape; yields fragment, version and value."""
    learners = [Learner(tape.data[island]) for island in range(ISLANDS)]
    syncer, values, pulled = Syncer(rate, momentum), {}, {}
    for p, version, captured in tape.merges:
        for island, step in captured.items():
            learner = learners[island]
            while learner.t < step:
                learner.step()
                for q, adopted in tape.overwrites[island].get(learner.t, ()):
                    learner.overwrite(q, values[q, adopted])
                for q in SHAPES:  # what is captured now may be merged behind what is captured later
                    pulled[island, learner.t, q] = learner.theta[q], learner.s[q], learner.n[q]
        values[p, version] = syncer.merge(p, [pulled[island, step, p] for island, step in sorted(captured.items())])
        yield p, version, values[p, version]


# --- production -------------------------------------------------------------------------------------------------------


def produced(step_times_s=(1.0,) * ISLANDS, **changes):
    """Runs the cores in virtual time; returns the configuration, the fragments, as the names of the tensors in each,
    and each version that was persisted.
    """
    given = changes or {"profile": Profile.PAPER, "fragments": H, "sync_interval": H, "overlap": TAU}
    config = AggregatorConfig(
        **begun_with(given),
        run_id="paper",
        trust=False,  # the papers weigh by tokens alone
        islands=ISLANDS,
        total_tokens=(STEPS - 4) * ISLANDS * TOKENS,
        share_takeover_s=0.0,
        dead_after_s=40.0,
        suspect_after_s=20.0,
    )
    commits = []

    class Remembering(Simulation):
        def hears(self, station, event):
            super().hears(station, event)
            if isinstance(event, Persisted):
                commits.append(read_params(commit_path(station.disk.path, event.fragment_id, event.fragment_version)))

    plan = SimulationPlan(
        seed=1,
        config=config,
        islands=tuple(
            IslandPlan(island_id=f"island-{i}", step_time_s=s, jitter=0.0, link=LinkModel(delay_s=(0.004, 0.006)))
            for i, s in enumerate(step_times_s)
        ),
        checkpoints=False,
        calm_after_s=0.0,
    )
    with Remembering(plan, lambda island: TASK, lambda *_: None, watching=False) as simulation:
        assert simulation.run(60.0 * STEPS)
    manifest = simulation.aggregator.core.run.model.manifest
    return config, [tuple(tensor.name for tensor in each) for each in manifest.fragments], commits


@pytest.fixture(scope="module")
def equal():
    return produced()


@pytest.fixture(scope="module", params=[(1.0, 1.0, 1.0), (1.0, 1.3, 3.1)], ids=["equal speeds", "unequal speeds"])
def run(request, equal):
    return equal if len(set(request.param)) == 1 else produced(request.param)


def test_every_version_is_that_of_the_transcription(run):
    config, names, commits = run
    steady = [each for each in commits if all(m.steps.to_step < STEPS - 6 for m in each[0].contributions)]
    produced_values = {(*names[c.fragment_id], c.fragment_version): params for c, params in steady}
    compared = 0
    for p, version, value in transcribed(Tape.of(steady, names), *config.outer_rule):
        distance = np.linalg.norm(produced_values[p, version] - value.ravel()) / np.linalg.norm(value)
        assert distance <= TOLERANCE, f"version {version} of {p} is {distance:.1e} away"
        compared += 1
    assert compared >= 40


def test_every_fragment_has_a_step_of_its_own_in_every_interval(equal):
    """Algorithm 2, line 2: fragment p is due when t mod H = t_p, with distinct t_p; t is the step of the fastest."""
    _, names, commits = equal
    phases = {}
    for commit, _ in commits:
        t = max((merged.steps.to_step for merged in commit.contributions), default=STEPS)
        if t < STEPS - 6:
            phases.setdefault(commit.fragment_id, set()).add(t % H)
    assert sorted(phases) == list(range(len(names)))
    assert all(len(each) == 1 for each in phases.values()), phases
    assert len(set.union(*phases.values())) == H


def test_an_overwrite_comes_tau_steps_after_the_capture_and_counters_begin_anew(run, equal):
    """Algorithm 1, line 7, and section 1.1: two fragments are under way at any time."""
    _, _, commits = run
    captured, seen = {}, 0
    for commit, _ in commits:
        for merged in commit.contributions:
            key = merged.island_id, commit.fragment_id
            steps = merged.steps
            if steps.to_step < STEPS - 6:
                if key in captured and round(merged.staleness) == 0 and captured[key][0] == commit.fragment_version - 1:
                    waited = steps.from_step - captured[key][1]
                    assert waited == TAU if run is equal else waited >= TAU
                    seen += 1
                assert steps.tokens == steps.steps * TOKENS
                captured[key] = commit.fragment_version, steps.to_step
    assert seen >= 40


def test_no_weight_is_discounted_or_capped(run):
    """Algorithm 2, line 7: n * (n / s), and nothing else."""
    for commit, _ in run[2]:
        for merged in commit.contributions:
            assert merged.token_weight == pytest.approx(merged.steps.tokens**2 / merged.steps.steps)
            assert merged.staleness_weight == 1.0
            assert merged.fresh or merged.steps.to_step >= STEPS - 6  # what comes late is not kept
