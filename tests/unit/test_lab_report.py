"""Tables and plots from records: the page in the repository, where an experiment stands, and pages of one's own."""

import argparse
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from broker.wire.errors import ConfigError
from ops.lab import command, report
from ops.lab.records import append, read
from ops.lab.schedule import current, load
from tests.synthetic import CLAIM, chapter, pairs, record

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)  # whose paths the page names


@pytest.fixture(scope="module")
def published():
    """Every experiment, and its records in the repository."""
    of = defaultdict(list)
    for each in read(ROOT / command.PUBLISHED):
        of[each.experiment].append(each)
    experiments = [load(path.relative_to(ROOT)) for path in sorted(ROOT.glob("examples/lab/*.toml"))]
    assert len(experiments) >= 7
    return [(experiment, of[experiment.name]) for experiment in experiments]


def test_the_page_of_results_is_what_the_records_give(published):
    page = command.PAGE.read_text()
    chapters = [report.Chapter(experiment=one, results=current(one, records)) for one, records in published]
    assert report.filled(page, chapters) == page, "run python3 -m ops lab report"
    assert len(page.splitlines()) <= 240
    shown = {f"{name}-{kind}.svg" for name, kind in report._IMAGE.findall(page)}
    assert shown == {path.name for path in command.PAGE.with_suffix("").glob("*.svg")}
    assert len(shown) <= 6
    told = set(re.findall(r"examples/lab/([\w-]+)\.toml|\(`([\w-]+)`\)", page))
    assert {name for pair in told for name in pair if name} == {one.path.stem for one, _ in published}
    assert command.PUBLISHED.stat().st_size < 500_000


def test_the_records_in_the_repository_answer_their_experiments(published):
    for experiment, records in published:
        row = command.standing(experiment, records)
        assert (row["due"], row["left_out"]) == (0, 0), experiment.name
        assert json.loads(json.dumps(row, allow_nan=False)) == row
        for name in (*row, *(row["claims"] or [{}])[0], *row["cells"][0]):
            assert name in command._SHOW_EPILOG, name
        for claim in row["claims"]:
            low, high = claim["difference"] - claim["half_width"], claim["difference"] + claim["half_width"]
            if claim["kind"] == "not-worse" and claim["verdict"] != "identical":
                verdict = "holds" if high <= claim["margin"] else "fails" if low > claim["margin"] else "inconclusive"
                assert claim["verdict"] == verdict, experiment.name


def test_without_records_everything_is_due_and_nothing_known():
    row = command.standing(load(ROOT / "examples/lab/parity.toml"), ())
    assert (row["runs"], row["spent_s"], row["left_out"]) == (0, 0, 0)
    assert row["due"] > 0
    assert {(each["seeds"], each["loss"]) for each in row["cells"]} == {(0, None)}
    assert {(each["seeds"], each["difference"], each["half_width"]) for each in row["claims"]} == {(0, None, None)}


def test_a_new_page_has_question_command_verdicts_and_two_plots():
    chapters = [chapter([*pairs(0.002, islands=2), *pairs(0.03, islands=8)])]
    page = report.page_of(chapters, "mine")
    assert "Does it lose anything?" in page
    assert "python3 -m ops lab run mine/parity.toml" in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| Decoupled")]
    assert [(row[1], row[2], row[4]) for row in rows] == [
        ("+2.6 %", "+0.20 % ± 0.12 %", "reproduced"),
        ("+2.6 %", "+3.00 % ± 0.12 %", "not reproduced"),
    ]
    drawn = report.plots(page, chapters)
    assert sorted(drawn) == ["parity-claims.svg", "parity-loss.svg"]
    for svg in drawn.values():
        ElementTree.fromstring(svg)
        assert b"dc:date" not in svg
    assert report.plots(page, chapters) == drawn, "the same records give the same bytes"
    (finding,) = chapter(pairs(0.002), CLAIM | {"source": "", "published": None}).findings
    assert report.told(finding) == "holds", "a claim that nobody published is not reproduced"
    assert report._count([(None, finding)]) == "1 claims: 1 holds."


def test_a_page_that_is_there_keeps_its_text():
    chapters = [chapter(pairs(0.002, islands=2))]
    page = "# Mine\nSee below.\n<!-- lab list published: parity -->\nold\n<!-- end -->\nAnd more.\n"
    written = report.filled(page, chapters)
    assert written.startswith("# Mine\nSee below.\n<!-- lab list published: parity -->\n* Decoupled")
    assert written.endswith("<!-- end -->\nAnd more.\n")
    assert "old" not in written
    assert report.filled(written, chapters) == written


@pytest.mark.parametrize("block", ["table all: nobody", "tables all: parity", "table ours: parity"])
def test_a_block_that_names_nothing_is_refused(block):
    with pytest.raises(ConfigError):
        report.filled(f"<!-- lab {block} -->\n<!-- end -->", [chapter(pairs(0.0, islands=2))])


def test_runs_that_diverged_and_single_seeds_are_drawn_without_a_line_or_an_interval():
    runs = [*pairs(0.0, seeds=(0,), islands=2), replace(record(mode="diloco", islands=8), loss=math.nan)]
    of = chapter(runs)
    assert len(report.loss_plot(of)) < len(report.loss_plot(chapter([*runs, *pairs(0.0, islands=8)])))
    ElementTree.fromstring(report.claims_plot(of.findings))


def test_the_command_names_what_it_cannot_report(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    records = tmp_path / "records"

    def report_on(*more):
        words = ("report", "--records", records, "--experiments", tmp_path, *more)
        return command.run(parser.parse_args(list(map(str, words))))

    task = 'task = "examples.numpy_task:task"'
    (tmp_path / "own.toml").write_text(f'question = "q"\n[run]\nsteps = 60\n{task}\n[grid]\nmode = ["diloco"]\n')
    append(records, record(experiment="other"))
    with pytest.raises(ConfigError, match="--experiments"):
        report_on()
    with pytest.raises(ConfigError, match="--out"):
        report_on("--out", tmp_path)
    append(records, record(experiment="own", mode="diloco"))  # of settings that no cell has
    assert report_on() == 0
    said = capsys.readouterr()
    assert "2 records are left out" in said.err
    assert "1 experiments, 0 runs" in said.out
    assert (tmp_path / "records-results.md").exists()
