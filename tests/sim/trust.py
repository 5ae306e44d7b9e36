"""A bench of islands that lie, and of islands that do not: real training in virtual time, seeds in pairs.

    python -m tests.sim.trust --seeds 20 [--liar NAME ..] [--jobs 2]      # each liar beside four honest islands
    python -m tests.sim.trust --seeds 20 --honest [NAME ..] [--jobs 2]    # fleets without a liar, trust on against off
    python -m tests.sim.trust --seeds 5 --rule weiszfeld [--liar NAME ..]  # another rule in the place of trust
    python -m tests.sim.trust --seeds 5 --rule weiszfeld --length 1.5      # the same, at 1.5 times the length of steps

Both runs of a pair have the same seed, parameters, batches of each island, and delays. With a liar the other run is the
honest islands alone, under the same rule and at the same length, which train as many steps: what is missing is the
liar's tokens. So the third column says what a liar costs under a rule, and the second what the rule itself costs, which
depends on its length. Without a liar the other run is always tokens alone. The task is the example in numpy.
The column "weight" has the liars' mean merge weight beside that of the others; of fleets without a liar the least share
that any island has in the merges of any seed, beside its share without trust.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import fmean
from typing import Any

import numpy as np

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Computed, Merge
from aggregator.merge.outer_step import make_outer_step
from aggregator.merge.pieces import vector
from aggregator.rules.quarantine import OFFENCES
from broker.wire.messages import Codec, Reason
from broker.wire.tensors import encode_vector
from islands.tasks.task import DataShare, Task, load_task
from ops.faults.kinds import LIES, FaultKind
from ops.lab.decoupled import global_params, plan_of
from ops.lab.statistics import interval
from ops.lab.training import Rule, Training, TrainingAggregator, TrainingIsland
from ops.plans.cell import cell_settings
from ops.virtual.plan import IslandPlan
from ops.virtual.simulation import Simulation

HONEST = 4
#: Of each island: 400,000 tokens of four honest islands and a liar.
STEPS = 1250
RECIPE = {"mode": "decoupled", "fragments": 8, "sync_interval": 24, "codec": "bf16", "jitter": 0.1}
#: Heartbeats and blocks of data are rare: they would take longer than the steps, which are short.
CALM: dict[str, Any] = {
    "heartbeat_interval_s": 4.0,
    "suspect_after_s": 16.0,
    "dead_after_s": 48.0,
    "data_ahead_s": 60.0,
}
#: float [contributions, elements], or [elements].
Vectors = Any
#: Reasons that say something of an island itself; quarantine begins with them.
BLAMED = OFFENCES | {Reason.QUARANTINED}
#: More than there are islands: each has batches of its own, which no other island and no other seed has.
STREAMS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Who trains.

    Attributes:
        honest: Islands that are.
        liars: The manner of each other one.
        honest_share: Share of the run in which the liars are honest.
        others: How many of the honest islands, the last ones, have another language.
        faults: Whether islands differ in pace and distance, are cut off, leave and join, by the seed.
        cell: Settings of the laboratory that differ.
    """

    honest: int = HONEST
    liars: tuple[FaultKind, ...] = ()
    honest_share: float = 0.0
    others: int = 0
    faults: bool = False
    cell: Mapping[str, Any] = field(default_factory=dict)


LIARS: Mapping[str, Fleet] = {
    **{str(manner): Fleet(liars=(manner,)) for manner in LIES},
    "turncoat": Fleet(liars=(FaultKind.SIGN_FLIP_3,), honest_share=0.5),
    "two-sign-flip": Fleet(liars=2 * (FaultKind.SIGN_FLIP,)),
    "two-constant": Fleet(liars=2 * (FaultKind.CONSTANT,)),
    "two-constant-3": Fleet(liars=2 * (FaultKind.CONSTANT_3,)),
    "two-constant-noise": Fleet(liars=2 * (FaultKind.CONSTANT_NOISE,)),
}

#: Delays are one way, in steps.
HONEST_FLEETS: Mapping[str, Fleet] = {
    "three": Fleet(honest=3),
    "four": Fleet(),
    "eight": Fleet(honest=8),
    "journeys": Fleet(cell={"delays_s": (0.5, 1.0, 2.0, 4.0)}),
    "one-slow": Fleet(cell={"step_times_s": (1.0, 1.0, 1.0, 4.0)}),
    "joiner": Fleet(cell={"joins": ((3, 250.0, 1e6),)}),
    "one-other-language": Fleet(others=1),
    "two-other-language": Fleet(others=2),
    "faults": Fleet(honest=6, faults=True),
}


def faults_of(fleet: Fleet, seed: int, steps: int) -> dict[str, Any]:
    """Returns settings of the laboratory: paces of 1 to 4, delays, absences, islands that come late or leave."""
    rng, islands = random.Random(seed), range(fleet.honest)
    late, leaves = rng.sample(islands, 2)
    return {
        "step_times_s": tuple(rng.choice((1.0, 1.0, 1.5, 4.0)) for _ in islands),
        "delays_s": tuple(rng.choice((0.002, 0.5, 4.0)) for _ in islands),
        "outages": tuple((float(i), rng.uniform(0.1, 0.8) * steps, rng.uniform(5, 100)) for i in islands),
        "joins": (
            (float(late), rng.uniform(0.1, 0.5) * steps, 1e6),
            (float(leaves), 0.0, rng.uniform(0.3, 0.9) * steps),
        ),
        "jitter": 0.3,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came out of one run.

    Attributes:
        loss: Held out, of the languages that there are.
        honest_tokens: That the honest islands trained.
        weight: Mean merge weight of a liar, or of an island with another language, beside that of another island.
        shares: Of each island in all merge weights.
        refusals: Of contributions of liars, for a reason that an honest island gives no cause for.
        accused: The same of honest islands, and those of them that were quarantined.
        quarantined: Share of the run after which the first liar was quarantined; None if none was.
    """

    loss: float
    honest_tokens: int
    weight: float
    shares: Mapping[str, float]
    refusals: int
    accused: int
    quarantined: float | None


@cache
def languages(how_many: int) -> tuple[Task, ...]:
    """Returns tasks with the same model: the second one has other labels, for inputs from another place."""
    found = tuple(load_task("examples.numpy_task:task", {"problem": problem}) for problem in range(how_many))
    return tuple(_moved(task, 3.0 * place) for place, task in enumerate(found))


def _moved(task: Task, by: float) -> Task:
    """Returns the task with its inputs moved along the first four dimensions: how a model tells languages apart."""
    where = np.zeros(32, np.float32)
    where[:4] = by

    def train(params: Any, velocity: Any, batch: Any, schedule: Any) -> Any:
        return task.train(params, velocity, (batch[0] + where, batch[1]), schedule)

    def evaluate(params: Any) -> float:
        # Inputs that are moved and a bias that is moved back are one and the same.
        hidden = params["hidden"]
        moved = {**params, "hidden": {**hidden, "bias": hidden["bias"] + where @ hidden["weight"]}}
        return float(task.evaluate(moved))

    return replace(task, train=train, evaluate=evaluate) if by else task


def trimmed(vectors: Vectors) -> Vectors:
    """Returns the mean of each element without its smallest and largest fifth, one at least."""
    cut = max(1, len(vectors) // 5)
    return np.sort(vectors, axis=0)[cut:-cut].mean(axis=0) if len(vectors) > 2 * cut else vectors.mean(axis=0)


#: Rules of others, which know nothing of who is who; at the length of an RDA, as ours: the mean of the lengths. One
#: that goes by products is the run's own merge rule; one that goes by elements makes a vector of its own.
OWN: Mapping[str, str] = {"weiszfeld": "examples.geometric_median:GeometricMedian"}
RULES: Mapping[str, Callable[[Vectors], Vectors]] = {"trimmed": trimmed}


def merged_by(rule: Callable[[Vectors], Vectors], action: Merge) -> Merge:
    """Returns an order to merge the one vector that a rule makes of all contributions."""
    vectors = np.stack([vector(part.payload) for part in action.parts])
    found = rule(vectors)
    found *= np.linalg.norm(vectors, axis=1).mean() / max(float(np.linalg.norm(found)), 1e-30)
    shapes = [tensor.shape for tensor in action.parts[0].payload]
    payload = encode_vector(found.astype(np.float32), shapes, Codec.F32)
    total = sum(part.token_weight for part in action.parts)
    discount = sum(part.token_weight * part.staleness_weight for part in action.parts) / total if total else 0.0
    merged = replace(action.parts[0], payload=payload, token_weight=total, staleness_weight=discount)
    return replace(action, parts=(merged,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is measured: trust, or a rule in its place.

    Attributes:
        rule: Key of ``OWN`` or ``RULES``; empty: weights by tokens, and by trust if that is on.
        trust: Whether trust is on.
        length: By which the length of each step is multiplied.
    """

    rule: str = ""
    trust: bool = True
    length: float = 1.0

    def applied(self, action: Merge) -> Merge:
        """Returns the order to merge by this candidate."""
        made = merged_by(RULES[self.rule], action) if self.rule in RULES else action
        parts = tuple(replace(part, staleness_weight=part.staleness_weight * self.length) for part in made.parts)
        return replace(made, parts=parts)


TRUST, TOKENS = Candidate(), Candidate(trust=False)


class Works(Training):
    """Gives each island batches of its own, and sums up the weights of merges."""

    def __init__(self, tasks: Mapping[str, Task], rule: Rule, candidate: Candidate) -> None:
        self._candidate = candidate
        super().__init__(next(iter(tasks.values())), rule, make_outer_step(1.0, 0.0))
        self._tasks = tasks
        self.weights: defaultdict[str, float] = defaultdict(float)

    def island(self, island_id: str, life: int) -> TrainingIsland:
        """See :class:`ops.virtual.work.Works`."""
        return TrainingIsland(self._tasks[island_id], self._rule)

    def aggregator(self) -> TrainingAggregator:
        """See :class:`ops.virtual.work.Works`."""
        made = super().aggregator()
        merge = made.merge

        def weighed(action: Merge) -> Computed:
            done = merge(self._candidate.applied(action))
            total = sum(part.token_weight for part in action.parts)
            for part in action.final_parts(done.cosines):
                self.weights[part.island_id] += part.token_weight * part.staleness_weight / total if total else 0.0
            return done

        made.merge = weighed  # type: ignore[method-assign]
        return made


def with_stream(task: Task, stream: int) -> Task:
    """Returns the task with batches that only this stream has, whichever blocks an island is given."""

    def data(share: DataShare) -> Iterator[Any]:
        while True:
            own = DataShare(index=stream, count=STREAMS * 1000, cursor=share.own)
            share.take()
            yield next(iter(task.data(own)))

    return replace(task, data=data)


def run(name: str, seed: int, steps: int = STEPS, *, candidate: Candidate = TRUST, alone: bool = False) -> Result:
    """Returns what came out of a fleet's run of that many steps of each island; ``alone``: without its liars."""
    fleet = {**LIARS, **HONEST_FLEETS}[name]
    liars = () if alone else fleet.liars
    islands = fleet.honest + len(liars)
    tasks = languages(2 if fleet.others else 1)
    per_step = tasks[0].tokens_per_step
    cell = cell_settings(
        {**RECIPE, "task": "examples.numpy_task:task", "islands": islands, "steps": steps, **fleet.cell}
        | (faults_of(fleet, seed, steps) if fleet.faults else {})
    )
    total_tokens = steps * islands * per_step
    plan = plan_of(cell, seed, total_tokens, per_step)
    changed = CALM | ({"trust": candidate.trust} if has_trust() else {})
    if candidate.rule in OWN:
        changed |= {"merge": OWN[candidate.rule]}
    planned = [
        replace(each, manner=liars[i - fleet.honest], honest_until_s=fleet.honest_share * steps)
        if i >= fleet.honest
        else each
        for i, each in enumerate(plan.islands)
    ]
    others = {each.island_id for each in planned[fleet.honest - fleet.others : fleet.honest]}
    own = {
        each.island_id: with_stream(tasks[each.island_id in others], seed * STREAMS + i)
        for i, each in enumerate(planned)
    }
    works = Works(
        own, Rule(feedback=True, seed=seed, fleet_tokens=islands * per_step, total_tokens=total_tokens), candidate
    )
    kept_out: list[tuple[float, str]] = []

    def note(now_s: float, who: str, name: str, fields: Mapping[str, Any]) -> None:
        if name == "island.quarantined":
            kept_out.append((now_s, str(fields["island"])))

    config = replace(plan.config, **changed)
    simulation = Simulation(replace(plan, islands=tuple(planned), config=config), works, note, watching=False)
    assert simulation.run(20.0 * steps), f"{name}, seed {seed}: the run does not end"
    return _result(simulation, planned, others, works, kept_out, tasks, seed)


def _result(
    simulation: Simulation,
    planned: list[IslandPlan],
    others: set[str],
    works: Works,
    kept_out: list[tuple[float, str]],
    tasks: tuple[Task, ...],
    seed: int,
) -> Result:
    lying = {each.island_id for each in planned if each.manner is not None}
    odd = lying or others
    usual = [works.weights[each.island_id] for each in planned if each.island_id not in odd]
    members = simulation.aggregator.core.run.members
    refused = {m.island_id: sum(n for reason, n in m.refusals.items() if reason in BLAMED) for m in members}
    params = global_params(tasks[0].init(seed)[0], simulation.disk.manifest, works.durable)
    caught = [at_s for at_s, who in kept_out if who in lying]
    return Result(
        loss=fmean(task.evaluate(params) for task in tasks),
        honest_tokens=sum(island.tokens for name, island in simulation.islands.items() if name not in lying),
        weight=fmean(works.weights[name] for name in odd) / fmean(usual) if odd else 1.0,
        shares={name: weight / sum(works.weights.values()) for name, weight in works.weights.items()},
        refusals=sum(refused[name] for name in lying),
        accused=sum(n for name, n in refused.items() if name not in lying) + len(kept_out) - len(caught),
        quarantined=caught[0] / simulation.queue.now_s if caught else None,
    )


def has_trust() -> bool:
    """Whether this code has the setting."""
    return "trust" in {each.name for each in dataclasses.fields(AggregatorConfig)}


Pair = tuple[Result, Result]


def pair(name: str, seed: int, without: Result | None = None, steps: int = STEPS, candidate: Candidate = TRUST) -> Pair:
    """Returns a run with liars and one ``without``, made if none serves; or honest islands, and by tokens alone."""
    ours = run(name, seed, steps, candidate=candidate)
    if name in HONEST_FLEETS:
        return ours, run(name, seed, steps, candidate=TOKENS)
    # Where a liar's tokens do not count, the honest train more in the same run.
    trained = round(ours.honest_tokens / HONEST / languages(1)[0].tokens_per_step)
    if without is None or trained > 1.02 * steps:
        without = run(name, seed, max(steps, trained), candidate=candidate, alone=True)
    return ours, without


def row(name: str, pairs: Sequence[Pair]) -> str:
    """Returns a line of the table."""
    ours = [each for each, _ in pairs]
    ratio = interval([100 * (a.loss / b.loss - 1) for a, b in pairs])
    early = interval([100 * (1 - a.honest_tokens / b.honest_tokens) for a, b in pairs])
    caught = [100 * each.quarantined for each in ours if each.quarantined is not None]
    weight = fmean(each.weight for each in ours)
    if name in HONEST_FLEETS:
        weight = min(a.shares[island] / share for a, b in pairs for island, share in b.shares.items() if share)
    cells = (
        name,
        f"{fmean(b.loss for _, b in pairs):.4f}",
        f"{fmean(each.loss for each in ours):.4f}",
        f"{ratio.mean:+.2f} %",
        f"{ratio.low:+.2f} to {ratio.high:+.2f} %",
        f"{100 * weight:.0f} %",
        f"{fmean(each.refusals for each in ours):.1f}",
        f"{len(caught)} of {len(ours)}, at {fmean(caught):.0f} %" if caught else "no",
        f"{early.mean:+.1f} %",
        str(sum(each.accused for each in ours)),
    )
    return f"| {' | '.join(cells)} |"


COLUMNS = (
    "fleet, loss without, loss with, more, 95 % interval, weight, refusals, quarantined, ends early, honest accused"
)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="trust", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="pairs of each fleet (default: 20)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--liar", nargs="+", choices=list(LIARS), help="only these (default: all)")
    parser.add_argument("--honest", nargs="*", choices=list(HONEST_FLEETS), help="fleets without a liar instead")
    parser.add_argument("--rule", choices=[*OWN, *RULES], default="", help="in the place of trust")
    parser.add_argument("--length", type=float, default=1.0, help="multiplies the length of each step (default: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    args = parser.parse_args()
    candidate = Candidate(rule=args.rule, trust=not args.rule, length=args.length)
    names = args.liar or list(LIARS)
    if args.honest is not None:
        names = args.honest or list(HONEST_FLEETS)
        if not has_trust():
            print("without a setting `trust` both runs of a pair are the same", file=sys.stderr)
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    columns = COLUMNS.split(", ")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        without: Sequence[Result | None] = [None] * args.seeds
        if args.honest is None:
            without = list(pool.map(partial(run, names[0], candidate=candidate, alone=True), seeds))
        for row_of in [(name, pool.map(partial(pair, name, candidate=candidate), seeds, without)) for name in names]:
            print(row(row_of[0], list(row_of[1])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
