"""Ids, incarnations and liveness."""

import pytest

from aggregator.state.members import MISSES_BEFORE_UNRESPONSIVE, MOST_INCARNATION, Members
from broker.routing.liveness import Liveness, LivenessConfig

CONFIG = LivenessConfig(heartbeat_interval_s=0.5, suspect_after_s=2.0, dead_after_s=6.0)


def members(*names):
    made = Members(CONFIG)
    for name in names:
        made.admit(name, "", f"nonce-{name}", 10, 0.0).begin(0, 0)
    return made


def asks(made, hint, nonce, now_s, island_id=""):
    """A process asks to join, and is let in where it is known as whom; returns its id."""
    name = made.id_for(island_id, hint, nonce, now_s)
    if name is not None:
        made.admit(name, hint, nonce, 10, now_s).begin(0, 0)
    return name


def test_an_island_without_a_name_gets_the_next_free_one():
    made = members("island-0", "island-2")
    assert asks(made, "", "n", 0.0) == "island-1"
    assert asks(made, "", "m", 0.0) == "island-3"
    assert asks(made, "", "p", 0.0, island_id="island-1") == "island-1"


def test_a_hint_gives_back_the_name_of_one_that_is_dead_or_has_left():
    made = members()
    assert asks(made, "host-a", "n1", 0.0) == "island-0"
    assert asks(made, "host-b", "n2", 0.0) == "island-1"
    assert asks(made, "host-a", "n3", CONFIG.dead_after_s) == "island-0"
    assert made["island-0"].incarnation == 2
    made["island-0"].leave()
    assert asks(made, "host-a", "n4", CONFIG.dead_after_s) == "island-0"


def test_one_that_was_killed_a_moment_ago_gets_its_name_back_as_soon_as_its_former_life_counts_as_dead():
    made = members()
    assert asks(made, "host-a", "n1", 0.0) == "island-0"
    made["island-0"].last_seen_s = 10.0  # its last word
    assert asks(made, "host-a", "n2", 11.0) is None
    made["island-0"].last_seen_s = 11.2  # or so it seemed: another one came late
    assert [asks(made, "host-a", "n2", at_s) for at_s in (11.5, 12.5, 14.5, 17.1)] == [None, None, None, None]
    assert asks(made, "host-a", "n2", 17.2) == "island-0"
    assert made["island-0"].incarnation == 2


def test_a_hint_whose_holder_is_heard_again_gives_a_name_of_its_own():
    made = members()
    assert asks(made, "host-a", "n1", 0.0) == "island-0"
    assert asks(made, "host-a", "n2", 1.0) is None
    made["island-0"].last_seen_s = 1.0 + CONFIG.heartbeat_interval_s
    assert asks(made, "host-a", "n2", 1.6) == "island-1"
    assert (made["island-0"].incarnation, made["island-1"].hint) == (1, "host-a")
    # Each of the two may be killed, and be back, while the other lives.
    made["island-0"].last_seen_s = made["island-1"].last_seen_s = 20.0
    assert asks(made, "host-a", "n3", 21.0) is None
    made["island-0"].last_seen_s = 25.0
    assert asks(made, "host-a", "n3", 25.0) is None
    assert asks(made, "host-a", "n3", 26.0) == "island-1"


def test_of_several_with_a_hint_that_are_gone_the_one_heard_last_comes_back():
    made = members()
    made.admit("island-0", "host-a", "n1", 10, 0.0).begin(0, 0)
    made.admit("island-1", "host-a", "n2", 10, 50.0).begin(0, 0)
    made["island-1"].leave()
    assert asks(made, "host-a", "n3", 100.0) == "island-1"


def test_an_empty_hint_is_nobodys():
    made = members()
    assert asks(made, "", "n1", 0.0) != asks(made, "", "n2", 0.0)


def test_processes_that_ask_once_and_never_again_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("aggregator.state.members.MOST_CLAIMS", 2)
    made = members()
    asks(made, "host-a", "n1", 0.0)
    for number in range(5):
        assert asks(made, "host-a", f"stranger-{number}", 1.0) is None
    made["island-0"].last_seen_s = 2.0
    assert asks(made, "host-a", "stranger-4", 2.0) == "island-1"
    assert asks(made, "host-a", "stranger-0", 2.0) is None  # it is as if it had never asked


def test_a_new_life_forgets_what_the_old_one_said_and_missed():
    made = members("a")
    member = made["a"]
    member.leave()
    member.missed_rounds, member.heartbeat = 5, object()
    member.emptied[0], member.beat_sequence, member.stopped_sequence = 3, 9, 8
    made.admit("a", "", "other", 20, 9.0).begin(0, 0)
    assert (member.incarnation, member.nonce, member.tokens_per_step) == (2, "other", 20)
    assert (member.missed_rounds, member.left, member.heartbeat, member.emptied) == (0, False, None, {})
    assert (member.beat_sequence, member.stopped_sequence) == (-1, None)
    assert made.by_nonce("other") is member
    assert made.by_nonce("nonce-a") is None


@pytest.mark.parametrize(
    ("claims", "incarnation"),
    [((), 2), ((1,), 2), ((7,), 8), ((7, 4), 8), ((MOST_INCARNATION,), MOST_INCARNATION + 1), ((2**63 - 1,), 2)],
)
def test_a_life_is_above_all_that_were_heard_of_but_for_those_that_cannot_be(claims, incarnation):
    made = members("a")
    for claim in claims:
        made.claimed("a", claim)
    assert made.admit("a", "", "other", 10, 1.0).incarnation == incarnation
    assert made.admit("a", "", "third", 10, 2.0).incarnation == incarnation + 1


def test_claims_of_names_without_end_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("aggregator.state.members.MOST_CLAIMS", 2)
    made = members()
    for number, name in enumerate("abcb", start=3):
        made.claimed(name, number)
    made.claimed("d", 9)
    assert [made.admit(name, "", name, 10, 0.0).incarnation for name in "abcd"] == [1, 7, 1, 10]


@pytest.mark.parametrize(("silent_s", "state"), [(1.9, "alive"), (2.0, "suspect"), (5.9, "suspect"), (6.0, "dead")])
def test_silence_makes_an_island_suspect_and_then_dead(silent_s, state):
    made = members("a")
    assert made.state(made["a"], silent_s) is Liveness(state)
    assert bool(made.live(silent_s)) is (state != "dead")


def test_who_left_is_not_live_however_fresh():
    made = members("a")
    made["a"].leave()
    assert made.state(made["a"], 0.0) is Liveness.LEFT
    assert made.live(0.0) == []


def test_rounds_wait_for_islands_that_missed_fewer_than_two():
    made = members("a", "b")
    made["a"].missed_rounds = MISSES_BEFORE_UNRESPONSIVE - 1
    made["b"].missed_rounds = MISSES_BEFORE_UNRESPONSIVE
    assert made.responsive(0.0) == {"a"}


def test_the_next_death_is_named_late_enough_that_it_has_happened():
    made = members("a", "b")
    made["b"].last_seen_s = 3.0
    at_s = made.next_death_s(5.0)
    assert at_s == pytest.approx(6.0, abs=0.01)
    assert [m.island_id for m in made.live(at_s)] == ["b"]
    assert members().next_death_s(0.0) is None


def test_a_record_restores_everybody_as_live_for_a_while():
    made = members("a", "b")
    made["a"].start = (40, 400)
    made["b"].leave()
    made.admit("a", "host", "again", 10, 0.0).begin(0, 0)
    restored = Members(CONFIG)
    restored.restore(made.record(), 100.0)
    assert restored.record() == made.record()
    assert [m.island_id for m in restored.live(105.0)] == ["a"]
    assert restored.live(106.0) == []
    assert restored["a"].incarnation == 2
    assert restored.by_nonce("again") is restored["a"]
    assert restored.get("nobody") is None
