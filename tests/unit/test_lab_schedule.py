"""Experiments and what is due: from files and records alone."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.wire.errors import ConfigError
from ops.lab.command import as_they_are
from ops.lab.records import Record, Stage
from ops.lab.runner import estimate_s
from ops.lab.schedule import Attempt, Tune, agenda, current, interior, left_out, load, search
from ops.lab.settings import Mode, cell_settings, key_of, resolved

PLAIN = """
question = "which is best?"
seeds = 2

[run]
steps = 100
islands = 2
[run.task]
model = "tiny"

[[grid]]
mode = ["decoupled", "diloco"]

[[compare]]
claim = "the same"
candidate = { mode = "decoupled" }
baseline = { mode = "diloco" }
margin = 0.01
kind = "not-worse"
"""

TUNED = (
    PLAIN
    + """
ignore = ["task.learning_rate"]
[tune]
name = "task.learning_rate"
values = [0.001, 0.002, 0.004]
by = ["mode"]
rungs = [0.25, 1.0]
keep = 2
"""
)


#: Of another grid than the other side of the claim.
LOPSIDED = """mode = ["decoupled"]
islands = [2, 4]
[[grid]]
mode = ["diloco"]
islands = [8]"""


#: Of a fleet that trains twice as much.
BIGGER = """mode = ["decoupled"]
[[grid]]
mode = ["diloco"]
islands = [4]"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "trial.toml"
        path.write_text(text)
        return load(path)

    return write


def record_of(run, loss):
    return Record(
        experiment=run.experiment,
        stage=run.stage,
        cell=run.fields,
        key=key_of(run.settings, run.seed),
        seed=run.seed,
        loss=loss,
        tokens=run.settings.steps * run.settings.islands * 512,
        parameters=100,
        wall_s=2.0,
        curve=((100.0, 1.0, loss), (200.0, 2.0, loss)),
        settings=resolved(run.settings) | {"seed": run.seed},
    )


def names(runs):
    return [(run.stage, run.fields.get("mode"), run.fields.get("task.learning_rate"), run.seed) for run in runs]


def play(experiment, loss_of):
    """Runs everything that is ever due; returns the runs in order."""
    records, order = [], []
    for _ in range(200):
        due = agenda(experiment, records).due
        if not due:
            return order, records
        order.append(due[0])
        records.append(record_of(due[0], loss_of(due[0])))
    raise AssertionError("it never ends")


# --- what is due --------------------------------------------------------------------------------------------------


def test_every_cell_gets_its_first_seed_before_any_gets_its_second(write):
    due = agenda(write(PLAIN), []).due
    assert names(due) == [
        (Stage.FINAL, "decoupled", None, 0),
        (Stage.FINAL, "diloco", None, 0),
        (Stage.FINAL, "decoupled", None, 1),
        (Stage.FINAL, "diloco", None, 1),
    ]


def test_a_grid_without_an_axis_that_is_tuned_for_has_one_best_value_along_it(write):
    text = """
question = "q"
seeds = 1
[[grid]]
mode = ["decoupled"]
sync_interval = [12, 24]
[[grid]]
mode = ["data-parallel"]
[tune]
name = "task.learning_rate"
values = [0.001, 0.002, 0.004, 0.008]
by = ["mode", "sync_interval"]
"""
    best = {("decoupled", 12): 0.002, ("decoupled", 24): 0.004, ("data-parallel", None): 0.002}

    def loss(run):
        fields = run.fields
        return 1 + abs(fields["task.learning_rate"] - best[fields["mode"], fields.get("sync_interval")])

    order, _ = play(write(text), loss)
    finals = [run.fields for run in order if run.stage is Stage.FINAL]
    assert {(each["mode"], each.get("sync_interval")): each["task.learning_rate"] for each in finals} == best


def test_the_newest_of_several_records_of_one_run_counts(write):
    experiment = write(PLAIN)
    first = record_of(agenda(experiment, []).due[0], 1.5)
    assert [r.loss for r in current(experiment, [first, replace(first, loss=1.25)])] == [1.25]


def test_rates_are_tuned_before_any_cell_is_run_and_each_mode_gets_its_own(write):
    best = {"decoupled": 0.002, "diloco": 0.002}

    def loss(run):
        return 1.0 + abs(run.fields["task.learning_rate"] - best[run.fields["mode"]])

    order, _ = play(write(TUNED), loss)
    tuning = [run for run in order if run.stage is Stage.TUNE]
    for mode in best:
        stages = [run.stage for run in order if run.fields["mode"] == mode]
        assert stages == sorted(stages, key=[Stage.TUNE, Stage.FINAL].index)
    short = [run for run in tuning if run.settings.steps == 25]
    assert len(short) == 6  # three values for each of two modes on the first rung
    assert all(run.seed == 1000 for run in tuning)
    assert {run.fields["task.learning_rate"] for run in order if run.stage is Stage.FINAL} == {0.002}


def test_tuning_goes_on_beyond_an_edge_until_the_best_is_interior(write):
    def loss(run):
        return 1.0 + abs(run.fields["task.learning_rate"] - 0.008)

    order, _ = play(write(TUNED), loss)
    tried = {run.fields["task.learning_rate"] for run in order if run.stage is Stage.TUNE and run.settings.steps == 100}
    assert tried == {0.002, 0.004, 0.008, 0.016}
    assert {run.fields["task.learning_rate"] for run in order if run.stage is Stage.FINAL} == {0.008}


@pytest.mark.parametrize(
    ("name", "values", "tried"),
    [
        ("sync_interval", "[12, 24, 48]", {12, 24, 48, 96, 192}),  # whole numbers stay whole
        ("outer_momentum", "[0.5, 0.9]", {0.5, 0.9}),  # 1.62 would be next, and there is no such momentum
        ("keep", "[0.5, 1.0]", {0.5, 1.0}),
    ],
)
def test_what_is_tuned_has_a_type_and_bounds(write, name, values, tried):
    text = TUNED.replace("steps = 100", "steps = 1000").replace(
        '"task.learning_rate"\nvalues = [0.001, 0.002, 0.004]', f'"{name}"\nvalues = {values}'
    )
    order, records = play(write(text.replace("task.learning_rate", name)), lambda run: 1 / run.fields[name])
    ran = {run.fields[name] for run in order}
    assert (ran, {type(value) for value in ran}) == (tried, {type(value) for value in tried})
    finals = [record for record in records if record.stage is Stage.FINAL]
    assert {record.cell[name] for record in finals} == {max(tried)}


def test_cells_that_wait_for_a_rate_are_counted(write):
    left = agenda(write(TUNED), [])
    assert len(left.due) == 6
    assert left.tuned == {}


def test_runs_that_several_groups_need_are_due_once(write):
    text = TUNED.replace('by = ["mode"]', 'by = ["mode", "pace"]').replace(
        'mode = ["decoupled", "diloco"]', 'mode = ["decoupled"]\npace = ["a", "b"]'
    )
    text = text.partition("[[compare]]")[0] + "[tune]" + text.partition("[tune]")[2]
    due = agenda(write(text + "[variants.pace]\na = {}\nb = {}\n"), []).due
    assert len(due) == len({run.key for run in due}) == 3


def test_the_time_of_a_run_is_estimated_from_what_an_inner_step_took_before(write):
    due = agenda(write(PLAIN), []).due
    assert estimate_s(due[0], []) == 0
    assert estimate_s(due[1], [record_of(due[0], 1.0)]) == pytest.approx(2.0)


def test_a_claim_that_asks_for_more_seeds_gets_them_for_the_cells_that_it_compares(write):
    text = PLAIN.replace('mode = ["decoupled", "diloco"]', 'mode = ["decoupled", "diloco", "data-parallel"]')
    order, _ = play(write(text + "seeds = 5\n"), lambda run: 1.0 + 0.1 * run.seed)
    counts = [sum(run.fields["mode"] == mode for run in order) for mode in ("decoupled", "diloco", "data-parallel")]
    assert counts == [5, 5, 2]
    limited = write(text + "seeds = 5\n").limited(1)
    assert [run.seed for run in agenda(limited, []).due] == [0, 0, 0]


def test_cells_of_the_same_settings_are_run_once_and_both_served(write):
    text = PLAIN.replace("[[grid]]\n", "[[grid]]\nfragments = [1, 2]\n")
    experiment = write(text)
    order, records = play(experiment, lambda run: 1.0)
    assert len(order) == 6  # synchronous DiLoCo has one fragment, whatever the grid says
    cells = [record.cell for record in current(experiment, records)]
    assert cells.count({"fragments": 1, "mode": "diloco"}) == cells.count({"fragments": 2, "mode": "diloco"}) == 2


def test_runs_at_a_rate_that_is_no_longer_the_best_do_not_count(write):
    def loss(run):
        rate, short = run.fields["task.learning_rate"], run.settings.steps == 25
        return 1.0 + (abs(rate - 0.004) if short else abs(rate - 0.002))

    quick = write(TUNED.replace("rungs = [0.25, 1.0]", "rungs = [0.25]"))
    _, records = play(quick, loss)
    assert {r.settings["task.learning_rate"] for r in current(quick, records) if r.stage is Stage.FINAL} == {0.004}
    thorough = write(TUNED)
    left = agenda(thorough, records)
    assert {run.stage for run in left.due} == {Stage.TUNE}
    while due := agenda(thorough, records).due:
        records.append(record_of(due[0], loss(due[0])))
    finals = [r for r in current(thorough, records) if r.stage is Stage.FINAL]
    assert [r.settings["task.learning_rate"] for r in finals] == [0.002] * 4
    assert left_out(thorough, records) == 6, "and two short runs beyond the edge"


def test_records_of_other_settings_do_not_count(write):
    shorter, experiment = write(TUNED), write(TUNED.replace("steps = 100", "steps = 200"))  # a rung of which has 50
    _, records = play(experiment, lambda run: 1 + abs(run.fields["task.learning_rate"] - 0.002))
    assert current(shorter, records) == ()
    assert (left_out(shorter, records), left_out(experiment, records)) == (len(records), 0)
    assert len(current(experiment, records)) == len(records)


def test_a_task_that_was_edited_is_asked_anew(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "edited_task_of_a_test.py"
    source.write_text("from examples.numpy_task import task\n")
    text = PLAIN.replace('[run.task]\nmodel = "tiny"', "").replace(
        "[run]", '[run]\ntask = "edited_task_of_a_test:task"'
    )
    experiment = as_they_are(write(text))
    _, records = play(experiment, lambda run: 1.0 + 0.1 * run.seed)
    records = [replace(each, task_code=experiment.sources) for each in records]
    assert agenda(experiment, records).due == ()
    source.write_text("from examples.numpy_task import task  # edited\n")
    edited = as_they_are(write(text))
    assert len(agenda(edited, records).due) == len(records) == left_out(edited, records)


def test_no_reported_seed_may_be_the_one_that_tuned(write):
    with pytest.raises(ConfigError, match=r"tune\.seed = 1000: must be at least 1001, the seeds"):
        write(TUNED.replace("margin = 0.01\n", "margin = 0.01\nseeds = 1001\n", 1))


# --- tuning -------------------------------------------------------------------------------------------------------


def played(tune, loss, possible=lambda value: True):
    """Runs whatever is due until there is a winner; returns the attempts in order, and the winner."""
    done = {}
    while True:
        asked, winner = search(tune, done.get, possible)
        if winner is not None:
            return list(done), winner
        assert len(done) < 200
        due = next(attempt for attempt in asked if attempt not in done)
        done[due] = loss(due)


def test_a_best_value_in_the_middle_is_interior():
    found = interior({0.004: 3.3, 0.001: 3.2, 0.002: 3.1})
    assert (found.best, found.interior, found.next_value) == (0.002, True, None)


@pytest.mark.parametrize(
    ("losses", "best", "next_value"),
    [([3.0, 3.1, 3.2], 0.001, 0.0005), ([3.2, 3.1, 3.0], 0.004, 0.008), ([math.nan, math.inf, 9.0], 0.004, 0.008)],
)
def test_beyond_an_edge_the_next_value_continues_the_ratio(losses, best, next_value):
    found = interior(dict(zip([0.001, 0.002, 0.004], losses, strict=True)))
    assert (found.best, found.interior) == (best, False)
    assert found.next_value == pytest.approx(next_value)


def test_a_single_value_is_an_edge_and_zero_has_no_ratio():
    assert interior({0.5: 3.0}).next_value == 1.0
    assert interior({0.0: 2.0, 0.5: 3.0, 0.9: 4.0}).next_value is None


def test_what_an_early_rung_dropped_counts_as_tried_and_worse():
    tune = Tune(name="rate", values=(1, 2, 4, 8), rungs=(0.25, 1.0), keep=2)
    first = {1: 4.2, 2: 4.1, 4: 4.0, 8: 4.3}
    last = {1: 3.6, 2: 3.4, 4: 3.5}
    order, found = played(tune, lambda each: (first if each.rung < 1 else last)[each.value])
    assert [each.value for each in order if each.rung == 1.0] == [2, 4, 1]  # its neighbour was dropped too early
    assert (found.best, found.interior) == (2, True)


def test_a_neighbour_that_never_ran_at_full_length_makes_nothing_interior():
    """The short rung liked large values; two more at full length do not reach the smallest."""
    tune = Tune(name="rate", values=(1, 2, 4, 8, 16), rungs=(0.25, 1.0), keep=2)
    order, found = played(tune, lambda each: each.value if each.rung == 1.0 else -each.value)
    assert [each.value for each in order if each.rung == 1.0] == [8, 16, 4, 2]
    assert (found.best, found.interior) == (2, False)


def test_a_value_that_diverged_never_goes_on():
    tune = Tune(name="rate", values=(1, 2, 4), rungs=(0.5, 1.0), keep=3)
    order, found = played(tune, lambda each: math.inf if each.value == 1 else each.value)
    assert [each.value for each in order] == [1, 2, 4, 2, 4, 1]  # but as the neighbour of the best it is asked again
    assert (found.best, found.interior) == (2, True)


def test_where_everything_diverges_the_smallest_value_is_left():
    order, found = played(Tune(name="rate", values=(1.0, 2.0), rungs=(0.5, 1.0)), lambda each: math.inf)
    assert [each.value for each in order] == [1.0, 2.0, 0.5, 0.25]
    assert (found.best, found.interior) == (0.25, False)


def test_while_runs_are_missing_nothing_has_won():
    """An interrupted race: the first seed prefers 2, the others have not spoken."""
    tune = Tune(name="rate", values=(1, 2, 4), seeds=3)
    done = {Attempt(value, 1.0, 1000): abs(value - 2.0) for value in (1, 2, 4)}
    asked, winner = search(tune, done.get, lambda value: True)
    assert winner is None
    due = {(each.value, each.seed) for each in asked if each not in done}
    assert due == {(v, s) for v in (1, 2, 4) for s in (1001, 1002)}


@given(
    st.floats(-3, 3),
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0]), min_size=2, max_size=5, unique=True),
    st.integers(1, 3),
    st.integers(2, 4),
    st.integers(0, 3),
)
def test_of_losses_with_one_valley_the_best_value_tried_wins(valley, values, seeds, keep, extend):
    """And it is interior, unless no more values might be tried."""
    tune = Tune(name="rate", values=tuple(sorted(values)), seeds=seeds, keep=keep, extend=extend)
    order, found = played(tune, lambda each: abs(math.log2(each.value) - valley))
    losses = {each.value: abs(math.log2(each.value) - valley) for each in order}
    assert losses[found.best] == min(losses.values())
    assert len(order) == len(set(order))
    assert found.interior or len(losses) >= len(values) + extend


# --- files -------------------------------------------------------------------------------------------------------


def asking(*lines):
    return "\n".join(['question = "q"', *lines])


ONE_GRID = "[grid]\nislands = [2]"
TUNE_KEEP = '[grid]\nmode = ["diloco"]\n[tune]\nname = "keep"\nvalues = [0.5, 1.0]'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "question"),
        ("question = ", "experiment"),
        (asking("sedes = 2"), "sedes"),
        (asking("seeds = 0"), "seeds"),
        (asking("budget_minutes = -1.0"), "budget_minutes"),
        (asking("[compare]", 'claim = "c"'), "compare"),
        (asking("compare = [1]"), "compare"),
        (asking("variants = 3"), "variants"),
        (asking("[run]", "islnds = 2"), "islnds"),
        (asking("[run]", "jitter = 3.0"), "jitter"),
        (asking("[run]", "outages = [[7, 1, 1]]"), "outages"),
        (asking("[run]", "joins = [[1, 30, 10]]"), "joins"),
        (asking("[run]", 'mode = "diloco"', "chips = 1000"), "mode"),
        (asking("[run]", 'mode = "diloco"', "steps = 23"), "sync_interval = 24"),
        (asking("[run]", "step_times_s = [1.0, inf]"), "step_times_s"),
        (asking("[run]", "megabytes_per_s = inf", ONE_GRID), "megabytes_per_s"),
        (asking("[run]", "chips = 1", ONE_GRID), "chips = 1"),
        (asking("[run]", 'task.merge = "mean"'), "task.merge"),
        (asking("[run]", 'task = "nowhere_at_all:task"', ONE_GRID), "task = 'nowhere_at_all:task'"),
        (asking("[run]", 'task = "examples.numpy_task:tusk"', ONE_GRID), "examples.numpy_task:tusk"),
        (asking("[run]", 'task = "examples.numpy_task"'), "task = 'examples.numpy_task'"),
        (asking("[run]", 'task = "a:b"', "[run.task]", "batch = 8"), "experiment"),
        (asking("[run.task]", 'modle = "tiny"'), "task.modle"),
        (asking("[grid]", "islands = 4"), "grid.islands"),
        (asking("[grid]", 'mode = ["async"]'), "mode"),
        (asking("[grid]", 'rule = ["b"]', "[variants.rule]", "a = { keep = 0.0 }"), "b"),
        (asking("[grid]", "rule = [0.5]", "[variants.rule]", '"0.5" = { keep = 0.5 }'), "grid.rule"),
        (asking("[grid]", 'r = ["a"]', "[variants.r]", "a = { kep = 0.0 }"), "variants.r = 'kep'"),
        (asking("[variants.rule]", "a = { keep = 0.0 }"), "variants = 'rule'"),
        (asking("[grid]", "islands = [2]", 'f = ["a"]', "[variants.f]", "a = { islands = 3 }"), "grid.f"),
        (asking(TUNE_KEEP.replace("[0.5, 1.0]", "[1.0]")), "tune.values"),
        (asking(TUNE_KEEP.replace("[0.5, 1.0]", "[0.5, nan]")), "tune.values"),
        (asking(TUNE_KEEP, 'by = ["chips"]'), "tune.by"),
        (asking(TUNE_KEEP, "extend = -1"), "tune.extend"),
        (asking(TUNE_KEEP, "seed = 2"), "tune.seed"),
        (asking(TUNE_KEEP.replace('"keep"', '"kep"')), "tune.name = 'kep'"),
        (asking(TUNE_KEEP.replace('"keep"', '"steps"')), "tune.name"),
        (asking(TUNE_KEEP.replace('mode = ["diloco"]', 'mode = ["diloco"]\nkeep = [1.0]')), "tune.name"),
        (TUNED.replace("steps = 100", "steps = 90"), "sync_interval = 24"),
        (PLAIN.replace("seeds = 2", "seeds = 1"), "compare.seeds"),
        (PLAIN.replace('{ mode = "decoupled" }', '{ mode = "decopled" }'), "compare.candidate"),
        (PLAIN.replace('{ mode = "diloco" }', '{ mode = "decoupled", islands = 2 }'), "compare.baseline"),
        (PLAIN.replace('kind = "not-worse"', ""), "kind"),
        (PLAIN + 'by = ["mdoe"]', "compare.by = 'mdoe'"),
        (PLAIN + 'ignore = ["options"]', "compare.ignore"),
        (PLAIN + "[variants.rule]\na = { keep = 0.0 }", "variants = 'rule'"),
        (PLAIN.replace("[[grid]]", "[[grid]]\nsync_intervall = [5]"), "grid = 'sync_intervall'"),
        (PLAIN.replace('mode = ["decoupled", "diloco"]', LOPSIDED), "compare.baseline"),
        (PLAIN.replace('mode = ["decoupled", "diloco"]', BIGGER), "compare.claim"),
        (PLAIN.replace("mode = [", "keep = [0.0, 1.0]\nmode = [") + 'ignore = ["keep"]', "compare.candidate"),
        (TUNED.replace('ignore = ["task.learning_rate"]', ""), "compare.baseline"),
        (TUNED.replace('ignore = ["task.learning_rate', 'ignore = ["task.rate'), "compare.ignore"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(write, text, named):
    with pytest.raises(ConfigError) as caught:
        write(text)
    assert named in str(caught.value)
    assert caught.value.cure
    assert "trial.toml" in str(caught.value)


def test_a_variant_stands_for_several_settings(write):
    experiment = write(
        'question = "q"\n[run]\nsteps = 99\n[grid]\nrule = ["a", "b"]\nislands = [2, 3]\n'
        '[variants.rule]\na = { keep = 0.0, "task.batch" = 4 }\nb = { quorum = 0 }'
    )
    assert experiment.cells() == [
        {"rule": "a", "islands": 2},
        {"rule": "a", "islands": 3},
        {"rule": "b", "islands": 2},
        {"rule": "b", "islands": 3},
    ]
    settings = experiment.settings_of(experiment.cells()[1])
    assert (settings.keep, settings.islands, settings.steps, dict(settings.options)) == (0.0, 3, 99, {"batch": 4})


# --- settings -----------------------------------------------------------------------------------------------------


def test_settings_survive_the_way_through_json():
    cell = cell_settings({"mode": "decoupled", "task.model": "tiny", "joins": [[1, 2, 3.5]], "step_times_s": [1, 2]})
    assert cell_settings(resolved(cell)) == cell
    assert key_of(cell_settings(resolved(cell)), 3) == key_of(cell, 3)
    assert key_of(cell, 3) != key_of(cell, 4)


def test_a_setting_that_came_later_does_not_change_older_keys():
    cell = cell_settings({"mode": "decoupled"})
    assert "crashes" not in resolved(cell)
    assert "crashes" in resolved(cell_settings({"mode": "decoupled", "crashes": [[0, 5.0]]}))


def test_synchronous_diloco_has_one_fragment_whatever_the_others_have():
    assert cell_settings({"mode": "diloco", "fragments": 6}).fragments == 1
    assert cell_settings({"mode": Mode.STREAMING, "fragments": 6}).fragments == 6


def test_what_is_not_said_of_the_outer_step_is_what_suits_the_inner_optimizer():
    def outer(**values):
        cell = cell_settings({name.replace("_", ".", 1): value for name, value in values.items()})
        return str(cell.merge), cell.outer_learning_rate, cell.outer_momentum

    assert outer() == outer(task_optimizer="adamw") == ("rda", 1.0, 0.0)
    assert outer(task_optimizer="muon") == ("mean", 0.7, 0.5)
    assert outer(task_optimizer="muon", merge="rda") == ("rda", 0.7, 0.5)
    assert outer(task_optimizer="muon", mode="data-parallel") == ("rda", 1.0, 0.0), "nothing is merged there"
    assert outer(task_optimizer="muon", task="tests:none") == ("rda", 1.0, 0.0), "another task's optimizer is not ours"


def test_every_example_can_be_loaded(request):
    examples = sorted((request.config.rootpath / "examples" / "lab").glob("*.toml"))
    assert len(examples) >= 7
    for path in examples:
        assert load(path).cells()
