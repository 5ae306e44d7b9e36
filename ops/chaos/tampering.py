"""Real payloads, tampered with: what a rogue process sends, and what the laboratory's rogues do. Pure."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import xxhash

from broker.wire.messages import Encoded
from broker.wire.tensors import decode_tensor, encode_tensor

Tensors = tuple[Encoded, ...]


class TamperedTensors:
    """Does to tensors what a manner asks for; checksums are right, so nothing looks damaged."""

    def spoilt(self, payload: Tensors) -> Tensors:
        """See :class:`ops.chaos.misbehavior.Payloads`."""
        return tuple(_changed(each, np.float32(np.nan)) for each in payload)

    def scaled(self, payload: Tensors, factor: float) -> Tensors:
        """See :class:`ops.chaos.misbehavior.Payloads`."""
        return tuple(_changed(each, np.float32(factor)) for each in payload)

    def noise(self, payload: Tensors, rng: random.Random) -> Tensors:
        """See :class:`ops.chaos.misbehavior.Payloads`."""
        noisy = []
        for each in payload:
            data = rng.randbytes(memoryview(each.data).nbytes)
            noisy.append(replace(each, data=data, checksum=xxhash.xxh3_64_intdigest(data)))
        return tuple(noisy)

    def misshapen(self, payload: Tensors) -> Tensors:
        """See :class:`ops.chaos.misbehavior.Payloads`."""
        return tuple(replace(each, shape=(1, *each.shape)) for each in payload)


def _changed(encoded: Encoded, factor: np.float32) -> Encoded:
    return encode_tensor(decode_tensor(encoded) * factor, encoded.codec)
