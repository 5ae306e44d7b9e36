"""Keeps merged payloads for replay: one safetensors file per merged round.

``ROUND.safetensors`` holds, all float32 and with the fragment's tensors side by side in manifest order::

    theta_before, momentum_before      what the round began with; residual_before, where versions are rounded
    delta.0, delta.1, ..               the contributions' pseudo-gradients, decoded, in the order they were folded
    merged                             D
    theta_after, momentum_after        what it led to; residual_after, likewise

and in its metadata, as JSON under ``round``, the ids, the versions and each contribution's steps and weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from aggregator.interface.events import Merge, Part
from aggregator.merge.fragment_state import FragmentState, Vector
from aggregator.merge.kernels import MergedFragment
from aggregator.merge.pieces import vector
from broker.base.errors import ConfigError, cure_of
from broker.process import logs

log = logs.get(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRound:
    """One file read back: ``facts`` as listed in :meth:`Recorder.record`, ``arrays`` by the names above."""

    facts: dict[str, Any]
    arrays: dict[str, Vector]


def facts_of(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Returns what a file says of each contribution, beside its arrays."""
    return [
        {
            "island": part.island_id,
            "steps": [part.steps.from_step, part.steps.to_step],
            "tokens": part.steps.tokens,
            "token_weight": part.token_weight,
            "staleness_weight": part.staleness_weight,
        }
        for part in parts
    ]


class Recorder:
    """Writes one file per merged round into a directory; a failing disk costs files, and nothing else."""

    def __init__(self, directory: Path) -> None:
        """Creates the directory.

        Raises:
            ConfigError: It cannot be created.
        """
        self._directory = directory
        self._failing = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            cure = f"needs the directory {directory}, which cannot be created ({err.strerror}): {cure_of(err)}"
            raise ConfigError("record_payloads", True, cure) from err

    def record(self, action: Merge, before: FragmentState, merged: MergedFragment, after: FragmentState) -> None:
        """Writes one round. It decodes every contribution at once: for study, not for production."""
        arrays = {
            "theta_before": before.params,
            "momentum_before": before.momentum,
            "merged": merged.delta,
            "theta_after": after.params,
            "momentum_after": after.momentum,
        }
        residuals = {"residual_before": before.residual, "residual_after": after.residual}
        arrays |= {name: residual for name, residual in residuals.items() if residual is not None}
        for index, part in enumerate(action.parts):
            arrays[f"delta.{index}"] = vector(part.payload)
        facts = {
            "round_id": action.round_id,
            "fragment_id": action.fragment_id,
            "fragment_version": action.fragment_version,
            "outer_rule": action.outer_rule,
            "parts": facts_of(action.parts),
        }
        path = self._directory / f"{action.round_id:010d}.safetensors"
        try:
            save_file(arrays, path, metadata={"round": json.dumps(facts)})
        except (OSError, SafetensorError) as err:
            if not self._failing:
                log.warning("recording.failing", path=str(path), detail=str(err), cure="free space there")
            self._failing = True
        else:
            self._failing = False


def read_recording(path: Path) -> RecordedRound:
    """Returns what :meth:`Recorder.record` wrote.

    Raises:
        OSError: It cannot be read.
        SafetensorError: It is no safetensors file.
    """
    with safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping, it has only keys()
        return RecordedRound(facts=json.loads(file.metadata()["round"]), arrays=arrays)
