"""Both ways of a flow of chunks, as a client and its broker have them at their ends. Pure.

A flow goes over one connection or several ("subflows"). Whoever has the connections gives what comes to
:meth:`Flow.take_in`, and hands over what :meth:`Flow.next` returns until that is None.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from broker.chunks.chunk_heads import Ask, Chunk, Credit, Resume, packed
from broker.chunks.memory import ReusedMemory
from broker.chunks.meter import SendingMeter
from broker.chunks.receiving import Inflow, PartialMessages, Refused
from broker.chunks.sending import Next, Outflow
from broker.wire.headers import Buffer, Limits


class Flow:
    """One flow; its messages go out through ``out``, and come in through ``incoming``."""

    def __init__(self, limits: Limits, memory: ReusedMemory | None, meter: SendingMeter | None = None) -> None:
        self.out, self.incoming = Outflow(meter), Inflow(limits, memory)
        self._answers: list[tuple[int, bytes]] = []  # by subflow
        self._owes_credit: dict[int, None] = {}  # subflows

    def answer(self, subflow: int, frame: bytes) -> None:
        """Adds an answer, which goes before all else.

        Over a connection beside the first it is that of its bond.
        """
        self._answers.append((subflow, frame))

    def take_in(
        self,
        head: Chunk | Ask | Credit | Resume,
        frames: Sequence[Buffer],
        kept: PartialMessages | None,
        now_s: float,
        subflow: int = 0,
    ) -> list[list[Buffer] | Refused]:
        """Takes in a chunk, or what is said of chunks; returns the messages that are whole now, or why not."""
        match head:
            case Credit():
                self.out.credited(head, now_s, subflow)
            case Resume():
                self.out.resume(head)
            case _:
                self._owes_credit[subflow] = None
                answers, found = self.incoming.take_in(head, frames, kept, subflow)
                for each in answers:
                    self.answer(0, each)
                return found
        return []

    def next(self, full: Container[int] = ()) -> Next | None:
        """Returns what may go now: answers, then credit, then messages; None if nothing may.

        Once a connection has taken it, call :meth:`sent`. Nothing is returned for those in ``full``, which took
        nothing; a message waits for the connection that is its turn.
        """
        for subflow, answer in self._answers:
            if subflow not in full:
                return Next(None, [answer], 0, False, subflow)
        for subflow in self._owes_credit:
            if subflow not in full:
                return Next(None, [packed(self.incoming.credit(subflow))], 0, False, subflow)
        step = self.out.next()
        return None if step is None or step.subflow in full else step

    def sent(self, step: Next, now_s: float) -> None:
        """Notes that a connection has taken what :meth:`next` returned last."""
        if step.transfer is not None:
            self.out.sent(step, now_s)
        elif (owed := (step.subflow, step.frames[0])) in self._answers:
            self._answers.remove(owed)
            if step.subflow:  # whose other end knows now that chunks may come over it
                self.out.spread(step.subflow)
        else:
            del self._owes_credit[step.subflow]
