"""The aggregator over real sockets with a real broker: bad input, crashes, Redis coming and going, an orderly end."""

import asyncio
import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from aggregator.store.commit_file import read_header
from aggregator.store.layout import commit_path
from aggregator.store.store import Store
from aggregator.store.tape import read_lines
from aggregator.store.version_file import verified
from broker.base.errors import ConfigError, Unavailable
from broker.wire.messages import Codec, Fate, Reason
from ops.processes.cluster import free_ports
from tests.aggregator_bench import RUN, aggregator_config, on_a_bench, until
from tests.broker_bench import in_redis
from tests.coroutines import given_by
from tests.local_run import Process


def at_version(bench, version):
    return lambda: bench.versions and min(bench.versions) >= version


async def seeded(bench, tmp_path, **changes):
    """An aggregator and one island that has all of version 0, and answers no round by itself yet."""
    await bench.aggregator(aggregator_config(tmp_path, broker=bench.address, **changes))
    island = await bench.island("a")
    island.answering = False
    await until(lambda: island.began_s is not None, "version 0")
    await until(lambda: island.step >= 8, "a few steps")
    await until(lambda: bench.members["a"].ready, "a heartbeat with version 0")
    return island


async def goes_on(bench, island):
    """A good contribution that follows is merged."""
    island.answering = True
    before = bench.versions
    await until(lambda: any(each.fate is Fate.MERGED for each in island.fates), "a contribution that is merged")
    await until(lambda: bench.versions > before, "a version after the bad input")
    bench.check_books()


# --- bad contributions -----------------------------------------------------------------------------------------------


def of_wrong_shape(island):
    return {"arrays": [np.zeros((3, 3), np.float32) for _ in island.manifest.fragments[0]]}


def with_nan(island):
    arrays = island.delta(0)
    arrays[0][-1, -1] = np.nan
    return {"arrays": arrays, "codec": Codec.BF16}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param(of_wrong_shape, Reason.WRONG_SHAPE, id="by the inspection"),
        pytest.param(with_nan, Reason.NOT_FINITE, id="by its values"),
        pytest.param(lambda _: {"version": 7}, Reason.FUTURE_VERSION, id="by the core"),
    ],
)
@given_by(on_a_bench)
async def test_a_bad_contribution_is_refused_with_its_reason_and_the_run_goes_on(bench, changes, reason, tmp_path):
    island = await seeded(bench, tmp_path)
    bad = island.contribution(0, **changes(island))
    island.sent.clear()  # it is over and done with: no heartbeat asks about it
    await island.send(bad)
    key = (bad.fragment_id, bad.steps.from_step, bad.steps.to_step)
    told = await until(lambda: island.resolutions.get(key), "its resolution")
    assert (told.fate, told.reason) == (Fate.REFUSED, reason)
    assert told.detail
    assert bench.refusals == bench.members["a"].refusals == {reason: 1}
    await goes_on(bench, island)


@given_by(on_a_bench)
async def test_damaged_bytes_are_asked_for_again_and_then_merged(bench, tmp_path):
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
    assert bench.versions[0] >= 1


@given_by(on_a_bench)
async def test_a_flipped_byte_of_the_store_comes_back_from_the_broker_and_the_run_goes_on(bench, tmp_path):
    island = await seeded(bench, tmp_path)
    path = commit_path(tmp_path / "store", 0, 0)
    with path.open("r+b") as file:
        file.seek(read_header(path).arrays_at)
        first = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([first ^ 1]))
    island.answering = True
    await until(at_version(bench, 1), "a version of each fragment")
    assert verified(path).commit.fragment_version == 0
    assert not bench.troubles


# --- the process, and a disk that fails ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@given_by(on_a_bench)
async def test_a_signal_ends_the_aggregator_with_a_partial_report(bench, number, tmp_path):
    flags = {
        "run": RUN,
        "broker": bench.address,
        "redis-url": f"redis://127.0.0.1:{free_ports(1)}",
        "store": tmp_path / "store",
        "report": tmp_path / "report.json",
        "tape": tmp_path / "events.jsonl",
        "islands": 1,
        "fragments": 2,
        "sync-interval": 4,
        "config": tmp_path / "config.toml",
    }
    flags["config"].write_text("[aggregator]\nheartbeat_interval_s = 0.2\n")
    words = (word for name, value in flags.items() for word in (f"--{name}", value))
    with Process(tmp_path, "aggregator", *words) as process:
        island = await bench.island("a")
        await until(lambda: island.state and min(island.state.versions, default=0) >= 1, "version 1")
        process.signal(number)
        assert await asyncio.to_thread(process.wait) == 128 + number, process.err
    assert "Traceback" not in process.err
    assert "aggregator.ended" in process.err
    assert process.err.count("version.committed") >= 2
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["phase"] == "running"
    assert report["islands"]["a"]["inner_steps"] > 0
    assert report["islands"]["a"]["bytes_up"] > 0
    assert report["rounds"]["1"] >= 2
    assert report["participation"] == 1.0
    notes = [line.get("note") for line in read_lines(tmp_path / "events.jsonl")]
    assert notes[-1] == "aggregator.finished"


@given_by(on_a_bench)
async def test_a_disk_that_fails_delays_versions_and_nothing_else(bench, tmp_path, monkeypatch):
    commit = Store.commit

    def failing(self, what, state, **_):
        if what.fragment_version == 2:
            raise Unavailable("cannot write: No space left on device; free space", definite=True)
        commit(self, what, state)

    island = await seeded(bench, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", failing)
        island.answering = True
        held_up = list(bench.core.run.model.fragments.values())
        await until(lambda: all(f.commit and f.commit.fragment_version == 2 for f in held_up), "merges")
        await until(lambda: any(f.persist_again_at_s for f in held_up), "a failure")
        beats = bench.tokens()["trained"]
        await until(lambda: island.state.trained_tokens > beats, "an answer to a heartbeat")
        assert bench.versions == island.state.versions == (1, 1)
        assert all(v.fragment_version < 2 for v in island.history)
    await until(at_version(bench, 3), "the versions that were held up, and further ones")
    bench.check_books()


# --- settings --------------------------------------------------------------------------------------------------------


@given_by(on_a_bench)
async def test_an_aggregator_at_a_broker_or_a_store_of_another_run_ends_with_its_name(bench, tmp_path):
    other = aggregator_config(tmp_path, broker=bench.address, run_id="other")
    with pytest.raises(ConfigError, match=r"run_id = 'other'"):
        await bench.serve(replace(other, store=tmp_path / "empty"))
    end = await bench.aggregator(aggregator_config(tmp_path, broker=bench.address))
    await until(lambda: bench.core.leading, "the first run record")
    await end()
    with pytest.raises(ConfigError, match="holds the run 'demo': give --run demo, or another --store"):
        await bench.serve(other)


@given_by(on_a_bench)
async def test_a_run_goes_on_neither_with_too_small_messages_nor_without_a_whole_version(bench, tmp_path):
    settings = aggregator_config(tmp_path, broker=bench.address)
    end = await bench.aggregator(settings)
    island = await bench.island("a")
    await until(at_version(bench, 2), "version 2")
    island.answering = False
    await end()
    with pytest.raises(ConfigError, match=r"max_message_bytes = 5000"):
        await bench.serve(replace(settings, max_message_bytes=5000))
    for path in (tmp_path / "store" / "fragments" / "000").glob("*.commit"):
        path.write_bytes(b"ruined")
    with pytest.raises(Unavailable, match="no whole version of fragment 0; restore it from a copy"):
        await bench.serve(settings)


# --- Redis -----------------------------------------------------------------------------------------------------------


@given_by(on_a_bench)
async def test_redis_hears_of_versions_totals_refusals_and_the_lease_again_after_it_was_away(bench, tmp_path, redis):
    end = await bench.aggregator(aggregator_config(tmp_path, broker=bench.address, redis_url=redis.url))
    island = await bench.island("a")
    await until(at_version(bench, 1), "version 1 without a Redis")
    redis.start()
    told = {"island.joined", "run.seeded", "version.committed"}
    model = lambda s: len(s.fragments) == 2 and s.totals  # noqa: E731
    found, events = await in_redis(redis.url, model, "the model in Redis", events=told)
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
    before = bench.versions
    await until(lambda: bench.versions > before, "training that goes on without it")
    await island.send(replace(island.contribution(0), fragment_id=99))
    island.sent.clear()
    await until(lambda: bench.refusals, "a refusal")
    redis.start()  # empty
    # Both fragments: if no write fell into the outage, only what has changed since is written at first.
    again = lambda s: model(s) and s.refusals["aggregator"] and s.leases  # noqa: E731
    found, _ = await in_redis(redis.url, again, "everything, again")
    assert found.fragments[0]["version"] >= before[0]
    assert found.refusals["aggregator"] == {"a": {"unknown_fragment": 1}}
    await end()
    found, events = await in_redis(redis.url, lambda s: s.totals, "the last report")
    assert found.totals[0]["trained_tokens"] == bench.tokens()["trained"]
    assert events[-1]["event"] == "aggregator.finished"


@given_by(on_a_bench)
async def test_a_standby_with_other_fixed_settings_ends_as_soon_as_it_hears_of_the_run(bench, tmp_path, redis):
    redis.start()
    common = {"broker": bench.address, "redis_url": redis.url, "failover": True}
    await bench.aggregator(aggregator_config(tmp_path, **common))
    island = await bench.island("a")
    await until(lambda: island.began_s is not None, "version 0")
    standby = aggregator_config(tmp_path, **common, standby=True)
    with pytest.raises(ConfigError, match="sync_interval = 5"):
        await bench.serve(replace(standby, store=tmp_path / "other", sync_interval=5))
    await goes_on(bench, island)
