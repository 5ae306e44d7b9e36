"""Rejects messages of an aggregator that cannot be true. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from broker.wire.fragments import FragmentManifest, Kind, TensorSpec, joined
from broker.wire.messages import FleetState, Message, Welcome
from islands.protocol.fragment import Point


def misfit(message: Message, tensors: Sequence[TensorSpec], manifest: FragmentManifest | None, at: Point) -> str:
    """Says what in an aggregator's message is impossible for this island; empty if nothing is.

    The wire takes every number: what no aggregator of this run can mean must not end an island.

    Args:
        message: As it came.
        tensors: Those of this island.
        manifest: Of the run; None before the first welcome.
        at: Where this island's training stands.
    """
    match message:
        case Welcome(settings=settings):
            if not settings.heartbeat_interval_s > 0:
                return f"settings.heartbeat_interval_s is {settings.heartbeat_interval_s}, must be above 0"
            # Of whatever dtype: each island has its own.
            theirs = sorted((t.name, t.shape) for t in joined(t for fragment in message.fragments for t in fragment))
            ours = sorted((t.name, t.shape) for t in tensors if t.kind is not Kind.LOCAL)
            if manifest is None and theirs != ours:
                return "fragments has other tensors than this island asked to join with"
            start = Point(message.start_step, message.start_tokens)
            if manifest is not None and start.step <= at.step and start.tokens > at.tokens:
                return f"start_tokens is {start.tokens} at step {start.step}, of {at.tokens} at step {at.step}"
        case FleetState() if manifest is not None:
            if message.shard >= message.shards:
                return f"shard is {message.shard}, must be below shards, {message.shards}"
            named = *(r.fragment_id for r in message.rounds), *(r.fragment_id for r in message.resolutions)
            unknown = max((*message.seed, *named), default=0)
            if unknown >= len(manifest):
                return f"fragment {unknown} is named, of {len(manifest)}"
        case _:
            pass
    return ""
