"""Figures of a broker, an aggregator and an island, made by hand, for tests of metrics, alerts and dashboards."""

from types import SimpleNamespace

from aggregator.state.metrics import AggregatorSnapshot, IslandFigures, Leading
from aggregator.state.metrics import families_of as aggregator_families
from broker.registry.reporter import BrokerSnapshot
from broker.registry.reporter import families_of as broker_families
from broker.routing.liveness import Liveness, LivenessConfig
from broker.wire.records import BrokerRecord, FragmentRecord, MemberRecord, RunTotals
from islands.protocol.events import Vitals
from islands.protocol.metrics import families_of
from islands.session.training_state import Position
from tests.aggregator_hand import beat

NOW_S = 1000.0


def broker_snapshot():
    """One island that is heard, one that is not, one that has left."""
    members = [
        MemberRecord(island_id="island-0", incarnation=1, inner_step=5, tokens=500, heard_ago_s=0.5),
        MemberRecord(island_id="island-1", incarnation=2, inner_step=5, tokens=500, heard_ago_s=60.0),
        MemberRecord(island_id="island-2", incarnation=1, inner_step=5, tokens=500, left=True, heard_ago_s=60.0),
    ]
    record = BrokerRecord(
        suspect_after_s=2.0,
        dead_after_s=6.0,
        peers=3,
        received_messages=10,
        received_bytes=1000,
        sent_messages=20,
        sent_bytes=2000,
        queued_bytes=1,
        held_bytes=2,
        dropped={"unreachable": 1},
    )
    refused = {"island-0": {"stale": 2}, "join:ab": {"wrong_run": 1}, "join:cd": {"wrong_run": 2}}
    return BrokerSnapshot(
        run_id="demo",
        name="hub:7001",
        record=record,
        members=members,
        refused=refused,
        liveness=LivenessConfig(),
        redis_connected=True,
        wall_s=NOW_S,
    )


def aggregator_snapshot():
    """A leader with two fragments, two islands and two standbys."""
    totals = RunTotals(
        phase="running",
        trained_tokens=1000,
        merged_tokens=700,
        in_flight_tokens=200,
        target_tokens=5000,
        progress=0.2,
        loss=2.5,
        model_version=7,
        rounds={1: 2, 2: 5},
        participation=0.9,
        agreement=0.3,
        momentum_cosine=0.4,
        books={
            "trained": 3000,
            "merged": 2100,
            "in_flight": 600,
            "wasted": {"stale": 200, "island_lost": 100},
            "scale": 3,
        },
        quarantined={"island-1": {"for_s": 12.5, "reason": "not_finite", "times": 1}},
    )
    fragments = [
        FragmentRecord(
            fragment_id=p,
            version=3 + p,
            epoch=2,
            digest="d",
            merged_tokens=400,
            contributors=(),
            committed_ago_s=5.0 + 2 * p,
        )
        for p in range(2)
    ]
    islands = {
        "island-0": IslandFigures(
            state=Liveness.ALIVE,
            heard_ago_s=0.5,
            inner_steps=5,
            tokens=500,
            incarnation=1,
            beat=beat(5, loss=2.5, step_time_s=0.25, sync_share=0.01, bytes_up=10, bytes_down=20),
            agreement=0.1,
            trust=0.8,
        ),
        "island-1": IslandFigures(state=Liveness.DEAD, heard_ago_s=60.0, inner_steps=5, tokens=500, incarnation=2),
    }
    leading = Leading(
        epoch=2,
        fragments=fragments,
        totals=totals,
        staleness_sum=1.5,
        refusals={"island-1": {"not_finite": 1, "stale": 4}},
        islands=islands,
        round_s=0.8,
        sync_s=0.2,
        round_interval_s=4.0,
        open_rounds=1,
        waiting_bytes=64,
        store_broken=False,
        diverging=False,
        standbys={"hub-2": True, "hub-3": False},
    )
    return AggregatorSnapshot(
        run_id="demo", shard=0, leading=leading, store_free_bytes=10**9, store_size_bytes=10**10, wall_s=NOW_S
    )


def standing_by():
    """A standby that cannot ask its disk."""
    return AggregatorSnapshot(run_id="demo", shard=0, wall_s=NOW_S)


def island_families():
    """Those of an island in the middle of its training."""
    fragments = {0: SimpleNamespace(version=3, outstanding=[1]), 1: SimpleNamespace(version=4, outstanding=[])}
    schedule = SimpleNamespace(progress=SimpleNamespace(trained_tokens=1000))
    core = SimpleNamespace(
        island_id="island-0",
        incarnation=1,
        fragments=fragments,
        fates={"merged": 7, "refused": 1},
        schedule=schedule,
        done=False,
    )
    vitals = Vitals(loss=2.5, step_time_s=0.25, sync_share=0.01, bytes_up=10, bytes_down=20)
    notes = {("contribution.refused", "stale"): 1, ("version.late", ""): 2}
    return families_of("demo", core, vitals, Position(5, 500), notes, heard_wall_s=NOW_S - 0.5)


#: Every metric that there is, with samples.
ALL_FAMILIES = [
    *broker_families(broker_snapshot()),
    *aggregator_families(aggregator_snapshot()),
    *island_families(),
]
