"""An aggregator core that writes a tape into a list: what commands that read tapes are tested with."""

import json
from dataclasses import replace

from aggregator.interface.events import Note
from aggregator.store.tape import event_line, note_line, start_line
from broker.wire import messages as m
from tests.aggregator_hand import Desk, Disk, config

STEPS_PER_ROUND = 4


class Taped(Desk):
    """A desk of one fragment whose tape is a list."""

    def __init__(self, *, tape=None, record=None, commits=None, now_s=0.0, **settings):
        self.tape = [] if tape is None else tape
        disk, settings = Disk(record, dict(commits or {})), config(**{"islands": 2, **settings})
        self.put(start_line(settings, now_s, record, disk.commits))
        super().__init__(disk=disk, now_s=now_s, config=settings)
        self.incarnations = {name: row[2] for name, row in (record or {"members": {}})["members"].items()}

    @property
    def record(self):
        return self.disk.record

    @property
    def commits(self):
        return self.disk.commits

    def put(self, line):
        self.tape.append(json.loads(json.dumps(line, default=str)))

    def feed(self, event):
        self.now_s += 0.01
        self.put(event_line(event, self.now_s))
        return super().feed(event)

    def _perform(self, actions):
        for action in actions:
            if isinstance(action, Note):
                self.put(note_line(action, self.now_s))
        super()._perform(actions)

    def say(self, island_id, message, **more):
        if isinstance(message, m.Contribution | m.Seed):
            payload = (m.Encoded(codec=m.Codec.F32, shape=(8, 8), checksum=7, data=b""),)
            message = replace(message, payload=payload)
        return super().say(island_id, message, **more)

    def report(self, step, *names):
        """These islands report that they have come to a step."""
        for name in names:
            self.beat(name, step)

    @property
    def round_id(self):
        """Of the open round."""
        (round_id,) = self.open_rounds
        return round_id

    def hand_over(self, name, number, **more):
        """An island hands over its ``number``-th four steps."""
        self.offer(name, STEPS_PER_ROUND * (number - 1), STEPS_PER_ROUND * number, **more)

    def round(self, number, *names):
        """All of these islands report, which opens a round, and hand over."""
        self.report(STEPS_PER_ROUND * number, *names)
        for name in names:
            self.hand_over(name, number)
