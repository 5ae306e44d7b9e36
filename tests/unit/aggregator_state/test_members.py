"""Ids, incarnations and liveness."""

from aggregator.state.members import MISSES_BEFORE_UNRESPONSIVE, Members
from broker.routing.liveness import LivenessConfig

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


def test_a_hint_gives_back_the_name_of_one_that_is_dead_or_has_left():
    made = members()
    assert asks(made, "host-a", "n1", 0.0) == "island-0"
    assert asks(made, "host-b", "n2", 0.0) == "island-1"
    assert asks(made, "host-a", "n3", CONFIG.dead_after_s) == "island-0"
    assert made["island-0"].incarnation == 2
    made["island-0"].leave()
    assert asks(made, "host-a", "n4", CONFIG.dead_after_s) == "island-0"


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


def test_claims_of_names_without_end_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("aggregator.state.members.MOST_CLAIMS", 2)
    made = members()
    for number, name in enumerate("abcb", start=3):
        made.claimed(name, number)
    made.claimed("d", 9)
    assert [made.admit(name, "", name, 10, 0.0).incarnation for name in "abcd"] == [1, 7, 1, 10]


def test_rounds_wait_for_islands_that_missed_fewer_than_two():
    made = members("a", "b")
    made["a"].missed_rounds = MISSES_BEFORE_UNRESPONSIVE - 1
    made["b"].missed_rounds = MISSES_BEFORE_UNRESPONSIVE
    assert made.responsive(0.0) == {"a"}


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
