"""A run seen through its broker: a real broker with keys, a Redis that comes and goes, observers of all kinds."""

import asyncio
import contextlib
import re
import subprocess
import sys

import pytest

from broker.base.errors import Unavailable
from broker.gateway.config import BrokerConfig
from broker.observing.client import ObservedRun
from broker.registry.registry import KEEP_VERSIONS, Registry
from broker.transport.endpoint import Endpoint
from broker.transport.keys import client_keys, new_pair, write_pair
from broker.wire import messages as m
from broker.wire.identity import Identity, KeyRole
from broker.wire.messages import AGGREGATOR, BROKER, PROTOCOL_VERSION, Channel, Envelope, Inquiry, Reason
from ops import cli
from ops.keys import make_missing
from ops.processes.cluster import free_ports
from tests.aggregator_hand import beat
from tests.broker_bench import RUN, WAIT_S, on_a_broker, until
from tests.integration.test_registry import write_a_run
from tests.local_run import environment, ops

ROW = {
    "fragment": 0,
    "round": 7,
    "digest": "00",
    "reason": "complete",
    "missing": ["rome"],
    "left_out": 0,
    "epoch": 1,
    "contributions": [
        {
            "island": "paris",
            "incarnation": 1,
            "steps": [0, 4],
            "tokens": 40,
            "staleness": 0.5,
            "token_weight": 10.0,
            "merge_weight": 1.0,
            "fresh": True,
        }
    ],
}


class Hub:
    """A broker with keys that is being looked at; what ``use`` gets."""

    def __init__(self, bench, keys, registry, stack):
        self.context, self.keys, self.registry, self.stack = bench.context, keys, registry, stack
        self.address = bench.listening.address

    def observed(self, stem="observer-watch", run_id=RUN):
        keys = client_keys(self.keys / f"{stem}.secret", KeyRole.OBSERVER) if stem else None
        run = ObservedRun([self.address], run_id, keys=keys)
        self.stack.push_async_callback(run.aclose)
        return run

    async def endpoint(self, stem, role, channel=Channel.BULK):
        endpoint = Endpoint(self.context, self.address, channel, keys=client_keys(self.keys / f"{stem}.secret", role))
        await self.stack.enter_async_context(endpoint)
        assert await endpoint.ready(WAIT_S)
        return endpoint


@pytest.fixture
def on_a_hub(tmp_path, server):
    keys = tmp_path / "keys"
    people = {
        BROKER: KeyRole.BROKER,
        "paris": KeyRole.ISLAND,
        "watch": KeyRole.OBSERVER,
        AGGREGATOR: KeyRole.AGGREGATOR,
    }
    make_missing(keys, [Identity(role=role, name=name) for name, role in people.items()])
    write_pair(keys, new_pair(Identity(role=KeyRole.OBSERVER, name="stranger")))

    def run(use, **changes):
        settings = {"run_id": RUN, "port": 0, "redis_url": server.url, "report_interval_s": 0.05, "name": "hub"}
        config = BrokerConfig(**(settings | {"key": keys / "broker.secret"} | changes))

        async def main(bench):
            async with contextlib.aclosing(Registry(server.url, RUN)) as registry, contextlib.AsyncExitStack() as stack:
                await use(Hub(bench, keys, registry, stack))

        on_a_broker(config, main)

    return run


def lasting(snapshot):
    """What the broker's own reports do not change between two looks."""
    leases = {shard: (each.holder, each.epoch, each.in_sync) for shard, each in snapshot.leases.items()}
    return (
        snapshot.run_id,
        snapshot.heard_at_s,
        snapshot.members,
        snapshot.fragments,
        list(snapshot.totals),
        set(snapshot.brokers),
        leases,
        snapshot.evaluation,
    )


def test_a_broker_shows_what_redis_knows(on_a_hub):
    async def use(hub):
        await write_a_run(hub.registry)
        await hub.registry.write_versions([ROW | {"version": n} for n in range(1, KEEP_VERSIONS + 11)])
        await hub.registry.append_events([{"n": n, "event": "island.joined"} for n in range(1200)])
        run = hub.observed()
        await until(lambda: hub.registry.read_version(0, 1), "nothing")
        assert lasting(await run.read()) == lasting(await hub.registry.read())
        newest = await run.read_version(0, None)
        assert newest == await hub.registry.read_version(0, None)
        assert newest.found["version"] == KEEP_VERSIONS + 10
        assert newest.known == tuple(range(11, KEEP_VERSIONS + 11))
        assert (await run.read_version(0, 10)).found is None
        assert await run.read_version(3, 1) == await hub.registry.read_version(3, 1)
        events, after = [], (0, 0)
        while page := await run.read_events_after(after, 10_000):
            events += page
            after = page[-1][0]
        assert events == await hub.registry.read_events_after((0, 0), 10_000)
        assert [event["n"] for _, event in events] == list(range(1200))
        known = hub.observed(run_id="")
        await known.read()
        assert known.run_id == RUN
        assert (await hub.registry.read()).refusals["broker:hub"] == {}

    on_a_hub(use)


def test_a_redis_that_is_stopped_is_told_of_and_found_again_and_nobody_waits_for_either(on_a_hub, server):
    async def use(hub):
        run = hub.observed()
        paris = await hub.endpoint("island-paris", KeyRole.ISLAND, Channel.CONTROL)
        assert (await run.read()).run_id == RUN
        server.stop()
        with pytest.raises(Unavailable, match=r"cannot say: Redis at redis://127\.0\.0\.1:\d+ does not serve"):
            await run.read()
        beats = Envelope(run_id=RUN, sender="paris", incarnation=1, sequence=1, to="aggregator", message=beat(1))
        assert await paris.send(beats)
        answer = await until(lambda: paris.recv(0.2), "an answer to a heartbeat")
        assert answer.message.reason is Reason.NOT_LEADER
        server.start()

        async def seen():
            with contextlib.suppress(Unavailable):
                return "paris" in (await run.read()).members

        await until(seen, "the island is seen again")
        spoil = hub.registry.script("redis.call('HSET', KEYS[1], 'x', ARGV[1])")
        await spoil(keys=[hub.registry.key("member", "paris")], args=["no json"])
        with pytest.raises(Unavailable, match="that is not ours"):
            await run.read()
        await spoil(keys=[hub.registry.key("member", "paris")], args=["1"])
        await spoil(keys=[hub.registry.key("model")], args=["1"])
        with pytest.raises(Unavailable, match="is not ours"):
            await run.read()

    on_a_hub(use)


def question(number, **changes):
    fields = {"run_id": RUN, "sender": m.observing("w"), "incarnation": 0, "sequence": number, "to": BROKER}
    return Envelope(**(fields | {"message": m.Observe(about=Inquiry.SNAPSHOT)} | changes))


def test_only_an_observers_key_is_answered_and_what_it_costs_to_be_too_eager(on_a_hub):
    async def use(hub):
        for stem, role in (("island-paris", KeyRole.ISLAND), ("aggregator", KeyRole.AGGREGATOR)):
            endpoint = await hub.endpoint(stem, role)
            assert await endpoint.send(question(1))
            refused = (await until(lambda: endpoint.recv(0.2), "a refusal")).message  # noqa: B023
            assert (type(refused), refused.reason) == (m.Refused, Reason.WRONG_KEY)
        run = hub.observed(run_id="other")
        with pytest.raises(Unavailable, match="serves run demo, and no run other: choose it with --run demo"):
            await run.read()
        eager = await hub.endpoint("observer-watch", KeyRole.OBSERVER)
        for number in range(100):
            await eager.send(question(number))
            await asyncio.sleep(0.002)
            while await eager.recv(0) is not None:
                pass
        assert (await hub.observed().read()).run_id == RUN  # others are answered all the same

        async def counted():
            counts = (await hub.registry.read()).refusals.get("broker:hub", {})
            return sum(reasons.get("queue_full", 0) for reasons in counts.values()) >= 50

        await until(counted, "what was refused is counted")

    on_a_hub(use)


def test_who_is_revoked_is_shut_out_and_a_stranger_never_gets_in(on_a_hub, capsys, monkeypatch):
    monkeypatch.setattr("broker.observing.client.CONNECT_WITHIN_S", 1.5)

    async def use(hub):
        def status(*words):
            return cli.main(["status", "--broker", hub.address, *words])

        run = hub.observed()
        await run.read()
        stranger = ("--key", str(hub.keys / "observer-stranger.secret"))
        assert await asyncio.to_thread(status, *stranger) == 1
        assert "does not let us in: does its allow list have observer stranger" in capsys.readouterr().err
        assert await asyncio.to_thread(status) == 1
        assert "if it has keys, name an observer's with --key" in capsys.readouterr().err
        assert await asyncio.to_thread(status, "--key", str(hub.keys / "island-paris.secret")) == 2
        assert "is the key of island paris; this process needs one of the role observer" in capsys.readouterr().err
        assert cli.main(["keys", "revoke", "observer", "watch", "--dir", str(hub.keys)]) == 0

        async def shut_out():
            try:
                await run.read()
            except Unavailable:
                return True
            return False

        await until(shut_out, "a revoked observer is shut out")

    on_a_hub(use)


def test_without_keys_anybody_may_ask(on_a_hub):
    async def use(hub):
        assert (await hub.observed("").read()).run_id == RUN

    on_a_hub(use, key=None)


def test_a_broker_of_an_earlier_version_is_named_as_such(server):
    earlier = "import broker.wire.frames as c, sys; c.PROTOCOL_VERSION = 6; from ops import cli; cli.main(sys.argv[1:])"
    words = ["broker", "--run", RUN, "--port", "0", "--redis-url", server.url]
    with subprocess.Popen(
        [sys.executable, "-c", earlier, *words], env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "the broker has ended"
                found = re.search(r"broker\.ready.*(tcp://127\.0\.0\.1:\d+)", line)
            done = ops("status", "--broker", found[1])
        finally:
            process.kill()
    assert done.returncode == 1
    assert f"speaks version 6 of the protocol, this is {PROTOCOL_VERSION}: update the older side" in done.stderr


def test_what_cannot_be_asked_is_said_with_the_cure(capsys, tmp_path):
    nowhere = f"tcp://127.0.0.1:{free_ports(1)}"
    for words, status, said in [
        (["status", "--broker", nowhere], 1, "was not reached within 5 s: is it running"),
        (["status", "--broker", "tcp://hub.example.com:7001"], 2, "atoll keys new observer NAME"),
        (["status", "--broker", "hub:7001"], 2, "must be an address such as tcp://hub:7001"),
        (["status", "--broker", "tcp://hub"], 2, "must be tcp://HOST:PORT"),
        (["status", "--broker", nowhere, "--redis", "redis://x"], 2, "contradicts --redis"),
        (["status", "--broker", nowhere, str(tmp_path)], 2, "contradicts RUN_DIR"),
        (["status", "--key", "k"], 2, "is for a broker"),
        (["status", "--broker", nowhere, "--run", "a b"], 2, "run = 'a b'"),
        (["explain", "1:2"], 2, "name the directory of a run, or --broker, or --redis"),
        (["explain", "round:2", "--broker", nowhere], 2, "is known to the run's directory alone"),
        (["explain", "1:2", str(tmp_path), "--broker", nowhere], 2, "needs no RUN_DIR"),
        (["explain", "1:2", "--redis", "redis://127.0.0.1:1"], 2, "name the run that --redis is asked for"),
        (["dashboard", str(tmp_path), "--broker", nowhere], 2, "contradicts RUN_DIR"),
    ]:
        assert cli.main(words) == status, words
        assert said in capsys.readouterr().err


def test_a_whole_run_is_seen_and_explained_through_its_broker_alone(watched):
    before, seen, after = watched.seen["statuses"]  # from its directory, through its broker, from its directory again
    assert seen["totals"]["recipe"] == before["totals"]["recipe"]
    for part in ("islands", "fragments", "brokers", "shards"):
        assert seen[part].keys() == before[part].keys() == after[part].keys()
    for name, island in seen["islands"].items():
        assert before["islands"][name]["tokens"] <= island["tokens"] <= after["islands"][name]["tokens"]

    version, here = watched.seen["explained"], watched.seen["explained_here"]
    for each, told in zip(here["contributors"], version["contributors"], strict=True):
        each["staleness"] = round(each["staleness"], 6)  # as on the tape
        for name in ("agreement", "trust"):  # the tape tells, as soon as its line is written
            assert each.pop(name) in (None, told.pop(name)), name
        del each["codec"]  # likewise
    assert {each.pop("codec") for each in version["contributors"]} == {""}, "Redis does not"
    for field in ("fragment", "version", "round_id", "epoch", "digest", "contributors"):
        assert version[field] == here[field]
    assert version["from_redis"] is True
    assert f"it keeps the last {KEEP_VERSIONS} of each fragment" in watched.seen["unknown"]
    assert "cannot say: Redis at" in watched.seen["without_redis"]
