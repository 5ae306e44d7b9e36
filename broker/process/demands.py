"""An island's demands on the recipe of its run: read from a table, compared with the run's. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from broker.base.errors import ConfigError
from broker.base.settings import refuse_unknown, settings_of, typed
from broker.wire.messages import Demand, Recipe

_SETTINGS = {each.name: each for each in settings_of(Recipe)}


def demands_of(table: Mapping[str, Any]) -> tuple[Demand, ...]:
    """Returns a table ``[recipe]`` as an island demands it.

    Raises:
        ConfigError: It names no setting of a recipe, or a value that this setting cannot have.
    """
    refuse_unknown(table, _SETTINGS, where="recipe")
    values = {name: typed(name, value, _SETTINGS[name].type) for name, value in table.items()}
    return tuple(
        Demand(name=name, value=json.dumps(value)) for name, value in sorted(values.items()) if value is not None
    )


def demanded(demands: Sequence[Demand]) -> dict[str, Any]:
    """Returns setting -> value of what is demanded; raises ConfigError as :func:`demands_of` does."""
    refuse_unknown({each.name: each.value for each in demands}, _SETTINGS, where="recipe")
    return {each.name: typed(each.name, _read(each), _SETTINGS[each.name].type) for each in demands}


def contradicted(recipe: Recipe, demands: Sequence[Demand]) -> str:
    """Says which demand a settled recipe does not meet, with both values; empty if it meets all."""
    for name, wanted in demanded(demands).items():
        has = getattr(recipe, name)
        if wanted != has:
            cure = "leave it out at the island, or start another run with it"
            return f"{name} is {wanted} at the island, and {has} in the run's recipe: {cure}"
    return ""


def _read(demand: Demand) -> Any:
    try:
        return json.loads(demand.value)
    except ValueError as err:
        raise ConfigError(demand.name, demand.value, "must be JSON") from err
