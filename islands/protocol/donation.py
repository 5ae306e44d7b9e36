"""Donation of optimizer state between islands: both sides, as state machines. Pure.

An island whose own checkpoint does not serve asks the aggregator for a donor and fetches the donor's state in parts,
through the broker. The stages of the receiver are a table (:data:`STAGES`). The donor is empty, copying between two
steps, or holds a copy until nobody asks for it any more.

*Nothing waits for ever.* A donor that is silent, dies half-way, or sends what does not fit is replaced by another;
after ``MOST_DONORS`` of them, or when its patience ends, the receiver starts fresh. It has not begun to train by then,
so no round waits for it. *Nothing grows.* The receiver asks for a few parts at a time and refuses a state larger than
its own could be; the donor holds one copy whatever the number of receivers, and sends only what was asked for. The
broker passes parts on and keeps none: what is lost is asked for again. *Nothing is asked for again too early:* it would
queue behind its own first copy. On a narrow link parts come one by one, so a pause begins anew with each that comes and
follows the time between two (:mod:`broker.routing.resending`). *Training goes on.* The donor copies between two steps,
as for a checkpoint; everything else happens beside.
"""

from __future__ import annotations

import math
from enum import StrEnum

from broker.base.transitions import Staged, Transitions
from broker.routing.resending import Patience
from broker.wire.messages import AGGREGATOR, AskDonor, Donor, FetchState, Payload, StatePart, StateSource
from islands.protocol.events import Action, CheckState, CopyState, Note, Send, Settled

#: Donors that are tried before an island starts fresh.
MOST_DONORS = 3
#: A question to the aggregator is repeated after this long; parts are asked for again after this long without any, or
#: longer on a slow link.
ASK_AGAIN_S, FETCH_AGAIN_S = 1.0, 2.0
#: A donor is given this many such pauses, if they are longer than what the aggregator says, before it counts as silent.
SILENT_PAUSES = 2.0
#: Parts asked for at a time: enough to hide a journey, few enough that contributions of the donor never wait long.
PARTS_AT_ONCE = 4
#: Bytes in a part, but for the last.
PART_BYTES = 1 << 20
#: A donor gives its copy up when nobody has asked for a part of it for this long.
HOLD_S = 20.0


class Stage(StrEnum):
    """The stage of a receiver."""

    IDLE = "idle"
    ASKING = "asking"
    FETCHING = "fetching"
    CHECKING = "checking"
    SETTLED = "settled"


_AGAIN = {"silent, wrong or gone": Stage.ASKING, "settle": Stage.SETTLED}
#: The receiver's side.
STAGES = Transitions(
    "the receiver of an optimizer's state",
    Stage.IDLE,
    {
        Stage.IDLE: {"begin": Stage.ASKING, "settle": Stage.SETTLED},
        Stage.ASKING: {"named": Stage.FETCHING, "settle": Stage.SETTLED},
        Stage.FETCHING: {"whole": Stage.CHECKING, **_AGAIN},
        Stage.CHECKING: _AGAIN,
    },
)


class Receiver:
    """Gets the state of a donor's optimizer, or settles for a fresh one.

    Attributes:
        donor: Who is fetched from, or was.
    """

    def __init__(self) -> None:
        self.at = Staged(STAGES)
        self.donor = ""
        self._most_bytes = 0
        self._ends_at_s = math.inf
        self._ask_at_s = math.inf
        self._tried: list[str] = []
        self._why = "nobody was asked"
        # Of the donor at hand:
        self._wait_s, self._heard_s, self._silent_at_s = 0.0, 0.0, math.inf
        self._state_id, self._num_parts, self._bytes = "", 0, 0
        self._parts: dict[int, Payload] = {}
        self._on_their_way: list[int] = []
        self._unasked: list[int] = []  # the last one is asked for next
        self._patience = Patience(FETCH_AGAIN_S)  # of both links, the donor's and this island's
        self._pauses = self._patience.backoff(PART_BYTES)

    def begin(self, most_bytes: int, patience_s: float, now_s: float, actions: list[Action]) -> None:
        """Starts to look for a donor.

        Args:
            most_bytes: A larger state cannot be one that fits.
            patience_s: After this long the island starts fresh, whatever is under way.
            now_s: Monotonic seconds.
            actions: What to do is put here.
        """
        if self.stage is not Stage.IDLE:
            return
        self._most_bytes, self._ends_at_s = most_bytes, now_s + patience_s
        self._why = "nobody answered"
        self.at.take("begin")
        self._ask_at_s = now_s
        self.advance(now_s, actions)

    @property
    def stage(self) -> Stage:
        """Returns its present stage."""
        return self.at.stage

    def named(self, message: Donor, now_s: float, actions: list[Action]) -> None:
        """Fetches from the donor that the aggregator has named, or starts fresh if there is none."""
        if self.stage is not Stage.ASKING or message.island_id in self._tried:
            return
        if not message.island_id:
            self._settle_fresh(self._why if self._tried else "no island has trained for long enough to be one", actions)
            return
        self.at.take("named")
        self.donor = message.island_id
        self._begin_donor(message.wait_s, now_s)
        self._fetch([0], actions)

    def part(self, sender: str, part: StatePart, flaw: str, now_s: float, actions: list[Action]) -> None:
        """Takes in a part, perhaps of a donor that was given up, or one that is here already."""
        if self.stage is not Stage.FETCHING or sender != self.donor or flaw:
            return  # with a flaw: asked for again
        wrong = self._wrong(part)
        if wrong:
            self._give_up_donor(wrong, now_s, actions)
            return
        if part.part not in self._on_their_way and part.part not in self._parts:
            return  # nobody asked for it, and there may be no room
        self._hear_donor(now_s)
        if part.part in self._parts:
            return  # a copy of one that is here
        if not self._state_id:
            self._state_id, self._num_parts, self._bytes = part.state_id, part.num_parts, part.state_bytes
            self._unasked = [i for i in range(part.num_parts - 1, -1, -1) if i != part.part]
        self._parts[part.part] = part.payload
        self._on_their_way.remove(part.part)
        if len(self._parts) == self._num_parts:
            self.at.take("whole")
            parts = tuple(self._parts[i] for i in range(self._num_parts))
            self._parts.clear()
            actions.append(CheckState(parts=parts, state_bytes=self._bytes))
            return
        room = PARTS_AT_ONCE - len(self._on_their_way)
        self._fetch([self._unasked.pop() for _ in range(min(room, len(self._unasked)))], actions)

    def checked(self, flaw: str, now_s: float, actions: list[Action]) -> None:
        """Settles with a state that the driver has checked, or gives the donor up for its ``flaw``."""
        if self.stage is not Stage.CHECKING:
            return
        if flaw:
            self._give_up_donor(flaw, now_s, actions)
            return
        self.at.take("settle")
        actions.append(Settled(source=StateSource.DONOR, detail=f"of {self.donor}, {self._bytes} bytes"))

    def advance(self, now_s: float, actions: list[Action]) -> None:
        """Asks again, gives a silent donor up, or starts fresh, where it is time."""
        stage = self.at.stage
        if stage not in (Stage.ASKING, Stage.FETCHING):
            return
        if now_s >= self._ends_at_s:
            self._settle_fresh(f"patience ended; {self._why}", actions)
        elif stage is Stage.ASKING and now_s >= self._ask_at_s:
            self._ask_at_s = now_s + ASK_AGAIN_S
            actions.append(Send(to=AGGREGATOR, message=AskDonor(tried=tuple(self._tried))))
        elif stage is Stage.FETCHING and now_s >= self._silent_at_s:
            self._give_up_donor(f"silent for {now_s - self._heard_s:.3g} s", now_s, actions)
        elif stage is Stage.FETCHING and self._pauses.due(now_s):
            self._pauses.tried(now_s)
            self._patience.in_vain(self._pauses)
            parts, self._on_their_way = self._on_their_way, []
            self._fetch(parts, actions)

    def end(self, reason: str, actions: list[Action]) -> None:
        """Starts fresh if a donor is still waited for: the run ends."""
        if self.stage in (Stage.ASKING, Stage.FETCHING):
            self._settle_fresh(reason, actions)

    @property
    def due_at_s(self) -> float:
        """Returns when to call :meth:`advance` at the latest; infinity while nothing is waited for."""
        stage = self.at.stage
        if stage is Stage.ASKING:
            return min(self._ask_at_s, self._ends_at_s)
        if stage is Stage.FETCHING:
            return min(self._pauses.due_at_s, self._silent_at_s, self._ends_at_s)
        return math.inf

    def _begin_donor(self, wait_s: float, now_s: float) -> None:
        self._wait_s, self._heard_s, self._silent_at_s = wait_s, now_s, now_s + wait_s
        self._state_id, self._num_parts, self._bytes = "", 0, 0
        self._parts, self._on_their_way, self._unasked = {}, [], []
        self._patience = Patience(FETCH_AGAIN_S)
        self._pauses = self._patience.backoff(PART_BYTES)
        self._pauses.tried(now_s)

    def _hear_donor(self, now_s: float) -> None:
        """Begins the pauses anew at a sound part, if only a copy: the others may take as long again."""
        if self._state_id and self._pauses.attempts == 1:  # neither the donor's copying nor a pause is in this time
            self._patience.took(now_s - self._heard_s)
        self._pauses = self._patience.backoff(PART_BYTES)
        self._pauses.tried(now_s)
        self._heard_s = now_s
        self._silent_at_s = now_s + max(self._wait_s, SILENT_PAUSES * self._pauses.pause_s)

    def _wrong(self, part: StatePart) -> str:
        """Returns the flaw of a part; empty if there is none."""
        if not part.num_parts:
            return "has none to give"
        if part.num_parts != max(1, -(-part.state_bytes // PART_BYTES)) or part.part >= part.num_parts:
            return f"part {part.part} of {part.num_parts} of {part.state_bytes} bytes cannot be"
        if part.state_bytes > self._most_bytes:
            return f"its {part.state_bytes} bytes are more than the {self._most_bytes} that could fit"
        known = self._state_id, self._num_parts, self._bytes
        if self._state_id and known != (part.state_id, part.num_parts, part.state_bytes):
            return "made another copy meanwhile"
        return ""

    def _fetch(self, parts: list[int], actions: list[Action]) -> None:
        if parts:
            self._on_their_way += parts
            actions.append(Send(to=self.donor, message=FetchState(state_id=self._state_id, parts=tuple(parts))))

    def _give_up_donor(self, why: str, now_s: float, actions: list[Action]) -> None:
        self._tried.append(self.donor)
        self._why = f"{self.donor}: {why}"
        actions.append(Note(name="donor.failed", fields={"donor": self.donor, "reason": why}))
        self._begin_donor(0.0, now_s)
        if len(self._tried) >= MOST_DONORS:
            self._settle_fresh(self._why, actions)
            return
        self.at.take("silent, wrong or gone")
        self._ask_at_s = now_s
        self.advance(now_s, actions)

    def _settle_fresh(self, why: str, actions: list[Action]) -> None:
        self.at.take("settle")
        self._begin_donor(0.0, 0.0)
        actions.append(Settled(source=StateSource.FRESH, detail=f"no donor: {why}"))


class Giver:
    """The donor's side: one copy of its state, for as many islands as ask.

    Attributes:
        due_at_s: When to call :meth:`advance`; infinity while nothing is held.
    """

    def __init__(self) -> None:
        self._copying = False
        self._state_id = ""
        self._bytes = 0
        self._parts: tuple[Payload, ...] = ()
        self._waiting: dict[str, tuple[int, ...]] = {}  # island -> parts that it asked for, while there is no copy
        self.due_at_s = math.inf

    def fetch(
        self, sender: str, fetch: FetchState, state_id: str, trained: bool, now_s: float, actions: list[Action]
    ) -> None:
        """Sends the parts asked for, once there is a copy.

        Args:
            sender: The island that asks.
            fetch: What it asks for.
            state_id: The name of a copy that would be made now.
            trained: Whether the optimizer here has seen enough to be worth having.
            now_s: Monotonic seconds.
            actions: What to do is put here.
        """
        if not trained or (fetch.state_id and fetch.state_id != self._state_id):
            self._decline(sender, actions)
        elif self._parts:
            self.due_at_s = now_s + HOLD_S
            self._give(sender, fetch.parts, actions)
        else:
            self._waiting[sender] = fetch.parts
            if not self._copying:
                self._copying, self._state_id = True, state_id
                actions.append(CopyState())

    def copied(self, parts: tuple[Payload, ...], state_bytes: int, now_s: float, actions: list[Action]) -> None:
        """Gives parts of the copy to those who wait; no parts: this training loop shows no state."""
        self._copying, self._parts, self._bytes = False, parts, state_bytes
        self.due_at_s = now_s + HOLD_S if parts else math.inf
        waiting, self._waiting = self._waiting, {}
        for island_id, asked in waiting.items():
            if parts:
                self._give(island_id, asked, actions)
            else:
                self._decline(island_id, actions)

    def advance(self, now_s: float) -> None:
        """Gives the copy up when nobody asks for it any more."""
        if now_s >= self.due_at_s:
            self._parts, self._state_id, self.due_at_s = (), "", math.inf

    def _give(self, island_id: str, asked: tuple[int, ...], actions: list[Action]) -> None:
        for index in asked[:PARTS_AT_ONCE]:
            if index < len(self._parts):
                part = StatePart(
                    state_id=self._state_id,
                    part=index,
                    num_parts=len(self._parts),
                    state_bytes=self._bytes,
                    payload=self._parts[index],
                )
                actions.append(Send(to=island_id, message=part))

    def _decline(self, island_id: str, actions: list[Action]) -> None:
        none = StatePart(state_id="", part=0, num_parts=0, state_bytes=0, payload=())
        actions.append(Send(to=island_id, message=none))
