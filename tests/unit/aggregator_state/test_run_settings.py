"""A restart with other settings: each is refused, or taken and told, or not the run's; what is not given follows it."""

from operator import itemgetter

import pytest

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.leader_notes import SettingChanged
from aggregator.state.run_settings import changes, recorded, settled
from broker.base.errors import ConfigError
from broker.base.settings import Scope, settings_of
from broker.wire.messages import Codec, Pacing, Profile
from tests.aggregator_hand import Desk
from tests.taped import Taped
from tests.unit.ops_inspect.test_replay import played

FOUNDED = AggregatorConfig(
    run_id="demo", islands=8, fragments=4, sync_interval=16, codec=Codec.INT8, outer_learning_rate=0.7, total_tokens=500
)
CHANGED = "aggregator.setting_changed"
BY_ITSELF = {"run_id", "shard", "shards"}  # in the run record since its first format


def record(config=FOUNDED, **changed):
    return {"run_id": "demo", "manifest": [], "settings": recorded(config)} | changed


#: Of settings that are no numbers: a value that they do not have by default.
OTHERS = {"pacing": Pacing.FIXED, "profile": Profile.PAPER, "merge": "mean"}
OTHERS |= {"codec": Codec.F32, "version_codec": Codec.F32, "trusted_tokens": {"paris": 4096}}
#: Of those that are open: what they may be given.
GIVEN = {"merge": "rda", "version_codec": Codec.BF16, "trusted_tokens": {"paris": 8192}}


def with_scope(scope):
    """Every setting of that scope, with another value than its default, and its default, where it has one."""
    for each in settings_of(AggregatorConfig):
        if each.scope is scope and each.name not in BY_ITSELF:
            given = GIVEN.get(each.name, 0.5) if each.default is None else each.default
            other = not given if each.type is bool else OTHERS.get(each.name) or 3 + given
            yield pytest.param(each.name, other, given, id=each.name)


def test_a_new_run_has_what_is_given_and_the_defaults():
    assert settled({"run_id": "demo", "fragments": 4}, None) == AggregatorConfig(run_id="demo", fragments=4)


def test_what_is_not_given_follows_the_run_whatever_the_defaults_are():
    again = settled({"run_id": "demo"}, record())
    assert again == FOUNDED
    assert changes(again, record()) == []


@pytest.mark.parametrize("given", [{}, {"data_ahead_s": 0.0}, {"data_ahead_s": 5.0}])
@pytest.mark.parametrize("had", [{"data_ahead_s": 0.0}, {}], ids=["as it says", "older than the setting"])
def test_a_run_with_one_share_of_the_data_for_each_island_is_refused_with_the_cure(given, had):
    older = {name: value for name, value in recorded(FOUNDED).items() if name != "data_ahead_s"}
    with pytest.raises(ConfigError, match=r"the checkout that began it.*export") as refused:
        settled({"run_id": "demo", **given}, record(settings=older | had))
    assert (refused.value.field, refused.value.value) == ("data_ahead_s", 0.0)


def test_a_tape_of_a_run_with_one_share_of_the_data_for_each_island_is_refused_with_the_cure():
    tape = two_lives()
    tape[0]["config"]["data_ahead_s"] = 0.0
    told = played(tape)[1].what
    assert "data_ahead_s = 0.0" in told
    assert "the checkout that began it: finish it there, or export its model" in told


def test_a_new_run_with_one_share_of_the_data_for_each_island_is_refused():
    with pytest.raises(ConfigError, match=r"data_ahead_s = 0\.0: must be above 0, 10 is usual"):
        settled({"run_id": "demo", "data_ahead_s": 0.0}, None)


@pytest.mark.parametrize(("name", "had", "given"), list(with_scope(Scope.FIXED)))
def test_a_fixed_setting_with_another_value_is_refused_with_the_runs_and_the_cure(name, had, given):
    with pytest.raises(ConfigError) as refused:
        settled({"run_id": "demo", name: given}, record(settings={"data_ahead_s": 10.0, name: had}))
    assert (refused.value.field, refused.value.value) == (name, given)
    assert f"the run has {had}" in refused.value.cure
    assert "leave it out, or start another run" in refused.value.cure
    assert (
        getattr(settled({"run_id": "demo", name: given}, record(settings={"data_ahead_s": 10.0, name: given})), name)
        == given
    )


@pytest.mark.parametrize(("name", "had", "given"), list(with_scope(Scope.CHANGEABLE)))
def test_a_changeable_setting_is_taken_and_told(name, had, given):
    before = record(settings={"data_ahead_s": 10.0, name: had})
    config = settled({"run_id": "demo", name: given}, before)
    assert getattr(config, name) == given
    assert changes(config, before) == [SettingChanged(field=name, was=had, now=given)]


def test_what_is_given_is_held_against_what_the_run_has_and_not_against_the_defaults():
    assert settled({"run_id": "demo", "quorum": 6}, record()).quorum == 6  # of 8 islands; there are 4 by default
    with pytest.raises(ConfigError, match="quorum = 9"):
        settled({"run_id": "demo", "quorum": 9}, record())


def test_a_life_with_other_settings_notes_each_once_and_the_next_life_has_them():
    first = Desk(fragments=1)
    first.join("a")
    second = Desk(disk=first.disk, outer_learning_rate=0.5, quorum=2)
    third = Desk(disk=second.disk, outer_learning_rate=0.5, quorum=2)
    told, again = (
        sorted((note.fields for note in desk.log if getattr(note, "name", "") == CHANGED), key=itemgetter("field"))
        for desk in (second, third)
    )
    assert told == [
        {"field": "outer_learning_rate", "was": 0.7, "now": 0.5},
        {"field": "quorum", "was": 1, "now": 2},
    ]
    assert again == []


def two_lives(**changed):
    first = Taped()
    first.gather("a", "b")
    first.round(1, "a", "b")
    second = Taped(tape=first.tape, record=first.record, commits=first.commits, now_s=50.0, **changed)
    second.report(4, "a", "b")
    second.round(2, "a", "b")
    return second.tape


def test_a_tape_with_a_changed_setting_replays_and_a_forged_change_is_found():
    tape = two_lives(outer_learning_rate=0.5)
    told = [line for line in tape if line.get("note") == CHANGED]
    assert [line["fields"] for line in told] == [{"field": "outer_learning_rate", "was": 0.7, "now": 0.5}]
    assert played(tape)[1] is None
    told[0]["fields"]["now"] = 0.9
    assert "now of aggregator.setting_changed is 0.9 on the tape, and 0.5 was decided" in played(tape)[1].what


def test_a_tape_of_an_earlier_release_replays_with_changed_settings():
    tape = two_lives(outer_learning_rate=0.5)
    tape = [line for line in tape if line.get("note") != CHANGED]
    assert played(tape)[1] is not None
    for line in tape:
        if line.get("tape") and line["record"]:
            del line["record"]["settings"]
    assert played(tape)[1] is None


def test_a_name_that_no_message_could_bear_is_refused():
    with pytest.raises(ConfigError, match="run_id = 'my run'"):
        AggregatorConfig(run_id="my run")


@pytest.mark.parametrize("codec", list(Codec))
def test_versions_travel_as_pseudo_gradients_do_unless_they_have_a_codec_of_their_own(codec):
    assert AggregatorConfig(codec=codec).codec_of_versions is codec
    assert AggregatorConfig(codec=Codec.INT4, version_codec=codec).codec_of_versions is codec
