"""A run as its broker shows it, for places that do not reach Redis. Shell.

The reads are those of :class:`~broker.registry.registry.Registry`. One question at a time, each answered or an error
within seconds; whoever calls decides when to ask again. It connects with the first question, and again after a loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from broker.base.errors import RemoteProtocolError, Unavailable
from broker.process import chance, clocks
from broker.transport.endpoint import Endpoint
from broker.transport.keys import ClientKeys
from broker.transport.sockets import Context
from broker.wire.frames import Origin
from broker.wire.headers import Limits
from broker.wire.messages import (
    BROKER,
    PROTOCOL_VERSION,
    Channel,
    Envelope,
    Inquiry,
    Observe,
    Observed,
    Reason,
    Refused,
    observing,
)
from broker.wire.names import check_name
from broker.wire.packed_records import unpack_events, unpack_snapshot, unpack_version
from broker.wire.records import EventNumber, KeptVersion, NumberedEvent, Snapshot

#: A connection takes some journeys there and back, an answer one and the broker's look into Redis.
CONNECT_WITHIN_S, ANSWER_WITHIN_S = 5.0, 10.0
#: Who is told to ask later does, so often.
ATTEMPTS, PAUSE_S = 4, 1.0
#: Answers are small; whoever sends more is no broker of ours.
LIMITS = Limits(max_message_bytes=Limits().max_header_bytes, max_buffers=1)
#: In place of a run's name that is not known: an answer says which run it is of, whatever was asked for.
_ANY_RUN = "any"


class ObservedRun:
    """The run that a broker serves; the next of the brokers is asked where one does not answer.

    An empty ``run_id`` is whichever run the broker serves, which :attr:`run_id` says after the first answer.

    Raises:
        ConfigError: ``run_id`` can be none.
    """

    def __init__(self, brokers: Sequence[str], run_id: str, *, keys: ClientKeys | None) -> None:
        if run_id:
            check_name("run", run_id)
        self.run_id = run_id
        self._brokers, self._keys = tuple(brokers), keys
        self._name = observing(chance.hexadecimal(6))
        self._sequence = 0
        self._at = 0  # which of the brokers
        self._context: Context | None = None
        self._endpoint: Endpoint | None = None
        self._unreadable: RemoteProtocolError | None = None
        self._asking = asyncio.Lock()

    @property
    def address(self) -> str:
        """The broker that is asked now."""
        return self._brokers[self._at]

    async def aclose(self) -> None:
        """Ends the connection."""
        await self._disconnect()
        if self._context is not None:
            self._context.term()
            self._context = None

    async def read(self) -> Snapshot:
        """Reads all that is known about the run.

        Raises:
            Unavailable: No broker answers, or it refuses, or it has no Redis; the message has the cure.
        """
        return unpack_snapshot(await self._ask(Observe(about=Inquiry.SNAPSHOT)))

    async def read_events_after(self, after: EventNumber, count: int) -> list[NumberedEvent]:
        """Reads at most ``count`` events after a number, oldest first, or fewer; raises as :meth:`read` does."""
        ms, n = after
        events = unpack_events(await self._ask(Observe(about=Inquiry.EVENTS, after_ms=ms, after_n=n)))
        return events[:count]

    async def read_version(self, fragment_id: int, version: int | None) -> KeptVersion:
        """Returns the contributors of a fragment's version, None: the newest; raises as :meth:`read` does."""
        question = Observe(about=Inquiry.VERSION, fragment_id=fragment_id, fragment_version=version)
        return unpack_version(await self._ask(question))

    async def _ask(self, question: Observe) -> bytes:
        async with self._asking:
            for attempt in range(ATTEMPTS):
                answer = await self._answer(question)
                message = answer.message
                if isinstance(message, Observed):
                    return self._record(answer.run_id, message)
                assert isinstance(message, Refused)
                if message.reason is not Reason.QUEUE_FULL or attempt == ATTEMPTS - 1:
                    raise Unavailable(self._refusal(message), definite=True)
                await asyncio.sleep(PAUSE_S)
            raise Unavailable(f"the broker at {self.address} takes no question", definite=True)

    def _record(self, run_id: str, answer: Observed) -> bytes:
        who = f"the broker at {self.address}"
        if run_id != (self.run_id or run_id):
            cure = f"choose it with --run {run_id}"
            raise Unavailable(f"{who} serves run {run_id}, and no run {self.run_id}: {cure}", definite=True)
        if answer.detail:
            raise Unavailable(f"{who} cannot say: {answer.detail}", definite=True)
        self.run_id = run_id
        return answer.record

    async def _answer(self, question: Observe) -> Envelope:
        """Asks once, and returns the answer or the refusal."""
        endpoint = await self._connected()
        self._sequence += 1
        asked = Envelope(
            run_id=self.run_id or _ANY_RUN,
            sender=self._name,
            incarnation=0,
            sequence=self._sequence,
            to=BROKER,
            message=question,
        )
        self._unreadable = None
        ends_s = clocks.monotonic() + ANSWER_WITHIN_S
        if await endpoint.send(asked):
            while clocks.monotonic() < ends_s:
                envelope = await endpoint.recv(min(1.0, max(0.0, ends_s - clocks.monotonic())))
                if self._unreadable is not None:
                    raise Unavailable(self._misread(self._unreadable), definite=True)
                if envelope is not None:
                    match envelope.message:
                        case Observed(question=number) | Refused(sequence=number) if number == self._sequence:
                            return envelope
                if not endpoint.connection:
                    break
        address = self.address
        await self._disconnect()
        self._at = (self._at + 1) % len(self._brokers)
        raise Unavailable(f"the broker at {address} gave no answer: it has ended, or hangs", definite=False)

    async def _connected(self) -> Endpoint:
        """Returns an endpoint with a connection; to the next broker where there is none."""
        why: list[str] = []
        for _ in self._brokers:
            if self._endpoint is None:
                self._endpoint = await self._opened()
            if await self._endpoint.ready(CONNECT_WITHIN_S):
                return self._endpoint
            why.append(self._no_connection(self._endpoint))
            await self._disconnect()
            self._at = (self._at + 1) % len(self._brokers)
        raise Unavailable("; ".join(why), definite=True)

    async def _opened(self) -> Endpoint:
        if self._context is None:
            self._context = Context()
        endpoint = Endpoint(
            self._context,
            self.address,
            Channel.BULK,
            keys=self._keys,
            limits=LIMITS,
            bulk_wait_s=0.0,
            on_unreadable=self._note_unreadable,
        )
        return await endpoint.__aenter__()

    async def _disconnect(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.__aexit__(None, None, None)

    def _note_unreadable(self, error: RemoteProtocolError, _: Origin) -> None:
        self._unreadable = error

    def _no_connection(self, endpoint: Endpoint) -> str:
        within = f"within {CONNECT_WITHIN_S:g} s"
        if not endpoint.reached:
            cure = "is it running, is the address right, and does a firewall let through the port behind it?"
            return f"the broker at {self.address} ({endpoint.address}) was not reached {within}: {cure}"
        if self._keys is None:
            cure = "if it has keys, name an observer's with --key (`atoll keys new observer NAME` on the hub)"
        else:
            identity = self._keys.own.identity
            cure = f"does its allow list have {identity} (`atoll keys list`), and is broker.public the one of this hub?"
        return f"the broker at {self.address} does not let us in: {cure}"

    def _refusal(self, refused: Refused) -> str:
        who = f"the broker at {self.address}"
        match refused.reason:
            case Reason.WRONG_KEY:
                cure = "an observer's key is needed: `atoll keys new observer NAME` on the hub"
                return f"{who} does not answer this key ({refused.detail}): {cure}"
            case Reason.QUEUE_FULL:
                return f"{who} is asked too often: {refused.detail}"
            case reason:
                return f"{who} refuses the question, {reason}: {refused.detail}"

    def _misread(self, error: RemoteProtocolError) -> str:
        if error.reason == Reason.PROTOCOL_VERSION:
            ours, cure = PROTOCOL_VERSION, "update the older side; from 7 on a broker answers observers"
            return f"the broker at {self.address} speaks version {error.got} of the protocol, this is {ours}: {cure}"
        return f"what the broker at {self.address} says cannot be read: {error}"
