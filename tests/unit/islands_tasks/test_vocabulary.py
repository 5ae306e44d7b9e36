"""Byte-pair vocabularies: what goes in comes out, the same text makes the same pieces, and a cache that may break."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import ConfigError
from islands.tasks import vocabulary as vocabularies
from islands.tasks.vocabulary import remembered, train

ROOT = Path(__file__).resolve().parents[3]
SOURCES = Path(sysconfig.get_path("stdlib"), "asyncio")
TEXTS = [file.read_bytes() for file in sorted(SOURCES.glob("*.py"))]
PIECES = train(TEXTS, 1024)


def bytes_of(tokens):
    return b"".join(PIECES.pieces[token] for token in tokens)


# --- lossless -------------------------------------------------------------------------------------------------


@given(st.binary(max_size=2000))
def test_any_bytes_come_back_as_they_were(text):
    assert bytes_of(PIECES.encode(text)) == text


def test_sources_come_back_as_they_were_and_take_fewer_tokens_than_bytes():
    text = b"\0".join(TEXTS)
    tokens = PIECES.encode(text)
    assert tokens.dtype == np.uint16
    assert tokens.ndim == 1
    assert 0 < tokens.min() <= tokens.max() < PIECES.size == 1024
    assert bytes_of(tokens) == text
    assert len(text) > 2.5 * len(tokens)


def test_text_may_be_cut_after_any_newline():
    text = b"".join(TEXTS)
    by_line = np.concatenate([PIECES.encode(line) for line in text.splitlines(keepends=True)])
    assert np.array_equal(PIECES.encode(text), by_line)


# --- training -------------------------------------------------------------------------------------------------


def test_long_text_is_sampled_all_over(monkeypatch):
    monkeypatch.setattr(vocabularies, "SAMPLE_BYTES", 2**19)
    start, end = (b"".join(b"%s%d " % (word, i % 7) for i in range(30_000)) for word in (b"beginning", b"conclusion"))
    found = train([start, *TEXTS, end], 600).pieces
    assert b" beginning" in found
    assert b" conclusion" in found


@pytest.mark.parametrize("text", [b"", b"too little text\n", b"ab" * 5000])
def test_text_with_too_few_pairs_is_refused_with_the_number_it_has(text):
    with pytest.raises(ConfigError, match=r"bpe = 4096"):
        train([text], 4096)


# --- on disk --------------------------------------------------------------------------------------------------


def builder():
    return Mock(return_value=b"content")


def test_what_was_built_is_remembered(tmp_path):
    build = builder()
    assert [remembered(tmp_path / "deep" / "er", "vocabulary-1", build) for _ in range(3)] == [b"content"] * 3
    assert build.call_count == 1
    assert remembered(None, "vocabulary-1", build) == b"content"
    assert build.call_count == 2


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:20] + b"!" + b[21:]])
def test_a_damaged_file_is_built_again(tmp_path, damage):
    build = builder()
    remembered(tmp_path, "tokens-1", build)
    path = tmp_path / "tokens-1"
    path.write_bytes(damage(path.read_bytes()))
    assert remembered(tmp_path, "tokens-1", build) == remembered(tmp_path, "tokens-1", build) == b"content"
    assert build.call_count == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lock", "tokens-1"]


def test_a_folder_that_cannot_be_used_costs_only_time(tmp_path):
    (tmp_path / "file").write_bytes(b"in the way")
    build = builder()
    assert remembered(tmp_path / "file", "tokens-1", build) == b"content"
    assert build.call_count == 1


def test_what_fails_to_be_built_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError):
        remembered(tmp_path, "tokens-1", Mock(side_effect=ConfigError("bpe", 1, "no")))
    assert remembered(tmp_path, "tokens-1", builder()) == b"content"


def test_only_the_files_used_last_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabularies, "_CACHED_FILES", 2)
    (tmp_path / "another's").write_bytes(b"stays")
    for number in range(4):
        remembered(tmp_path, f"tokens-{number}", builder())
    assert len(list(tmp_path.glob("tokens-*"))) == 2
    assert (tmp_path / "tokens-3").exists()
    assert (tmp_path / "another's").exists()


def test_four_processes_that_start_together_build_once(tmp_path):
    program = (
        "import sys; from pathlib import Path; from islands.tasks.vocabulary import remembered\n"
        "def build():\n"
        "    print('built', flush=True)\n"
        "    return bytes(10**6)\n"
        "assert remembered(Path(sys.argv[1]), 'tokens-1', build) == bytes(10**6)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert "".join(process.communicate(timeout=60)[0] for process in started) == "built\n"
    assert [process.returncode for process in started] == [0] * 4


def test_a_vocabulary_read_back_is_the_one_that_was_trained(tmp_path):
    first, second = (train(TEXTS, 1024, cache=tmp_path) for _ in range(2))
    assert len(list(tmp_path.glob("vocabulary-1024-*"))) == 1
    assert first.digest == second.digest == PIECES.digest
