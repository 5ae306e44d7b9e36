"""Splits a parameter tree into named tensors with kind and merge unit.

Kinds by default, first match first:

    local    integers, booleans, random keys, empty arrays, and statistics of normalisation
    mean     embeddings, output heads and routers; units of fewer than two dimensions or 1,024 elements
    rda      everything else

A unit is one tensor, or one layer or expert of a stacked tensor: under a component ``layers`` or ``blocks`` that is not
followed by an index, all tensors share a leading axis of layers; under ``experts`` they share an axis of experts
after it. Regular expressions over names override either; names are those of :mod:`islands.arrays.tree`. An array of
anything but real numbers is refused: nothing is left out of synchronisation in silence.

Reference: Decoupled DiLoCo, https://arxiv.org/abs/2604.21428, appendix D.2 (radial-directional averaging).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from broker.base.errors import ConfigError
from broker.wire.fragments import Kind, TensorSpec, is_section
from islands.arrays.tree import MIXED, TORCH, Tree, flatten, is_of_torch
from islands.interface import arguments

#: A kind for the join only: local, read from a model on every island's disk, and never trained.
OF_BASE: Final = "base"
#: Elements of a unit below which length and direction say little, and the mean is as good.
SMALLEST_RDA_ELEMENTS: Final = 1024

#: Names of other frameworks have dots where ours have slashes: ``transformer.wte.weight``, ``bn1.running_mean``.
_MEAN_BY_NAME: Final = re.compile(r"embed|(^|[/.])(wte|wpe|router|logits|(lm_|output_)?head)([/.]|$)", re.IGNORECASE)
#: Statistics of normalisation; those of a BatchNorm may be called just mean and var, beside its scale and bias. Flax
#: NNX ends each name with ``value``.
_LOCAL_BY_NAME: Final = re.compile(
    r"(^|[/.])(batch_stats|(running|moving)_(mean|var|avg|std)[^/.]*|num_batches_tracked|(mean|var)_ema)([/.]|$)"
    r"|(?i:(^|[/._])(batch|sync_?batch)_?norm[^/.]*|(^|[/.])bn[^/.]*)[/.](mean|var)([/.]value)?$"
)
_SEPARATOR: Final = re.compile(r"[/.]")
_NO_NUMBERS: Final = (
    "no such values are merged: give arrays of real numbers (complex: real and imaginary parts apart), or leave it out"
    " of the parameters"
)


def tensor_specs(
    params: Tree, kinds: Mapping[str, str] | None = None, unit_axes: Mapping[str, int] | None = None
) -> tuple[TensorSpec, ...]:
    """Returns one entry per distinct array of ``params``, in tree order.

    Args:
        params: Any tree of arrays.
        kinds: Regular expression, searched in the name -> kind; the first that is found wins.
        unit_axes: Regular expression -> leading axes that count units.

    Raises:
        ConfigError: If a pattern is malformed or matches nothing, names no kind, or does not fit the tensor.
    """
    leaves = flatten(params)
    patterns = arguments.mapping("kinds", kinds)
    kind_of = _resolve("kinds", {p: _kind(p, k) for p, k in patterns.items()}, tuple(leaves))
    axes_of = _resolve("unit_axes", arguments.mapping("unit_axes", unit_axes), tuple(leaves))
    stacked = _stacked_axes({name: tuple(leaf.shape) for name, leaf in leaves.items()})
    specs = []
    for name, leaf in leaves.items():
        if is_of_torch(leaf):
            cure = TORCH if all(map(is_of_torch, leaves.values())) else MIXED
            raise ConfigError(f"params {name}".rstrip(), arguments.shown(leaf), cure)
        if is_section(name):
            raise ConfigError("params", name, "is named like a section of a tensor that a run has cut: rename it")
        shape, dtype = tuple(int(n) for n in leaf.shape), _dtype_name(leaf.dtype)
        cure = f"the tensor has the shape {shape}: must be a whole number, at most {len(shape)}"
        axes = arguments.whole(f"unit_axes of {name}", axes_of.get(name, stacked[name]), cure, most=len(shape))
        trainable, real = is_trainable(leaf), arguments.is_real(leaf.dtype)
        kind = kind_of.get(name)
        if not arguments.is_carried(leaf.dtype) or not (kind or real or arguments.is_key(leaf.dtype)):
            raise ConfigError(f"params {name}", arguments.shown(leaf), _NO_NUMBERS)
        if kind is None:
            kind = _default_kind(name, shape[axes:]) if trainable else Kind.LOCAL
        if kind in (Kind.RDA, Kind.MEAN) and not trainable:
            cure = "only floating-point arrays with elements can be averaged; make it local or frozen"
            raise ConfigError(f"kinds of {name}", str(kind), cure)
        if kind is Kind.FROZEN and not real:
            cure = f"{arguments.shown(leaf)} does not travel: only numbers can be frozen; make it local"
            raise ConfigError(f"kinds of {name}", str(kind), cure)
        spec = TensorSpec(name=name, shape=shape, dtype=dtype, kind=kind, unit_axes=axes)
        arguments.check_tensor(spec)
        specs.append(spec)
    return tuple(specs)


def describe_kinds(specs: tuple[TensorSpec, ...]) -> str:
    """Returns the text for the join: tensors, elements and names of each kind."""
    lines = []
    for kind in Kind:
        of_kind = [s for s in specs if s.kind is kind]
        if of_kind:
            total = sum(s.size for s in of_kind)
            lines.append(f"{kind}: {len(of_kind)} tensors, {total:,} elements: {_shortened([s.name for s in of_kind])}")
    return "\n".join(lines)


def is_trainable(leaf: Any) -> bool:
    """Returns whether an array has floating-point elements, at least one; bfloat16 and smaller count."""
    return arguments.is_floating(leaf.dtype) and int(math.prod(leaf.shape)) > 0


def _dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype without its byte order, the same on every island."""
    return str(dtype if getattr(dtype, "isnative", True) else dtype.newbyteorder("="))


def _default_kind(name: str, unit_shape: tuple[int, ...]) -> Kind:
    if _LOCAL_BY_NAME.search(name):
        return Kind.LOCAL
    small = len(unit_shape) < 2 or math.prod(unit_shape) < SMALLEST_RDA_ELEMENTS
    return Kind.MEAN if small or _MEAN_BY_NAME.search(name) else Kind.RDA


def _stacked_axes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns how many leading axes of each tensor count layers or experts, by the names in its path.

    The name alone is weak evidence: ``layers/weight`` may be one plain matrix. So an axis counts only if every
    tensor under the same prefix has it, with the same length, and there are at least two of them.
    """
    axes = dict.fromkeys(shapes, 0)
    for component in ("layers", "blocks", "experts"):
        groups: dict[str, list[str]] = {}
        for name in shapes:
            parts = _SEPARATOR.split(name)
            for i, part in enumerate(parts[:-1]):
                if part == component and not parts[i + 1].isdecimal():
                    groups.setdefault("/".join(parts[: i + 1]), []).append(name)
                    break
        for group in groups.values():
            depth = axes[group[0]]
            lengths = {shapes[n][depth] if len(shapes[n]) > depth else None for n in group}
            if len(group) > 1 and len(lengths) == 1 and None not in lengths:
                for name in group:
                    axes[name] = depth + 1
    return axes


def _resolve(field: str, patterns: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Returns name -> value of the first pattern that matches the name."""
    resolved: dict[str, Any] = {}
    for pattern, value in patterns.items():
        try:
            found = [name for name in names if re.search(pattern, name)]
        except re.error as err:
            raise ConfigError(field, pattern, f"is no regular expression ({err})") from err
        if not found:
            raise ConfigError(field, pattern, f"is found in no parameter name; there are: {_shortened(list(names))}")
        for name in found:
            resolved.setdefault(name, value)
    return resolved


def _kind(pattern: str, kind: str) -> Kind:
    if kind == OF_BASE:
        return Kind.LOCAL
    try:
        return Kind(kind)
    except (ValueError, TypeError) as err:
        cure = f"must be one of {', '.join((*Kind, OF_BASE))}"
        raise ConfigError(f"kinds[{pattern!r}]", arguments.shown(kind), cure) from err


def names_of_base(params: Tree, kinds: Mapping[str, str] | None) -> tuple[str, ...]:
    """Returns the names of the tensors that ``kinds`` calls ``base``, in tree order."""
    found = _resolve("kinds", arguments.mapping("kinds", kinds), tuple(flatten(params)))
    return tuple(name for name, kind in found.items() if kind == OF_BASE)


def _shortened(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
