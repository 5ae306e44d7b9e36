"""Copies of a run of several shards: where each shard's lie, and which of them fit together. Pure.

    PLACE/shard-0-of-2/complete/...      of shard 0, with folders as those of a run of one shard (:mod:`.sets`)
    PLACE/shard-1-of-2/complete/...      of shard 1

Each shard copies by itself, at moments of its own. Of parameters and books that does no harm: a fragment belongs to one
shard. But shard 0 decides for all who is in and who has which data (:mod:`aggregator.rounds.roster`), and must not
forget what another shard goes by: it would give the number of a life, or batches, a second time. So a copy of another
shard *fits* to one of shard 0 if the roster in it is not newer. To each copy of shard 0 a shard keeps one that fits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from aggregator.copies.sets import COMPLETE, CompleteSet, newest_sets

_FOLDER = re.compile(r"shard-(\d+)-of-(\d+)/")


def folder(shard: int, shards: int) -> str:
    """Returns the folder of a shard's copies, with a slash at its end; nothing for a run of one shard."""
    return "" if shards == 1 else f"shard-{shard}-of-{shards}/"


def below(keys: Iterable[str], prefix: str) -> set[str]:
    """Returns the names in a folder, relative to it."""
    return {key[len(prefix) :] for key in keys if key.startswith(prefix)}


def shards_there(keys: Collection[str]) -> set[int]:
    """Returns the shard counts of the runs copied there: several only if runs share the place."""
    found = {int(match[2]) for key in keys if (match := _FOLDER.match(key)) and newest_sets([key[match.end() :]])}
    return found | ({1} if any(key.startswith(COMPLETE) for key in keys) else set())


def misplaced(keys: Collection[str], shards: int) -> str:
    """Returns the reason not to copy a run of so many shards there, with a cure; empty if there is none."""
    others = sorted(shards_there(keys) - {shards})
    if not others:
        return ""
    of = "one shard" if others[0] == 1 else f"{others[0]} shards"
    return f"it holds copies of a run of {of}, and this one has {shards}: give this run another --copy-to"


def fits(own: CompleteSet, leader: CompleteSet) -> bool:
    """Returns True if two copies go together: a shard's is of shard 0's run, and not newer."""
    return own.run_id == leader.run_id and own.roster <= leader.roster


def fitting(own: Sequence[CompleteSet], leaders: Iterable[CompleteSet]) -> list[CompleteSet]:
    """Returns the copies that a shard has to keep: for each one of shard 0, the newest that fits.

    Args:
        own: The shard's, newest first.
        leaders: Those of shard 0.
    """
    found = (next((each for each in own if fits(each, leader)), None) for leader in leaders)
    return list(dict.fromkeys(each for each in found if each is not None))
