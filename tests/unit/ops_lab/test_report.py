"""Tables and plots from records: the page in the repository, where an experiment stands, and pages of one's own."""

import argparse
import math
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from broker.base.errors import ConfigError
from ops.lab import command, report
from ops.lab.records import append, pack, read
from ops.lab.schedule import current, due, load
from tests.synthetic import CLAIM, chapter, pairs, record

ROOT = Path(__file__).resolve().parents[3]


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
        assert "of processor time; 0 due\n" in command.progress_of(experiment, records), experiment.name
        for each in report.Chapter(experiment=experiment, results=current(experiment, records)).findings:
            low, high, margin = each.interval.low, each.interval.high, each.comparison.margin
            if each.comparison.kind == "not-worse" and each.verdict != "identical":
                assert each.verdict == ("holds" if high <= margin else "fails" if low > margin else "inconclusive")


def test_without_records_everything_is_due_and_nothing_known():
    first, second, *rest = command.progress_of(load(ROOT / "examples/lab/parity.toml"), ()).splitlines()
    assert first.startswith("parity: ")
    assert second.startswith("  0 runs in 0.0 s of processor time; ")
    assert not second.endswith(" 0 due")
    assert all(line.endswith((": 0 seeds", "; no seed was run for both")) for line in rest)


def test_a_table_has_verdicts_and_commands_and_a_page_two_plots():
    chapters = [chapter([*pairs(0.002, islands=2), *pairs(0.03, islands=8)])]
    images = "![](results/parity-loss.svg) ![](results/parity-claims.svg)"
    page = report.filled(f"<!-- lab table published: parity -->\n<!-- end -->\n{images}\n", chapters)
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
    assert report.in_words(finding) == "holds", "a claim that nobody published is not reproduced"
    assert report._count([(None, finding)]) == "1 claims: 1 holds."


def test_gaps_are_drawn_beside_the_law():
    law = CLAIM | {"law": [900_000, 2]}
    page, without = "![](published-law.svg)", chapter(pairs(0.02))
    drawn = report.plots(page, [chapter(pairs(0.02), law)])
    assert report.plots(page, [chapter(pairs(0.03), law)]) != drawn, "measured"
    assert len(report.plots(page, [without])["published-law.svg"]) < len(drawn["published-law.svg"])
    assert list(drawn) == ["published-law.svg"]
    with pytest.raises(ConfigError, match="is no plot"):
        report.plots("![](parity-law.svg)", [without])


def test_a_page_that_is_there_keeps_its_text():
    chapters = [chapter(pairs(0.002, islands=2))]
    page = "# Mine\nSee below.\n<!-- lab list published: parity -->\nold\n<!-- end -->\nAnd more.\n"
    written = report.filled(page, chapters)
    assert written.startswith("# Mine\nSee below.\n<!-- lab list published: parity -->\n* Decoupled")
    assert written.endswith("<!-- end -->\nAnd more.\n")
    assert "old" not in written
    assert report.filled(written, chapters) == written


@pytest.mark.parametrize("block", ["table own: nobody", "tables own: parity", "table ours: parity"])
def test_a_block_that_names_nothing_is_refused(block):
    with pytest.raises(ConfigError):
        report.filled(f"<!-- lab {block} -->\n<!-- end -->", [chapter(pairs(0.0, islands=2))])


def test_runs_that_diverged_and_single_seeds_are_drawn_without_a_line_or_an_interval():
    runs = [*pairs(0.0, seeds=(0,), islands=2), replace(record(mode="diloco", islands=8), loss=math.nan)]
    of = chapter(runs)
    assert len(report.loss_plot(of)) < len(report.loss_plot(chapter([*runs, *pairs(0.0, islands=8)])))
    ElementTree.fromstring(report.claims_plot(of.findings))


def test_the_report_adds_records_to_those_behind_the_page_and_says_which_do_not_count(tmp_path, capsys, monkeypatch):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/results.md"
    page.write_text("<!-- lab count own: own -->\n<!-- end -->\n")
    (tmp_path / "examples/lab").mkdir(parents=True)
    text = (
        'question = "q"\nseeds = 1\n[run]\nsteps = 60\ntask = "examples.numpy_task:task"\n[grid]\nmode = ["diloco"]\n'
    )
    (tmp_path / "examples/lab/own.toml").write_text(text)
    experiment = load(tmp_path / "examples/lab/own.toml")
    monkeypatch.chdir(tmp_path)
    command.PUBLISHED.parent.mkdir()
    command.PUBLISHED.write_bytes(pack([record(experiment="own", mode="diloco")]))  # of settings that no cell has
    (run,) = due(experiment, [])
    append(tmp_path / "records", replace(record(experiment="own", mode="diloco"), key=run.key))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["report", "--add", str(tmp_path / "records")])) == 0
    said = capsys.readouterr()
    assert "1 records are left out" in said.err
    assert "1 experiments, 1 runs" in said.out
    assert "0 claims" in page.read_text()
    assert [each.key for each in read(command.PUBLISHED)] == [run.key]
