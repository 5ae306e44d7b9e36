"""Scripted islands played by a process of their own, which gives way to every other.

In a run islands have hosts of their own. Here they share the processors with the hub, and playing a thousand of them
takes half a processor, which the hub would lack. So this process has the lowest priority, and the islands whose answers
are timed are played by another.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from benchmarks.scripted import Payloads, ScriptedFleet, model, scripted_fleet
from broker.process.collecting import collect_seldom
from broker.wire.errors import Unavailable
from broker.wire.messages import Codec

LOWEST_PRIORITY = 19
#: The process is taken for dead if it does not answer within this, and killed if it does not end.
ANSWER_S, END_S = 600.0, 10.0
#: Answers where there is no such process.
OF_NOBODY: dict[str, tuple[float, ...]] = {"seeded": (), "counted": (0.0, 0.0), "train": (0.0,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Which islands a process plays, of how many in all.

    Attributes:
        address: Control address of the broker.
        parameters: Of the model.
        fragments: Of the model (P).
        heartbeat_s: Seconds between two heartbeats of an island.
        numbers: The islands.
        of: How many islands there are.
    """

    address: str
    parameters: int
    fragments: int
    heartbeat_s: float
    numbers: tuple[int, ...]
    of: int

    def fleet(self) -> AbstractAsyncContextManager[ScriptedFleet]:
        """Has them join, and ends them with the block."""
        return scripted_fleet(
            [self.address] * len(self.numbers),
            Payloads(model(self.parameters), self.fragments, Codec.INT8),
            heartbeat_s=self.heartbeat_s,
            numbers=self.numbers,
            of=self.of,
        )


def counted(fleet: ScriptedFleet) -> tuple[int, int]:
    """Returns the heartbeats that were sent so far, and the states that islands were told."""
    return sum(island.beats for island in fleet.islands), sum(island.states for island in fleet.islands)


class Crowd:
    """Islands of another process; they join as the block is entered, and end with it.

    Args:
        played: Which; with none of them there is no process.
    """

    def __init__(self, played: Played) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, self._its = context.Pipe()
        self._process = context.Process(target=_play, args=(played, self._its), daemon=True) if played.numbers else None

    def __enter__(self) -> Self:
        if self._process is not None:
            self._process.start()
            self._its.close()  # so that its end is heard
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ours.close()  # which tells it to end
        if self._process is not None:
            self._process.join(END_S)
            self._process.kill()

    async def seeded(self) -> None:
        """Returns when every island holds version 0; raises Unavailable if that never comes."""
        await self._asked("seeded")

    async def counted(self) -> tuple[int, int]:
        """Returns the heartbeats that were sent so far, and the states that islands were told."""
        beats, states = await self._asked("counted")
        return int(beats), int(states)

    async def train(self, seconds: float, every_s: float) -> float:
        """Has its islands train (:meth:`ScriptedFleet.train`); returns the rounds whose version they have."""
        (rounds,) = await self._asked("train", seconds, every_s)
        return rounds

    async def _asked(self, what: str, *how: float) -> tuple[float, ...]:
        if self._process is None:
            return OF_NOBODY[what]
        self._ours.send((what, *how))
        if not await asyncio.to_thread(self._ours.poll, ANSWER_S):
            raise Unavailable(f"the other islands did not answer within {ANSWER_S:.0f} s", definite=True)
        try:
            answer = self._ours.recv()
        except (EOFError, OSError) as err:
            raise Unavailable("the process that plays the other islands has ended", definite=True) from err
        if isinstance(answer, str):
            raise Unavailable(answer, definite=True)
        return tuple(answer)


def _play(played: Played, asked: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the other, which ends this one
    os.nice(LOWEST_PRIORITY)
    asyncio.run(_answer(played, asked))


async def _answer(played: Played, asked: Connection) -> None:
    try:
        async with played.fleet() as fleet:
            while True:
                match await asyncio.to_thread(asked.recv):
                    case ("seeded",):
                        await fleet.seeded()
                        collect_seldom()  # else its pauses are in what the islands see
                        asked.send(())
                    case ("counted",):
                        asked.send(counted(fleet))
                    case ("train", seconds, every_s):
                        asked.send((await fleet.train(seconds, every_s),))
    except* EOFError:
        pass  # the other has ended, or needs this one no more
    except* Unavailable as errors:
        asked.send(str(errors.exceptions[0]))
