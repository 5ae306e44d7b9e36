"""Data as people have them, dealt by the share: each example once per pass, and from the cursor on after a restart."""

import collections
import logging
import random
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import islands
from broker.base.errors import ConfigError
from broker.wire.messages import OWN_PASS, Block
from islands.protocol.data_shares import DataShare

Pair = collections.namedtuple("Pair", "x y")


class Columns:
    """Stands for ``datasets.Dataset``: rows are dicts, many with one look."""

    def __init__(self, size):
        self.size, self.looks = size, 0

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        raise AssertionError("one row after the other is slow")

    def __getitems__(self, keys):
        self.looks += 1
        return [{"number": key, "text": f"row {key}"} for key in keys]


class RandomAccess:
    """Stands for a ``RandomAccessDataSource`` of Grain."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        assert type(key) is int
        assert 0 <= key < self.size
        return key


class Streaming:
    """Stands for ``datasets.IterableDataset``: no length; another order in each epoch, if it shuffles."""

    def __init__(self, size, shuffles=False):
        self.size, self.shuffles, self.epoch, self.begun = size, shuffles, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.begun += 1
        order = list(range(self.size))
        if self.shuffles:
            np.random.default_rng(self.epoch).shuffle(order)
        return iter(order)


class RandomSampler:
    """Has the name of torch's."""


class Loader(SimpleNamespace):
    """Stands for a ``DataLoader`` of torch."""

    def __iter__(self):
        return iter(range(3))


class Columnwise:
    """Its length counts rows, and its [] takes names of columns."""

    def __len__(self):
        return 3

    def __getitem__(self, key):
        raise KeyError(key)


class Frame(Columnwise):
    """Stands for a frame of pandas."""

    iloc = None


class OneIterator:
    """Can be looped over, but only goes on."""

    def __init__(self, size):
        self.iterator = iter(range(size))

    def __iter__(self):
        return self.iterator


SOURCES = {
    "a list": lambda size: list(range(size)),
    "an array": np.arange,
    "random access": RandomAccess,
    "a stream": Streaming,
    "a shuffled stream": lambda size: Streaming(size, shuffles=True),
    "a function": lambda size: lambda: iter(range(size)),
}


def dealt(source, share, num, batch):
    return [np.asarray(each).tolist() for each in islice(islands.batches(source, share, batch=batch), num)]


@pytest.mark.parametrize("name", SOURCES)
@given(count=st.integers(1, 4), batch=st.integers(1, 4), steps=st.integers(1, 6), passes=st.integers(1, 3))
def test_every_example_is_dealt_once_per_pass_over_all_islands(name, count, batch, steps, passes):
    size = count * batch * steps
    by_step = [
        dealt(SOURCES[name](size), DataShare(index=index, count=count, seed=7), steps * passes, batch)
        for index in range(count)
    ]
    for number in range(passes):
        seen = [each for island in by_step for b in island[number * steps : (number + 1) * steps] for each in b]
        assert sorted(seen) == list(range(size))


@pytest.mark.parametrize("name", SOURCES)
@given(size=st.integers(1, 30), batch=st.integers(1, 5), cursor=st.integers(0, 30))
def test_an_island_that_comes_back_goes_on_where_its_share_stands(name, size, batch, cursor):
    whole = dealt(SOURCES[name](size), DataShare(index=1, count=3, seed=5), cursor + 3, batch)
    resumed = dealt(SOURCES[name](size), DataShare(index=1, count=3, seed=5, cursor=cursor), 3, batch)
    assert resumed == whole[cursor:]


@pytest.mark.parametrize("name", SOURCES)
def test_blocks_of_unequal_islands_hold_each_example_once(name):
    def island(*blocks):
        held = [Block(number=n + 1, from_batch=a, to_batch=b) for n, (a, b) in enumerate(blocks)]
        share = DataShare.of(held, seed=3, life=1)
        return dealt(SOURCES[name](40), share, sum(b - a for a, b in blocks), batch=4)

    seen = [*island((0, 2), (3, 7)), *island((2, 3), (7, 10))]
    assert sorted(each for b in seen for each in b) == list(range(40))


def test_a_stream_keeps_its_place_while_an_island_goes_through_a_pass_of_its_own():
    source, share = Streaming(100), DataShare(index=0, count=1)
    taken = islands.batches(source, share, batch=2)
    assert next(taken).tolist() == [0, 1]
    share.cursor = OWN_PASS
    assert [next(taken).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    share.cursor = 4
    assert next(taken).tolist() == [8, 9]
    share.cursor = OWN_PASS + 1_000_000
    assert next(taken).tolist() == [4, 5]
    assert source.begun == 3


def test_a_pass_of_ones_own_through_a_stream_begins_again_too():
    share = DataShare(index=0, count=1, cursor=OWN_PASS)
    assert dealt(Streaming(3), share, 2, batch=4) == [[0, 1, 2, 0], [1, 2, 0, 1]]


def test_a_share_that_goes_back_is_read_from_the_beginning_again():
    share = DataShare(index=0, count=1, cursor=9)
    taken = islands.batches(Streaming(100), share, batch=1)
    assert next(taken).tolist() == [9]
    share.cursor = 2
    assert next(taken).tolist() == [2]


@pytest.mark.parametrize("name", SOURCES)
def test_a_new_epoch_is_said_once(name, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "islands")
    monkeypatch.setattr(logging.getLogger("islands"), "propagate", True)  # whatever a test before has set up
    dealt(SOURCES[name](6), DataShare(index=0, count=1, cursor=1), 8, batch=2)  # epochs 0, 1 and 2
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "data.epoch epoch=1 examples=6" in said[0]
    assert "data.epoch epoch=2 examples=6" in said[1]


def test_each_epoch_of_a_sized_source_has_its_own_order_unless_it_is_told_not_to():
    first, second = dealt(list(range(50)), DataShare(index=0, count=1), 2, batch=50)
    assert first != second != list(range(50))
    plain = islands.batches(list(range(3)), DataShare(index=0, count=1), batch=2, shuffle=False)
    assert [next(plain).tolist() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]


def test_rows_are_stacked_by_column_with_one_look():
    batch = next(islands.batches(source := Columns(8), DataShare(index=0, count=1), batch=4))
    assert batch["number"].shape == (4,)
    assert batch["text"][0] == f"row {batch['number'][0]}"
    assert source.looks == 1


@pytest.mark.parametrize("kind", [tuple, Pair._make], ids=["tuple", "named"])
def test_tuples_stay_tuples_and_named_ones_named(kind):
    rows = [kind((np.ones((2, 3)), k)) for k in range(4)]
    batch = next(islands.batches(rows, DataShare(index=0, count=1), batch=4))
    assert type(batch) is type(rows[0])
    assert (batch[0].shape, batch[1].shape) == ((4, 2, 3), (4,))


def test_batches_can_be_made_by_a_function_or_be_what_the_source_holds():
    made = islands.batches(list("abcd"), DataShare(index=0, count=1), batch=3, shuffle=False, collate="".join)
    assert [next(made), next(made)] == ["abc", "dab"]
    ready = ["first", "second"]
    as_they_are = islands.batches(ready, DataShare(index=0, count=1), batch=None, shuffle=False)
    assert next(as_they_are) is ready[0]


def test_the_batches_of_an_island_end_with_its_run():
    class Ending(SimpleNamespace):
        done = property(lambda self: self.share.cursor == 5)

    island = Ending(share=DataShare(index=0, count=1))
    assert len(list(islands.batches([1, 2, 3], island, batch=1))) == island.share.cursor == 5


@pytest.mark.parametrize(
    ("source", "cure"),
    [
        (iter([1, 2]), r"cannot begin again.*batches\(lambda"),
        ((n for n in range(3)), r"cannot begin again.*batches\(lambda"),
        (3, "__len__, __getitem__.*__iter__.*function"),
        (Streaming, "__len__, __getitem__"),
        ({"train": [1]}, r'name one: source\["train"\]'),
        ("train.txt", "open what it names"),
        (([1], [2]), r"list\(zip\(x, y\)\)"),
        ([], "holds no example"),
        (Loader(sampler=RandomSampler()), r"shuffles by itself \(RandomSampler\).*batches\(loader.dataset"),
        (Loader(batch_sampler=SimpleNamespace(sampler=RandomSampler())), "shuffles by itself"),
        (Frame(), r"of pandas.*from_pandas\(frame\), or frame.to_numpy\(\)"),
    ],
)
def test_what_cannot_begin_again_or_is_no_source_is_refused_with_the_cure(source, cure):
    with pytest.raises(ConfigError, match=cure):
        islands.batches(source, DataShare(index=0, count=1), batch=1)


def shrinking(size):
    sizes = iter([size, size, size - 1, size - 2])  # the first two show that it begins again
    return lambda: iter(range(next(sizes)))


@pytest.mark.parametrize(
    ("source", "cure"),
    [
        (OneIterator(3), "does not begin again.*lambda"),
        (OneIterator(3).__iter__, "does not begin again.*lambda"),
        (lambda: iter([]), "holds no example"),
        (shrinking(3), "after 2 examples, and before after 3"),
        (Frame.__base__(), r"3 examples by its length, and source\[\d\] is none of them \(KeyError: \d\)"),
        ([None] * 3, r"to_iter_dataset\(\)"),
        ([np.ones(2), np.ones(3)], "collate="),
        ([{"a": 1}, {"b": 1}], "collate="),
    ],
)
def test_a_source_that_proves_not_to_be_one_is_refused_when_that_shows(source, cure):
    with pytest.raises(ConfigError, match=cure):
        dealt(source, DataShare(index=0, count=1), 4, batch=2)


def test_a_stream_that_shuffles_by_itself_is_told_once_and_one_with_an_order_is_not(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("islands"), "propagate", True)
    draw = random.Random(1)
    rows = [{"x": np.full(2, n, np.float32), "text": f"row {n}", "odd": object()} for n in range(64)]
    sources = {lambda: iter(rows): 0, lambda: iter(draw.sample(rows, 64)): 1, lambda: (x for x in shared): 1}
    shared = iter(rows)
    for source, times in sources.items():
        caplog.clear()
        taken = islands.batches(source, DataShare(index=0, count=1), batch=8, collate=list)
        assert all(len(next(taken)) == 8 for _ in range(3))
        assert [record.getMessage().split()[0] for record in caplog.records] == ["data.order_differs"] * times


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"batch": 1.5}, {"batch": None, "collate": list}])
def test_arguments_that_cannot_work_are_refused_at_once(wrong):
    with pytest.raises(ConfigError):
        islands.batches([1], DataShare(index=0, count=1), **wrong)


@pytest.mark.parametrize("name", SOURCES)
def test_of_a_source_of_its_own_an_island_trains_all_whatever_blocks_it_is_given(name):
    def trained(own, num):
        held = [Block(number=1, from_batch=3, to_batch=5), Block(number=2, from_batch=90, to_batch=99)]
        share = DataShare.of(held, seed=3, life=1, own=own)
        return [b.tolist() for b in islice(islands.batches(SOURCES[name](40), share, batch=4, own=True), num)]

    whole = trained(0, 10)
    assert sorted(each for b in whole for each in b) == list(range(40))
    assert trained(4, 6) == whole[4:], "a later life goes on where the last one was"


# --- the libraries themselves, where they are installed ---------------------------------------------------------------


@pytest.mark.filterwarnings("default")  # those of the libraries are theirs
def test_datasets_of_hugging_face_serve_in_both_styles():
    datasets = pytest.importorskip("datasets")
    columns = {"x": list(range(12)), "y": [[n, n] for n in range(12)]}
    # With a fingerprint of our own: to make one it pickles more than some releases of its dependencies let it.
    rows = datasets.Dataset(datasets.table.InMemoryTable.from_pydict(columns), fingerprint="columns")
    for source in (rows, rows.to_iterable_dataset()):
        taken = list(islice(islands.batches(source, DataShare(index=0, count=1), batch=4), 6))
        assert taken[0]["y"].shape == (4, 2)
        for epoch in (taken[:3], taken[3:]):
            assert sorted(np.concatenate([each["x"] for each in epoch]).tolist()) == list(range(12))


@pytest.mark.filterwarnings("default")  # those of the libraries are theirs
def test_grain_serves_in_both_styles():
    source = pytest.importorskip("grain").MapDataset.source(list(range(12)))
    for each in (source, source.to_iter_dataset()):
        taken = dealt(each, DataShare(index=0, count=1), 6, batch=4)
        for epoch in (taken[:3], taken[3:]):
            assert sorted(x for b in epoch for x in b) == list(range(12))
