"""The page of results in the repository is what its command makes of the records beside it."""

from __future__ import annotations

import argparse
import difflib
import re

from ops.lab import markdown, pictures, report


def test_the_page_of_results_is_that_of_the_records(request, monkeypatch, capsys):
    monkeypatch.chdir(request.config.rootpath)
    # Drawing takes most of a minute, and what is drawn differs with the library: of plots the page has the names.
    monkeypatch.setattr(
        pictures,
        "of",
        lambda each: tuple(
            pictures.Picture(
                title=f"{each.experiment.name}: {title}", file=f"{each.experiment.name}-{kind}.svg", svg=b""
            )
            for kind, title, _ in pictures._wanted(each)
        ),
    )
    written = {}
    monkeypatch.setattr(report, "_write", lambda path, content: written.update({path: content}))
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    assert report.run(parser.parse_args([])) == 0
    assert "no longer on the page" not in capsys.readouterr().err
    now, committed = written[report.PAGE].decode().splitlines(), report.PAGE.read_text().splitlines()
    changes = list(difflib.unified_diff(committed, now, "committed", "of the records", n=0, lineterm=""))
    assert not changes, "run python3 -m ops lab report"
    anchors = {markdown.anchor(line.lstrip("# ")) for line in committed if line.startswith("#")}
    links = {link for line in committed for link in re.findall(r"\]\((#[^)]+)\)", line)}
    assert links <= anchors
    assert {path.name for path in written if path.suffix == ".svg"} == {
        path.name for path in (request.config.rootpath / report.PAGE).with_suffix("").glob("*.svg")
    }
