"""Both ways of a flow of chunks, as a client and its broker have them at their ends. Pure.

A flow goes over one connection or several ("subflows"). Whoever has the connections gives what comes to
:meth:`Flow.take_in`, and hands over what ``out.next`` returns until that is None.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.chunks.chunk_heads import Ask, Chunk, Credit, Resume, packed
from broker.chunks.memory import ReusedMemory
from broker.chunks.meter import SendingMeter
from broker.chunks.receiving import Inflow, PartialMessages, Refused
from broker.chunks.sending import Outflow
from broker.wire.headers import Buffer, Limits


class Flow:
    """One flow: messages, credit and answers go out through ``out``, and come in through ``incoming``."""

    def __init__(self, limits: Limits, memory: ReusedMemory | None, meter: SendingMeter | None = None) -> None:
        self.out, self.incoming = Outflow(meter), Inflow(limits, memory)

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
                answers, found = self.incoming.take_in(head, frames, kept, subflow)
                for each in answers:
                    self.out.answer(0, each)
                self.out.owed[subflow] = packed(self.incoming.credit(subflow))
                return found
        return []
