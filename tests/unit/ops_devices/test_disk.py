"""Disks of virtual time: a file that is replaced is the old one or the new one, wherever its process dies."""

import os
from collections import Counter

import pytest

from aggregator.store.commit_file import write_all
from aggregator.store.replacing import TEMPORARY, replace
from broker.base.errors import Unavailable
from ops.devices.disk import Disks, full
from ops.virtual.loop import Killed, VirtualTime

OLD, NEW = b"old" * 1000, b"new" * 1000


class Machine:
    """One process with a disk, on which a file is replaced."""

    def __init__(self, virtual, disks, path):
        self.process = virtual.process("a")
        self.disk = disks.add("a", path / "disk")
        self.file = path / "disk" / "file"
        self.changes = Counter()
        self.dies_at = 0

    def replace(self, content):
        self.process.run(replace, self.file, lambda fd: write_all(fd, memoryview(content)))

    def before(self, change):
        self.changes[change] += 1
        if self.dies_at and self.changes.total() >= self.dies_at:
            raise Killed


@pytest.fixture
def machine(tmp_path):
    with VirtualTime(seed=1) as virtual, Disks(virtual) as disks:
        yield Machine(virtual, disks, tmp_path)


def test_a_replaced_file_is_what_a_directory_without_faults_would_hold(machine):
    machine.disk.before = machine.before
    machine.replace(OLD)
    machine.replace(NEW)
    assert machine.file.read_bytes() == NEW
    assert machine.changes == {"open": 2, "write": 2, "fsync": 4, "replace": 2}  # each time the file, then its name
    machine.disk.lose_power()
    assert machine.file.read_bytes() == NEW
    assert os.listdir(machine.disk.path) == ["file"]


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("change", range(1, 6))
def test_a_process_that_dies_while_it_replaces_a_file_leaves_the_old_one_or_the_new_one(machine, change, power):
    machine.replace(OLD)
    machine.disk.before, machine.dies_at = machine.before, change
    with pytest.raises(Killed):
        machine.replace(NEW)
    machine.disk.close_files()
    if power:
        machine.disk.lose_power()
    renamed = change == 5  # and not flushed
    assert machine.file.read_bytes() in [OLD] * (power or not renamed) + [NEW] * renamed
    left = set(os.listdir(machine.disk.path))
    assert left <= {"file", f"file{TEMPORARY}"}  # whoever is dead does not tidy up
    assert power or (f"file{TEMPORARY}" in left) == (1 < change < 5)


def test_bytes_that_were_not_flushed_may_be_gone(machine):
    def write():
        fd = os.open(machine.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(fd, OLD)
        os.fsync(fd)
        os.write(fd, NEW)
        os.close(fd)
        os.fsync(folder := os.open(machine.disk.path, os.O_RDONLY))
        os.close(folder)

    machine.process.run(write)
    machine.disk.lose_power()
    left = machine.file.read_bytes()
    assert left.startswith(OLD)
    assert (OLD + NEW).startswith(left)
    assert left != OLD + NEW  # with this seed


def test_a_full_disk_leaves_the_old_file(machine):
    machine.replace(OLD)

    def refuse(change):
        if change == "write":
            raise full()

    machine.disk.before = refuse
    with pytest.raises(Unavailable) as caught:
        machine.replace(NEW)
    assert caught.value.definite
    assert machine.file.read_bytes() == OLD
    assert os.listdir(machine.disk.path) == ["file"]
