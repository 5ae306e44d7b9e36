"""The broker's settings: addresses, keys and limits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from broker.base.errors import ConfigError
from broker.base.settings import check_finite, setting
from broker.process.release import release
from broker.registry import redis_address
from broker.routing.events import RelayConfig
from broker.routing.liveness import LivenessConfig
from broker.wire.addresses import check_address, check_exposure, check_metrics_address
from broker.wire.headers import Limits, room_bytes
from broker.wire.identity import KeyRole
from broker.wire.names import check_name

DEFAULT_PORT = 7001
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379"

_MIB = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """One broker. Every field is a key of the table ``[broker]``, and most are flags of ``atoll broker``."""

    run_id: str = setting("atoll", "name of the run; messages of other runs are refused", flag="--run", subject="run")
    host: str = setting(
        "127.0.0.1", "address to listen on; 0.0.0.0 takes connections from other machines", subject="addresses and keys"
    )
    port: int = setting(DEFAULT_PORT, "port for small messages; tensors use the next one; 0 picks two free ports")
    ipc: str = setting(
        "", "also listen on a Unix socket, for processes of this machine with --broker ipc://PATH: a PATH, or @NAME"
    )
    name: str = setting(
        "", "name of this broker in status, unique in its run (default: host and port)", flag="--broker-name"
    )
    key: Path | None = setting(None, "the broker's secret key file; allowed.keys lies beside it; see `atoll keys`")
    insecure: bool = setting(False, "listen without keys on a public address: anybody who reaches it can take part")
    redis_url: str = setting(
        "", f"address of Redis (default: REDIS_URL, else {DEFAULT_REDIS_URL})", secret=True, subject="Redis"
    )
    report_interval_s: float = setting(
        0.5, "seconds between two reports of membership and counters to Redis", flag=None
    )

    metrics_port: int = setting(0, "port of metrics for Prometheus; 0: none are served", subject="observation")
    metrics_host: str = setting("127.0.0.1", "address that metrics are served at; 0.0.0.0 shows them to everybody")

    # One fragment of a large model is a message, and a model may be a single fragment.
    max_message_bytes: int = setting(
        0, "largest message accepted; 0: a quarter of the memory here, at least 4 GiB", subject="limits", flag=None
    )
    max_header_bytes: int = setting(4 * _MIB, "largest message header, and largest small message, accepted", flag=None)
    peer_queue_bytes: int = setting(
        0,
        "bytes of pseudo-gradients from one island that may wait here; 0: a quarter of those from all islands",
        flag=None,
    )
    total_queue_bytes: int = setting(
        0,
        "bytes of pseudo-gradients from all islands that may wait here; 0: a quarter of the memory, at least 4 GiB",
        flag=None,
    )
    max_peers: int = setting(10_000, "most islands, with processes about to join, at one time", flag=None)
    forget_after_s: float = setting(60.0, "seconds of silence after which the broker forgets an island", flag=None)

    liveness: LivenessConfig = field(default_factory=LivenessConfig)

    def __post_init__(self) -> None:
        check_finite(self)
        check_name("run_id", self.run_id)
        if self.name and not _NAME.fullmatch(self.name):
            raise ConfigError("name", self.name, "must be 1 to 64 of the characters A-Z a-z 0-9 . _ : -, or empty")
        if not self.host:
            raise ConfigError("host", self.host, "must be an address of this machine, or 0.0.0.0 for all of them")
        if "/" in self.host or re.fullmatch(r"[^:]*:\d+", self.host):
            cure = "must be an address alone, such as 0.0.0.0; the port is another setting"
            raise ConfigError("host", self.host, cure)
        check_exposure(self.host, setting="host", key=self.key, insecure=self.insecure, role=KeyRole.BROKER)
        if not 0 <= self.port <= 65_534:
            raise ConfigError("port", self.port, "must be from 1 to 65534 (the bulk port is the next one), or 0")
        if self.ipc:
            check_address(f"ipc://{self.ipc}", field="ipc")
        check_metrics_address(self.metrics_host, self.metrics_port)
        if self.report_interval_s <= 0:
            raise ConfigError("report_interval_s", self.report_interval_s, "must be above 0, 0.5 is usual")
        if self.forget_after_s < self.liveness.dead_after_s:
            cure = f"must be at least dead_after_s ({self.liveness.dead_after_s:g})"
            raise ConfigError("forget_after_s", self.forget_after_s, cure)
        for name in ("max_message_bytes", "peer_queue_bytes", "total_queue_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "must be a number of bytes, or 0: by the memory here")
        largest = "max_message_bytes" if self.max_message_bytes else "max_header_bytes"
        for name in ("peer_queue_bytes", "total_queue_bytes"):
            if 0 < getattr(self, name) < getattr(self, largest):
                cure = f"must be at least {largest} ({getattr(self, largest)}), or a large message never fits"
                raise ConfigError(name, getattr(self, name), cure)
        if self.redis_url:
            redis_address.check(self.redis_url)
        self.limits()  # these check what concerns them
        self.relay()

    def limits(self, memory_bytes: int = 0) -> Limits:
        """Returns limits of the codec on the bulk channel, on a machine with so much memory; 0: not known."""
        message_bytes = self.max_message_bytes or max(room_bytes(memory_bytes), self.max_header_bytes)
        return Limits(max_header_bytes=self.max_header_bytes, max_message_bytes=message_bytes)

    def control_limits(self) -> Limits:
        """Returns limits of the codec on the control channel: a header without buffers."""
        return Limits(max_header_bytes=self.max_header_bytes, max_message_bytes=self.max_header_bytes, max_buffers=1)

    def relay(self, memory_bytes: int = 0) -> RelayConfig:
        """Returns the relay's share of these settings, on a machine with so much memory; 0: not known."""
        least_bytes = max(self.peer_queue_bytes, self.max_message_bytes)
        total_bytes = self.total_queue_bytes or max(room_bytes(memory_bytes), least_bytes)
        peer_bytes = self.peer_queue_bytes or max(total_bytes // 4, self.max_message_bytes)
        return RelayConfig(
            run_id=self.run_id,
            peer_queue_bytes=peer_bytes,
            total_queue_bytes=total_bytes,
            max_peers=self.max_peers,
            forget_after_s=self.forget_after_s,
            leader_silent_s=self.liveness.dead_after_s,
            release=release(),
        )
