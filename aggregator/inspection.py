"""What may be wrong with the bytes of a payload: looked for at the door, since the core never looks into one. Pure."""

from __future__ import annotations

from aggregator.events import Flaw
from broker.codec import kind_of, verify
from broker.errors import RemoteProtocolError
from broker.fragments import FragmentManifest
from broker.messages import Codec, Contribution, Envelope, Reason, Seed
from broker.tensors import check_payload, is_finite

_SEED_CODECS = frozenset({Codec.F32})  # version 0 is what every later one is measured from: nothing is rounded away


def flaw_in(envelope: Envelope, manifest: FragmentManifest | None) -> Flaw | None:
    """Returns what is wrong with the payload of a contribution or seed, or None.

    Looked at in this order: the fragment is one of the run; the bytes are those that were sent; number, shapes and
    codecs of the tensors; every element is finite. A payload that passes can be merged whatever it holds.

    Args:
        envelope: With a Contribution or a Seed.
        manifest: The run's fragments; None while no island has joined.
    """
    message = envelope.message
    assert isinstance(message, Contribution | Seed)
    p = message.fragment_id
    if manifest is None or p >= len(manifest):
        known = 0 if manifest is None else len(manifest)
        return Flaw(reason=Reason.UNKNOWN_FRAGMENT, detail=f"fragment is {p}, the run has {known}")
    tensors = manifest.fragments[p]
    try:
        verify(envelope)
        check_payload(message.payload, tensors, codecs=_SEED_CODECS if isinstance(message, Seed) else frozenset(Codec))
    except RemoteProtocolError as err:
        return Flaw(reason=Reason(err.reason), detail=f"{err.field} is {err.got}, expected {err.expected}")
    for tensor, encoded in zip(tensors, message.payload, strict=True):
        if not is_finite(encoded):
            detail = f"{kind_of(message)}: {tensor.name} holds values that are not finite"
            return Flaw(reason=Reason.NOT_FINITE, detail=detail)
    return None
