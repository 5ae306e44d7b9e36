"""The island's state machine and the aggregator's, wired to each other."""

from broker.wire import messages as m
from islands.protocol.events import CopyState, Restored
from tests.aggregator_hand import of
from tests.island_hand import SETTINGS, Hand, sent
from tests.linked_cores import LinkedCluster


def test_nothing_hangs_when_every_kind_of_message_is_lost_once():
    cluster = LinkedCluster("a", "b", fragments=2, total_tokens=1200)
    seen = set()

    def lose_once(sender, to, message):
        key = sender, type(message)
        return key not in seen and not seen.add(key)

    cluster.lose = lose_once
    cluster.train(150)
    run = cluster.aggregator.run
    assert run.phase is m.Phase.ENDED
    for island in cluster.islands.values():
        assert island.core.finished
        assert [island.core.fragments[p].version for p in range(2)] == list(run.versions)
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
