"""One recipe for a run: settled by the first island, the same for all, refused where an island has another."""

import dataclasses
import json

import pytest

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Manifested
from aggregator.rules.interval import RoundTimes
from aggregator.rules.recipes import ADAMW, MUON, REASONS, begun_with, settle, suited_to
from aggregator.state.run_settings import settled
from aggregator.state.summary import Traffic, report, totals
from broker.base.errors import ConfigError
from broker.base.settings import settings_of
from broker.base.sources import own_table
from broker.process.demands import contradicted, demands_of, inputs_demanded
from broker.wire import messages as m
from broker.wire.fragments import Kind
from broker.wire.messages import RECIPE, Profile, Recipe, recipe_digest, recipe_of, recipe_table
from ops.run.explained_settings import explained
from tests.aggregator_hand import Desk, notes, of, sent

SETTLED = settle(Recipe())


# --- by itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "suited"), [("adamw", ADAMW), ("muon", MUON), ("", ADAMW), ("lion", ADAMW)])
def test_what_is_open_depends_on_the_inner_optimizer_alone(optimizer, suited):
    assert suited_to(optimizer) == suited
    recipe = settle(Recipe(quorum=2), optimizer)
    assert recipe.settled
    assert dataclasses.replace(Recipe(quorum=2, version_codec="bf16"), **dataclasses.asdict(suited)) == recipe


def test_what_is_given_stays_and_a_demand_decides_what_nobody_has_given():
    demands = demands_of({"outer_momentum": 0.25, "keep": 0})
    recipe = settle(Recipe(outer_learning_rate=0.5), "muon", demands)
    assert (recipe.merge, recipe.outer_rule, recipe.keep) == (MUON.merge, (0.5, 0.25), 1.0)


def test_a_table_has_every_setting_in_order_and_its_digest_tells_recipes_apart():
    table = recipe_table(SETTLED)
    assert tuple(table) == RECIPE
    assert json.loads(json.dumps(table)) == table
    assert recipe_digest(dict(reversed(table.items()))) == recipe_digest(table)
    assert recipe_digest(recipe_table(dataclasses.replace(SETTLED, keep=0.5))) != recipe_digest(table)
    assert recipe_digest(table) in m.recipe_line(table)
    assert "open" in m.recipe_line(recipe_table(Recipe()))


def test_the_settings_of_an_aggregator_hold_a_recipe_and_every_one_of_it_says_how_long_it_holds():
    assert recipe_of(AggregatorConfig(quorum=3)) == Recipe(quorum=3)
    assert all(each.scope is not None for each in settings_of(Recipe))


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"momentum": 0.5}, "did you mean outer_momentum?"),
        ({"keep": "most"}, "keep = 'most': must be a number"),
        ({"codec": "int2"}, "codec = 'int2'"),
        ({"islands": 3}, "is no setting"),
    ],
)
def test_demands_that_no_recipe_could_meet_are_refused_where_they_are_read(table, told):
    with pytest.raises(ConfigError) as refused:
        demands_of(table)
    assert told in str(refused.value)


@pytest.mark.parametrize("name", RECIPE)
def test_demands_for_what_the_run_has_are_met_whatever_their_type(name):
    (demand,) = demands_of({name: recipe_table(SETTLED)[name]})
    assert contradicted(SETTLED, (demand,)) == ""


def test_a_table_of_the_recipe_is_the_aggregators_too_and_a_value_stands_in_one_place():
    tables = {"recipe": {"keep": 0}, "aggregator": {"islands": 3}}
    assert own_table(AggregatorConfig, tables, "aggregator") == {"keep": 0, "islands": 3}
    with pytest.raises(ConfigError, match=r"keep = 1: is in \[aggregator\], and 0 in \[recipe\]"):
        own_table(AggregatorConfig, {"recipe": {"keep": 0}, "aggregator": {"keep": 1}}, "aggregator")
    with pytest.raises(ConfigError, match=r"\[recipe\] islands"):
        own_table(AggregatorConfig, {"recipe": {"islands": 3}}, "aggregator")


# --- in a run -----------------------------------------------------------------------------------------------------


def test_the_first_island_settles_the_recipe_and_everybody_gets_it():
    made = Desk(keep=0.5, codec=m.Codec.INT8)
    said = made.join("a", inner_optimizer="muon")
    expected = settle(Recipe(fragments=1, sync_interval=4, keep=0.5, codec=m.Codec.INT8), "muon")
    (manifested,) = of(said, Manifested)
    assert {tensor.kind for tensor in manifested.manifest.tensors().values()} == {Kind.MEAN}
    table = recipe_table(expected)
    assert notes(said, "recipe.settled") == [table | {"digest": recipe_digest(table), "inner_optimizer": "muon"}]
    for welcome in (*sent(said, m.Welcome), *sent(made.join("b", inner_optimizer="adamw"), m.Welcome)):
        assert welcome.settings.recipe == expected


def test_an_island_that_demands_another_value_is_refused_with_both():
    made = Desk()
    made.join("a")
    (refused,) = sent(made.join("b", demands=demands_of({"outer_momentum": 0.9})), m.Refused)
    assert refused.reason is m.Reason.RECIPE
    has = ADAMW.outer_momentum
    assert f"outer_momentum is 0.9 at the island, and {has} in the run's recipe" in refused.detail
    assert sent(made.join("b", demands=demands_of({"outer_momentum": has})), m.Welcome)


def test_the_first_island_too_is_held_against_what_the_aggregator_was_given_and_no_unknown_demand_is_believed():
    made = Desk(keep=1.0)
    for demands, said in [
        (demands_of({"keep": 0}), "keep is 0.0 at the island, and 1.0 in the run's recipe"),
        ((m.Demand(name="colour", value="red"),), "colour"),
    ]:
        (refused,) = sent(made.join("a", demands=demands), m.Refused)
        assert refused.reason is m.Reason.RECIPE
        assert said in refused.detail
    assert made.manifest is None
    assert not made.settings.settled


@pytest.mark.parametrize("recorded", [True, False], ids=["now", "before there was a merge rule"])
def test_a_restart_goes_on_with_the_recipe_as_it_was_settled(recorded):
    made = Desk()
    made.join("a", inner_optimizer="muon")
    if not recorded:
        del made.disk.record["settings"]["merge"]  # it is taken from the manifest
    again = Desk(disk=made.disk)
    assert recipe_of(again.settings) == recipe_of(made.settings)
    (refused,) = sent(again.join("b", demands=demands_of({"merge": "rda"})), m.Refused)
    assert "merge is rda at the island, and mean in the run's recipe" in refused.detail
    assert sent(again.join("b"), m.Welcome)


# --- what training begins with ---------------------------------------------------------------------------------------

INPUTS = {"init": "abc", "tokenizer": "123", "base layers.0.w": "11", "base layers.1.w": "22"}


def test_the_inputs_of_the_first_island_are_the_runs_and_stand_in_its_record_tape_and_report():
    made = Desk()
    (settled,) = notes(made.join("a", demands=inputs_demanded(INPUTS)), "recipe.settled")
    assert settled["inputs"]["init"] == "abc"
    assert settled["inputs"]["base"].startswith("2 digests, ")
    assert made.disk.record["inputs"] == INPUTS
    for desk in (made, Desk(disk=made.disk)):
        assert report(desk.core.run, Traffic())["recipe"]["inputs"] == settled["inputs"]
        assert "; from abc" in m.recipe_line(totals(desk.core.run, 1.0).recipe)
    assert recipe_digest(settled) != recipe_digest({**settled, "inputs": {}})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"base layers.1.w": "23"},
            "base layers.1.w is 23 at the island, and 22 in the run: give every island the same",
        ),
        ({"tokenizer": "124"}, "tokenizer is 124 at the island, and 123 in the run"),
        ({"tokenizer": None}, "tokenizer is not given at the island, and 123 in the run"),
        ({"data": "9", "tokenizer": "124"}, "tokenizer is 124"),
        ({"data": "9"}, "data is 9 at the island, and not given in the run"),
        ({"init": "abd"}, "init is abd at the island, and abc in the run: join without init"),
    ],
)
def test_an_island_with_another_input_is_refused_by_its_name(change, said):
    made = Desk()
    made.join("a", demands=inputs_demanded(INPUTS))
    for desk in (made, Desk(disk=made.disk)):
        other = {name: value for name, value in (INPUTS | change).items() if value is not None}
        (refused,) = sent(desk.join("b", demands=inputs_demanded(other)), m.Refused)
        assert refused.reason is m.Reason.RECIPE
        assert said in refused.detail
        assert sent(desk.join("c", demands=inputs_demanded(INPUTS)), m.Welcome)


def test_an_island_without_init_takes_the_runs_version_and_a_run_that_began_otherwise_has_none():
    made = Desk()
    made.join("a", demands=inputs_demanded({"init": "abc"}))
    assert sent(made.join("b"), m.Welcome)
    other = Desk()
    other.join("a")
    (refused,) = sent(other.join("b", demands=inputs_demanded({"init": "abc"})), m.Refused)
    assert "init is abc at the island, and not given in the run" in refused.detail


def test_an_aggregator_that_was_told_where_version_0_comes_from_waits_for_an_island_that_has_it():
    made = Desk(init_digest="abc")
    for demands in ((), inputs_demanded({"init": "abd"})):
        (refused,) = sent(made.join("a", demands=demands), m.Refused)
        assert "and the run begins with abc: give it the same file" in refused.detail
    assert made.manifest is None
    assert sent(made.join("a", demands=inputs_demanded({"init": "abc"})), m.Welcome)


# --- profiles -----------------------------------------------------------------------------------------------------


def test_what_is_given_wins_over_the_profile_and_the_profile_over_defaults():
    config = settled({"run_id": "demo", "profile": Profile.PAPER, "keep": 0.5}, None)
    assert (config.keep, config.sync_interval, config.pacing) == (0.5, 24, m.Pacing.FIXED)
    assert recipe_of(settled({"run_id": "demo"}, None)) == Recipe()


@pytest.mark.parametrize("profile", Profile)
def test_a_profile_names_settings_of_a_recipe_that_go_together(profile):
    recipe = Recipe(**begun_with({"profile": profile}))
    assert recipe.profile is profile
    assert settle(recipe).settled


def test_every_setting_in_which_we_differ_from_the_paper_has_a_reason():
    paper, ours = settle(Recipe(**begun_with({"profile": Profile.PAPER}))), settle(Recipe())
    differing = {name for name in RECIPE if getattr(paper, name) != getattr(ours, name)} - {"profile"}
    assert differing == REASONS.keys()


def test_what_comes_after_its_round_is_refused_where_nothing_is_held_and_is_no_offence():
    made = Desk(hold=False, quorum=1, grace_factor=0.0, grace_by_arrivals=False)
    made.gather("a", "b")
    round_id = made.open_round("a", "b", step=4)
    made.offer("a", 0, 4)
    made.tick(0.5)
    assert round_id not in made.open_rounds
    made.offer("b", 0, 4, base=0, round_id=round_id)
    assert made.refusals == {m.Reason.LATE: 1}
    assert made.tokens()["wasted"] == {m.Reason.LATE: 40}
    assert not made.quarantined


@pytest.mark.parametrize(("by_arrivals", "waited"), [(True, 3.0), (False, 0.0)])
def test_grace_by_its_formula_alone_does_not_wait_for_arrivals(by_arrivals, waited):
    times = RoundTimes(AggregatorConfig(grace_by_arrivals=by_arrivals))
    times.opened(1, 0.0)
    times.arrived(1, 2.0)
    assert times.waits(1.0, 24).arrivals_s == waited


def test_settings_are_explained_with_their_source_and_the_papers_beside_them():
    rows = {row.setting: row for row in explained(Recipe(**begun_with({"profile": Profile.PAPER, "keep": 0.5})))}
    assert tuple(rows) == RECIPE[1:]
    assert (rows["keep"].value, rows["keep"].source, rows["keep"].paper) == (0.5, "given", 0.0)
    sources = {"caps": "profile", "overlap": "profile", "grace_factor": "default"}
    assert {name: rows[name].source for name in sources} == sources
    by_optimizer = {row.setting for row in explained(Recipe()) if row.source == "inner optimizer"}
    assert by_optimizer == {"merge", "outer_learning_rate", "outer_momentum"}
