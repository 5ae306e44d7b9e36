"""``atoll lab report``: writes docs/results.md and its plots from the records, or such a page from other ones."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from aggregator.store.layout import mapped
from broker.process import flags
from broker.wire.errors import ConfigError
from ops.lab import archive, defaults, gap_section, pictures
from ops.lab.chapter import Experiment, Findings, Plot, findings_of
from ops.lab.comparisons import distinct
from ops.lab.experiment import Experiment as Loaded
from ops.lab.experiment import load
from ops.lab.records import Record, independent, newest
from ops.lab.results import Section, document
from ops.lab.schedule import current, passed_over, tunings
from ops.lab.sections import sections
from ops.lab.tuning import Tuning

RECORDS = Path("docs/results/records")
PAGE = Path("docs/results.md")
EXPERIMENTS = Path("examples/lab")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is to be written.

    Attributes:
        text: The page.
        plots: File, relative to the page -> SVG.
        findings: What the page says.
    """

    text: str
    plots: dict[str, bytes]
    findings: tuple[Findings, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll lab report``."""
    records_help = f"directory of the records (default: {RECORDS})"
    parser.add_argument("--records", type=flags.path, default=RECORDS, metavar="DIR", help=records_help)
    out_help = (
        f"the page; plots go to a directory of its name beside it (default: {PAGE}, of other records beside them)"
    )
    parser.add_argument("--out", type=flags.path, metavar="FILE", help=out_help)
    experiments_help = f"directory of the experiments' files (default: {EXPERIMENTS})"
    parser.add_argument("--experiments", type=Path, default=EXPERIMENTS, metavar="DIR", help=experiments_help)
    parser.add_argument("--json", action="store_true", help="print what was written as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Writes the page and its plots; returns the exit code.

    Raises:
        ConfigError: There is no experiment, or no record.
        Unavailable: Something cannot be read or written.
    """
    read, unreadable = archive.read_all(args.records)
    for name, err in unreadable.items():
        print(f"atoll: {name} is left out: {err}", file=sys.stderr)
    kept = newest(read)
    # Other records are no reason to write our own page anew.
    folder = args.records.resolve()
    own_page = folder == RECORDS.resolve()
    experiments, wrong = _experiments(args, None if own_page else {record.experiment for record in kept})
    experiments = [each for each in experiments if each.name not in unreadable]
    wrong |= unreadable.keys()
    own = [(each, [record for record in kept if record.experiment == each.name]) for each in experiments]
    records = [record for each, mine in own for record in current(each, mine)]
    others = [record for each, mine in own for record in passed_over(each, mine)]
    out: Path = args.out or (PAGE if own_page else folder.with_name(f"{folder.name}-results.md"))
    if not out.suffix or out.is_dir():
        raise ConfigError("out", str(out), "must be a file such as results.md: its plots stand in a folder of its name")
    report = build(
        experiments,
        records,
        folder=out.stem,
        sections=sections() if own_page else (),
        others=others,
        tuned={each.name: tunings(each, mine) for each, mine in own},
        directory=RECORDS if own_page else args.records,
        docs=os.path.relpath(PAGE.parent, out.parent) if (PAGE.parent / "lab.md").is_file() else None,
    )
    for file, svg in report.plots.items():
        _write(out.parent / file, svg)
    _write(out, report.text.encode())
    stale = sorted(
        path.name for path in out.with_suffix("").glob("*.svg") if f"{out.stem}/{path.name}" not in report.plots
    )
    if stale:
        print(f"atoll: in {out.with_suffix('')}, but no longer on the page: {', '.join(stale)}", file=sys.stderr)
    told = {(record.experiment, record.stage, record.key) for record in (*records, *others)}
    for name, number in sorted(Counter(record.experiment for record in kept).items()):
        left_out = number - sum(each == name for each, _, _ in told)
        if left_out and name not in wrong:
            why = f"{args.experiments} has no such experiment, or other settings now, or its task was edited"
            print(f"atoll: {left_out} of {number} records of {name} are left out: {why}", file=sys.stderr)
    _print(out, report, as_json=args.json)
    return 1 if wrong else 0


def _experiments(args: argparse.Namespace, recorded: Collection[str] | None) -> tuple[list[Loaded], set[str]]:
    """Returns the experiments for the page, and the names of those whose file is wrong, which is said.

    Args:
        args: Of the command.
        recorded: Of which there are records, if only they belong on the page: all of ours do on ours.
    """
    if recorded is not None and not recorded:
        raise ConfigError("records", str(args.records), "holds no records (*.jsonl): name the DIR of lab run --records")
    paths = sorted(args.experiments.glob("*.toml"))
    if not paths:
        raise ConfigError("experiments", str(args.experiments), "must be a directory with experiments (*.toml) in it")
    if recorded is not None:
        paths = [path for path in paths if path.stem in recorded]
        if not paths:
            names = ", ".join(sorted(recorded))
            cure = f"has none of those that {args.records} has records of ({names}); name the directory of their files"
            raise ConfigError("experiments", str(args.experiments), cure)
    loaded, wrong = [], set()
    for path in paths:
        try:
            loaded.append(load(path))
        except ConfigError as err:
            wrong.add(path.stem)
            print(f"atoll: {path.stem} is left out: {err}", file=sys.stderr)
    if not loaded:
        raise ConfigError("experiments", str(args.experiments), "has no file that can be read: see above")
    return loaded, wrong


def build(
    experiments: Sequence[Experiment],
    records: Sequence[Record],
    *,
    folder: str,
    sections: Sequence[Section] = (),
    others: Sequence[Record] = (),
    tuned: Mapping[str, Sequence[Tuning]] = MappingProxyType({}),
    directory: Path = RECORDS,
    docs: str | None = ".",
) -> Report:
    """Returns the page and the plots of all experiments.

    Args:
        experiments: What was asked.
        records: Of their cells.
        folder: Directory of plots, relative to the page.
        sections: Parts from elsewhere.
        others: Records of their cells at rates that tuning did not choose.
        tuned: Experiment -> what tuning found.
        directory: Of the records, for the page to name.
        docs: Directory of the documents that the page refers to, relative to it; None if they are nowhere near.
    """
    flags = "" if directory == RECORDS else f"--records {shlex.quote(str(directory))}"
    found = tuple(findings_of(each, records, others, tuned.get(each.name, ()), flags=flags) for each in experiments)
    drawn = {each.experiment.name: pictures.of(each) for each in found}
    plots = {
        name: [Plot(title=each.title, file=f"{folder}/{each.file}") for each in each_drawn]
        for name, each_drawn in drawn.items()
    }
    files = {f"{folder}/{each.file}": each.svg for each_drawn in drawn.values() for each in each_drawn}
    parts = (*gap_section.sections(found), *defaults.sections(found), *sections)
    files |= {f"{folder}/{file}": draw() for part in parts for file, draw in part.plots.items()}
    text = document(found, plots, parts, folder=folder, records=directory.as_posix(), docs=docs)
    return Report(text=text, plots=files, findings=found)


def _write(path: Path, content: bytes) -> None:
    """Replaces a file at once or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with mapped(f"cannot write {path}", definite=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _print(out: Path, report: Report, *, as_json: bool) -> None:
    found = [finding for each in report.findings for finding in each.claims]
    tested = distinct(finding for finding in found if finding.seeds)  # as the page counts them
    verdicts = Counter(str(finding.verdict) for finding in tested)
    if unrun := sum(not finding.seeds for finding in found):
        verdicts["not run yet"] = unrun
    records = independent(record for each in report.findings for record in each.records)
    if as_json:
        document = {
            "out": str(out),
            "experiments": len(report.findings),
            "records": len(records),
            "plots": sorted(report.plots),
            "verdicts": dict(sorted(verdicts.items())),
            "wall_s": round(math.fsum(record.wall_s for record in records), 3),
        }
        print(json.dumps(document))
        return
    counted = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items())) or "no claims"
    print(f"{out}: {len(report.findings)} experiments, {len(records)} runs, {len(report.plots)} plots; {counted}")
