"""The aggregator over real sockets with a real broker: bad input, crashes, Redis coming and going, an orderly end."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from aggregator.store.store import Store
from aggregator.store.tape import read_lines
from broker.registry.registry import Registry
from broker.wire import messages as m
from broker.wire.codec import encode
from broker.wire.errors import ConfigError, Unavailable
from broker.wire.headers import seal
from broker.wire.messages import PROTOCOL_VERSION, Channel, Codec, Envelope, Fate, Reason
from broker.wire.tensors import encode_tensor
from ops.processes import redis_server
from ops.processes.cluster import free_ports
from tests.aggregator_bench import (
    RUN,
    TOKENS_PER_STEP,
    WAIT_S,
    aggregator_config,
    initial,
    on_a_bench,
    until,
)

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def at_version(bench, version):
    return lambda: bench.core.run.versions and min(bench.core.run.versions) >= version


async def seeded(bench, tmp_path, **changes):
    """An aggregator and one island that has all of version 0, and answers no round by itself yet."""
    await bench.aggregator(aggregator_config(tmp_path, broker=bench.address, **changes))
    island = await bench.island("a")
    island.answering = False
    await until(lambda: island.began_s is not None, "version 0")
    await until(lambda: island.step >= 8, "a few steps")
    await until(lambda: bench.core.run.members.get("a").ready, "a heartbeat with version 0")
    return island


async def goes_on(bench, island):
    """A good contribution that follows is merged."""
    island.answering = True
    before = bench.core.run.versions
    await until(lambda: any(each.fate is Fate.MERGED for each in island.fates), "a contribution that is merged")
    await until(lambda: bench.core.run.versions > before, "a version after the bad input")
    assert bench.core.run.ledger.books().balanced()


# --- bad contributions --------------------------------------------------------------------------------------------


def refuse_wrong_shape(island):
    return island.contribution(0, arrays=[np.zeros((3, 3), np.float32) for _ in island.manifest.fragments[0]])


def refuse_a_missing_tensor(island):
    return island.contribution(1, arrays=island.delta(1)[:-1])


def refuse_not_finite(island):
    arrays = island.delta(0)
    arrays[0][-1, -1] = np.inf
    return island.contribution(0, arrays=arrays)


def refuse_nan_in_bf16(island):
    arrays = island.delta(0)
    arrays[0][0, 0] = np.nan
    return island.contribution(0, arrays=arrays, codec=Codec.BF16)


def refuse_a_future_version(island):
    return island.contribution(0, version=7)


def refuse_counters_that_lie(island):
    good = island.contribution(0)
    return replace(good, steps=replace(good.steps, to_tokens=good.steps.from_tokens + TOKENS_PER_STEP + 1))


BAD_CONTRIBUTIONS = {
    refuse_wrong_shape: Reason.WRONG_SHAPE,
    refuse_a_missing_tensor: Reason.WRONG_SHAPE,
    refuse_not_finite: Reason.NOT_FINITE,
    refuse_nan_in_bf16: Reason.NOT_FINITE,
    refuse_a_future_version: Reason.FUTURE_VERSION,
    refuse_counters_that_lie: Reason.IMPLAUSIBLE,
}


@pytest.mark.parametrize("make", BAD_CONTRIBUTIONS, ids=lambda make: make.__name__)
def test_a_bad_contribution_is_refused_with_its_reason_and_the_run_goes_on(make, tmp_path):
    reason = BAD_CONTRIBUTIONS[make]

    async def use(bench):
        island = await seeded(bench, tmp_path)
        bad = make(island)
        island.sent.clear()  # it is over and done with: no heartbeat asks about it
        await island.send(bad)
        key = (bad.fragment_id, bad.steps.from_step, bad.steps.to_step)
        told = await until(lambda: island.resolutions.get(key), "its resolution")
        assert (told.fate, told.reason) == (Fate.REFUSED, reason)
        assert told.detail
        assert bench.core.run.refusals == {reason: 1}
        assert bench.core.run.members.get("a").refusals == {reason: 1}
        await goes_on(bench, island)

    on_a_bench(use)


def test_damaged_bytes_are_asked_for_again_and_then_merged(tmp_path):
    async def use(bench):
        island = await seeded(bench, tmp_path)
        good = island.contribution(0)
        first = good.payload[0]
        damaged = bytearray(first.data)
        damaged[3] ^= 1
        await island.send(replace(good, payload=(replace(first, data=bytes(damaged)), *good.payload[1:])))
        key = (0, good.steps.from_step, good.steps.to_step)
        told = await until(lambda: [each for each in island.fates if each.reason], "its resolution")
        assert (told[0].fate, told[0].reason) == (Fate.RETRY, Reason.CHECKSUM)
        await island.send(good)
        island.answering = True
        await until(lambda: island.fate(*key) is Fate.MERGED, "the same contribution, merged")
        assert bench.core.run.versions[0] >= 1

    on_a_bench(use)


def test_a_seed_of_the_wrong_dtype_or_not_finite_is_refused_and_a_good_one_begins_the_run(tmp_path):
    async def use(bench):
        await bench.aggregator(aggregator_config(tmp_path, broker=bench.address))
        island = await bench.island("a")
        island.seeding = False
        await until(lambda: island.state is not None and island.state.seed, "the request for version 0")
        await island.seed(0, Codec.BF16)
        await until(lambda: len(island.refused) == 1, "the refusal")
        assert (island.refused[0].kind, island.refused[0].reason) == ("seed", Reason.WRONG_DTYPE)
        arrays = [initial(t) for t in island.manifest.fragments[0]]
        arrays[0].flat[0] = -np.inf
        await island.send(m.Seed(fragment_id=0, payload=tuple(encode_tensor(a, Codec.F32) for a in arrays)))
        await until(lambda: len(island.refused) == 2, "the second refusal")
        assert island.refused[1].reason is Reason.NOT_FINITE
        assert bench.core.run.refusals == {Reason.WRONG_DTYPE: 1, Reason.NOT_FINITE: 1}
        island.seeding = True
        await goes_on(bench, island)

    on_a_bench(use)


# --- bad frames ---------------------------------------------------------------------------------------------------


def frames(island, message):
    envelope = Envelope(
        run_id=RUN, sender="a", incarnation=island.incarnation, sequence=99, to="aggregator", message=message
    )
    return encode(envelope)


def with_header(parts, **changes):
    return [seal(msgpack.packb(msgpack.unpackb(parts[0]) | changes)), *parts[1:]]  # the checksum stays the last


BAD_FRAMES = {
    "noise": (lambda island: [seal(b"\xc1 no msgpack" + bytes(8))], Reason.MALFORMED),
    "bytes of another kind": (lambda island: [b"GET / HTTP/1.1"], Reason.CHECKSUM),
    "another protocol version": (
        lambda island: with_header(frames(island, island.contribution(0)), v=PROTOCOL_VERSION + 1),
        Reason.PROTOCOL_VERSION,
    ),
    "an unknown kind": (
        lambda island: with_header(frames(island, island.contribution(0)), kind="surprise"),
        Reason.UNKNOWN_KIND,
    ),
    "a dtype that no codec has": (
        lambda island: with_header(
            [frames(island, island.contribution(0))[0], b"12345678"],
            buffers=[{"codec": "f64", "shape": [1], "nbytes": 8, "checksum": 0}],
        ),
        Reason.MALFORMED,
    ),
    "a short buffer": (lambda island: [*frames(island, island.contribution(0))[:-1], b"short"], Reason.MALFORMED),
    "too much in all": (lambda island: [*frames(island, island.contribution(0)), b"x" * (9 << 20)], Reason.OVERSIZE),
}


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_bad_frames_are_refused_with_their_reason_and_the_run_goes_on(what, tmp_path):
    make, reason = BAD_FRAMES[what]
    limits = {"max_header_bytes": 1 << 16, "max_message_bytes": 8 << 20, "peer_queue_bytes": 16 << 20}

    async def use(bench):
        island = await seeded(bench, tmp_path)
        bad = make(island)
        island.sent.clear()
        island.next_step = dict.fromkeys(island.next_step, 0)  # nothing of it was taken
        garbage = bench.raw(Channel.BULK)
        # In frames that single are within what ZeroMQ lets through.
        await garbage.send_multipart([part for each in bad for part in _cut(each)])
        assert await garbage.poll(1000 * WAIT_S), "no refusal came"
        body = msgpack.unpackb((await garbage.recv_multipart())[0])["body"]
        assert body["reason"] == reason
        assert body["detail"]
        await goes_on(bench, island)

    on_a_bench(use, broker=limits)


def _cut(frame, size=4 << 20):
    view = memoryview(frame).cast("B")
    return [view[start : start + size] for start in range(0, len(view), size)] or [b""]


# --- crash and restart --------------------------------------------------------------------------------------------


class Process:
    """An aggregator in a process of its own."""

    def __init__(self, bench, tmp_path, **flags):
        given = {
            "run": RUN,
            "broker": bench.address,
            "store": tmp_path / "store",
            "report": tmp_path / "report.json",
            "islands": 1,
            "fragments": 2,
            "sync-interval": 4,
            "heartbeat-interval-s": 0.2,
            "codec": "f32",
            "redis-url": f"redis://127.0.0.1:{free_ports(1)}",
        } | flags
        self._flags = given
        self._process = None

    def give(self, **flags):
        self._flags |= flags

    def leave_out(self, *names):
        for name in names:
            del self._flags[name]

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        if self._process is not None:
            self._process.kill()
            self.end()

    def start(self):
        environment = {**os.environ, "ATOLL_LOG": "text"}
        command = [sys.executable, "-m", "ops.cli", "aggregator"]
        command += [str(word) for name, value in self._flags.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)

    def signal(self, number):
        self._process.send_signal(number)

    def end(self):
        """Waits for the end; returns exit status and log."""
        process, self._process = self._process, None
        try:
            _, text = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
            process.communicate()
        return process.returncode, text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_aggregator_with_a_partial_report(number, tmp_path):
    async def use(bench):
        with Process(bench, tmp_path, tape=tmp_path / "events.jsonl") as process:
            island = await bench.island("a")
            await until(lambda: island.state and min(island.state.versions, default=0) >= 1, "version 1")
            process.signal(number)
            status, text = await asyncio.to_thread(process.end)
        assert status == 128 + number, text
        assert "Traceback" not in text
        assert "aggregator.ended" in text
        assert text.count("version.committed") >= 2
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["phase"] == "running"
        assert report["islands"]["a"]["inner_steps"] > 0
        assert report["islands"]["a"]["bytes_up"] > 0
        assert report["rounds"]["1"] >= 2
        assert report["participation"] == 1.0
        notes = [line.get("note") for line in read_lines(tmp_path / "events.jsonl")]
        assert notes[-1] == "aggregator.finished"

    on_a_bench(use)


def test_a_disk_that_fails_delays_versions_and_nothing_else(tmp_path, monkeypatch):
    commit = Store.commit

    def failing(self, what, state, **_):
        if what.fragment_version == 2:
            raise Unavailable("cannot write: No space left on device; free space", definite=True)
        commit(self, what, state)

    async def use(bench):
        island = await seeded(bench, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(Store, "commit", failing)
            island.answering = True
            held_up = list(bench.run.fragments.values())
            await until(lambda: all(f.commit and f.commit.fragment_version == 2 for f in held_up), "merges")
            await until(lambda: any(f.persist_again_at_s for f in held_up), "a failure")
            beats = bench.core.run.ledger.trained_tokens()
            await until(lambda: island.state.trained_tokens > beats, "an answer to a heartbeat")
            assert bench.core.run.versions == island.state.versions == (1, 1)
            assert all(v.fragment_version < 2 for v in island.history)
        await until(at_version(bench, 3), "the versions that were held up, and further ones")
        assert bench.core.run.ledger.books().balanced()

    on_a_bench(use)


# --- settings -----------------------------------------------------------------------------------------------------


def test_a_store_of_another_run_is_refused_with_a_cure(tmp_path):
    async def use(bench):
        end = await bench.aggregator(aggregator_config(tmp_path, broker=bench.address))
        await until(lambda: bench.core.leading, "the first run record")
        await end()
        with pytest.raises(ConfigError, match="holds the run 'demo': give --run demo, or another --store"):
            await bench.serve(aggregator_config(tmp_path, broker=bench.address, run_id="other"))

    on_a_bench(use)


def test_an_aggregator_of_another_run_ends_with_the_name_of_the_brokers(tmp_path):
    async def use(bench):
        with pytest.raises(ConfigError, match=r"run_id = 'other'"):
            await bench.serve(aggregator_config(tmp_path, broker=bench.address, run_id="other"))

    on_a_bench(use)


def test_a_store_without_a_whole_version_is_not_seeded_anew(tmp_path):
    async def use(bench):
        settings = aggregator_config(tmp_path, broker=bench.address)
        end = await bench.aggregator(settings)
        island = await bench.island("a")
        await until(at_version(bench, 2), "version 2")
        island.answering = False
        await end()
        for path in (tmp_path / "store" / "fragments" / "000").glob("*.commit"):
            path.write_bytes(b"ruined")
        with pytest.raises(Unavailable, match="no whole version of fragment 0; restore it from a copy"):
            await bench.serve(settings)

    on_a_bench(use)


def test_a_run_whose_fragments_fit_no_message_any_more_does_not_start(tmp_path):
    async def use(bench):
        end = await bench.aggregator(aggregator_config(tmp_path, broker=bench.address))
        island = await bench.island("a")
        await until(lambda: island.began_s is not None, "version 0")
        await end()
        settings = aggregator_config(tmp_path, broker=bench.address, max_message_bytes=5000)
        with pytest.raises(ConfigError, match=r"max_message_bytes = 5000"):
            await bench.serve(settings)

    on_a_bench(use)


def test_bad_settings_end_the_process_with_their_cure():
    command = [sys.executable, "-m", "ops.cli", "aggregator", "--quorum", "9", "--islands", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2
    assert done.stderr == "atoll: quorum = 9: must not exceed islands = 4, or no round closes by it\n"


# --- Redis --------------------------------------------------------------------------------------------------------


@pytest.fixture
def redis(tmp_path):
    """A server that is not started yet."""
    directory = tmp_path / "redis"
    directory.mkdir()
    server = RedisProcess(directory)
    yield server
    server.stop()


class RedisProcess:
    def __init__(self, directory):
        self.found = redis_server.server(port=free_ports(1), directory=directory)
        self._process = None

    def start(self):
        self._process = subprocess.Popen(self.found.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


async def in_redis(url, condition, what, *, events=frozenset()):
    """Waits until what stands in Redis meets a condition, and has such events; returns it, and all events."""
    registry = Registry(url, RUN)
    ends_s = time.monotonic() + WAIT_S
    try:
        while True:
            with contextlib.suppress(Unavailable):
                found = await registry.read()
                told = [event for _, event in await registry.read_events_after((0, 0), 10_000)]
                if condition(found) and events <= {each["event"] for each in told}:
                    return found, told
            assert time.monotonic() < ends_s, f"never came: {what}"
            await asyncio.sleep(0.02)
    finally:
        await registry.aclose()


def test_redis_hears_of_versions_totals_refusals_and_the_lease_again_after_it_was_away(tmp_path, redis):
    url = redis.found.url

    async def use(bench):
        end = await bench.aggregator(aggregator_config(tmp_path, broker=bench.address, redis_url=url))
        island = await bench.island("a")
        await until(at_version(bench, 1), "version 1 without a Redis")
        redis.start()
        told = {"island.joined", "run.seeded", "version.committed"}
        model = lambda s: len(s.fragments) == 2 and s.totals  # noqa: E731
        found, events = await in_redis(url, model, "the model in Redis", events=told)
        assert found.fragments[0]["version"] >= 1
        assert found.fragments[0]["contributors"] == ["a"]
        assert found.fragments[0]["merged_tokens"] > 0
        rows = list(read_lines(tmp_path / "store" / "ledger.jsonl"))  # which is written to meanwhile
        digests = {row["fragment_version"]: row["digest"] for row in rows if row["fragment_id"] == 0}
        assert found.fragments[0]["digest"] == digests[found.fragments[0]["version"]]
        assert found.totals[0]["phase"] == "running"
        assert found.totals[0]["loss"] == 2.0
        assert found.totals[0]["participation"] == 1.0
        assert found.totals[0]["staleness_mean"] >= 0
        assert found.leases[0].epoch == 1
        assert told <= {each["event"] for each in events}
        redis.stop()
        before = bench.core.run.versions
        await until(lambda: bench.core.run.versions > before, "training that goes on without it")
        await island.send(replace(island.contribution(0), fragment_id=99))
        island.sent.clear()
        await until(lambda: bench.core.run.refusals, "a refusal")
        redis.start()  # empty
        # Both fragments: if no write fell into the outage, only what has changed since is written at first.
        again = lambda s: model(s) and s.refusals["aggregator"] and s.leases  # noqa: E731
        found, _ = await in_redis(url, again, "everything, again")
        assert found.fragments[0]["version"] >= before[0]
        assert found.refusals["aggregator"] == {"a": {"unknown_fragment": 1}}
        await end()
        found, events = await in_redis(url, lambda s: s.totals, "the last report")
        assert found.totals[0]["trained_tokens"] == bench.core.run.ledger.books().tokens()["trained"]
        assert events[-1]["event"] == "aggregator.finished"

    on_a_bench(use)


def test_a_standby_with_other_fixed_settings_ends_as_soon_as_it_hears_of_the_run(tmp_path, redis):
    redis.start()

    async def use(bench):
        common = {"broker": bench.address, "redis_url": redis.found.url, "failover": True}
        await bench.aggregator(aggregator_config(tmp_path, **common))
        island = await bench.island("a")
        await until(lambda: island.began_s is not None, "version 0")
        standby = aggregator_config(tmp_path, **common, standby=True)
        with pytest.raises(ConfigError, match="sync_interval = 5"):
            await bench.serve(replace(standby, store=tmp_path / "other", sync_interval=5))
        await goes_on(bench, island)

    on_a_bench(use)
