"""Membership of an island: it joins, stays, and comes back as a later life. Pure.

It asks to join until it is welcomed; then it sends heartbeats. An aggregator that does not know it any more refuses
them: it joins as the next life, from where it is, with nothing to hand over. What another process has taken, its name,
is given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from broker.routing.resending import Backoff
from broker.wire.messages import (
    AGGREGATOR,
    Departure,
    Heartbeat,
    Join,
    Leave,
    LinkUse,
    Outstanding,
    Reason,
    Refused,
    Welcome,
)
from broker.wire.schema import MAX_OUTSTANDING
from islands.protocol.broker_choice import BrokerChoice
from islands.protocol.events import Action, Fail, Note, Send, Vitals
from islands.protocol.state import Training

JOIN_AGAIN_S = (0.5, 5.0)  # first and longest pause between joins
FENCED_FOR_S = 1.0


class Member:
    """One island as a member of the run.

    Args:
        join: See below.
        training: What heartbeats report.
        choice: Is told of what is answered at once.

    Attributes:
        join: What to ask for.
        island_id: The one asked for, then the one given.
        incarnation: Which life it is; 0 before the first, and between two.
        nonce: Random, different in each life.
        vitals: What heartbeats report besides.
        blocks: Returns what they say of blocks of data: the one at hand, and those that are needed no more.
        link: What they say of the link; None: nothing.
    """

    def __init__(
        self,
        join: Join,
        training: Training,
        choice: BrokerChoice,
    ) -> None:
        self.island_id = join.island_id
        self.incarnation = 0
        self.nonce = join.nonce
        self.vitals = Vitals(loss=None, step_time_s=None, sync_share=0.0, bytes_up=0, bytes_down=0)
        self._training = training
        self._choice = choice
        self.blocks: Callable[[], tuple[int, tuple[int, ...]]] = lambda: (0, ())
        self.link: LinkUse | None = None
        self.join = join
        self._join_backoff = Backoff(*JOIN_AGAIN_S)
        self._heartbeat_at_s = math.inf
        self._beats_besides = False
        self._fenced_since_s: float | None = None

    @property
    def joined(self) -> bool:
        """Whether the island is a member of the run."""
        return self.incarnation > 0

    @property
    def due_at_s(self) -> float:
        """Returns when the next join or heartbeat is due."""
        return self._heartbeat_at_s if self.incarnation else self._join_backoff.due_at_s

    # --- what it hears ----------------------------------------------------------------------------------------

    def welcomed(self, welcome: Welcome, now_s: float) -> bool:
        """Becomes a member; returns whether the welcome is meant for this life, and new."""
        if welcome.nonce != self.nonce or welcome.incarnation <= self.incarnation:
            return False
        self.island_id, self.incarnation = welcome.island_id, welcome.incarnation
        self._heartbeat_at_s = now_s
        return True

    def known(self) -> None:
        """Notes that an aggregator speaks to this life: nobody has taken its name."""
        self._fenced_since_s = None

    def refused(self, refused: Refused, now_s: float, actions: list[Action]) -> None:
        """Answers a refusal: joins as the next life, gives up, or lets the message be sent again."""
        if refused.reason is Reason.NOT_LEADER and refused.kind in ("heartbeat", "join"):
            return  # nothing is wrong with either, and both are repeated: what follows is in broker_choice
        facts = {"kind": refused.kind, "reason": str(refused.reason), "detail": refused.detail}
        actions.append(Note(name="message.refused", fields=facts))
        match refused.reason:
            case Reason.UNKNOWN_ISLAND if self.joined:
                self._rejoin(actions)
            case Reason.FENCED:
                # One refusal may mean a message that was still on its way when this island joined anew; who is
                # fenced for good hears nothing else.
                if self._fenced_since_s is None:
                    self._fenced_since_s = now_s
                elif now_s >= self._fenced_since_s + FENCED_FOR_S:
                    cure = "give every island an id of its own, or let the other process end first"
                    actions.append(Fail(reason=f"another process has joined as {self.island_id!r}", cure=cure))
            case Reason.MANIFEST | Reason.RECIPE | Reason.PROTOCOL_VERSION | Reason.WRONG_RUN:
                actions.append(Fail(reason=str(refused.reason), cure=refused.detail))
            case Reason.RUN_ENDED if refused.kind == "join":
                actions.append(
                    Fail(reason=str(refused.reason), cure="there is nothing left to train: export the model")
                )
            case Reason.OVERSIZE | Reason.WRONG_KEY | Reason.IMPLAUSIBLE if refused.kind == "join":
                actions.append(Fail(reason=str(refused.reason), cure=refused.detail))
            case _:
                pass  # whatever was refused is sent again in time, or its resolution says why not

    def _rejoin(self, actions: list[Action]) -> None:
        """Joins as the next life, from here, with nothing to hand over: this one is not known."""
        self.nonce = f"{self.nonce.split('.')[0]}.{self.incarnation}"
        self.join = replace(self.join, nonce=self.nonce, island_id=self.island_id, resumes="")
        self._join_backoff = Backoff(*JOIN_AGAIN_S)
        self.incarnation = 0
        self._training.disowned()
        actions.append(Note(name="island.rejoins", fields={"step": self._training.at.step}))

    # --- what it says -----------------------------------------------------------------------------------------

    def beat_now(self, now_s: float) -> None:
        """Makes the next heartbeat due: others wait to hear of a change."""
        self._heartbeat_at_s = now_s

    def beat_besides(self) -> None:
        """Adds a heartbeat at once; those that follow keep their times."""
        self._beats_besides = True

    def introduce(self) -> None:
        """Adds a heartbeat, or a join, at once: the broker may know nothing.

        The others keep their times. All islands hear of a new broker at once: from then on their heartbeats would come
        together, a thousand in a moment.
        """
        if self.joined:
            self.beat_besides()
        else:
            self._join_backoff = Backoff(*JOIN_AGAIN_S)

    def advance(self, now_s: float, actions: list[Action]) -> None:
        """Asks to join, or says how it is, where it is time."""
        if not self.joined:
            if self._join_backoff.due(now_s):
                self._join_backoff.tried(now_s)
                self._choice.asked(now_s)
                actions.append(Send(to=AGGREGATOR, message=self.join))
        elif self._beats_besides or now_s >= self._heartbeat_at_s:
            self._heartbeat(now_s, actions)

    def _heartbeat(self, now_s: float, actions: list[Action]) -> None:
        training, vitals = self._training, self.vitals
        fragments = training.fragments
        assert training.settings is not None
        self._beats_besides = False
        if now_s >= self._heartbeat_at_s:
            self._heartbeat_at_s = now_s + training.settings.heartbeat_interval_s
        # The oldest of each fragment first: what there is no room for is asked about as soon as others are resolved.
        every = sorted((n, p, steps) for p, f in fragments.items() for n, steps in enumerate(f.outstanding))
        outstanding = tuple(
            Outstanding(fragment_id=p, from_step=from_step, to_step=to_step)
            for _, p, (from_step, to_step) in every[:MAX_OUTSTANDING]
        )
        block, released = self.blocks()
        beat = Heartbeat(
            inner_step=training.at.step,
            tokens=training.at.tokens,
            loss=vitals.loss,
            step_time_s=vitals.step_time_s,
            sync_share=vitals.sync_share,
            bytes_up=vitals.bytes_up,
            bytes_down=vitals.bytes_down,
            versions=tuple(-1 if f.corrupted else f.version for f in fragments.values()),
            overwritten_tokens=tuple(f.overwritten_tokens for f in fragments.values()),
            outstanding=outstanding,
            stopped=training.stopped,
            optimizer=training.optimizer,
            block=block,
            released=released,
            link=self.link,
        )
        self._choice.asked(now_s)
        actions.append(Send(to=AGGREGATOR, message=beat))

    def leave(self, reason: str, departure: Departure, actions: list[Action]) -> None:
        """Says goodbye, if it is a member."""
        if self.joined:
            at = self._training.at
            leave = Leave(inner_step=at.step, tokens=at.tokens, reason=reason, departure=departure)
            actions.append(Send(to=AGGREGATOR, message=leave))
