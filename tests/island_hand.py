"""An island core whose messages and boundaries a test makes by hand."""

from dataclasses import replace

from broker.wire import messages as m
from broker.wire.fragments import Kind
from islands.protocol.core import Island
from islands.protocol.events import Boundary, Capture, Captured, Prepare, Prepared, Received, Send
from tests.aggregator_hand import TOKENS_PER_STEP, of, tensors

SETTINGS = m.RunSettings(
    recipe=m.Recipe(fragments=1, sync_interval=4, keep=1.0, codec=m.Codec.F32),
    heartbeat_interval_s=0.5,
    total_tokens=0,
    tokens_per_fleet_step=TOKENS_PER_STEP,
    seed=0,
    islands=1,
    data_ahead_s=10.0,
)


class Hand:
    """One island core with one fragment, whose messages and boundaries the test makes by hand."""

    def __init__(self, *, keep=1.0, fragments=1, joined=True, kinds=None, paused=None, several_hosts=False, **more):
        kinds = kinds or (Kind.RDA,) * fragments
        self.tensors = tuple(replace(t, kind=kind) for t, kind in zip(tensors(fragments), kinds, strict=True))
        self.core = Island(
            island_id="",
            hint="",
            nonce="n" if paused is None else f"{paused.nonce}-again",
            tensors=self.tensors,
            tokens_per_step=TOKENS_PER_STEP,
            paused=paused,
            several_hosts=several_hosts,
            **more,
        )
        self.now_s, self.sequence, self.step, self.epoch = 0.0, 0, 0, 1
        self.num = fragments
        self.settings = replace(SETTINGS, recipe=replace(SETTINGS.recipe, keep=keep))
        self.log = self.core.start(0.0)
        if joined:
            self.welcome()
            for p in range(fragments):
                self.version(0, p)
            self.boundary(installed=tuple(range(fragments)))

    def feed(self, event):
        said = self.core.handle(event, self.now_s)
        self.log += said
        for action in said:
            if isinstance(action, Prepare):
                said = said + self.feed(Prepared(fragment_id=action.version.fragment_id))
        return said

    def hear(self, message, flaw="", sequence=None, carried=None):
        self.sequence += 1
        envelope = m.Envelope(
            run_id="demo",
            sender="aggregator",
            incarnation=0,
            sequence=self.sequence if sequence is None else sequence,
            to="a",
            message=message,
        )
        return self.feed(Received(envelope=envelope, flaw=flaw, carried=carried))

    def welcome(self, incarnation=1, nonce=None, start=0):
        manifest = tuple((t,) for t in self.tensors)
        return self.hear(
            m.Welcome(
                nonce=nonce or self.core.nonce,
                island_id="a",
                incarnation=incarnation,
                epoch=self.epoch,
                fragments=manifest,
                settings=self.settings,
                start_step=start,
                start_tokens=start * TOKENS_PER_STEP,
            )
        )

    def state(self, *, rounds=(), resolutions=(), sequence=None, carried=None, **more):
        fields = {
            "phase": m.Phase.RUNNING,
            "due_soon": (),
            "versions": self.core.published,
            "seed": (),
            "trained_tokens": 0,
            "fleet_ratio": 1.0,
            **more,
        }
        open_ = tuple(m.OpenRound(round_id=r, fragment_id=p) for r, p in rounds)
        state = m.FleetState(epoch=self.epoch, rounds=open_, resolutions=tuple(resolutions), **fields)
        return self.hear(state, sequence=sequence, carried=carried)

    def version(self, number, p=0, merged=(), flaw=""):
        return self.hear(
            m.Version(
                epoch=self.epoch,
                fragment_id=p,
                fragment_version=number,
                digest=f"{p}.{number}",
                contributions=tuple(merged),
                payload=None,
            ),
            flaw,
        )

    def boundary(self, steps=0, *, installed=(), copied=(), stopped=False):
        self.step += steps
        return self.feed(
            Boundary(
                inner_step=self.step,
                tokens=self.step * TOKENS_PER_STEP,
                installed=installed,
                copied=copied,
                stopped=stopped,
            )
        )

    def hand_over(self, steps, round_id, p=0):
        """Runs steps, is asked, copies, captures; returns the contribution."""
        self.boundary(steps)
        self.state(rounds=((round_id, p),))
        assert of(self.boundary(copied=(p,)), Capture)
        (contribution,) = sent(self.captured(p), m.Contribution)
        return contribution

    def captured(self, p=0):
        return self.feed(Captured(fragment_id=p, payload=f"at {self.step}"))

    def resolve(self, contribution, fate, reason=None, carried=None):
        steps = contribution.steps
        resolution = m.Resolution(
            fragment_id=contribution.fragment_id,
            from_step=steps.from_step,
            to_step=steps.to_step,
            fate=fate,
            reason=reason,
        )
        return self.state(resolutions=(resolution,), carried=carried)


def sent(actions, kind):
    """Messages of one kind among an island's actions."""
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]
