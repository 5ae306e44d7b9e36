"""An aggregator core that writes a tape into a list: what commands that read tapes are tested with."""

import json

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Computed, Merge, Note, Persist, Persisted, Plant, Received, RunSaved, SaveRun
from aggregator.rounds.core import Aggregator
from aggregator.store.tape import event_line, note_line, start_line
from broker.wire import messages as m
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.ranges import StepRange
from tests.aggregator_hand import beat
from tests.run_reading import Reading

TENSORS = (TensorSpec(name="w", shape=(4, 5), dtype="float32", kind=Kind.RDA),)
STEPS_PER_ROUND = 4


class Taped(Reading):
    """A core of one fragment whose tape is a list. Merges and writes complete at once; the test plays the islands."""

    def __init__(self, *, tape=None, record=None, commits=None, now_s=0.0, **settings):
        self.tape = tape if tape is not None else []
        config = AggregatorConfig(**{"run_id": "demo", "fragments": 1, "sync_interval": 4, "islands": 2, **settings})
        self.now_s, self.sequence = now_s, 0
        self.record, self.commits = record, dict(commits or {})
        self.put(start_line(config, now_s, self.record, self.commits))
        self.core = Aggregator(config, now_s=now_s, record=record, commits=self.commits)
        self.perform(self.core.start(now_s + 0.001), now_s + 0.001)

    def put(self, line):
        self.tape.append(json.loads(json.dumps(line, default=str)))

    def feed(self, event):
        self.now_s += 0.01
        self.put(event_line(event, self.now_s))
        self.perform(self.core.handle(event, self.now_s), self.now_s)

    def perform(self, actions, now_s):
        for action in actions:
            if isinstance(action, Note):
                self.put(note_line(action, now_s))
        for action in actions:
            match action:
                case SaveRun():
                    self.record = dict(action.record)
                    self.feed(RunSaved(serial=action.serial))
                case Plant():
                    self.feed(Computed(fragment_id=action.fragment_id, fragment_version=0, digest="seed"))
                case Merge(fragment_id=p, fragment_version=version):
                    self.feed(Computed(fragment_id=p, fragment_version=version, digest=f"{p}.{version}"))
                case Persist(commit=commit):
                    self.commits[commit.fragment_id] = commit
                    self.feed(Persisted(fragment_id=commit.fragment_id, fragment_version=commit.fragment_version))
                case _:
                    pass

    def say(self, sender, message, incarnation=1):
        self.sequence += 1
        self.feed(
            Received(
                envelope=m.Envelope(
                    run_id="demo",
                    sender=sender,
                    incarnation=incarnation,
                    sequence=self.sequence,
                    to="aggregator",
                    message=message,
                ),
                payload_bytes=80 if isinstance(message, m.Contribution | m.Seed) else 0,
            )
        )

    def join(self, name):
        join = m.Join(nonce=name, island_id=name, hint="", tensors=TENSORS, tokens_per_step=10)
        self.say(m.joining(name), join, incarnation=0)

    def gather(self, *names):
        for name in names:
            self.join(name)
        self.say(names[0], m.Seed(fragment_id=0, payload=payload()))
        self.beat(0, *names)

    def beat(self, step, *names):
        for name in names:
            self.say(name, beat(step, step_time_s=0.1, versions=self.versions, overwritten_tokens=(0,)))

    @property
    def round_id(self):
        """Of the open round."""
        (round_id,) = self.open_rounds
        return round_id

    def offer(self, name, number, *, round_id=None, base=None, tokens=10):
        """An island hands over its ``number``-th four steps."""
        a, b = STEPS_PER_ROUND * (number - 1), STEPS_PER_ROUND * number
        base = self.versions[0] if base is None else base
        contribution = m.Contribution(
            round_id=self.round_id if round_id is None else round_id,
            fragment_id=0,
            steps=StepRange(from_step=a, to_step=b, from_tokens=tokens * a, to_tokens=tokens * b),
            trained_on=(m.TrainedOn(fragment_version=base, steps=b - a),),
            payload=payload(),
        )
        self.say(name, contribution)

    def round(self, number, *names):
        """All of these islands report, which opens a round, and hand over."""
        self.beat(STEPS_PER_ROUND * number, *names)
        for name in names:
            self.offer(name, number)


def payload():
    return (m.Encoded(codec=m.Codec.F32, shape=(4, 5), checksum=7, data=b""),)
