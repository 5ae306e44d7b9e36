"""The lease against a real Redis: who gets it, who keeps it, and what a late or lost request does."""

import asyncio

import pytest

from aggregator.process.lease import LeaseKey
from broker.base.errors import Unavailable
from broker.registry.registry import Registry
from broker.wire.records import LeaseView
from tests.coroutines import given_by
from tests.integration.test_registry import in_virtual_time, with_registry

LEASE_S = 0.2
#: Of who asks whether a lease has run out already: this one has not, however long the requests take.
LONG_LEASE_S = 3600.0


class Shard:
    """One lease key of a run of its own, as two or three processes see it."""

    def __init__(self, registry):
        self.registry = registry
        self.leader, self.other = LeaseKey(registry, 0), LeaseKey(registry, 0)

    async def take(self, holder, expected, epoch, *, store_epoch=0, lease_s=LEASE_S):
        return await self.other.take(
            holder=holder, expected_epoch=expected, epoch=epoch, lease_s=lease_s, store_epoch=store_epoch
        )

    async def led_by_a(self, *in_sync):
        """``a`` leads under epoch 1 with these in sync."""
        assert await self.take("a", 0, 1)
        assert await self.leader.renew(holder="a", epoch=1, in_sync=in_sync) == (True, "a", 1)

    async def write(self, **fields):
        """Puts something else into the key."""
        key = self.registry.key("lease", "0")
        await self.registry.attempt(lambda redis: redis.hset(key, mapping=fields))

    async def wipe(self):
        await self.registry.attempt(lambda redis: redis.delete(self.registry.key("lease", "0")))


@pytest.fixture(params=["a server", "in virtual time"])
def shard(request):
    """Runs a coroutine function with the shard of this test alone: the simulated Redis answers as a real one does."""

    def run(use):
        def with_shard(registry):
            return use(Shard(registry))

        if request.param == "in virtual time":
            return in_virtual_time(with_shard)
        url = request.getfixturevalue("shared_server").url
        return with_registry(url, f"{request.function.__name__:.60}", with_shard)

    return run


@given_by("shard")
async def test_a_key_that_is_missing_goes_to_the_first_who_expects_none(it):
    assert await it.leader.read() == LeaseView()
    assert not await it.take("a", 3, 4)  # it expects one that is not there
    assert await it.take("a", 0, 1)
    assert not await it.take("b", 0, 1)
    view = await it.leader.read()
    assert (view.holder, view.epoch, view.in_sync, view.ended) == ("a", 1, {"a"}, False)
    assert 0 <= view.age_s < 30


@given_by("shard")
async def test_only_who_is_in_sync_takes_over_and_only_when_it_has_run_out(it):
    await it.led_by_a("b")
    assert not await it.take("b", 1, 2, lease_s=LONG_LEASE_S)
    assert not await it.take("a", 1, 2, lease_s=LONG_LEASE_S)  # a copy of its store, under its name
    await asyncio.sleep(LEASE_S)
    assert not await it.take("c", 1, 2)
    assert not await it.take("b", 2, 3)  # another epoch than it has
    assert await it.take("b", 1, 2)
    assert not await it.take("a", 1, 2)
    assert await it.leader.renew(holder="a", epoch=1, in_sync=()) == (False, "b", 2)  # it hears who leads
    assert (await it.leader.read()).holder == "b"


@given_by("shard")
async def test_a_taker_that_dies_before_its_first_renewal_leaves_the_lease_to_the_others_in_sync(it):
    await it.led_by_a("b", "c")
    await asyncio.sleep(LEASE_S)
    assert await it.take("b", 1, 2)
    view = await it.leader.read()
    assert (view.holder, view.epoch, view.in_sync, view.synced) == ("b", 2, {"a", "b", "c"}, 1)
    await asyncio.sleep(LEASE_S)
    assert not await it.take("z", 2, 3)
    assert await it.take("c", 2, 3)
    assert (await it.leader.read()).synced == 1  # nobody has published anything since
    assert (await it.other.renew(holder="c", epoch=3, in_sync=()))[0]
    view = await it.leader.read()
    assert (view.in_sync, view.synced) == ({"c"}, 3)
    await asyncio.sleep(LEASE_S)
    assert not await it.take("a", 3, 4)


@given_by("shard")
async def test_the_holder_takes_over_from_itself_like_the_others(it):
    await it.led_by_a("b")
    await asyncio.sleep(LEASE_S)
    assert await it.take("a", 1, 2)
    assert (await it.leader.read()).holder == "a"


@given_by("shard")
async def test_a_leader_puts_back_what_redis_has_lost_unless_another_was_given_its_epoch(it):
    await it.led_by_a("b")
    await it.wipe()
    assert await it.leader.renew(holder="a", epoch=1, in_sync=("b",)) == (True, "a", 1)
    await it.write(holder="z", epoch=0)  # old data
    assert (await it.leader.renew(holder="a", epoch=1, in_sync=("b",)))[0]
    assert (await it.leader.read()).in_sync == {"a", "b"}
    await it.wipe()
    assert await it.take("b", 0, 1)
    assert await it.leader.renew(holder="a", epoch=1, in_sync=()) == (False, "b", 1)


@given_by("shard")
async def test_a_renewal_that_comes_after_its_successor_changes_nothing(it):
    await it.led_by_a("b")
    late, in_time = LeaseKey(it.registry, 0), it.leader
    await in_time.renew(holder="a", epoch=1, in_sync=())  # b lags
    assert not (await late.renew(holder="a", epoch=1, in_sync=("b",)))[0]  # asked before, and given up
    assert (await it.leader.read()).in_sync == {"a"}


@given_by("shard")
async def test_a_key_older_than_the_store_or_without_an_in_sync_set_goes_to_whoever_has_seen_that(it):
    await it.led_by_a()
    assert not await it.take("b", 1, 6)
    assert not await it.take("b", 1, 6, store_epoch=1)
    assert await it.take("b", 1, 6, store_epoch=5)
    view = await it.leader.read()
    assert (view.in_sync, view.synced) == ({"b"}, 0)  # what the key said of others is as old as the rest of it
    await it.wipe()
    await it.write(holder="host:1", epoch="4", renewed_at="0")
    assert (await it.leader.read()).in_sync == frozenset()
    assert not await it.take("b", 4, 5, store_epoch=3)
    assert await it.take("b", 4, 5, store_epoch=4)


@given_by("shard")
async def test_a_leader_leaves_the_lease_to_another_one_which_needs_not_wait(it):
    await it.led_by_a("c")
    await it.leader.give_up(holder="z", epoch=1, to="b")
    await it.leader.give_up(holder="a", epoch=2, to="b")
    assert (await it.leader.read()).holder == "a"
    await it.leader.give_up(holder="a", epoch=1, to="b")
    view = await it.leader.read()
    assert (view.holder, view.epoch, view.in_sync, view.synced) == ("b", 1, {"b"}, 0)
    assert not (await it.leader.renew(holder="a", epoch=1, in_sync=()))[0]
    assert not await it.take("a", 1, 2)
    assert await it.take("b", 1, 2)
    assert (await it.leader.read()).synced == 0  # it founds a line, however often it begins


@given_by("shard")
async def test_without_failover_the_lease_goes_to_higher_epochs_only_and_stays_with_who_took_it(it):
    assert await it.take("x", 0, 3)  # the answer got lost
    for _ in range(2):
        assert await it.leader.lead(holder="x", epoch=3) == (True, "x", 3)
    assert (await it.leader.read()).in_sync == {"x"}
    for holder, epoch in [("y", 3), ("y", 2), ("x", 2)]:
        assert await LeaseKey(it.registry, 0).lead(holder=holder, epoch=epoch) == (False, "x", 3)
    assert await it.other.lead(holder="y", epoch=4) == (True, "y", 4)
    assert await it.leader.lead(holder="x", epoch=3) == (False, "y", 4)
    await it.wipe()
    assert await LeaseKey(it.registry, 0).lead(holder="z", epoch=1) == (True, "z", 1)


@given_by("shard")
async def test_the_end_is_said_by_the_holder_alone_and_forgotten_when_somebody_leads_again(it):
    await it.led_by_a()
    await it.leader.end(holder="b", epoch=1)
    await it.leader.end(holder="a", epoch=2)
    assert not (await it.leader.read()).ended
    await it.leader.end(holder="a", epoch=1)
    assert (await it.leader.read()).ended
    await asyncio.sleep(LEASE_S)
    assert await it.take("a", 1, 2)
    assert not (await it.leader.read()).ended


@given_by("shard")
async def test_a_server_that_is_not_there_is_unavailable(it):
    nowhere = Registry("redis://127.0.0.1:9", "r")
    gone = LeaseKey(nowhere, 0)
    for attempt in (gone.read(), gone.renew(holder="a", epoch=1, in_sync=()), gone.end(holder="a", epoch=1)):
        with pytest.raises(Unavailable):
            await attempt
    await nowhere.aclose()
