"""The state that the parts of an island's core share. Pure.

:mod:`islands.protocol.hand_over`, :mod:`islands.protocol.adoption` and :mod:`islands.protocol.member` read and change
one :class:`Training`; what they want done they append to the actions of the event at hand, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.wire.fragments import FragmentManifest, Kind, TensorSpec, joined
from broker.wire.messages import FleetState, Message, RunSettings, StateSource, Welcome
from islands.protocol.fragment import Fragment, Point
from islands.protocol.paused import Paused


class Training:
    """An island's counters, its fragments, and its inner optimizer's progress.

    Attributes:
        manifest: Of the run; None until the first welcome, as are the settings.
        settings: Of the run.
        at: The last boundary.
        stopped: No further step will be run.
        fragments: By number; none until the first welcome, and the same objects ever after.
        optimizer: What the inner optimizer started from.
    """

    def __init__(self) -> None:
        self.manifest: FragmentManifest | None = None
        self.settings: RunSettings | None = None
        self.at = Point(0, 0)
        self.stopped = False
        self.fragments: dict[int, Fragment] = {}
        self.optimizer = StateSource.PENDING
        self._optimizer_from: int | None = None  # the step at which the inner optimizer was fresh; None: never here

    def welcomed(self, welcome: Welcome) -> bool:
        """Begins at the run's place, or a new life's books there; returns whether it is the first life."""
        start = Point(welcome.start_step, welcome.start_tokens)
        self.settings = welcome.settings
        if self.manifest is not None:
            for fragment in self.fragments.values():
                fragment.begin_again(start)
            return False
        self.manifest, self.at = FragmentManifest(welcome.fragments), start
        self.fragments.update({p: Fragment(handed=start, counted=start.step) for p in range(len(self.manifest))})
        return True

    def misfit(self, message: Message, tensors: Sequence[TensorSpec]) -> str:
        """Says what in an aggregator's message is impossible for this island; empty if nothing is.

        The wire takes every number: what no aggregator of this run can mean must not end an island.

        Args:
            message: As it came.
            tensors: Those of this island.
        """
        match message:
            case Welcome(settings=settings):
                if not settings.heartbeat_interval_s > 0:
                    return f"settings.heartbeat_interval_s is {settings.heartbeat_interval_s}, must be above 0"
                # Of whatever dtype: each island has its own.
                theirs = sorted(
                    (t.name, t.shape) for t in joined(t for fragment in message.fragments for t in fragment)
                )
                ours = sorted((t.name, t.shape) for t in tensors if t.kind is not Kind.LOCAL)
                if self.manifest is None and theirs != ours:
                    return "fragments has other tensors than this island asked to join with"
                at, start = self.at, Point(message.start_step, message.start_tokens)
                if self.manifest is not None and start.step <= at.step and start.tokens > at.tokens:
                    return f"start_tokens is {start.tokens} at step {start.step}, of {at.tokens} at step {at.step}"
            case FleetState() if self.manifest is not None:
                if message.shard >= message.shards:
                    return f"shard is {message.shard}, must be below shards, {message.shards}"
                named = *(r.fragment_id for r in message.rounds), *(r.fragment_id for r in message.resolutions)
                unknown = max((*message.seed, *named), default=0)
                if unknown >= len(self.manifest):
                    return f"fragment {unknown} is named, of {len(self.manifest)}"
            case _:
                pass
        return ""

    def resume(self, paused: Paused) -> None:
        """Goes on with the life of an earlier process, where that stood."""
        self.at = paused.at
        for fragment, overwritten_tokens in zip(self.fragments.values(), paused.overwritten_tokens, strict=True):
            fragment.resume(paused.at, overwritten_tokens)

    def disowned(self) -> None:
        """Ends this life: its contributions are dropped, and global parameters replace the local ones."""
        for fragment in self.fragments.values():
            fragment.outstanding.clear()
            fragment.overwrite = True

    def restored(self, source: StateSource) -> None:
        """Notes the source of the optimizer state that training begins with."""
        self.optimizer = source
        self._optimizer_from = self.at.step if source is StateSource.FRESH else None

    def refreshed(self) -> None:
        """Notes that the inner optimizer starts afresh here."""
        self._optimizer_from = self.at.step

    @property
    def largest_bytes(self) -> int:
        """Returns the size of the largest fragment in float32, in bytes; 0 before the first welcome."""
        return 4 * max(self.manifest.sizes, default=0) if self.manifest is not None else 0

    @property
    def model_bytes(self) -> int:
        """Returns the size of all fragments in float32, in bytes; 0 before the first welcome."""
        return 4 * sum(self.manifest.sizes) if self.manifest is not None else 0

    @property
    def optimizer_trained(self) -> bool:
        """Whether the inner optimizer has seen a sync interval of steps, here or where its state came from."""
        if self.settings is None or self.optimizer is StateSource.PENDING or self.stopped:
            return False
        since = self._optimizer_from
        return since is None or self.at.step - since >= self.settings.recipe.sync_interval
