"""The plan of faults: the same from the same seed, every kind in turn, and nothing wrong gets past the file."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import ConfigError
from broker.base.sources import from_sources
from ops import cli
from ops.faults.kinds import LIES, Fault, Role, role_of
from ops.faults.plan import (
    DRILLS,
    NATURES,
    ChaosConfig,
    FaultFile,
    FaultKind,
    Needs,
    all_faults,
    drawn_faults,
    fault,
    read_faults,
    resolve,
    role_of_target,
)

EVERYTHING = frozenset(Needs)
EXAMPLES = Path(__file__).parents[3] / "examples" / "chaos"
seeds = st.integers(0, 2**32)


@given(
    seed=seeds,
    every_s=st.floats(0.1, 60.0),
    seconds=st.floats(1.0, 900.0),
    chosen=st.sets(st.sampled_from(FaultKind), min_size=1),
)
def test_the_same_seed_gives_the_same_faults_in_order_within_their_time(seed, every_s, seconds, chosen):
    config = ChaosConfig(fault_seed=seed, fault_every_s=every_s, seconds=seconds)
    faults = list(drawn_faults(config, chosen))
    assert faults == list(drawn_faults(config, chosen))
    assert [each.at_s for each in faults] == sorted(each.at_s for each in faults)
    assert all(config.calm_s <= each.at_s < seconds for each in faults)
    assert {each.kind for each in faults} <= chosen


@given(seed=seeds, standbys=st.booleans())
def test_every_drill_has_its_turn_before_any_has_its_second(seed, standbys):
    config = ChaosConfig(fault_seed=seed, fault_every_s=1.0, seconds=200.0)
    faults = list(drawn_faults(config, set(FaultKind), standbys=standbys))
    drills = [(each.kind, each.targets) for each in faults]
    turn = len(DRILLS) - (not standbys)
    assert len(set(drills[:turn])) == turn
    assert set(drills[turn : 2 * turn]) == set(drills[:turn])


@given(seed=seeds)
def test_durations_are_near_the_usual_ones_and_clocks_jump_both_ways(seed):
    config = ChaosConfig(fault_seed=seed, fault_every_s=1.0, seconds=100.0)
    faults = list(drawn_faults(config, set(FaultKind)))
    for each in faults:
        assert 0.5 * NATURES[each.kind].for_s <= each.for_s + 0.01 <= 1.5 * NATURES[each.kind].for_s + 0.02
    jumps = [each.options["jump_s"] for each in faults if each.kind is FaultKind.CLOCK]
    assert min(jumps) < 0 < max(jumps)


def test_a_rate_of_nothing_draws_nothing():
    assert list(drawn_faults(ChaosConfig(fault_every_s=0), set(FaultKind))) == []


# --- files --------------------------------------------------------------------------------------------------------

GOOD = """
[chaos]
seconds = 90.0
[cluster]
islands = 16
pace = [0.2]
[[fault]]
at_s = 40
kind = "kill"
target = ["leader", "island-3"]
for_s = 2.5
[[fault]]
at_s = 10
kind = "clock"
jump_s = -20.0
"""


def test_a_file_gives_its_faults_in_the_order_of_their_times():
    file = read_faults(GOOD, name="storm.toml")
    assert file.chaos == {"seconds": 90.0}
    assert file.cluster == {"islands": 16, "pace": [0.2]}
    assert file.faults == (
        Fault(at_s=10.0, kind=FaultKind.CLOCK, targets=("leader",), for_s=3.0, options={"jump_s": -20.0}),
        Fault(at_s=40.0, kind=FaultKind.KILL, targets=("leader", "island-3"), for_s=2.5),
    )


def a_fault(kind, **keys):
    """A file of one fault; ``at_s`` is 1 unless it is given."""
    lines = (f"{key} = {value}" for key, value in ({"at_s": "1"} | keys).items())
    return "\n".join(["[[fault]]", f'kind = "{kind}"', *lines])


@pytest.mark.parametrize(
    ("text", "field", "cure"),
    [
        ("[chaos", "faults", "is not TOML"),
        ("[caos]", "caos", "did you mean chaos?"),
        ("chaos = 3", "chaos", "write [chaos]"),
        ("fault = 3", "fault", "write [[fault]]"),
        (a_fault("kil"), "fault[1].kind", "did you mean kill?"),
        ('[[fault]]\nkind = "kill"', "fault[1].at_s", "must be a number"),
        (a_fault("kill", at_s='"1"'), "fault[1].at_s", "must be a number"),
        (a_fault("kill", at_s="nan"), "fault[1].at_s", "must be a number"),
        (a_fault("kill", at_s="-1"), "fault[1].at_s", "0 or more"),
        (a_fault("stop", for_s="-1"), "fault[1].for_s", "0 or more"),
        (a_fault("kill", target="3"), "fault[1].target", "must be a word"),
        (a_fault("kill", target='"any redis"'), "fault[1].target", "must be any of island"),
        (a_fault("wipe", target='"broker"'), "fault[1].target", "wipe befalls redis"),
        (a_fault("nan", target='"island-1"'), "fault[1].target", "leave it out"),
        (a_fault("kill", fro_s="1"), "fault[1].fro_s", "did you mean for_s?"),
        (a_fault("clock", jump_s="true"), "fault[1].jump_s", "must be a number"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field_and_the_cure(text, field, cure):
    with pytest.raises(ConfigError) as caught:
        read_faults(text, name="storm.toml")
    assert caught.value.field == field
    assert cure in caught.value.cure


def test_a_kind_that_is_not_possible_here_is_refused_where_it_was_asked_for_and_left_out_where_not():
    config = ChaosConfig(seconds=100.0, fault_every_s=1.0)
    drawn = all_faults(config, FaultFile(), set(), standbys=False)
    without_needs = {kind for kind, nature in NATURES.items() if nature.needs is None}
    assert {each.kind for each in drawn} == without_needs - LIES.keys()  # lies are drawn where they are asked for
    lies = all_faults(replace(config, fault_kinds=("drift", "claims")), FaultFile(), set(), standbys=False)
    assert {each.kind for each in lies} == {FaultKind.DRIFT, FaultKind.CLAIMS}
    named = FaultFile(faults=(fault(FaultKind.PARTITION, 3.0),))
    with pytest.raises(ConfigError, match="needs the link proxy"):
        all_faults(config, named, set(), standbys=False)
    with pytest.raises(ConfigError, match="needs a Redis that this command starts"):
        all_faults(ChaosConfig(fault_kinds=("wipe",)), FaultFile(), {Needs.LINKS}, standbys=False)
    with pytest.raises(ConfigError, match=r"needs a link to Redis: write \[link"):
        all_faults(ChaosConfig(fault_kinds=("cut-redis",)), FaultFile(), {Needs.LINKS}, standbys=False)
    assert len(all_faults(config, named, EVERYTHING, standbys=False)) == len(drawn) + 1


def test_a_fault_after_the_end_is_refused():
    late = FaultFile(faults=(fault(FaultKind.KILL, 60.0),))
    with pytest.raises(ConfigError, match="must be later than the last fault, at 60 s"):
        all_faults(ChaosConfig(seconds=60.0, fault_every_s=0.0), late, EVERYTHING, standbys=False)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_is_a_plan_that_can_be_done(path):
    file = read_faults(path.read_text(), name=path.name)
    config = from_sources(ChaosConfig, file.chaos, where="chaos")
    assert all_faults(config, file, EVERYTHING, standbys=True)


# --- whom ---------------------------------------------------------------------------------------------------------

ROLES = {
    Role.REDIS: {"redis"},
    Role.BROKER: {"broker", "broker-2"},
    Role.AGGREGATOR: {"aggregator", "standby-1"},
    Role.ISLAND: {"island-0", "island-1"},
    Role.ROGUE: {"rogue-nan"},
    Role.LINKS: {"links"},
}
RUNNING = set.union(*ROLES.values())


def test_names_say_roles():
    assert {role: {name for name in RUNNING if role_of(name) is role} for role in ROLES} == ROLES


@given(
    seed=seeds,
    disturbed=st.sets(st.sampled_from(sorted(RUNNING))),
    target=st.sampled_from([Role.ISLAND, Role.AGGREGATOR, Role.BROKER]),
)
def test_any_chooses_a_healthy_process_and_never_the_last_aggregator_or_broker(seed, disturbed, target):
    given = {"running": RUNNING, "disturbed": disturbed, "rng": random.Random(seed)}
    chosen = resolve(f"any {target.value}", leader="aggregator", **given)
    healthy = ROLES[target] - disturbed
    assert chosen in healthy if len(healthy) > (target != Role.ISLAND) else chosen is None


def test_leader_and_names_are_taken_at_their_word_and_the_only_aggregator_may_be_chosen():
    assert role_of_target("leader") is Role.AGGREGATOR
    assert role_of_target("any broker") is Role.BROKER
    given = {"running": RUNNING, "disturbed": RUNNING, "rng": random.Random(0)}
    assert resolve("leader", leader="standby-1", **given) == "standby-1"
    assert resolve("leader", leader=None, **given) == "aggregator"
    assert resolve("leader", leader="gone", **given) == "aggregator"
    assert resolve("island-1", leader=None, **given) == "island-1"
    assert resolve("island-9", leader=None, **given) is None
    alone = {"running": {"aggregator", "island-0"}, "disturbed": (), "rng": random.Random(0)}
    assert resolve("any aggregator", leader=None, **alone) == "aggregator"


def test_a_fault_says_itself_in_words():
    assert str(fault(FaultKind.STOP, 1.0, ("leader", "broker"), 2.5)) == "stop leader + broker for 2.5 s"
    assert str(Fault(at_s=0.0, kind=FaultKind.WIPE, targets=("redis",))) == "wipe redis"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--fault-kinds", "kil"], "fault_kinds = 'kil': is no kind of fault; did you mean kill?"),
        (["no-such-file.toml"], "faults = 'no-such-file.toml': cannot be read"),
        (["--seconds", "0"], "seconds = 0.0: must be above 0"),
        (["--fault-every-s", "-1"], "fault_every_s = -1.0: must be"),
        (["--settle-s", "-1"], "settle_s = -1.0: must be"),
        (["FILE"], "[cluster] pase = [0.2]: is no setting of up; did you mean pace?"),
        (["LIMITS"], "tape_segments = -1: must not be negative"),  # which has no flag
        (["--fault-kinds", "wipe", "--redis-url", "redis://127.0.0.1:1"], "needs a Redis that this command starts"),
        (["--check", "no-such-run"], "holds no ledger of a run"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(tmp_path, capsys, flags, words):
    (tmp_path / "faults.toml").write_text("[cluster]\npase = [0.2]")
    (tmp_path / "limits.toml").write_text("[cluster]\ntape_segments = -1\nhold = false")
    files = {"FILE": str(tmp_path / "faults.toml"), "LIMITS": str(tmp_path / "limits.toml")}
    given = [files.get(each, each) for each in flags]
    assert cli.main(["chaos", *given, "--run-dir", str(tmp_path / "run")]) in (1, 2)
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
