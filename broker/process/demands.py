"""Demands of an island on its run: settings of the recipe, digests of what training begins with. Pure.

Inputs are what no recipe says and what must not differ between islands: the file that version 0 comes from
(``init``), the tensors of a base that never travels (``base NAME``), tokenizer, chat template, data. Each is a name
with a digest or a short value. Those of the first island are the run's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from broker.base.errors import ConfigError
from broker.base.settings import refuse_unknown, settings_of, typed
from broker.wire.messages import Demand, Recipe, own_rule

_SETTINGS = {each.name: each for each in settings_of(Recipe)}
#: Before the name of an input, among demands. No setting has such a name.
_INPUT = "input:"
#: The file that version 0 comes from: an island without one takes the run's first version.
INIT = "init"
#: The examples; as token ids they differ where the tokenizer does, which is then the one to name.
DATA = "data"
#: The small files of the model, which the island that begins the run brings; another island's may differ.
FILES = "files"
#: Before the name of a tensor whose values every island has from its own disk.
BASE = "base "


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


def inputs_demanded(inputs: Mapping[str, str]) -> tuple[Demand, ...]:
    """Returns inputs as an island demands them."""
    return tuple(Demand(name=_INPUT + name, value=json.dumps(value)) for name, value in sorted(inputs.items()))


def inputs_of(demands: Sequence[Demand]) -> dict[str, str]:
    """Returns name -> digest or value of the inputs among demands."""
    return {each.name.removeprefix(_INPUT): str(_read(each)) for each in demands if each.name.startswith(_INPUT)}


def has_base(inputs: Mapping[str, str]) -> bool:
    """Returns True if inputs have digests of a base's tensors."""
    return any(name.startswith(BASE) for name in inputs)


def other_input(run: Mapping[str, str], island: Mapping[str, str]) -> str:
    """Says which input of an island is not the run's, with both values and the cure; empty if all are."""
    names = {name for name in (*run, *island) if run.get(name) != island.get(name)} - {FILES}
    for name in sorted(names, key=lambda name: (name == DATA, name)):
        ours, theirs = run.get(name), island.get(name)
        if name == INIT and theirs is None:
            continue  # it takes the run's version
        if name == INIT:
            cure = "join without init, to begin with the version that the run has, or start another run"
        else:
            cure = "give every island the same, or start another run"
        return f"{name} is {theirs or 'not given'} at the island, and {ours or 'not given'} in the run: {cure}"
    return ""


def shown_inputs(inputs: Mapping[str, str]) -> dict[str, str]:
    """Returns inputs for people: one digest of 16 hex digits for the tensors of a base."""
    base = {name: digest for name, digest in inputs.items() if name.startswith(BASE)}
    shown = {name: value for name, value in inputs.items() if name not in base}
    if base:
        text = json.dumps(base, sort_keys=True, separators=(",", ":"))
        shown[BASE.strip()] = f"{len(base)} digests, {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return shown


def demanded(demands: Sequence[Demand]) -> dict[str, Any]:
    """Returns setting -> value of what is demanded of the recipe.

    Raises:
        ConfigError: As :func:`demands_of` does.
    """
    demands = [each for each in demands if not each.name.startswith(_INPUT)]
    refuse_unknown({each.name: each.value for each in demands}, _SETTINGS, where="recipe")
    return {each.name: typed(each.name, _read(each), _SETTINGS[each.name].type) for each in demands}


def contradicted(recipe: Recipe, demands: Sequence[Demand]) -> str:
    """Says which demand a settled recipe does not meet, with both values; empty if it meets all."""
    for name, wanted in demanded(demands).items():
        has = getattr(recipe, name)
        if name == "merge" and _is_part_of(wanted, has):
            continue
        if wanted != has:
            cure = "leave it out at the island, or start another run with it"
            return f"{name} is {wanted} at the island, and {has} in the run's recipe: {cure}"
    return ""


def _is_part_of(wanted: str, has: str) -> bool:
    """Returns True if a rule of one's own is the run's, as far as the demand names it."""
    own, its = own_rule(wanted), own_rule(has)
    return own is not None and its is not None and all(a in ("", b) for a, b in zip(own, its, strict=True))


def _read(demand: Demand) -> Any:
    try:
        return json.loads(demand.value)
    except ValueError as err:
        raise ConfigError(demand.name, demand.value, "must be JSON") from err
