"""A bench of islands that lie, and of islands that do not: real training in virtual time, seeds in pairs.

    python -m tests.sim.trust --seeds 20 [--liar NAME ..] [--jobs 2]      # each liar beside four honest islands
    python -m tests.sim.trust --seeds 20 --honest [NAME ..] [--jobs 2]    # fleets without a liar, trust on against off
    python -m tests.sim.trust --seeds 5 --rule examples.geometric_median:GeometricMedian    # in the place of trust

Both runs of a pair have the same seed, parameters, batches of each island, and delays. With a liar the other run is the
honest islands alone, under the same rule, which train as many steps: what is missing is the liar's tokens. So the third
column says what a liar costs under a rule, and the second what the rule itself costs. Without a liar the other run is
always tokens alone. The task is the example in numpy.
The column "weight" has the liars' mean merge weight beside that of the others; of fleets without a liar the least share
that any island has in the merges of any seed, beside its share without trust.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import fmean
from typing import Any

import numpy as np

from aggregator.rules.quarantine import OFFENCES
from broker.wire.messages import Reason
from islands.tasks.task import DataShare, Task, load_task
from ops.faults.kinds import LIES, FaultKind
from ops.lab.decoupled import Run, global_params, plan_of
from ops.lab.statistics import interval
from ops.plans.cell import cell_settings

HONEST = 4
#: Of each island: 400,000 tokens of four honest islands and a liar.
STEPS = 1250
RECIPE = {"mode": "decoupled", "fragments": 8, "sync_interval": 24, "codec": "bf16", "jitter": 0.1}
#: A plain outer step.
PLAIN = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
#: Heartbeats and blocks of data are rare: they would take longer than the steps, which are short.
CALM: dict[str, Any] = {
    "heartbeat_interval_s": 4.0,
    "suspect_after_s": 16.0,
    "dead_after_s": 48.0,
    "data_ahead_s": 60.0,
}
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


def with_stream(task: Task, stream: int) -> Task:
    """Returns the task with batches that only this stream has, whichever blocks an island is given."""

    def data(share: DataShare) -> Iterator[Any]:
        while True:
            own = DataShare(index=stream, count=STREAMS * 1000, cursor=share.own)
            share.take()
            yield next(iter(task.data(own)))

    return replace(task, data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is measured: trust, or a merge rule in its place.

    Attributes:
        rule: The run's setting ``merge``; empty: its default.
        trust: Whether trust is on.
    """

    rule: str = ""
    trust: bool = True


TRUST, TOKENS = Candidate(), Candidate(trust=False)


def run(name: str, seed: int, steps: int = STEPS, *, candidate: Candidate = TRUST, alone: bool = False) -> Result:
    """Returns what came out of a fleet's run of that many steps of each island; ``alone``: without its liars."""
    fleet = {**LIARS, **HONEST_FLEETS}[name]
    manners = (*fleet.honest * (None,), *(() if alone else fleet.liars))
    tasks = languages(2 if fleet.others else 1)
    per_step = tasks[0].tokens_per_step
    cell = cell_settings(
        {**RECIPE, "task": "examples.numpy_task:task", "islands": len(manners), "steps": steps, **fleet.cell}
        | (faults_of(fleet, seed, steps) if fleet.faults else {})
    )
    plan = plan_of(cell, seed, steps * len(manners) * per_step, per_step)
    rule = {"merge": candidate.rule} if candidate.rule else {}
    honest_until_s = fleet.honest_share * steps
    plan = replace(
        plan,
        config=replace(plan.config, **CALM, **PLAIN, **rule, trust=candidate.trust),
        islands=tuple(
            replace(each, manner=manner, honest_until_s=honest_until_s)
            for each, manner in zip(plan.islands, manners, strict=True)
        ),
    )
    names = [each.island_id for each in plan.islands]
    lying, others = names[fleet.honest :], names[fleet.honest - fleet.others : fleet.honest]
    own = {each: with_stream(tasks[each in others], seed * STREAMS + i) for i, each in enumerate(names)}
    weights: Counter[str] = Counter()  # type: ignore[assignment]
    kept_out: list[tuple[float, str]] = []

    def note(now_s: float, who: str, event: str, fields: Mapping[str, Any]) -> None:
        if event == "island.quarantined":
            kept_out.append((now_s, fields["island"]))
        elif event == "version.committed":
            weights.update({each["island"]: each["merge_weight"] for each in fields["contributions"]})

    with Run(plan, lambda island: own[island.name], note, watching=False) as simulation:
        assert simulation.run(20.0 * steps), f"{name}, seed {seed}: the run does not end"
        params = global_params(tasks[0].init(seed)[0], simulation.aggregator)
    odd = lying or others
    members = simulation.aggregator.core.run.fleet.members
    refused = {m.island_id: sum(n for reason, n in m.refusals.items() if reason in BLAMED) for m in members}
    caught = [at_s for at_s, who in kept_out if who in lying]
    return Result(
        loss=fmean(task.evaluate(params) for task in tasks),
        honest_tokens=sum(island.tokens for name, island in simulation.islands.items() if name not in lying),
        weight=fmean(weights[name] for name in odd) / fmean(weights[each] for each in names if each not in odd)
        if odd
        else 1.0,
        shares={name: weight / weights.total() for name, weight in weights.items()},
        refusals=sum(refused[name] for name in lying),
        accused=sum(n for name, n in refused.items() if name not in lying) + len(kept_out) - len(caught),
        quarantined=caught[0] / simulation.now_s if caught else None,
    )


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
    parser.add_argument("--rule", default="", metavar="MODULE:RULE", help="a merge rule, in the place of trust")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    args = parser.parse_args()
    candidate = Candidate(rule=args.rule, trust=not args.rule)
    names = args.liar or list(LIARS)
    if args.honest is not None:
        names = args.honest or list(HONEST_FLEETS)
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
