"""``python3 -m tests.mutants``: tries every mutant, and lists those that no test notices."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.checking import ROOT, Copy, Outcome, Verdict
from tests.mutants.every_guard import MUTANTS
from tests.mutants.mutant import Mutant, Outdated


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if every mutant was noticed by every test that it names, else 1."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants with one of these words in their sentence or file")
    parser.add_argument("--list", action="store_true", help="only print the table: invariant, guard, tests")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at a time, each in a copy of its own (2)")
    args = parser.parse_args(argv)
    chosen = [m for m in MUTANTS if not args.words or any(word in f"{m.file} {m.what}" for word in args.words)]
    if not chosen:
        print("no mutant has any of these words", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(_row(mutant) for mutant in chosen))
        return 0
    try:
        for mutant in MUTANTS:
            mutant.edited((ROOT / mutant.file).read_text())
            mutant.check_tests(ROOT)
    except Outdated as err:
        print(f"the list of mutants is out of date: {err}", file=sys.stderr)
        return 1
    bad, began_s = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as made, ThreadPoolExecutor(args.jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for job in range(args.jobs):
            directory = Path(made) / str(job)
            directory.mkdir()
            copies.put(Copy(directory))

        with_nothing_broken = copies.get()
        failing = with_nothing_broken.failing(test for mutant in chosen for test in mutant.tests)
        copies.put(with_nothing_broken)
        if failing:
            print(f"these tests fail with nothing broken, and so can notice nothing:\n{failing}", file=sys.stderr)
            chosen, bad = [], 1

        def verdict(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                return copy.try_one(mutant)
            finally:
                copies.put(copy)

        for number, (mutant, found) in enumerate(zip(chosen, pool.map(verdict, chosen), strict=True), start=1):
            at = f"{time.monotonic() - began_s:5.0f} s  {number:3} of {len(chosen)}"
            print(
                f"{at}  {found.outcome:8}  {mutant.invariant:2}  {mutant.what}",
                flush=True,
            )
            if found.outcome is not Outcome.NOTICED:
                bad += 1
                print(f"        {mutant.file}\n        {found.said}", flush=True)
        while not copies.empty():
            copies.get().close()
    if chosen:
        print(f"{len(chosen) - bad} of {len(chosen)} mutants were noticed" + (f", {bad} were NOT" if bad else ""))
    return 1 if bad else 0


def _row(mutant: Mutant) -> str:
    lines = [f"{mutant.invariant:2}  {mutant.what}", f"guard: {mutant.file}::{mutant.name}"]
    return "\n      ".join(lines + [f"test:  {test}" for test in mutant.tests])


if __name__ == "__main__":
    sys.exit(main())
