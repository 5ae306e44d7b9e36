"""The relay between a leader and its standbys: who is told what, and what finds its way."""

import pytest

from broker.routing.directory import MAX_SHARDS
from broker.routing.relay import Tick
from broker.wire import messages as m
from broker.wire.messages import AGGREGATOR, Channel, Reason, standing_by
from tests.aggregator_hand import beat
from tests.relay_bench import CONFIG, Driver, join, version

B = standing_by("b")


def follow(epoch=1, shard=0):
    stored = (m.Stored(fragment_id=0, fragment_version=1, digest="ab"),)
    return m.Follow(shard=shard, epoch=epoch, stored=stored, made_under=epoch, run_epoch=epoch, run_serial=1)


def replica(epoch=1):
    return m.Replica(
        shard=0, epoch=epoch, fragment_id=0, fragment_version=1, digest="ab", round_id=1, commit=b"", payload=()
    )  # fmt: skip


class Broker(Driver):
    """A relay with a standby."""

    def follow(self, sender=B, **changes):
        self.receive(sender, follow(**changes), incarnation=0)
        return self.following()

    def follow_bulk(self, sender=B):
        return self.receive(sender, m.FollowBulk(shard=0), incarnation=0)

    def sent(self, kind):
        return [each for each in self.actions if isinstance(getattr(each, "envelope", None), m.Envelope)
                and isinstance(each.envelope.message, kind)]  # fmt: skip

    def following(self):
        """What the standby was just told."""
        found = [each.envelope.message for each in self.sent(m.Following)]
        assert len(found) == 1
        return found[0]

    def refusals(self):
        return [each.envelope.message.reason for each in self.sent(m.Refused)]


@pytest.fixture
def broker():
    return Broker()


def test_a_standby_hears_who_leads_since_when_it_was_silent_and_what_is_held_here(broker):
    broker.attach(epoch=4)
    broker.receive(AGGREGATOR, version(1, 7, epoch=4))
    broker.now_s += 0.75
    held = m.Stored(fragment_id=1, fragment_version=7, digest="00")
    assert broker.follow() == m.Following(epoch=4, leader_heard_ago_s=0.75, stored=(held,), newest=None)


def test_what_a_standby_says_goes_on_to_the_leader(broker):
    broker.attach()
    broker.follow()
    (forwarded,) = broker.sent(m.Follow)
    assert forwarded.channel is Channel.CONTROL
    assert forwarded.peer == b"aggregator/0/control"
    assert forwarded.envelope.sender == B


def test_replicas_and_run_records_go_to_the_standby_over_its_bulk_connection(broker):
    broker.attach()
    broker.follow_bulk()
    for message in (replica(), m.ReplicaRun(shard=0, epoch=1, serial=1, record=b"")):
        broker.receive(AGGREGATOR, message, to=B)
        (sent,) = broker.sent(type(message))
        assert (sent.channel, sent.peer) == (Channel.BULK, b"standby:b/0/bulk")


def test_a_deposed_leader_replicates_nothing_any_more(broker):
    broker.attach()
    broker.follow_bulk()
    broker.receive(AGGREGATOR, m.Attach(shard=0, shards=1, epoch=2, versions=()), route=b"new/control")
    broker.receive(AGGREGATOR, m.AttachBulk(shard=0, epoch=2, shards=1), route=b"new/bulk")
    broker.receive(AGGREGATOR, replica(), to=B)
    assert not broker.sent(m.Replica)
    assert broker.refusals() == [Reason.FENCED]


def test_a_standby_that_connects_again_is_reached_over_its_new_connection(broker):
    broker.attach()
    broker.follow_bulk()
    broker.receive(B, m.FollowBulk(shard=0), incarnation=0, route=b"again")
    broker.receive(AGGREGATOR, replica(), to=B)
    assert broker.sent(m.Replica)[0].peer == b"again"


def test_only_a_standby_follows_and_it_does_nothing_else(broker):
    broker.attach()
    for sender, message in (("island-0", follow()), (AGGREGATOR, follow()), (B, beat()), (B, join()), (B, version())):
        broker.receive(sender, message)
        assert broker.refusals() == [Reason.WRONG_ROLE], (sender, type(message))


def test_standbys_are_counted_among_the_peers_and_forgotten_like_them(broker):
    for n in range(CONFIG.max_peers):
        broker.follow(sender=standing_by(f"s{n}"))
    broker.receive(standing_by("more"), follow(), incarnation=0)
    assert broker.refusals() == [Reason.QUEUE_FULL]
    broker.now_s += 2 * CONFIG.forget_after_s
    broker.event(Tick())
    broker.follow(sender=standing_by("more"))
    assert broker.relay.num_peers == 1


def test_a_shard_beyond_the_limit_is_refused(broker):
    broker.receive(B, follow(shard=MAX_SHARDS), incarnation=0)
    assert broker.refusals() == [Reason.IMPLAUSIBLE]


def test_a_standby_hears_which_other_one_has_the_newest_store_of_its_shard(broker):
    def say(name, made_under, version, shard=0):
        stored = (m.Stored(fragment_id=shard, fragment_version=version, digest="ab"),)
        message = m.Follow(shard=shard, epoch=1, stored=stored, made_under=made_under, run_epoch=1, run_serial=1)
        broker.receive(standing_by(name), message, incarnation=0)
        return broker.following().newest

    assert say("b", 1, 9) is None
    assert say("c", 2, 5).name == "b"
    assert say("d", 2, 4) == m.Standing(
        name="c", made_under=2, stored=(m.Stored(fragment_id=0, fragment_version=5, digest="ab"),)
    )
    assert say("e", 7, 7, shard=1) is None
    assert say("c", 2, 5).name == "d"
    broker.now_s += CONFIG.leader_silent_s
    assert say("b", 1, 9) is None  # nobody else was heard since
