"""The aggregator's settings: the run, the rounds, the learning rule and the limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aggregator.interface.place import SCHEMES, place_of
from broker.base.errors import ConfigError
from broker.base.settings import changeable, check_finite, fixed, process
from broker.registry import redis_address
from broker.routing.directory import MAX_SHARDS
from broker.routing.liveness import LivenessConfig
from broker.wire.addresses import broker_addresses, check_exposure, check_metrics_address
from broker.wire.identity import KeyRole
from broker.wire.messages import Recipe, own_rule
from broker.wire.names import check_name

#: The cure of a run whose ``data_ahead_s`` is 0.
NO_SHARES = (
    "a run that began with 0, one share of the data for each island, is for the checkout that began it: finish it "
    "there, or export its model"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorConfig(Recipe):
    """Settings of an aggregator: keys of ``[aggregator]`` or ``[recipe]``, most also flags.

    Those of the recipe are inherited (:class:`broker.wire.messages.Recipe`). Each field says whether a restart on the
    store of a run may change it (:mod:`aggregator.state.run_settings`). A fixed one is told to islands as they join, or
    decides how model, data and ledger are cut.
    """

    run_id: str = fixed("atoll", "name of the run; messages of other runs are refused", flag="--run", subject="run")
    broker: str = process(
        "tcp://127.0.0.1:7001", "address of the broker; several with commas between them", subject="addresses and keys"
    )
    key: Path | None = process(None, "this aggregator's secret key file; broker.public lies beside it")
    insecure: bool = process(False, "connect without keys to a broker on another machine")
    redis_url: str = process(
        "", "address of Redis (default: REDIS_URL, else redis://127.0.0.1:6379)", secret=True, subject="Redis"
    )
    store: Path = process(Path("store"), "directory for versions, locked while in use", subject="what is kept")
    keep_versions: int = changeable(2, "newest versions of each fragment that are kept")
    keep_every: int = changeable(0, "keep every n-th version of each fragment besides, for ever; 0: none", flag=None)
    copy_to: str = process(
        "", "object store to copy versions and tape to, such as s3://bucket/run (default: none); restore reads it"
    )
    copy_every_s: float = process(60.0, "seconds that a copy there may be old")
    tape: Path | None = process(None, "file for the event tape, as JSON lines (default: none)")
    tape_segment_mb: float = process(
        64.0,
        "megabytes at which the tape's file is closed and compressed, and another begun; 0: one file for ever",
        flag=None,
    )
    tape_segments: int = process(
        64, "closed segments of tape and ledger to keep; older ones are dropped; 0: keep all", flag=None
    )
    report: Path | None = process(None, "file for the final report (default: only the log has it)")
    new_lineage: bool = process(
        False, "go on from an older store and give up the newer versions that others hold; give it once"
    )
    record_payloads: bool = process(False, "keep every merged payload beside the tape; this is as large as all traffic")

    metrics_port: int = process(0, "port of metrics for Prometheus; 0: none are served", subject="observation")
    metrics_host: str = process("127.0.0.1", "address that metrics are served at; 0.0.0.0 shows them to everybody")

    islands: int = fixed(4, "islands expected", subject="run")
    total_tokens: int = changeable(0, "tokens to train before the run ends; 0: no end", flag="--tokens")
    share_takeover_s: float = changeable(
        120.0, "seconds of absence after which an island's data go to others; 0: never"
    )
    data_ahead_s: float = fixed(10.0, "seconds of training for which an island is given data at a time")
    seed: int = fixed(0, "seed of the initial model and of the data order")
    init_digest: str = process("", "digest of the model that version 0 must come from (default: any)", flag=None)

    max_tokens_per_step: int = changeable(1 << 24, "most tokens that an island may claim for one inner step", flag=None)
    trust: bool = changeable(
        True,
        "weigh islands by how far their directions agree with the others'; --no-trust weighs by tokens alone, "
        "and a merge rule of your own stands in its place",
    )
    trusted_tokens: Mapping[str, int] | None = changeable(
        None, "tokens per step to believe of islands that have more than twice the fleet's, as ISLAND=N"
    )
    pace_spread: float = changeable(
        100.0, "times the fleet's median of tokens per second up to which an island's are believed", flag=None
    )
    quarantine_s: float = changeable(
        30.0, "seconds in quarantine after repeated offences, at first; 0: never", flag=None
    )
    max_staleness_s: float = changeable(
        120.0,
        "seconds in which a contribution is taken in though it is more than max_staleness versions behind",
        flag=None,
    )

    heartbeat_interval_s: float = fixed(
        0.5, "seconds between two heartbeats of an island", subject="silence", flag=None
    )
    suspect_after_s: float = changeable(2.0, "seconds of silence after which status calls an island suspect", flag=None)
    dead_after_s: float = changeable(6.0, "seconds of silence after which no round waits for an island")
    shards: int = fixed(
        1,
        "aggregators that share the fragments, each with its own store; for up also auto: by model and machine",
        subject="several aggregators",
    )
    shard: int = fixed(0, "number of this one, from 0; shard 0 admits islands and ends the run")
    failover: bool = process(
        False, "lead only with the lease in Redis, and follow while another aggregator leads; start two or more"
    )
    standby: bool = process(False, "with failover: let others begin, and take over when they fail")
    lease_s: float = changeable(
        1.0, "with failover: seconds of a leader's silence after which a standby takes over", flag=None
    )
    standby_lag_s: float = changeable(
        1.0, "with failover: seconds that a version waits for a slow standby before that one is dropped", flag=None
    )
    held_bytes: int = changeable(
        0,
        "bytes of waiting contributions before islands are told to send again; 0: by the model, the islands expected "
        "and the memory here",
        subject="limits",
        flag=None,
    )
    max_message_bytes: int = changeable(
        0, "largest message accepted; 0: a quarter of the memory here, at least 4 GiB", flag=None
    )
    memory_bytes: int = process(
        0, "memory that these limits follow from; 0: what this machine, or container, has", flag=None
    )

    def __post_init__(self) -> None:
        check_finite(self)
        Recipe.__post_init__(self)
        check_name("run_id", self.run_id)
        for name in ("islands", "max_tokens_per_step", "keep_versions"):
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
        check_metrics_address(self.metrics_host, self.metrics_port)
        if str(self.store).startswith(tuple(f"{each}:" for each in SCHEMES)):
            url = re.sub(":/*", "://", str(self.store), count=1)  # a path has lost a slash
            cure = f"must be a directory of this machine, which is copied there: --store DIR --copy-to {url}"
            raise ConfigError("store", url, cure)
        if self.copy_to:
            place_of(self.copy_to)
        if self.copy_every_s < 1:
            raise ConfigError("copy_every_s", self.copy_every_s, "must be at least 1, or nothing but copying is done")
        if self.redis_url:
            redis_address.check(self.redis_url)
        for address in self.brokers:
            check_exposure(address, setting="broker", key=self.key, insecure=self.insecure, role=KeyRole.AGGREGATOR)
        if self.quorum > self.islands:
            raise ConfigError(
                "quorum", self.quorum, f"must not exceed islands = {self.islands}, or no round closes by it"
            )
        if self.data_ahead_s <= 0:
            raise ConfigError("data_ahead_s", self.data_ahead_s, f"must be above 0, 10 is usual; {NO_SHARES}")
        counted = ("total_tokens", "seed", "keep_every", "tape_segment_mb", "tape_segments")
        seconds = ("max_staleness_s", "quarantine_s", "share_takeover_s")
        limits = ("held_bytes", "max_message_bytes", "memory_bytes")
        for name in (*counted, *seconds, *limits):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "must not be negative")
        if self.standby and not self.failover:
            raise ConfigError("standby", True, "needs failover: give --failover to every aggregator of the run")
        if self.new_lineage and self.failover:
            cure = "is for one aggregator alone: start it without failover and without standbys, then start these anew"
            raise ConfigError("new_lineage", True, cure)
        if self.lease_s < 0.2:
            raise ConfigError("lease_s", self.lease_s, "must be at least 0.2, or a busy processor costs the lease")
        if self.standby_lag_s <= 0:
            raise ConfigError("standby_lag_s", self.standby_lag_s, "must be above 0, 1 is usual")
        self._check_claims()
        _ = self.liveness, self.brokers  # these check what concerns them

    def _check_claims(self) -> None:
        """Checks the limits of believed claims."""
        for island_id, tokens in (self.trusted_tokens or {}).items():
            check_name("trusted_tokens", island_id)
            if not 1 <= tokens <= self.max_tokens_per_step:
                cure = f"must lie between 1 and max_tokens_per_step = {self.max_tokens_per_step}"
                raise ConfigError(f"trusted_tokens.{island_id}", tokens, cure)
        if self.pace_spread < 1:
            raise ConfigError("pace_spread", self.pace_spread, "must be at least 1, 100 is usual")

    @property
    def trusts(self) -> bool:
        """Returns True if agreement decides weights, lengths and quarantine: no rule of one's own does."""
        return self.trust and own_rule(self.merge) is None

    @property
    def takeover_s(self) -> float:
        """Absence after which an island's data go to others; 0: never."""
        return max(self.share_takeover_s, self.dead_after_s) if self.share_takeover_s else 0.0

    @property
    def ledger_segment_bytes(self) -> int:
        """Length at which the ledger's file is closed: a third of the tape's.

        A version's line there is shorter than a third of what the tape has of it, so that the ledger reaches further
        back.
        """
        return round(self.tape_segment_mb * 1e6 / 3)

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
