"""How many aggregators share a model where nobody says so: ``--shards auto``. Pure."""

from __future__ import annotations

import math

from broker.process.settings import whole_number
from broker.routing.directory import MAX_SHARDS
from broker.wire.errors import ConfigError
from ops.planning.footprint import AGGREGATOR_BASE_BYTES

#: The word for a number that follows from model and machine.
AUTO = "auto"
#: What one aggregator merges of eight islands in 24 s on one core (:mod:`ops.planning.fleet`): in H steps of a second.
PARAMETERS_EACH = 10**9
#: Parameters, momentum and what versions leave over, in float32: they lie in files, for which the machine should have
#: room in memory, or each round reads its disk. And as much of the fragment that an aggregator merges, with the version
#: that it makes of it.
BYTES_PER_PARAMETER, BYTES_PER_MERGED = 12, 16


def is_auto(shards: object) -> bool:
    """Returns whether a number of aggregators, as a flag or a file gives it, is left to us.

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
    """Returns the number of aggregators, each on a host of its own: one for each 10^9 parameters.

    More where the part of one would take more than half of its host's memory; never more than fragments.

    Args:
        parameters: Of the model, as far as they are synchronised.
        fragments: Into which it is cut.
        host_bytes: Memory of one host; None: not known.
    """
    wanted = math.ceil(parameters / PARAMETERS_EACH)
    if host_bytes is not None:
        merged = AGGREGATOR_BASE_BYTES + BYTES_PER_MERGED * parameters / fragments
        room = host_bytes / 2 - merged
        wanted = max(wanted, math.ceil(BYTES_PER_PARAMETER * parameters / room)) if room > 0 else MAX_SHARDS
    return max(1, min(wanted, fragments, MAX_SHARDS))


def shards_here(parameters: int, *, fragments: int, memory_bytes: int, cores: int) -> int:
    """Returns the number of aggregators that all run on one machine, beside broker and islands.

    One for each 10^9 parameters, but for each two cores at the most one, and as many as half of the memory holds: they
    share the model, and each has besides what it takes to make a version of a fragment.

    Args:
        parameters: Of the model, as far as they are synchronised.
        fragments: Into which it is cut.
        memory_bytes: Of the machine; 0: not known.
        cores: Processors that the run may use.
    """
    most = max(1, cores // 2)
    if memory_bytes:
        merged = AGGREGATOR_BASE_BYTES + BYTES_PER_MERGED * parameters / fragments
        most = min(most, math.floor((memory_bytes / 2 - BYTES_PER_PARAMETER * parameters) / merged))
    return max(1, min(shards_for(parameters, fragments=fragments), most))
