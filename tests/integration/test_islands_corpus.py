"""Text and token arrays from real files."""

from __future__ import annotations

import numpy as np
import pytest

from broker.wire.errors import ConfigError
from islands.tasks import corpus as corpora
from islands.tasks.corpus import load_corpus


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


def test_an_installed_package_is_data():
    corpus = load_corpus(["python:optax"])
    assert sum(map(len, corpus.train)) > 500_000
    assert b"def scale_by_adam(" in corpus.train[0].tobytes() + corpus.held_out[0].tobytes()


def test_the_standard_library_has_a_name():
    assert load_corpus(["python:stdlib"]).digest == load_corpus().digest


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


# --- the digest -----------------------------------------------------------------------------------------------


def test_the_digest_stands_for_the_tokens_and_not_for_where_they_lie(tmp_path):
    tokens = (np.arange(3000) % 200).astype(np.uint8)
    np.save(tmp_path / "a.npy", tokens)
    np.save(tmp_path / "b.npy", tokens.astype(np.int32))
    np.save(tmp_path / "c.npy", np.where(np.arange(3000) == 2999, 7, tokens))
    a, b, c = (load_corpus([tmp_path / f"{name}.npy"]).digest for name in "abc")
    assert len(a) == 32
    assert a == b != c  # c differs in the last token, which is held out


def test_the_digest_of_a_long_array_reads_some_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "SCANNED_TOKENS", 400)
    monkeypatch.setattr(corpora, "_HASHED_TOKENS", 100)
    digests = set()
    for change in (0, 1, 9_499):  # none, the first token and the last that is trained on
        tokens = np.zeros(10_000, np.uint8)
        tokens[change - 1] = change > 0
        np.save(tmp_path / f"{change}.npy", tokens)
        digests.add(load_corpus([tmp_path / f"{change}.npy"]).digest)
    assert len(digests) == 3


def test_the_digest_tells_what_is_held_out_from_what_is_trained_on(tmp_path):
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.full(100, ord(name), np.uint8))
    one, other = (load_corpus([tmp_path / f"{name}.npy" for name in order]).digest for order in ("ab", "ba"))
    assert one != other


# --- pieces of several bytes ----------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "atoll"


def test_pieces_are_the_same_text_split_the_same_way(cache):
    by_byte, by_piece = load_corpus(["python:optax"]), load_corpus(["python:optax"], bpe=1024)
    assert by_piece.vocabulary == by_piece.pieces.size == 1024
    for of_bytes, of_pieces in ((by_byte.train, by_piece.train), (by_byte.held_out, by_piece.held_out)):
        assert by_piece.pieces.decode(of_pieces[0]) == of_bytes[0].tobytes()
    assert by_piece.bytes_per_token == len(by_byte.held_out[0]) / len(by_piece.held_out[0]) > 2
    assert by_byte.bytes_per_token == 1
    assert by_byte.pieces is None
    assert by_byte.digest != by_piece.digest


def test_pieces_come_from_what_is_trained_on_alone(tmp_path, cache):
    letters = np.random.default_rng(0).integers(ord("a"), ord("h"), (200, 40, 5), np.uint8)
    for i, words in enumerate(letters):
        (tmp_path / f"{i}.txt").write_bytes(b"file %d\n" % i + b" ".join(word.tobytes() for word in words))
    before = load_corpus([tmp_path], bpe=512)
    held_out = before.pieces.decode(before.held_out[0]).split(b"\0")[:-1]
    assert held_out
    for text in held_out:
        (tmp_path / text.split()[1].decode()).with_suffix(".txt").unlink()
    # What is left is all trained on, so the hash must hold something out again: one file that it picks.
    (tmp_path / "999.txt").write_bytes(held_out[0])
    assert load_corpus([tmp_path], bpe=512).pieces.digest == before.pieces.digest


def test_pieces_are_found_in_the_cache_by_the_next_island(cache, monkeypatch):
    first = load_corpus(["python:optax"], bpe=512)
    assert sorted(file.name.split("-")[0] for file in cache.iterdir()) == ["lock", "tokens", "tokens", "vocabulary"]
    monkeypatch.setattr("islands.tasks.vocabulary._train", None)
    monkeypatch.setattr("islands.tasks.vocabulary.Vocabulary.encode", None)
    assert load_corpus(["python:optax"], bpe=512).digest == first.digest


def test_a_vocabulary_may_be_larger_than_its_pieces_but_not_smaller(cache):
    assert load_corpus(["python:optax"], bpe=512, vocabulary=600).vocabulary == 600
    with pytest.raises(ConfigError, match="vocabulary = 511: python:optax needs at least 512"):
        load_corpus(["python:optax"], bpe=512, vocabulary=511)


def test_arrays_have_their_ids_already(tmp_path, cache):
    np.save(tmp_path / "tokens.npy", np.arange(1000, dtype=np.uint16))
    with pytest.raises(ConfigError, match=r"bpe = 512: .* holds token arrays, whose ids are given: set bpe = 0"):
        load_corpus([tmp_path / "tokens.npy"], bpe=512)
    assert load_corpus([tmp_path / "tokens.npy"]).bytes_per_token == 0


def test_too_little_text_for_pieces_is_refused(tmp_path, cache):
    (tmp_path / "short.txt").write_text("short\n" * 50)
    with pytest.raises(ConfigError, match="bpe = 4096: 286 bytes of text have pairs for"):
        load_corpus([tmp_path], bpe=4096)
