"""Experiments and what is due: from files and records alone."""

import pytest

from broker.base.errors import ConfigError
from ops.lab.records import Record
from ops.lab.schedule import current, due, left_out, load
from ops.plans.cell import cell_settings, key_of, resolved

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


def in_two_grids(candidate, baseline):
    """Each side of the claim with something of its own."""
    grids = f'mode = ["decoupled"]\n{candidate}\n[[grid]]\nmode = ["diloco"]\n{baseline}'
    return PLAIN.replace('mode = ["decoupled", "diloco"]', grids)


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "trial.toml"
        path.write_text(text)
        return load(path)

    return write


def record_of(run):
    return Record(
        experiment="trial",
        cell=run.cell,
        key=run.key,
        seed=run.seed,
        loss=1.0,
        tokens=run.settings.steps * run.settings.islands * 512,
        settings=resolved(run.settings) | {"seed": run.seed},
    )


def test_every_cell_gets_its_first_seed_before_any_gets_its_second_until_nothing_is_left(write):
    experiment, records = write(PLAIN), []
    expected = [("decoupled", 0), ("diloco", 0), ("decoupled", 1), ("diloco", 1)]
    assert [(run.cell["mode"], run.seed) for run in due(experiment, [])] == expected
    while left := due(experiment, records):
        assert len(left) == len(expected) - len(records)
        records.append(record_of(left[0]))
    assert [sorted(of_cell) for of_cell in current(experiment, records)] == [[0, 1], [0, 1]]
    assert left_out(experiment, records) == 0


def test_a_claim_that_asks_for_more_seeds_gets_them_for_the_cells_that_it_compares(write):
    text = PLAIN.replace('mode = ["decoupled", "diloco"]', 'mode = ["decoupled", "diloco", "data-parallel"]')
    experiment = write(text + "seeds = 5\n")
    runs = due(experiment, [])
    counts = [sum(run.cell["mode"] == mode for run in runs) for mode in ("decoupled", "diloco", "data-parallel")]
    assert counts == [5, 5, 2]
    assert [run.seed for run in due(experiment.limited(1), [])] == [0, 0, 0]


def test_cells_of_the_same_settings_are_run_once_and_both_served(write):
    experiment = write(PLAIN.replace("[[grid]]\n", "[[grid]]\nfragments = [1, 2]\n").partition("[[compare]]")[0])
    runs = due(experiment, [])
    assert [run.settings.fragments for run in runs].count(2) == 2
    assert len(runs) == 6  # synchronous DiLoCo has one fragment, whatever the grid says
    assert [len(of_cell) for of_cell in current(experiment, map(record_of, runs))] == [2, 2, 2, 2]


def test_records_of_other_settings_and_of_other_seeds_do_not_count(write):
    shorter, experiment = write(PLAIN), write(PLAIN.replace("steps = 100", "steps = 200"))
    records = [record_of(run) for run in due(experiment, [])]
    assert current(shorter, records) == [{}, {}]
    assert (left_out(shorter, records), left_out(experiment, records)) == (4, 0)
    assert left_out(experiment.limited(1), records) == 2


ONE_GRID = "[grid]\nislands = [2]"


def asking(*lines):
    return "\n".join(['question = "q"', *lines])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "question"),
        ("question = ", "experiment"),
        (asking("sedes = 2"), "sedes"),
        (asking("budget_minutes = -1.0"), "budget_minutes"),
        (asking("[compare]", 'claim = "c"'), "compare"),
        (asking("variants = 3"), "variants"),
        (asking("[run]", "islnds = 2"), "islnds"),
        (asking("[run]", "outages = [[7, 1, 1]]"), "outages"),
        (asking("[run]", "joins = [[1, 30, 10]]"), "joins"),
        (asking("[run]", 'mode = "diloco"', "chips = 1000"), "mode"),
        (asking("[run]", 'mode = "diloco"', "steps = 23"), "sync_interval = 24"),
        (asking("[run]", "step_times_s = [1.0, inf]"), "step_times_s"),
        (asking("[run]", "megabytes_per_s = inf", ONE_GRID), "megabytes_per_s"),
        (asking("[run]", "chips = 1", ONE_GRID), "chips = 1"),
        (asking("[run]", 'mode = "streaming"', "jitter = 0.1"), "mode"),
        (asking("[run]", 'task = "nowhere_at_all:task"', ONE_GRID), "task = 'nowhere_at_all:task'"),
        (asking("[run]", 'task = "examples.numpy_task:tusk"', ONE_GRID), "examples.numpy_task:tusk"),
        (asking("[run]", 'task = "examples.numpy_task"'), "task = 'examples.numpy_task'"),
        (asking("[run]", 'task = "a:b"', "[run.task]", "batch = 8"), "experiment"),
        (asking("[run.task]", 'modle = "tiny"'), "task.modle"),
        (asking("[grid]", "islands = 4"), "grid.islands"),
        (asking("[grid]", 'mode = ["async"]'), "mode"),
        (asking("[grid]", 'rule = ["b"]', "[variants.rule]", "a = { keep = 0.0 }"), "b"),
        (asking("[grid]", "rule = [0.5]", "[variants.rule]", '"0.5" = { keep = 0.5 }'), "grid.rule"),
        (asking("[grid]", 'r = ["a"]', "[variants.r]", "a = { kep = 0.0 }"), "kep = 0.0"),
        (asking("[variants.rule]", "a = { keep = 0.0 }"), "variants = 'rule'"),
        (asking("[grid]", "islands = [2]", 'f = ["a"]', "[variants.f]", "a = { islands = 3 }"), "grid.f"),
        (PLAIN.replace("seeds = 2", "seeds = 1"), "compare.seeds"),
        (PLAIN.replace('{ mode = "decoupled" }', '{ mode = "decopled" }'), "compare.candidate"),
        (PLAIN.replace('{ mode = "diloco" }', '{ mode = "decoupled", islands = 2 }'), "compare.baseline"),
        (PLAIN.replace('kind = "not-worse"', ""), "kind"),
        (PLAIN + 'ignore = ["options"]', "compare.ignore"),
        (in_two_grids("islands = [2, 4]", "islands = [8]"), "compare.baseline"),
        (in_two_grids("task.learning_rate = [0.001]", "task.learning_rate = [0.002]"), "compare.baseline"),
        (PLAIN + 'ignore = ["task.rate"]', "compare.ignore"),
        (PLAIN.replace("mode = [", "keep = [0.0, 1.0]\nmode = [") + 'ignore = ["keep"]', "compare.candidate"),
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


AHEAD = {"data_ahead_s": 10.0}


def test_settings_survive_the_way_through_json():
    cell = cell_settings({"mode": "decoupled", "task.model": "tiny", "joins": [[1, 2, 3.5]], "step_times_s": [1, 2]})
    assert cell_settings(resolved(cell)) == cell
    assert key_of(cell_settings(resolved(cell)), 3) == key_of(cell, 3)
    assert key_of(cell, 3) != key_of(cell, 4)


def test_records_of_runs_with_one_share_of_the_data_for_each_island_count_and_nothing_runs_such():
    before, now, named = (cell_settings({"mode": "decoupled", **data}) for data in ({"data_ahead_s": 0.0}, {}, AHEAD))
    assert (now.aggregator.data_ahead_s, named.aggregator.data_ahead_s) == (10.0, 10.0)
    assert len({key_of(each, 1) for each in (before, now, named)}) == 3
    with pytest.raises(ConfigError, match="data_ahead_s"):
        _ = cell_settings(resolved(before)).aggregator  # as the worker has it


def test_what_is_not_said_of_the_outer_step_is_what_suits_the_inner_optimizer():
    def outer(**values):
        cell = cell_settings({name.replace("_", ".", 1): value for name, value in values.items()})
        return str(cell.merge), cell.outer_learning_rate, cell.outer_momentum

    assert outer() == outer(task_optimizer="adamw") == ("rda", 0.7, 0.3)
    assert outer(task_optimizer="muon") == ("mean", 0.7, 0.5)
    assert outer(task_optimizer="muon", merge="rda") == ("rda", 0.7, 0.5)
    assert outer(task_optimizer="muon", mode="data-parallel") == ("rda", 0.7, 0.3), "nothing is merged there"
    assert outer(task_optimizer="muon", task="tests:none") == ("rda", 0.7, 0.3), "another task's optimizer is not ours"
