"""Copies in an object store, without one: what is uploaded and deleted, by whom, when; what a restore leaves out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.copy_rules import planning, sets
from aggregator.copy_rules.planning import CopyClock, gap, replaced, restored_epoch, surplus
from aggregator.copy_rules.sets import CompleteSet, CopiedFile, CopiedVersion, Part, claim_key, lead_key, newest_sets
from aggregator.interface.place import place_of
from broker.base.errors import ConfigError
from tests.profiles import examples


def digest(*what):
    return f"{abs(hash(what)):032x}"[-32:]


def a_file(path, content, *, packed=False):
    part = Part(start=0, size=10, digest=digest(path, content), packed=packed)
    return CopiedFile(path=path, parts=(part,))


def a_set(versions=(3, 4), **changes):
    """A set of a store with so many fragments, whose files say which versions they are of."""
    files = [a_file(f"store/fragments/{p:03d}/{v:08d}.commit", v) for p, v in enumerate(versions)]
    fields = {
        "run_id": "demo",
        "store": "hub-1",
        "epoch": 3,
        "serial": 1,
        "time_s": 1000.0,
        "ended": False,
        "versions": tuple(CopiedVersion(fragment_id=p, version=v, digest=digest(p, v)) for p, v in enumerate(versions)),
        "files": (*files, a_file("store/ledger.jsonl", versions, packed=True), a_file("store/run.msgpack", versions)),
    }
    return CompleteSet(**(fields | changes))


def test_a_set_comes_back_as_it_was_written():
    whole = a_set(ended=True, shard=(1, 2), roster=(3, 17))
    assert sets.read_set(sets.write_set(whole)) == whole
    assert sets.order_of(whole.key) == (3, 1)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"format":1', '"format":2', "format 2"),
        ('"epoch":3', '"epoch":-3', "no count"),
        ("store/run.msgpack", "store/../../run.msgpack", "no path below"),
        ('"parts":[[0', '"parts":[[4', "expected one from 0"),
        ('"serial":1,', "", "lacks a field"),
    ],
)
def test_a_set_that_cannot_be_ours_is_refused_with_what_is_wrong(old, new, said):
    text = sets.write_set(a_set()).decode()
    assert old in text
    with pytest.raises(ValueError, match=said):
        sets.read_set(text.replace(old, new).encode())


@pytest.mark.parametrize(
    ("text", "query", "options"),
    [
        ("s3://bucket/run", "endpoint=http://h:9&region=eu", {"aws_endpoint": "http://h:9", "aws_region": "eu"}),
        ("gs://bucket/a/b", "endpoint=http://127.0.0.1:1", {"google_base_url": "http://127.0.0.1:1"}),
        ("az://account/container/x", "endpoint=https://x/y", {"azure_storage_endpoint": "https://x/y"}),
        ("file:///mnt/x", "", {}),
    ],
)
def test_an_address_of_each_kind_is_taken_and_a_server_of_ones_own_as_its_option(text, query, options):
    assert place_of(text + "/").url == text
    place = place_of(f"{text}?{query}")
    assert (place.url, place.options) == (text, options)
    assert place.plain_http is ("endpoint=http:" in query)


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("bucket/run", "must begin with s3://"),
        ("ftp://host/x", "must begin with s3://"),
        ("s3:///run", "names no bucket"),
        ("s3://key:secret@bucket/run", "must not hold a password"),
        ("s3://bucket/run?endpiont=http://x", "unknown option 'endpiont': options of s3:// are endpoint and region"),
        ("file:///mnt/x?endpoint=http://x", "options of file:// are none"),
        ("file://relative/path", "an absolute path"),
        ("file:///", "an absolute path"),
    ],
)
def test_an_address_that_cannot_work_is_refused_with_the_cure(text, cure):
    with pytest.raises(ConfigError) as caught:
        place_of(text)
    assert cure in str(caught.value)
    assert "secret" not in str(caught.value)


ME = {"run_id": "demo", "store": "hub-1", "epoch": 3}


@pytest.mark.parametrize(
    ("newest", "there", "said"),
    [
        (None, (), ""),
        (a_set(), (lead_key(3, "hub-1"),), ""),
        (a_set(epoch=2, store="hub-0"), (lead_key(2, "hub-0"), lead_key(3, "hub-1")), ""),
        (a_set(run_id="other"), (), "copies of the run 'other'"),
        (a_set(), (lead_key(1003, "hub-2"),), "hub-2 is copied there under epoch 1003"),
        (a_set(epoch=4), (), "under epoch 4"),
        (a_set(store="hub-2"), (), "hub-2 is copied there under epoch 3"),
        (a_set(), (claim_key(1003),), ""),  # a restore that was only tried
    ],
)
def test_an_aggregator_copies_until_one_of_a_later_epoch_does(newest, there, said):
    reason = replaced(**ME, newest=newest, there=there)
    assert said in reason
    assert bool(reason) is bool(said)


def test_a_restore_takes_an_epoch_above_all_that_are_known():
    assert restored_epoch([]) == 1000
    assert restored_epoch([a_set(epoch=7).key]) == 1007
    assert restored_epoch([a_set(epoch=7).key, claim_key(1007)]) == 2007
    assert restored_epoch([claim_key(1007), lead_key(1009, "x-1")]) == 2009


def test_a_restore_leaves_out_more_versions_than_can_have_been_made():
    now = a_set((100, 90), time_s=1000.0)
    before = a_set((70, 70), time_s=990.0)  # three versions a second
    assert gap([now, before], 1000.0) == planning.LEAST_GAP
    assert gap([now, before], 1100.0) == planning.LEAST_GAP + 4 * 3 * 100
    assert gap([now], 1100.0) == planning.LEAST_GAP + 4 * 100
    assert gap([now, before], 0.0) == planning.LEAST_GAP, "a clock that is behind"


def test_copies_follow_each_other_so_that_none_gets_older_than_it_may():
    clock = CopyClock(60.0, 0.0)
    assert clock.wait_s(0.0) == 0.0
    clock.done(0.0, 5.0)
    assert clock.wait_s(5.0) == 50.0  # begins at 55, is through at 60
    clock.done(55.0, 105.0)
    assert clock.wait_s(105.0) == 0.0  # by now at 85: not more than half of the time is left for it


def test_attempts_that_fail_are_repeated_more_and_more_slowly_and_reported_once_it_takes_too_long():
    clock, waits = CopyClock(60.0, 0.0), []
    clock.done(0.0, 1.0)
    for attempt in range(8):
        now_s = 60.0 + sum(waits)
        assert clock.failed("no network", now_s) is (attempt == 0)
        waits.append(clock.wait_s(now_s))
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60]
    assert clock.late_s(180.0) == 0.0
    assert clock.late_s(181.0) == 181.0
    clock.done(300.0, 301.0)
    assert (clock.late_s(310.0), clock.detail) == (0.0, "")


def test_objects_that_nobody_names_go_and_leads_of_earlier_epochs():
    first, second = (a_set((v, 4), serial=v) for v in (1, 2))
    others = {"objects/orphan/0-00", claim_key(9), lead_key(2, "hub-0"), lead_key(3, "hub-1")}
    there = {*first.object_names(), first.key, *others}
    assert surplus(there, second, [first]) == [lead_key(2, "hub-0"), "objects/orphan/0-00"]


STEPS = st.one_of(
    st.tuples(st.just("commit"), st.integers(0, 2)),
    # A copy that ends after so many of its operations, in the middle of which so many versions are committed.
    st.tuples(st.just("copy"), st.integers(0, 30), st.integers(0, 3)),
    st.tuples(st.just("restart"), st.just(0)),
)


@examples(300)
@given(st.lists(STEPS, max_size=40))
def test_whatever_fails_a_set_names_what_is_there_of_one_state_and_nothing_else_is_left_by_a_copy_that_is_through(
    steps,
):
    versions, epoch = [1, 1, 1], 1
    states = {tuple(versions)}
    there, complete = {}, 0

    def commit(p):
        versions[p] += 1
        states.add(tuple(versions))

    for kind, *numbers in steps:
        if kind == "commit":
            commit(numbers[0])
        elif kind == "restart":
            epoch += 1
        else:
            ends_after, meanwhile = numbers
            names = newest_sets(there)
            before = there[names[0]] if names else None
            assert replaced(run_id="demo", store="hub-1", epoch=epoch, newest=before, there=there) == ""
            serial = before.serial + 1 if before is not None and before.epoch == epoch else 1
            wanted = replace(a_set(tuple(versions)), epoch=epoch, serial=serial)
            puts = [*((key, None) for key in wanted.object_names() if key not in there), (wanted.key, wanted)]
            gone = surplus(there, wanted, [before] if before is not None else [])
            for p in range(meanwhile):
                commit(p)
            there.update(puts[:ends_after])
            for key in gone[: max(0, ends_after - len(puts))]:
                del there[key]
            complete += ends_after >= len(puts)
            if ends_after >= len(puts) + len(gone):
                kept = newest_sets(there)
                assert len(kept) == min(complete, 2)
                assert there.keys() == {*kept, *(key for name in kept for key in there[name].object_names())}
        for name in newest_sets(there):
            whole = there[name]
            assert set(whole.object_names()) <= there.keys(), f"{name} names what is not there"
            assert tuple(each.version for each in whole.versions) in states
        assert bool(newest_sets(there)) is (complete > 0)
