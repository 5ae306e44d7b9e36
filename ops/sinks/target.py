"""Targets: where figures go, as a flag names it, and whether its library is there. Loads no library."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from broker.base.errors import ConfigError, shown
from broker.base.settings import expanded
from broker.process.release import install

HELP = "tensorboard:DIR, wandb:PROJECT (or ENTITY/PROJECT), mlflow:URI, or otlp:URL (traces of rounds)"


class Kind(StrEnum):
    """A library that keeps and shows figures or, for OTLP, a collector of traces."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    OTLP = "otlp"


#: The packages on an index, and the module of each kind.
PACKAGES = {
    Kind.TENSORBOARD: ("tensorboard",),
    Kind.WANDB: ("wandb",),
    Kind.MLFLOW: ("mlflow-skinny",),
    Kind.OTLP: ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
}
_MODULES = {Kind.OTLP: "opentelemetry"}
_CURES = {
    Kind.TENSORBOARD: "check that the directory can be written and has space",
    Kind.WANDB: "run `wandb login`, or set WANDB_MODE=offline and run `wandb sync` later",
    Kind.MLFLOW: "check that the tracking server answers, and its MLFLOW_TRACKING_USERNAME, _PASSWORD or _TOKEN",
    Kind.OTLP: "check that the collector answers, and OTEL_EXPORTER_OTLP_HEADERS if it wants a token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where figures go: a library, and a directory, project or address."""

    kind: Kind
    place: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"

    @property
    def cure(self) -> str:
        """Advice for the case that the library refuses rows."""
        return _CURES[self.kind]


def target_of(text: str, *, field: str = "log_to") -> Target:
    """Reads a target; a directory becomes absolute.

    Raises:
        ConfigError: It is none.
    """
    name, _, place = text.partition(":")
    if name not in list(Kind):
        raise ConfigError(field, text, f"must be {HELP}")
    if any(f",{kind}:" in place for kind in Kind):
        raise ConfigError(field, text, "names several: put spaces between them, or one in each command")
    kind = Kind(name)
    if kind is Kind.MLFLOW:
        return Target(kind=kind, place=place or os.environ.get("MLFLOW_TRACKING_URI", "") or _nowhere(field, text))
    if kind is Kind.OTLP:
        if re.match(r"https?://[^/\s]+", place) is None:
            raise ConfigError(field, shown(text), "must have an address, such as otlp:http://localhost:4318")
        if "@" in place:
            raise ConfigError(field, shown(text), "must hold no password: OTEL_EXPORTER_OTLP_HEADERS takes one")
        return Target(kind=kind, place=place if urlsplit(place).path.strip("/") else f"{place.rstrip('/')}/v1/traces")
    if not place:
        what = "a directory: tensorboard:runs/board" if kind is Kind.TENSORBOARD else "a project: wandb:atoll"
        raise ConfigError(field, text, f"names no place; give {what}")
    if kind is Kind.TENSORBOARD:
        return Target(kind=kind, place=os.path.abspath(expanded(field, Path(place))))
    return Target(kind=kind, place=place)


def _nowhere(field: str, text: str) -> str:
    cure = "names no tracking server; give one, mlflow:http://127.0.0.1:5000, or set MLFLOW_TRACKING_URI"
    raise ConfigError(field, text, cure)


def check_installed(target: Target, *, field: str = "log_to") -> None:
    """Checks that the library can be imported, without importing it.

    Raises:
        ConfigError: It is not installed.
    """
    if find_spec(_MODULES.get(target.kind, str(target.kind))) is None:
        cure = f"needs a package that is not installed: {install(*PACKAGES[target.kind])}"
        raise ConfigError(field, str(target), cure)
