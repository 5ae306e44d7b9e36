"""Links that are nearly full, or too narrow, where a fragment takes longer than the first pause before a repetition.

What was sent again on such a link queued behind its own first copy. A site whose link was four fifths full took part
in 6 % of the versions, and a fleet of them merged a quarter of its tokens.
"""

from __future__ import annotations

from ast import literal_eval
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import pytest

from aggregator.config import AggregatorConfig
from aggregator.rounds.ending import LINGER_S
from broker.routing.relay import Send as RelaySend
from broker.routing.resending import RESEND_S
from broker.wire import messages as m
from ops.planning.forecast import arrival
from ops.virtual.aggregator import SimAggregator
from ops.virtual.broker import SimBroker
from ops.virtual.network import Network, Process
from ops.virtual.plan import IslandPlan, SimulationPlan
from ops.virtual.queue import LinkModel
from ops.virtual.simulation import Simulation

STEPS, FRAGMENTS, INTERVAL = 400, 6, 24
# Whole versions: of these a link may leave some out, which the planner's closed form counts on.
CONFIG = AggregatorConfig(fragments=FRAGMENTS, sync_interval=INTERVAL, version_codec=m.Codec.F32)
MODEL_BYTES = 4 * sum(tensor.size for tensor in SimulationPlan(seed=0, islands=(), config=CONFIG).model())


class Counted(Network):
    """Counts what goes up, and the copies among it."""

    def __init__(self, simulation: Simulation, up_only: bool) -> None:
        super().__init__(simulation)
        self.up_only = up_only  # what comes to aggregators comes at once
        self.sent: Counter[tuple[str, int, int]] = Counter()
        self.published: Counter[tuple[type[m.Message], int, int]] = Counter()
        self.forwarded: Counter[tuple[str, int, int]] = Counter()

    def arrivals_s(self, process: Process, message: m.Message, direction: str, broker: int) -> list[float]:
        if self.up_only and isinstance(process, SimAggregator) and direction == "down":
            return [0.02]
        return super().arrivals_s(process, message, direction, broker)

    def to_broker(self, process: Process, to: str, message: m.Message, sequence: int, broker: int = 0) -> None:
        if isinstance(message, m.Contribution):
            self.sent[(process.name, message.fragment_id, message.steps.to_step)] += 1
        if isinstance(message, m.Version | m.Replica):
            self.published[(type(message), message.fragment_id, message.fragment_version)] += 1
        super().to_broker(process, to, message, sequence, broker)

    def from_broker(self, broker: SimBroker, action: RelaySend) -> None:
        message = action.envelope.message
        if isinstance(message, m.Contribution | m.Seed):
            to_step = message.steps.to_step if isinstance(message, m.Contribution) else 0
            self.forwarded[(action.envelope.sender, message.fragment_id, to_step)] += 1
        super().from_broker(broker, action)


@cache  # a run takes seconds, and several tests look at it
def fleet(
    *full: float,
    hub: float = 0.0,
    up_only: bool = False,
    standbys: int = 0,
    far_s: float = 0.01,
    max_staleness: int = CONFIG.max_staleness,
) -> Simulation:
    """Runs a fleet, an island for each number: what a model in each interval would take of its link; 0 for nothing.

    ``hub`` is that of the aggregator's own link to the broker, with what goes to standbys: parameters and momentum;
    with ``up_only`` contributions come to it over a better one. The last island is ``far_s`` away, each way.
    """
    config = AggregatorConfig(
        failover=standbys > 0,
        islands=len(full),
        total_tokens=STEPS * len(full) * 100,
        fragments=FRAGMENTS,
        sync_interval=INTERVAL,
        max_staleness=max_staleness,
        version_codec=CONFIG.version_codec,
        dead_after_s=60.0,  # in proportion to steps of a second
        suspect_after_s=20.0,
    )
    islands = tuple(
        IslandPlan(
            island_id=f"island-{i}",
            step_time_s=1.0,
            jitter=0.02,
            link=LinkModel(
                delay_s=(delay_s, delay_s + 0.01), bytes_per_s=MODEL_BYTES / INTERVAL / part if part else 0.0
            ),
        )
        for i, (part, delay_s) in enumerate(zip(full, [0.01] * (len(full) - 1) + [far_s], strict=True))
    )
    rate = MODEL_BYTES * (1 + 2 * standbys) / INTERVAL / hub if hub else 0.0
    link = LinkModel(delay_s=(0.01, 0.02), bytes_per_s=rate)
    plan = SimulationPlan(seed=1, islands=islands, config=config, link=link, standbys=standbys)
    simulation = Simulation(plan, watching=False, network=partial(Counted, up_only=up_only))
    assert simulation.run(5 * STEPS), "it does not end"
    simulation.invariants.at_end(simulation)
    return simulation


def counted(simulation: Simulation) -> Counted:
    assert isinstance(simulation.network, Counted)
    return simulation.network


def merged_share(simulation: Simulation, island: str | None = None) -> float:
    books = simulation.aggregator.core.run.ledger.books(island).tokens()
    return books["merged"] / books["trained"]


@pytest.mark.parametrize("full", [(0, 0, 0, 1.1)], ids=str)
def test_a_link_that_is_nearly_full_costs_no_token(full: tuple[float, ...]) -> None:
    assert max(full) * INTERVAL / FRAGMENTS > RESEND_S
    simulation = fleet(*full)
    assert merged_share(simulation) > 0.995


@pytest.mark.parametrize("full", [(1.5,) * 4], ids=str)
def test_contributions_are_sent_twice_only_while_the_link_is_not_known(full: tuple[float, ...]) -> None:
    later = [times for (_, _, to_step), times in counted(fleet(*full)).sent.items() if to_step > STEPS / 5]
    assert sum(later) - len(later) <= 0.05 * len(later)


@pytest.mark.parametrize("full", [(2.5,) * 4], ids=str)
def test_where_all_links_are_too_narrow_nearly_everything_is_merged_later(full: tuple[float, ...]) -> None:
    assert merged_share(fleet(*full)) > 0.93


def test_one_link_that_is_too_narrow_costs_the_others_nothing() -> None:
    simulation = fleet(0, 0, 0, 2.5)
    assert min(merged_share(simulation, f"island-{i}") for i in range(3)) > 0.99


@pytest.mark.parametrize("hub", [3.0])
def test_what_waits_on_an_aggregators_narrow_link_is_not_sent_again(hub: float) -> None:
    """Not even before any journey is known, when a version takes twelve seconds and the first pause is one."""
    assert set(counted(fleet(0, 0, 0, 0, hub=hub, up_only=True)).published.values()) == {1}


@pytest.mark.parametrize(("full", "standbys"), [(0.9, 1)])
def test_versions_and_replicas_go_once_over_an_aggregators_narrow_link(full: float, standbys: int) -> None:
    simulation = fleet(0, hub=full, standbys=standbys)
    assert merged_share(simulation) == 1.0
    for kind in (m.Version, m.Replica)[: 1 + standbys]:
        known = [(each, n) for (each, _, version), n in counted(simulation).published.items() if version > 1]
        times = [n for each, n in known if each is kind]
        assert sum(times) <= 1.3 * len(times)


def test_an_aggregator_stays_until_its_last_versions_have_crossed_its_narrow_link() -> None:
    """Islands that are left without them never end."""
    simulation = fleet(0, 0, 0, 0, hub=3.0, up_only=True)
    (ended_at_s,) = (at_s for at_s, _, name, _ in simulation.trace if name == "run.ended")
    assert simulation.queue.now_s > ended_at_s + LINGER_S


def test_an_aggregators_link_that_is_too_narrow_costs_no_token() -> None:
    """A fragment takes ten seconds on it, and no journey is known when the first ones are sent.

    Islands send what they hear nothing of again; the broker knows that it is still there.
    """
    simulation = fleet(0, hub=2.5)
    assert merged_share(simulation) == 1.0
    assert max(counted(simulation).sent.values()) > 1
    assert set(counted(simulation).forwarded.values()) == {1}


@pytest.mark.parametrize("hub", [3.0])
def test_rounds_wait_for_versions_that_an_aggregators_narrow_link_still_carries(hub: float) -> None:
    """Where they did not, all that islands handed over was trained from ever earlier versions, and soon too stale."""
    simulation = fleet(0, 0, 0, 0, hub=hub, up_only=True)
    assert merged_share(simulation) == 1.0
    (trained_at_s,) = (at_s for at_s, _, name, _ in simulation.trace if name == "run.flushing")
    manifest = simulation.disk.manifest
    assert manifest is not None
    committed_bytes = sum(
        4 * manifest.sizes[literal_eval(fields)["fragment"]]
        for at_s, _, name, fields in simulation.trace
        if name == "version.committed" and at_s < trained_at_s
    )
    assert committed_bytes <= MODEL_BYTES * (trained_at_s / INTERVAL / hub + 1)


@pytest.mark.parametrize("times", [3.0])
def test_what_the_planner_says_of_a_narrow_site_is_what_happens(times: float) -> None:
    """Its closed form against the cores: how often a site takes part, and whether its steps are too stale by then."""
    said = arrival(times, times, FRAGMENTS, max_staleness=CONFIG.max_staleness)
    simulation = fleet(0, 0, 0, times)
    later = [
        literal_eval(fields)
        for at_s, _, name, fields in simulation.trace
        if name == "version.committed" and STEPS / 2 < at_s < STEPS
    ]
    in_it = [any(each["island"] == "island-3" for each in version["contributions"]) for version in later]
    assert sum(in_it) / len(in_it) == pytest.approx(said.participation * said.in_time, abs=0.15)
    assert merged_share(simulation, "island-3") == pytest.approx(said.in_time, abs=0.2)


@pytest.mark.parametrize(("full", "limit"), [((0, 0, 0, 1.5), 3)], ids=str)
def test_what_the_planner_says_of_another_limit_of_staleness_is_what_happens(
    full: tuple[float, ...], limit: int
) -> None:
    said = arrival(full[-1], full[-1], FRAGMENTS, max_staleness=limit)
    assert merged_share(fleet(*full, max_staleness=limit), "island-3") == pytest.approx(said.in_time, abs=0.2)


def test_a_site_that_is_far_away_is_merged_and_nobody_waits_for_it() -> None:
    """A round of it alone takes longer than H steps; ``plan`` makes a note of it, and plans for the others."""
    near, far = fleet(0, 0, 0, 0), fleet(0, 0, 0, 0, far_s=13.0)
    assert sum(far.aggregator.core.run.versions) >= 0.95 * sum(near.aggregator.core.run.versions)
    assert all(merged_share(far, f"island-{i}") == 1.0 for i in range(3))
    assert merged_share(far, "island-3") >= 0.85


# --- links that change ----------------------------------------------------------------------------------------------

#: What the model in bf16 takes of a wide link in each interval; of one a twentieth as wide it takes more than there is.
PART = 0.08
NARROW_S = range(100, 220)


@cache
def changing(*, adapt: bool = True, part: float = PART) -> Simulation:
    """Four islands; the link of the last becomes 20 times narrower for two minutes."""
    config = AggregatorConfig(
        islands=4,
        total_tokens=STEPS * 400,
        fragments=FRAGMENTS,
        sync_interval=INTERVAL,
        adapt=adapt,
        dead_after_s=60.0,
        suspect_after_s=20.0,
    )
    wide = LinkModel(delay_s=(0.04, 0.05), bytes_per_s=MODEL_BYTES / 2 / INTERVAL / part)
    islands = tuple(IslandPlan(island_id=f"island-{i}", step_time_s=1.0, jitter=0.02, link=wide) for i in range(4))
    plan = SimulationPlan(seed=1, islands=islands, config=config, links_measured=True)
    simulation = Simulation(plan, watching=False)

    def become(link: LinkModel) -> None:
        island = simulation.islands["island-3"]
        island.plan = replace(island.plan, link=link)

    narrow = replace(wide, bytes_per_s=wide.bytes_per_s / 20)
    simulation.queue.after(NARROW_S.start, partial(become, narrow))
    simulation.queue.after(NARROW_S.stop, partial(become, wide))
    assert simulation.run(5 * STEPS), "it does not end"
    simulation.invariants.at_end(simulation)
    return simulation


def presence(simulation: Simulation, seconds: range) -> float:
    """The share of the versions of some time that the last island is in."""
    versions = [
        literal_eval(fields)["contributions"]
        for at_s, _, name, fields in simulation.trace
        if name == "version.committed" and seconds.start <= at_s < seconds.stop
    ]
    present = [any(each["island"] == "island-3" for each in version) for version in versions]
    return sum(present) / len(present)


def test_a_link_that_becomes_a_twentieth_is_met_by_narrower_numbers_and_they_come_back() -> None:
    simulation = changing()
    told = [
        (at_s, literal_eval(fields)["codec"]) for at_s, who, name, fields in simulation.trace if name == "link.adapted"
    ]
    (narrower_s, narrower), (wider_s, wider) = told
    assert (narrower, wider) == ("int4", "bf16")
    assert NARROW_S.start < narrower_s < NARROW_S.start + INTERVAL
    assert NARROW_S.stop < wider_s < NARROW_S.stop + 30


def test_its_island_stays_in_the_versions_and_all_is_merged() -> None:
    simulation = changing()
    assert presence(simulation, NARROW_S) > 0.5
    assert merged_share(simulation) > 0.999
    assert presence(changing(adapt=False), NARROW_S) < presence(simulation, NARROW_S)


def test_where_the_narrowest_numbers_are_too_wide_some_rounds_are_left_out_and_their_steps_are_merged() -> None:
    """In int4 each round would take two and a half times the link."""
    simulation = changing(part=0.5)
    told = [literal_eval(fields) for at_s, _, name, fields in simulation.trace if name == "link.adapted" and at_s > 90]
    assert [(each["codec"], each["share"]) for each in (told[0], told[-1])] == [("int4", 1 / 8), ("bf16", 1.0)]
    assert 0 < presence(simulation, NARROW_S) < 0.5
    assert merged_share(simulation, "island-3") > 0.6
    assert min(merged_share(simulation, f"island-{i}") for i in range(3)) > 0.999
