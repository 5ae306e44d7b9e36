"""Wheels of this program in folders of their own: of this tree, of the last release, of trees that were changed.

A wheel is built by hatchling and installed by uv, both without a network. A process that has such a folder first on its
path runs that release, with the dependencies of this environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "broker", "islands", "aggregator", "ops")
#: A wheel of the last release, where somebody has one; else its tag is built.
LAST_WHEEL = "ATOLL_LAST_WHEEL"


def version_of(tree: Path) -> str:
    """Returns the version that a tree declares."""
    found = re.search(r'^version = "(.*)"$', (tree / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found.group(1)


def minor(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version."""
    first, second = version.split(".")[:2]
    return int(first), int(second)


def last_tag() -> str | None:
    """Returns the tag of the newest release of an earlier minor version than this tree; None before there is one."""
    command = ["git", "tag", "--list", "v*"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    tags = {tag: minor(tag[1:]) for tag in listed.split() if re.fullmatch(r"v\d+\.\d+\.\d+", tag)}
    earlier = [tag for tag, number in tags.items() if number < minor(version_of(ROOT))]
    return max(earlier, key=lambda tag: tuple(map(int, tag[1:].split("."))), default=None)


def copied_tree(folder: Path, tag: str | None = None) -> Path:
    """Returns a copy of what a wheel is built from: this tree, or that of a tag."""
    folder.mkdir(parents=True)
    if tag is not None:
        archive = subprocess.run(["git", "archive", tag], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", os.fspath(folder)], input=archive, check=True)
        return folder
    for name in BUILT_FROM:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def changed(tree: Path, path: str, pattern: str, text: str) -> None:
    """Replaces the one place in a file of a tree."""
    file = tree / path
    replaced, times = re.subn(pattern, text, file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert times == 1, (path, pattern)
    file.write_text(replaced, encoding="utf-8")


def built(tree: Path, *, targets: tuple[str, ...] = ("wheel",)) -> list[Path]:
    """Builds a tree and returns what came of it."""
    wanted = [word for target in targets for word in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", *wanted]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=50)
    return sorted((tree / "dist").iterdir())


def installed(wheel: Path, folder: Path) -> Path:
    """Installs a wheel alone into a folder, and returns it."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--target", os.fspath(folder)]
    command += ["--no-deps", "--offline", "--no-index", os.fspath(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=50)
    return folder
