"""The rederivation of versions from recorded payloads, compared byte for byte.

It reads the files of :mod:`aggregator.store.recording`. Each version is computed from the version before *as
derived here*, with the weights that the replayed core decided; the recording brings the pseudo-gradients alone. Only
what cannot be known otherwise is taken from it: parameters of version 0, and the momentum after rounds that were not
recorded; the parameters are then checked against the digest on the tape.

A recording of a round that is not on the tape, as of the last moments before a crash, is derived by itself
(:meth:`Rederivation.left_over`): from what it says it began with and the weights that it names, to the digest and the
weights that the ledger has.

The bytes are the same on the same build and the same type of processor: sums in another order round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from aggregator.interface.events import Computed, Merge, Part
from aggregator.merge import versions
from aggregator.merge.fragment_state import FragmentState, Made, Vector
from aggregator.rounds.core import Aggregator
from aggregator.store.recording import RecordedRound, facts_of, read_recording
from broker.wire.fragments import TensorSpec
from broker.wire.messages import Codec, Encoded
from broker.wire.ranges import StepRange
from broker.wire.tensors import encode_tensor, fragment_digest

#: Where a version's digest is known from.
ON_TAPE = "on the tape"
#: By which cosines may differ: sums of float32 in another order.
COSINES = 1e-5
#: What reading a file that was tampered with can end in.
_UNUSABLE = (OSError, SafetensorError, KeyError, ValueError, TypeError)


class _Contradiction(Exception):
    """A recording contradicts the version that it should have led to; the message says why."""


class Rederivation:
    """Derives one version after another; at most two states per fragment are in memory.

    Attributes:
        derived: Versions whose bytes agree.
        unrecorded: Versions without a recording.
        missing: Versions among them whose life recorded payloads: the file is gone.
        alone: Versions whose round is not on the tape, and whose bytes agree with the ledger.
        unclaimed: Recordings of rounds that led to no version that the ledger knows, or that no ledger could tell of.
    """

    def __init__(self, directory: Path) -> None:
        self.derived = 0
        self.unrecorded = 0
        self.missing = 0
        self.alone = 0
        self.unclaimed = 0
        self._directory = directory
        self._used: set[int] = set()  #: round ids
        self._core: Aggregator | None = None
        self._durable: dict[int, FragmentState] = {}
        self._pending: dict[int, FragmentState] = {}

    def begin(self, core: Aggregator) -> None:
        """Begins a life: pending versions are in its store by now, or never will be."""
        self._core = core
        for p, fragment in core.run.model.fragments.items():
            pending = self._pending.pop(p, None)
            if pending is not None and (pending.version, fragment_digest(pending.params)) == (
                fragment.version,
                fragment.digest,
            ):
                self._durable[p] = pending
            durable = self._durable.get(p)
            if durable is None or durable.version == fragment.version:
                continue
            if fragment_digest(durable.params) == fragment.digest:
                self._durable[p] = durable._replace(version=fragment.version)  # a new lineage: the same, renumbered
            else:
                del self._durable[p]  # versions in between are not on the tape

    def planted(self, fragment_id: int) -> None:
        """Takes version 0; its parameters are in the recording of the first round."""
        self._pending.pop(fragment_id, None)
        self._durable.pop(fragment_id, None)

    def persisted(self, fragment_id: int) -> None:
        """Makes the newest derived version the base of the next one."""
        if fragment_id in self._pending:
            self._durable[fragment_id] = self._pending.pop(fragment_id)

    def merged(self, core: Aggregator, action: Merge, event: Computed) -> str:
        """Derives a version and its cosines; returns what contradicts the tape or the recording."""
        p = action.fragment_id
        self._pending.pop(p, None)
        self._used.add(action.round_id)
        if not self._path(action.round_id).exists():
            self.unrecorded += 1
            self.missing += core.run.config.record_payloads
            self._durable.pop(p, None)
            return ""
        assert core.run.model.manifest is not None
        try:
            action.final_parts(event.cosines)  # a rule of one's own is asked here, by what is on the tape
            before = partial(self._before, core, action)
            made = self._derived(core.run.model.manifest.fragments[p], action, before, event.digest, ON_TAPE)
            _check_cosines(event, made)
        except _Contradiction as err:
            return str(err)
        self._pending[p] = made.state
        self.derived += 1
        return ""

    def _derived(
        self,
        tensors: tuple[TensorSpec, ...],
        action: Merge,
        before: Callable[[RecordedRound], FragmentState],
        digest: str,
        where: str,
    ) -> Made:
        """Returns a version made from a recording; ``before`` tells from that what its round began with.

        Raises:
            _Contradiction: It has another ``digest`` than ``where``, or than the recording says.
        """
        path = self._path(action.round_id)
        name = f"version {action.fragment_version} of fragment {action.fragment_id}"
        try:
            recorded = read_recording(path)
            begun, parts = before(recorded), _parts(tensors, action, recorded)
            rule = tuple(recorded.facts.get("outer_rule", action.outer_rule))
            if where == ON_TAPE and rule != action.outer_rule:
                raise _Contradiction(f"it took an outer step of {rule}, and {action.outer_rule} was decided")
            made, merged = versions.merge(tensors, replace(action, parts=parts, outer_rule=rule), begun)
            derived = {"merged": merged.delta, "theta_after": made.state.params, "momentum_after": made.state.momentum}
            if made.state.residual is not None:
                derived["residual_after"] = made.state.residual
            other = [what for what, vector in derived.items() if not _same(recorded.arrays[what], vector)]
        except _Contradiction as err:
            raise _Contradiction(f"{path}: {err}") from None
        except _UNUSABLE as err:
            raise _Contradiction(f"{path} cannot be used for {name}: {type(err).__name__}: {err}") from err
        if made.digest != digest:
            raise _Contradiction(f"{name} is {digest} {where}, and its recorded contributions give {made.digest}")
        if other:
            raise _Contradiction(f"{path}: {other[0]} is not what its contributions give")
        return made

    def _path(self, round_id: int) -> Path:
        return self._directory / f"{round_id:010d}.safetensors"

    # --- rounds that are not on the tape ----------------------------------------------------------------------

    def rounds_left(self) -> frozenset[int]:
        """Returns the ids of recorded rounds that are not on the tape."""
        names = (path.stem for path in self._directory.glob("*.safetensors"))
        return frozenset(int(name) for name in names if name.isdecimal()) - self._used

    def left_over(self, round_id: int, row: Mapping[str, Any] | None, digests: Mapping[tuple[int, int], str]) -> str:
        """Derives a recorded round alone; returns what contradicts recording or ledger; empty if nothing.

        Args:
            round_id: One of :meth:`rounds_left`.
            row: The ledger's line of the version that it led to. None: it led to none, as far as is known; a crash
                leaves such rounds, whole or cut short, so there is nothing that its recording could contradict.
            digests: (fragment, version) -> digest, as far as tape and ledger tell.
        """
        manifest = None if self._core is None else self._core.run.model.manifest
        if row is None or manifest is None or self._core is None:
            self.unclaimed += 1
            return ""
        p, version = row["fragment_id"], row["fragment_version"]

        def before(recorded: RecordedRound) -> FragmentState:
            state = _state_before(recorded, version - 1)
            began, known = fragment_digest(state.params), digests.get((p, version - 1))
            if known not in (None, began):
                raise _Contradiction(f"theta_before is {began}, and version {version - 1} was {known}")
            return state

        try:
            action = Merge(
                round_id=round_id,
                fragment_id=p,
                fragment_version=version,
                parts=_parts_of_row(row),
                outer_rule=self._core.run.config.outer_rule,  # the recording has it, where it was another one
                capped=self._core.run.config.caps,
                version_codec=self._core.run.config.codec_of_versions,
            )
            self._derived(manifest.fragments[p], action, before, row["digest"], "in the ledger")
        except _Contradiction as err:
            return str(err)
        self.alone += 1
        return ""

    def _before(self, core: Aggregator, action: Merge, recorded: RecordedRound) -> FragmentState:
        """Returns the state that a round began with, unless the recorded one contradicts it."""
        p, version = action.fragment_id, action.fragment_version - 1
        state = _state_before(recorded, version)
        known = self._durable.get(p)
        if known is not None and known.version == version:
            for what, recorded_array, derived in (
                ("theta_before", state.params, known.params),
                ("momentum_before", state.momentum, known.momentum),
                ("residual_before", state.exact, known.exact),
            ):
                if not _same(recorded_array, derived):
                    raise _Contradiction(f"{what} is not what version {version} of fragment {p} was derived to be")
            return known
        digest = fragment_digest(state.params)
        if digest != core.run.model.fragments[p].digest:
            raise _Contradiction(
                f"theta_before is {digest}, and version {version} was {core.run.model.fragments[p].digest}"
            )
        if version == 0 and (state.momentum.any() or state.residual is not None):
            raise _Contradiction("momentum_before is not zero at version 0, or there is a residual")
        return state


def _check_cosines(event: Computed, made: Made) -> None:
    """Raises :class:`_Contradiction` if trust was learned from other cosines than recorded ones."""
    if event.cosines and not np.allclose(event.cosines, made.cosines, rtol=0, atol=COSINES):
        what = f"version {event.fragment_version} of fragment {event.fragment_id}"
        raise _Contradiction(f"{what} came with cosines {list(event.cosines)}, recorded are {list(made.cosines)}")


def _state_before(recorded: RecordedRound, version: int) -> FragmentState:
    """Returns the state that a round began with, by its recording."""
    arrays = recorded.arrays
    return FragmentState(
        arrays["theta_before"], arrays["momentum_before"], version, residual=arrays.get("residual_before")
    )


def _parts_of_row(row: Mapping[str, Any]) -> tuple[Part, ...]:
    """Returns the parts that a ledger line names, in the order of the merge, without payloads."""
    return tuple(
        Part(
            island_id=each["island_id"],
            steps=StepRange(**each["steps"]),
            payload=(),
            token_weight=each["token_weight"],
            staleness_weight=each["staleness_weight"],
        )
        for each in row["contributions"]
    )


def _parts(tensors: tuple[TensorSpec, ...], action: Merge, recorded: RecordedRound) -> tuple[Part, ...]:
    """Returns the decided parts with the recorded payloads, unless others were recorded."""
    decided = facts_of(action.final_parts(()))
    if recorded.facts["parts"] != decided:
        raise _Contradiction(f"it holds the contributions {recorded.facts['parts']}, and {decided} were merged")
    return tuple(
        replace(part, payload=_payload(tensors, recorded.arrays[f"delta.{index}"]))
        for index, part in enumerate(action.parts)
    )


def _payload(tensors: tuple[TensorSpec, ...], delta: Vector) -> tuple[Encoded, ...]:
    """Returns a decoded contribution as a float32 payload: merging decodes both to the same numbers."""
    ends = np.cumsum([tensor.size for tensor in tensors])
    if delta.shape != (ends[-1],):
        raise ValueError(f"a contribution has shape {delta.shape}, the fragment has {ends[-1]} elements")
    pieces = np.split(delta, ends[:-1])
    return tuple(
        encode_tensor(piece.reshape(tensor.shape), Codec.F32) for tensor, piece in zip(tensors, pieces, strict=True)
    )


def _same(one: Vector, other: Vector) -> bool:
    """Returns True if two vectors have the same bytes, so that zeros of both signs differ."""
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
