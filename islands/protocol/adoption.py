"""Adoption: brings new versions into an island's parameters. Pure.

Aggregators say which versions are published, and a ``Want`` tells the broker what is here: it is repeated while
something is lacking, and where nothing comes at all, the bulk connection is made anew. A version that has arrived is
prepared beside training and installed at a boundary; a newer one that comes meanwhile is the next. Where the local
parameters are spoilt, the global ones take their place (``keep = 0``).
"""

from __future__ import annotations

from broker.routing.resending import Patience
from broker.wire.messages import BROKER, Codec, Pacing, Reason, Recipe, Resolution, Version, Want
from islands.protocol.events import Action, Fail, Note, Prepare, RefreshOptimizer, Send
from islands.protocol.fleet import Fleet
from islands.protocol.fragment import Fragment, Stage
from islands.protocol.state import Training

#: A version that is prepared takes up to three times the memory of its fragment until it is in the parameters. All of
#: them at once would be more than the model itself, so no more are prepared together than have room: these bytes of
#: float32 elements, or this part of the model if that is more; one always.
ROOM_BYTES, ROOM_SHARE = 64 << 20, 8
#: A fragment that is corrupt is adopted anew so often without a contribution in between; then this machine is no use.
MOST_CORRUPTIONS = 8


class Adoption:
    """One island's versions: wanted, prepared, installed."""

    def __init__(self, training: Training, fleet: Fleet) -> None:
        self._training = training
        self._fleet = fleet
        self._patience = Patience()
        self._want = self._patience.backoff()
        self._stands = False  # the last Want: it has not been answered, as far as is known
        self._lacked = False
        self._waits_since_s: float | None = None  # for what one Want asked for; None: for nothing, or it was repeated
        self._clean_from: int | None = 0  # parameters are finite from this step on; None while they are replaced

    @property
    def lacking(self) -> bool:
        """Whether a newer version is published than the one here or on its way into the parameters."""
        return any(self._fleet.published[p] > f.newest for p, f in self._training.fragments.items())

    @property
    def held_back(self) -> bool:
        """True if a newer version waits to be prepared: its memory comes free as others are installed."""
        settings = self._training.settings
        adaptive = settings is not None and settings.recipe.pacing is Pacing.ADAPTIVE
        return adaptive and any(f.newer and f.stage is Stage.IDLE for f in self._training.fragments.values())

    @property
    def _differences(self) -> bool:
        """Whether versions come as differences, so that the newest is kept beside the parameters."""
        settings = self._training.settings
        return settings is not None and settings.recipe.codec_of_versions is not Codec.F32

    # --- wanted -----------------------------------------------------------------------------------------------

    def want(self, now_s: float, actions: list[Action]) -> None:
        """Tells the broker the versions that are here; it sends newer ones."""
        self._want.tried(now_s)
        self._stands = True
        versions = tuple(-1 if f.without_base else f.newest for f in self._training.fragments.values())
        actions.append(Send(to=BROKER, message=Want(versions=versions)))

    def want_anew(self, now_s: float, actions: list[Action]) -> None:
        """Tells it for the first time in a life, or of another state: pauses begin again."""
        self._want = self._patience.backoff(self._training.largest_bytes)
        self._lacked = self.lacking
        self._waits_since_s = now_s if self._lacked else None
        self.want(now_s, actions)

    def want_again(self, now_s: float, actions: list[Action]) -> None:
        """Asks again for missing versions, if it is time."""
        lacked, lacking = self._lacked, self.lacking
        self._lacked = lacking
        if lacking and not lacked and self._stands:  # so it is on its way by now
            self._want = self._patience.backoff(self._training.largest_bytes)
            self._want.tried(now_s)
            self._waits_since_s = now_s
        if lacking and self._want.due(now_s):
            repeated = self._stands
            self.want(now_s, actions)
            if repeated:
                self._patience.in_vain(self._want)
                self._waits_since_s = None

    def _ask_at_once(self) -> None:
        """Marks missing versions as not requested: the last Want was answered, or asked for others."""
        self._want = self._patience.backoff(self._training.largest_bytes)
        self._stands, self._waits_since_s = False, None

    # --- adopted ----------------------------------------------------------------------------------------------

    def arrived(self, version: Version, flaw: str, now_s: float, actions: list[Action]) -> bool:
        """Takes a version if it is whole and newer than the present one; returns whether it did."""
        fragment = self._training.fragments.get(version.fragment_id)
        if fragment is None or version.fragment_version <= fragment.newest:
            return False
        if version.fragment_version < fragment.version:
            return False  # a late copy, while the version here is wanted once more: versions never go back
        if flaw:
            facts = {"fragment": version.fragment_id, "detail": flaw}
            actions.append(Note(name="version.refused", fields=facts))
            # Of the version that is here, and yet it cannot be added: what is here is not what it should be.
            fragment.without_base = version.base == fragment.newest
            self._ask_at_once()
            return False
        fragment.without_base = False
        fragment.newer = version
        if self._waits_since_s is not None:
            self._patience.took(now_s - self._waits_since_s)
        self.want_anew(now_s, actions)
        return True

    def prepare(self, fragment: Fragment, actions: list[Action]) -> None:
        """Orders the preparation of an arrived version, unless the fragment is busy."""
        training = self._training
        if fragment.stage is not Stage.IDLE:
            return
        assert fragment.newer is not None
        assert training.settings is not None
        if self._early(fragment, training.settings.recipe):
            return
        # Nothing to come, and nothing trained since the last hand-over, or nobody to merge it: the global parameters,
        # exactly.
        settled = training.stopped and (fragment.handed == training.at or self._fleet.ended)
        first = fragment.version < 0
        recipe = training.settings.recipe
        whole = fragment.overwrite or settled or first
        if not whole and recipe.pacing is Pacing.ADAPTIVE and self._crowded(fragment.newer):
            return
        mixes = recipe.mix > 0 and not whole
        keep = 0.0 if whole else recipe.keep or recipe.mix
        fragment.incoming, fragment.newer, fragment.incoming_keep = fragment.newer, None, keep
        fragment.overwrite = False
        fragment.doing.take("prepare")
        actions.append(Prepare(version=fragment.incoming, keep=keep, mixes=mixes))

    def _crowded(self, version: Version) -> bool:
        """Returns whether a version is to wait until others are installed."""
        training, manifest = self._training, self._training.manifest
        assert manifest is not None
        under_way = [p for p, f in training.fragments.items() if f.stage in (Stage.PREPARING, Stage.READY)]
        sizes = [4 * manifest.sizes[p] for p in (*under_way, version.fragment_id)]
        return bool(under_way) and sum(sizes) > max(ROOM_BYTES, training.model_bytes // ROOM_SHARE)

    def _early(self, fragment: Fragment, recipe: Recipe) -> bool:
        """Returns whether a version is to wait: a fixed schedule adopts tau steps after the last capture.

        What is prepared after one boundary is installed at the next.
        """
        training = self._training
        if recipe.pacing is Pacing.ADAPTIVE or training.stopped or fragment.version < 0 or fragment.overwrite:
            return False
        return training.at.step < fragment.handed.step + recipe.overlap - 1

    def prepared(self, fragment_id: int, *, overwrites: bool) -> bool:
        """Notes that a version can be installed at the next boundary; returns whether it repairs corruption.

        Args:
            fragment_id: Of the version.
            overwrites: Something is corrupt, and it takes its place: the version itself, if it was to overwrite anyway.
        """
        fragment = self._training.fragments[fragment_id]
        fragment.doing.take("prepared")
        mends = overwrites and fragment.incoming_keep != 0
        if overwrites:
            fragment.incoming_keep = 0.0
        return mends

    def corrupted(self, p: int, flaw: str, now_s: float, actions: list[Action], *, mends: bool = False) -> None:
        """Takes note of a corrupt fragment; asks for a whole version unless the one at hand ``mends`` it."""
        fragment = self._training.fragments[p]
        if not fragment.corrupted:  # else it is the same incident
            facts = {"fragment": p, "version": fragment.version, "reason": flaw}
            actions.append(Note(name="island.corrupted", fields=facts))
            fragment.corruptions += 1
        fragment.corrupted = True
        if fragment.corruptions > MOST_CORRUPTIONS:
            cure = f"fragment {p} was adopted anew {MOST_CORRUPTIONS} times, and is corrupt again: replace the machine"
            actions.append(Fail(reason=flaw, cure=cure))
        if not mends:
            # Not what was kept to add differences to: that lies in the same memory.
            fragment.latest, fragment.without_base, fragment.overwrite = None, True, True
            self.want_anew(now_s, actions)

    def installed(self, fragment_ids: tuple[int, ...]) -> None:
        """Notes the versions that were installed at the boundary where training stands."""
        training = self._training
        for fragment in (training.fragments[p] for p in fragment_ids):
            fragment.doing.take("installed")
            assert fragment.incoming is not None
            fragment.count(training.at.step)
            if fragment.incoming_keep == 0:
                fragment.drop(training.at)
                fragment.exact_at = training.at
            fragment.version = fragment.incoming.fragment_version
            fragment.latest = fragment.incoming if self._differences else None
            fragment.corrupted = fragment.corrupted and (fragment.overwrite or fragment.incoming_keep != 0)
            fragment.incoming, fragment.copy = None, None
            if fragment.overwrite:  # asked for while another version was on its way in
                fragment.replace_progress()
        if self._clean_from is None and not any(f.awaits_overwrite for f in training.fragments.values()):
            self._clean_from = training.at.step  # here, and not when it was asked for
            training.refreshed()

    def end(self, now_s: float, actions: list[Action]) -> None:
        """Replaces unmerged progress by the global parameters, after the run's end.

        Such is the progress of an island that was away during the flush and got the last versions before it heard of
        the end, or whose last contribution was refused. Where nobody is left who would tell of anything, it stays.
        """
        training = self._training
        if self._fleet.deserted or training.manifest is None:
            return
        moving = ((p, training.fragments[p]) for p in training.manifest.moving)
        inexact = [
            fragment
            for p, fragment in moving
            if fragment.stage is Stage.IDLE
            and not fragment.awaits_overwrite
            and fragment.exact_at != training.at
            and fragment.newest >= self._fleet.published[p]  # else a newer one comes, and is taken as it is
        ]
        for fragment in inexact:
            fragment.replace_progress()
        if inexact:
            self.want_anew(now_s, actions)

    # --- in the place of spoilt parameters --------------------------------------------------------------------

    def refused(self, resolution: Resolution, actions: list[Action]) -> None:
        """Takes the global parameters where the local ones got a contribution refused for good."""
        training = self._training
        if resolution.reason is Reason.STALE:
            self._replace_stale(resolution.fragment_id)
        elif resolution.reason is Reason.NOT_FINITE and self._clean_from is not None:
            if resolution.from_step < self._clean_from:
                return  # captured before the recovery, and refused after it
            self._clean_from = None
            for fragment in training.fragments.values():
                fragment.replace_progress()
            training.refreshed()
            actions.append(RefreshOptimizer())
        self._ask_at_once()  # the version wanted may be one that is here already

    def _replace_stale(self, p: int) -> None:
        """Takes a fragment's global parameters if the progress since would be refused as too old, too.

        Else nothing is lost but what was refused: it is in the reference value, and so leaves the local parameters with
        the next version; not so where they are mixed with that. What is being captured is judged by itself.
        """
        assert self._training.settings is not None
        fragment, recipe = self._training.fragments[p], self._training.settings.recipe
        oldest = fragment.trained_on[0].fragment_version if fragment.trained_on else fragment.version
        behind = self._fleet.published[p] - oldest
        if fragment.capturing is None and (behind > recipe.max_staleness or recipe.mix > 0):
            fragment.replace_progress()
