"""The four-region drill's arithmetic: when packets pass a link, and when a curve comes down to a loss."""

import gzip
import json
import socket

import pytest

from benchmarks import output
from benchmarks.regions import __main__ as command
from benchmarks.regions.links import Core, Pipe, Shape
from benchmarks.regions.network import address

#: A megabyte per second, 40 ms one way, 100 kB wait at most.
SHAPE = Shape.of(round_trip_ms=80, mbit=8)


def packet(to, size=1000):
    """Returns an IPv4 packet of that size as far as a core reads it."""
    header = bytes([0x45]) + bytes(15) + socket.inet_aton(address(to))
    return header + bytes(size - len(header))


def test_the_shape_of_a_link_is_half_a_round_trip_its_rate_and_a_queue_of_a_tenth_of_a_second():
    assert (SHAPE.delay_s, SHAPE.bytes_per_s, SHAPE.queue_bytes) == (0.04, 1e6, 1e5)
    assert Shape.of(round_trip_ms=200, mbit=8).queue_bytes == 2e5


def test_a_pipe_passes_packets_at_its_rate_and_drops_what_finds_its_queue_full():
    pipe = Pipe(SHAPE)
    assert pipe.offer(1000, 5.0) == pytest.approx(5.001)
    assert pipe.offer(1000, 5.0) == pytest.approx(5.002)  # waits for the first
    assert pipe.offer(1000, 9.0) == pytest.approx(9.001)  # nothing is saved up while it is idle
    sent = [pipe.offer(1000, 20.0) for _ in range(200)]
    passed = [each for each in sent if each is not None]
    assert len(passed) == pytest.approx(101, abs=1)
    assert pipe.dropped == len(sent) - len(passed)
    assert pipe.passed_bytes == 1000 * (3 + len(passed))


def test_a_packet_passes_up_waits_for_its_delay_and_passes_down():
    core = Core(4, SHAPE)
    core.offer(0, packet(2), 1.0)
    assert core.take(1.0409) == []
    assert core.next_s() == pytest.approx(1.041)  # a millisecond up, 40 on its way; then a millisecond down
    assert core.take(1.0415) == []
    assert core.take(1.0421) == [(2, packet(2))]
    assert core.next_s() is None


def test_a_carrier_that_comes_late_slows_no_link_down():
    core = Core(2, SHAPE)
    for at_s in (1.0, 1.5):
        core.offer(0, packet(1), at_s)
    assert len(core.take(3.0)) == 2  # both were through long ago, and the second did not wait for the first's late end


def test_two_senders_share_the_rate_of_the_way_down_to_one_region():
    core = Core(3, SHAPE)
    for _ in range(50):
        core.offer(0, packet(2), 1.0)
        core.offer(1, packet(2), 1.0)
    assert len(core.take(1.0 + 0.04 + 0.0505)) == pytest.approx(50, abs=1)
    assert len(core.take(1.0 + 0.04 + 0.11)) == pytest.approx(50, abs=1)


@pytest.mark.parametrize("data", [b"", b"\x60" + bytes(39), packet(0)[:10], packet(9)])
def test_what_is_no_ipv4_or_goes_nowhere_is_dropped(data):
    core = Core(2, SHAPE)
    core.offer(0, data, 1.0)
    assert core.next_s() is None


def points(*pairs):
    return [{"s": s, "loss": loss} for s, loss in pairs]


@pytest.mark.parametrize(
    ("curve", "seconds"),
    [
        (points((1, 4.0), (2, 3.0), (3, 1.0)), 2.5),  # on the line between two
        (points((1, 4.0), (2, 2.0), (3, 3.0), (4, 1.0)), 2.0),  # the first time counts
        (points((1, 1.5)), 1.0),
        (points((1, 4.0), (2, float("nan")), (3, 1.0)), 3.0),  # no line through what is no number
        (points((1, 4.0), (2, 3.0)), None),
        ([], None),
    ],
)
def test_a_curve_comes_down_to_a_loss_on_the_line_between_two_points(curve, seconds):
    assert command.seconds_to(curve, 2.0) == seconds


def test_curves_are_kept_as_json_lines_and_the_same_lines_give_the_same_bytes(tmp_path):
    lines = [{"side": "atoll", "curve": points((1, 2.5))}, {"side": "data-parallel", "curve": []}]
    for name in ("a.jsonl.gz", "b.jsonl.gz", "c.jsonl"):
        output.keep(tmp_path / name, lines)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    text = gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()).decode()
    assert [json.loads(line) for line in text.splitlines()] == lines
    assert (tmp_path / "c.jsonl").read_text() == text
