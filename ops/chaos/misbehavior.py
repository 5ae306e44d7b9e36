"""How a rogue island misbehaves: what becomes of the contributions that its own, honest core wants to send. Pure.

The same manners are played by a real process (:mod:`ops.chaos.rogue`) and in virtual time (:mod:`ops.virtual`); what
they do to a payload differs, and is plugged in. The core behind them goes on honestly: it trains, answers rounds,
and hears what became of each contribution.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from enum import StrEnum
from typing import Any, Protocol

from broker.wire.messages import Contribution, Message, TrainedOn

#: How much too long the contributions of ``Manner.SCALE`` are.
SCALE = 1000.0
#: Contributions that ``Manner.REPLAY`` remembers.
REMEMBERED = 8


class Manner(StrEnum):
    """What a rogue does."""

    NAN = "nan"  # parameters that are not finite
    SCALE = "scale"  # a thousand times the norm
    REPLAY = "replay"  # everything twice, old ones again, and old ones under other names
    GARBAGE = "garbage"  # random bytes, wrong shapes, unknown fragments, impossible counters


class Payloads(Protocol):
    """What can be done to a payload."""

    def spoilt(self, payload: Any) -> Any:
        """Returns it with an element that is not finite."""
        ...

    def scaled(self, payload: Any, factor: float) -> Any:
        """Returns it with every element multiplied."""
        ...

    def noise(self, payload: Any, rng: random.Random) -> Any:
        """Returns as many random bytes, undamaged by the journey."""
        ...

    def misshapen(self, payload: Any) -> Any:
        """Returns it with a shape that the fragment has not."""
        ...


class Rogue:
    """Tampers with what one island sends.

    Args:
        manner: How.
        rate: Share of the contributions that are tampered with.
        payloads: What can be done to payloads here.
        rng: Decides which, and how.
    """

    def __init__(self, manner: Manner, rate: float, payloads: Payloads, rng: random.Random) -> None:
        self._manner, self._rate = manner, rate
        self._payloads = payloads
        self._rng = rng
        self._sent: deque[Contribution] = deque(maxlen=REMEMBERED)

    def outgoing(self, message: Message) -> tuple[Message, ...]:
        """Returns what to send in place of ``message``, in order; its own contribution is always among it."""
        if not isinstance(message, Contribution) or self._rng.random() >= self._rate:
            return (message,)
        payload = message.payload
        match self._manner:
            case Manner.NAN:
                return (replace(message, payload=self._payloads.spoilt(payload)),)
            case Manner.SCALE:
                return (replace(message, payload=self._payloads.scaled(payload, SCALE)),)
            case Manner.REPLAY:
                return self._replayed(message)
            case Manner.GARBAGE:
                return self._garbage(message)

    def _replayed(self, message: Contribution) -> tuple[Contribution, ...]:
        old = self._rng.choice(self._sent) if self._sent else message
        self._sent.append(message)
        # The old steps with one more behind them, as if nobody had them yet.
        steps = replace(old.steps, to_step=old.steps.to_step + 1)
        more = TrainedOn(fragment_version=old.trained_on[-1].fragment_version, steps=1)
        renamed = replace(old, round_id=message.round_id, steps=steps, trained_on=(*old.trained_on, more))
        return message, message, replace(old, round_id=message.round_id), renamed

    def _garbage(self, message: Contribution) -> tuple[Contribution, ...]:
        noise = replace(message, payload=self._payloads.noise(message.payload, self._rng))
        misshapen = replace(message, payload=self._payloads.misshapen(message.payload))
        far = replace(message.steps, to_tokens=message.steps.to_tokens + 10**12)
        lie = replace(message, steps=far)
        nowhere = replace(message, fragment_id=message.fragment_id + 1000)
        return lie, nowhere, self._rng.choice((noise, misshapen))
