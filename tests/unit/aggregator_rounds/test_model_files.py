"""The small files of a model are asked for part by part, of who has them, until they are beside the store."""

import pytest

from aggregator.interface.events import FilesKept, KeepFiles
from aggregator.rounds.seeding import FILES_AGAIN_S, MOST_ASKED
from broker.process.demands import FILES, inputs_demanded
from broker.wire.messages import FetchFiles, FilesPart, Seed
from broker.wire.small_files import MOST_PARTS, PART_BYTES
from tests.aggregator_hand import Desk, notes, of, sent

SIZE = 2 * PART_BYTES + 5


def desk(*island_ids, digest="d", **settings):
    made = Desk(islands=3, **settings)
    for island_id in island_ids:
        made.join(island_id, demands=inputs_demanded({FILES: digest} if digest else {}))
    return made


def asked(actions, island_id):
    return [each.part for each in sent(actions, FetchFiles, island_id)]


def give(made, island_id, part, **changes):
    usual = {"digest": "d", "part": part, "num_bytes": SIZE, "payload": f"part {part}"}
    size = changes.pop("payload_bytes", PART_BYTES)
    return made.say(island_id, FilesPart(**usual | changes), payload_bytes=size)


def test_they_come_from_the_seeder_part_by_part_and_are_written_once():
    made = desk("a", "b")
    assert asked(made.beat("b"), "b") == []
    assert asked(made.beat("a"), "a") == [0]
    assert asked(made.beat("a"), "a") == [], "it is on its way"
    assert asked(give(made, "a", 0), "a") == [1]
    assert give(made, "a", 0) == give(made, "b", 1) == give(made, "a", 1, digest="e") == []
    assert asked(give(made, "a", 1), "a") == [2]
    (order,) = of(give(made, "a", 2), KeepFiles)
    assert order == KeepFiles(digest="d", num_bytes=SIZE, parts=("part 0", "part 1", "part 2"))
    assert asked(made.beat("a") + made.beat("b"), "a") == []
    assert notes(made.feed(FilesKept(digest="d")), "files.kept") == [{"island": "a", "digest": "d"}]
    made.now_s += 5.0
    assert asked(made.beat("a"), "a") == []


@pytest.mark.parametrize("digest", ["", "d"])
def test_nobody_is_asked_where_there_are_none_or_they_are_there(digest):
    made = desk("a", digest=digest)
    made.feed(FilesKept(digest="d"))
    assert sent(made.beat("a"), FetchFiles) == []


def test_other_files_of_a_later_island_keep_it_out_of_nothing_and_are_not_taken():
    made = desk("a")
    made.join("b", demands=inputs_demanded({FILES: "e"}))
    made.join("c")
    assert set(made.members) == {"a", "b", "c"}
    assert made.core.run.origin.inputs == {FILES: "d"}


def test_one_that_has_none_or_sends_what_cannot_be_is_passed_over_for_another():
    for changes in ({"num_bytes": 0}, {"num_bytes": (MOST_PARTS + 1) * PART_BYTES}, {"payload_bytes": PART_BYTES + 1}):
        made = desk("a", "b")
        made.say("a", Seed(fragment_id=0, payload="x"))
        assert made.phase == "running"
        assert asked(made.beat("a"), "a") == [0]
        assert notes(give(made, "a", 0, **changes), "files.not_given")
        assert asked(made.beat("a"), "a") == []
        assert asked(made.beat("b"), "b") == [0]


def test_a_silent_one_is_asked_again_ever_more_seldom_and_at_last_another():
    made = desk("a", "b")
    made.say("a", Seed(fragment_id=0, payload="x"))
    times = []
    other = []
    while not other:
        if asked(made.beat("a"), "a"):
            times.append(made.now_s)
        other = asked(made.beat("b"), "b")
        made.now_s += 0.5
    assert times == [FILES_AGAIN_S * (2**n - 1) for n in range(MOST_ASKED)]
    assert other == [0]


def test_a_giver_that_dies_or_joins_anew_or_whose_files_are_not_those_is_followed_by_another():
    made = desk("a", "b")
    made.say("a", Seed(fragment_id=0, payload="x"))
    made.beat("a")
    give(made, "a", 0)
    made.join("a", demands=inputs_demanded({FILES: "d"}))
    assert asked(made.beat("b"), "b") == [0]
    assert asked(give(made, "b", 0), "b") == [1]
    give(made, "b", 1)
    give(made, "b", 2)
    said = made.feed(FilesKept(digest="e", detail="their digest is e, not d"))
    assert notes(said, "files.not_kept") == [{"island": "b", "detail": "their digest is e, not d"}]
    assert asked(made.beat("b"), "b") == []
    assert asked(made.beat("a"), "a") == [0]


def test_whoever_leads_next_asks_anew():
    made = desk("a")
    made.say("a", Seed(fragment_id=0, payload="x"))
    made.feed(FilesKept(digest="d"))
    made = Desk(disk=made.disk, islands=3)
    made.join("a", demands=inputs_demanded({FILES: "d"}))
    assert asked(made.beat("a"), "a") == [0]
