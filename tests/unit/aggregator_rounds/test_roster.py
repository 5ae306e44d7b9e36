"""Several shards decide as one who is in the fleet, from which step, with which data, and that version 0 is whole."""

from dataclasses import replace

import pytest

from aggregator.interface.events import SaveRun
from aggregator.rounds.roster import AGAIN_S
from broker.wire.messages import AGGREGATOR, DataRange, FleetState, Leave, Phase, Reached, Refused, Rostered
from tests.aggregator_hand import Desk, notes, of, sent
from tests.shard_bench import Shards, shards

# --- joins ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [1, 2])
def test_a_join_is_answered_only_when_every_shard_has_the_new_life_on_record(late):
    made = Shards(3)
    made.desks[late].writes = False
    made.join("a")
    while not made.welcomes("a"):
        made.write(late)
    (welcome,) = made.welcomes("a")
    assert (welcome.incarnation, welcome.start_step) == (1, 0)
    assert [made.on_record(n, "a") for n in range(3)] == [(1, (0, 0), True)] * 3


def test_nobody_is_welcome_while_a_shard_is_away_and_it_is_told_again_when_it_is_back():
    made = Shards()
    made.cut = {1}
    made.join("a")
    made.run_to(5.0)
    assert not made.welcomes("a")
    assert any("shard 1 is silent" in text for text in made.desks[0].troubles)
    made.cut.clear()
    made.run_to(5.0 + 2 * AGAIN_S)
    assert len(made.welcomes("a")) == 1
    assert not made.desks[0].troubles


@pytest.mark.parametrize("furthest", [0, 1])
def test_a_new_life_begins_at_the_furthest_step_that_any_shard_knows(furthest):
    made = shards("a")
    made.beat("a", 12)
    made.offer("a", 0, 4, fragment=1 - furthest)
    made.offer("a", 0, 9, fragment=furthest)
    made.join("a")
    assert [(w.incarnation, w.start_step, w.start_tokens) for w in made.welcomes("a")] == [(1, 0, 0), (2, 9, 90)]
    for n, desk in enumerate(made.desks):
        assert made.on_record(n, "a") == (2, (9, 90), True)
        desk.check_books()


def test_of_an_earlier_life_nothing_is_taken_from_when_its_end_is_known():
    made = shards("a")
    made.beat("a", 12)
    made.desks[1].writes = False
    made.join("a")  # shard 1 knows, and has not written it down
    made.offer("a", 0, 9, fragment=1)
    while made.desks[1].writing:
        made.write(1)
    assert [w.start_step for w in made.welcomes("a")] == [0, 0]
    assert not made.desks[1].waiting_bytes


def test_nothing_is_taken_from_a_life_that_has_not_begun():
    made = shards("a")
    made.cut = {1}
    made.join("a")
    made.incarnations["a"] = 2  # as if it had been told
    before = len(made.said[0])
    made.beat("a", 50)
    assert not sent(made.said[0][before:], FleetState, "a")
    assert not sent(made.said[0][before:], Refused)
    assert made.desks[0].live == []


def test_an_island_that_joins_twice_before_the_shards_agree_begins_once_with_its_block():
    made = shards("a")
    made.desks[1].writes = False
    made.join("a")
    made.incarnations["a"] = 2  # that process dies, too
    made.join("a")
    while made.desks[1].writing:
        made.write(1)
    (welcome,) = made.welcomes("a")[1:]
    assert welcome.incarnation == 3
    assert len(notes(made.said[0], "island.joined")) == 2
    (block,) = welcome.blocks
    assert made.tenure(0, block.number) == made.tenure(1, block.number)
    assert (made.tenure(0, block.number).owner, block.from_batch) == ("a", 0)


def test_a_shard_that_restarts_in_a_join_does_not_let_it_begin_twice():
    made = shards("a")
    made.beat("a", 12)
    made.offer("a", 0, 9, fragment=1)
    made.desks[1].writes = False
    made.join("a")
    made.write(1)  # the end of the first life; the beginning of the second is lost
    made.restart(1)
    made.run_to(2.0)
    assert [(w.incarnation, w.start_step) for w in made.welcomes("a")] == [(1, 0), (2, made.on_record(1, "a")[1][0])]
    assert made.on_record(0, "a") == made.on_record(1, "a")


def test_a_restarted_shard_0_brings_a_half_done_join_to_its_end():
    made = shards("a")
    made.beat("a", 12)
    made.offer("a", 0, 4, fragment=0)
    made.offer("a", 0, 9, fragment=1)
    made.cut = {1}
    made.join("a")
    assert made.on_record(0, "a")[2] is False
    made.restart(0)
    made.run_to(1.0)
    assert len(made.welcomes("a")) == 1
    made.cut.clear()
    made.run_to(3.0)
    assert [(w.incarnation, w.start_step) for w in made.welcomes("a")] == [(1, 0), (2, 9)]


def test_an_island_that_has_left_has_left_in_every_shard():
    made = shards("a", "b")
    made.say("b", Leave(inner_step=0, tokens=0, reason="bye"), shard=0)  # to the other it got lost
    assert [desk.live for desk in made.desks] == [["a"]] * 2


# --- rosters --------------------------------------------------------------------------------------------------


def test_an_older_roster_changes_nothing_and_neither_does_the_same_again():
    made = shards("a")
    old = made.newest_roster()
    made.join("b")
    new, record = made.newest_roster(), made.desks[1].disk.record
    assert (old.epoch, old.serial) < (new.epoch, new.serial)
    later = replace(old, serial=new.serial - 1, phase=Phase.ENDED, members=(), tenures=())
    earlier_epoch = replace(old, epoch=old.epoch - 1, serial=new.serial + 100, phase=Phase.ENDED)
    for roster in (old, later, earlier_epoch, new):
        assert not of(made.desks[1].say(AGGREGATOR, roster), SaveRun)
    assert made.desks[1].disk.record == record
    assert made.phases[1] is Phase.RUNNING


def test_what_a_shard_that_does_not_exist_or_an_earlier_leader_says_is_not_believed():
    made = shards("a")
    made.restart(1)
    made.run_to(2.0)
    said = sent(made.said[1], Rostered)[-1]
    assert said.epoch == 2
    far = (Reached(share=1, batch=3),)
    for lie in (replace(said, shard=7, reached=far), replace(said, shard=0, reached=far), replace(said, epoch=1)):
        serial = made.desks[0].core.run.other_shards.agreed_serial
        made.desks[0].say(AGGREGATOR, replace(lie, roster_serial=serial + 100))
        assert made.desks[0].core.run.other_shards.agreed_serial == serial
    made.join("a")
    made.beat("a", 1)
    assert [each["reached"] for each in notes(made.said[0], "block.ended")] == [0]


def test_what_was_agreed_under_an_earlier_epoch_of_shard_0_counts_for_nothing_under_the_next():
    made = shards("a")
    said = sent(made.said[1], Rostered)[-1]
    made.cut = {1}
    made.restart(0)
    assert said.roster_serial > made.desks[0].saved_serial
    made.desks[0].say(AGGREGATOR, said)
    made.join("b")
    assert not made.welcomes("b")


# --- version 0 ------------------------------------------------------------------------------------------------


def test_version_0_is_published_when_every_shard_has_its_part_on_the_disk_and_shard_0_has_written_that_down():
    made = Shards(fragments=4)
    made.join("a")
    made.seed("a", 0, 1, 2)
    made.desks[0].writes = made.desks[1].writes = False
    made.seed("a", 3)
    for n in (1, 0):
        assert made.phases == [Phase.SEEDING] * 2
        assert not made.published(0)
        assert not made.published(1)
        while made.desks[n].writing:
            made.write(n)
        made.desks[n].writes = True
    assert made.phases == [Phase.RUNNING] * 2
    assert made.published(0) == {(0, 0), (2, 0)}
    assert made.published(1) == {(1, 0), (3, 0)}
    assert made.desks[0].disk.record["phase"] == "running"


def test_a_seeder_that_joins_anew_is_asked_for_all_of_it_again():
    made = Shards()
    made.join("a")
    made.seed("a", 1)
    first = made.newest_roster().seeding_id
    made.join("a")
    made.seed("a", 0)
    assert made.phases == [Phase.SEEDING] * 2, "the other half came from an earlier life"
    assert made.newest_roster().seeding_id > first
    made.seed("a", 1)
    assert made.phases == [Phase.RUNNING] * 2


def test_a_shard_that_writes_a_seed_down_takes_the_next_attempt_over_when_it_is_done():
    made = Shards()
    made.join("a")
    first = made.newest_roster().seeding_id
    made.desks[1].writes = False
    made.seed("a", 1)
    writing = made.desks[1].writing.popleft()
    made.desks[1].writes = True
    made.join("a")
    assert made.newest_roster().seeding_id > first
    assert made.desks[1].core.run.origin.seeding_id == first, "what is written now must not be taken for the next one's"
    made.desks[1].writing.append(writing)
    made.write(1)
    made.run_to(2 * AGAIN_S)
    assert made.desks[1].core.run.origin.seeding_id > first
    made.seed("a", 0)
    assert made.phases == [Phase.SEEDING] * 2
    made.seed("a", 1)
    assert made.phases == [Phase.RUNNING] * 2


@pytest.mark.parametrize("restarted", [False, True])
def test_a_begun_run_is_believed_whichever_attempt_its_roster_names(restarted):
    """The successor of shard 0 may begin another attempt, and then read of a run that has begun."""
    made = Shards()
    made.join("a")
    made.seed("a", 1)
    made.cut = {1}
    if restarted:
        made.restart(1)
    roster = made.newest_roster()
    begun = replace(roster, epoch=2, serial=1, phase=Phase.RUNNING, seeding_id=roster.seeding_id + 1_000_000)
    made.desks[1].say(AGGREGATOR, begun)
    made.carry()
    assert made.phases[1] is Phase.RUNNING
    assert made.published(1) == {(1, 0)}


# --- data -------------------------------------------------------------------------------------------------------


def moving():
    """Islands a and b; b was heard last at the beginning, and its block may end after three seconds.

    Four batches of it are merged, or wait to be, in shard 0, and seven in shard 1; it has eight.
    """
    made = shards("a", "b", suspect_after_s=1.0, dead_after_s=2.0, share_takeover_s=3.0, islands=2, sync_interval=8)
    made.beat("b", 12, block=2)
    for p, to in ((0, 4), (1, 7)):
        data = (DataRange(share=2, share_epoch=0, from_batch=8, to_batch=8 + to),)
        made.offer("b", 0, to, fragment=p, data=data)
    return made


def wait(made, at_s):
    """Passes time, in which a begins each block that it is given."""
    while made.now_s < at_s:
        made.run_to(min(at_s, made.now_s + 0.5))
        made.beat("a", 1, block=max(told(made)))


def told(made):
    """Block -> its batches, of island a."""
    blocks = sent(made.said[0], FleetState, "a")[-1].blocks
    return {block.number: (block.from_batch, block.to_batch) for block in blocks}


def test_a_block_that_ends_is_nobodys_first_and_what_no_shard_has_of_it_goes_out_again():
    made = moving()
    made.cut = {1}
    wait(made, 6.0)
    assert made.tenure(0, 2).owner == ""
    assert made.tenure(1, 2).owner == "b"
    made.cut.clear()
    wait(made, 8.0)
    (ended,) = [each for each in notes(made.said[0], "block.ended") if each["block"] == 2]
    assert (ended["reached"], ended["to_batch"]) == (15, 16)
    (again,) = [each for each in notes(made.said[0], "block.given") if each["from_batch"] == 15]
    assert (again["owner"], again["to_batch"]) == ("a", 16)
    for n in (0, 1):
        assert made.tenure(n, again["block"]).owner == "a"


def test_nobody_is_told_of_a_block_before_every_shard_has_it_on_record():
    made = moving()
    made.desks[1].writes = False
    made.beat("a", 1, block=1)
    given = notes(made.said[0], "block.given")[-1]["block"]
    while made.desks[1].writing:
        made.beat("a", 1, block=1)
        assert given not in told(made)
        made.write(1)
    made.beat("a", 1, block=1)
    assert given in told(made)
    assert made.tenure(1, given).owner == "a"


def test_only_shard_0_moves_data():
    made = moving()
    made.cut = {0}
    wait(made, 9.0)
    assert made.tenure(1, 2).owner == "b"


def test_a_disk_that_fails_for_days_makes_no_list_of_rosters_longer():
    desk = Desk(islands=4, shards=2, fragments=2)
    desk.writes = False
    desk.join("a")
    for _ in range(300):
        desk.tick(desk.now_s + 1.0)
        while desk.writing:
            desk.write(fails="no space left")
    desk.tick(desk.now_s + 1.0)
    assert len(desk.core.run.other_shards.rosters) <= 4
    desk.writes = True
    desk.write()
    assert desk.core.run.other_shards.rosters == []
