"""Checks an arriving payload: its bytes, its shapes, and that every value is finite. Pure.

Its norm comes with it. The core reads no payload: what has a flaw it refuses (:mod:`aggregator.ledger.refusals`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from aggregator.interface.events import Flaw, Inspection
from aggregator.merge.lengths import measure
from aggregator.merge.passes import is_warm
from broker.base.errors import RemoteProtocolError
from broker.wire.fragments import FragmentManifest, Region, TensorSpec
from broker.wire.frames import verify
from broker.wire.messages import Codec, Contribution, Envelope, HostPart, Reason, Seed, kind_of
from broker.wire.tensors import check_payload, squared_norm

_SEED_CODECS = frozenset({Codec.F32})  # version 0 is what every later one is measured from: nothing is rounded away

#: Elements from which on the lengths of a tensor are kept for its merge; below, finding them takes less than the call.
WORTH_KEEPING = 1 << 16


def inspect(envelope: Envelope, manifest: FragmentManifest | None) -> Inspection:
    """Looks through the payload of a contribution or seed, once.

    In this order: the fragment is one of the run; the bytes are those that were sent; number, shapes and codecs of the
    tensors; every element is finite, which its norm tells. A payload that passes can be merged whatever it holds.

    Args:
        envelope: With a Contribution, a Seed, or one host's part of either.
        manifest: The run's fragments; None while no island has joined.
    """
    message = envelope.message
    assert isinstance(message, Contribution | Seed | HostPart)
    p = message.fragment_id
    if manifest is None or p >= len(manifest):
        known = 0 if manifest is None else len(manifest)
        return _flawed(Reason.UNKNOWN_FRAGMENT, f"fragment is {p}, the run has {known}")
    tensors = manifest.fragments[p]
    try:
        verify(envelope)
        seed = isinstance(message, Seed) or (isinstance(message, HostPart) and message.to_step == 0)
        tensors = _present(message, tensors)
        check_payload(message.payload, tensors, codecs=_SEED_CODECS if seed else frozenset(Codec))
    except RemoteProtocolError as err:
        return _flawed(Reason(err.reason), f"{err.field} is {err.got}, expected {err.expected}")
    # What is merged as it came has its lengths kept for that. Nobody waits here for a compilation: see `is_warm`.
    whole, total = isinstance(message, Contribution) and message.hosts == 1, 0.0
    for tensor, encoded in zip(tensors, message.payload, strict=True):
        kept = whole and tensor.size >= WORTH_KEEPING and is_warm()
        squares = float(measure(tensor, encoded).sum()) if kept else squared_norm(encoded)
        if not math.isfinite(squares):
            detail = f"{kind_of(message)}: {tensor.name} holds values that are not finite"
            return _flawed(Reason.NOT_FINITE, detail)
        total += squares
    return Inspection(norm=math.sqrt(total))


def _present(message: Contribution | Seed | HostPart, tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Returns the tensors that a message's buffers must be: all, or the regions that one host names.

    Raises:
        RemoteProtocolError: It says what cannot be.
    """
    if message.hosts == 1:
        return tensors
    places, payload = message.places, message.payload
    if len(places) != len(payload):
        got, expected = f"{len(payload)} tensors", f"{len(places)} tensors, one for each place"
        raise RemoteProtocolError(Reason.WRONG_SHAPE, field="buffers", got=got, expected=expected)
    present = []
    for i, (place, encoded) in enumerate(zip(places, payload, strict=True)):
        if place.tensor >= len(tensors):
            expected = f"below {len(tensors)}, the tensors of this fragment"
            raise RemoteProtocolError(
                Reason.WRONG_SHAPE, field=f"places[{i}].tensor", got=place.tensor, expected=expected
            )
        tensor = tensors[place.tensor]
        region = Region(place.start, encoded.shape)
        if not region.within(tensor.shape):
            expected = f"a part of {list(tensor.shape)} for {tensor.name}"
            got = f"{list(encoded.shape)} at {list(place.start)}"
            raise RemoteProtocolError(Reason.WRONG_SHAPE, field=f"buffers[{i}].shape", got=got, expected=expected)
        present.append(replace(tensor, shape=encoded.shape, unit_axes=0))
    return tuple(present)


def _flawed(reason: Reason, detail: str) -> Inspection:
    return Inspection(flaw=Flaw(reason=reason, detail=detail))
