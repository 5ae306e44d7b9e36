"""``python3 -m tests.frozen``: makes a frozen set from a commit, and compares one with this tree."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Returns 0 if the set was made, or is what this tree makes of it; 1 if not, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.frozen", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="make a set")
    make.add_argument("--commit", metavar="NAME", help="with the code of a commit, in a worktree (default: this tree)")
    make.add_argument("--to", required=True, type=Path, metavar="DIR", help="a new folder")
    make.add_argument("--small", action="store_true", help="what the repository keeps in tests/frozen/set")
    compare = commands.add_parser("compare", help="compare a set with this tree, and show what differs")
    compare.add_argument("set", type=Path, metavar="DIR", help="what make has made")
    compare.add_argument("words", nargs="*", metavar="WORD", help="only items with one of these words in their names")
    compare.add_argument("--strict", action="store_true", help="fail for help that differs, too")
    args = parser.parse_args()
    os.environ |= {"COLUMNS": "100", "JAX_PLATFORMS": "cpu", "ATOLL_NO_VENV": "1"}
    if args.command == "make" and args.to.exists():
        parser.error(f"--to {args.to} exists: name a new folder, so that no file of another set stays")
    if args.command == "make" and args.commit:
        return _make_elsewhere(args.commit, args.to.absolute(), ["--small"] if args.small else [])
    from tests.frozen import comparing, making  # here: the worktree has its own

    if args.command == "make":
        making.make(args.to, small=args.small)
        return 0
    return 0 if comparing.compare(args.set, args.words, strict=args.strict) else 1


def _make_elsewhere(commit: str, to: Path, flags: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="frozen-tree-") as made:
        tree, git = Path(made) / "tree", ["git", "-C", str(ROOT), "worktree"]
        if subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=False).returncode:
            return 2
        try:
            if not (tree / "tests" / "frozen").exists():
                print(f"--commit {commit} has no tests/frozen: the code that is guarded makes its set", file=sys.stderr)
                return 2
            command = [sys.executable, "-m", "tests.frozen", "make", "--to", str(to), *flags]
            return subprocess.run(command, cwd=tree, check=False).returncode
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


if __name__ == "__main__":
    sys.exit(main())
