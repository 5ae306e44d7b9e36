"""The cores of all shards of a run side by side, and what carries between them what they tell each other."""

from aggregator.interface.events import Publish
from broker.wire.fragments import shard_of
from broker.wire.messages import AGGREGATOR, Nothing, Phase, Roster, Rostered, Seed, Standings, Welcome
from tests.aggregator_hand import Desk, beat, of, sent


class Shards:
    """The cores of all shards of a run.

    Attributes:
        desks: Shard by shard.
        cut: Shards that nothing is carried to or from.
        said: Every action so far, by shard.
    """

    def __init__(self, count=2, **settings):
        settings = {"shards": count, "fragments": count, **settings}
        self.fragments = settings["fragments"]
        self.desks = [Desk(shard=n, **settings) for n in range(count)]
        self.cut = set()
        self.said = [[] for _ in self.desks]
        self.incarnations = {}
        self.carry()

    @property
    def now_s(self):
        return self.desks[0].now_s

    def carry(self):
        """Delivers what shards tell each other until none has anything new to say."""
        under_way = True
        while under_way:
            under_way = False
            for n, desk in enumerate(self.desks):
                actions = desk.take()
                self.said[n] += actions
                for message in sent(actions, Roster) + sent(actions, Rostered) + sent(actions, Standings):
                    for to in self._addressees(n, message):
                        if not self.cut & {n, to}:
                            self.desks[to].say(AGGREGATOR, message)
                            under_way = True
        for welcome in sent(self.said[0], Welcome):
            self.incarnations[welcome.island_id] = welcome.incarnation

    def _addressees(self, n, message):
        match message:
            case Roster(to_shard=shard):
                return [shard]
            case Rostered():
                return [0]
            case _:
                return [shard for shard in range(len(self.desks)) if shard != n]

    def run_to(self, at_s):
        while self.now_s < at_s:
            to_s = min(at_s, self.now_s + 0.25)
            for desk in self.desks:
                desk.run_to(to_s)
                desk.tick()
            self.carry()

    def restart(self, n):
        """The next life of a shard, from what was on its disk."""
        self.said[n] += self.desks[n].take()
        self.desks[n] = self.desks[n].restarted()
        self.carry()

    def write(self, n):
        """Completes the oldest write of a shard whose writes take their time."""
        self.desks[n].write()
        self.carry()

    # --- what islands say ---

    def say(self, island_id, message, shard=None):
        for desk in self.desks if shard is None else [self.desks[shard]]:
            desk.say(island_id, message, incarnation=self.incarnations.get(island_id, 0))
        self.carry()

    def join(self, island_id):
        self.desks[0].incarnations[island_id] = self.incarnations.get(island_id, 0)
        self.desks[0].join(island_id)
        self.carry()

    def seed(self, island_id, *fragments):
        for p in fragments or range(self.fragments):
            self.say(island_id, Seed(fragment_id=p, payload=f"seed {p}"), shard_of(p, len(self.desks)))

    def beat(self, island_id, step, **more):
        held = {
            "step_time_s": 0.1,
            "versions": tuple(max(versions) for versions in zip(*self.versions(), strict=True)),
            "overwritten_tokens": (0,) * self.fragments,
        }
        self.say(island_id, beat(step, **held | more))

    def offer(self, island_id, from_step, to_step, fragment, **more):
        desk = self.desks[shard_of(fragment, len(self.desks))]
        desk.incarnations[island_id] = self.incarnations[island_id]
        desk.offer(island_id, from_step, to_step, fragment=fragment, **more)
        self.carry()

    def nothing(self, island_id):
        """Answers every open round with nothing."""
        for desk in self.desks:
            for round_id, p in desk.open_rounds.items():
                desk.say(island_id, Nothing(round_id=round_id, fragment_id=p), incarnation=self.incarnations[island_id])
        self.carry()

    def gather(self, *island_ids):
        """Joins islands, gets version 0 from the first, and lets all of them report step 0."""
        for island_id in island_ids:
            self.join(island_id)
        self.seed(island_ids[0])
        for island_id in island_ids:
            self.beat(island_id, 0)

    # --- what is ---

    def versions(self):
        return [desk.versions for desk in self.desks]

    @property
    def phases(self):
        return [desk.phase for desk in self.desks]

    def published(self, n):
        return {(each.fragment_id, each.fragment_version) for each in of(self.said[n], Publish)}

    def welcomes(self, island_id):
        return [each for each in sent(self.said[0], Welcome) if each.island_id == island_id]

    def newest_roster(self):
        return sent(self.said[0], Roster)[-1]

    def on_record(self, n, island_id):
        """Incarnation, start and whether it has begun, of an island in a shard's run record."""
        _, _, incarnation, _, _, _, start, begun = self.desks[n].disk.record["members"][island_id]
        return incarnation, tuple(start), begun

    def tenure(self, n, share):
        return next(each for each in self.desks[n].core.run.books.data.tenures() if each.share == share)


def shards(*island_ids, **settings):
    made = Shards(**settings)
    made.gather(*(island_ids or ("a", "b")))
    assert made.phases == [Phase.RUNNING] * len(made.desks)
    return made
