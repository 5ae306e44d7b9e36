"""Faults: their kinds, the roles of struck processes, and the rogue island that tampers. Pure.

The same words serve faults of real processes (:mod:`ops.chaos`) and of simulated ones (:mod:`ops.virtual`). A rogue
too is played by a real process and in virtual time, where its payloads differ and are plugged in. The core behind it
goes on honestly: it trains, answers rounds, and hears what became of each contribution.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import xxhash

from broker.wire.messages import Contribution, Encoded, Message, TrainedOn
from broker.wire.tensors import decode_tensor, encode_tensor


class FaultKind(StrEnum):
    """A kind of fault."""

    KILL = "kill"  # SIGKILL, then held down
    OUTAGE = "outage"  # every aggregator, every broker and Redis killed at once, and held down
    STOP = "stop"  # SIGSTOP, later SIGCONT: the process freezes with every connection open
    CLOCK = "clock"  # its monotonic clock jumps, and later back
    DISK_FULL = "disk-full"  # no file may grow
    WIPE = "wipe"  # Redis killed, and started empty
    STALE = "stale"  # Redis killed, and started with data from the beginning of the run
    PARTITION = "partition"  # nothing passes between a process and the broker
    CUT_REDIS = "cut-redis"  # nothing passes between a process and Redis
    SLOW = "slow"  # a far and narrow link
    CORRUPT = "corrupt"  # bytes are changed on the way
    RESET = "reset"  # connections are cut, again and again
    NAN = "nan"  # an island more, which sends what is not finite,
    SCALE = "scale"  # .. a thousand times too long pseudo-gradients,
    REPLAY = "replay"  # .. everything several times, and old messages again,
    GARBAGE = "garbage"  # .. bytes without meaning
    SIGN_FLIP = "sign-flip"  # an island more, which sends plausible lies: see LIES
    SIGN_FLIP_3 = "sign-flip-3"
    SCALE_8 = "scale-8"
    CONSTANT = "constant"
    CONSTANT_3 = "constant-3"
    CONSTANT_NOISE = "constant-noise"
    DRIFT = "drift"
    CLAIMS = "claims"
    SIGN_FLIP_8_CLAIMS = "sign-flip-8-claims"
    CONSTANT_3_CLAIMS = "constant-3-claims"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lie:
    """The formula by which a liar replaces its pseudo-gradient g, tensor by tensor.

        sent = honest * g + |g| * (constant * d + noise * n)

    d and n are random and as long as 1. d is the same in the whole run and for all liars, so that two of them collude,
    and orthogonal to g where g is sent too; n is another one each time.

    Attributes:
        tokens: Multiplies the tokens that it says a step has.
    """

    honest: float = 0.0
    constant: float = 0.0
    noise: float = 0.0
    tokens: int = 1

    @property
    def length(self) -> float:
        """How many times as long as the honest one it is."""
        return math.hypot(self.honest, self.constant, self.noise)


LIES: Mapping[FaultKind, Lie] = MappingProxyType(
    {
        FaultKind.SIGN_FLIP: Lie(honest=-1.0),
        FaultKind.SIGN_FLIP_3: Lie(honest=-3.0),
        FaultKind.SCALE_8: Lie(honest=8.0),
        FaultKind.CONSTANT: Lie(constant=1.0),
        FaultKind.CONSTANT_3: Lie(constant=3.0),
        FaultKind.CONSTANT_NOISE: Lie(constant=1.0, noise=0.5),  # two of them have a cosine of 0.8
        FaultKind.DRIFT: Lie(honest=1.0, constant=1.0),
        FaultKind.CLAIMS: Lie(honest=1.0, tokens=4),
        FaultKind.SIGN_FLIP_8_CLAIMS: Lie(honest=-8.0, tokens=4),
        FaultKind.CONSTANT_3_CLAIMS: Lie(constant=3.0, tokens=4),
    }
)

#: Manners of an island whose contributions cannot be right.
MISBEHAVIORS = (FaultKind.NAN, FaultKind.SCALE, FaultKind.REPLAY, FaultKind.GARBAGE)
#: Manners of every island that tampers.
ROGUES = (*MISBEHAVIORS, *LIES)


class Role(StrEnum):
    """The role of a process, which its name tells."""

    ISLAND = "island"
    AGGREGATOR = "aggregator"  # the leader and its standbys
    BROKER = "broker"
    REDIS = "redis"
    ROGUE = "rogue"
    LINKS = "links"
    EVALUATION = "evaluation"  # of the model while it trains


_ROLE_OF_WORD = {role.value: role for role in Role} | {"standby": Role.AGGREGATOR}


def role_of(process: str) -> Role:
    """Returns a process's role: ``standby-1`` is an aggregator, a name without a known word an island."""
    return _ROLE_OF_WORD.get(process.partition("-")[0], Role.ISLAND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault: its kind, its targets, when it begins and how long it lasts.

    Attributes:
        at_s: Seconds from the beginning: of a real run, from the moment when every island trains.
        targets: Names of processes, or words for them as :mod:`ops.faults.plan` has them; all are struck at one moment.
        for_s: How long it lasts; for a kill, how long the process is held down.
        options: Further settings of its kind.
    """

    at_s: float
    kind: FaultKind
    targets: tuple[str, ...] = ()
    for_s: float = 0.0
    options: Mapping[str, float | bool] = field(default_factory=lambda: MappingProxyType({}))

    def lasts(self, now_s: float) -> bool:
        """Whether it is on at a moment."""
        return self.at_s <= now_s < self.at_s + self.for_s

    def __str__(self) -> str:
        """Returns it in words, for display and report."""
        whom = f" {' + '.join(self.targets)}" if self.targets else ""
        return f"{self.kind}{whom}" + (f" for {self.for_s:g} s" if self.for_s else "")


# --- rogues -----------------------------------------------------------------------------------------------------

#: How much too long the contributions of ``SCALE`` are.
SCALE = 1000.0
#: Contributions that ``REPLAY`` remembers.
REMEMBERED = 8
#: Seed of the direction that liars have in common.
DIRECTION = 1

Tensors = tuple[Encoded, ...]
Array = npt.NDArray[np.float32]


class Rogue:
    """Tampers with one island's messages.

    Args:
        manner: How: one of :data:`ROGUES`.
        rate: Share of the contributions that are tampered with.
        payloads: What can be done to payloads here.
        rng: Decides which, and how.
        honest: Whether it is honest for the time being.

    Attributes:
        tokens: Multiplies the tokens that its steps have, in all that it says: whoever drives its core sees to it.
    """

    def __init__(
        self,
        manner: FaultKind,
        rate: float,
        payloads: TamperedTensors,
        rng: random.Random,
        honest: Callable[[], bool] = lambda: False,
    ) -> None:
        assert manner in ROGUES, manner
        self._manner, self._rate = manner, rate
        self._lie = LIES.get(manner)
        self.tokens = self._lie.tokens if self._lie else 1
        self._payloads, self._honest = payloads, honest
        self._rng = rng
        self._sent: deque[Contribution] = deque(maxlen=REMEMBERED)

    def outgoing(self, message: Message) -> tuple[Message, ...]:
        """Returns what to send in place of ``message``, in order; its own contribution is always among it."""
        if not isinstance(message, Contribution) or self._honest() or self._rng.random() >= self._rate:
            return (message,)
        payload = message.payload
        if self._lie is not None:
            return (replace(message, payload=self._payloads.lied(payload, self._lie, message.fragment_id, self._rng)),)
        match self._manner:
            case FaultKind.NAN:
                return (replace(message, payload=self._payloads.spoilt(payload)),)
            case FaultKind.SCALE:
                return (replace(message, payload=self._payloads.scaled(payload, SCALE)),)
            case FaultKind.REPLAY:
                return self._replayed(message)
            case _:
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


class TamperedTensors:
    """Real payloads, tampered with; checksums are right, so nothing looks damaged."""

    def spoilt(self, payload: Tensors) -> Tensors:
        """Multiplies by NaN."""
        return self.scaled(payload, float("nan"))

    def scaled(self, payload: Tensors, factor: float) -> Tensors:
        """Multiplies, and encodes again."""
        return tuple(encode_tensor(decode_tensor(each) * np.float32(factor), each.codec) for each in payload)

    def noise(self, payload: Tensors, rng: random.Random) -> Tensors:
        """Returns random bytes of the same number."""
        noisy = []
        for each in payload:
            data = rng.randbytes(memoryview(each.data).nbytes)
            noisy.append(replace(each, data=data, checksum=xxhash.xxh3_64_intdigest(data)))
        return tuple(noisy)

    def misshapen(self, payload: Tensors) -> Tensors:
        """One dimension too many."""
        return tuple(replace(each, shape=(1, *each.shape)) for each in payload)

    def lied(self, payload: Tensors, lie: Lie, fragment_id: int, rng: random.Random) -> Tensors:
        """Applies the formula of :class:`Lie` to each tensor."""
        lies = []
        for place, each in enumerate(payload):
            honest = decode_tensor(each)
            sent = np.float32(lie.honest) * honest
            if lie.constant:
                direction = _random(honest, np.random.default_rng((DIRECTION, fragment_id, place)))
                if lie.honest and honest.any():
                    direction -= np.vdot(direction, honest) / np.vdot(honest, honest) * honest
                sent += _as_long(direction, lie.constant, honest)
            if lie.noise:
                sent += _as_long(_random(honest, np.random.default_rng(rng.getrandbits(64))), lie.noise, honest)
            lies.append(encode_tensor(sent, each.codec))
        return tuple(lies)


def _random(like: Array, generator: np.random.Generator) -> Array:
    return np.asarray(generator.standard_normal(like.shape, dtype=np.float32))  # of a scalar it returns a float


def _as_long(direction: Array, times: float, honest: Array) -> Array:
    """Returns the direction, ``times`` as long as ``honest``; nothing where it has no length."""
    length = np.linalg.norm(direction)
    scale = times * np.linalg.norm(honest) / length if length else 0.0
    return direction * np.float32(scale)
