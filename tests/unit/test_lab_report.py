"""``atoll lab report``: the page and its plots, written to a place of their own."""

import argparse
import json
import re
from dataclasses import replace

import pytest

from broker.wire.errors import ConfigError
from ops.lab import archive, report
from ops.lab.experiment import load
from ops.lab.records import Stage
from ops.lab.settings import key_of, resolved
from tests.synthetic import experiment, record, whole_experiment

TRIAL = """
question = "which rate?"
seeds = 2
max_seeds = 2

[run]
steps = 100
islands = 2
[run.task]
model = "tiny"

[grid]
mode = ["diloco"]

[tune]
name = "task.learning_rate"
values = [0.001, 0.002, 0.004]
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Directories with records and an experiment's file, which a fake reads."""
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "parity.toml").write_text("")
    for each in whole_experiment():
        archive.append(tmp_path / "records", each)
    monkeypatch.setattr(report, "load", lambda path: experiment(name=path.stem))
    monkeypatch.setattr(report, "sections", tuple)  # of simulate and plan, which take seconds
    monkeypatch.setattr(report, "current", lambda _, records: [each for each in records if each.code != "old"])
    monkeypatch.setattr(report, "passed_over", lambda _, records: [])
    monkeypatch.setattr(report, "tunings", lambda *_: ())
    return tmp_path


def arguments(place, *more):
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    where = ["--records", place / "records", "--out", place / "docs" / "results.md", "--experiments", place / "lab"]
    return parser.parse_args([*map(str, where), *more])


def test_the_command_writes_the_page_and_its_plots(place, capsys):
    assert report.run(arguments(place)) == 0
    text = (place / "docs" / "results.md").read_text()
    links = re.findall(r"\]\((results/[^)]+\.svg)\)", text)
    assert len(set(links)) == 6
    assert all((place / "docs" / link).is_file() for link in links)
    assert "1 experiments, 18 runs, 6 plots; 1 fails, 1 holds" in capsys.readouterr().out


def test_writing_it_again_changes_no_byte(place):
    def content():
        return {path.name: path.read_bytes() for path in (place / "docs").rglob("*") if path.is_file()}

    report.run(arguments(place))
    before = content()
    report.run(arguments(place))
    assert content() == before
    assert len(before) == 7


def test_json_is_one_object(place, capsys):
    report.run(arguments(place, "--json"))
    printed = json.loads(capsys.readouterr().out)
    assert printed["records"] == 18
    assert printed["verdicts"] == {"fails": 1, "holds": 1}
    assert len(printed["plots"]) == 6


def test_a_run_that_stands_in_two_experiments_counts_once(place, capsys):
    (place / "lab" / "again.toml").write_text("")
    for each in whole_experiment():
        archive.append(place / "records", replace(each, experiment="again"))
    report.run(arguments(place, "--json"))
    printed = json.loads(capsys.readouterr().out)
    assert (printed["experiments"], printed["records"]) == (2, 18)
    assert printed["verdicts"] == {"fails": 1, "holds": 1}, "of claims that rest on the same runs the page counts one"


def test_records_that_are_left_out_are_named(place, capsys):
    archive.append(place / "records", record(experiment="mystery"))
    archive.append(place / "records", replace(record(9.0, seed=9, mode="diloco", islands=2), code="old"))
    assert report.run(arguments(place, "--json")) == 0
    printed = capsys.readouterr()
    assert "1 of 1 records of mystery are left out" in printed.err
    assert "1 of 19 records of parity are left out" in printed.err
    assert json.loads(printed.out)["records"] == 18


def test_runs_at_rates_that_were_passed_over_are_on_the_page_and_not_left_out(tmp_path, monkeypatch, capsys):
    """Of a real experiment: the better rate was found after two seeds had been run at the other one."""
    lab, records = tmp_path / "lab", tmp_path / "records"
    lab.mkdir()
    (lab / "trial.toml").write_text(TRIAL)
    experiment = load(lab / "trial.toml")
    losses = {"0.001": 2.0, "0.002": 1.9, "0.004": 2.1}
    for rate, loss in losses.items():
        settings = experiment.settings_of({"mode": "diloco"}, {"task.learning_rate": float(rate)})
        stages = [(Stage.TUNE, 1000)] + ([(Stage.FINAL, 0), (Stage.FINAL, 1)] if rate != "0.004" else [])
        for stage, seed in stages:
            made = record(loss, experiment="trial", seed=seed, stage=stage, mode="diloco")
            ran = resolved(settings) | {"seed": seed}
            archive.append(records, replace(made, key=key_of(settings, seed), settings=ran))
    archive.append(records, record(experiment="trial", seed=7, mode="diloco"))  # of settings that nobody has
    monkeypatch.setattr(report, "sections", tuple)
    assert report.run(arguments(tmp_path)) == 0
    printed = capsys.readouterr()
    assert "atoll: 1 of 8 records of trial are left out" in printed.err
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "| task.learning_rate | 0.001, 0.002, 0.004 | 0.002 | yes |" in text
    assert "| task.learning_rate | 0.001 | 0.002 | +5.26 % ± 0.00 % | 2 |" in text
    assert "1 experiments, 5 runs" in printed.out


def test_other_records_have_a_page_of_their_own(place, monkeypatch):
    """Only ours belong to docs/results.md."""
    monkeypatch.chdir(place)
    (place / "lab" / "theirs.toml").write_text("")
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    assert report.run(parser.parse_args(["--records", str(place / "records"), "--experiments", "lab"])) == 0
    text = (place / "records-results.md").read_text()
    assert f"atoll lab run parity --records {place / 'records'}" in text
    assert "theirs" not in text, "of which nothing was run here"
    assert not (place / "docs").exists()
    assert not list((place / "records").glob("*.svg"))


def test_plots_that_are_no_longer_on_the_page_are_named(place, capsys):
    report.run(arguments(place))
    assert "no longer" not in capsys.readouterr().err
    (place / "docs" / "results" / "gone.svg").write_text("")
    report.run(arguments(place))
    assert "but no longer on the page: gone.svg" in capsys.readouterr().err


def test_a_directory_without_experiments_is_refused(place):
    with pytest.raises(ConfigError, match="must be a directory with experiments"):
        report.run(arguments(place, "--experiments", str(place / "records")))


def test_records_of_which_no_experiment_is_there_name_theirs(place):
    (place / "lab" / "parity.toml").rename(place / "lab" / "other.toml")
    with pytest.raises(ConfigError, match=r"has none of those that .* has records of \(parity\)"):
        report.run(arguments(place))


def test_a_directory_without_records_is_refused_and_not_that_of_the_experiments(place):
    with pytest.raises(ConfigError, match=r"records = .* holds no records"):
        report.run(arguments(place, "--records", str(place / "reccords")))


@pytest.mark.parametrize("out", ["page", "lab"])
def test_a_page_is_a_file_with_plots_beside_it(place, out):
    with pytest.raises(ConfigError, match="must be a file such as"):
        report.run(arguments(place, "--out", str(place / out)))
    assert not (place / "page").exists()


def test_records_that_cannot_be_read_are_named_and_the_others_are_reported(place, capsys):
    (place / "records" / "parity-backup.jsonl").write_bytes((place / "records" / "parity.jsonl").read_bytes())
    (place / "records" / "broken.jsonl").write_text("{}\n")
    assert report.run(arguments(place)) == 1
    said = capsys.readouterr().err
    assert "parity-backup is left out:" in said
    assert "move it to its own file" in said
    assert "broken is left out:" in said
    assert "# parity" in (place / "docs" / "results.md").read_text()


def test_an_experiment_that_cannot_be_read_is_named_and_the_others_are_reported(place, monkeypatch, capsys):
    def load(path):
        if path.stem == "broken":
            raise ConfigError("broken.toml: steps", 0, "must be at least 1")
        return experiment(name=path.stem)

    (place / "lab" / "broken.toml").write_text("")
    archive.append(place / "records", record(experiment="broken"))
    monkeypatch.setattr(report, "load", load)
    assert report.run(arguments(place)) == 1
    said = capsys.readouterr().err
    assert "broken is left out: broken.toml: steps = 0: must be at least 1" in said
    assert "records of broken" not in said, "which would be another reason"
    assert "# parity" in (place / "docs" / "results.md").read_text()
    (place / "lab" / "parity.toml").unlink()
    with pytest.raises(ConfigError, match="has no file that can be read"):
        report.run(arguments(place))
