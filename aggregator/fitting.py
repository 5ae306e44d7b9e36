"""Whether a model fits the limits of the run: asked before its first island is let in, and at every start. Pure.

``atoll plan`` asks the same, so that what it recommends is let in.
"""

from __future__ import annotations

from aggregator.config import AggregatorConfig
from broker.errors import ConfigError
from broker.fragments import FragmentManifest

#: Of a message's size limit: what a header with thousands of contributions or tensors may take.
HEADER_BYTES = 4 << 20


def least_message_bytes(elements: int) -> int:
    """Returns the least ``max_message_bytes`` for a largest fragment of so many elements: in float32, as seeds are."""
    return 4 * elements + HEADER_BYTES


def least_held_bytes(elements: int, islands: int) -> int:
    """Returns the least ``held_bytes`` for a largest fragment of so many elements: a round of it, in float32."""
    return 4 * elements * islands


def misfit(manifest: FragmentManifest, config: AggregatorConfig) -> ConfigError | None:
    """Returns which setting is too small for a fragment of the run, and what would be enough; None if all fit."""
    largest = max(manifest.sizes)
    message_bytes, round_bytes = least_message_bytes(largest), least_held_bytes(largest, config.islands)
    if message_bytes > config.max_message_bytes:
        cure = f"must be at least {message_bytes} for the largest fragment; raise it everywhere, or use more fragments"
        return ConfigError("max_message_bytes", config.max_message_bytes, cure)
    if round_bytes > config.held_bytes:
        cure = f"must be at least {round_bytes}, one round of the largest fragment, or no round could complete"
        return ConfigError("held_bytes", config.held_bytes, cure)
    return None
