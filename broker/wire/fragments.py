"""The manifest: the tensors of each fragment, the same for a whole run.

A *fragment* is a fixed set of tensors that is synchronised as a unit. Where several hosts train one island, each has
*regions* of these tensors. The manifest is computed once, from the tensors of the first island, by :func:`partition`,
and handed to every island that joins. Nobody but the island ever sees a model.

A tensor that no message could hold is *cut* along its first axis (:func:`cut`). To the run its *sections* are tensors
like any other. Islands and exports put them together again (:attr:`FragmentManifest.sections`). Their names say what
they are of: ``embed/table#0of3``, ``#1of3``, ``#2of3``.

Reference: Decoupled DiLoCo, https://arxiv.org/abs/2604.21428, appendix D.1 (balanced tensor fragmentation).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import msgpack

#: The end of a section's name: its number, and how many there are.
_SECTION = re.compile(r"#(0|[1-9][0-9]*)of([1-9][0-9]*)\Z")


class Kind(StrEnum):
    """The merge rule of a tensor, or that it is not merged (reference.md, section 4.4)."""

    RDA = "rda"  # radial-directional averaging, unit by unit; the mean where the run's recipe says so
    MEAN = "mean"  # plain weighted mean: embeddings, heads, routers, small or one-dimensional tensors
    FROZEN = "frozen"  # the same everywhere, from version 0 on; never merged
    LOCAL = "local"  # each island's own: never leaves it, in no fragment


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One named array of the model, as the wire and the aggregator know it.

    Attributes:
        name: Path in the parameter tree, such as ``layers/0/attention/query``.
        dtype: The island's own dtype, for the record; merging and reference values are float32.
        unit_axes: How many leading axes count independent units (layers or experts of a stacked tensor):
            RDA averages length and direction within each unit. 0: the tensor is one unit.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    unit_axes: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Section:
    """Some rows of the first axis of a whole tensor."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True)
class FragmentManifest:
    """The fragments of a run: ``fragments[p]`` lists the tensors of fragment ``p`` in wire order."""

    fragments: tuple[tuple[TensorSpec, ...], ...]

    @cached_property
    def digest(self) -> str:
        """The manifest's digest: 32 hex digits over names, shapes, dtypes, kinds and their order."""
        rows = [[[t.name, list(t.shape), t.dtype, str(t.kind), t.unit_axes] for t in f] for f in self.fragments]
        return hashlib.sha256(msgpack.packb(rows)).hexdigest()[:32]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements per fragment."""
        return tuple(sum(t.size for t in fragment) for fragment in self.fragments)

    @cached_property
    def moving(self) -> tuple[int, ...]:
        """Ids of the fragments that fall due; a frozen one stays at version 0."""
        return tuple(p for p, f in enumerate(self.fragments) if any(t.kind is not Kind.FROZEN for t in f))

    def __len__(self) -> int:
        return len(self.fragments)

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor by name; a cut tensor by its sections."""
        return {t.name: t for fragment in self.fragments for t in fragment}

    @cached_property
    def whole(self) -> Mapping[str, TensorSpec]:
        """Every whole tensor by name, without sections."""
        return {t.name: t for t in joined(self.tensors().values())}

    @cached_property
    def sections(self) -> Mapping[str, Section]:
        """Each section by name; empty if no tensor was cut."""
        sections = {name: t for name, t in self.tensors().items() if name not in self.whole}
        found, ends = {}, Counter[str]()
        for name, section in sorted(sections.items(), key=lambda item: _number(item[0])):
            tensor = tensor_of(name)
            start = ends[tensor]
            ends[tensor] += section.shape[0]
            found[name] = Section(tensor, start, ends[tensor])
        return found


def merged_by(tensors: tuple[TensorSpec, ...], rule: str) -> tuple[TensorSpec, ...]:
    """Returns tensors with their kinds under a merge rule: with ``mean`` none is ``rda``."""
    return tuple(replace(t, kind=Kind(rule)) if t.kind is Kind.RDA else t for t in tensors)


def cut(tensors: Iterable[TensorSpec], most: int) -> tuple[TensorSpec, ...]:
    """Returns tensors of at most ``most`` elements: larger ones cut into the fewest equal sections.

    A section is some rows of the first axis. Units that this axis counts stay whole, so that merging is what it was;
    without unit axes a section is a unit by itself. A tensor with rows that are too large stays as it is. Raises
    ValueError where a tensor has a name as only sections have.
    """
    found: list[TensorSpec] = []
    for tensor in tensors:
        if is_section(tensor.name):
            raise ValueError(f"tensor {tensor.name!r} is named like a section of a tensor that is cut: rename it")
        row = math.prod(tensor.shape[1:])
        if tensor.size <= most or not tensor.shape or row > most or tensor.kind is Kind.LOCAL:
            found.append(tensor)
            continue
        length = tensor.shape[0]
        count = -(-length // (most // row))
        ends = [length * i // count for i in range(count + 1)]
        for i in range(count):
            shape = (ends[i + 1] - ends[i], *tensor.shape[1:])
            found.append(replace(tensor, name=f"{tensor.name}#{i}of{count}", shape=shape))
    return tuple(found)


def joined(tensors: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Returns the whole tensors, the inverse of :func:`cut`; unrelated sections stay."""
    listed = list(tensors)
    families: dict[str, list[TensorSpec]] = {}
    for tensor in listed:
        if is_section(tensor.name):
            families.setdefault(tensor_of(tensor.name), []).append(tensor)
    names = {tensor.name for tensor in listed}
    wholes: dict[str, TensorSpec] = {}
    for name, sections in families.items():
        alike = {(section.shape[1:], section.dtype, section.kind, section.unit_axes) for section in sections}
        expected = {f"{name}#{i}of{len(sections)}" for i in range(len(sections))}
        fits = len(alike) == 1 and all(section.shape for section in sections) and name not in names
        if fits and {section.name for section in sections} == expected:
            rows = sum(section.shape[0] for section in sections)
            wholes[name] = replace(sections[0], name=name, shape=(rows, *sections[0].shape[1:]))
    left = (tensor for tensor in listed if not (is_section(tensor.name) and tensor_of(tensor.name) in wholes))
    return (*left, *wholes.values())


def is_section(name: str) -> bool:
    """Returns whether a name is a section's, such as ``embed/table#0of3``."""
    return _SECTION.search(name) is not None


def tensor_of(name: str) -> str:
    """Returns the tensor's name of a section's name; any other name unchanged."""
    return _SECTION.sub("", name)


def _number(name: str) -> int:
    found = _SECTION.search(name)
    return int(found[1]) if found else 0


def partition(tensors: tuple[TensorSpec, ...], num_fragments: int, most_frozen: int | None = None) -> FragmentManifest:
    """Returns the manifest that packs ``tensors`` into at most ``num_fragments`` fragments of equal size.

    Tensors that merge by ``mean`` and hold more than an equal share (the embedding of a small model) get a
    fragment of their own; the others are packed greedily, largest first, into the currently smallest
    fragment, whose largest is at most 4/3 of the best possible (Graham, 1969). Frozen tensors form one extra
    fragment at the end, or as many as have at most ``most_frozen`` elements each; local ones are in none. The result
    depends on the set of tensors alone, not on their order.

    Raises:
        ValueError: If two tensors share a name, nothing is left to synchronise, or ``num_fragments`` is below 1.
    """
    if num_fragments < 1:
        raise ValueError(f"num_fragments is {num_fragments}, must be at least 1")
    ordered = sorted(tensors, key=lambda t: (-t.size, t.name))
    names = [t.name for t in ordered]
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise ValueError(f"tensor names must be unique, these are not: {', '.join(twice)}")
    moving = [t for t in ordered if t.kind in (Kind.RDA, Kind.MEAN)]
    frozen = [t for t in ordered if t.kind is Kind.FROZEN]
    if not any(t.size for t in moving):
        raise ValueError("no tensor is left to synchronise: every one is frozen, local or empty")
    fair_share = sum(t.size for t in moving) / num_fragments
    alone = [t for t in moving if t.kind is Kind.MEAN and t.size > fair_share][: num_fragments - 1]
    packed = [t for t in moving if t not in alone]
    bins: list[list[TensorSpec]] = [[] for _ in range(min(max(1, num_fragments - len(alone)), len(packed)))]
    filled = [0] * len(bins)
    for tensor in packed:
        smallest = filled.index(min(filled))
        bins[smallest].append(tensor)
        filled[smallest] += tensor.size
    fragments = [*map(tuple, bins), *((t,) for t in alone), *_filled(frozen, most_frozen)]
    return FragmentManifest(tuple(fragments))


def _filled(tensors: Iterable[TensorSpec], most: int | None) -> list[tuple[TensorSpec, ...]]:
    """Returns fragments filled in the order of the tensors, with up to ``most`` elements each."""
    fragments: list[list[TensorSpec]] = []
    held = 0
    for tensor in tensors:
        if not fragments or (most is not None and held + tensor.size > most):
            fragments.append([])
            held = 0
        fragments[-1].append(tensor)
        held += tensor.size
    return [tuple(each) for each in fragments]


def shard_of(fragment_id: int, shards: int) -> int:
    """Returns the shard that owns a fragment; shards take turns, so that all get fragments of every size."""
    return fragment_id % shards


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A box of a tensor: its first element and its lengths, per dimension.

    Row by row its elements keep the order that they have in the whole tensor: any range of the tensor meets one range
    of the region.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    def within(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the box is inside a tensor of this shape."""
        return len(self.start) == len(self.shape) == len(shape) and all(
            a + n <= length for a, n, length in zip(self.start, self.shape, shape, strict=True)
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        """Returns the index of the box in the whole array."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))


def whole(shape: tuple[int, ...]) -> Region:
    """Returns the region of a whole tensor."""
    return Region((0,) * len(shape), shape)


def flaw_in(regions: Sequence[Region], shape: tuple[int, ...]) -> str:
    """Returns why these regions do not cover the tensor, each element once; empty if they do."""
    for region in regions:
        if not region.within(shape):
            return f"a part at {list(region.start)} of shape {list(region.shape)} is not inside of {list(shape)}"
    filled = [region for region in regions if region.size]
    if sum(region.size for region in filled) != math.prod(shape):
        held = sum(region.size for region in filled)
        return f"the parts have {held} elements, the tensor has {math.prod(shape)}"
    # As many elements as the tensor has: they are all of it just if no two parts meet.
    ordered = sorted(filled)
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if one.start and other.start[0] >= one.start[0] + one.shape[0]:
                break  # sorted by their first row: nobody further on meets this one
            if _meet(one, other):
                return f"the parts at {list(one.start)} and {list(other.start)} have elements in common"
    return ""


def _meet(one: Region, other: Region) -> bool:
    sides = zip(one.start, one.shape, other.start, other.shape, strict=True)
    return all(a < c + m and c < a + n for a, n, c, m in sides)
