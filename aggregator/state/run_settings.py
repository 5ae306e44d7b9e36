"""The settings of a run across restarts: fixed, changeable, or of one process. Pure.

Each field of :class:`~aggregator.interface.config.AggregatorConfig` says how long it holds. The run record keeps those
that are the run's, as they are when it is written. A later life, here or on a standby that takes over, is held against
them:

* what is not given is taken from the run, whatever the default of this release;
* what is given and fixed must be what the run has;
* what is given and changeable is taken, and the core notes the change (``aggregator.setting_changed``).

A record without them was written by an earlier release: there, nothing is compared. Which run and which shard a store
holds stands in its record by itself, and is checked by :mod:`aggregator.process.service`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from aggregator.interface.config import NO_SHARES, AggregatorConfig
from aggregator.interface.leader_notes import SettingChanged
from aggregator.interface.merge_rule import load
from aggregator.rules.recipes import begun_with
from aggregator.state.records import manifest_from_rows
from broker.base.errors import ConfigError
from broker.base.settings import Scope, Setting, build, settings_of, typed
from broker.wire.fragments import Kind
from broker.wire.messages import RECIPE, MergeRule, own_rule

#: Their key in the run record.
SETTINGS = "settings"

_BY_ITSELF = frozenset({"run_id", "shard", "shards"})
_RUN_ID = next(each.default for each in settings_of(AggregatorConfig) if each.name == "run_id")
_OF_RUN: Mapping[str, Setting] = {
    each.name: each
    for each in settings_of(AggregatorConfig)
    if each.scope is not Scope.PROCESS and each.name not in _BY_ITSELF
}


def recorded(config: AggregatorConfig) -> dict[str, Any]:
    """Returns the settings of the run as plain data, for its record."""
    return {name: _plain(getattr(config, name)) for name in _OF_RUN}


def settled(given: Mapping[str, Any], record: Mapping[str, Any] | None) -> AggregatorConfig:
    """Returns the settings of a life: given ones first, then the run's, the profile's, the defaults.

    Args:
        given: Setting name -> value, of those that a flag, the environment or a file names.
        record: The run record that the life continues; None: a new run.

    Raises:
        ConfigError: A fixed setting is given another value than the run has, or two settings do not go together; or the
            data of the run do not go out in blocks.
    """
    other = record is not None and record.get("run_id") != given.get("run_id", _RUN_ID)
    known = {} if other else _known(record)  # of another run, all is wrong: which the loading says
    if not other and record is not None and record.get("manifest") is not None and not known.get("data_ahead_s"):
        raise ConfigError("data_ahead_s", 0.0, NO_SHARES)  # runs that are older than the setting, too
    own, its = own_rule(given.get("merge")), own_rule(known.get("merge"))
    if own and its and own.path == its.path:  # whoever gives a digest means that file, and whoever does not the run's
        known["merge"] = f"{its.kernel}+{its.path}#{own.digest or its.digest}"
        given = {**given, "merge": known["merge"]}
    for name, had in known.items():
        if _OF_RUN[name].scope is Scope.FIXED and given.get(name, had) != had:
            cure = f"the run has {_plain(had)}, from its beginning to its end: leave it out, or start another run"
            raise ConfigError(name, _plain(given[name]), f"{cure} (another --run, and another --store)")
    return _with_rule(build(AggregatorConfig, begun_with({**known, **given})))


def completed(config: AggregatorConfig, record: Mapping[str, Any] | None) -> AggregatorConfig:
    """Returns settings with the run's settled recipe in place of values that were not given."""
    known, config = _known(record), _with_rule(config)
    return replace(config, **{name: known[name] for name in RECIPE if getattr(config, name) is None and name in known})


def _with_rule(config: AggregatorConfig) -> AggregatorConfig:
    """Returns settings with the digest of the run's own merge rule, if it has one."""
    found = load(config.merge)
    return config if found is None else replace(config, merge=found.name)


def changes(config: AggregatorConfig, record: Mapping[str, Any] | None) -> list[SettingChanged]:
    """Returns each setting that differs from the run's record."""
    return [
        SettingChanged(field=name, was=_plain(had), now=_plain(getattr(config, name)))
        for name, had in _known(record).items()
        if getattr(config, name) != had
    ]


def _known(record: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the run's settings, typed; none before it has a model, while all may still change."""
    if record is None or record.get("manifest") is None:
        return {}
    stored = dict(record.get(SETTINGS, {}))
    if "outer_momentum" in stored:  # of a release whose recipe had no merge rule: the manifest has it
        manifest = manifest_from_rows(record["manifest"])
        rda = any(tensor.kind is Kind.RDA for tensor in manifest.tensors().values())
        stored.setdefault("merge", (MergeRule.RDA if rda else MergeRule.MEAN).value)
    return {name: typed(name, stored[name], each.type) for name, each in _OF_RUN.items() if name in stored}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
