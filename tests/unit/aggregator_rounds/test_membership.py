"""Joins, heartbeats and farewells, and what islands are told."""

from dataclasses import replace

import pytest

from aggregator.interface.events import Manifested, RunSaved, SaveRun, Tick
from aggregator.rounds.core import Aggregator
from aggregator.rounds.membership import first_difference
from aggregator.state.members import EARLIER_REMEMBERED
from broker.wire.fragments import FragmentManifest, Kind, TensorSpec, partition
from broker.wire.messages import BROKER, Attach, Fate, FleetState, Join, Leave, Outstanding, Reason, Refused, Welcome
from tests.aggregator_hand import Desk, config, desk, notes, of, resolutions, sent, tensors


def assert_refused(said, reason, *details, to=None):
    (refused,) = sent(said, Refused, to)
    assert refused.reason is reason
    assert all(detail in refused.detail for detail in details), refused.detail


def test_an_island_is_welcome_only_once_its_incarnation_is_durable():
    made = Desk()
    made.writes = False
    assert not sent(made.join("a"), Welcome)
    (welcome,) = sent(made.write(), Welcome, "join:a-1")
    assert (welcome.island_id, welcome.incarnation, welcome.start_step) == ("a", 1, 0)


def test_islands_that_join_while_a_record_is_written_share_the_next_one():
    made = Desk()
    made.writes = False
    for name in "abcd":
        made.join(name)
    _, first = of(made.log, SaveRun)  # that of the epoch came before
    said = made.write()
    assert len(sent(said, Welcome)) == len(sent(said, Welcome, "join:a-1")) == 1
    (shared,) = of(said, SaveRun)
    assert (list(first.record["members"]), list(shared.record["members"])) == (["a"], ["a", "b", "c", "d"])
    assert shared.serial == first.serial + 3
    assert len(sent(made.write(), Welcome)) == 3


def test_nothing_is_said_before_the_epoch_is_durable():
    core = Aggregator(config(), now_s=0.0)
    (_, save) = core.start(0.0)
    assert isinstance(save, SaveRun)
    assert core.handle(Tick(), 5.0) == []
    assert core.next_deadline_s() is None
    assert sent(core.handle(RunSaved(serial=save.serial), 5.0), Attach, BROKER)


def test_a_join_of_a_process_that_was_replaced_does_not_throw_its_successor_out():
    """It was repeated, or lay in a broker that was frozen, while its process died and another one started."""
    made = desk("a", "b")
    made.join("a", nonce="second")
    said = made.join("a", nonce="a-1")
    assert not sent(said, Welcome)
    (refused,) = sent(said, Refused, "join:a-1")
    assert (refused.kind, refused.reason) == ("join", Reason.FENCED)
    assert "a later process has joined as a" in refused.detail
    assert (made.members["a"].nonce, made.members["a"].incarnation) == ("second", 2)
    for life in range(20):
        made.join("a", nonce=f"later-{life}")
    assert len(made.members["a"].earlier) == EARLIER_REMEMBERED


def test_a_record_that_could_not_be_written_is_written_again_and_answers_then():
    made = Desk()
    made.writes = False
    made.join("a", nonce="n")
    assert not sent(made.write(fails="no space"), Welcome)
    assert not sent(made.join("a", nonce="n"), Welcome)
    assert of(made.run_to(1.1), SaveRun)
    assert len(sent(made.write(), Welcome)) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"name": "w#0of1"}, "'w#0of1' is named like a section"), ({"kind": Kind.FROZEN}, "no tensor is left")],
    ids=["named like a section", "nothing to synchronise"],
)
def test_a_model_that_cannot_be_synchronised_founds_no_run(changes, said):
    assert_refused(Desk().join("a", model=(replace(tensors(1)[0], **changes),)), Reason.MANIFEST, said)


def test_a_new_process_gets_the_next_incarnation_and_goes_on_where_the_last_one_arrived():
    made = desk("a")
    made.open_round("a", step=4)
    made.offer("a", 0, 4)
    made.beat("a", 7)
    (welcome,) = sent(made.join("a"), Welcome)
    assert (welcome.incarnation, welcome.start_step, welcome.start_tokens) == (2, 4, 40)


def test_the_first_island_fixes_the_tensors_and_others_must_agree():
    made = Desk(fragments=2)
    made.join("a")
    other = (*tensors(1), replace(tensors(2)[1], shape=(9, 9)))
    assert_refused(made.join("b", model=other), Reason.MANIFEST, "w1", "(9, 9)", to="join:b-1")
    assert made.refusals[Reason.MANIFEST] == 1
    assert "b" not in made.members


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("max_message_bytes", "cut the model into 4 fragments or more"),
        ("held_bytes", "one round of the largest fragment"),
    ],
)
def test_a_model_that_does_not_fit_the_limits_is_refused_and_another_one_is_welcome(name, cure):
    made = Desk(**{name: 5 << 20})
    large = tuple(replace(t, shape=(1 << 10, 1 << 10)) for t in tensors(1))
    said = made.join("a", model=large)
    assert_refused(said, Reason.OVERSIZE, f"{name} = {5 << 20}", cure, to="join:a-1")
    assert not of(said, Manifested)
    assert sent(made.join("b"), Welcome)


def test_a_tensor_that_no_message_could_hold_is_cut_and_each_island_joins_with_it_whole():
    made = Desk(fragments=8, sync_interval=8, max_message_bytes=5 << 20)
    model = (replace(tensors(1)[0], shape=(1 << 10, 1 << 10)), *tensors(2)[1:])
    (welcome,) = sent(made.join("a", model=model), Welcome)
    manifest = FragmentManifest(welcome.fragments)
    assert {f"w0#{i}of4" for i in range(4)} < manifest.tensors().keys()
    assert max(manifest.sizes) <= 1 << 18
    assert manifest.whole == {t.name: t for t in model}
    assert sent(made.join("b", model=model), Welcome)
    said = made.join("c", model=(replace(model[0], shape=(1 << 10, 1 << 11)), *model[1:]))
    assert_refused(said, Reason.MANIFEST, "tensor 'w0' has shape (1024, 2048), the run has (1024, 1024)")
    assert_refused(made.join("d", model=tuple(manifest.tensors().values())), Reason.MANIFEST)


def test_dtypes_and_local_tensors_are_each_islands_own_business():
    manifest = partition(tensors(2), 2)
    local = TensorSpec(name="batch_mean", shape=(3,), dtype="float32", kind=Kind.LOCAL)
    mixed = tuple(replace(t, dtype="bfloat16") for t in tensors(2))
    assert first_difference(manifest, (*mixed, local)) == ""
    assert "unknown to the run" in first_difference(manifest, (*tensors(2), replace(local, kind=Kind.RDA)))


def test_a_stranger_is_told_to_join():
    assert_refused(desk("a", "b").beat("nobody", 0), Reason.UNKNOWN_ISLAND, "join again", to="nobody")


@pytest.mark.parametrize("island_id", ["a", "since-the-store-was-written"])
def test_an_island_with_an_incarnation_from_the_future_is_welcomed_above_it(island_id):
    made = desk("a")
    made.incarnations[island_id] = 4
    made.beat(island_id, 0)
    assert [welcome.incarnation for welcome in sent(made.join(island_id), Welcome)] == [5]
    assert [welcome.incarnation for welcome in sent(made.join(island_id), Welcome)] == [6]


def test_an_earlier_incarnation_is_not_heard():
    made = desk("a", "b")
    made.join("a")
    made.incarnations["a"] = 1
    made.now_s = 3.0
    actions = made.beat("a", 400)
    assert not sent(actions, FleetState)
    assert [refused.reason for refused in sent(actions, Refused)] == [Reason.FENCED]  # its broker may know no better
    assert made.refusals[Reason.FENCED] == 1
    assert made.tokens()["trained"] == 0


@pytest.mark.parametrize(
    ("step", "counters", "reason", "detail"),
    [
        (4, {"tokens": 41}, Reason.IMPLAUSIBLE, ""),
        (4, {"overwritten_tokens": (41,)}, Reason.IMPLAUSIBLE, ""),
        (2**40, {}, Reason.IMPLAUSIBLE, ""),
        (0, {"versions": (0, 0, 0)}, Reason.MANIFEST, "3 fragments, the run has 1"),
    ],
    ids=["tokens", "tokens dropped", "a step that nobody can have reached", "other fragments"],
)
def test_a_heartbeat_that_cannot_be_true_is_refused_and_ends_no_run(step, counters, reason, detail):
    made = desk("a", "b", total_tokens=1000)
    assert_refused(made.beat("a", step, **counters), reason, detail, to="a")
    assert made.phase == "running"
    assert made.tokens()["trained"] == 0
    made.check_books()


@pytest.mark.parametrize("step_time_s", [0.0, 5e-324, 1e-306, 9e-7, 1.1e5, 1e9, 1.7e308])
def test_a_pace_that_no_training_loop_has_is_refused_and_moves_nothing(step_time_s):
    made = desk("a", "b")
    for island_id in ("a", "b"):
        made.beat(island_id, 1)
    said = made.beat("b", 2, step_time_s=step_time_s)
    assert_refused(said, Reason.IMPLAUSIBLE, to="b")
    assert sent(made.beat("a", 2), FleetState, "a")[-1].fleet_ratio == 2.0


def test_a_heartbeat_cannot_claim_to_have_dropped_what_it_handed_over():
    made = desk("a", "b")
    made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    said = made.beat("a", 6, overwritten_tokens=(21,))
    assert_refused(said, Reason.IMPLAUSIBLE, "dropped 21 tokens of fragment 0: 40 of 60 are known", to="a")
    assert not sent(made.beat("a", 6, overwritten_tokens=(20,)), Refused)
    made.check_books()
    assert made.tokens("a")["wasted"] == {"overwritten": 20}


def test_what_is_asked_about_and_never_arrived_is_unknown():
    asked = (Outstanding(fragment_id=0, from_step=0, to_step=4), Outstanding(fragment_id=9, from_step=0, to_step=4))
    said = resolutions(desk("a", "b").beat("a", 4, outstanding=asked), "a")
    assert [r.fate for r in said] == [Fate.UNKNOWN, Fate.UNKNOWN]


def test_a_heartbeat_is_answered_with_the_whole_state():
    made = desk("a", "b")
    made.open_round("a", "b", step=4)
    (state,) = sent(made.beat("b", 4), FleetState, "b")
    assert (state.epoch, state.phase, state.versions) == (1, "running", (0,))
    assert (state.trained_tokens, state.fleet_ratio) == (80, 2.0)
    assert [(block.from_batch, block.to_batch) for block in state.blocks] == [(4, 8)]
    assert [r.fragment_id for r in state.rounds] == [0]


@pytest.mark.parametrize(("claimed_s", "ratio"), [(1e-6, 3 + 1.0), (0.1 / 30, 3 + 30.0), (1e5, 3 + 1 / 32)])
def test_one_islands_pace_moves_the_schedules_of_the_others_by_little(claimed_s, ratio):
    """A claim, or a pause: schedules follow the ratio between two reports, and never go back.

    A pace that is not believed counts as the fleet's.
    """
    made = desk("a", "b", "c", "d")
    for island_id in ("a", "b", "c"):
        made.beat(island_id, 1)
    made.beat("d", 1, step_time_s=claimed_s)
    assert sent(made.beat("a", 1), FleetState, "a")[-1].fleet_ratio == pytest.approx(ratio)
    (own,) = sent(made.beat("d", 1, step_time_s=claimed_s), FleetState, "d")
    assert 0 < own.fleet_ratio <= 1 + 3 * 32


def test_an_island_that_leaves_is_not_missed_and_its_last_counters_are_booked():
    made = desk("a", "b")
    farewell = Leave(inner_step=3, tokens=30, reason="spot instance reclaimed")
    (note,) = notes(made.say("a", farewell), "island.left")
    assert note["reason"] == "spot instance reclaimed"
    assert made.live == ["b"]
    assert made.tokens()["wasted"] == {"island_lost": 30}
    assert not notes(made.say("a", farewell), "island.left"), "a second one changes nothing"


def test_a_farewell_cannot_end_a_run_by_a_lie():
    made = desk("a", "b", total_tokens=1000)
    said = made.say("a", Leave(inner_step=3, tokens=10**12, reason="bye"))
    assert_refused(said, Reason.IMPLAUSIBLE, to="a")
    assert made.phase == "running"
    assert made.tokens()["trained"] == 0
    assert made.members["a"].left


def test_more_tokens_per_step_than_the_configuration_allows_are_refused_at_the_door():
    made = desk("a", max_tokens_per_step=1000)
    join = Join(nonce="b-1", island_id="b", hint="", tensors=tensors(1), tokens_per_step=2**62)
    assert_refused(made.say("join:b-1", join), Reason.IMPLAUSIBLE, "max_tokens_per_step")
    assert "b" not in made.members


def test_a_run_takes_no_more_islands_than_it_can_remember(monkeypatch):
    monkeypatch.setattr("aggregator.rounds.membership.MOST_MEMBERS", 2)
    made = desk("a", "b")
    assert_refused(made.join("c"), Reason.QUEUE_FULL)
    assert sent(made.join("b"), Welcome)  # whoever is known may come back


def test_two_islands_with_one_hint_both_live_and_the_second_is_asked_to_wait_until_that_shows():
    made = Desk()
    (first,) = sent(made.join("", nonce="1", hint="host/0"), Welcome)
    (refused,) = sent(made.join("", nonce="2", hint="host/0"), Refused, "join:2")
    assert (refused.kind, refused.reason) == ("join", Reason.QUEUE_FULL)
    assert "an island is here as host/0" in refused.detail
    made.now_s += 0.5
    made.beat(first.island_id, 0, versions=(-1, -1, -1, -1))
    (second,) = sent(made.join("", nonce="2", hint="host/0"), Welcome, "join:2")
    assert (first.island_id, second.island_id) == ("island-0", "island-1")
    assert made.members["island-0"].incarnation == 1


def test_one_that_still_waits_for_its_welcome_is_not_taken_for_dead():
    """With several shards it may wait for long: it sends no heartbeats yet, but its join, again and again."""
    made = Desk()
    made.writes = False
    made.join("", nonce="1", hint="host/0")
    for _ in range(5):
        made.now_s += 5.0
        made.join("", nonce="1", hint="host/0")
        made.join("", nonce="2", hint="host/0")
    assert made.members["island-0"].nonce == "1"


def test_a_heartbeat_that_a_later_one_has_overtaken_changes_nothing():
    made = desk("a", "b")
    made.beat("a", 4)
    member, before = made.members["a"], made.sequence
    made.sequence = before - 5  # over another way: sent before it held version 0
    made.beat("a", 0, versions=(-1,))
    assert member.ready
    assert member.heartbeat.inner_step == 4
    assert made.tokens("a")["trained"] == 40
    made.sequence = before
    made.beat("a", 5)
    assert member.heartbeat.inner_step == 5


@pytest.mark.parametrize(("islands", "interval_s"), [(4, 0.5), (192, 0.75), (5000, 1.0)])
def test_who_joins_a_large_fleet_is_told_to_send_heartbeats_less_often(islands, interval_s):
    made = Desk(islands=islands)
    (welcome,) = sent(made.join("a"), Welcome)
    assert welcome.settings.heartbeat_interval_s == interval_s


@pytest.mark.parametrize(
    ("fleet", "too_large"),
    [({}, True), ({"suspect_after_s": 8.0, "dead_after_s": 12.0}, False), ({"islands": 512}, False)],
)
def test_of_a_fleet_too_large_for_its_allowances_status_and_log_say_what_to_do(fleet, too_large):
    made = Desk(**{"islands": 1000, **fleet})
    said = made.join("a") + made.join("b")
    assert len(notes(said, "fleet.too_many_heartbeats")) == too_large, "told once"
    assert len(made.troubles) == too_large
    for trouble in made.troubles:
        assert "1000 islands send 1000 heartbeats a second" in trouble
        assert "suspect_after_s = 8 and dead_after_s = 12 make them 256" in trouble


def test_an_island_that_holds_a_version_no_more_has_found_it_corrupt_and_the_third_time_is_a_trouble():
    made = desk("a", "b")
    held = made.versions
    lost = (-1, *held[1:])
    for times in (1, 2, 3):
        said = made.beat("a", 0, versions=lost)
        (note,) = notes(said, "island.corrupted")
        assert note == {"island": "a", "fragment": 0, "version": held[0], "times": times}
        assert not notes(made.beat("a", 0, versions=lost), "island.corrupted"), "it is told once"
        made.beat("a", 0, versions=held)
        sentences = made.core.run.troubles.sentences(made.now_s)
        assert [("replace the machine" in each) for each in sentences] == [True] * (times == 3)
    made.join("a")
    made.beat("a", 0, versions=(-1,) * len(held))
    assert made.core.run.troubles.sentences(made.now_s) == (), "a new life may be on another machine"
