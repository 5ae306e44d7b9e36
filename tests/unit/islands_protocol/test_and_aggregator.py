"""The island's state machine and the aggregator's, wired to each other in virtual time."""

from broker.wire import messages as m
from islands.protocol.events import CopyState, Restored
from ops.virtual.network import Network
from ops.virtual.simulation import Simulation
from tests.aggregator_hand import of
from tests.island_hand import SETTINGS, Hand, sent
from tests.sim.test_simulation import finish, steady


def test_nothing_hangs_when_every_kind_of_message_is_lost_once():
    seen = set()

    class LosesOne(Network):
        def to_broker(self, process, to, message, sequence, broker=0):
            key = process.name, type(message)
            if key in seen:
                super().to_broker(process, to, message, sequence, broker)
            seen.add(key)

    simulation = finish(Simulation(steady(2, fragments=2), network=LosesOne))
    assert {m.Join, m.Heartbeat, m.Contribution, m.Want, m.FleetState, m.Version} <= {kind for _, kind in seen}
    assert simulation.queue.now_s < 60.0, "trained for 20 s, and each loss made up for in seconds"
    run = simulation.aggregator.core.run
    assert all(island.core.finished for island in simulation.islands.values())
    assert all(island.versions() == tuple(run.versions) for island in simulation.islands.values())
    books = run.ledger.books()
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
