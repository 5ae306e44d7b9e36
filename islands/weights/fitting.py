"""Pairs the tensors of a model file with those of a tree, by name and shape. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

#: Most names of each kind in a message.
MOST_NAMES = 5

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The tensors of a file and of a tree, paired by name and shape.

    Attributes:
        found: Name in the tree -> name in the file, where both have one shape.
        missing: Names in the tree that the file lacks.
        unexpected: Names in the file that the tree lacks.
        unlike: Name in the tree -> its shape there and in the file.
    """

    found: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    unlike: Mapping[str, tuple[Shape, Shape]]

    @property
    def whole(self) -> bool:
        """True if every tensor of the file and of the tree is paired."""
        return not (self.missing or self.unexpected or self.unlike)

    def __str__(self) -> str:
        shapes = [f"{name} {wanted}, in the file {has}" for name, (wanted, has) in self.unlike.items()]
        sorts = ("missing", self.missing), ("unexpected", self.unexpected), ("of another shape", shapes)
        return "; ".join(f"{len(names)} {sort} ({_some(names)})" for sort, names in sorts if names)


def fit(
    wanted: Mapping[str, Shape],
    has: Mapping[str, Shape],
    *,
    names: Callable[[str], str] | None = None,
    optional: Collection[str] = (),
    aliases: Mapping[str, Collection[str]] | None = None,
) -> Fit:
    """Returns how the tensors of a file fit those of a tree.

    Without ``names`` a name fits itself, with dots for slashes, also below one first part of the names in the file,
    such as ``params.`` of a whole training state: then the rest of that state is not looked at.

    Args:
        wanted: Name in the tree -> shape.
        has: Name in the file -> shape.
        names: Name in the tree -> name in the file.
        optional: Names in the tree that the file may lack.
        aliases: Name in the tree -> its other names there, of tensors that are tied.
    """
    others = aliases or {}
    if names is not None:
        where, scope = {name: [names(each) for each in (name, *others.get(name, ()))] for name in wanted}, ""
    else:
        where, scope = _by_rule(wanted, has, others)
    found: dict[str, str] = {}
    unlike: dict[str, tuple[Shape, Shape]] = {}
    used: set[str] = set()
    for name, candidates in where.items():
        here = [each for each in candidates if each in has]
        used.update(here)
        if here and has[here[0]] == wanted[name]:
            found[name] = here[0]
        elif here:
            unlike[name] = wanted[name], has[here[0]]
    missing = tuple(name for name in wanted if name not in found and name not in unlike and name not in optional)
    unexpected = tuple(sorted(name for name in has if name not in used and name.startswith(scope)))
    return Fit(found=found, missing=missing, unexpected=unexpected, unlike=unlike)


def _by_rule(
    wanted: Collection[str], has: Collection[str], aliases: Mapping[str, Collection[str]]
) -> tuple[dict[str, list[str]], str]:
    """Returns the names to look for, by the rule with most matches, and their common prefix."""
    scopes = ["", *sorted({name.split(sep)[0] + sep for name in has for sep in "./" if sep in name})]
    best: tuple[int, dict[str, list[str]], str] = (-1, {}, "")
    for scope in scopes:
        for dotted in (False, True):
            where = {
                name: [scope + (each.replace("/", ".") if dotted else each) for each in (name, *aliases.get(name, ()))]
                for name in wanted
            }
            hits = sum(any(each in has for each in candidates) for candidates in where.values())
            if hits > best[0]:
                best = hits, where, scope
    return best[1], best[2]


def _some(names: Collection[str]) -> str:
    first = list(names)[:MOST_NAMES]
    return ", ".join(first) + (", .." if len(names) > len(first) else "")
