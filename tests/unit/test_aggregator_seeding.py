"""Version 0 comes whole from one island, whoever dies on the way."""

from aggregator.events import Flaw, Plant, Publish
from broker.messages import FleetState, Leave, Reason, Refused, Seed
from tests.helpers import Desk, notes, of, sent


def seed(desk, island_id, *fragments):
    said = []
    for p in fragments:
        said += desk.say(island_id, Seed(fragment_id=p, payload=f"{p} of {island_id}"))
    return said


def desk(*island_ids, **settings):
    made = Desk(**{"fragments": 3, "sync_interval": 6, **settings})
    for island_id in island_ids:
        made.join(island_id)
    return made


def wanted(made, island_id):
    return sent(made.beat(island_id, 0, versions=(-1,) * 3), FleetState, island_id)[-1].seed


def test_the_first_island_is_asked_for_everything_and_the_others_for_nothing():
    made = desk("a", "b")
    assert wanted(made, "a") == (0, 1, 2)
    assert wanted(made, "b") == ()


def test_what_has_come_is_not_asked_for_again():
    made = desk("a")
    seed(made, "a", 1)
    assert wanted(made, "a") == (0, 2)


def test_the_run_begins_when_all_of_version_0_is_durable_and_publishes_it_whole():
    made = desk("a", "b")
    said = seed(made, "a", 0, 1)
    assert not of(said, Publish)
    assert sent(made.beat("b", 0, versions=(-1,) * 3), FleetState, "b")[-1].versions == (-1, -1, -1)
    said = seed(made, "a", 2)
    assert [(p.fragment_id, p.fragment_version) for p in of(said, Publish)] == [(0, 0), (1, 0), (2, 0)]
    assert made.run.phase == "running"
    assert notes(said, "run.seeded")


def test_version_0_is_not_published_before_it_is_durable():
    made = desk("a")
    made.writes = False
    assert not of(seed(made, "a", 0, 1, 2), Publish)
    assert not of(made.write() + made.write(), Publish)
    assert len(of(made.write(), Publish)) == 3


def test_a_seed_from_somebody_else_is_ignored():
    made = desk("a", "b")
    assert not of(seed(made, "b", 0), Plant)


def test_a_second_copy_of_a_seed_is_ignored():
    made = desk("a")
    made.computes = False
    assert len(of(seed(made, "a", 0, 0), Plant)) == 1


def test_a_flawed_seed_is_refused_and_asked_for_again():
    made = desk("a")
    flaw = Flaw(reason=Reason.NOT_FINITE, detail="NaN in w0")
    said = made.say("a", Seed(fragment_id=0, payload="x"), flaw=flaw)
    assert [(r.reason, r.detail) for r in sent(said, Refused, "a")] == [(Reason.NOT_FINITE, "NaN in w0")]
    assert 0 in wanted(made, "a")


def test_a_seed_of_an_unknown_fragment_is_refused():
    assert sent(seed(desk("a"), "a", 7), Refused, "a")[0].reason is Reason.UNKNOWN_FRAGMENT


def test_a_seeder_that_dies_half_way_is_replaced_and_nothing_of_it_is_kept():
    made = desk("a", "b")
    seed(made, "a", 0, 1)
    made.now_s = 5.0
    made.beat("b", 0, versions=(-1,) * 3)
    made.run_to(7.0)  # a fell silent at 0
    assert wanted(made, "b") == (0, 1, 2)
    seed(made, "b", 2)
    assert made.run.phase == "seeding"
    seed(made, "b", 0, 1)
    assert made.run.phase == "running"


def test_a_seeder_that_leaves_is_replaced_at_once():
    made = desk("a", "b")
    seed(made, "a", 0)
    made.say("a", Leave(inner_step=0, tokens=0, reason="bye"))
    assert wanted(made, "b") == (0, 1, 2)


def test_a_new_life_of_the_seeder_is_asked_for_all_of_it_again():
    made = desk("a")
    seed(made, "a", 0, 1)
    made.join("a")
    assert wanted(made, "a") == (0, 1, 2)


def test_what_is_computed_of_a_dead_seeder_is_never_taken_for_the_next_ones():
    """The next seeder is asked once nothing of the last one is under way: a completion does not say whose it is."""
    made = desk("a", "b")
    made.computes = False
    seed(made, "a", 0)
    made.join("a")  # a new life, while the old one's fragment 0 is decoded
    assert wanted(made, "a") == ()
    assert not of(seed(made, "a", 0), Plant)
    made.compute()
    assert wanted(made, "a") == (0, 1, 2)
    made.computes = True
    seed(made, "a", 0, 1, 2)
    assert made.run.phase == "running"


def test_what_is_written_of_a_dead_seeder_does_not_make_the_next_ones_durable():
    made = desk("a", "b")
    made.writes = False
    seed(made, "a", 0)
    made.say("a", Leave(inner_step=0, tokens=0, reason="bye"))
    assert wanted(made, "b") == ()
    made.write()  # the record of the farewell, or fragment 0
    made.write()
    made.writes = True
    assert wanted(made, "b") == (0, 1, 2)
    assert len(of(seed(made, "b", 0, 1, 2), Publish)) == 3


def test_a_version_0_made_of_two_islands_is_never_taken_for_whole_after_a_restart():
    made = desk("a", "b")
    seed(made, "a", 0, 1)
    made.say("a", Leave(inner_step=0, tokens=0, reason="bye"))
    wanted(made, "b")
    seed(made, "b", 2)  # now the disk holds all three fragments, of two islands
    assert set(made.disk.commits) == {0, 1, 2}
    again = made.restarted()
    assert again.run.phase == "seeding"
    again.beat("b", 0, versions=(-1,) * 3)
    assert wanted(again, "b") == (0, 1, 2)


def test_a_version_0_that_was_whole_is_there_after_a_restart():
    made = desk("a")
    seed(made, "a", 0, 1, 2)
    again = made.restarted()
    assert again.run.phase == "running"
    assert again.run.versions == (0, 0, 0)
