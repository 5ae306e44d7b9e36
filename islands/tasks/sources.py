"""Batches of an island's share, from common data sources: :func:`batches`.

A *sized* source has a length and examples by number: a list, an array, ``datasets.Dataset``, a data source or
``MapDataset`` of Grain. Any example of it is at hand, and each epoch has an order of its own.

A *stream* is read from its beginning, which can be done as often as is needed: an object that can be looped over
again (``datasets.IterableDataset``, ``IterDataset`` of Grain, a ``DataLoader``), or a function that returns an
iterator. Its order is its own, and must be the same each time, on all islands. Every island reads all of it and keeps
what is its own: of one that shuffles by itself some examples would be trained twice and others never. Its beginning is
read twice, and a warning says where that differs.

Which examples a batch holds is arithmetic on the share (:mod:`islands.tasks.data`), so a pass over all islands deals
each example once, and an island that comes back continues exactly at the share's cursor. Neither library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from broker.base.errors import ConfigError
from broker.process import logs
from broker.wire.messages import OWN_PASS
from islands.interface import arguments
from islands.protocol.data_shares import DataShare
from islands.tasks.data import sequence_numbers, shuffled

log = logs.get(__name__)

Example = Any
Batch = Any
Numbers = npt.NDArray[np.int64]

#: Examples at the beginning of a stream that are read twice.
LOOKED_AT = 4
#: Samplers of torch that draw an order.
_RANDOM_SAMPLERS: Final = {"RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler"}
_AGAIN: Final = "give the function that makes it, which is called again for each epoch: batches(lambda: ..., island)"
_NO_SOURCE: Final = (
    "must have a length and examples by number (__len__, __getitem__), or begin anew each time that it is looped over"
    " (__iter__), or be a function that returns an iterator"
)


class HasShare(Protocol):
    """The interface of an island that :func:`batches` uses: its share of the data, and the end of the run."""

    @property
    def share(self) -> DataShare:
        """The island's part of the data."""

    @property
    def done(self) -> bool:
        """True once the run needs no more steps."""


def batches(
    source: Any,
    island: HasShare | DataShare,
    *,
    batch: int | None,
    shuffle: bool = True,
    collate: Callable[[list[Example]], Batch] | None = None,
    own: bool = False,
) -> Iterator[Batch]:
    """Yields this island's batches, one for each inner step, until the run is done.

    Data that end before the run does begin anew: the log says so once for each epoch.

    Args:
        source: Sized, or a stream: see :mod:`islands.tasks.sources`. The same on all islands, unless it is ``own``.
        island: From :func:`islands.join`; or its share alone, as a task has it: then the batches never end.
        batch: Examples in a batch, always as many; None: what the source holds are batches already.
        shuffle: Deals a sized source in another order in each epoch, by the run's seed. A stream keeps its order.
        collate: Examples -> batch. None: arrays are stacked, within dicts and tuples; lists are arrays. Not for
            ``batch=None``.
        own: The source is this island's alone, and others have other ones: it trains all of it, epoch by epoch.

    Raises:
        ConfigError: ``source`` cannot begin again, shuffles by itself, or is nothing of this kind; or, from a batch on,
            the source holds no example, or none under one of its numbers, a stream is shorter than it was, or examples
            differ in shape.
    """
    if batch is not None:
        batch = arguments.whole(
            "batch", batch, "must be examples per batch, at least 1; None: they are batches", least=1
        )
    elif collate is not None:
        raise ConfigError("collate", collate, "makes a batch of examples: say how many, batch=32, or leave it out")
    share = island if isinstance(island, DataShare) else island.share
    examples = _reader(source, shuffle)

    def of_share() -> Iterator[Batch]:
        while isinstance(island, DataShare) or not island.done:
            number = share.own
            index, count, cursor, seed = share.take()
            if own:
                index, count, cursor = 0, 1, number
            numbers = sequence_numbers(cursor, index, count, batch=batch or 1)
            found = examples.read(numbers, seed, cursor >= OWN_PASS)
            yield found[0] if batch is None else (collate or stacked)(found)

    return of_share()


def stacked(examples: Sequence[Example]) -> Batch:
    """Returns examples stacked into one batch, also within dicts and tuples.

    Raises:
        ConfigError: They differ in shape, or in what they hold.
    """
    first = examples[0]
    try:
        if isinstance(first, Mapping):
            return {key: stacked([each[key] for each in examples]) for key in first}
        if isinstance(first, tuple):
            columns = [stacked(column) for column in zip(*examples, strict=True)]
            return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
        return np.stack([np.asarray(each) for each in examples])
    except (ValueError, KeyError, TypeError) as err:
        cure = f"examples of one batch differ ({err}): pad them to one shape, or say collate=, examples -> batch"
        raise ConfigError("source", type(first).__name__, cure) from err


def _reader(source: Any, shuffle: bool) -> _Sized | _Stream:
    kind = type(source).__name__
    if isinstance(source, Iterator):
        raise ConfigError("source", kind, f"is an iterator, which cannot begin again: {_AGAIN}")
    if isinstance(source, str | bytes):
        raise ConfigError(
            "source", kind, f"is text, and no source of examples: open what it names; a source {_NO_SOURCE}"
        )
    if isinstance(source, Mapping):
        name = next(iter(source), "train")
        cure = f'is a mapping: of splits, name one: source["{name}"]; of columns, give datasets.Dataset.from_dict(...)'
        raise ConfigError("source", kind, cure)
    if isinstance(source, tuple):
        raise ConfigError("source", kind, "is a tuple: of columns, give list(zip(x, y)); of examples, a list")
    if hasattr(source, "iloc"):
        cure = "is of pandas, where source[5] is no row: give datasets.Dataset.from_pandas(frame), or frame.to_numpy()"
        raise ConfigError("source", kind, cure)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return _Sized(source, shuffle)
    samplers = (getattr(each, "sampler", None) for each in (source, getattr(source, "batch_sampler", None)))
    sampler = next((type(each).__name__ for each in samplers if type(each).__name__ in _RANDOM_SAMPLERS), "")
    if sampler:
        cure = "each island would see another order, some examples twice and others never: give what it loads,"
        cure += " batches(loader.dataset, island, batch=32), which is dealt in another order in each epoch"
        raise ConfigError("source", kind, f"shuffles by itself ({sampler}): {cure}")
    if isinstance(source, type) or not (isinstance(source, Iterable) or callable(source)):
        raise ConfigError("source", kind, _NO_SOURCE)
    return _Stream(source)


class _Epochs:
    """Announces each new epoch once, except the one in which an island starts."""

    def __init__(self) -> None:
        self._highest: int | None = None

    def reached(self, epoch: int, size: int, detail: str) -> None:
        if self._highest is not None and epoch > self._highest:
            log.info("data.epoch", epoch=epoch, examples=size, detail=detail)
        self._highest = max(epoch, self._highest or 0)


class _Sized:
    """A source with random access: numbers run on over epochs, and each epoch has its own order."""

    def __init__(self, source: Any, shuffle: bool) -> None:
        self._source, self._shuffle, self._size = source, shuffle, len(source)
        if not self._size:
            raise ConfigError("source", type(source).__name__, "holds no example: give one that has some")
        self._epochs = _Epochs()

    def read(self, numbers: Numbers, seed: int, own_pass: bool) -> list[Example]:
        if not own_pass:
            order = "in another order" if self._shuffle else "in the same order"
            self._epochs.reached(int(numbers[-1]) // self._size, self._size, f"the data are dealt again, {order}")
        at = shuffled(numbers, self._size, seed=seed) if self._shuffle else numbers % self._size
        if hasattr(self._source, "__getitems__"):  # datasets, and what torch calls so: all with one look
            return list(self._source.__getitems__(at.tolist()))
        found = [self._at(i) for i in at.tolist()]
        if any(each is None for each in found):  # what a filter of Grain leaves of a MapDataset
            cure = "has no example under some of its numbers (None): filter it before, or give source.to_iter_dataset()"
            raise ConfigError("source", type(self._source).__name__, cure)
        return found

    def _at(self, number: int) -> Example:
        try:
            return self._source[number]
        except (LookupError, TypeError) as err:
            cure = f"has {self._size} examples by its length, and source[{number}] is none of them"
            cure += f" ({type(err).__name__}: {err}): give one whose [] takes the numbers from 0 on"
            raise ConfigError("source", type(self._source).__name__, cure) from err


def _alike(one: Any, other: Any) -> bool:
    """Returns whether two examples have the same bytes, also within containers; True if unknown."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    try:
        first, second = np.asarray(one), np.asarray(other)
    except Exception:  # noqa: BLE001 (an object of any library: nothing is known about it, and nothing is said)
        return True
    return first.dtype == object or (first.shape == second.shape and first.tobytes() == second.tobytes())


class _Stream:
    """A source that is read in order; examples between the requested ones are dropped.

    In a pass of its own an island waits for nothing: it goes through the stream once more, with an iterator that is
    kept for that, so that the place in the shared order is not lost.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._epochs = _Epochs()
        self._size: int | None = None  # known once the end was seen
        self._epoch, self._at = 0, 0  # the next example that the iterator yields
        self._iterator: Iterator[Example] | None = None
        self._own: Iterator[Example] | None = None
        self._last: Iterator[Example] | None = None  # that was begun

    def read(self, numbers: Numbers, seed: int, own_pass: bool) -> list[Example]:
        if self._last is None:
            self._look()
        if own_pass:
            return [self._next_own() for _ in numbers]
        return [self._example(number) for number in numbers.tolist()]

    def _example(self, number: int) -> Example:
        while True:
            epoch, at = (0, number) if self._size is None else divmod(number, self._size)
            if self._iterator is None or (epoch, at) < (self._epoch, self._at) or epoch > self._epoch:
                self._iterator, self._epoch, self._at = self._begun(epoch), epoch, 0
            for example in self._iterator:
                self._at += 1
                if self._at > at:
                    self._epochs.reached(epoch, self._size or 0, "the stream is read again from its beginning")
                    return example
            if not self._at:
                raise ConfigError("source", type(self._source).__name__, self._empty(epoch))
            if self._size is not None:
                cure = f"ended after {self._at} examples, and before after {self._size}: it must be the same each time"
                raise ConfigError("source", type(self._source).__name__, cure)
            self._size = self._at

    def _next_own(self) -> Example:
        for _ in range(2):
            if self._own is None:
                self._own = self._begun(self._epoch)
            for example in self._own:
                return example
            self._own = None
        raise ConfigError("source", type(self._source).__name__, self._empty(0))

    def _look(self) -> None:
        """Reads the beginning twice, and warns if it differs; other processes cannot be checked here."""
        beginning = list(islice(self._begun(0), LOOKED_AT))
        begun = self._begun(0)
        again = list(islice(begun, LOOKED_AT))
        self._iterator = chain(again, begun)
        if not _alike(beginning, again):
            detail = "its beginning, read twice, differs: unless examples are altered at random, it shuffles by itself,"
            detail += " and islands train some examples twice and others never; have it read in one order, or give"
            detail += " what has a length and examples by number, which is shuffled here"
            log.warning("data.order_differs", source=type(self._source).__name__, detail=detail)

    def _begun(self, epoch: int) -> Iterator[Example]:
        """Returns the stream from its beginning, set to an epoch if it knows epochs."""
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        begun = iter(self._source if isinstance(self._source, Iterable) else self._source())
        if begun is self._last:
            cure = f"continues and does not begin again: {_AGAIN}; of torch's DataLoader persistent_workers=False"
            raise ConfigError("source", type(self._source).__name__, cure)
        self._last = begun
        return begun

    def _empty(self, epoch: int) -> str:
        if epoch or self._size:
            return f"holds nothing the second time that it is read: {_AGAIN}"
        return "holds no example: give one that has some"
