"""Experiments and what is due: from files and records alone."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from broker.wire.errors import ConfigError
from ops.lab import schedule, sources
from ops.lab.decoupled import plan_of
from ops.lab.experiment import load
from ops.lab.records import Record, Stage, newest
from ops.lab.schedule import agenda, current, estimate_s, left_out, passed_over, tunings
from ops.lab.settings import Mode, cell_settings, key_of, resolved

PLAIN = """
question = "which is best?"
seeds = 2
max_seeds = 4

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
        loss_se=0.0,
        sequences=4096,
        bytes_per_token=1.0,
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


@pytest.mark.parametrize("scatter", [0.0, 0.05])
def test_a_claim_that_is_planned_with_a_number_of_seeds_gets_it_whatever_its_interval(write, scatter):
    experiment = write(PLAIN + "seeds = 3\n")
    order, _ = play(experiment, lambda run: 1.0 + scatter * (run.seed + 1) * (run.fields["mode"] == "decoupled"))
    assert [run.seed for run in order] == [0, 0, 1, 1, 2, 2]
    first = replace(experiment, seeds=1)
    begun = [record_of(run, 1.0 + run.seed) for run in agenda(first, []).due]
    assert [run.seed for run in agenda(first, begun).due] == [1, 1, 2, 2], "side by side, not one after the other"
    limited = write(PLAIN + "seeds = 3\nlooks = [2]\n").limited(2)
    order, _ = play(limited, lambda run: 1.0 + 1e-5 * run.seed)
    assert [run.seed for run in order] == [0, 0, 1, 1]


def test_a_claim_that_is_planned_with_more_than_max_seeds_gets_them_and_no_other_claim_does(write):
    other = PLAIN[PLAIN.index("[[compare]]") :].replace('"decoupled"', '"data-parallel"')
    experiment = write(PLAIN.replace("mode = [", 'mode = ["data-parallel", ') + "seeds = 6\n" + other)
    noise = [1.0, 1.3, 0.8, 1.1, 0.9, 1.2]
    order, _ = play(experiment, lambda run: 1.0 if run.fields["mode"] == "diloco" else noise[run.seed])
    assert Counter(run.fields["mode"] for run in order) == {"decoupled": 6, "diloco": 6, "data-parallel": 4}


def test_a_grid_without_an_axis_that_is_tuned_for_has_one_best_value_along_it(write):
    text = """
question = "q"
seeds = 1
max_seeds = 1
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


def test_what_has_a_record_is_not_due_again(write):
    experiment = write(PLAIN)
    first = agenda(experiment, []).due[0]
    assert names(agenda(experiment, [record_of(first, 1.5)]).due) == names(agenda(experiment, []).due)[1:]


def test_seeds_are_added_to_both_sides_while_the_interval_is_wider_than_the_margin(write):
    noise = {0: 1.00, 1: 1.05, 2: 0.97, 3: 1.01}
    order, records = play(write(PLAIN), lambda run: noise[run.seed] if run.fields["mode"] == "decoupled" else 1.0)
    assert [run.seed for run in order] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert agenda(write(PLAIN), records).due == ()


def test_a_run_that_was_taken_out_of_the_records_is_run_again(write):
    """That is what the error about a damaged record says."""
    noise = {0: 1.00, 1: 1.05, 2: 0.97, 3: 1.01}
    _, records = play(write(PLAIN), lambda run: noise[run.seed] if run.fields["mode"] == "decoupled" else 1.0)
    for i, record in enumerate(records):
        due = agenda(write(PLAIN), [*records[:i], *records[i + 1 :]]).due
        assert [(run.fields["mode"], run.seed) for run in due] == [(record.cell["mode"], record.seed)]


def test_no_more_seeds_are_run_than_there_may_be(write):
    order, _ = play(write(PLAIN.replace("max_seeds = 4", "max_seeds = 3")), lambda run: 1.0 + 1e-5 * run.seed)
    assert [run.seed for run in order] == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]  # fewer than the first look needs


def test_no_seed_is_added_beyond_the_first_look_where_the_interval_is_narrow(write):
    order, _ = play(write(PLAIN.replace("max_seeds = 4", "max_seeds = 9")), lambda run: 1.0 + 1e-5 * run.seed)
    assert [run.seed for run in order] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_seeds_are_added_although_the_baseline_diverged_with_one_of_them(write):
    noise = {0: 1.00, 1: 1.05, 2: 0.97, 3: 1.01}

    def loss(run):
        if run.fields["mode"] == "diloco":
            return float("inf") if run.seed == 1 else 1.0
        return noise[run.seed]

    order, _ = play(write(PLAIN), loss)
    assert [run.seed for run in order] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("change", [{"loss": math.inf}, {"tokens": 1}, {"corpus": "another"}])
def test_no_seed_is_added_where_more_of_them_change_nothing(write, change):
    """A candidate that diverged has failed; runs that cannot be compared cannot be compared with any seed."""
    experiment, records = write(PLAIN), []
    for _ in range(4):
        run = agenda(experiment, records).due[0]
        made = record_of(run, 1.0 + 0.1 * run.seed)
        records.append(replace(made, **change) if run.fields["mode"] == "decoupled" else made)
    assert agenda(experiment, records).due == ()


def test_cells_of_the_same_settings_are_run_once_and_both_served(write):
    text = PLAIN.replace("[[grid]]\n", "[[grid]]\nfragments = [1, 2]\n").replace("max_seeds = 4", "max_seeds = 2")
    experiment = write(text)
    order, records = play(experiment, lambda run: 1.0)
    assert len(order) == 6  # synchronous DiLoCo has one fragment, whatever the grid says
    cells = [record.cell for record in current(experiment, records)]
    assert cells.count({"fragments": 1, "mode": "diloco"}) == cells.count({"fragments": 2, "mode": "diloco"}) == 2


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


def test_a_declared_value_that_an_early_rung_dropped_is_tried_when_the_best_is_its_neighbour(write):
    # On the short rung 0.001 seems the worst; on the long one the best lies at 0.002, whose smaller neighbour it is.
    def loss(run):
        rate, short = run.fields["task.learning_rate"], run.settings.steps == 25
        return 1.0 + (abs(rate - 0.004) if short else abs(rate - 0.002))

    order, _ = play(write(TUNED), loss)
    long_rung = [
        run.fields["task.learning_rate"]
        for run in order
        if run.stage is Stage.TUNE and run.settings.steps == 100 and run.fields["mode"] == "diloco"
    ]
    assert long_rung == [0.002, 0.004, 0.001]


def test_the_best_rates_are_run_with_more_seeds_where_one_seed_favours_a_rate(write):
    def loss(run):
        rate = run.fields["task.learning_rate"]
        stumbles = rate == 0.004 and run.seed > 1000  # the first seed does not show it
        return 1.0 + abs(rate - 0.0035) + 0.1 * stumbles

    order, records = play(write(TUNED + "seeds = 3\n"), loss)
    last = [run for run in order if run.stage is Stage.TUNE and run.settings.steps == 100]
    of_diloco = [(run.fields["task.learning_rate"], run.seed) for run in last if run.fields["mode"] == "diloco"]
    assert sorted(of_diloco) == [
        (0.001, 1000), (0.001, 1001), (0.001, 1002),  # joins, since the winner lies at the edge of those that race
        (0.002, 1000), (0.002, 1001), (0.002, 1002), (0.004, 1000), (0.004, 1001), (0.004, 1002), (0.008, 1000),
    ]  # fmt: skip
    assert {run.fields["task.learning_rate"] for run in order if run.stage is Stage.FINAL} == {0.002}
    found = {dict(each.group)["mode"]: each.search for each in tunings(write(TUNED + "seeds = 3\n"), records)}["diloco"]
    assert (found.winner.best, found.winner.interior) == (0.002, True)
    assert found.tried == (0.001, 0.002, 0.004, 0.008)


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


def test_tuning_ends_after_so_many_values_beyond_the_edge(write):
    order, _ = play(write(TUNED), lambda run: 1.0 - run.fields["task.learning_rate"] / 1000)
    rates = sorted({run.fields["task.learning_rate"] for run in order})
    assert rates == [0.001, 0.002, 0.004, 0.008, 0.016]


def test_runs_at_a_rate_that_is_no_longer_the_best_neither_count_nor_get_more_seeds(write):
    def loss(run):
        rate, short = run.fields["task.learning_rate"], run.settings.steps == 25
        seed_noise = 0.2 * run.seed if run.fields["mode"] == "diloco" and run.seed < 1000 else 0.0
        return 1.0 + (abs(rate - 0.004) if short else abs(rate - 0.002)) + seed_noise

    quick = write(TUNED.replace("rungs = [0.25, 1.0]", "rungs = [0.25]"))
    _, records = play(quick, loss)
    finals = {r.settings["task.learning_rate"] for r in current(quick, records) if r.stage is Stage.FINAL}
    assert finals == {0.004}
    assert max(record.seed for record in records if record.stage is Stage.FINAL) == 3  # the interval is wide

    thorough = write(TUNED)
    left = agenda(thorough, records)
    assert {run.stage for run in left.due} == {Stage.TUNE}  # and no seed more at a rate that may not be the best
    assert {r.seed for r in current(thorough, records) if r.stage is Stage.FINAL} == {0, 1, 2, 3}
    while due := agenda(thorough, records).due:
        records.append(record_of(due[0], loss(due[0])))
    finals = [r for r in current(thorough, records) if r.stage is Stage.FINAL]
    assert {r.settings["task.learning_rate"] for r in finals} == {0.002}
    assert len(finals) == 8
    others = passed_over(thorough, records)
    assert {(r.stage, r.settings["task.learning_rate"]) for r in others} == {(Stage.FINAL, 0.004)}
    assert {(r.cell["mode"], r.seed) for r in others} == {
        (mode, seed) for mode in ("decoupled", "diloco") for seed in (0, 1, 2, 3)
    }


def test_no_reported_seed_may_be_the_one_that_tuned(write):
    with pytest.raises(ConfigError, match=r"tune\.seed = 1000: must be at least 1001, the seeds"):
        replace(write(TUNED), max_seeds=1001)
    planned = TUNED.replace("margin = 0.01\n", "margin = 0.01\nseeds = 1001\n", 1)
    with pytest.raises(ConfigError, match=r"tune\.seed = 1000: must be at least 1001, the seeds"):
        write(planned)


def test_cells_that_wait_for_a_rate_are_counted(write):
    left = agenda(write(TUNED), [])
    assert len(left.due) == 6
    assert left.later == 4
    assert left.tuned == {}


def test_records_of_other_settings_are_not_of_this_experiment(write):
    experiment = write(PLAIN)
    first = record_of(agenda(experiment, []).due[0], 1.5)
    longer = write(PLAIN.replace("steps = 100", "steps = 200"))
    assert current(experiment, [first]) == (first,)
    assert current(longer, [first]) == ()
    # What it calls its cell is of the file of its day: the settings count.
    assert current(experiment, [replace(first, cell={"rule": "gone"})]) == (first,)


def test_an_edited_task_asks_anew_tuning_included(write):
    experiment = write(TUNED)
    _, records = play(experiment, lambda run: 1 + abs(run.fields["task.learning_rate"] - 0.002))
    old = [replace(each, task_code={"mine": "old", "shared": "same"}) for each in records]
    assert not agenda(experiment, old).due
    edited = [*old, replace(old[0], task_code={"mine": "new", "shared": "same"})]
    left = agenda(experiment, edited)
    assert {run.stage for run in left.due} == {Stage.TUNE}
    assert len(current(experiment, edited)) == 1
    assert current(experiment, newest(edited)) == current(experiment, edited)
    told = left_out(experiment, edited, current(experiment, edited))
    assert told == f"{len(old) - 1} records have an older form of the task or of its text, and do not count"
    other = [*old, replace(old[0], task_code={"another": "new"}), replace(old[1], task_code={})]
    assert not agenda(experiment, other).due, "another module is no other form of this one"


def test_a_task_that_was_edited_since_its_last_run_is_due_again(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "edited_by_a_test.py"
    source.write_text("def task():\n    return 1\n")
    own = PLAIN.replace("max_seeds = 4", "max_seeds = 2").replace(
        '[run.task]\nmodel = "tiny"', 'task = "edited_by_a_test:task"'
    )
    experiment = sources.as_they_are(write(own))
    assert list(experiment.sources) == ["edited_by_a_test"]
    run = [replace(record_of(each, 1.0), task_code=dict(experiment.sources)) for each in agenda(experiment, []).due]
    assert not agenda(experiment, run).due
    source.write_text("def task():\n    return 2\n")
    edited = sources.as_they_are(experiment)
    assert len(agenda(edited, run).due) == len(run)
    assert current(edited, run) == ()
    assert (
        left_out(edited, run, ())
        == f"{len(run)} records have an older form of the task or of its text, and do not count"
    )
    ours = sources.as_they_are(write(PLAIN))
    assert ours.sources == {}, "our own task is told by the digest of the whole"


def test_text_that_was_edited_since_the_last_run_asks_anew(write, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("one")
    own = PLAIN.replace('model = "tiny"', f'model = "tiny"\ndata = ["python:stdlib", "{tmp_path / "text"}"]')
    experiment = sources.as_they_are(write(own))
    assert list(experiment.sources) == [f"data {tmp_path / 'text'}"]
    due = agenda(experiment, []).due
    told = [sources.of_texts(each.settings) for each in due]
    assert told == [experiment.sources] * len(due), "a run and the experiment tell of it alike"
    run = [replace(record_of(each, 1.0), task_code=told[0]) for each in due]
    assert current(experiment, run)
    (tmp_path / "text" / "b.txt").write_text("two")
    assert current(sources.as_they_are(experiment), run) == ()
    (tmp_path / "text" / "b.txt").unlink()
    (tmp_path / "text" / "image").write_bytes(b"\x89\0\0")
    assert current(sources.as_they_are(experiment), run), "what is no text is not trained on"


@pytest.mark.parametrize("data", ["/", ["gone.txt"], [3]])
def test_data_that_the_run_refuses_are_not_looked_at_before(data):
    assert sources.of_texts(cell_settings({"task.data": data})) == {}


def test_a_large_array_counts_by_its_size_and_its_ends(write, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "WHOLE_BYTES", 16)
    array, digests = tmp_path / "tokens.bin", []
    for content in (b"a" * 100, b"a" * 101, b"b" + b"a" * 99, b"a" * 99 + b"b", b"a" * 50 + b"b" + b"a" * 49):
        array.write_bytes(content)
        (digest,) = sources.of_texts(cell_settings({"task.data": [str(array)]})).values()
        digests.append(digest)
    assert len(set(digests)) == 4
    assert digests[0] == digests[4], "the middle is not looked at"


def test_runs_that_several_groups_need_are_due_once(write):
    text = TUNED.replace('by = ["mode"]', 'by = ["mode", "pace"]').replace(
        'mode = ["decoupled", "diloco"]', 'mode = ["decoupled"]\npace = ["a", "b"]'
    )
    text = text.partition("[[compare]]")[0] + "[tune]" + text.partition("[tune]")[2]
    due = agenda(write(text + "[variants.pace]\na = {}\nb = {}\n"), []).due
    assert len(due) == len({run.key for run in due}) == 3


def test_tuning_runs_of_other_lengths_do_not_count(write):
    shorter = write(TUNED)
    experiment = write(TUNED.replace("steps = 100", "steps = 200"))  # a rung of which has 50
    _, records = play(experiment, lambda run: 1 + abs(run.fields["task.learning_rate"] - 0.002))
    kept = current(shorter, records)
    assert [record.stage for record in kept] == []
    assert tunings(shorter, records) == ()
    assert len(current(experiment, records)) == len(records)


def test_a_best_value_at_the_edge_is_told(write):
    _, records = play(write(TUNED), lambda run: 1.0 - run.fields["task.learning_rate"] / 1000)
    told = [each.told("rate") for each in agenda(write(TUNED), records).tuned.values()]
    at_edge = "rate = 0.016, which lies at the edge of what was tried: a larger extend in [tune] tries 0.032"
    assert told == [at_edge, at_edge]
    _, records = play(write(TUNED), lambda run: math.inf)
    (told, _) = [each.told("rate") for each in agenda(write(TUNED), records).tuned.values()]
    assert "diverged, as with all that was tried" in told


def test_of_many_records_every_run_has_its_key_made_once(write, monkeypatch):
    experiment = write(
        PLAIN.replace(
            'mode = ["decoupled", "diloco"]', 'mode = ["decoupled", "diloco"]\nkeep = [0.1, 0.2, 0.3, 0.4]'
        ).replace("[[compare]]", '[[compare]]\nby = ["keep"]')
    )
    _, records = play(experiment, lambda run: 1.0)
    asked = []
    monkeypatch.setattr(schedule, "key_of", lambda cell, seed: asked.append(seed) or key_of(cell, seed))
    assert len(current(experiment, records)) == len(records) >= 16
    assert len(asked) == len(records), "and not one for each record and cell"


def test_whole_numbers_and_others_are_two_values_of_what_a_task_is_tuned_by(write):
    whole = write(TUNED.replace("values = [0.001, 0.002, 0.004]", "values = [1, 2, 4]"))
    others = write(TUNED.replace("values = [0.001, 0.002, 0.004]", "values = [1.0, 2.0, 4.0]"))
    _, of_whole = play(whole, lambda run: abs(run.fields["task.learning_rate"] - 2))
    _, of_others = play(others, lambda run: abs(run.fields["task.learning_rate"] - 2))
    for experiment in (whole, others):
        left = agenda(experiment, current(experiment, [*of_whole, *of_others]))
        assert (left.due, left.later) == ((), 0)


def test_the_time_of_a_run_is_estimated_from_what_an_inner_step_took_before(write):
    experiment = write(PLAIN)
    due = agenda(experiment, []).due
    assert estimate_s(due[0], []) is None
    assert estimate_s(due[1], [record_of(due[0], 1.0)]) == pytest.approx(2.0)


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "field", "cure"),
    [
        ("", "question", "must say"),
        ('question = "q"\nsedes = 2', "sedes", "seeds"),
        ('question = "q"\nseeds = 3\nmax_seeds = 2', "seeds", "max_seeds"),
        ('question = "q"\nbudget_minutes = -1.0', "budget_minutes", "above 0"),
        ('question = "q"\n[compare]\nclaim = "c"', "compare", r"write \[\[compare\]\]"),
        ('question = "q"\ncompare = [1]', "compare", "must be a table"),
        ('question = "q"\nvariants = 3', "variants", "must be a table"),
        ('question = "q"\n[run]\nislnds = 2', "islnds", "islands"),
        ('question = "q"\n[grid]\nislands = 4', "grid.islands", "list"),
        ('question = "q"\n[grid]\nmode = ["async"]', "mode", "decoupled"),
        ('question = "q"\n[grid]\nrule = ["b"]\n[variants.rule]\na = { keep = 0.0 }', "b", "did you mean|there are a"),
        (
            'question = "q"\n[grid]\nrule = [0.5]\n[variants.rule]\n"0.5" = { keep = 0.5 }',
            "grid.rule",
            'as text: "0.5"',
        ),
        ('question = "q"\n[grid]\nmode=["diloco"]\n[tune]\nname="keep"\nvalues=[1.0]', "tune.values", "two or more"),
        (
            'question = "q"\n[grid]\nmode=["diloco"]\n[tune]\nname="keep"\nvalues=[0.5,1.0]\nby=["chips"]',
            "tune.by",
            "axis",
        ),
        (
            'question = "q"\n[grid]\nislands=[2]\nfleet=["a"]\n[variants.fleet]\na = { islands = 3 }',
            "grid.fleet",
            "set by the axis islands as well",
        ),
        (
            'question = "q"\n[grid]\nmode=["diloco"]\n[tune]\nname="steps"\nvalues=[10,20]',
            "tune.name",
            "cannot be tuned",
        ),
        (
            'question = "q"\n[grid]\nmode=["a"]\n[variants.mode]\na = { keep = 0.5 }\n'
            '[tune]\nname="keep"\nvalues=[0.5,1.0]',
            "variants.mode",
            "leave it out of the variants",
        ),
        (
            'question = "q"\n[grid]\nmode=["diloco"]\n[tune]\nname="keep"\nvalues=[0.5,1.0]\nextend=-1',
            "tune.extend",
            "0 or more",
        ),
        (PLAIN + "seeds = 1", "compare.seeds", "at least seeds = 2"),
        ('question = "q"\n[run]\noutages=[[7, 1, 1]]', "outages", "from 0"),
        ('question = "q"\n[run]\nmode="diloco"\nchips=1000', "mode", "decoupled"),
        ("question = ", "experiment", "TOML"),
        ('question = "q"\n[run]\ntask.merge="mean"', "task.merge", r"in \[run\]"),
        ('question = "q"\n[run]\njitter=3.0', "jitter", "between 0 and 1"),
        ('question = "q"\n[run]\njoins=[[1, 30, 10]]', "joins", "after it begins"),
        ('question = "q"\n[grid]\nmode=["diloco"]\n[tune]\nname="keep"\nvalues=[0.5,1.0]\nseed=2', "tune.seed", "own"),
        (
            PLAIN.replace('candidate = { mode = "decoupled" }', 'candidate = { mode = "decopled" }'),
            "compare",
            "no cell",
        ),
        (
            PLAIN.replace('{ mode = "diloco" }', '{ mode = "decoupled", islands = 2 }'),
            "compare.baseline",
            "no cell of the",
        ),
        (
            PLAIN.replace('["decoupled", "diloco"]', '["decoupled"]\nislands = [2, 4]').replace(
                '{ mode = "diloco" }', '{ mode = "decoupled", islands = 2 }'
            ),
            "compare.baseline",
            "no cell that candidate leaves",
        ),
        (PLAIN + 'by = ["mdoe"]', "compare.by = 'mdoe'", "mean mode"),
        (
            TUNED.replace('ignore = ["task.learning_rate', 'ignore = ["task.rate'),
            "compare.ignore",
            "mean task.learning_",
        ),
        (PLAIN + 'ignore = ["options"]', "compare.ignore", "neither an axis of the grid nor tuned"),
        (TUNED.replace('ignore = ["task.learning_rate"]', ""), "compare.ignore", "must name task.learning_rate"),
        (PLAIN.replace('kind = "not-worse"', ""), "kind", r"needed in \[compare\]: one of .*not-worse"),
        (PLAIN + PLAIN[PLAIN.index("[[compare]]") :], "compare.claim", "twice"),
        (PLAIN.replace("seeds = 2\nmax_seeds = 4", "seeds = 1\nmax_seeds = 1"), "max_seeds", "one seed decides"),
        (PLAIN + "[variants.rule]\na = { keep = 0.0 }", "variants = 'rule'", "there are mode"),
        ('question = "q"\n[variants.rule]\na = { keep = 0.0 }', "variants = 'rule'", "which has none"),
        ('question = "q"\n[run]\nmode = "diloco"\nsteps = 23', "sync_interval = 24", "at most steps = 23"),
        (TUNED.replace("steps = 100", "steps = 90"), "sync_interval = 24", "at most steps = 23.*rung of 0.25"),
        ('question = "q"\n[run]\nislands = 2\nstep_times_s = [1.0, 2.0, 4.0]', "step_times_s", "more than 2 islands"),
        ('question = "q"\n[run]\nstep_times_s = [1.0, inf]', "step_times_s", "not above 0"),
        (PLAIN.replace("seeds = 2", "seeds = 1") + "seeds = 1", "compare.seeds", "one seed decides nothing"),
        (TUNED.replace("0.004]", "nan]"), "tune.values", "growing numbers"),
        (PLAIN.replace('mode = ["decoupled", "diloco"]', LOPSIDED), "compare.baseline", "no cell to compare with for"),
        (PLAIN.replace("mode = [", "keep = [0.0, 1.0]\nmode = [") + 'ignore = ["keep"]', "compare.baseline", "several"),
        (PLAIN.replace("[[grid]]", "[[grid]]\nsync_intervall = [5]"), "grid = 'sync_intervall'", "mean sync_interval"),
        (TUNED.replace('name = "task.', 'name = "'), "tune.name = 'learning_rate'", "mean task.learning_rate"),
        ('question = "q"\n[grid]\nr = ["a"]\n[variants.r]\na = { kep = 0.0 }', "variants.r.'a' = 'kep'", "mean keep"),
        ('question = "q"\n[run]\ntask = "nowhere_at_all:task"', "task = 'nowhere_at_all:task'", "no module nowhere_at"),
        (
            'question = "q"\n[run]\ntask = "examples.numpy_task"',
            "task = 'examples.numpy_task'",
            "package.module:function",
        ),
        (PLAIN.replace('mode = ["decoupled", "diloco"]', BIGGER), "compare.claim", "200 steps.*with 400.*equal = "),
        ('question = "q"\n[run]\ntask = "a:b"\n[run.task]\nbatch = 8', "experiment", r"below \[\[compare\]\]"),
        ('question = "q"\n[run.task]\nmodle = "tiny"', "task.modle", "mean model"),
        (
            'question = "q"\n[run]\ntask = "examples.numpy_task:task"\nheld_out_sequences = 64',
            "held_out_sequences = 64",
            "having no context and held_out_tokens",
        ),
        (
            'question = "q"\n[run]\ncurve_sequences = 64\n[run.task]\nheld_out_tokens = 4096',
            "curve_sequences = 64",
            "task.held_out_tokens: leave one",
        ),
        ('question = "q"\n[run]\nmegabytes_per_s = inf\n[grid]\nislands=[2]', "megabytes_per_s", "0 is for no limit"),
        ('question = "q"\n[run]\nchips = 1\n[grid]\nislands=[2]', "chips = 1", "2 islands need one each"),
        (
            'question = "q"\n[run]\nchips = 9\nmtbi_years = 0.0\n[grid]\nislands=[2]',
            "mtbi_years = 0.0",
            "leave chips out",
        ),
        (
            'question = "q"\n[run]\ntask = "examples.numpy_task:tusk"\n[grid]\nislands=[2]',
            "examples.numpy_task:tusk",
            "did you mean task",
        ),
        (
            PLAIN + '[tune]\nname="outer_momentum"\nvalues=[0.5, 1.5]\nby=["mode"]',
            "outer_momentum",
            "below 1",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_cure(write, text, field, cure):
    with pytest.raises(ConfigError, match=cure) as caught:
        write(text)
    assert "trial.toml" in str(caught.value)
    assert field in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="examples/lab"):
        load(tmp_path / "none.toml")


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


def test_islands_that_a_cell_does_not_have_do_not_count():
    both = {"islands": 2, "step_times_s": [1.0, 2.0], "delays_s": [0.1, 0.2]}
    more = both | {"step_times_s": [1.0, 2.0, 0.1, 9.0], "delays_s": [0.1, 0.2, 5.0]}
    cell, longer = cell_settings(both), cell_settings(more)
    assert longer.aggregator == cell.aggregator
    assert (longer.step_times_range_s, longer.longest_delay_s) == ((1.0, 2.0), 0.2)
    plans = [plan_of(each, 0, 10_000, 10) for each in (cell, longer)]
    assert plans[0].config == plans[1].config
    assert cell_settings({"islands": 3, "delays_s": [0.1, 0.2]}).longest_delay_s == 0.2


def test_every_example_can_be_loaded(request):
    examples = sorted((request.config.rootpath / "examples" / "lab").glob("*.toml"))
    assert len(examples) >= 7
    for path in examples:
        assert load(path).cells()
