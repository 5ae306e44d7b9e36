"""Bytes on the wire and in memory, from the shapes of a model and the settings of a run. Pure.

The wire. A round moves one fragment: up from each island as a contribution in ``codec``, down to each island as a
version in ``version_codec``. Besides the tensors (:func:`broker.wire.lengths.encoded_bytes`, exact) there are headers:
270 bytes a message, 75 a tensor, and in a version 200 for each island in it, as measured by
``benchmarks/wire_bytes.py``. Heartbeats and announcements are not in it: a few kB/s for each island.

Memory. *Bound* is what the design promises (section 10, invariant 9), with pools of one message for each island and ten
in sockets; *expected* is what was measured (``benchmarks/README.md``), or for the island follows from what it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from broker.wire.fragments import FragmentManifest, Kind, TensorSpec, partition
from broker.wire.lengths import encoded_bytes
from broker.wire.messages import Codec

MESSAGE_HEADER_BYTES = 270
TENSOR_HEADER_BYTES = 75
CONTRIBUTOR_BYTES = 200

_MIB = 1 << 20
#: What the processes hold without a model: Python and libraries, in the aggregator and the island mostly JAX.
AGGREGATOR_BASE_BYTES, BROKER_BASE_BYTES = 236 * _MIB, 54 * _MIB

#: High-water marks of 4 in each direction, and one message that is copied each way.
MESSAGES_IN_SOCKETS = 10

#: Parameters, gradients and both moments of Adam, in float32.
TRAINER_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True, slots=True)
class Payload:
    """What is synchronised: ``fragments[p]`` has the elements of each tensor of fragment p."""

    fragments: tuple[tuple[int, ...], ...]

    @property
    def parameters(self) -> int:
        """Elements of all fragments."""
        return sum(map(sum, self.fragments))

    def __len__(self) -> int:
        return len(self.fragments)

    def of(self, fragments: Sequence[int]) -> Payload:
        """Returns some of the fragments."""
        return Payload(tuple(self.fragments[p] for p in fragments))


def evenly(parameters: int, fragments: int) -> Payload:
    """Returns so many parameters in fragments of equal size, each of a single tensor: for a model known by its size."""
    share, rest = divmod(parameters, fragments)
    return Payload(tuple((share + (p < rest),) for p in range(fragments)))


def of_manifest(manifest: FragmentManifest) -> Payload:
    """Returns the fragments that move in a run with this manifest."""
    kept = (f for f in manifest.fragments if any(t.kind is not Kind.FROZEN for t in f))
    return Payload(tuple(tuple(tensor.size for tensor in fragment) for fragment in kept))


def cut(parameters: int, tensors: tuple[TensorSpec, ...], fragments: int) -> Payload:
    """Returns a model in at most so many fragments: as a run cuts it if its tensors are known, else evenly."""
    return of_manifest(partition(tensors, fragments)) if tensors else evenly(parameters, fragments)


# --- the wire -----------------------------------------------------------------------------------------------------


def contribution_bytes(tensors: Sequence[int], codec: Codec) -> int:
    """Returns the bytes of one fragment's contribution; ``tensors`` are the elements of each."""
    header = MESSAGE_HEADER_BYTES + len(tensors) * TENSOR_HEADER_BYTES
    return header + sum(encoded_bytes(codec, elements) for elements in tensors)


def version_bytes(tensors: Sequence[int], codec: Codec, islands: int) -> int:
    """Returns the bytes of one fragment's version with so many islands in it."""
    return contribution_bytes(tensors, codec) + islands * CONTRIBUTOR_BYTES


@dataclass(frozen=True, slots=True)
class MessageBytes:
    """What one island sends and receives.

    Attributes:
        ups: Bytes of the contribution of each fragment.
        downs: Likewise of its version.
    """

    ups: tuple[int, ...]
    downs: tuple[int, ...]

    @property
    def cycle_up_bytes(self) -> int:
        """In P rounds: every fragment once, up."""
        return sum(self.ups)

    @property
    def cycle_down_bytes(self) -> int:
        """In P rounds: every fragment once, down."""
        return sum(self.downs)

    @property
    def largest_up_bytes(self) -> int:
        """Contribution of the largest fragment."""
        return max(self.ups)

    @property
    def largest_down_bytes(self) -> int:
        """Version of the largest fragment."""
        return max(self.downs)

    @property
    def rounds(self) -> int:
        """P, rounds in a cycle."""
        return len(self.ups)

    @property
    def round_up_bytes(self) -> float:
        """Mean of a round, up."""
        return self.cycle_up_bytes / self.rounds

    @property
    def round_down_bytes(self) -> float:
        """Mean of a round, down."""
        return self.cycle_down_bytes / self.rounds

    def of(self, fragments: Sequence[int]) -> MessageBytes:
        """Returns what some of the fragments are of it."""
        return MessageBytes(tuple(self.ups[p] for p in fragments), tuple(self.downs[p] for p in fragments))


def wire_of(payload: Payload, *, codec: Codec, version_codec: Codec, islands: int) -> MessageBytes:
    """Returns what each of so many islands sends and receives, all of them being in every version."""
    return MessageBytes(
        ups=tuple(contribution_bytes(fragment, codec) for fragment in payload.fragments),
        downs=tuple(version_bytes(fragment, version_codec, islands) for fragment in payload.fragments),
    )


# --- memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of one process, in bytes; ``bound`` is None where nothing bounds it."""

    expected: float
    bound: float | None


def aggregator_memory(
    payload: Payload, wire: MessageBytes, *, islands: int, open_shares: Sequence[float] = ()
) -> Memory:
    """Returns the memory of an aggregator.

    Expected: parameters and momentum (2 models), the pending state of a fragment and its merged vector (3 fragments),
    and the contributions of the rounds that are open. Measured: 2.4 to 2.8 models beside the round, with P = 8.

    Args:
        payload: Of its fragments.
        wire: Likewise.
        islands: M.
        open_shares: For each fragment, the share of the time in which its round is open; one round if not given.
    """
    model = 4.0 * payload.parameters
    making = 3 * 4.0 * max(map(sum, payload.fragments))
    pools = (islands + MESSAGES_IN_SOCKETS) * max(wire.largest_up_bytes, wire.largest_down_bytes)
    rounds = islands * _open(wire.ups, open_shares)
    return Memory(
        expected=AGGREGATOR_BASE_BYTES + 2 * model + making + rounds,
        bound=AGGREGATOR_BASE_BYTES + 2 * model + max(model, making) + max(pools, rounds),
    )


def broker_memory(payload: Payload, wire: MessageBytes, *, islands: int, open_shares: Sequence[float] = ()) -> Memory:
    """Returns the memory of the broker; arguments as for :func:`aggregator_memory`, of all fragments.

    Expected: the newest version of each fragment (1 model) and the contributions that pass. Sixteen islands of 100 M
    parameters in f32 were once measured at 5.5 models, above the bound of 4.3: what waits inside ZeroMQ varies.
    """
    versions = float(wire.cycle_down_bytes)
    passing = islands * _open(wire.ups, open_shares)
    pools = (islands + MESSAGES_IN_SOCKETS) * max(wire.largest_up_bytes, wire.largest_down_bytes)
    return Memory(
        expected=BROKER_BASE_BYTES + versions + passing,
        bound=BROKER_BASE_BYTES + versions + max(pools, passing),
    )


def island_host_memory(payload: Payload, wire: MessageBytes, *, open_shares: Sequence[float] = ()) -> Memory:
    """Returns what taking part costs an island's host, beside its trainer.

    Expected: the reference value (1 model in f32), and for each round that is open a copy of the fragment, its encoded
    contribution, a version and the shift made of it. Bound: every fragment at once.
    """
    model = 4.0 * payload.parameters
    copies = (2 * 4.0 * sum(fragment) for fragment in payload.fragments)
    per_round = [copy + up + down for copy, up, down in zip(copies, wire.ups, wire.downs, strict=True)]
    return Memory(expected=model + _open(per_round, open_shares), bound=model + sum(per_round))


def _open(sizes: Sequence[float], open_shares: Sequence[float]) -> float:
    """Returns what the rounds hold that are open on average, and the largest one at least."""
    at_once = sum(size * share for size, share in zip(sizes, open_shares, strict=True)) if open_shares else 0.0
    return max(at_once, *sizes)


def trainer_memory(parameters: int) -> Memory:
    """Returns what training takes on an island's accelerators together, before activations.

    Expected: parameters, gradients and Adam's moments in float32; 16-bit parameters and gradients save a quarter.
    There is no bound: activations are the trainer's own affair.
    """
    return Memory(expected=float(TRAINER_BYTES_PER_PARAMETER * parameters), bound=None)
