"""The aggregator's settings: the learning rule, the rounds, and the limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from broker.process.settings import changeable, check_finite, fixed, process
from broker.registry import redis_address
from broker.routing.directory import MAX_SHARDS
from broker.routing.liveness import LivenessConfig
from broker.wire.addresses import broker_addresses, check_exposure
from broker.wire.errors import ConfigError
from broker.wire.identity import KeyRole
from broker.wire.messages import Codec
from broker.wire.names import check_name


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorConfig:
    """One aggregator. Every field is a flag of ``atoll aggregator`` and a key of the table ``[aggregator]``.

    What a field is declared by says what a restart on the store of a run may do with it
    (:mod:`aggregator.state.run_settings`). Fixed is what islands are told as they join, and what the model, the data
    and the books are cut by: islands that are in would go on by the value of before.
    """

    run_id: str = fixed("atoll", "name of the run; messages of other runs are refused", flag="--run")
    broker: str = process("tcp://127.0.0.1:7001", "control address of the broker, or of each, with commas between them")
    key: Path | None = process(None, "this aggregator's secret key file, with broker.public beside it")
    insecure: bool = process(False, "connect without keys to a broker that is not on this machine")
    redis_url: str = process("", "where Redis listens; empty: take REDIS_URL, else redis://127.0.0.1:6379", secret=True)
    store: Path = process(Path("store"), "directory of durable versions, locked while in use")
    tape: Path | None = process(None, "file for the event tape (JSON lines); none: no tape")
    report: Path | None = process(None, "file for the final report; none: only the log")
    new_lineage: bool = process(
        False, "where peers hold newer versions than the store, give them up and go on; once, then leave it out"
    )
    record_payloads: bool = process(False, "keep every merged payload beside the tape (as large as all traffic)")

    islands: int = fixed(4, "islands expected: how data is shared out, and what one fleet step means")
    total_tokens: int = changeable(
        0, "tokens after which the run ends by itself, at the next heartbeat; 0: no end", flag="--tokens"
    )
    share_takeover_s: float = changeable(
        120.0,
        "absence after which an island's data share goes to another until it is back, dead_after_s at least; 0: never",
    )
    seed: int = fixed(0, "of model initialisation and data order")

    fragments: int = fixed(8, "fragments the model is cut into (P)")
    sync_interval: int = fixed(24, "inner steps between two merges of one fragment (H)")
    rounds_in_flight: int = changeable(2, "rounds open at once, at least; more are opened where journeys are long")
    quorum: int = changeable(1, "fresh contributions that may close a round (K); fewer live islands lower it")
    overlap: int = changeable(2, "inner steps an island may run between capture and adoption (tau)")
    grace_factor: float = changeable(0.9, "share of the spare overlap time spent waiting for stragglers (gamma)")
    round_timeout_s: float = changeable(30.0, "a round closes after this long with what is there")
    max_staleness: int = changeable(8, "versions that the oldest step of a contribution may be behind")
    staleness_exponent: float = changeable(0.5, "a in the weight (1 + staleness) ** -a; 0 is the paper's rule")
    presence_exponent: float = changeable(
        0.0, "b in (share of live islands in the round) ** b, on every weight; 0: none"
    )

    # Rate 1 without momentum was the best of twelve rules at 768 steps (docs/results.md, outer): momentum lost 1.5 % at
    # 0.7/0.5, 22 % at 0.7/0.9.
    outer_learning_rate: float = changeable(1.0, "of the outer Nesterov step")
    outer_momentum: float = changeable(0.0, "of the outer Nesterov step; 0 for plain SGD")
    max_tokens_per_step: int = changeable(1 << 24, "most tokens that an island may claim for one inner step")
    outlier_factor: float = changeable(
        10.0, "a contribution is refused at so many times the fleet's typical norm per step; 0: none is"
    )
    quarantine_s: float = changeable(30.0, "how long an island is kept out after repeated offences, at first; 0: never")
    keep: float = fixed(1.0, "share of local progress that survives an adoption; 0 is the paper's overwrite")
    codec: Codec = fixed(Codec.BF16, "how pseudo-gradients travel")
    version_codec: Codec = changeable(Codec.F32, "how versions travel")

    heartbeat_interval_s: float = fixed(0.5, "seconds between heartbeats of an island")
    suspect_after_s: float = changeable(2.0, "silence after which status calls an island suspect")
    dead_after_s: float = changeable(6.0, "silence after which no round waits for an island")
    shards: int = fixed(1, "aggregators that share the fragments among them; each with a store of its own")
    shard: int = fixed(0, "which of them this one is, from 0 on; shard 0 lets islands in and ends the run")
    failover: bool = process(
        False, "lead by lease in Redis alone, and follow while another aggregator of this run leads: run two or more"
    )
    standby: bool = process(False, "with failover: let others begin, and take over only when they fail")
    lease_s: float = changeable(1.0, "with failover: silence of a leader after which a standby takes over")
    standby_lag_s: float = changeable(
        1.0, "with failover: how long a version waits for a standby that lags before it goes on without"
    )
    held_bytes: int = changeable(1 << 30, "bytes of contributions kept before islands are told to send again")
    max_message_bytes: int = changeable(1 << 30, "largest message accepted")

    def __post_init__(self) -> None:
        check_finite(self)
        check_name("run_id", self.run_id)
        at_least_one = (
            "islands",
            "fragments",
            "sync_interval",
            "rounds_in_flight",
            "quorum",
            "overlap",
            "max_staleness",
            "max_tokens_per_step",
            "held_bytes",
        )
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if not 1 <= self.shards <= MAX_SHARDS:
            raise ConfigError("shards", self.shards, f"must lie between 1 and {MAX_SHARDS}")
        if not 0 <= self.shard < self.shards:
            cure = f"must lie between 0 and {self.shards - 1}: there are {self.shards} shards (--shards)"
            raise ConfigError("shard", self.shard, cure)
        if self.shards > self.fragments:
            cure = f"must not exceed fragments = {self.fragments}: a shard without a fragment has nothing to do"
            raise ConfigError("shards", self.shards, cure)
        if self.new_lineage and self.shards > 1:
            cure = "is for a run of one shard: with several, restore the store of the shard that is behind from a copy"
            raise ConfigError("new_lineage", True, cure)
        if self.redis_url:
            redis_address.check(self.redis_url)
        for address in self.brokers:
            check_exposure(address, setting="broker", key=self.key, insecure=self.insecure, role=KeyRole.AGGREGATOR)
        if self.quorum > self.islands:
            raise ConfigError(
                "quorum", self.quorum, f"must not exceed islands = {self.islands}, or no round closes by it"
            )
        if self.fragments > self.sync_interval:
            cure = (
                f"must not exceed sync_interval = {self.sync_interval}: at most one fragment falls due per inner step"
            )
            raise ConfigError("fragments", self.fragments, cure)
        if self.outlier_factor and self.outlier_factor < 3:
            cure = "must be at least 3: healthy contributions differ by half; 10 is usual, 0 for none"
            raise ConfigError("outlier_factor", self.outlier_factor, cure)
        for name in (
            "quarantine_s",
            "total_tokens",
            "seed",
            "staleness_exponent",
            "presence_exponent",
            "grace_factor",
            "outer_momentum",
            "share_takeover_s",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "must not be negative")
        if self.outer_momentum >= 1:
            raise ConfigError("outer_momentum", self.outer_momentum, "must be below 1, or steps grow without bound")
        if self.outer_learning_rate <= 0:
            raise ConfigError("outer_learning_rate", self.outer_learning_rate, "must be above 0, 1 is usual")
        if not 0 <= self.keep <= 1:
            raise ConfigError("keep", self.keep, "must lie between 0 (overwrite) and 1 (keep every step)")
        if self.version_codec.blockwise:
            cure = "must be f32 or bf16: what rounding takes from a version nothing brings back; choose it as codec"
            raise ConfigError("version_codec", str(self.version_codec), cure)
        if self.standby and not self.failover:
            raise ConfigError("standby", True, "needs failover: give --failover to every aggregator of the run")
        if self.new_lineage and self.failover:
            cure = "is for one aggregator alone: start it without failover and without standbys, then start these anew"
            raise ConfigError("new_lineage", True, cure)
        if self.lease_s < 0.2:
            raise ConfigError("lease_s", self.lease_s, "must be at least 0.2, or a busy processor costs the lease")
        if self.standby_lag_s <= 0:
            raise ConfigError("standby_lag_s", self.standby_lag_s, "must be above 0, 1 is usual")
        if self.round_timeout_s <= 0:
            raise ConfigError("round_timeout_s", self.round_timeout_s, "must be above 0, 30 is usual")
        _ = self.liveness, self.brokers  # these check what concerns them

    @property
    def brokers(self) -> tuple[str, ...]:
        """The control address of each broker."""
        return broker_addresses(self.broker)

    @property
    def liveness(self) -> LivenessConfig:
        """The allowances for silence."""
        return LivenessConfig(
            heartbeat_interval_s=self.heartbeat_interval_s,
            suspect_after_s=self.suspect_after_s,
            dead_after_s=self.dead_after_s,
        )
