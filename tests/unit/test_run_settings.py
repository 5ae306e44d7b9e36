"""A restart with other settings: each is refused, or taken and told, or not the run's; what is not given follows it."""

import pytest

from aggregator.config import AggregatorConfig
from aggregator.state.run_settings import Change, changes, recorded, settled
from broker.process.declaring import Scope
from broker.process.settings import settings_of
from broker.wire.errors import ConfigError
from broker.wire.messages import Codec, MergeRule, Pacing, Profile
from tests.aggregator_hand import Desk
from tests.taped import Taped
from tests.unit.test_replay import played

FOUNDED = AggregatorConfig(
    run_id="demo", islands=8, fragments=4, sync_interval=16, codec=Codec.INT8, outer_learning_rate=0.7, total_tokens=500
)
BY_ITSELF = {"run_id", "shard", "shards"}  # in the run record since its first format


def record(config=FOUNDED, **changed):
    return {"run_id": "demo", "manifest": [], "settings": recorded(config)} | changed


def with_scope(scope):
    return sorted(s.name for s in settings_of(AggregatorConfig) if s.scope is scope and s.name not in BY_ITSELF)


def another(setting):
    """A value that the setting does not have by default."""
    if setting.type is bool:
        return not setting.default
    if setting.type is Pacing:
        return Pacing.FIXED
    if setting.type is Profile:
        return Profile.PAPER
    if setting.default is None:  # open
        return {"merge": MergeRule.MEAN}.get(setting.name, 0.25)
    return Codec.F32 if setting.type is Codec and setting.default is not Codec.F32 else setting.default + 3


def usual(setting):
    """A value that it may be given: its default, where it has one."""
    return {"merge": MergeRule.RDA}.get(setting.name, 0.5) if setting.default is None else setting.default


def test_a_new_run_has_what_is_given_and_the_defaults():
    assert settled({"run_id": "demo", "fragments": 4}, None) == AggregatorConfig(run_id="demo", fragments=4)


def test_what_is_not_given_follows_the_run_whatever_the_defaults_are():
    again = settled({"run_id": "demo"}, record())
    assert again == FOUNDED
    assert changes(again, record()) == ()


def test_a_run_that_is_older_than_blocks_of_data_keeps_one_share_for_each_island():
    older = {name: value for name, value in recorded(FOUNDED).items() if name != "data_ahead_s"}
    again = settled({"run_id": "demo"}, record(settings=older))
    assert again.data_ahead_s == 0.0
    with pytest.raises(ConfigError, match="data_ahead_s"):
        settled({"run_id": "demo", "data_ahead_s": 5.0}, record(settings=older))
    assert settled({"run_id": "demo"}, record(settings={})).data_ahead_s == 0.0


@pytest.mark.parametrize("name", with_scope(Scope.FIXED))
def test_a_fixed_setting_with_another_value_is_refused_with_the_runs_and_the_cure(name):
    (setting,) = (each for each in settings_of(AggregatorConfig) if each.name == name)
    had, given = another(setting), usual(setting)
    with pytest.raises(ConfigError) as refused:
        settled({"run_id": "demo", name: given}, record(settings={name: had}))
    assert (refused.value.field, refused.value.value) == (name, given)
    assert f"the run has {had}" in refused.value.cure
    assert "leave it out, or start another run" in refused.value.cure
    assert getattr(settled({"run_id": "demo", name: given}, record(settings={name: given})), name) == given


@pytest.mark.parametrize("name", [name for name in with_scope(Scope.CHANGEABLE) if name != "version_codec"])
def test_a_changeable_setting_is_taken_and_told(name):
    (setting,) = (each for each in settings_of(AggregatorConfig) if each.name == name)
    before = record(settings={name: another(setting)})
    config = settled({"run_id": "demo", name: usual(setting)}, before)
    assert getattr(config, name) == usual(setting)
    assert changes(config, before) == (Change(field=name, was=another(setting), now=usual(setting)),)


def test_what_is_given_is_held_against_what_the_run_has_and_not_against_the_defaults():
    assert settled({"run_id": "demo", "quorum": 6}, record()).quorum == 6  # of 8 islands; there are 4 by default
    with pytest.raises(ConfigError, match="quorum = 9"):
        settled({"run_id": "demo", "quorum": 9}, record())


# --- in the core --------------------------------------------------------------------------------------------------


def notes(core_log):
    return [note.fields for note in core_log if getattr(note, "name", "") == "aggregator.setting_changed"]


def test_a_life_with_other_settings_notes_each_once_and_the_next_life_has_them():
    first = Desk(fragments=1)
    first.join("a")
    second = Desk(disk=first.disk, outer_learning_rate=0.5, quorum=2)
    assert sorted(notes(second.log), key=lambda each: each["field"]) == [
        {"field": "outer_learning_rate", "was": 0.7, "now": 0.5},
        {"field": "quorum", "was": 1, "now": 2},
    ]
    third = Desk(disk=second.disk, outer_learning_rate=0.5, quorum=2)
    assert notes(third.log) == []


def two_lives(**changed):
    first = Taped()
    first.gather("a", "b")
    first.round(1, "a", "b")
    second = Taped(tape=first.tape, record=first.record, commits=first.commits, now_s=50.0, **changed)
    second.beat(4, "a", "b")
    second.round(2, "a", "b")
    return second.tape


def test_a_tape_with_a_changed_setting_replays_and_a_forged_change_is_found():
    tape = two_lives(outer_learning_rate=0.5)
    told = [line for line in tape if line.get("note") == "aggregator.setting_changed"]
    assert [line["fields"] for line in told] == [{"field": "outer_learning_rate", "was": 0.7, "now": 0.5}]
    assert played(tape)[1] is None
    told[0]["fields"]["now"] = 0.9
    assert "now of aggregator.setting_changed is 0.9 on the tape, and 0.5 was decided" in played(tape)[1].what


def test_a_tape_of_an_earlier_release_replays_with_changed_settings():
    tape = two_lives(outer_learning_rate=0.5)
    tape = [line for line in tape if line.get("note") != "aggregator.setting_changed"]
    assert played(tape)[1] is not None
    for line in tape:
        if line.get("tape") and line["record"]:
            del line["record"]["settings"]
    assert played(tape)[1] is None
