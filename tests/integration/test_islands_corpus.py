"""Text and token arrays from real files."""

from __future__ import annotations

import numpy as np
import pytest

from broker.errors import ConfigError
from islands import corpus as corpora
from islands.corpus import load_corpus


def write_files(folder, count, size=100):
    for i in range(count):
        (folder / f"{i:03}.txt").write_bytes(bytes([65 + i % 26]) * (size + i))


def texts(arrays):
    return sorted(t for a in arrays for t in a.tobytes().split(b"\0") if t)


def test_the_default_corpus_is_the_interpreters_sources():
    corpus = load_corpus()
    assert corpus.vocabulary == 256
    assert sum(map(len, corpus.train)) > 4_000_000
    assert 0.01 < sum(map(len, corpus.held_out)) / sum(map(len, corpus.train)) < 0.15
    whole = corpus.train[0].tobytes() + corpus.held_out[0].tobytes()
    assert b"class ArgumentParser(" in whole


def test_files_are_held_out_whole_and_never_trained_on(tmp_path):
    write_files(tmp_path, 100)
    corpus = load_corpus([tmp_path])
    train, held_out = texts(corpus.train), texts(corpus.held_out)
    assert len(train) + len(held_out) == 100
    assert 1 <= len(held_out) <= 15
    assert not set(train) & set(held_out)


def test_a_held_out_file_is_held_out_at_any_path(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "deeper").mkdir(parents=True)
    write_files(tmp_path / "a", 60)
    for file in sorted((tmp_path / "a").iterdir()):
        (tmp_path / "b" / "deeper" / f"other-{file.name}").write_bytes(file.read_bytes())
    assert texts(load_corpus([tmp_path / "a"]).held_out) == texts(load_corpus([tmp_path / "b"]).held_out)


def test_of_one_file_the_tail_is_held_out(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"x" * 999)
    corpus = load_corpus([tmp_path / "one.txt"])
    assert [len(a) for a in (*corpus.train, *corpus.held_out)] == [950, 50]


def test_hidden_and_binary_files_and_caches_in_a_folder_are_passed_over(tmp_path):
    (tmp_path / "good.txt").write_bytes(b"good")
    (tmp_path / ".hidden").write_bytes(b"hidden")
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.txt").write_bytes(b"cached")
    assert texts(load_corpus([tmp_path]).train) == [b"good"]


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


def test_text_beside_an_array_needs_all_bytes(tmp_path):
    np.save(tmp_path / "tokens.npy", np.zeros(100, np.uint16))
    (tmp_path / "text.txt").write_bytes(b"x" * 100)
    assert load_corpus([tmp_path]).vocabulary == 256


def npy(**kwargs):
    return lambda path: np.save(path, **kwargs)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("missing.txt", lambda path: None, "does not exist"),
        ("empty.txt", lambda path: path.touch(), "is empty"),
        ("binary.txt", lambda path: path.write_bytes(b"\0\1"), "is not text"),
        ("empty.npy", npy(arr=np.zeros(0, np.uint16)), "is empty"),
        ("odd.bin", lambda path: path.write_bytes(b"\0" * 3), "cannot be opened as token ids"),
        ("empty.bin", lambda path: path.touch(), "cannot be opened as token ids"),
        ("float.npy", npy(arr=np.zeros(9)), "holds float64"),
        ("square.npy", npy(arr=np.zeros((3, 3), np.uint16)), r"of shape \(3, 3\)"),
        ("negative.npy", npy(arr=np.array([1, -5])), "token id -5"),
        ("broken.npy", lambda path: path.write_bytes(b"no array"), "cannot be opened as token ids"),
    ],
)
def test_bad_data_is_refused_with_path_and_cure(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(ConfigError, match=message) as caught:
        load_corpus([tmp_path / name])
    assert str(tmp_path / name) in str(caught.value)


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no text"):
        load_corpus([tmp_path])


def test_too_much_text_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "MAX_TEXT_BYTES", 1000)
    write_files(tmp_path, 20)
    with pytest.raises(ConfigError, match="make it a token array"):
        load_corpus([tmp_path])
