"""The pulse of an island: every step once, across lives, whoever reads and whenever."""

import os

import pytest

from broker.base.errors import ConfigError
from islands.session import pulse
from islands.session.pulse import CAPACITY, Pulse, read_pulse


def test_every_step_is_read_once(tmp_path):
    path = tmp_path / "chaos" / "a.pulse"
    writer = Pulse(path)
    assert read_pulse(path) == (0, [])
    writer.beat()
    writer.beat()
    count, beats = read_pulse(path)
    assert (count, len(beats)) == (2, 2)
    assert beats[0].at_s <= beats[1].at_s
    assert {beat.pid for beat in beats} == {os.getpid()}
    writer.beat()
    assert read_pulse(path, 2)[1][0].at_s >= beats[1].at_s
    assert read_pulse(path, 3) == (3, [])


def test_who_reads_too_late_gets_what_is_left(tmp_path):
    path = tmp_path / "a.pulse"
    writer = Pulse(path)
    for _ in range(CAPACITY + 10):
        writer.beat()
    count, beats = read_pulse(path)
    assert (count, len(beats)) == (CAPACITY + 10, CAPACITY - 1)
    assert [beat.at_s for beat in beats] == sorted(beat.at_s for beat in beats)


def test_what_is_no_pulse_has_no_beats(tmp_path):
    assert read_pulse(tmp_path / "none") == (0, [])
    (tmp_path / "half").write_bytes(pulse.MAGIC)
    assert read_pulse(tmp_path / "half", 5) == (5, [])


def test_another_file_is_not_written_into(tmp_path):
    other = tmp_path / "model.bin"
    other.write_bytes(bytes(200_000))
    with pytest.raises(ConfigError, match="is another file"):
        Pulse(other)
    assert other.read_bytes() == bytes(200_000)
    with pytest.raises(ConfigError, match="cannot be written"):
        Pulse(tmp_path)
