"""The broker's desk for observers: reads Redis for them, and answers. Shell.

It has a task and a connection to Redis of its own, so nobody waits for it: not the relay, not the broker's reports.
However many ask, it works at most a quarter of the time, one question after the other, and who asks again before the
answer has come takes the place of its own earlier question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from broker.base.errors import Unavailable, worth_repeating
from broker.process import logs
from broker.registry.registry import Registry
from broker.routing.events import LookedUp, LookUp
from broker.routing.observers import MOST_OBSERVERS
from broker.wire.messages import Inquiry, Observe, Observed
from broker.wire.packed_records import MOST_BYTES, TooLarge, pack_events, pack_snapshot, pack_version

log = logs.get(__name__)

#: Events in one answer, at most.
EVENTS_AT_A_TIME = 500
#: After working for some time it pauses so many times as long, between these limits.
PAUSES, LEAST_PAUSE_S, LONGEST_PAUSE_S = 3.0, 0.02, 1.0


class Desk:
    """Answers questions until it is cancelled; it has its own registry, and tells the relay."""

    def __init__(self, registry: Registry, tell: Callable[[LookedUp], None], *, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._tell = tell
        self._clock = clock
        self._waiting: dict[bytes, LookUp] = {}  # by connection, in order
        self._asked = asyncio.Event()
        self._flaws = 0

    def ask(self, question: LookUp) -> None:
        """Takes in a question; of too many the oldest is dropped, and asked again."""
        self._waiting[question.peer] = question
        if len(self._waiting) > MOST_OBSERVERS:
            del self._waiting[next(iter(self._waiting))]
        self._asked.set()

    async def run(self) -> None:
        """Answers what waits, again and again."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            waiting, self._waiting = list(self._waiting.values()), {}
            began_s = self._clock()
            await self._answer(waiting)
            took_s = self._clock() - began_s
            await asyncio.sleep(min(LONGEST_PAUSE_S, max(LEAST_PAUSE_S, PAUSES * took_s)))

    async def _answer(self, questions: Sequence[LookUp]) -> None:
        """Answers some questions; those that are the same have one answer."""
        found: dict[Observe, tuple[bytes, str]] = {}
        for each in questions:
            message = each.envelope.message
            assert isinstance(message, Observe)
            if message not in found:
                found[message] = await self._look_up(message)
            record, detail = found[message]
            observed = Observed(question=each.envelope.sequence, detail=detail, record=record)
            self._tell(LookedUp(peer=each.peer, to=each.envelope.sender, message=observed))

    async def _look_up(self, question: Observe) -> tuple[bytes, str]:
        """Returns a record, or why there is none."""
        try:
            return await self._record(question), ""
        except TooLarge:
            cure = "ask Redis itself, or with status RUN_DIR on its host"
            return b"", f"the answer has more than {MOST_BYTES} bytes: {cure}"
        except Unavailable as err:
            return b"", str(err)
        except Exception as err:  # noqa: BLE001 - anybody may write anything into Redis, and a broker must not end by it
            self._flaws += 1
            if worth_repeating(self._flaws):
                log.warning("observer.unanswered", about=question.about, detail=repr(err), times=self._flaws)
            return b"", f"what stands in Redis under atoll:{self._registry.run_id}: is not ours ({type(err).__name__})"

    async def _record(self, question: Observe) -> bytes:
        # Packing takes milliseconds, so it is done in a thread: the relay goes on meanwhile.
        match question.about:
            case Inquiry.SNAPSHOT:
                return await asyncio.to_thread(pack_snapshot, await self._registry.read())
            case Inquiry.EVENTS:
                after = question.after_ms, question.after_n
                events = await self._registry.read_events_after(after, EVENTS_AT_A_TIME)
                return (await asyncio.to_thread(pack_events, events))[0]
            case Inquiry.VERSION:
                kept = await self._registry.read_version(question.fragment_id, question.fragment_version)
                return await asyncio.to_thread(pack_version, kept)
