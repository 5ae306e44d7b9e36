"""Limits that nobody gives follow from the model and from the machine, and let 5 B parameters in."""

import json
import os

import pytest

from aggregator.state.model_limits import SECTION_BYTES, least_held_bytes, least_message_bytes, most_held_bytes
from broker.chunks import chunk_heads
from broker.chunks.memory import ReusedMemory
from broker.chunks.receiving import Inflow, Refused
from broker.clients.flows import Flows
from broker.gateway.config import BrokerConfig
from broker.process import limits
from broker.wire.fragments import FragmentManifest, Kind, TensorSpec
from broker.wire.headers import Limits, partial_room_bytes, room_bytes
from broker.wire.messages import Reason, Welcome
from broker.wire.messages import Refused as NotLetIn
from islands.interface.config import IslandConfig
from ops import cli
from tests.aggregator_hand import Desk, sent

GIB = 1 << 30
WIDE, LAYERS = 4096, 96


def large_model():
    """5 B parameters: an embedding of 150,000 words, and layers."""
    layer = (5 * 10**9 - 150_000 * WIDE) // LAYERS // WIDE
    shapes = {"embed": (150_000, WIDE)} | {f"layers/{i}/w": (layer, WIDE) for i in range(LAYERS)}
    return tuple(TensorSpec(name=name, shape=shape, dtype="float32", kind=Kind.RDA) for name, shape in shapes.items())


def test_a_message_has_a_quarter_of_the_memory_and_four_gib_at_least():
    assert [room_bytes(each) // GIB for each in (0, 8 * GIB, 16 * GIB, 64 * GIB)] == [4, 4, 4, 16]
    assert [partial_room_bytes(each) // GIB for each in (0, 8 * GIB, 16 * GIB, 64 * GIB)] == [4, 4, 8, 32]


def test_a_brokers_limits_and_queues_follow_from_its_memory_unless_they_are_given():
    usual = BrokerConfig()
    assert usual.limits(64 * GIB).max_message_bytes == 16 * GIB
    queues = usual.relay(64 * GIB)
    assert (queues.peer_queue_bytes, queues.total_queue_bytes) == (4 * GIB, 16 * GIB)
    given = BrokerConfig(max_message_bytes=GIB, peer_queue_bytes=2 * GIB, total_queue_bytes=3 * GIB)
    assert given.limits(64 * GIB).max_message_bytes == GIB
    assert (given.relay(64 * GIB).peer_queue_bytes, given.relay(64 * GIB).total_queue_bytes) == (2 * GIB, 3 * GIB)
    alone = BrokerConfig(max_message_bytes=9 * GIB).relay(0)
    assert alone.peer_queue_bytes == alone.total_queue_bytes == 9 * GIB  # one of them must fit
    assert IslandConfig().limits().max_message_bytes == 4 * GIB
    assert IslandConfig(max_message_bytes=GIB).limits().max_message_bytes == GIB


def test_the_memory_is_that_of_the_least_limit_above(tmp_path, monkeypatch):
    own = tmp_path / "system.slice" / "atoll.service"
    own.mkdir(parents=True)
    (own / "memory.max").write_text("max\n")
    assert limits._memory_limits(tmp_path, "/system.slice/atoll.service") == []
    (own.parent / "memory.max").write_text("5000\n")
    (own / "memory.max").write_text("7000\n")
    assert sorted(limits._memory_limits(tmp_path, "/system.slice/atoll.service")) == [5000, 7000]
    monkeypatch.setattr(limits, "_CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("4096\n")
    assert limits.memory_bytes() == 4096
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{1 << 62}\n")  # version 1, without a limit
    assert limits.memory_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("fragments", "memory_bytes"), [(24, 0), (8, 0), (24, 64 * GIB), (8, 64 * GIB), (8, 8 * GIB)])
def test_five_billion_parameters_are_let_in_by_defaults(fragments, memory_bytes):
    made = Desk(fragments=fragments, sync_interval=24, islands=8, memory_bytes=memory_bytes)
    (welcome,) = sent(made.join("a", model=large_model()), Welcome)
    manifest = FragmentManifest(welcome.fragments)
    largest = max(manifest.sizes)
    assert len(manifest.moving) == fragments
    assert least_message_bytes(largest) <= BrokerConfig().limits().max_message_bytes
    IslandConfig().check_room(manifest)
    assert most_held_bytes(made.settings, made.manifest) >= least_held_bytes(largest, 8)
    assert 4 * max(tensor.size for tensor in manifest.tensors().values()) <= SECTION_BYTES
    assert sent(made.join("b", model=large_model()), Welcome)


def test_what_may_wait_follows_from_model_islands_and_memory():
    model = large_model()
    every = 4 * sum(tensor.size for tensor in model) * 8
    for memory_bytes, held_bytes, model_bytes in (
        (0, 0, every),
        (1 << 50, 0, every),
        (100 * GIB, 0, 50 * GIB),
        (0, 1 << 40, 1 << 40),
    ):
        made = Desk(fragments=24, sync_interval=24, islands=8, memory_bytes=memory_bytes, held_bytes=held_bytes)
        assert most_held_bytes(made.settings, made.manifest) == (held_bytes or GIB)
        made.join("a", model=model)
        assert most_held_bytes(made.settings, made.manifest) == model_bytes
    small = Desk(memory_bytes=64 * GIB)
    small.join("a")
    assert most_held_bytes(small.settings, small.manifest) == GIB


def test_a_fragment_that_is_too_large_for_the_machine_is_refused_with_field_value_and_cure():
    made = Desk(fragments=1, sync_interval=24, memory_bytes=16 * GIB)
    (refused,) = sent(made.join("a", model=large_model()), NotLetIn, "join:a-1")
    assert refused.reason is Reason.OVERSIZE
    assert f"max_message_bytes = {4 * GIB}: must be at least 2000" in refused.detail
    assert "or cut the model into 5 fragments or more (--fragments)" in refused.detail
    assert sent(Desk(fragments=5, sync_interval=24, memory_bytes=16 * GIB).join("a", model=large_model()), Welcome)


def test_messages_that_are_not_whole_have_room_together_and_the_silent_one_gives_way():
    flows = Flows(Limits(max_header_bytes=1, max_message_bytes=1000), 2000)

    def piece(fd, offset, nbytes, now_s):
        """Of a message of 1000 bytes."""
        head = chunk_heads.Chunk(1, 1000, offset, 1000 - offset - nbytes)
        return flows.take(b"peer %d" % fd, fd, [chunk_heads.packed(head), bytes(nbytes)], now_s)

    for fd in (1, 2, 3):
        assert piece(fd, 0, 600, fd - 1) == []
    assert flows.partial_bytes == 1800
    assert flows.stalled(3) == []
    assert piece(2, 600, 300, 3) == []
    assert flows.partial_bytes == 1500  # what was here of the one that has been silent the longest is gone
    assert flows.stalled(4) == [1]  # and its connection is ended, so that it begins again
    ((whole,),) = piece(2, 900, 100, 4)
    assert memoryview(whole).nbytes == 1000
    assert flows.partial_bytes == 600
    flows.ended(1, 5.0)
    flows.ended(3, 5.0)
    assert flows.partial_bytes == 0


def test_what_memory_does_not_hold_is_refused():
    into = Inflow(Limits(max_message_bytes=1 << 62), ReusedMemory(0))
    _, (refused,) = into.take_in(chunk_heads.Chunk(1, 1 << 61, 0, (1 << 61) - 1), [b"x"], None)
    assert isinstance(refused, Refused)
    assert refused.error.reason is Reason.OVERSIZE


@pytest.mark.parametrize("more", [(), ("--fragments", "24"), ("--bandwidth", "10"), ("--host-memory-gb", "512")])
def test_a_plan_for_five_billion_parameters_warns_of_no_limit(capsys, more):
    assert cli.main(["plan", "--params", "5B", "--sites", "8", "--step-time", "1", *more, "--json"]) == 0
    noted = json.loads(capsys.readouterr().out)["notes"]
    assert not [note for note in noted if "raise it" in note or "_bytes" in note]
