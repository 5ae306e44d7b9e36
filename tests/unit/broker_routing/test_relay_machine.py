"""The relay against a model of what it owes: nothing sent to an aggregator vanishes, and no pool outgrows its limit.

Whatever an island hands over is, at any time, with the aggregator, in the broker's queue, or refused with a reason.
"""

import random
from collections import Counter, defaultdict

from broker.routing.deliveries import ROOM_S
from broker.wire import messages as m
from broker.wire.messages import AGGREGATOR, Channel
from tests.aggregator_hand import beat
from tests.relay_bench import CONFIG, Driver, contribution, version

ISLANDS = ("a", "b", "c")
LARGEST_BYTES = 150


class World:
    """A relay, what was handed to it, and where that is by the model's account."""

    def __init__(self):
        self.driver = Driver()
        self.epoch = 1
        self.waiting = Counter()  # (island, fragment, from_step) -> copies that the relay must still have
        self.bytes = {}
        self.arrived = Counter()
        self.refused = Counter()
        self.wants = Counter()
        self.under_way = defaultdict(set)  # island -> fragments sent since its last Want
        self.shelf = {}

    def settle(self, fates):
        """Resolves everything that was sent: it arrives, meets a full connection, or one that is gone."""
        sends = list(self.driver.sends)
        while sends:
            send = sends.pop(0)
            message, fate = send.envelope.message, fates.pop() if fates else "arrives"
            if isinstance(message, m.Contribution):
                key = send.envelope.sender, message.fragment_id, message.steps.from_step
                self.waiting[key] -= 1
                assert self.waiting[key] >= 0, f"{key} was sent, and was not there"
                if fate == "arrives":
                    self.arrived[key] += 1
                    self.driver.delivered(send)
                    continue
                self.waiting[key] += 1
            elif isinstance(message, m.Refused) and message.kind == "contribution":
                self.refused[send.peer.decode().split("/")[0]] += (
                    1  # by island: a refusal ends one copy of those in hand
                )
                continue
            elif isinstance(message, m.Version):
                name = send.peer.decode().split("/")[0]
                sent = self.under_way[name]
                assert message.fragment_id not in sent, f"{name} was sent a fragment twice, and asked once"
                assert len(sent) < self.wants[name], f"{name} was sent more than its window holds"
                assert message.fragment_version == self.shelf[message.fragment_id], "not the newest"
                if fate != "blocked":
                    sent.add(message.fragment_id)
                    continue
            elif fate == "arrives":
                continue
            (self.driver.block if fate == "blocked" else self.driver.unreachable)(send)
            sends += self.driver.sends
            if fate == "gone":
                fates = []  # one at a time: the rest of these arrive

    def hand_over(self, island, fragment, step, nbytes, fates):
        key = island, fragment, step
        nbytes = self.bytes.setdefault(key, nbytes)
        copy = self.waiting[key] > 0
        self.driver.receive(island, contribution(fragment, step, step + 1), nbytes=nbytes)
        if copy and not self.driver.sends:
            return
        refusals = [s for s in self.driver.sends if isinstance(s.envelope.message, m.Refused)]
        if not refusals:
            self.waiting[key] += 1
        self.settle(fates)

    def attach(self, epoch, fates):
        self.driver.attach(epoch=epoch)
        self.settle(fates)

    def silence(self, for_s):
        """Time passes; an aggregator that was not heard is lost, and what waits for it goes back to its senders."""
        queued = +self.waiting
        before = Counter(self.refused)
        self.driver.tick(self.driver.now_s + for_s)
        lost = "relay.leader_lost" in self.driver.notes
        self.settle([])
        if lost:
            told = self.refused - before
            owed = Counter()
            for (island, _, _), copies in queued.items():
                owed[island] += copies
            known = {n for n in owed if self.driver.relay._who.route_to(n, Channel.CONTROL) is not None}
            assert {n: told[n] for n in known} == {n: owed[n] for n in known}
            self.waiting.clear()

    def check(self):
        relay = self.driver.relay
        assert relay.queued_bytes == sum(self.bytes[key] * copies for key, copies in self.waiting.items())
        assert relay.queued_bytes <= CONFIG.total_queue_bytes + 2 * LARGEST_BYTES
        deadline_s = relay.next_deadline_s()
        assert deadline_s is None or deadline_s > self.driver.now_s


FATES = ("arrives", "arrives", "arrives", "blocked", "gone")


def step(world, kind, a, b):
    """One thing happens; ``a`` and ``b`` say which."""
    island = ISLANDS[a % len(ISLANDS)]
    fates = [FATES[(b // 5**i) % len(FATES)] for i in range(3)]
    match kind:
        case "beat":
            world.driver.receive(island, beat())
            world.settle(fates)
        case "hand over":
            world.hand_over(island, b % 2, a % 7, 20 + 10 * (b % 14), fates)
        case "want":
            world.wants[island] += 1
            world.under_way[island].clear()
            world.driver.receive(island, m.Want(versions=(b % 4 - 1, a % 4 - 1)))
            world.settle(fates)
        case "publish":
            p, newest = a % 2, world.shelf.get(a % 2, -1)
            world.driver.receive(AGGREGATOR, version(p, b % 6, world.epoch))
            if not world.driver.relay._who.leaders or not world.driver.relay._who.leaders[0].leads:
                return
            if Channel.BULK in world.driver.relay._who.leaders[0].routes and b % 6 > newest:
                world.shelf[p] = b % 6
            world.settle(fates)
        case "attach":
            world.attach(world.epoch, fates)
        case "time":
            world.silence((0.001, 0.01, 0.06, 0.5, 2.5)[a % 5])
    world.check()


KINDS = ("beat", "hand over", "hand over", "hand over", "want", "publish", "attach", "time")


def test_nothing_vanishes_in_long_conversations():
    arrived = refused = 0
    for seed in range(6):
        source, world = random.Random(seed), World()
        world.attach(1, [])
        for _ in range(800):
            step(world, source.choice(KINDS), source.randrange(51), source.randrange(301))
        arrived, refused = arrived + world.arrived.total(), refused + world.refused.total()
        # Once the aggregator is there and takes everything, nothing waits any more.
        world.attach(world.epoch, [])
        world.silence(ROOM_S)
        world.attach(world.epoch, [])
        world.check()
        assert not +world.waiting
    assert arrived > 500  # else it was no test
    assert refused > 50
