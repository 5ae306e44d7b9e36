"""Chooses the broker of an island, and moves on when that one fails. Pure.

An island with several brokers is connected to one at a time. It leaves that one when

* its connection is *lost* and does not stand again at once: the process there, or its host, has ended;
* it is *silent*: what is answered within a heartbeat in good times was not, for ``silent_s``. A broker that is frozen,
  or behind a link that swallows everything, keeps its connection standing and is found out in this way alone;
* it has had *no leader* for much longer: it answers, but no aggregator does through it. An aggregator's successor
  takes seconds, and reaches every broker; so this is for a broker that is itself cut off from all aggregators.

The order of the brokers is drawn from the island's nonce: islands spread over them, and those that lose one spread over
the others. After the last comes the first again, and while none of them answers the pauses grow.
"""

from __future__ import annotations

import hashlib
import math
from enum import StrEnum

from broker.wire.messages import BROKER, Envelope, FleetState, Reason, Refused, Welcome
from islands.protocol.events import Action, Connect, Note

#: A connection that was lost may be back so soon: ZeroMQ tries again after 0.1 s, which is all a reset takes.
LOST_S = 0.2
#: A broker without a leader is left after the first of these, and later ones ever later: going round brings nothing
#: while an aggregator is away from all of them.
LEADERLESS_S = (6.0, 60.0)
#: Silence lasts this many heartbeats, and this many times as long as answers took lately: a slow link is not silent.
HEARTBEATS, ANSWERS = 3.0, 4.0
LONGEST_PATIENCE_S = 30.0
#: After each round through all brokers pauses are twice as long, up to this multiple.
MOST_PATIENT = 4
#: An island that asks this much later than it was due has slept itself: answers may lie unread.
OVERSLEPT_S = 0.5


class MoveReason(StrEnum):
    """Why a broker is left."""

    NOT_REACHED = "not reached"
    LOST = "lost"
    SILENT = "silent"
    NO_LEADER = "no leader"


class BrokerChoice:
    """The broker of one island; with a single one, nothing ever changes.

    Args:
        count: Brokers to choose from, named by their places 0 .. count - 1 in the configuration.
        nonce: Of the island: the order follows from it.
        silent_s: Silence after which a broker is left, at least.
    """

    def __init__(self, count: int, nonce: str, silent_s: float) -> None:
        self._order = sorted(range(count), key=lambda k: hashlib.blake2b(f"{nonce} {k}".encode()).digest())
        self._silent_s = silent_s
        self._place = 0
        self._heartbeat_interval_s = 0.0
        self._answer_s = 0.0  # how long answers took lately: falls slowly, rises at once
        self._moves = self._leaderless_moves = 0  # since somebody was heard; since an aggregator was
        # Of the present connection:
        self._stands = self._stood = False  # now; ever
        self._down_since_s = 0.0
        self._asked_at_s: float | None = None  # what waits longest for an answer
        self._leaderless_since_s: float | None = None

    @property
    def at(self) -> int:
        """The place of the broker to speak through."""
        return self._order[self._place]

    @property
    def patience_s(self) -> float:
        """Silence after which this broker is left."""
        slow_s = min(LONGEST_PATIENCE_S, ANSWERS * self._answer_s)
        patience_s = max(self._silent_s, HEARTBEATS * self._heartbeat_interval_s, slow_s)
        return patience_s * self._growth()

    # --- what happens -----------------------------------------------------------------------------------------

    def start(self, now_s: float) -> None:
        """Begins with the broker :attr:`at`, to which the driver connects."""
        self._stands = self._stood = False
        self._down_since_s = now_s
        self._asked_at_s = self._leaderless_since_s = None

    def welcomed(self, heartbeat_interval_s: float) -> None:
        """Notes how often heartbeats are sent."""
        self._heartbeat_interval_s = heartbeat_interval_s

    def line(self, stands: bool, now_s: float) -> None:
        """Notes that the connection stands, or was lost."""
        if self._stands and not stands:
            self._down_since_s = now_s
        self._stands, self._stood = stands, self._stood or stands
        self._asked_at_s = None

    def asked(self, now_s: float) -> None:
        """Notes that something was sent which is answered at once in good times."""
        if self._asked_at_s is None:
            self._asked_at_s = now_s

    def listen(self, envelope: Envelope, now_s: float) -> None:
        """Learns from a message that the broker lives, and perhaps an aggregator behind it."""
        match envelope.message:
            case Welcome() | FleetState():
                self.answered(now_s)
            case Refused(reason=Reason.NOT_LEADER) if envelope.sender == BROKER:
                self.leaderless(now_s)
            case _:
                self.heard()

    def heard(self) -> None:
        """Notes that something came."""
        self._asked_at_s, self._moves = None, 0

    def answered(self, now_s: float) -> None:
        """Notes an aggregator's answer, and how long it took."""
        if self._asked_at_s is not None:
            self._answer_s = max(now_s - self._asked_at_s, 0.9 * self._answer_s)
        self.heard()
        self._leaderless_since_s, self._leaderless_moves = None, 0

    def leaderless(self, now_s: float) -> None:
        """Notes the broker's word that no aggregator answers."""
        self.heard()
        if self._leaderless_since_s is None:
            self._leaderless_since_s = now_s

    # --- what follows -----------------------------------------------------------------------------------------

    @property
    def due_at_s(self) -> float:
        """Returns when to leave this broker if nothing changes; infinity for never."""
        due = self._due()
        return math.inf if due is None else due[0]

    def advance(self, now_s: float, actions: list[Action]) -> None:
        """Connects to the next broker if it is time."""
        if len(self._order) == 1:
            return
        left, patience_s = self.at, self.patience_s
        why = self.move(now_s)
        if why is not None:
            facts = {"broker": left, "reason": str(why), "next": self.at, "patience_s": round(patience_s, 2)}
            actions.append(Note(name="broker.left", fields=facts))
            actions.append(Connect(broker=self.at))

    def move(self, now_s: float) -> MoveReason | None:
        """Goes on to the next broker if it is time, and says why; None while this one is kept."""
        due = self._due()
        if due is None or now_s < due[0]:
            return None
        due_at_s, why = due
        if why is MoveReason.SILENT and now_s > due_at_s + OVERSLEPT_S:
            self._asked_at_s = now_s
            return None
        if why is MoveReason.NO_LEADER:
            self._leaderless_moves += 1
        self._moves += 1
        self._place = (self._place + 1) % len(self._order)
        self.start(now_s)
        return why

    def _due(self) -> tuple[float, MoveReason] | None:
        if len(self._order) == 1:
            return None
        if not self._stood:
            return self._down_since_s + self.patience_s, MoveReason.NOT_REACHED
        if not self._stands:
            return self._down_since_s + LOST_S * self._growth(), MoveReason.LOST
        moments = []
        if self._asked_at_s is not None:
            moments.append((self._asked_at_s + self.patience_s, MoveReason.SILENT))
        if self._leaderless_since_s is not None:
            first_s, longest_s = LEADERLESS_S
            pause_s = min(longest_s, first_s * 2.0 ** min(self._leaderless_moves, 10))
            moments.append((self._leaderless_since_s + pause_s, MoveReason.NO_LEADER))
        return min(moments, default=None)

    def _growth(self) -> int:
        """Returns how many times longer to wait after moves that brought no word from anybody."""
        rounds = self._moves // len(self._order)
        return min(MOST_PATIENT, 1 << min(rounds, 8))
