"""Inspects versions before an island uses them, and adds differences to what they are differences to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from broker.wire.codec import verify
from broker.wire.errors import RemoteProtocolError
from broker.wire.fragments import FragmentManifest
from broker.wire.messages import Codec, Encoded, Envelope, Reason, Version
from broker.wire.tensors import Float32Array, added, check_payload, decode_tensor, encode_vector, fragment_digest

_WHOLE = frozenset({Codec.F32})


class HeldVersions:
    """The newest version of each fragment as it came: differences are added to it.

    The reference values of a fragment are no substitute: they are what the local parameters were measured from, rounded
    as these are. One float32 vector a fragment is kept, and none where versions travel whole. Not thread-safe.

    Args:
        manifest: Of the run.
        differences: Whether versions are expected to come as differences; where they do unexpectedly, the first one of
            a fragment is refused, and its base kept from then on.
    """

    def __init__(self, manifest: FragmentManifest, *, differences: bool) -> None:
        self._manifest = manifest
        self._differences = differences
        self._held: dict[int, tuple[int, Float32Array]] = {}  # by fragment, with the version

    def take(self, envelope: Envelope) -> tuple[Envelope, str]:
        """Returns a version whole, and what is wrong with it; empty if nothing is.

        Checksums, the number of tensors, their shapes and codecs, that the base of a difference is here, and the digest
        that names the bytes of what comes of it.
        """
        version = envelope.message
        assert isinstance(version, Version)
        p = version.fragment_id
        if p >= len(self._manifest):
            return envelope, f"{Reason.UNKNOWN_FRAGMENT}: fragment {p} of {len(self._manifest)}"
        try:
            verify(envelope)
            codecs = _WHOLE if version.base is None else frozenset(Codec)
            check_payload(version.payload, self._manifest.fragments[p], codecs=codecs)
        except RemoteProtocolError as err:
            return envelope, str(err)
        if version.base is None:
            return self._whole(envelope, version)
        self._differences = True
        held, base = self._held.get(p, (None, None))
        if base is None or held != version.base:
            have = "none" if held is None else f"version {held}"
            return envelope, f"it is the difference to version {version.base}, and {have} is here"
        return self._kept(envelope, version, added(base, version.payload))

    def _whole(self, envelope: Envelope, version: Version) -> tuple[Envelope, str]:
        """Checks a version that came whole, and keeps it where differences to it may come."""
        parts = [decode_tensor(encoded) for encoded in version.payload]
        if self._differences:
            return self._kept(envelope, version, np.concatenate([part.reshape(-1) for part in parts]))
        return envelope, _misnamed(version, fragment_digest(*parts))

    def _kept(self, envelope: Envelope, version: Version, vector: Float32Array) -> tuple[Envelope, str]:
        """Keeps a version if its bytes are what its name says; returns it as views of what is kept."""
        flaw = self._keep(version, vector)
        payload = self._cut(version.fragment_id, vector)
        return replace(envelope, message=replace(version, base=None, payload=payload)), flaw

    def _keep(self, version: Version, vector: Float32Array) -> str:
        """Keeps a version if its bytes are what its name says, and nothing of its fragment otherwise."""
        flaw = _misnamed(version, fragment_digest(vector))
        if flaw:
            self._held.pop(version.fragment_id, None)
        else:
            self._held[version.fragment_id] = version.fragment_version, vector
        return flaw

    def _cut(self, p: int, vector: Float32Array) -> tuple[Encoded, ...]:
        """Returns a fragment's tensors, as views of one vector."""
        return encode_vector(vector, [tensor.shape for tensor in self._manifest.fragments[p]], Codec.F32)


def _misnamed(version: Version, digest: str) -> str:
    return "" if digest == version.digest else f"digest is {digest}, the version is named {version.digest}"
