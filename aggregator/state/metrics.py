"""The metrics of an aggregator, from its reports to Redis and its core. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aggregator.state.members import Member
from aggregator.state.run import Run
from broker.metrics.family import Families, Family
from broker.routing.liveness import Liveness
from broker.wire.messages import Heartbeat, Phase, Reason
from broker.wire.records import FragmentRecord, RunTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandFigures:
    """An island as the leader knows it: what it trained, and the last heartbeat of its present life.

    What it trained is None after a restart of the aggregator until it has said so: what the store knows may be a little
    less than what was told before, and Prometheus takes a counter that goes back for one that began at zero.
    """

    state: Liveness
    heard_ago_s: float
    inner_steps: int | None
    tokens: int | None
    incarnation: int
    beat: Heartbeat | None = None
    corruptions: int = 0
    agreement: float | None = None
    trust: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leading:
    """The figures of a run that its leading aggregator serves as metrics, at one moment.

    Attributes:
        epoch: Under which it leads.
        fragments: The newest versions.
        totals: Where the run stands.
        staleness_sum: Mean staleness of each version's contributions, summed over all versions.
        refusals: Island -> reason -> messages.
        islands: Every island that ever joined.
        round_s: Moving average, from opening a round to its durable version; None before the first.
        sync_s: Moving average, from closing a round to its durable version.
        round_interval_s: Time in which every fragment comes due once, at the pace of now; 0 while nobody trains.
        open_rounds: How many there are.
        waiting_bytes: Bytes of contributions that wait in rounds, or are held.
        store_broken: The store could not be written last time.
        diverging: The fleet's agreement has fallen.
        standbys: Name -> whether it has every published version; None without failover.
    """

    epoch: int
    fragments: Sequence[FragmentRecord]
    totals: RunTotals
    staleness_sum: float
    refusals: Mapping[str, Mapping[str, int]]
    islands: Mapping[str, IslandFigures]
    round_s: float | None
    sync_s: float | None
    round_interval_s: float
    open_rounds: int
    waiting_bytes: int
    store_broken: bool
    diverging: bool
    standbys: Mapping[str, bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorSnapshot:
    """An aggregator process at one moment.

    Attributes:
        run_id: Name of its run.
        shard: Its own.
        leading: None while it stands by.
        store_free_bytes: Left on the disk of its store for this user; None if that is not known.
        store_size_bytes: Size of that disk.
        wall_s: Seconds since 1970.
    """

    run_id: str
    shard: int
    wall_s: float
    leading: Leading | None = None
    store_free_bytes: int | None = None
    store_size_bytes: int | None = None


def leading_of(
    run: Run,
    *,
    fragments: Sequence[FragmentRecord],
    totals: RunTotals,
    refusals: Mapping[str, Mapping[str, int]],
    standbys: Mapping[str, bool] | None,
    now_s: float,
) -> Leading:
    """Returns a leader's figures.

    Args:
        run: The core's.
        fragments: As reported to Redis, as are the next two.
        totals: See above.
        refusals: See above.
        standbys: With failover, who of them is in sync.
        now_s: By the clock of the core.
    """
    interval_s = run.schedule.interval.steps * run.schedule.median_step_s(run.now_s)
    known = run.standings()
    return Leading(
        epoch=run.epoch,
        fragments=fragments,
        totals=totals,
        staleness_sum=run.books.ledger.participation().staleness_sum,
        refusals=refusals,
        islands={m.island_id: _figures(run, m, known.get(m.island_id, {}), now_s) for m in run.fleet.members},
        round_s=run.schedule.round_times.journey_s,
        sync_s=run.schedule.round_times.sync_s,
        round_interval_s=max(interval_s, run.schedule.round_times.journey_s or 0.0),
        open_rounds=len(run.schedule.open_rounds),
        waiting_bytes=run.model.waiting_bytes(),
        store_broken="store" in run.troubles,
        diverging=run.books.course.fallen,
        standbys=standbys,
    )


def _figures(run: Run, member: Member, standing: Mapping[str, Any], now_s: float) -> IslandFigures:
    inner_steps, tokens = run.books.ledger.trained(member.island_id)
    beat = member.heartbeat
    unheard = member.presumed and beat is None and run.fleet.members.lives(member.island_id, now_s)
    return IslandFigures(
        state=run.fleet.members.state(member, now_s),
        heard_ago_s=now_s - member.last_seen_s,
        inner_steps=None if unheard else inner_steps,
        tokens=None if unheard else tokens,
        incarnation=member.incarnation,
        beat=beat,
        corruptions=member.corruptions,
        agreement=standing.get("agreement"),
        trust=standing.get("trust"),
    )


def families_of(now: AggregatorSnapshot) -> list[Family]:
    """Returns the metrics of an aggregator; those of a leader have no samples while it stands by."""
    own = Families("atoll_aggregator", run=now.run_id, shard=str(now.shard))
    leading = now.leading
    own.gauge("leader", "1 if this process leads its shard, 0 if it stands by.", float(leading is not None))
    own.gauge(
        "store_free_bytes", "Bytes that this user may still write on the disk of the store.", now.store_free_bytes
    )
    own.gauge("store_size_bytes", "Size of the disk of the store in bytes.", now.store_size_bytes)
    if leading is not None:
        _run(own, leading)
        _rounds(own, leading, now.wall_s)
        _islands(own, leading, now.wall_s)
    return own.all


def _run(own: Families, now: Leading) -> None:
    totals, books = now.totals, now.totals.books
    # In exact parts of a token: rounded, a count could go back by one, which Prometheus takes for a restart.
    scale = books["scale"]
    wasted = {reason: count / scale for reason, count in books["wasted"].items()}
    own.gauge("epoch", "Epoch under which this aggregator leads; a takeover begins another.", now.epoch)
    own.state("phase", "1 in the phase that the run is in.", totals.phase, Phase)
    known = all(each.tokens is not None for each in now.islands.values())
    own.counter("trained_tokens", "Tokens trained by all islands.", books["trained"] / scale if known else None)
    own.counter("merged_tokens", "Tokens merged, each fragment weighted by its size.", books["merged"] / scale)
    own.gauge("in_flight_tokens", "Tokens trained whose fate is still open.", books["in_flight"] / scale)
    own.gauge("wasted_tokens", "Tokens trained that were never merged, by reason.", wasted, "reason")
    own.gauge("target_tokens", "Tokens after which the run ends; 0 for no end.", totals.target_tokens)
    own.gauge("loss", "Mean training loss of the islands that live.", totals.loss)
    own.gauge("store_broken", "1 if the store could not be written last time, else 0.", float(now.store_broken))
    in_sync = None if now.standbys is None else {name: float(each) for name, each in now.standbys.items()}
    own.gauge("standby_in_sync", "1 if the standby has every published version, else 0.", in_sync or {}, "standby")
    own.gauge(
        "standbys_in_sync",
        "Standbys that have every published version; no sample without failover.",
        None if in_sync is None else sum(in_sync.values()),
    )


def _rounds(own: Families, now: Leading, wall_s: float) -> None:
    totals = now.totals
    versions = {str(each.fragment_id): float(each.version) for each in now.fragments}
    committed = {str(each.fragment_id): wall_s - each.committed_ago_s for each in now.fragments}
    merged = {str(each.fragment_id): float(each.merged_tokens) for each in now.fragments}
    rounds = {str(islands): float(count) for islands, count in totals.rounds.items()}
    contributors = sum(islands * count for islands, count in totals.rounds.items())
    own.gauge("fragment_version", "Newest published version of the fragment.", versions, "fragment")
    own.gauge("fragment_version_timestamp_seconds", "When the newest version became durable.", committed, "fragment")
    own.counter("fragment_merged_tokens", "Tokens merged into the fragment.", merged, "fragment")
    own.counter("versions", "Versions published, of all fragments, without version 0.", totals.model_version)
    own.counter("rounds", "Rounds that led to a version, by number of islands in it.", rounds, "islands")
    own.counter("contributors", "Islands in versions, summed over all versions.", contributors)
    own.counter("staleness_versions", "Mean staleness of each version's contributions, summed.", now.staleness_sum)
    own.gauge("participation_ratio", "Mean share of the live islands in a version.", totals.participation)
    own.gauge("fleet_agreement", "Cosine by which islands agree, mean over the last versions.", totals.agreement)
    own.gauge(
        "momentum_cosine", "Cosine of a merge with the momentum before it, mean likewise.", totals.momentum_cosine
    )
    own.gauge("diverging", "1 if the agreement has suddenly fallen below half of its usual mean.", now.diverging)
    own.gauge("round_seconds", "Moving average from opening a round to its durable version.", now.round_s)
    own.gauge("round_sync_seconds", "Moving average from closing a round to its durable version.", now.sync_s)
    own.gauge(
        "round_interval_seconds",
        "Time in which every fragment comes due once at the present pace; a round's time if that is longer.",
        now.round_interval_s,
    )
    own.gauge("open_rounds", "Rounds that wait for answers.", now.open_rounds)
    own.gauge("waiting_bytes", "Bytes of contributions that wait in rounds or are held.", now.waiting_bytes)


def _islands(own: Families, now: Leading, wall_s: float) -> None:
    islands = now.islands
    # At 0 from the start: Prometheus does not see the growth of a counter that begins at 1.
    refused = {(island, str(Reason.NOT_FINITE)): 0.0 for island in islands}
    for island, reasons in now.refusals.items():
        refused |= {(island, reason): float(count) for reason, count in reasons.items()}
    own.counter("refused_messages", "Messages refused, by island and reason.", refused, "island", "reason")
    own.state(
        "island_state",
        "1 in the state of the island by its silence.",
        {name: each.state for name, each in islands.items()},
        Liveness,
        "island",
    )

    def each(value: Callable[[IslandFigures], float | None]) -> dict[str, float | None]:
        return {name: value(figures) for name, figures in islands.items()}

    def told(value: Callable[[Heartbeat], float | None]) -> dict[str, float | None]:
        return each(lambda i: None if i.beat is None else value(i.beat))

    heard = each(lambda i: wall_s - i.heard_ago_s)
    own.gauge("island_heard_timestamp_seconds", "When the aggregator heard the island last.", heard, "island")
    own.counter(
        "island_tokens", "Tokens trained by the island, over all its lives.", each(lambda i: i.tokens), "island"
    )
    own.counter(
        "island_steps", "Inner steps of the island, over all its lives.", each(lambda i: i.inner_steps), "island"
    )
    own.counter("island_lives", "Processes that the island has had.", each(lambda i: i.incarnation), "island")
    corruptions = "Times that this life of the island found a fragment corrupt in its memory."
    own.counter("island_corruptions", corruptions, each(lambda i: i.corruptions), "island")
    own.gauge("island_loss", "Training loss by the last heartbeat.", told(lambda b: b.loss), "island")
    own.gauge("island_step_seconds", "Moving average of an inner step.", told(lambda b: b.step_time_s), "island")
    own.gauge(
        "island_sync_ratio",
        "Part of the training thread's time that synchronisation takes.",
        told(lambda b: b.sync_share),
        "island",
    )
    own.counter("island_sent_bytes", "Bytes sent by this life of the island.", told(lambda b: b.bytes_up), "island")
    own.counter(
        "island_received_bytes", "Bytes received by this life of the island.", told(lambda b: b.bytes_down), "island"
    )
    agreements, trust = each(lambda i: i.agreement), each(lambda i: i.trust)
    own.gauge("island_agreement", "Cosine of the island with the others, moving average.", agreements, "island")
    own.gauge("island_trust", "Share of its tokens' weight that the island has, 0 to 1.", trust, "island")
    quarantined = {name: float(why["for_s"]) for name, why in now.totals.quarantined.items()}
    own.gauge("island_quarantine_seconds", "For how much longer the island is kept out.", quarantined, "island")
