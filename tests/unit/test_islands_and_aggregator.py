"""The island's state machine and the aggregator's, wired to each other."""

from aggregator.events import Flaw
from broker.wire import messages as m
from islands.protocol.events import CopyState, Restored, Tick
from tests.aggregator_hand import of
from tests.island_hand import SETTINGS, Hand, sent
from tests.linked_cores import LinkedCluster


def test_two_islands_and_an_aggregator_merge_every_step():
    cluster = LinkedCluster("a", "b", total_tokens=1000)
    cluster.train(80)
    assert all(island.core.finished for island in cluster.islands.values())
    books = cluster.aggregator.run.ledger.books().tokens()
    assert books["merged"] == books["trained"] >= 1000
    assert {i.core.fragments[0].version for i in cluster.islands.values()} == set(cluster.aggregator.run.versions)


def test_a_lost_contribution_is_sent_again_and_merged():
    cluster = LinkedCluster("a", total_tokens=400)
    dropped = []

    def lose_the_first(sender, to, message):
        if isinstance(message, m.Contribution) and not dropped:
            dropped.append(message)
            return True
        return False

    cluster.lose = lose_the_first
    cluster.train(120)
    assert dropped
    books = cluster.aggregator.run.ledger.books().tokens()
    assert books["merged"] == books["trained"]


def test_nothing_hangs_when_every_kind_of_message_is_lost_once():
    cluster = LinkedCluster("a", "b", fragments=2, total_tokens=1200)
    seen = set()

    def lose_once(sender, to, message):
        key = sender, type(message)
        return key not in seen and not seen.add(key)

    cluster.lose = lose_once
    cluster.train(150)
    assert cluster.aggregator.run.phase is m.Phase.ENDED
    assert all(island.core.finished for island in cluster.islands.values())
    books = cluster.aggregator.run.ledger.books()
    assert books.in_flight == 0
    assert books.balanced()


def test_a_broker_that_comes_back_empty_loses_nothing():
    cluster = LinkedCluster("a", "b", total_tokens=800)
    cluster.train(10)
    cluster.restart_broker()
    cluster.train(80)
    books = cluster.aggregator.run.ledger.books().tokens()
    assert books["merged"] == books["trained"]


def test_an_island_that_plays_back_all_that_it_has_said_changes_nothing():
    cluster = LinkedCluster("a", "b", total_tokens=2000)
    carry, recorded = cluster._carry, []

    def record(peer, envelope):
        if envelope.sender == "a":
            recorded.append((peer, envelope))
        carry(peer, envelope)

    cluster._carry = record
    cluster.train(60)
    cluster._carry = carry
    assert {type(envelope.message) for _, envelope in recorded} >= {m.Contribution, m.Heartbeat, m.Want}
    versions, books = list(cluster.aggregator.run.versions), cluster.aggregator.run.ledger.books("a").tokens()
    for _ in range(3):
        for peer, envelope in recorded:
            carry(peer, envelope)
        cluster.settle()
    assert list(cluster.aggregator.run.versions) == versions
    assert cluster.aggregator.run.ledger.books("a").tokens() == books
    assert cluster.relay.counters.repeated_messages == 3 * len(recorded)
    cluster.train(120)
    assert all(island.core.finished and island.failed is None for island in cluster.islands.values())
    books = cluster.aggregator.run.ledger.books().tokens()
    assert books["merged"] == books["trained"]


def test_an_island_that_diverged_is_set_back_to_the_global_parameters():
    cluster = LinkedCluster("a", "b")
    cluster.train(2)
    flaw = Flaw(reason=m.Reason.NOT_FINITE, detail="NaN in w0")
    cluster.flaw = lambda message: flaw if isinstance(message, m.Contribution) and message.payload[0] == "a" else None
    cluster.train(6)
    cluster.flaw = lambda message: None
    assert cluster["a"].refreshes >= 1
    cluster.train(20)
    assert 0.0 in cluster["a"].keeps[1:], "the first version is always taken whole"
    books = cluster.aggregator.run.ledger.books("a").tokens()
    assert books["wasted"].get("not_finite", 0) > 0
    assert books["merged"] > 0


def test_a_replaced_process_gives_up_and_its_successor_goes_on():
    cluster = LinkedCluster("a", "b")
    cluster.train(10)
    old = cluster["a"]
    new = cluster.start_island("a")
    old.alive = True  # it was only cut off
    cluster.run_to(cluster.now_s + 1.0)
    new.boundary()
    for _ in range(8):
        cluster.run_to(cluster.now_s + 0.5)
        old.handle(Tick())
        cluster.settle()
    assert old.failed is not None
    assert "another process has joined as 'a'" in old.failed.reason
    cluster.train(10)
    assert new.failed is None
    assert (new.core.incarnation, new.step) == (2, new.core.at.step)
    assert any(m.island_id == "a" and m.incarnation == 2 for m in cluster.aggregator.run.fragments[0].contributions)


def test_an_island_whose_optimizer_was_fresh_gives_it_after_a_sync_interval():
    island = Hand()
    island.feed(Restored(source=m.StateSource.FRESH))
    for step, trained in ((SETTINGS.recipe.sync_interval - 1, False), (1, True)):
        island.boundary(step)
        actions = island.hear(m.FetchState(state_id="", parts=(0,)))
        declined = [part for part in sent(actions, m.StatePart) if not part.num_parts]
        assert bool(declined) is not trained
        assert bool(of(actions, CopyState)) is trained
