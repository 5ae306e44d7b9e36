"""Checks by a few elements that adopted versions stay, and frozen parameters do not move. Pure.

An adoption moves the parameters, by s = installed - before. The caller trains on and comes back with the next ones,
which have moved by n = next - before. Along s they have moved by

    p = <n, s> / <s, s>

which is about 1 where training went on from what was installed (n = s + a step), and about 0 where it did not (n = a
step): where the caller ignores what :meth:`islands.Island.step` returns, or casts parameters anew from masters that it
keeps elsewhere. Then nothing is synchronised, whatever the books say. A step that is not small beside s says neither;
nor does one that has led back to the start, by chance, where the step after it is not small either.
Nor does one verdict alone: training may pull back what it was moved by, above all an island's own momentum where
versions move it against its way. Of that a part is left at one time or another (``pulled``), which ends the count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.base.errors import ConfigError

Array = npt.NDArray[Any]

#: Elements sampled of a tensor, tensors sampled of a fragment, and elements among which the most moving are picked.
SAMPLES, TENSORS, CANDIDATES = 256, 4, 1 << 15
#: Fewer elements that an adoption has moved say nothing.
LEAST_MOVED = 8
#: Movements along s from which on an adoption is in the parameters, and up to which it is not.
KEPT, UNDONE = 0.5, 0.15
#: The longest step beside s that a verdict of "undone" may rest on: of one adoption, and of what restore returned.
LONGEST_STEP, LONGEST_FIRST_STEP = 0.5, 0.1
#: Adoptions in a row, at different steps, that were undone.
IN_A_ROW = 5
#: A tensor was overwritten if it moved this many times a usual step, and this share of its values' length.
JUMP_STEPS, JUMP_SHARE = 30, 0.01


class Verdict(StrEnum):
    """The verdict on an adoption."""

    KEPT = "kept"
    UNDONE = "undone"
    PULLED = "pulled"
    UNCLEAR = "unclear"


def positions(movement: Array) -> npt.NDArray[np.int32]:
    """Returns the positions that move most among evenly spaced ones: int32 (dimensions, count).

    The count follows from the tensor's size alone.

    Args:
        movement: A non-empty array of at least one dimension.
    """
    flat = movement.reshape(-1)
    stride, count = _stride(flat.size), num_positions(flat.size)
    sizes = np.abs(flat[::stride])
    most = np.argpartition(sizes, sizes.size - count)[sizes.size - count :] * stride
    return np.array(np.unravel_index(most, movement.shape), np.int32)


def num_positions(size: int) -> int:
    """Returns the number of positions to sample in a tensor of ``size`` elements."""
    return min(SAMPLES, -(-size // _stride(size)))


def _stride(size: int) -> int:
    return -(-size // CANDIDATES)


def verdict(
    before: Sequence[Array],
    installed: Sequence[Array],
    following: Sequence[Array],
    later: Sequence[Array],
    longest_step: float = LONGEST_STEP,
) -> Verdict:
    """Judges one adoption by elements at the same positions before and after it.

    Args:
        before: Elements of the replaced parameters.
        installed: Elements of the installed parameters.
        following: Elements after the next step.
        later: Elements after the step after that.
        longest_step: Beside the movement.
    """
    start, there, then, after = (
        np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in each])
        for each in (before, installed, following, later)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        shift, moved, step = there - start, then - start, after - then
        square = float(shift @ shift)
        along, length, usual = float(moved @ shift), float(np.sqrt(moved @ moved)), float(np.sqrt(step @ step))
    if not np.isfinite([square, along, length, usual]).all() or square == 0 or np.count_nonzero(shift) < LEAST_MOVED:
        return Verdict.UNCLEAR
    share = along / square
    if share >= KEPT:
        return Verdict.KEPT
    if share > UNDONE:
        return Verdict.PULLED if length <= np.sqrt(square) else Verdict.UNCLEAR
    small = max(length, usual) <= longest_step * np.sqrt(square)
    return Verdict.UNDONE if small and abs(share) <= UNDONE else Verdict.UNCLEAR


def jumped(installed: Array, following: Array, later: Array) -> bool:
    """Returns whether a tensor was written over between an adoption and the next step.

    It has then moved many times as far as by the step after that one. As long as steps are alike, training does not.

    Args:
        installed: Elements of the version that was adopted.
        following: Those that the next step ended with.
        later: Those that the step after it ended with.
    """
    there, then, after = (np.asarray(x, np.float64).reshape(-1) for x in (installed, following, later))
    with np.errstate(over="ignore", invalid="ignore"):
        length, usual = float(np.linalg.norm(then - there)), float(np.linalg.norm(after - then))
        return 0 < JUMP_STEPS * usual < length < np.inf and length > JUMP_SHARE * float(np.linalg.norm(there))


class Persistence:
    """The verdicts on one island's adoptions, in the order of its steps; unclear ones do not count.

    Fragments are judged one by one: a loop may keep float32 masters of its matrices only.
    """

    def __init__(self) -> None:
        self._of_fragment: dict[int, set[int]] = {}  # steps since one was kept at which adoptions were undone
        self._of_any: set[int] = set()

    @property
    def suspected(self) -> bool:
        """Whether the last clear verdict on some fragment was that an adoption was undone."""
        return any(self._of_fragment.values())

    def lost(self, fragment_id: int, step: int, found: Verdict) -> bool:
        """Adds a verdict; returns True if adoptions do not stay in the parameters.

        Args:
            fragment_id: The version's fragment.
            step: At which it was installed; several may be at once, and are one act of the caller.
            found: The verdict on its adoption.
        """
        undone = self._of_fragment.setdefault(fragment_id, set())
        if found in (Verdict.KEPT, Verdict.PULLED):
            undone.clear()
            self._of_any.clear()
        elif found is Verdict.UNDONE:
            undone.add(step)
            self._of_any.add(step)
        return max(len(undone), len(self._of_any)) >= IN_A_ROW


def evenly(shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """Returns evenly spaced positions in a non-empty array: int32 (dimensions, at most ``SAMPLES``)."""
    if not shape:
        return np.zeros((0, 0), np.int32)
    size = math.prod(shape)
    flat = np.linspace(0, size - 1, min(size, SAMPLES)).astype(np.int64)
    return np.array(np.unravel_index(flat, shape), np.int32)


def has_moved(began: Array, now: Array) -> bool:
    """Returns whether elements of a frozen tensor have moved; NaN and infinity are handled elsewhere."""
    with np.errstate(over="ignore", invalid="ignore"):
        was, found = np.asarray(began, np.float32), np.asarray(now, np.float32)
    return bool(np.any((was != found) & np.isfinite(found)))


def trained_frozen(name: str, *, of_base: bool = False) -> ConfigError:
    """Returns the error for a loop that trains frozen parameters, or a base that never travels."""
    if of_base:
        cure = "is on every island's own disk, so nothing of it is ever handed over: leave it as it is, or start "
        cure += "another run in which it is merged"
        return ConfigError(f"params {name}", "no longer what it was at the join", cure)
    cure = "the run calls it frozen, so nothing of that is ever handed over: leave it as it is, or start the run, and "
    cure += f"join, with kinds={{'^{re.escape(name)}$': 'rda'}}; what is to be unfrozen later is merged from the start"
    return ConfigError(f"params {name}", "no longer what restore returned", cure)


def gone(first: bool) -> ConfigError:
    """Returns the error for a loop that drops an adopted version; ``first``: the parameters of restore."""
    value = "what restore returned is not in the next ones" if first else "what was adopted is not in the next ones"
    cure = f"train on from what {'restore' if first else 'step'} returns, and hand over the tree that the optimizer "
    cure += (
        "steps from: float32 masters, not the bfloat16 parameters that are cast from them; what is each island's own "
    )
    cure += "is local (kinds)"
    return ConfigError("params", value, cure)
