"""A run over real sockets, computed again from what its islands sent, in plain numpy and float64.

The reference shares no code with the aggregator: weights, merging (Decoupled DiLoCo, https://arxiv.org/abs/2604.21428,
algorithm 2 and appendix D.2, with the project's staleness weight and caps) and the Nesterov step (DiLoCo,
https://arxiv.org/abs/2311.08105, algorithm 1) are written down once more, as their formulas read.
"""

import math
import os
from collections import defaultdict

import ml_dtypes
import numpy as np
import pytest

from aggregator.store.recording import read_recording
from aggregator.store.tape import read_lines
from broker.wire.fragments import Kind
from broker.wire.messages import Codec, Fate
from tests.aggregator_bench import aggregator_config, initial, on_a_bench, until

os.environ.setdefault("JAX_PLATFORMS", "cpu")

RATE, MOMENTUM, EXPONENT = 0.7, 0.5, 0.5
INTERVAL = 6

#: Weights are a few float64 operations on small integers.
WEIGHT_TOLERANCE = 1e-9
#: Values: the aggregator computes in float32, whose rounding (6e-8 of a term) adds up over contributions, rounds and
#: the two sums of the momentum; the reference does not round at all. Relative to the length of the whole vector.
VALUE_TOLERANCE = 2e-6


def weights(contributions, version):
    """Token weights, staleness and staleness weights of what was merged into ``version`` + 1."""
    token_weights = [c.steps.tokens**2 / c.steps.steps for _, c in contributions]
    by_island = defaultdict(float)
    for (island, _), weight in zip(contributions, token_weights, strict=True):
        by_island[island] += weight
    heaviest = max(by_island, key=by_island.get)
    others = sum(by_island.values()) - by_island[heaviest]
    if len(by_island) >= 3 and by_island[heaviest] > others:
        token_weights = [
            weight * others / by_island[heaviest] if island == heaviest else weight
            for (island, _), weight in zip(contributions, token_weights, strict=True)
        ]
    staleness = [
        sum(t.steps * (version - t.fragment_version) for t in c.trained_on) / c.steps.steps for _, c in contributions
    ]
    return np.array(token_weights), staleness, np.array([(1 + s) ** -EXPONENT for s in staleness])


def merged(spec, deltas, token_weights, staleness_weights):
    """D of one tensor."""
    shares = token_weights / token_weights.sum()
    factors = shares * staleness_weights
    if spec.kind is Kind.MEAN:
        return np.tensordot(factors, deltas, axes=1)
    out = np.zeros(spec.shape)
    for unit in np.ndindex(spec.shape[: spec.unit_axes]):
        parts = [delta[unit] for delta in deltas]
        lengths = np.array([np.linalg.norm(part) for part in parts])
        mean = sum(f * part for f, part in zip(factors, parts, strict=True))
        direction = sum(f * part / length for f, part, length in zip(factors, parts, lengths, strict=True))
        radius = (factors * lengths).sum()
        cap = np.linalg.norm(mean) / math.sqrt((shares**2).sum())
        out[unit] = min(radius, cap) * direction / np.linalg.norm(direction)
    return out


def decoded(spec, encoded):
    """A tensor as its island sent it, float64."""
    return np.frombuffer(encoded.data, ml_dtypes.bfloat16).astype(np.float64).reshape(spec.shape)


def assert_close(got, expected, what):
    distance = np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert distance <= VALUE_TOLERANCE, f"{what} is {distance:.1e} away"


def test_a_real_run_agrees_with_a_plain_reference(tmp_path):
    tape = tmp_path / "events.jsonl"
    islands = {}

    def noise(seed, scale):
        rng = np.random.default_rng(seed)
        return lambda p: [
            (scale * rng.standard_normal(t.shape)).astype(np.float32) for t in islands["a"].manifest.fragments[p]
        ]

    def varied(bench):
        """Whether the run has shown what there is: everybody in a round, fewer than all, something stale."""
        tally = bench.participation
        return 3 <= tally.rounds[3] < tally.rounds.total() and (tally.staleness or 0) > 0.1 and min(bench.versions) >= 4

    async def use(bench):
        settings = aggregator_config(
            tmp_path,
            broker=bench.address,
            tape=tape,
            record_payloads=True,
            islands=3,
            codec=Codec.BF16,
            version_codec=Codec.F32,
            sync_interval=INTERVAL,
            outer_learning_rate=RATE,
            outer_momentum=MOMENTUM,
            staleness_exponent=EXPONENT,
            outlier_factor=0.0,  # the lengths of these islands are a hundred times apart on purpose
        )
        end = await bench.aggregator(settings)
        for seed, (name, step_s) in enumerate({"a": 0.004, "b": 0.004, "c": 0.02}.items()):
            delta = noise(seed, 10.0 ** (seed - 2))
            islands[name] = await bench.island(name, delta=delta, codec=Codec.BF16, step_s=step_s)
        await until(lambda: bench.participation.rounds[3] >= 3, "rounds of everybody")
        islands["c"].answering = False  # on a busy machine the others are as slow, and wait for it each time
        await until(lambda: bench.participation.rounds[2] >= 3, "rounds of two")
        islands["c"].answering = True
        await until(lambda: varied(bench), "rounds of every sort")
        newest = max(bench.versions)
        await until(
            lambda: all(min(v.fragment_version for v in i.versions.values()) >= newest for i in islands.values()),
            "the versions so far at every island",
        )
        await end()

    on_a_bench(use)

    fragments = islands["a"].manifest.fragments
    theta = {p: np.concatenate([initial(t).ravel() for t in f]).astype(np.float64) for p, f in enumerate(fragments)}
    momentum = {p: np.zeros_like(vector) for p, vector in theta.items()}
    notes, interval, ended = [], INTERVAL, {}  # round -> the interval that it ended
    for line in read_lines(tape):
        match line.get("note"):
            case "interval.changed":
                interval = line["fields"]["steps"]
            case "round.closed":
                ended[line["fields"]["round"]] = interval
            case "version.committed":
                notes.append(line["fields"])
    before = defaultdict(lambda: INTERVAL)
    seen, checked = set(), 0
    for note in notes:
        p, version, rows = note["fragment"], note["version"], note["contributions"]
        contributions = []
        for row in rows:
            key = (p, *row["steps"])
            assert (row["island"], key) not in seen, "a range was merged twice"
            seen.add((row["island"], key))
            contributions.append((row["island"], islands[row["island"]].sent[key]))
        assert {row["island"] for row in rows} <= set(islands)

        token_weights, staleness, staleness_weights = weights(contributions, version - 1)
        merge_weights = token_weights * staleness_weights / token_weights.sum()
        assert [row["token_weight"] for row in rows] == pytest.approx(token_weights.tolist(), rel=WEIGHT_TOLERANCE)
        assert [row["merge_weight"] for row in rows] == pytest.approx(merge_weights.tolist(), rel=WEIGHT_TOLERANCE)
        assert [row["staleness"] for row in rows] == pytest.approx(staleness, abs=1e-6)  # the tape has six digits

        parts = []
        for index, spec in enumerate(fragments[p]):
            deltas = np.stack([decoded(spec, c.payload[index]) for _, c in contributions])
            parts.append(merged(spec, deltas, token_weights, staleness_weights).ravel())
        step = np.concatenate(parts)
        steps = ended[note["round"]]
        kept = MOMENTUM ** (steps / INTERVAL)
        rate = RATE * (1 - kept) / (1 - MOMENTUM)
        kept *= min(1.0, steps / before[p])
        before[p] = steps
        momentum[p] = step + kept * momentum[p]
        theta[p] = theta[p] - rate * (step + kept * momentum[p])

        recorded = read_recording(tmp_path / "events.payloads" / f"{note['round']:010d}.safetensors")
        assert [(part["island"], part["steps"]) for part in recorded.facts["parts"]] == [
            (row["island"], row["steps"]) for row in rows
        ]
        where = f"of fragment {p} version {version}"
        assert_close(recorded.arrays["merged"], step, f"the merged pseudo-gradient {where}")
        assert_close(recorded.arrays["momentum_after"], momentum[p], f"the momentum {where}")
        assert_close(recorded.arrays["theta_after"], theta[p], f"the parameters {where}")
        for name, island in islands.items():
            for message in island.history:
                if (message.fragment_id, message.fragment_version) == (p, version):
                    published = np.concatenate([array.ravel() for array in island.arrays(message)])
                    assert published.tobytes() == recorded.arrays["theta_after"].tobytes()
                    own = [row["island"] for row in rows if row["island"] == name]
                    assert [c.island_id for c in message.contributions] == own
                    checked += 1
    assert checked > 0
    told = {
        (name, (r.fragment_id, r.from_step, r.to_step))
        for name, island in islands.items()
        for r in island.fates
        if r.fate is Fate.MERGED
    }
    assert told <= seen, "an island was told of a merge that is not on the tape"
