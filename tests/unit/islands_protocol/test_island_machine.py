"""The island's state machine against a naive model of steps."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.wire import messages as m
from islands.protocol.events import Capture, Prepare, Tick
from tests.aggregator_hand import TOKENS_PER_STEP
from tests.island_hand import Hand, sent
from tests.profiles import examples


class IslandAgainstSteps(RuleBasedStateMachine):
    """Random news and boundaries; the model remembers of each step of each fragment what became of it."""

    @initialize(keep=st.sampled_from([0.0, 0.5, 1.0]))
    def start(self, keep):
        self.hand = Hand(keep=keep, fragments=2)
        self.rounds, self.newest, self.round_id = {}, {0: 0, 1: 0}, 0
        self.copies, self.ready, self.fates = {}, [], {0: {}, 1: {}}
        self.sent, self.forgotten = [], {0: 0, 1: 0}
        self.progress = 0.0

    def note(self, said):
        for action in said:
            if isinstance(action, Capture):
                assert self.copies[action.fragment_id] == action.step, "captures a copy that is gone"
            if isinstance(action, Prepare):
                self.ready.append(action.version.fragment_id)
        for contribution in sent(said, m.Contribution):
            steps, fates = contribution.steps, self.fates[contribution.fragment_id]
            if contribution in self.sent:
                continue
            assert steps.steps == sum(t.steps for t in contribution.trained_on) > 0
            assert steps.tokens == steps.steps * TOKENS_PER_STEP
            for step in range(steps.from_step, steps.to_step):
                assert fates.setdefault(step, "handed") == "handed"
                assert (contribution.fragment_id, step) not in self.handed_steps(), f"step {step} is handed over twice"
            self.sent.append(contribution)

    def handed_steps(self):
        return {(c.fragment_id, s) for c in self.sent for s in range(c.steps.from_step, c.steps.to_step)}

    @rule(steps=st.integers(1, 3), watched=st.booleans())
    def boundary(self, steps, watched):
        installed, self.ready = tuple(dict.fromkeys(self.ready)), []
        for p in installed:
            self.copies.pop(p, None)
        copied = tuple(p for p in (0, 1) if watched)
        self.copies.update(dict.fromkeys(copied, self.hand.step + steps))
        self.note(self.hand.boundary(steps, installed=installed, copied=copied))

    @rule(p=st.integers(0, 1))
    def open_round(self, p):
        self.round_id += 1
        self.rounds[p] = self.round_id
        self.tell()

    @rule()
    def tell(self):
        self.note(self.hand.state(rounds=tuple((r, p) for p, r in self.rounds.items())))

    @rule(p=st.integers(0, 1), skip=st.integers(0, 2))
    def publish(self, p, skip):
        self.newest[p] += 1 + skip
        self.note(self.hand.version(self.newest[p], p))

    @rule(p=st.integers(0, 1), back=st.integers(0, 2))
    def a_late_copy_of_a_version(self, p, back):
        self.note(self.hand.version(max(0, self.newest[p] - back), p))

    @precondition(lambda self: any(f.capturing for f in self.hand.core.fragments.values()))
    @rule()
    def encoded(self):
        for p, fragment in self.hand.core.fragments.items():
            if fragment.capturing:
                self.note(self.hand.captured(p))

    @precondition(lambda self: self.sent)
    @rule(
        data=st.data(),
        fate=st.sampled_from([m.Fate.MERGED, m.Fate.UNKNOWN, m.Fate.WAITING, m.Fate.REFUSED]),
        reason=st.sampled_from([m.Reason.STALE, m.Reason.NOT_FINITE, m.Reason.OVERLAP]),
    )
    def resolve(self, data, fate, reason):
        contribution = data.draw(st.sampled_from(self.sent))
        self.forgotten[contribution.fragment_id] += fate is m.Fate.UNKNOWN  # by an aggregator that had it
        self.note(self.hand.resolve(contribution, fate, reason if fate is m.Fate.REFUSED else None))

    @rule(seconds=st.floats(0.1, 5.0))
    def wait(self, seconds):
        self.hand.now_s += seconds
        self.note(self.hand.feed(Tick()))

    @rule(trained=st.integers(0, 10_000), ratio=st.floats(0.5, 8.0))
    def progress_reported(self, trained, ratio):
        self.note(self.hand.state(trained_tokens=trained, fleet_ratio=ratio))

    @invariant()
    def every_step_is_handed_over_dropped_or_still_here(self):
        if not hasattr(self, "hand"):
            return
        core, handed = self.hand.core, self.handed_steps()
        progress = core.schedule.at(self.hand.step * TOKENS_PER_STEP)
        assert progress >= self.progress
        self.progress = progress
        for p, fragment in core.fragments.items():
            sent_steps = sum(1 for q, _ in handed if q == p)
            captured = fragment.capturing.steps if fragment.capturing else 0
            here = self.hand.step - fragment.handed.step
            dropped = fragment.overwritten_tokens // TOKENS_PER_STEP
            assert sent_steps + captured + dropped + here == self.hand.step, (p, fragment)
            assert fragment.version <= self.newest[p]
            assert all(key[1] <= fragment.handed.step for key in fragment.outstanding)
            on_their_way = [pending for pending in fragment.outstanding.values() if not pending.arrived]
            assert len(on_their_way) <= 1 + self.forgotten[p], "contributions pile up"


TestIslandAgainstSteps = IslandAgainstSteps.TestCase
TestIslandAgainstSteps.settings = examples(60, stateful_step_count=40)
