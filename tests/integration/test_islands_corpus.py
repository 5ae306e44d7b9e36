"""Text and token arrays from real files."""

from __future__ import annotations

import numpy as np
import pytest

from broker.base.errors import ConfigError
from islands.tasks.corpus import load_corpus
from islands.tasks.vocabulary import train


def texts(arrays):
    return sorted(t for a in arrays for t in a.tobytes().split(b"\0") if t)


def test_the_default_corpus_is_the_interpreters_sources():
    corpus = load_corpus()
    assert corpus.vocabulary == 256
    assert sum(map(len, corpus.train)) > 4_000_000
    assert 0.01 < sum(map(len, corpus.held_out)) / sum(map(len, corpus.train)) < 0.15
    whole = corpus.train[0].tobytes() + corpus.held_out[0].tobytes()
    assert b"class ArgumentParser(" in whole


def test_files_are_held_out_whole_at_any_path_and_never_trained_on(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "deeper").mkdir(parents=True)
    for i in range(100):
        content = bytes([65 + i % 26]) * (100 + i)
        (tmp_path / "a" / f"{i:03}.txt").write_bytes(content)
        (tmp_path / "b" / "deeper" / f"other-{i:03}.txt").write_bytes(content)
    corpus = load_corpus([tmp_path / "a"])
    train, held_out = texts(corpus.train), texts(corpus.held_out)
    assert len(train) + len(held_out) == 100
    assert 1 <= len(held_out) <= 15
    assert not set(train) & set(held_out)
    assert texts(load_corpus([tmp_path / "b"]).held_out) == held_out


@pytest.mark.parametrize("name", ["tokens.npy", "tokens.bin"])
def test_a_token_array_is_mapped_and_its_tail_held_out(tmp_path, name):
    tokens = (np.arange(2000) % 700).astype("<u2")
    np.save(tmp_path / name, tokens) if name.endswith(".npy") else tokens.tofile(tmp_path / name)
    corpus = load_corpus([tmp_path / name])
    assert isinstance(corpus.train[0], np.memmap)
    assert np.array_equal(np.concatenate([*corpus.train, *corpus.held_out]), tokens)
    assert len(corpus.held_out[0]) == 100
    assert corpus.vocabulary == 704  # 700, rounded up to a multiple of 64


def test_a_vocabulary_that_is_given_is_kept_or_refused(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(1000, dtype=np.uint16))
    assert load_corpus([tmp_path / "tokens.npy"], vocabulary=50_257).vocabulary == 50_257
    with pytest.raises(ConfigError, match="needs at least 1000"):
        load_corpus([tmp_path / "tokens.npy"], vocabulary=999)


def npy(array):
    return lambda path: np.save(path, array)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("missing.txt", lambda path: None, "does not exist"),
        ("empty.txt", lambda path: path.touch(), "is empty"),
        ("binary.txt", lambda path: path.write_bytes(b"\0\1"), "is not text"),
        ("empty.npy", npy(np.zeros(0, np.uint16)), "is empty"),
        ("odd.bin", lambda path: path.write_bytes(b"\0" * 3), "cannot be opened as token ids"),
        ("empty.bin", lambda path: path.touch(), "cannot be opened as token ids"),
        ("float.npy", npy(np.zeros(9)), "holds float64"),
        ("square.npy", npy(np.zeros((3, 3), np.uint16)), r"of shape \(3, 3\)"),
        ("negative.npy", npy(np.array([1, -5])), "token id -5"),
        ("broken.npy", lambda path: path.write_bytes(b"no array"), "cannot be opened as token ids"),
    ],
)
def test_bad_data_is_refused_with_path_and_cure(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(ConfigError, match=message) as caught:
        load_corpus([tmp_path / name])
    assert str(tmp_path / name) in str(caught.value)


# --- installed packages ---------------------------------------------------------------------------------------


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Importable: ``soft`` (a package that fails when it is imported), ``lonely`` (a module), ``bare`` (no sources)."""
    for folder in ("soft/deeper", "soft/tests", "bare"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "soft" / "__init__.py").write_bytes(b"raise RuntimeError('imported')")
    (tmp_path / "soft" / "deeper" / "code.py").write_bytes(b"deep = 1")
    (tmp_path / "soft" / "deeper" / "README.txt").write_bytes(b"no source")
    (tmp_path / "soft" / "tests" / "test_code.py").write_bytes(b"a test")
    (tmp_path / "lonely.py").write_bytes(b"alone = True")
    (tmp_path / "bare" / "data.txt").write_bytes(b"no source")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_package_is_its_sources_without_tests_and_is_not_imported(packages):
    corpus = load_corpus(["python:soft", "python:lonely"])
    found = b"".join(a.tobytes() for a in (*corpus.train, *corpus.held_out))
    assert sorted(found.split(b"\0")) == [b"", b"alone = True", b"deep = 1", b"raise RuntimeError('imported')"]
    assert corpus.sources == "python:soft, python:lonely"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("python:no_such_package", "no package is imported as no_such_package here: pip install it"),
        ("python:", "must read python:stdlib, or python: and the name"),
        ("python:scipy.linalg", "without dots"),
        ("python:scipy==1.0", "must read python:stdlib"),
        ("python:sys", "sys has no Python sources"),
        ("python:bare", "holds no text"),
    ],
)
def test_a_package_that_is_no_data_is_refused_with_the_cure(packages, name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_corpus([name])
    assert caught.value.field == "data"
    assert caught.value.value == name


def test_the_digest_stands_for_the_tokens_and_not_for_where_they_lie(tmp_path):
    tokens = (np.arange(3000) % 200).astype(np.uint8)
    np.save(tmp_path / "a.npy", tokens)
    np.save(tmp_path / "b.npy", tokens.astype(np.int32))
    np.save(tmp_path / "c.npy", np.where(np.arange(3000) == 2999, 7, tokens))
    a, b, c = (load_corpus([tmp_path / f"{name}.npy"]).digest for name in "abc")
    assert len(a) == 32
    assert a == b != c  # c differs in the last token, which is held out


# --- pieces of several bytes ----------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "atoll"


def test_pieces_are_the_same_text_split_the_same_way_and_the_next_island_finds_them(cache, monkeypatch):
    by_byte, by_piece = load_corpus(["python:optax"]), load_corpus(["python:optax"], bpe=512)
    assert by_piece.vocabulary == 512
    pieces = train([by_byte.train[0].tobytes()], 512).pieces
    for of_bytes, of_pieces in ((by_byte.train, by_piece.train), (by_byte.held_out, by_piece.held_out)):
        assert b"".join(pieces[token] for token in of_pieces[0]) == of_bytes[0].tobytes()
    assert by_piece.bytes_per_token == len(by_byte.held_out[0]) / len(by_piece.held_out[0]) > 1.5
    assert by_byte.bytes_per_token == 1
    assert by_byte.digest != by_piece.digest
    assert sorted(file.name.split("-")[0] for file in cache.iterdir()) == ["lock", "tokens", "tokens", "vocabulary"]
    monkeypatch.setattr("islands.tasks.vocabulary._train", None)
    monkeypatch.setattr("islands.tasks.vocabulary.Vocabulary.encode", None)
    assert load_corpus(["python:optax"], bpe=512).digest == by_piece.digest
