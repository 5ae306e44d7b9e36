"""The settings of an island, and errors that name the one to change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from broker.process.settings import check_finite, setting
from broker.wire.addresses import broker_addresses, check_exposure
from broker.wire.errors import AtollError, ConfigError, RunEnded
from broker.wire.fragments import FragmentManifest
from broker.wire.headers import Limits
from broker.wire.identity import KeyRole
from broker.wire.messages import AGGREGATOR, BROKER, Reason
from broker.wire.names import check_name
from islands.protocol.events import Fail

#: The task that comes with us.
LANGUAGE = "islands.language:task"


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandConfig:
    """One island. Every field is a flag of ``atoll island`` and a key of the table ``[island]``."""

    run_id: str = setting("atoll", "name of the run to join", flag="--run")
    broker: str = setting("tcp://127.0.0.1:7001", "control address of the broker, or of each, with commas between them")
    key: Path | None = setting(None, "this island's secret key file, with broker.public beside it: see `atoll keys`")
    insecure: bool = setting(False, "connect without keys to a broker that is not on this machine")
    broker_silent_s: float = setting(2.0, "silence after which an island goes on to the next broker, if it has several")
    island_id: str = setting("", "this island's name; empty: the run assigns one, the same again to the same host")
    task: str = setting(LANGUAGE, "what to train: package.module:function, returning a Task")
    pace: float = setting(0.0, "seconds that an inner step takes at least: plays slower hardware")

    state_dir: Path | None = setting(None, "directory for checkpoints of the inner optimizer; none: no checkpoints")
    checkpoint_interval_s: float = setting(60.0, "seconds between two checkpoints")
    donor_wait_s: float = setting(
        60.0, "seconds to look for another island's optimizer state, where there is no checkpoint; 0: start fresh"
    )
    pulse: Path | None = setting(None, "small file that the time of every step is written to; none: no such file")
    health: Path | None = setting(
        None, "file for health checks: as old as the last step that heard the broker; none: no such file"
    )
    join_timeout_s: float = setting(120.0, "silence of the run after which joining it, or its end, is given up")
    max_message_bytes: int = setting(1 << 30, "largest message accepted")

    def __post_init__(self) -> None:
        check_finite(self)
        check_name("run_id", self.run_id)
        if self.island_id:
            check_name("island_id", self.island_id)
        if self.island_id in (AGGREGATOR, BROKER):
            raise ConfigError("island_id", self.island_id, "is an address of others: choose another name")
        for address in self.brokers:
            check_exposure(address, setting="broker", key=self.key, insecure=self.insecure, role=KeyRole.ISLAND)
        if self.pace < 0:
            raise ConfigError("pace", self.pace, "must be a number of seconds, 0 or more")
        if self.donor_wait_s < 0:
            raise ConfigError(
                "donor_wait_s", self.donor_wait_s, "must be a number of seconds, 0 to start fresh at once"
            )
        for name in ("broker_silent_s", "checkpoint_interval_s", "join_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(name, getattr(self, name), "must be above 0")
        self.limits()  # checks what concerns it

    @property
    def brokers(self) -> tuple[str, ...]:
        """The control address of each broker."""
        return broker_addresses(self.broker)

    def limits(self) -> Limits:
        """What the codec accepts."""
        return Limits(max_message_bytes=self.max_message_bytes)

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


def refusal(fail: Fail, config: IslandConfig, island_id: str) -> AtollError:
    """Returns what an island cannot go on with, as an error of the setting that would have to change."""
    match fail.reason:
        case Reason.RUN_ENDED:
            return RunEnded(f"run {config.run_id} has ended: {fail.cure}")
        case Reason.MANIFEST | Reason.OVERSIZE:
            return ConfigError("params", "as given to join", fail.cure)
        case Reason.IMPLAUSIBLE:
            cure = f"{fail.cure}: declare what a step really takes, or raise the aggregator's limit"
            return ConfigError("tokens_per_step", "as given to join", cure)
        case Reason.WRONG_RUN:
            return ConfigError("run", config.run_id, fail.cure)
        case Reason.WRONG_KEY:
            return ConfigError("key", str(config.key), fail.cure)
        case Reason.PROTOCOL_VERSION:
            return ConfigError("broker", config.broker, f"{fail.cure}: use one version of this program everywhere")
        case _:
            return ConfigError("island_id", island_id, f"{fail.reason}: {fail.cure}")
