"""Islands and an aggregator that lose what they say to each other."""

from dataclasses import replace

from broker.transport.endpoint import Endpoint
from broker.wire import messages as m
from islands.protocol.events import CopyState, Restored
from tests.aggregator_hand import of
from tests.island_hand import SETTINGS, Hand, sent
from tests.sim.counting import run
from tests.sim.packed import short_plan


def test_nothing_hangs_when_every_kind_of_message_is_lost_once(monkeypatch):
    """As a message is that finds no connection, or a full queue."""
    seen, send = set(), Endpoint.send

    async def loses_one(endpoint, envelope, **how):
        key = envelope.sender, type(envelope.message)
        if key in seen:
            return await send(endpoint, envelope, **how)
        seen.add(key)
        return True

    monkeypatch.setattr(Endpoint, "send", loses_one)
    plan = short_plan(steps=60)
    simulation = run(replace(plan, standbys=0, config=replace(plan.config, failover=False)))
    assert {m.Join, m.Heartbeat, m.Contribution, m.Want, m.FleetState, m.Version} <= {kind for _, kind in seen}
    assert simulation.now_s < 30.0, "trained for 12 s, and each loss made up for in seconds"
    books = simulation.aggregator.core.run.books.ledger.books()
    assert books.in_flight == 0
    assert books.balanced()


def test_an_island_whose_optimizer_was_fresh_gives_it_after_a_sync_interval():
    island = Hand()
    island.feed(Restored(source=m.StateSource.FRESH))
    for step, trained in ((SETTINGS.recipe.sync_interval - 1, False), (1, True)):
        island.boundary(step)
        actions = island.hear(m.FetchState(state_id="", parts=(0,)))
        declined = [part for part in sent(actions, m.StatePart) if not part.num_parts]
        assert bool(declined) is not trained
        assert bool(of(actions, CopyState)) is trained
