"""Computes bytes on the wire and in memory, and the number of aggregators for a model. Pure.

The wire. A round moves one fragment: up from each island as a contribution in ``codec``, down to each island as a
version in ``version_codec``. Beside the tensors (:mod:`broker.wire.number_formats`, exact) there are headers:
270 bytes a message, 75 a tensor, and in a version 200 for the island's own contribution, as measured by
``benchmarks/wire_bytes.py``. Heartbeats and announcements are not in it: a few kB/s for each island.

Memory. *Bound* is invariant 9 (reference.md, section 10), with pools of one message for each island and ten in sockets.
*Expected* was measured (``benchmarks/README.md``); that of an island follows from what it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from broker.base.errors import ConfigError
from broker.base.settings import whole_number
from broker.chunks.receiving import SPARE_BYTES
from broker.routing.directory import MAX_SHARDS
from broker.wire.fragments import Kind, TensorSpec, partition
from broker.wire.messages import Codec
from broker.wire.number_formats import MERGED_BYTES, encoded_bytes

MESSAGE_HEADER_BYTES = 270
TENSOR_HEADER_BYTES = 75

#: Memory of the processes without a model: Python and libraries, in the aggregator mostly numba.
AGGREGATOR_BASE_BYTES, BROKER_BASE_BYTES = 192 << 20, 54 << 20

#: High-water marks of 4 in each direction, and one message that is copied each way.
MESSAGES_IN_SOCKETS = 10

#: Parameters, gradients and both moments of Adam, in float32.
TRAINER_BYTES_PER_PARAMETER = 16

#: The elements of each tensor, per fragment.
Payload = tuple[tuple[int, ...], ...]


def cut(parameters: int, tensors: tuple[TensorSpec, ...], fragments: int) -> Payload:
    """Returns the sizes of at most ``fragments`` fragments: as in a run if tensors are known, else equal."""
    if not tensors:
        share, rest = divmod(parameters, fragments)
        return tuple((share + (p < rest),) for p in range(fragments))
    moving = (f for f in partition(tensors, fragments).fragments if any(t.kind is not Kind.FROZEN for t in f))
    return tuple(tuple(tensor.size for tensor in fragment) for fragment in moving)


def contribution_bytes(tensors: Sequence[int], codec: Codec) -> int:
    """Returns the bytes of one fragment's contribution; ``tensors`` are the elements of each."""
    header = MESSAGE_HEADER_BYTES + len(tensors) * TENSOR_HEADER_BYTES
    return header + sum(encoded_bytes(codec, elements) for elements in tensors)


def version_bytes(tensors: Sequence[int], codec: Codec) -> int:
    """Returns the bytes of one fragment's version at an island that contributed to it."""
    return contribution_bytes(tensors, codec) + MERGED_BYTES


@dataclass(frozen=True, slots=True)
class FragmentBytes:
    """The elements of each fragment, and the bytes that an island sends and receives in its round."""

    elements: tuple[int, ...]
    ups: tuple[int, ...]
    downs: tuple[int, ...]

    @property
    def rounds(self) -> int:
        """P, the rounds of a cycle in which every fragment is merged once."""
        return len(self.ups)

    @property
    def largest_message(self) -> int:
        """Bytes of the largest contribution or version."""
        return max(*self.ups, *self.downs)

    def of(self, fragments: Sequence[int]) -> FragmentBytes:
        """Returns the same for a subset of the fragments."""
        each = (self.elements, self.ups, self.downs)
        return FragmentBytes(*(tuple(values[p] for p in fragments) for values in each))


def wire_of(payload: Payload, *, codec: Codec, version_codec: Codec) -> FragmentBytes:
    """Returns the bytes for an island that contributes to every version."""
    return FragmentBytes(
        elements=tuple(map(sum, payload)),
        ups=tuple(contribution_bytes(fragment, codec) for fragment in payload),
        downs=tuple(version_bytes(fragment, version_codec) for fragment in payload),
    )


# --- memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of one process, in bytes; ``bound`` is None where nothing bounds it."""

    expected: float
    bound: float | None


def hub_memory(
    wire: FragmentBytes, islands: int, open_shares: Sequence[float], differences: bool
) -> tuple[Memory, Memory]:
    """Returns the memory of an aggregator, and of a broker, for some fragments.

    ``open_shares`` has the share of the time in which each one's round is open.

    The aggregator. The model's state lies in files: parameters, momentum, and where versions are ``differences`` a
    residual. Expected: memory of chunks, and version 0 as it comes (1 model), or later the state of one fragment before
    and after a merge, what is sent of it, and the contributions of the rounds that are open, whichever is more.
    Measured: 1.2 to 1.3 models beside the round, with P = 8 and 100 M parameters.

    The broker. Expected: the newest version of each fragment (1 model; where versions are ``differences``, half a model
    of these, and in the bound the whole versions that they build on), the contributions that pass, and memory of
    chunks. What waits inside ZeroMQ varies: measured were 3.2 to 3.7 models with 16 islands, as many parameters.
    """
    model, downs = 4.0 * sum(wire.elements), float(sum(wire.downs))
    chunks = min(SPARE_BYTES, model)
    passing = islands * _open(wire.ups, open_shares)
    most_passing = max((islands + MESSAGES_IN_SOCKETS) * wire.largest_message, passing)
    making = 2 * (3 if differences else 2) * 4.0 * max(wire.elements) + max(wire.downs)
    kept = BROKER_BASE_BYTES + chunks + (model / 2 if differences else downs)
    aggregator = Memory(
        expected=AGGREGATOR_BASE_BYTES + chunks + max(model, making + passing),
        bound=AGGREGATOR_BASE_BYTES + chunks + max(model, making) + most_passing,
    )
    return aggregator, Memory(expected=kept + passing, bound=kept + (model if differences else 0.0) + most_passing)


def island_host_memory(wire: FragmentBytes, open_shares: Sequence[float], differences: bool) -> Memory:
    """Returns the memory of an island's host for Atoll, beside its trainer.

    Expected: the reference value (1 model in f32), where versions are ``differences`` also the newest versions
    (another), and for each round that is open a copy of the fragment, its encoded contribution, a version and the shift
    made of it. Bound: every fragment at once.
    """
    model = (2 if differences else 1) * 4.0 * sum(wire.elements)
    each = zip(wire.elements, wire.ups, wire.downs, strict=True)
    per_round = [2 * 4.0 * elements + up + down for elements, up, down in each]
    return Memory(expected=model + _open(per_round, open_shares), bound=model + sum(per_round))


def _open(sizes: Sequence[float], open_shares: Sequence[float]) -> float:
    """Returns the bytes held by the average number of open rounds; at least the largest round's."""
    return max(sum(size * share for size, share in zip(sizes, open_shares, strict=True)), *sizes)


# --- aggregators that share a model -------------------------------------------------------------------------------

#: The word for a number that follows from model and machine.
AUTO = "auto"
#: Parameters that one aggregator merges from eight islands in 24 s on one core (:mod:`ops.forecast.links`).
PARAMETERS_EACH = 10**9
#: Parameters, momentum and what versions leave over, in float32: they lie in files, for which the machine should have
#: room in memory, or each round reads its disk. And as much of the fragment that an aggregator merges, with the version
#: that it makes of it.
BYTES_PER_PARAMETER, BYTES_PER_MERGED = 12, 16


def is_auto(shards: object) -> bool:
    """Returns whether a number of aggregators, from a flag or a file, is ``auto``.

    Raises:
        ConfigError: It is another word.
    """
    if shards == AUTO:
        return True
    if isinstance(shards, str):
        try:
            whole_number(shards)
        except ValueError:
            raise ConfigError("shards", shards, f"must be a whole number, or {AUTO}: by the model") from None
    return False


def shards_for(parameters: int, *, fragments: int, host_bytes: float | None = None) -> int:
    """Returns the number of aggregators on hosts of their own: one for each 10^9 parameters.

    More where the part of one would take more than half of its host's memory (None: not known); never more than
    fragments. ``parameters`` are those that are synchronised.
    """
    wanted = math.ceil(parameters / PARAMETERS_EACH)
    if host_bytes is not None:
        room = host_bytes / 2 - _merging_bytes(parameters, fragments)
        wanted = max(wanted, math.ceil(BYTES_PER_PARAMETER * parameters / room)) if room > 0 else MAX_SHARDS
    return max(1, min(wanted, fragments, MAX_SHARDS))


def _merging_bytes(parameters: int, fragments: int) -> float:
    return AGGREGATOR_BASE_BYTES + BYTES_PER_MERGED * parameters / fragments
