"""Inspects a version before an island uses it. Pure."""

from __future__ import annotations

from broker.wire.codec import verify
from broker.wire.errors import RemoteProtocolError
from broker.wire.fragments import FragmentManifest
from broker.wire.messages import Codec, Envelope, Reason, Version
from broker.wire.tensors import check_payload, decode_tensor, fragment_digest

_VERSION_CODECS = frozenset(codec for codec in Codec if not codec.blockwise)


def flaw_in(envelope: Envelope, manifest: FragmentManifest) -> str:
    """Says what is wrong with the payload of a version; empty if nothing is.

    Checksums, the number of tensors, their shapes and codecs and, where it travelled in float32, the digest that names
    its bytes.
    """
    version = envelope.message
    assert isinstance(version, Version)
    if version.fragment_id >= len(manifest):
        return f"{Reason.UNKNOWN_FRAGMENT}: fragment {version.fragment_id} of {len(manifest)}"
    try:
        verify(envelope)
        check_payload(version.payload, manifest.fragments[version.fragment_id], codecs=_VERSION_CODECS)
    except RemoteProtocolError as err:
        return str(err)
    if all(encoded.codec is Codec.F32 for encoded in version.payload):
        found = fragment_digest(*map(decode_tensor, version.payload))
        if found != version.digest:
            return f"digest is {found}, the version is named {version.digest}"
    return ""
