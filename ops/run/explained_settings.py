"""``up --explain-settings``: every setting of the recipe, its source, and differences from the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from aggregator.rules.recipes import PROFILES, REASONS, suited_to
from broker.wire.messages import RECIPE, Profile, Recipe
from ops.terminal import Column, Fitted

_DEFAULTS, _PAPER = Recipe(), Recipe(**PROFILES[Profile.PAPER])


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One setting of a recipe.

    Attributes:
        setting: Its name.
        value: Its value in the run, None while it is open.
        source: ``given``, ``profile``, ``default``, ``inner optimizer``, or ``codec``, which versions follow.
        default: Without a profile; None where the inner optimizer or ``codec`` decides.
        paper: Its value in profile ``paper``.
        why: Why our default differs from the paper's; empty if it does not.
    """

    setting: str
    value: Any
    source: str
    default: Any
    paper: Any
    why: str


def explained(recipe: Recipe) -> list[Explained]:
    """Returns every setting of a recipe but its profile, in order."""
    profile = PROFILES[recipe.profile]
    return [
        Explained(
            setting=name,
            value=_plain(getattr(recipe, name)),
            source=_source(name, getattr(recipe, name), profile.get(name, getattr(_DEFAULTS, name)), name in profile),
            default=_plain(getattr(_DEFAULTS, name)),
            paper=_plain(getattr(_PAPER, name)),
            why=REASONS.get(name, ""),
        )
        for name in RECIPE
        if name != "profile"
    ]


def render(profile: Profile, rows: Sequence[Explained]) -> RenderableType:
    """Returns the settings as a table for people."""
    columns = (
        Column("setting", number=False),
        Column("this run", number=False),
        Column("from", number=False),
        Column("default", number=False),
        Column("paper", number=False),
        Column("why our default differs", number=False, wraps=True, rank=1),
    )
    cells = [
        (row.setting, _shown(row.value), row.source, _shown(row.default), _shown(row.paper), row.why) for row in rows
    ]
    open_ = "; ".join(
        f"{optimizer}: {suited.merge}, rate {suited.outer_learning_rate:g}, momentum {suited.outer_momentum:g}"
        for optimizer, suited in ((name, suited_to(name)) for name in ("adamw", "muon"))
    )
    note = f"open: settled when the first island joins, by its inner optimizer ({open_})"
    return Group(Text(f"profile {profile}", style="bold"), Text(), Fitted(columns, cells), Text(), Text(note))


def _source(name: str, value: Any, usual: Any, of_profile: bool) -> str:
    if value != usual:
        return "given"
    if of_profile:
        return "profile"
    if value is None:
        return "codec" if name == "version_codec" else "inner optimizer"
    return "default"


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _shown(value: Any) -> str:
    if value is None:
        return "open"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
