"""Rounds and rejoins against a model: one aggregator core, islands that do what islands may, in any order.

Merges and writes end late, fail, or are lost with a crash of the aggregator; islands come, go, hand over late, twice or
never, and come back as another life. What must hold is checked as it happens; at the end everybody is calm, and every
step that was handed over is merged, or its island knows why not.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from aggregator import events as agg
from broker.wire import messages as m
from broker.wire.messages import Fate, Phase, Reason
from tests.aggregator_hand import Desk, notes, of, sent, steps
from tests.worlds import brief_runs, long_run

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine

NAMES = ("a", "b", "c", "d")
FRAGMENTS, H = 2, 4


@dataclass
class Modelled:
    """An island, as far as the protocol goes."""

    incarnation: int = 0
    step: int = 0
    heard_at_s: float = 0.0
    gone: bool = True
    handed: dict = field(default_factory=lambda: defaultdict(int))  #: fragment -> step up to which it handed over
    outstanding: dict = field(default_factory=dict)  #: (fragment, from, to) -> version trained on


class World:
    """The desk, the islands, and what must hold between them; each public method is one thing that happens."""

    def __init__(self):
        self.desk = Desk(
            fragments=FRAGMENTS, sync_interval=H, islands=len(NAMES), quorum=2, round_timeout_s=8.0, max_staleness=3
        )
        self.islands = {name: Modelled() for name in NAMES}
        self.durable = dict.fromkeys(range(FRAGMENTS), -1)
        self.digests = {}  # (fragment, version) -> digest, of what was published
        self.merged = set()  # (island, fragment, step)
        self.merges = self.refusals = 0
        for name in NAMES[:3]:
            self.join(name)
        self.durable = dict.fromkeys(range(FRAGMENTS), 0)
        self.desk.writes = True
        for p in range(FRAGMENTS):
            self.take(self.desk.say("a", m.Seed(fragment_id=p, payload=f"seed {p}")))
        for name in NAMES[:3]:
            self.beat(name)
        self.desk.computes = self.desk.writes = False

    # --- what is seen ---

    def take(self, actions):
        """Looks at everything that the aggregator does."""
        for action in actions:
            match action:
                case agg.Publish(fragment_id=p, fragment_version=version, digest=digest):
                    assert version <= self.durable[p], f"version {version} of {p} is published before it is durable"
                    assert self.digests.setdefault((p, version), digest) == digest
                case agg.Merge(fragment_id=p, fragment_version=version, parts=parts):
                    assert version == self.durable[p] + 1
                    assert parts
                    assert all(part.staleness_weight <= 1.0 for part in parts)
                case agg.Send(to=to, message=m.FleetState(resolutions=resolutions)):
                    self._resolve(to, resolutions)
        run = self.desk.run
        assert run.ledger.books().balanced()
        run.ledger.check()
        for round_ in run.open_rounds.values():
            assert self.desk.now_s <= round_.opened_at_s + self.desk.config.round_timeout_s
        fragments = [r.fragment_id for r in run.open_rounds.values()]
        assert len(fragments) == len(set(fragments)), "two rounds on one fragment"

    def _resolve(self, name, resolutions):
        island = self.islands[name]
        for r in resolutions:
            key = r.fragment_id, r.from_step, r.to_step
            if key not in island.outstanding:
                continue
            if r.fate is Fate.MERGED:
                assert {(name, key[0], s) for s in range(*key[1:])} <= self.merged, f"{name} {key} is in no commit"
                del island.outstanding[key]
            elif r.fate is Fate.REFUSED:
                assert r.reason is not None
                self.refusals += 1
                del island.outstanding[key]

    def _committed(self, commit):
        self.durable[commit.fragment_id] = commit.fragment_version
        assert sum(part.merge_weight for part in commit.contributions) <= 1 + 1e-9
        for part in commit.contributions:
            self.merges += 1
            for s in range(part.steps.from_step, part.steps.to_step):
                key = part.island_id, commit.fragment_id, s
                assert key not in self.merged, f"{key} is merged twice"
                self.merged.add(key)

    # --- what may happen ---

    def join(self, name):
        """A new process of an island; what its earlier one had under way is lost with it."""
        island = self.islands[name]
        while self.desk.writing:
            self.write()
        self.desk.writes = True  # a welcome waits for the disk: tested elsewhere
        actions = self.desk.join(name)
        self.desk.writes = False
        (welcome,) = sent(actions, m.Welcome)
        assert welcome.incarnation == island.incarnation + 1
        merged_to = max((s + 1 for who, _, s in self.merged if who == name), default=0)
        assert welcome.start_step >= merged_to, "it would train again what was merged"
        self.islands[name] = Modelled(
            incarnation=welcome.incarnation,
            step=welcome.start_step,
            heard_at_s=self.desk.now_s,
            gone=False,
            handed=defaultdict(lambda: welcome.start_step),
        )
        self._wrote()
        self.take(actions)

    def train(self, name, num_steps):
        island = self.islands[name]
        if not island.gone:
            island.step += num_steps
            self.beat(name)

    def beat(self, name):
        island = self.islands[name]
        if island.gone:
            return
        island.heard_at_s = self.desk.now_s
        outstanding = tuple(m.Outstanding(fragment_id=p, from_step=a, to_step=b) for p, a, b in island.outstanding)
        self.take(self.desk.beat(name, island.step, versions=(0,) * FRAGMENTS, outstanding=outstanding))

    def hand_over(self, name, p):
        """A new range, in whichever round is open."""
        island = self.islands[name]
        if island.gone or island.handed[p] >= island.step:
            return
        key = p, island.handed[p], island.step
        island.handed[p] = island.step
        island.outstanding[key] = max(0, self.desk.run.fragments[p].version)
        self._send(name, key)

    def send_again(self, name, index):
        island = self.islands[name]
        if not island.gone and island.outstanding:
            self._send(name, list(island.outstanding)[index % len(island.outstanding)])

    def lose(self, name, p):
        """A contribution that never arrives: the island keeps it, and is asked for it."""
        island = self.islands[name]
        if not island.gone and island.handed[p] < island.step:
            island.outstanding[p, island.handed[p], island.step] = max(0, self.desk.run.fragments[p].version)
            island.handed[p] = island.step

    def _send(self, name, key):
        p, from_step, to_step = key
        island = self.islands[name]
        island.heard_at_s = self.desk.now_s
        self.take(self.desk.offer(name, from_step, to_step, fragment=p, base=island.outstanding[key]))

    def old_life(self, name, p):
        """A message of an earlier process, late on its way: nobody heeds it."""
        island = self.islands[name]
        if island.incarnation > 1:
            actions = self.desk.offer(name, 0, 1, fragment=p, steps_=steps(0, 1), incarnation=island.incarnation - 1)
            assert [note["reason"] for note in notes(actions, "message.refused")] == [Reason.FENCED]
            assert not notes(actions, "contribution.accepted") + notes(actions, "contribution.held")
            self.take(actions)

    def nothing(self, name, index):
        island = self.islands[name]
        open_ = list(self.desk.run.open_rounds.values())
        if not island.gone and open_:
            round_ = open_[index % len(open_)]
            self.take(self.desk.nothing(name, round_.round_id, round_.fragment_id))

    def leave(self, name):
        island = self.islands[name]
        if not island.gone and sum(not each.gone for each in self.islands.values()) > 1:
            self.take(self.desk.say(name, m.Leave(inner_step=island.step, tokens=10 * island.step, reason="")))
            island.gone = True

    def compute(self):
        if self.desk.computing:
            self.take(self.desk.compute())

    def write(self, fails=""):
        if self.desk.writing:
            action = self.desk.writing[0]
            commit = action.commit if isinstance(action, agg.Persist) and not fails else None
            if commit is not None:
                self._committed(commit)
            self.take(self.desk.write(fails))

    def _wrote(self):
        """Whatever was written while writes ended at once."""
        for p, commit in self.desk.disk.commits.items():
            if commit.fragment_version > self.durable[p]:
                self._committed(commit)

    def pass_time(self, for_s):
        self.take(self.desk.run_to(self.desk.now_s + for_s))

    def crash(self):
        """The aggregator dies, with whatever was not written; the next one begins."""
        self.desk = self.desk.restarted()
        self.desk.now_s += 0.5
        self.desk.computes = self.desk.writes = False
        while self.desk.writing:
            self.write()

    def calm(self, num_steps):
        """Everybody trains, and all goes well for a while: otherwise nothing gets far."""
        for _ in range(num_steps):
            for name in NAMES:
                self.train(name, 1)
                for round_ in list(self.desk.run.open_rounds.values()):
                    self.hand_over(name, round_.fragment_id)
            self.compute()
            self.write()
            self.pass_time(0.1)

    # --- the end ---

    def heal(self):
        """Everybody is calm: what is outstanding gets its fate, and every open round closes."""
        for turn in range(60):
            for name, island in self.islands.items():
                self.beat(name)
                for key in list(island.outstanding):
                    if key in island.outstanding:
                        self._send(name, key)
                for p in range(FRAGMENTS if turn < 3 else 0):
                    self.hand_over(name, p)
                for index in range(len(self.desk.run.open_rounds)):
                    self.nothing(name, index)
            while self.desk.computing or self.desk.writing:
                self.compute()
                self.write()
            self.pass_time(0.5)
            for name in NAMES:
                self.train(name, 1)
            if turn > 3 and not any(island.outstanding for island in self.islands.values()):
                break
        for name, island in self.islands.items():
            assert island.gone or not island.outstanding, f"{name} never hears of {island.outstanding}"
        assert self.desk.run.phase is Phase.RUNNING
        assert not of(self.desk.log, agg.Finished)


# --- one step, chosen by numbers --------------------------------------------------------------------------------------


#: How likely each thing is, beside the others, and what happens to the island of that name, as a number says.
HAPPENS = {
    "train": (20, lambda w, name, b: w.train(name, 1 + b % 4)),
    "hand over": (20, lambda w, name, b: w.hand_over(name, b % FRAGMENTS)),
    "compute": (12, lambda w, *_: w.compute()),
    "write": (16, lambda w, *_: w.write()),
    "time": (8, lambda w, name, b: w.pass_time((0.02, 0.1, 0.3, 1.0, 7.0 if name == "a" else 0.2)[b % 5])),
    "nothing": (6, lambda w, name, b: w.nothing(name, b)),
    "send again": (4, lambda w, name, b: w.send_again(name, b)),
    "lose": (2, lambda w, name, b: w.lose(name, b % FRAGMENTS)),
    "fail": (2, lambda w, *_: w.write("disk full")),
    "leave": (1, lambda w, name, _: w.leave(name)),
    "join": (3, lambda w, name, _: w.join(name)),
    "old life": (1, lambda w, name, b: w.old_life(name, b % FRAGMENTS)),
    "crash": (1, lambda w, *_: w.crash()),
    "calm": (8, lambda w, _, b: w.calm(b % 8)),
}
STEPS = {kind: weight for kind, (weight, _) in HAPPENS.items()}


def step(world, kind, a, b):
    _, happens = HAPPENS[kind]
    happens(world, NAMES[a % len(NAMES)], b)


TestRounds = brief_runs(World, step, STEPS, runs=12, steps=30)


def test_every_step_is_merged_once_or_refused_with_a_reason_in_long_runs():
    merges = refusals = 0
    for seed in range(6):
        world = long_run(World(), step, STEPS, seed=seed, steps=400)
        merges, refusals = merges + world.merges, refusals + world.refusals
    assert merges > 100  # else it was no test
    assert refusals > 0
