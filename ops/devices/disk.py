"""Disks of simulated processes: real directories, where each change may be the last one, or fail.

While :class:`Disks` is entered, what a process of virtual time changes through :mod:`os` passes its :class:`Disk`: it
may die before any change, or find the disk full. When its machine loses power, what was not flushed may be gone: bytes
of a file behind its last flush, and the newest changes of a directory since its own.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from ops.virtual.loop import VirtualTime

#: Calls of :mod:`os` that change a disk.
CHANGES = ("open", "write", "fsync", "rename", "replace", "unlink", "ftruncate", "mkdir")


class Disk:
    """The directory of one machine.

    Args:
        virtual: For draws.
        name: Of the machine.
        path: Of the directory; it is made, and one for what power failures bring back beside it.

    Attributes:
        before: Told of each change, by its name in :mod:`os`, before it is made; may raise OSError, or
            :class:`ops.virtual.loop.Killed`.
        after: Told likewise when it is made.
    """

    def __init__(self, virtual: VirtualTime, name: str, path: Path) -> None:
        self._virtual, self._name = virtual, name
        self.path = path
        self._attic = path.with_name(path.name + ".attic")
        self.before: Callable[[str], None] = lambda _: None
        self.after: Callable[[str], None] = lambda _: None
        self._kept = 0
        self._undo: dict[str, list[Callable[[], None]]] = defaultdict(list)  # directory -> since its last flush
        self._flushed: dict[int, int] = {}  # inode of a file that was written to -> bytes at its last flush
        for each in (path, self._attic):
            each.mkdir(parents=True)

    def lose_power(self) -> None:
        """Takes back some of what was not flushed; the process must be dead."""
        for folder, undone in sorted(self._undo.items()):
            left = round(len(undone) * self._virtual.draw(self._name, f"lost in {Path(folder).name}"))
            for undo in reversed(undone[left:]):
                undo()
        for file in sorted(self.path.rglob("*")):
            found = file.stat()
            flushed = self._flushed.get(found.st_ino, found.st_size)
            if stat.S_ISREG(found.st_mode) and flushed < found.st_size:
                left = round(self._virtual.between(self._name, "torn", flushed, found.st_size))
                os.truncate(file, left)
        self._undo.clear()
        self._flushed.clear()

    def close_files(self) -> None:
        """Gives up what a dead process had open here, such as its lock; its numbers stay taken until the end."""
        with open(os.devnull, "rb") as nothing:
            for number in _open_below(f"{self.path}/"):
                os.dup2(nothing.fileno(), number, inheritable=False)

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], more: dict[str, Any]) -> Any:
        """Makes one change, unless something else happens."""
        if name == "open" and not args[1] & os.O_CREAT:
            return function(*args, **more)
        self.before(name)
        remember = getattr(self, f"_{name}", None)
        if remember is not None:
            remember(*args)
        result = function(*args, **more)
        if name == "fsync":
            self._fsync(args[0])
        self.after(name)
        return result

    # --- what would be undone ---

    def _open(self, path: Any, *_: Any) -> None:
        if not os.path.exists(path):
            self._made(path)

    def _mkdir(self, path: Any, *_: Any) -> None:
        if not os.path.exists(path):
            self._undo[os.path.dirname(path)].append(lambda: _removed(path))

    def _made(self, path: Any) -> None:
        self._undo[os.path.dirname(path)].append(lambda: Path(path).unlink(missing_ok=True))

    def _write(self, fd: int, *_: Any) -> None:
        found = os.fstat(fd)
        self._flushed.setdefault(found.st_ino, found.st_size)

    def _ftruncate(self, fd: int, size: int) -> None:
        ino = os.fstat(fd).st_ino
        self._flushed[ino] = min(size, self._flushed.get(ino, size))

    def _fsync(self, fd: int) -> None:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            self._undo.pop(os.readlink(f"/proc/self/fd/{fd}"), None)
        else:
            self._flushed.pop(found.st_ino, None)

    def _rename(self, source: Any, target: Any) -> None:
        before = self._put_by(target)

        def undo() -> None:
            if os.path.exists(target):
                os.rename(target, source)
            if before is not None:
                os.rename(before, target)

        self._undo[os.path.dirname(target)].append(undo)

    _replace = _rename

    def _unlink(self, path: Any, *_: Any) -> None:
        before = self._put_by(path)
        if before is not None:
            self._undo[os.path.dirname(path)].append(lambda: os.rename(before, path))

    def _put_by(self, path: Any) -> Path | None:
        """Keeps what is about to lose its name."""
        if not os.path.exists(path):
            return None
        self._kept += 1
        kept = self._attic / str(self._kept)
        os.link(path, kept)
        return kept


def _open_below(path: str) -> list[int]:
    """Returns the descriptors of this program whose files are below a path."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(path):
                found.append(int(number))
    return found


def _removed(path: Any) -> None:
    if os.path.isdir(path) and not os.listdir(path):
        os.rmdir(path)


class Disks:
    """The disks of all processes of a virtual time, by the process's name."""

    def __init__(self, virtual: VirtualTime) -> None:
        self._virtual = virtual
        self._disks: dict[str, Disk] = {}
        self._real: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Self:
        for name in CHANGES:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._watched(name, self._real[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._real.items():
            setattr(os, name, function)

    def add(self, name: str, path: Path) -> Disk:
        """Returns the disk of a new machine."""
        disk = self._disks[name] = Disk(self._virtual, name, path)
        return disk

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            running = self._virtual.running
            disk = None if running is None else self._disks.get(running.name)
            return function(*args, **more) if disk is None else disk.call(name, function, args, more)

        return call


def full() -> OSError:
    """Returns the error of a disk without room."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
