"""The final report and the records for Redis, from the aggregator's counts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from aggregator.rules.interval import WORTH_TELLING, journey_cost
from aggregator.state.run import Run
from broker.routing.directory import UNKNOWN
from broker.wire.messages import Envelope, Heartbeat
from broker.wire.records import FragmentRecord, RunTotals


@dataclass(slots=True)
class Sent:
    """Bytes up and down of one island: of its newest process, and of all before."""

    incarnation: int = 0
    newest: tuple[int, int] = (0, 0)
    before: tuple[int, int] = (0, 0)

    def take(self, incarnation: int, up: int, down: int) -> None:
        """Takes the counters of a heartbeat; counters that have gone back are of another process."""
        if incarnation < self.incarnation:
            return  # it comes late
        if incarnation > self.incarnation or up < self.newest[0]:
            self.incarnation, self.before = incarnation, self.total
        self.newest = up, down

    @property
    def total(self) -> tuple[int, int]:
        """Returns the bytes of all its processes."""
        return self.before[0] + self.newest[0], self.before[1] + self.newest[1]


class Traffic:
    """Bytes of every island, over all its known lives."""

    def __init__(self) -> None:
        self._sent: dict[str, Sent] = {}

    def observe(self, envelope: Envelope) -> None:
        """Takes the counters of a heartbeat."""
        beat = envelope.message
        if isinstance(beat, Heartbeat):
            sent = self._sent.setdefault(envelope.sender, Sent())
            sent.take(envelope.incarnation, beat.bytes_up, beat.bytes_down)

    def of(self, island_id: str) -> Sent:
        """Returns the bytes of an island."""
        return self._sent.get(island_id) or Sent()

    def recall(self, found: Mapping[str, Sent]) -> None:
        """Adds the bytes that an earlier life of the aggregator had counted."""
        for island_id, sent in found.items():
            now = self._sent.get(island_id)
            if now is not None:
                sent.take(now.incarnation, *now.newest)
            self._sent[island_id] = sent


def report(run: Run, traffic: Traffic) -> dict[str, Any]:
    """Returns the report, complete or not, ready for ``json.dumps``.

    Refusals are those of this life of the aggregator, and bytes those that it has heard of, or found in Redis. All else
    covers the whole run: tokens, steps, rounds and what follows from them are restored from the commits.
    """
    ledger, course = run.books.ledger, run.books.course
    books, shares = ledger.books(), ledger.participation()
    return {
        "tokens": books.tokens(),
        "books": asdict(books),
        "versions": {str(p): version for p, version in enumerate(run.versions) if version >= 0},
        "rounds": {str(n): count for n, count in sorted(shares.rounds.items())},
        "participation": shares.participation,
        "staleness_mean": shares.staleness,
        "agreement": course.agreement,
        "momentum_cosine": course.momentum_cosine,
        "islands": {island_id: _island(run, traffic, island_id) for island_id in sorted(ledger.lives())},
        "phase": str(run.phase),
        "recipe": run.recipe_table(),
        "refusals": {str(reason): count for reason, count in sorted(run.fleet.refusals.items())},
    }


def _island(run: Run, traffic: Traffic, island_id: str) -> dict[str, Any]:
    inner_steps, tokens = run.books.ledger.trained(island_id)
    member = run.fleet.members.get(island_id)
    beat = member.heartbeat if member is not None else None
    up, down = traffic.of(island_id).total
    return {
        "inner_steps": inner_steps,
        "tokens": tokens,
        "sync_share": None if beat is None else beat.sync_share,
        "bytes_up": up,
        "bytes_down": down,
        "incarnations": 1 if member is None else member.incarnation,
    }


def _journey(run: Run, now_s: float) -> dict[str, Any]:
    """Returns what journeys take and cost, where that is worth telling."""
    interval = run.schedule.interval
    cost = journey_cost(len(run.fleet.members.live(now_s)), interval.journey_steps, interval.steps)
    return {"steps": interval.journey_steps, "of": interval.steps, "cost": cost} if cost >= WORTH_TELLING else {}


def totals(run: Run, now_s: float, traffic: Traffic | None = None) -> RunTotals:
    """Returns the totals of the run; bytes of earlier lives as far as ``traffic`` has them."""
    ledger, course, interval = run.books.ledger, run.books.course, run.schedule.interval
    books, shares = ledger.books(), ledger.participation()
    tokens = books.tokens()
    target = run.config.total_tokens
    losses = [m.heartbeat.loss for m in run.fleet.members.live(now_s) if m.heartbeat and m.heartbeat.loss is not None]
    return RunTotals(
        phase=str(run.phase),
        trained_tokens=tokens["trained"],
        merged_tokens=tokens["merged"],
        in_flight_tokens=tokens["in_flight"],
        wasted_tokens=tokens["wasted"],
        target_tokens=target,
        progress=min(1.0, ledger.counted_tokens() / target) if target else 0.0,
        loss=_mean(losses),
        model_version=sum(max(0, version) for version in run.versions),
        rounds=dict(sorted(shares.rounds.items())),
        participation=shares.participation,
        staleness_mean=shares.staleness,
        agreement=course.agreement,
        momentum_cosine=course.momentum_cosine,
        trust={name: each for name, each in run.standings().items() if each["trust"] < 1},
        interval={"steps": interval.steps, "because": interval.because} if interval.because else {},
        journey=_journey(run, now_s),
        quarantined={
            island_id: {"for_s": round(each.until_s - now_s, 1), "reason": each.reason, "times": each.times}
            for island_id, each in run.fleet.quarantine.now(now_s).items()
        },
        troubles=run.troubles.sentences(now_s),
        books=asdict(books),
        recipe=run.recipe_table(),
        epoch=run.epoch,
        earlier=_earlier(run, traffic or Traffic()),
    )


def _earlier(run: Run, traffic: Traffic) -> dict[str, dict[str, int]]:
    """Returns tokens and bytes of islands' earlier lives, which their present counters lack."""
    found, ledger = {}, run.books.ledger
    for island_id in ledger.lives():
        tokens = ledger.trained(island_id)[1] - ledger.last_life(island_id).last_tokens
        up, down = traffic.of(island_id).before
        if tokens or up or down:
            found[island_id] = {"tokens": tokens, "bytes_up": up, "bytes_down": down}
    return found


def fragments(run: Run, committed_at_s: Mapping[int, float], began_s: float, now_s: float) -> list[FragmentRecord]:
    """Returns a record per published fragment.

    Args:
        run: The run, with versions and contributions.
        committed_at_s: Fragment -> when its newest version became durable, of those that this process has made.
        began_s: When it began: the others are at least so old.
        now_s: Same clock.
    """
    return [
        FragmentRecord(
            fragment_id=p,
            version=version,
            epoch=run.epoch,
            digest=run.model.fragments[p].digest,
            merged_tokens=run.books.ledger.merged_tokens(p) if p in run.model.moving else 0,
            contributors=tuple(sorted({each.island_id for each in run.model.fragments[p].contributions})),
            committed_ago_s=now_s - committed_at_s.get(p, began_s),
        )
        for p, version in enumerate(run.versions)
        if version >= 0
    ]


def refusals(run: Run) -> dict[str, dict[str, int]]:
    """Returns island -> reason -> refused messages; unknown senders share one name."""
    fleet = run.fleet
    by_island = {m.island_id: {str(reason): n for reason, n in m.refusals.items()} for m in fleet.members if m.refusals}
    rest = {str(reason): n for reason, n in fleet.refusals.items()}
    for reasons in by_island.values():
        for reason, n in reasons.items():
            rest[reason] = rest.get(reason, 0) - n
    unknown = {reason: n for reason, n in rest.items() if n > 0}
    return by_island | ({UNKNOWN: unknown} if unknown else {})


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
