"""Checks that a model fits the limits of the run, before its first island is let in. Pure.

A limit that is not given follows from the model, or from the machine's memory. ``atoll plan`` asks the same, so that
what it recommends is let in.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgpack

from aggregator.interface.config import AggregatorConfig
from aggregator.state.records import manifest_to_rows
from broker.base.errors import ConfigError
from broker.wire.fragments import FragmentManifest, TensorSpec, cut, merged_by, partition, shard_of
from broker.wire.headers import Limits, room_bytes
from broker.wire.messages import Recipe
from broker.wire.schema import MAX_RECORD_BYTES, MAX_TEXT

#: Of a message's size limit: what a header with thousands of contributions or tensors may take.
HEADER_BYTES = 4 << 20
#: A tensor is cut into sections of which one message of so many bytes holds each, unless the largest is given: small
#: enough for even fragments. It does not follow from a machine, for the sections are the run's.
SECTION_BYTES = 1 << 30
#: Contributions that may wait: so many bytes at least, and at the most one part in so many of the memory.
LEAST_HELD_BYTES, HELD_SHARE = 1 << 30, 2


def least_message_bytes(elements: int) -> int:
    """Returns the least ``max_message_bytes`` for a fragment of ``elements``: in float32, as seeds are."""
    return 4 * elements + HEADER_BYTES


def most_elements(message_bytes: int) -> int:
    """Returns the most elements of a fragment that fits into ``max_message_bytes``."""
    return max(0, (message_bytes - HEADER_BYTES) // 4)


def fragments_of(tensors: tuple[TensorSpec, ...], recipe: Recipe, config: AggregatorConfig) -> FragmentManifest:
    """Returns the fragments of a run that begins with these tensors, cut to fit into one message.

    Raises:
        ValueError: See :func:`broker.wire.fragments.cut` and :func:`broker.wire.fragments.partition`; or a section
            would have too long a name.
    """
    section_bytes = config.max_message_bytes or SECTION_BYTES
    manifest = _packed(merged_by(tensors, recipe.kernel), recipe.fragments, section_bytes)
    for name, section in manifest.sections.items():
        if len(name) > MAX_TEXT:
            cure = "is cut, and no room is left in the names of its sections: rename it"
            raise ValueError(f"tensor {section.tensor!r} {cure}")
    return manifest


def _packed(tensors: Iterable[TensorSpec], fragments: int, message_bytes: int) -> FragmentManifest:
    most = most_elements(message_bytes)
    return partition(cut(tensors, most), fragments, most)


def least_held_bytes(elements: int, islands: int) -> int:
    """Returns the least ``held_bytes`` for a fragment of ``elements``: one round of it, in float32."""
    return 4 * elements * islands


def most_message_bytes(config: AggregatorConfig) -> int | None:
    """Returns the largest message accepted; None if neither limit nor machine memory is known."""
    return config.max_message_bytes or (room_bytes(config.memory_bytes) if config.memory_bytes else None)


def most_held_bytes(config: AggregatorConfig, manifest: FragmentManifest | None) -> int:
    """Returns the bytes of contributions that may wait here.

    If that is not given: one contribution of each expected island to each fragment of this shard, in float32, but no
    more than half of the memory; and one round of the largest fragment in any case, or no round could complete.
    """
    if config.held_bytes or manifest is None:
        return config.held_bytes or LEAST_HELD_BYTES
    own = [size for p, size in enumerate(manifest.sizes) if shard_of(p, config.shards) == config.shard]
    every = least_held_bytes(sum(own), config.islands)
    if config.memory_bytes:
        every = min(every, config.memory_bytes // HELD_SHARE)
    return max(LEAST_HELD_BYTES, every, least_held_bytes(max(own, default=0), config.islands))


def misfit(manifest: FragmentManifest, config: AggregatorConfig, *, begun: bool = False) -> ConfigError | None:
    """Returns an error for the setting that does not fit the run's fragments, with a cure; None if all do.

    Args:
        manifest: The run's fragments.
        config: The aggregator's settings.
        begun: The fragments are settled: no others can be had.
    """
    largest = max(manifest.sizes)
    message_bytes, round_bytes = least_message_bytes(largest), least_held_bytes(largest, config.islands)
    limit = most_message_bytes(config)
    if limit is not None and message_bytes > limit:
        if not begun:
            message_bytes = _enough(manifest, config.fragments, message_bytes)
            round_bytes = least_held_bytes(most_elements(message_bytes), config.islands)
        cure = f"must be at least {message_bytes} for the largest fragment: raise it at every broker (with "
        cure += "peer_queue_bytes and total_queue_bytes), aggregator and island"
        if round_bytes > config.held_bytes > 0:
            cure += f", and held_bytes at the aggregator to {round_bytes}"
        if not begun:
            cure += _or_smaller(manifest, config, limit)
        return ConfigError("max_message_bytes", limit, cure)
    if round_bytes > config.held_bytes > 0:
        cure = f"must be at least {round_bytes}, one round of the largest fragment, or no round could complete"
        return ConfigError("held_bytes", config.held_bytes, cure)
    most = max(map(len, manifest.fragments))
    if most > Limits().max_buffers:
        cure = f"one of them would have {most} tensors, and a message holds {Limits().max_buffers} at most: take more "
        return ConfigError("fragments", config.fragments, f"{cure}fragments, or stack tensors of equal shape in one")
    listed = len(msgpack.packb(manifest_to_rows(manifest))) if config.failover and not begun else 0
    if listed > MAX_RECORD_BYTES // 2:  # the other half is for the islands
        cure = f"the names and shapes of the tensors take {listed} bytes, and {MAX_RECORD_BYTES // 2} at most go to a "
        return ConfigError("failover", True, f"{cure}standby: stack tensors of equal shape in one, or do without")
    return None


def _enough(manifest: FragmentManifest, fragments: int, message_bytes: int) -> int:
    """Returns a limit, at least ``message_bytes``, that lets the run's tensors in: each cuts them anew."""
    tensors = manifest.whole.values()
    while (least := least_message_bytes(max(_packed(tensors, fragments, message_bytes).sizes))) > message_bytes:
        message_bytes = least
    return message_bytes


def _or_smaller(manifest: FragmentManifest, config: AggregatorConfig, limit: int) -> str:
    """Returns a cure for a too large message: more fragments, where these help, or smaller tensors."""

    def fits(parts: FragmentManifest) -> bool:
        return least_message_bytes(max(parts.sizes)) <= limit

    tensors = tuple(manifest.tensors().values())
    most = most_elements(limit)
    few, many = config.fragments, config.sync_interval  # at most one fragment falls due per inner step
    if fits(partition(tensors, many, most)):
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (few, middle) if fits(partition(tensors, middle, most)) else (middle, many)
        return f"; or cut the model into {many} fragments or more (--fragments)"
    largest = max(tensors, key=lambda tensor: tensor.size)
    if least_message_bytes(largest.size) > limit:
        axis = "has no axis to be cut along" if not largest.shape else "is cut along its first axis alone"
        return f"; more fragments do not help, for {largest.name} {axis}: make several of it in the model"
    return f"; or raise sync_interval = {many} as well, and take more fragments than that"
