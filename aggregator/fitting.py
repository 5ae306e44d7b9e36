"""Whether a model fits the limits of the run: asked before its first island is let in, and at every start. Pure."""

from __future__ import annotations

from aggregator.config import AggregatorConfig
from broker.errors import ConfigError
from broker.fragments import FragmentManifest

#: Of a message's size limit: what a header with thousands of contributions or tensors may take.
HEADER_BYTES = 4 << 20


def misfit(manifest: FragmentManifest, config: AggregatorConfig) -> ConfigError | None:
    """Returns which setting is too small for a fragment of the run, and what would be enough; None if all fit."""
    fragment_bytes = 4 * max(manifest.sizes)
    message_bytes, round_bytes = fragment_bytes + HEADER_BYTES, fragment_bytes * config.islands
    if message_bytes > config.max_message_bytes:
        cure = f"must be at least {message_bytes} for the largest fragment; raise it everywhere, or use more fragments"
        return ConfigError("max_message_bytes", config.max_message_bytes, cure)
    if round_bytes > config.held_bytes:
        cure = f"must be at least {round_bytes}, one round of the largest fragment, or no round could complete"
        return ConfigError("held_bytes", config.held_bytes, cure)
    return None
