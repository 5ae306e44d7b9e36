"""Rules of copies: when to make one, what to delete, which fit together, how to restore. Pure.

Order of a copy: objects that are missing, commit files first; the file that makes a set of them; then what neither it
nor the set before needs any more. So at every moment, whatever fails, the newest set names only what is there.

Of a run of several shards each copies by itself, into a folder of its own and at moments of its own::

    PLACE/shard-0-of-2/complete/...      of shard 0, with folders as those of a run of one shard (:mod:`.sets`)
    PLACE/shard-1-of-2/complete/...      of shard 1

Of parameters and books that does no harm: a fragment belongs to one shard. But shard 0 decides for all who is in and
who has which data (:mod:`aggregator.rounds.roster`), and must not forget what another shard goes by: it would give the
number of a life, or batches, a second time. So a copy of another shard *fits* to one of shard 0 if the roster in it is
not newer. To each copy of shard 0 a shard keeps one that fits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence

from aggregator.copy_rules.sets import COMPLETE, OBJECTS, CompleteSet, epoch_of, lead_of, newest_sets, order_of

#: A restored run begins so many epochs above the lost one, which may have gone on after its last copy.
EPOCH_JUMP = 1000
#: Versions that are left out at the least, and for each second since the copy, where nothing says how fast they came.
LEAST_GAP, USUAL_PER_S = 1000, 1.0
#: How much faster than between the last two copies versions may have come since.
GAP_FACTOR = 4.0
#: Copies that may fail or be late before status says so.
LATE_AFTER = 3.0
#: The least pause after a failure, in seconds; it doubles, up to the interval.
FIRST_PAUSE_S = 2.0
_FOLDER = re.compile(r"shard-(\d+)-of-(\d+)/")


def surplus(there: Iterable[str], newest: CompleteSet, kept: Iterable[CompleteSet]) -> list[str]:
    """Returns what goes once ``newest`` is there: sets before their objects, so that none ever lacks one.

    Args:
        there: Every object that was there before it.
        newest: The set that was made.
        kept: Those that are to stay as well.
    """
    named = {key for each in (newest, *kept) for key in (each.key, *each.object_names())}
    gone = sorted(key for key in there if key not in named)
    sets = [key for key in gone if order_of(key) is not None]
    leads = [key for key in gone if (lead := lead_of(key)) is not None and lead[0] < newest.epoch]
    return [*sets, *leads, *(key for key in gone if key.startswith(OBJECTS))]


def replaced(*, run_id: str, store: str, epoch: int, newest: CompleteSet | None, there: Iterable[str]) -> str:
    """Says why this aggregator must not copy there, and what to do about it; nothing if it may.

    Args:
        run_id: Of this aggregator.
        store: Name of its store.
        epoch: Under which it leads.
        newest: Set that is there.
        there: Objects, with everybody who copies there.
    """
    if newest is not None and newest.run_id != run_id:
        return f"it holds copies of the run {newest.run_id!r}: give this run another --copy-to"
    leads = {lead for key in there if (lead := lead_of(key)) is not None}
    if newest is not None:
        leads.add((newest.epoch, newest.store))
    for their_epoch, name in sorted(leads, reverse=True):
        if their_epoch > epoch or (their_epoch == epoch and name != store):
            cure = "end one of the two aggregators, or give this one another --copy-to"
            return f"the store {name} is copied there under epoch {their_epoch}, this one leads under {epoch}: {cure}"
    return ""


def restored_epoch(there: Iterable[str]) -> int:
    """Returns the epoch that a restore claims: above the lost one and above every other restore."""
    return max(map(epoch_of, there), default=0) + EPOCH_JUMP


def gap(sets: Sequence[CompleteSet], now_s: float) -> int:
    """Returns how many version numbers a restored run leaves out: more than were made since the copy.

    Islands may hold versions that were made after it. Made again under their numbers, versions would have two contents.

    Args:
        sets: That which is restored, and those before it, newest first.
        now_s: Seconds since 1970; clocks of two machines may differ by minutes, which the least gap covers.
    """
    newest = sets[0]
    per_s = USUAL_PER_S
    for older in sets[1:]:
        took_s = newest.time_s - older.time_s
        if took_s >= 1.0:
            had = {each.fragment_id: each.version for each in older.versions}
            made = max((each.version - had.get(each.fragment_id, 0) for each in newest.versions), default=0)
            per_s = max(made, 1) / took_s
    return LEAST_GAP + math.ceil(GAP_FACTOR * per_s * max(0.0, now_s - newest.time_s))


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
    """Returns why a run with this number of shards must not be copied there, with a cure; empty if it may."""
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


class CopyClock:
    """Says when the next copy begins, and whether there was none for too long.

    Args:
        every_s: A complete copy is to be at most so old.
        now_s: Monotonic seconds.
    """

    def __init__(self, every_s: float, now_s: float) -> None:
        self._every_s = every_s
        self._since_s = now_s  # the state of the last complete copy, or the beginning
        self._next_s = now_s
        self._failures = self._again = 0
        self.made = False  #: whether there was a complete copy since the beginning
        self.detail = ""  #: why the last attempt failed; empty: it did not

    def done(self, began_s: float, now_s: float) -> None:
        """A copy is complete; the next begins earlier by its duration, so that none gets older than it may."""
        self._since_s, self._failures, self.detail, self.made = began_s, 0, "", True
        self._next_s = began_s + max(self._every_s / 2, self._every_s - (now_s - began_s))

    def again(self, now_s: float) -> None:
        """The copy is complete, and of no use without one that comes soon; pauses double, up to the interval."""
        self._next_s = min(self._next_s, now_s + FIRST_PAUSE_S * 2.0 ** min(self._again, 20))
        self._again += 1

    def nothing(self, now_s: float) -> None:
        """There is nothing to copy yet."""
        self._since_s, self._failures, self.detail = now_s, 0, ""
        self._next_s = now_s + min(self._every_s, FIRST_PAUSE_S)

    def failed(self, detail: str, now_s: float) -> bool:
        """An attempt has failed; returns whether that is news."""
        news = not self.detail
        self._failures += 1
        self.detail = detail
        self._next_s = now_s + min(self._every_s, FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 20))
        return news

    def wait_s(self, now_s: float) -> float:
        """Returns for how long to wait before the next attempt."""
        return max(0.0, self._next_s - now_s)

    def late_s(self, now_s: float) -> float:
        """Returns for how long there was no complete copy, if that is too long; else 0."""
        age_s = now_s - self._since_s
        return age_s if age_s > LATE_AFTER * self._every_s else 0.0
