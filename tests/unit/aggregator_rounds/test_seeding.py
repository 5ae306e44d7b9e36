"""Version 0 comes whole from one island, whoever dies on the way."""

from dataclasses import replace

import pytest

from aggregator.interface.events import Flaw, Plant, Publish
from aggregator.rounds.seeding import PATIENCE_S
from broker.wire.messages import FleetState, Leave, Reason, Refused, Seed, Welcome
from tests.aggregator_hand import Desk, notes, of, sent, tensors

ALL = (0, 1, 2)


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


def test_the_run_begins_when_all_of_version_0_has_come_from_the_first_island_and_publishes_it_whole():
    made = desk("a", "b")
    assert (wanted(made, "a"), wanted(made, "b")) == (ALL, ())
    assert not of(seed(made, "b", 0), Plant)
    assert not of(seed(made, "a", 0, 1), Publish)
    assert sent(made.beat("b", 0, versions=(-1,) * 3), FleetState, "b")[-1].versions == (-1, -1, -1)
    said = seed(made, "a", 2)
    assert [(p.fragment_id, p.fragment_version) for p in of(said, Publish)] == [(0, 0), (1, 0), (2, 0)]
    assert made.phase == "running"
    assert notes(said, "run.seeded")


def test_version_0_is_not_published_before_it_is_durable():
    made = desk("a")
    made.writes = False
    assert not of(seed(made, "a", *ALL), Publish)
    assert not of(made.write() + made.write(), Publish)
    assert len(of(made.write(), Publish)) == 3


@pytest.mark.parametrize(
    ("reason", "islands", "asked"),
    [
        pytest.param(Reason.NOT_FINITE, "a", "a", id="nobody else could supply it"),
        pytest.param(Reason.NOT_FINITE, "ab", "b", id="its parameters cannot be taken"),
        pytest.param(Reason.CHECKSUM, "ab", "a", id="damaged on its way"),
    ],
)
def test_a_flawed_seed_is_refused_and_asked_for_again_or_of_another_at_once(reason, islands, asked):
    made = desk(*islands)
    said = made.say("a", Seed(fragment_id=0, payload="x"), flaw=Flaw(reason=reason, detail="of w0"))
    assert [(r.reason, r.detail) for r in sent(said, Refused, "a")] == [(reason, "of w0")]
    assert {name: wanted(made, name) for name in islands} == {name: ALL if name == asked else () for name in islands}


def test_a_seed_of_an_unknown_fragment_is_refused():
    assert sent(seed(desk("a"), "a", 7), Refused, "a")[0].reason is Reason.UNKNOWN_FRAGMENT


def test_a_seeder_that_dies_half_way_is_replaced_and_nothing_of_it_is_kept():
    made = desk("a", "b")
    seed(made, "a", 0, 1)
    made.now_s = 5.0
    made.beat("b", 0, versions=(-1,) * 3)
    made.run_to(7.0)  # a fell silent at 0
    assert wanted(made, "b") == ALL
    seed(made, "b", 2)
    assert made.phase == "seeding"
    seed(made, "b", 0, 1)
    assert made.phase == "running"


def wait_for_seeds(made, seconds, *island_ids):
    """Lets islands send heartbeats and nothing else."""
    for _ in range(round(2 * seconds)):
        made.now_s += 0.5
        made.tick()
        for island_id in island_ids:
            made.beat(island_id, 0, versions=(-1,) * len(made.versions))


def test_a_seeder_that_lives_and_supplies_nothing_is_passed_over():
    """Its bulk port is blocked, say: its heartbeats come all the same."""
    made = desk("a", "b")
    seed(made, "a", 0)
    wait_for_seeds(made, PATIENCE_S - 1, "a", "b")
    assert wanted(made, "a") == (1, 2)
    wait_for_seeds(made, 2, "a", "b")
    assert notes(made.take(), "seeder.passed_over") == [{"island": "a", "incarnation": 1}]
    assert wanted(made, "a") == ()
    assert wanted(made, "b") == ALL
    assert not of(seed(made, "a", 1), Plant)
    seed(made, "b", *ALL)
    assert made.phase == "running"


def test_a_lone_seeder_is_asked_on_and_keeps_what_it_has_supplied():
    made = desk("a")
    seed(made, "a", 0)
    wait_for_seeds(made, 10 * PATIENCE_S, "a")
    assert wanted(made, "a") == (1, 2)
    seed(made, "a", 1, 2)
    assert made.phase == "running"


def test_flawed_seeds_without_end_do_no_harm_and_make_nobody_wait_longer():
    made = desk("a", quarantine_s=0.0)
    flawed = {"message": Seed(fragment_id=0, payload="x"), "flaw": Flaw(reason=Reason.NOT_FINITE, detail="NaN in w0")}
    for _ in range(1200):
        made.say("a", **flawed)
    made.join("b")
    made.say("a", **flawed)
    assert wanted(made, "b") == ALL
    made.join("c")
    wait_for_seeds(made, PATIENCE_S + 1, "a", "b", "c")
    assert wanted(made, "c") == ALL


def test_an_island_in_quarantine_is_not_asked_for_version_0():
    made = desk("a", "b", quarantine_s=30.0)
    for _ in range(3):
        made.beat("a", 4, tokens=10**9)
    made.tick()
    assert wanted(made, "b") == ALL


# --- a model that nobody supplied ---------------------------------------------------------------------------------


def narrow():
    return tuple(replace(t, shape=(4, 4)) for t in tensors(3))


@pytest.mark.parametrize("restarts", [False, True])
def test_a_model_whose_island_left_before_it_supplied_any_of_it_is_forgotten(restarts):
    made = desk()
    made.join("a", model=narrow())
    made.say("a", Leave(inner_step=0, tokens=0, reason="wrong width"))
    if restarts:
        made = made.restarted()
    assert sent(made.join("b"), Welcome)
    seed(made, "b", *ALL)
    assert made.phase == "running"
    (again,) = sent(made.join("a"), Welcome)
    assert again.incarnation == 3, "its first life is over, whatever it still says"
    made.check_books()


def test_a_model_whose_island_lives_or_has_supplied_some_of_it_stays():
    made = desk("a")

    def refusals(of_a_life):
        return [refused.reason for refused in sent(of_a_life.join("b", model=narrow()), Refused)]

    assert refusals(made) == [Reason.MANIFEST]
    seed(made, "a", 0)
    made.say("a", Leave(inner_step=0, tokens=0, reason="bye"))
    assert refusals(made) == refusals(made.restarted()) == [Reason.MANIFEST]


def test_what_is_computed_of_a_dead_seeder_is_never_taken_for_the_next_ones():
    """The next seeder is asked once nothing of the last one is under way: a completion does not say whose it is."""
    made = desk("a", "b")
    made.computes = False
    assert len(of(seed(made, "a", 0, 0), Plant)) == 1  # the second copy is ignored
    made.join("a")  # a new life, while the old one's fragment 0 is decoded
    assert wanted(made, "a") == ()
    assert not of(seed(made, "a", 0), Plant)
    made.compute()
    assert wanted(made, "a") == ALL
    made.computes = True
    seed(made, "a", *ALL)
    assert made.phase == "running"


def test_a_version_0_made_of_two_islands_or_of_which_a_part_is_durable_is_asked_for_whole_after_a_restart():
    part = desk("a")
    seed(part, "a", 0, 1)
    assert wanted(part.restarted(), "a") == ALL
    made = desk("a", "b")
    seed(made, "a", 0, 1)
    made.say("a", Leave(inner_step=0, tokens=0, reason="bye"))
    wanted(made, "b")
    seed(made, "b", 2)  # now the disk holds all three fragments, of two islands
    assert set(made.disk.commits) == {*ALL}
    again = made.restarted()
    assert again.phase == "seeding"
    again.beat("b", 0, versions=(-1,) * 3)
    assert wanted(again, "b") == ALL


@pytest.mark.parametrize(
    ("differs", "phase"),
    [
        pytest.param({}, "running", id="whole"),
        # A standby keeps a fragment that it has, under that attempt's id, where the next leader is sent the same bytes.
        pytest.param({"round_id": 0}, "running", id="the same bytes of an earlier attempt"),
        pytest.param({"round_id": 0, "digest": "of b"}, "seeding", id="other bytes of an earlier attempt"),
    ],
)
def test_a_store_goes_on_after_a_restart_from_a_version_0_that_is_whole(differs, phase):
    made = desk("a")
    seed(made, "a", *ALL)
    made.disk.commits[1] = replace(made.disk.commits[1], **differs)
    again = made.restarted()
    assert again.phase == phase
    assert (again.versions == (0, 0, 0)) is (phase == "running")


def test_with_standbys_version_0_is_published_after_the_record_that_names_it():
    """Whoever takes over goes by that record."""
    made = desk("a", failover=True)
    made.writes = False
    seed(made, "a", *ALL)
    for _ in range(3):
        assert not of(made.write(), Publish)
    assert made.disk.record["phase"] == "seeding" or not made.disk.record["planted"]
    assert len(of(made.write(), Publish)) == 3
    assert [p for p, _ in made.disk.record["planted"]] == [0, 1, 2]
