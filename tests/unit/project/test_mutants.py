"""The list of mutants is sound, and of a few of them, others with every change of the source, each is noticed."""

import random
from pathlib import Path

import pytest
import xxhash

from tests.mutants.checking import ROOT, Copy, Outcome
from tests.mutants.every_guard import MUTANTS
from tests.mutants.mutant import Mutant, Outdated

#: Mutants that the suite itself tries; ``python3 -m tests.mutants`` tries all.
TRIED = 3

SOURCES = sorted({mutant.file for mutant in MUTANTS})


@pytest.mark.parametrize("file", SOURCES)
def test_every_mutant_fits_the_source_and_names_tests_that_exist(file):
    text = (ROOT / file).read_text()
    for mutant in MUTANTS:
        if mutant.file == file:
            mutant.edited(text)
            mutant.check_tests(ROOT)


def test_every_mutant_says_something_else():
    sentences = [mutant.what for mutant in MUTANTS]
    assert len(set(sentences)) == len(sentences)


def test_every_invariant_has_its_mutants():
    assert {mutant.invariant for mutant in MUTANTS} == set(range(1, 11))


def test_a_mutant_whose_place_text_or_test_is_gone_is_an_error_that_names_it(tmp_path):
    mutant = Mutant(1, "it breaks", "x.py::A.f", "a = 1", "a = 2", "t.py::test_a")
    text = "a = 1\nclass A:\n    def f():\n        a = 1\n"
    assert mutant.edited(text) == "a = 1\nclass A:\n    def f():\n        a = 2\n"
    for text in ("def f(): a = 1\n", "class A:\n    def f(): a = 3\n", "class A:\n    def f(): a = 1; a = 1\n"):
        with pytest.raises(Outdated, match=r"x\.py"):
            mutant.edited(text)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/t.py").write_text("def test_b(): ...\n")
    with pytest.raises(Outdated, match="it breaks"):
        mutant.check_tests(tmp_path)


def test_a_few_mutants_are_noticed(tmp_path):
    seed = xxhash.xxh3_64_intdigest(b"".join(Path(ROOT / file).read_bytes() for file in SOURCES))
    quick = [m for m in MUTANTS if all(test.startswith("tests/unit/") for test in m.tests)]
    copy = Copy(tmp_path)
    try:
        for mutant in random.Random(seed).sample(quick, TRIED):
            verdict = copy.try_one(mutant)
            assert verdict.outcome is Outcome.NOTICED, f"{mutant.what} ({mutant.file}): {verdict.said}"
    finally:
        copy.close()
