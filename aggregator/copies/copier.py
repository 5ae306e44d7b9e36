"""Copies a store to an object store every so often, in a thread of its own. Shell.

Training never waits for it: it takes no lock of the store, asks the aggregator for nothing, runs at low priority, and a
failure costs a copy and nothing else. A thread and no process: what takes time is outside of the interpreter's lock
(the library is native code; hashing, compressing and reading release it), and status hears of troubles without a way of
their own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aggregator.copies.bucket import Bucket
from aggregator.copies.restoring import sets_of
from aggregator.copies.taking import Identity, Taken, hashed, packed, take
from aggregator.copy_rules.planning import CopyClock, below, fits, fitting, folder, misplaced, replaced, surplus
from aggregator.copy_rules.sets import LEADS, CompleteSet, CopiedVersion, lead_key, newest_sets, order_of, write_set
from aggregator.interface.config import AggregatorConfig
from broker.base.errors import Unavailable
from broker.process import clocks, logs

log = logs.get(__name__)

#: The last copy may hold up the end of a process for so long: when the run has ended, and when it is told to stop.
LAST_AFTER_END_S, LAST_AFTER_STOP_S = 60.0, 8.0
#: The priority of training minus this one is that of the copies.
NICE = 10
#: Hashes of files that never change, which are kept.
MOST_HASHES = 10_000
CURE = "training goes on, and what is lost with this disk grows: put that right, or give another --copy-to"


@dataclass(kw_only=True)
class Copies:
    """The copies of one store in one place; :meth:`make` makes one. Every call blocks.

    Attributes:
        place: Where to; each of several shards has a folder in it.
        store: Directory of the store.
        tape: The event tape, if there is one.
        name: Of the store (:attr:`aggregator.store.store.Store.name`).
        run_id: Whose.
        epoch: Under which this aggregator leads.
        shard: Its number, and how many there are.
        wall_s: Seconds since 1970.
        alone: Another shard has no copy yet that fits to the last one of this shard, which is shard 0.
    """

    place: Bucket
    store: Path
    tape: Path | None
    name: str
    run_id: str
    epoch: int
    shard: tuple[int, int] = (0, 1)
    wall_s: Callable[[], float] = clocks.wall

    def __post_init__(self) -> None:
        self.alone = self.shard[1] > 1 and not self.shard[0]
        self._bucket = self.place.below(folder(*self.shard))
        self._hashes: dict[Identity, str] = {}

    def make(self) -> CompleteSet | None:
        """Makes one copy; None as long as there is nothing to be copied.

        Raises:
            Unavailable: It is not complete; the one before stands.
        """
        everything = set(self.place.list())
        there = below(everything, folder(*self.shard))
        # Once more, and after all else: whoever has put something there by now has said so before.
        there |= set(self._bucket.list(LEADS))
        newest = next(iter(newest_sets(there)), None)
        own = self._sets(everything, self.shard[0])
        before = own[0] if own and own[0].key == newest else None
        reason = misplaced(everything, self.shard[1]) or replaced(
            run_id=self.run_id, store=self.name, epoch=self.epoch, newest=before, there=there
        )
        if reason:
            raise Unavailable(f"nothing is copied to {self._bucket.url}: {reason}", definite=True)
        lead = lead_key(self.epoch, self.name)
        if lead not in there:
            self._bucket.put(lead, b"{}")
        try:
            with take(self.store, self.tape) as taken:
                if taken is None:
                    return None
                whole = self._put(taken, self.wall_s(), there, newest)
        except OSError as err:
            what = f"cannot read {err.filename or self.store}: {err.strerror}"
            raise Unavailable(f"{what}; it is tried again", definite=True) from err
        self._bucket.put(whole.key, write_set(whole))
        shards = self.shard[1]
        self.alone = self.alone and not all(
            any(fits(each, whole) for each in self._sets(everything, n)) for n in range(1, shards)
        )
        if before is not None or newest is None:  # else nobody knows what the newest one there needs
            leaders = self._sets(everything, 0) if self.shard[0] else []
            kept = [*([] if before is None else [before]), *fitting(own, leaders)]
            self._bucket.delete(surplus(there, whole, kept))
        return whole

    def _put(self, taken: Taken, time_s: float, there: Collection[str], newest: str | None) -> CompleteSet:
        """Uploads the files that are missing; returns the set of all, whose own object is not there yet."""
        files = tuple(hashed(source, self._hashes) for source in taken.sources)
        while len(self._hashes) > MOST_HASHES:
            del self._hashes[next(iter(self._hashes))]
        epoch, serial = (newest and order_of(newest)) or (0, 0)
        serial = serial + 1 if epoch == self.epoch else 1
        for source, file in zip(taken.sources, files, strict=True):
            for part, key in zip(file.parts, file.keys, strict=True):
                if key in there:
                    continue
                with source.place.open("rb") as opened:  # whoever removes it meanwhile takes nothing away
                    at = Path(f"/proc/self/fd/{opened.fileno()}")
                    self._bucket.put(key, packed(source, part) if part.packed else at)
        record = taken.record
        own = record["epoch"], record.get("serial", 0)
        # Shard 0's own roster, or the one that another took over.
        at_epoch, at_serial = record.get("roster", (0, 0)) if self.shard[0] else own
        return CompleteSet(
            run_id=record["run_id"],
            store=self.name,
            epoch=self.epoch,
            serial=serial,
            time_s=time_s,
            ended=bool(record.get("ended")),
            versions=tuple(
                CopiedVersion(fragment_id=each.fragment_id, version=each.fragment_version, digest=each.digest)
                for each in taken.commits
            ),
            files=files,
            shard=self.shard,
            roster=(at_epoch, at_serial),
        )

    def _sets(self, everything: Iterable[str], shard: int) -> list[CompleteSet]:
        return sets_of(self.place, everything, shard, self.shard[1])


class Copier:
    """The thread that makes copies until it is told to end.

    Args:
        copies: Made by it alone.
        every_s: A copy is to be at most so old.
    """

    def __init__(self, copies: Copies, every_s: float) -> None:
        self._copies = copies
        self._url = copies.place.url  # to be shown
        self._every_s = every_s
        self._clock = CopyClock(every_s, clocks.monotonic())
        self._wake = threading.Event()
        self._last = False  # one more, then no more
        self._last_within_s = 0.0
        self._unfinished = False  # the last one was given up
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: AggregatorConfig, *, name: str, epoch: int) -> Copier | None:
        """Begins to copy, if ``copy_to`` is set. Raises ConfigError and Unavailable as :meth:`Bucket.open`."""
        if not config.copy_to:
            return None
        copies = Copies(
            place=Bucket.open(config.copy_to),
            store=config.store,
            tape=config.tape,
            name=name,
            run_id=config.run_id,
            epoch=epoch,
            shard=(config.shard, config.shards),
        )
        return cls(copies, config.copy_every_s)

    def troubles(self) -> tuple[str, ...]:
        """Returns what status is to say: nothing as long as copies come in time."""
        url, detail = self._url, self._clock.detail
        if self._last and not self._unfinished and self._thread.is_alive():
            why = f" ({detail})" if detail else ""
            return (f"for up to {self._last_within_s:.0f} s: the last copy to {url} is waited for{why}",)
        if self._last and (detail or self._unfinished):
            why = detail or f"it was not through within {self._last_within_s:.0f} s"
            left = "what was merged since the one before, if there is one, is on this disk alone"
            return (f"at the end: the last copy to {url} failed ({why}); {left}",)
        late_s = self._clock.late_s(clocks.monotonic())
        if not late_s:
            return ()
        what = f"no newer copy to {url} was made" if self._clock.made else f"no copy to {url} was made yet"
        return (f"for {late_s:.0f} s: {what} ({detail or 'one is under way'}); {CURE}",)

    def begin_last(self, within_s: float) -> None:
        """Begins one last copy, which :meth:`finish` waits for."""
        self._last, self._last_within_s = True, within_s
        self._wake.set()

    def finish(self) -> bool:
        """Waits for the last copy; returns whether it was through in time. Nothing is waited for after that."""
        self._thread.join(self._last_within_s)
        if self._thread.is_alive():
            cure = "the copy before stands, if there is one"
            log.warning("copy.unfinished", to=self._url, after_s=self._last_within_s, cure=cure)
            self._unfinished = True
            self.abandon()
            return False
        return not self._clock.detail

    def abandon(self) -> None:
        """Ends without a last copy. What is under way may go on for a while; it makes nothing worse."""
        self._abandoned = True
        self._wake.set()

    def _run(self) -> None:
        with suppress(OSError):  # of this thread alone, on Linux, and of those that the library starts from it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not self._abandoned:
            last = self._last
            self._attempt()
            if last:
                return
            if not self._last:
                self._wake.wait(self._clock.wait_s(clocks.monotonic()))

    def _attempt(self) -> None:
        began_s = clocks.monotonic()
        try:
            whole = self._copies.make()
        except Unavailable as err:
            if self._clock.failed(str(err), clocks.monotonic()):
                log.warning("copy.failed", to=self._url, detail=str(err), cure=CURE)
            return
        now_s = clocks.monotonic()
        if whole is None:
            self._clock.nothing(now_s)
            return
        if self._clock.detail:
            log.info("copy.back", to=self._url)
        self._clock.done(began_s, now_s)
        if self._copies.alone:
            self._clock.again(now_s)
        versions = [each.version for each in whole.versions]
        facts = {"epoch": whole.epoch, "serial": whole.serial, "oldest": min(versions), "newest": max(versions)}
        log.info("copy.complete", to=self._url, **facts, size=whole.size, took_s=round(now_s - began_s, 3))
