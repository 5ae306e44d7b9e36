"""Slow work of an island beside training: encoding, decoding, placement, checkpoints.

Shell around :mod:`islands.arrays.reference` and :mod:`islands.arrays.placement`. Every job runs in a worker thread and
is awaited by the communication thread, so that heartbeats go on whatever the size of the model. Jobs on one fragment
run one after the other, in the order in which they were asked for: that is what keeps its reference right.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from broker.base.errors import LocalProtocolError, RemoteProtocolError, Unavailable
from broker.process import logs
from broker.wire.fragments import FragmentManifest, Region, TensorSpec
from broker.wire.frames import verify
from broker.wire.messages import Codec, Encoded, Envelope, Place, StatePart
from islands.arrays import placement
from islands.arrays.in_place import InPlacePlacement, is_in_place
from islands.arrays.parameters import Parameters
from islands.arrays.persistence import LONGEST_FIRST_STEP, LONGEST_STEP, Verdict, has_moved, jumped, verdict
from islands.arrays.placement import Leaf, Placement, placement_of
from islands.arrays.reference import HeldVersions, Reference, encode_seed, is_narrow, misnamed
from islands.protocol.paused import Paused
from islands.session import checkpoint, paused_file, state_parts
from islands.session.checkpoint import Checkpoint
from islands.session.exchange import Frozen, Install, Moment, Returned
from islands.session.machine import THIS, Machine
from islands.session.training_state import Needed, Position, Snapshot
from islands.session.workers import Workers

if TYPE_CHECKING:
    from islands.arrays.host_shards import HostPlacement  # which loads JAX

T = TypeVar("T")
#: What is here of a fragment's leaves: arrays, tensors that change in place, or regions of arrays.
AnyPlacement: TypeAlias = "Placement | InPlacePlacement | HostPlacement"
log = logs.get(__name__)

#: Threads for tensors. Most of the time they wait for the device, where a step may take seconds.
WORKERS = 8
#: A disk that hangs must not keep an island from leaving.
KEEP_WITHIN_S = 3.0
_INITIAL, _VERDICTS = -1, -2  # whose turn it is to make the initial parameters, to judge adoptions


class ArrayWork:
    """The tensors of one island, as the communication thread sees them.

    Args:
        params: The initial parameters: their structure and, unless ``init`` is given, version 0 if this island is
            asked for it. They must stay valid until :meth:`forget_initial`.
        init: seed -> initial parameters; called at most once.
        several: The island has several hosts, and this one has regions of each leaf.
        base: Names of leaves that are on every island's disk.
        machine: That it runs on.
    """

    def __init__(
        self,
        params: Any,
        init: Callable[[int], Any] | None,
        *,
        several: bool = False,
        base: Sequence[str] = (),
        machine: Machine = THIS,
    ) -> None:
        self._machine = machine
        self.parameters = Parameters(params, base)
        self._several = several
        self._handed: Mapping[str, frozenset[Region]] = {}
        #: By fragment; replaced as a whole, and so safe to read anywhere.
        self.placements: tuple[AnyPlacement, ...] = ()
        self._initial: Any | None = params
        self._init = init
        self._manifest: FragmentManifest | None = None
        self._held: HeldVersions | None = None
        self._references: tuple[Reference, ...] = ()
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._workers = Workers(WORKERS, "atoll-tensors")
        # Apart from the others, which may all be waiting for a device: what looks at messages waits for nothing, not
        # for the disk either, where a checkpoint may hang for as long as it likes.
        self._clerk = Workers(1, "atoll-messages")
        self._archivist = Workers(1, "atoll-files")
        self._newest = checkpoint.Newest()
        self._written_over = False  # and that was said

    # --- setting up -------------------------------------------------------------------------------------------

    def open(
        self,
        manifest: FragmentManifest,
        handed: Mapping[str, frozenset[Region]] | None = None,
        codec: Codec = Codec.F32,
    ) -> None:
        """Takes note of the fragments, when the run has told them.

        Args:
            manifest: Of the run.
            handed: Of several hosts: the regions of each tensor that this one hands over.
            codec: Of versions: all but float32 come as differences.
        """
        self._manifest, self._handed = manifest, handed or {}
        self._held = HeldVersions(manifest, differences=codec is not Codec.F32)
        self.parameters.assign(manifest)
        self.place_from(self._initial)
        here = zip(self.placements, manifest.fragments, strict=True)
        self._references = tuple(Reference(placement.parts.tensors(tensors)) for placement, tensors in here)

    def place_from(self, params: Any) -> None:
        """Notes where the parameters are kept from now on: a loop may start from numpy and go on with JAX.

        Raises:
            ConfigError: If the structure, shapes or dtypes are not those of the join; of several hosts, the shardings.
        """
        self.parameters.check(params)
        assert self._manifest is not None
        self.placements = tuple(
            self._placement(p, self.parameters.of_fragment(params, p), tensors)
            for p, tensors in enumerate(self._manifest.fragments)
        )

    def _placement(self, p: int, leaves: list[Leaf], tensors: Sequence[TensorSpec]) -> AnyPlacement:
        if not self._several:
            return placement_of(leaves)
        handed = [self._handed[tensor.name] for tensor in tensors]
        if all(map(is_in_place, leaves)):
            return InPlacePlacement(leaves, handed)
        from islands.arrays.host_shards import HostPlacement

        if self.placements:
            joined = self.placements[p]
            assert isinstance(joined, HostPlacement), "several hosts join with arrays of JAX alone, or with tensors"
            joined.check(leaves)
        return HostPlacement(leaves, handed, [tensor.name for tensor in tensors])

    def regions(self, p: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of what is here of a fragment: whole tensors, or regions."""
        assert self._manifest is not None
        return tuple(tensor.shape for tensor in self.placements[p].parts.tensors(self._manifest.fragments[p]))

    async def warm_up(self, keep: float) -> None:
        """Compiles what the training thread will call at its boundaries."""
        params = self._initial
        for p, here in enumerate(self.placements):
            leaves = self.parameters.of_fragment(params, p)
            await self._workers.do(here.warm_up, leaves, keep)
            await self._workers.do(self.parameters.warm_up, params, p, leaves)

    def forget_initial(self) -> None:
        """Lets go of the initial parameters, which the training thread is about to donate."""
        self._initial = None

    def close(self) -> None:
        """Ends the threads; what they are doing is finished, what waits for them is dropped."""
        for workers in (self._workers, self._clerk, self._archivist):
            workers.close()

    # --- jobs -------------------------------------------------------------------------------------------------

    async def seed(self, fragment_id: int, seed: int) -> tuple[tuple[Encoded, ...], tuple[Place, ...]]:
        """Returns a fragment of version 0, from the initial parameters, with the places of its parts.

        Raises:
            LocalProtocolError: If the initial parameters are gone: the run had begun.
        """

        def encode() -> tuple[tuple[Encoded, ...], tuple[Place, ...]]:
            if self._init is not None:
                self._initial, self._init = self._init(seed), None
                self.parameters.check(self._initial)
            params = self._initial
            if params is None or self._manifest is None:
                raise LocalProtocolError("the run asks for version 0 after it began: start a new one")
            here, tensors = self.placements[fragment_id], self._manifest.fragments[fragment_id]
            values = here.values(self.parameters.of_fragment(params, fragment_id))
            return here.parts.handed(encode_seed(here.parts.tensors(tensors), values))

        return await self._in_turn(_INITIAL, encode)

    async def take(self, envelope: Envelope) -> tuple[Envelope, str]:
        """Returns a version whole, in order of arrival, and its flaw; empty if it has none."""
        if self._held is None:
            return envelope, "it came before the run had said which fragments there are"
        return await self._clerk.do(self._held.take, envelope)

    async def inspect_part(self, envelope: Envelope) -> str:
        """Returns the flaw of a part of a donor's state; empty if it arrived whole and as long as it says."""
        assert isinstance(envelope.message, StatePart)
        flaw = state_parts.flaw_in(envelope.message)
        try:
            await self._clerk.do(verify, envelope)
        except RemoteProtocolError as err:
            return str(err)
        return flaw

    async def prepare(
        self,
        p: int,
        fragment_version: int,
        payload: Sequence[Encoded],
        keep: float,
        *,
        mixes: bool = False,
        is_cut: bool = False,
        digest: str = "",
    ) -> Install:
        """Returns a version of fragment ``p``, placed so that installing it is one addition.

        ``payload`` are its tensors; or, where it ``is_cut``, what is here of them. Where the reference is corrupt it
        overwrites. What overwrites is compared with its ``digest``, if that is given.
        """
        reference, manifest = self._references[p], self._manifest
        assert manifest is not None

        def prepare() -> Install:
            here = self.placements[p]
            local = payload if is_cut else here.parts.cut(payload)
            shift = reference.shift(local, keep, here.dtypes, mixes=mixes)
            flaw = self._told(reference.flaw if keep else misnamed(digest, payload) if digest else "")
            share, mixed = (0.0, False) if flaw else (keep, mixes)
            if share != keep:
                shift = reference.shift(local, share, here.dtypes)
            return Install(
                fragment_id=p,
                fragment_version=fragment_version,
                keep=share,
                mixes=mixed,
                flaw=flaw,
                rounds=share != 0 and not mixed and any(map(is_narrow, here.dtypes)),
                placed=tuple(here.place(shift, share)),
                shift=shift,
                dtypes=here.dtypes,
                places=here.places(shift) if p in manifest.moving else {},
            )

        return await self._in_turn(p, prepare)

    async def settle(self, install: Install, beside: tuple[Leaf, ...]) -> str:
        """Moves the reference to where an installation has put the parameters; returns what is found corrupt.

        Args:
            install: What was installed.
            beside: As in :attr:`islands.session.exchange.Moment.installed`.
        """
        reference = self._references[install.fragment_id]

        def settle() -> str:
            leaves = [placement.to_host(leaf) for leaf in beside]
            reference.installed(install.shift, install.keep, install.dtypes, leaves, mixes=install.mixes)
            if leaves and not install.keep:
                reference.compare(install.shift, install.dtypes, leaves)
            return self._told(reference.flaw)

        return await self._in_turn(install.fragment_id, settle)

    async def judge(self, returned: Returned) -> Verdict:
        """Says whether an adoption was in the parameters of the caller's next steps; those asked first, first.

        Warns, once, where what :meth:`islands.Island.restore` returned was written over.
        """
        longest = LONGEST_FIRST_STEP if returned.first else LONGEST_STEP

        def judge() -> Verdict:
            samples = returned.before, returned.installed, returned.following, returned.later
            before, installed, following, later = ([placement.to_host(x) for x in each] for each in samples)
            around = zip(returned.names, installed, following, later, strict=True)
            over = [name for name, *values in around if returned.first and jumped(*values)]
            if over and not self._written_over:
                self._written_over = True
                detail = "from restore to the end of the first step it moved many times as far as by the next one: "
                detail += "was a checkpoint loaded over the run's values? Load it before the join; what this island "
                detail += "had comes back by restore, from state_dir"
                log.warning("island.written_over", tensor=over[0], detail=detail)
            return verdict(before, installed, following, later, longest)

        return await self._in_turn(_VERDICTS, judge)

    async def moved(self, frozen: Sequence[Frozen]) -> str:
        """Returns the name of a frozen parameter that training has moved; empty if there is none."""

        def find() -> str:
            return next((each.name for each in frozen if has_moved(each.began, placement.to_host(each.now))), "")

        return await self._workers.do(find)

    async def capture(
        self, fragment_id: int, copies: tuple[Leaf, ...], codec: Codec
    ) -> tuple[tuple[Encoded, ...], tuple[Place, ...], str]:
        """Returns the encoded pseudo-gradient of copies, with the places of its parts; advances the reference.

        Instead, where the reference is corrupt, nothing, and what is.
        """
        reference, here = self._references[fragment_id], self.placements[fragment_id]

        def capture() -> tuple[tuple[Encoded, ...], tuple[Place, ...], str]:
            payload = reference.capture([placement.to_host(leaf) for leaf in copies], codec)
            flaw = self._told(reference.flaw)
            return ((), (), flaw) if flaw else (*here.parts.handed(payload), "")

        return await self._in_turn(fragment_id, capture)

    def _told(self, flaw: str) -> str:
        """Returns what is corrupt, for the core to mend.

        Raises:
            Unavailable: Of an island of several hosts: one of them cannot mend its part alone.
        """
        if flaw and self._several:
            cure = "the island ends, and takes the run's parameters when its hosts are started again"
            raise Unavailable(f"island.corrupted: {flaw}; {cure}", definite=True)
        return flaw

    async def save(self, path: Path, moment: Moment, incarnation: int) -> int:
        """Writes a checkpoint; returns its bytes, 0 if :meth:`save_now` has written a newer one meanwhile.

        Raises:
            Unavailable: The file cannot be written.
        """
        snapshot = moment.snapshot
        assert snapshot is not None
        names = self.parameters.local
        return await self._archivist.do(checkpoint.save, path, snapshot, names, moment.at, incarnation, self._newest)

    def save_now(self, path: Path, snapshot: Snapshot, at: Position, incarnation: int, *, within_s: float) -> None:
        """Saves a checkpoint from the training thread, which waits for it, perhaps beside another save.

        Raises:
            Unavailable: The file cannot be written, or not in time.
        """
        names = self.parameters.local
        self._last(path, within_s, lambda: checkpoint.save(path, snapshot, names, at, incarnation, self._newest))

    def keep(self, path: Path, paused: Paused, *, within_s: float = KEEP_WITHIN_S) -> None:
        """Writes unmerged progress for the next process, as the last thing in this one; says so, or why not."""
        facts = {"step": paused.at.step, "contributions": len(paused.contributions)}
        try:
            self._last(path, within_s, lambda: paused_file.save(path, paused))
        except Unavailable as err:
            log.warning("progress.lost", detail=str(err), **facts)
        else:
            log.info("progress.kept", **facts)

    async def cut_state(self, moment: Moment, incarnation: int) -> tuple[tuple[tuple[Encoded, ...], ...], int]:
        """Returns a copy of the optimizer's state in parts, for another island, and its bytes."""
        snapshot, names = moment.snapshot, self.parameters.local
        assert snapshot is not None

        def cut() -> tuple[tuple[tuple[Encoded, ...], ...], int]:
            return state_parts.cut(checkpoint.packed(snapshot, names, moment.at, incarnation))

        return await self._workers.do(cut)

    async def read_state(
        self, parts: tuple[tuple[Encoded, ...], ...], state_bytes: int, needed: Needed
    ) -> tuple[Checkpoint | None, str]:
        """Returns a donor's state if it serves, or says why not."""
        return await self._workers.do(state_parts.read, parts, state_bytes, needed)

    # --- threads ----------------------------------------------------------------------------------------------

    async def _in_turn(self, key: int, job: Callable[[], T]) -> T:
        async with self._turns[key]:
            return await self._workers.do(job)

    def _last(self, path: Path, within_s: float, write: Callable[[], object]) -> None:
        """Writes a file that the process's end does not wait for: a disk may hang for ever.

        Raises:
            Unavailable: It cannot be written, or not in time.
        """
        try:
            self._machine.within(within_s, write)
        except TimeoutError as err:
            raise Unavailable(f"{path} was not written within {within_s:g} s", definite=False) from err
