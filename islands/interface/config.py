"""The settings of an island, and errors that name the one to change."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from broker.base.errors import AtollError, ConfigError, RunEnded
from broker.base.settings import check_finite, nearest, setting
from broker.chunks.sending import MOST_SUBFLOWS
from broker.wire.addresses import broker_addresses, check_exposure, check_metrics_address
from broker.wire.fragments import FragmentManifest
from broker.wire.headers import Limits, room_bytes
from broker.wire.identity import KeyRole
from broker.wire.messages import AGGREGATOR, BROKER, Reason
from broker.wire.names import check_name

#: The task that comes with us.
LANGUAGE = "islands.language:task"


class JoinOptions(TypedDict, total=False):
    """Arguments by name of :func:`islands.join`, :func:`islands.torch.join`, :class:`islands.Hook`.

    :func:`islands.join` says what each means. Those that are settings have their defaults in :class:`IslandConfig`.
    """

    run: str
    kinds: Mapping[str, str] | None
    unit_axes: Mapping[str, int] | None
    key: str | os.PathLike[str] | None
    insecure: bool
    island_id: str
    tokens_per_step: int
    inner_optimizer: str
    recipe: Mapping[str, Any] | None
    init_partial: bool
    base: str | os.PathLike[str] | None
    inputs: Mapping[str, str] | None
    files: Mapping[str, bytes] | None
    state_dir: str | os.PathLike[str] | None
    checkpoint_interval_s: float
    donor_wait_s: float
    timeout_s: float
    broker_silent_s: float
    connections: int
    max_message_bytes: int
    speaker_address: str
    metrics_port: int
    metrics_host: str
    check: Callable[[], None]


#: Those that are settings of an island by another name.
SETTINGS = {"run": "run_id", "timeout_s": "join_timeout_s"}


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raises TypeError for the first name that is none of :class:`JoinOptions`, with the nearest that is."""
    for name in options:
        if name not in JoinOptions.__annotations__:
            raise TypeError(f"joining a run takes no argument {name!r}; {nearest(name, JoinOptions.__annotations__)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandConfig:
    """One island. Every field is a key of the table ``[island]``, and most are flags of ``atoll island``."""

    run_id: str = setting("atoll", "name of the run to join", flag="--run", subject="run")
    broker: str = setting(
        "tcp://127.0.0.1:7001", "address of the broker; several with commas between them", subject="addresses and keys"
    )
    key: Path | None = setting(None, "this island's secret key file; broker.public lies beside it; see `atoll keys`")
    insecure: bool = setting(False, "connect without keys to a broker on another machine")
    broker_silent_s: float = setting(2.0, "seconds of silence after which the island tries its next broker")
    connections: int = setting(1, "connections that tensors are spread over: more fill a long and fast link")
    island_id: str = setting("", "name of this island (default: the run assigns one to this host)", subject="training")
    task: str = setting(LANGUAGE, "what to train: package.module:function that returns a Task")
    init: Path | None = setting(
        None, "trained model that version 0 comes from: safetensors, a model's directory, or a checkpoint"
    )
    init_partial: bool = setting(False, "take of that model what fits by name and shape, instead of refusing it")
    pace: float = setting(0.0, "least seconds for an inner step, to play slower hardware")

    state_dir: Path | None = setting(
        None, "directory for checkpoints of the inner optimizer (default: no checkpoints)", subject="restarts"
    )
    checkpoint_interval_s: float = setting(60.0, "seconds between two checkpoints", flag=None)
    donor_wait_s: float = setting(
        60.0, "without a checkpoint: seconds to look for another island's optimizer state; 0: start fresh", flag=None
    )
    pulse: Path | None = setting(None, "file that gets the time of every step (default: none)", subject="observation")
    health: Path | None = setting(
        None, "file for health checks; it stays young while the island steps and hears its broker (default: none)"
    )
    metrics_port: int = setting(0, "port of metrics for Prometheus; 0: none are served")
    metrics_host: str = setting("127.0.0.1", "address that metrics are served at; 0.0.0.0 shows them to everybody")
    join_timeout_s: float = setting(
        120.0, "seconds of silence after which the island gives up joining, or waiting for the end", subject="limits"
    )
    max_message_bytes: int = setting(
        0, "largest message accepted; 0: a quarter of the memory here, at least 4 GiB", flag=None
    )

    def __post_init__(self) -> None:
        check_finite(self)
        check_name("run_id", self.run_id)
        if self.island_id:
            check_name("island_id", self.island_id)
        if self.island_id in (AGGREGATOR, BROKER):
            raise ConfigError("island_id", self.island_id, "is an address of others: choose another name")
        for address in self.brokers:
            check_exposure(address, setting="broker", key=self.key, insecure=self.insecure, role=KeyRole.ISLAND)
        check_metrics_address(self.metrics_host, self.metrics_port)
        if self.pace < 0:
            raise ConfigError("pace", self.pace, "must be a number of seconds, 0 or more")
        if self.donor_wait_s < 0:
            raise ConfigError(
                "donor_wait_s", self.donor_wait_s, "must be a number of seconds, 0 to start fresh at once"
            )
        if not 1 <= self.connections <= MOST_SUBFLOWS:
            raise ConfigError("connections", self.connections, f"must be from 1 to {MOST_SUBFLOWS}")
        for name in ("broker_silent_s", "checkpoint_interval_s", "join_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(name, getattr(self, name), "must be above 0")
        self.limits()  # checks what concerns it

    @property
    def brokers(self) -> tuple[str, ...]:
        """The control address of each broker."""
        return broker_addresses(self.broker)

    def limits(self) -> Limits:
        """Limits of the codec; :func:`islands.join` settles those that follow from the memory of its machine."""
        return Limits(max_message_bytes=self.max_message_bytes or room_bytes(0))

    def check_room(self, manifest: FragmentManifest) -> None:
        """Checks that this island can send and receive the largest fragment: everybody else has room for it.

        Raises:
            ConfigError: It cannot.
        """
        limits = self.limits()
        least = 4 * max(manifest.sizes) + limits.max_header_bytes
        if limits.max_message_bytes < least:
            cure = f"must be at least {least} for the largest fragment of this run: give it to islands.join, or in the "
            cure += "table [run] of the configuration, which is everybody's"
            raise ConfigError("max_message_bytes", limits.max_message_bytes, cure)


def refusal(reason: str, cure: str, config: IslandConfig, island_id: str) -> AtollError:
    """Returns a refusal that ends the island as an error of the setting that has to change."""
    match reason:
        case Reason.RUN_ENDED:
            return RunEnded(f"run {config.run_id} has ended: {cure}")
        case Reason.MANIFEST | Reason.OVERSIZE:
            return ConfigError("params", "as given to join", cure)
        case Reason.RECIPE:
            return ConfigError("recipe", "as given here", cure)
        case Reason.IMPLAUSIBLE:
            cure = f"{cure}: declare what a step really takes, or raise the aggregator's limit"
            return ConfigError("tokens_per_step", "as given to join", cure)
        case Reason.WRONG_RUN:
            return ConfigError("run", config.run_id, cure)
        case Reason.WRONG_KEY:
            return ConfigError("key", str(config.key), cure)
        case Reason.PROTOCOL_VERSION:
            return ConfigError("broker", config.broker, f"{cure}: use one version of this program everywhere")
        case _:
            return ConfigError("island_id", island_id, f"{reason}: {cure}")
