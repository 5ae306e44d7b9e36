"""Measures the cost of metrics: a fleet without them beside one scraped once a second as a rule.

Both train the same paced task, in turn, each time with new processes. *sync share* is what the islands report at the
end: the part of the training thread's time that was spent in ``Island.step``. Hub and islands are measured in the same
window, after a warm-up: processor seconds of broker and aggregator, in all and for each version that they made in it.

Half of the window of a fleet with metrics, in turns of some seconds, nobody scrapes it. *x unscraped* is what the hub
spends in the other half over what it spends in this one; *ms per scrape* the difference, divided by the scrapes of a
process, and the same of an island. Many scrapes (``--every 0.1``) make it plain where others use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks import output
from benchmarks.fleet import RUN, Hub, cpu_s
from benchmarks.output import Column, Printer, median
from broker.process import toml
from broker.wire.errors import ConfigError, Unavailable
from ops.processes.child_process import ProcessSpec
from ops.processes.cluster import Change, free_ports
from ops.run.daemons import our_command

TASK = "examples.numpy_task:task"
#: Versions before a window opens: everything is compiled by then.
WARM_UP_VERSIONS = 20
#: Time to start, join and compile, beyond what is measured.
START_WITHIN_S = 120.0
#: Windows of a fleet with metrics, in turn without and with scrapes.
TURNS = 12
_COMMITTED = b'"version.committed"'
_TICKS = os.sysconf("SC_CLK_TCK")

COLUMNS = (
    Column(key="metrics", title="metrics"),
    Column(key="repetitions", title="runs"),
    Column(key="sync_share", title="sync share", form=".3%"),
    Column(key="versions_per_s", title="versions/s", form=".2f"),
    Column(key="hub_cpu", title="hub CPU", form=".2%"),
    Column(key="hub_ms_per_version", title="hub CPU ms per version", form=".2f"),
    Column(key="hub_ratio", title="x unscraped", form=".3f"),
    Column(key="island_cpu", title="CPU of an island", form=".2%"),
    Column(key="scrapes", title="scrapes"),
    Column(key="hub_ms_per_scrape", title="hub ms per scrape", form=".2f"),
    Column(key="island_ms_per_scrape", title="island ms per scrape", form=".2f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run: shares of one processor, and processor seconds of the hub for each version."""

    sync_share: float
    versions_per_s: float
    hub_cpu: float
    hub_s_per_version: float
    island_cpu: float
    scrapes: int
    hub_ratio: float | None = None
    hub_s_per_scrape: float | None = None
    island_s_per_scrape: float | None = None


class Scraper:
    """Asks every port again and again until it is closed, as Prometheus does; no port: does nothing."""

    def __init__(self, ports: Sequence[int], every_s: float) -> None:
        self.scrapes, self.active = 0, True
        self._ports, self._every_s, self._end = ports, every_s, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._end.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        while self._ports and not self._end.wait(self._every_s):
            for port in self._ports if self.active else ():
                with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                    if b"atoll_" in answer.read():
                        self.scrapes += 1


def run(args: argparse.Namespace, directory: Path, *, metrics: bool) -> Sample:
    """Trains once, and measures.

    Raises:
        Unavailable: A process died, or nothing happened in time.
    """
    first = free_ports(args.islands + 2) if metrics else 0
    names = ["broker", "aggregator", *(f"island-{i}" for i in range(args.islands))]
    ports = {name: first + k for k, name in enumerate(names)} if metrics else {}
    with ExitStack() as stack:
        hub = stack.enter_context(Hub(directory, metrics=ports, islands=args.islands, sync_interval=args.sync_interval))
        hub.start([_island(hub, directory, name, ports.get(name, 0), args.pace) for name in names[2:]])
        _wait(hub, args, lambda: _versions(hub) >= WARM_UP_VERSIONS)
        scraper = Scraper(list(ports.values()), args.every)
        stack.callback(scraper.close)
        began_s, versions, before = time.monotonic(), _versions(hub), {name: _cpu_s(hub, name) for name in names}
        turns = [Turn(), Turn()]  # not scraped, scraped
        for number in range(TURNS if metrics else 1):
            scraper.active = number % 2 == 1
            turn, ends_s = turns[number % 2], began_s + args.seconds * (number + 1) / (TURNS if metrics else 1)
            turn.begin({name: _cpu_s(hub, name) for name in names}, scraper.scrapes)
            _wait(hub, args, lambda ends_s=ends_s: time.monotonic() >= ends_s)
            turn.end({name: _cpu_s(hub, name) for name in names}, scraper.scrapes)
        took_s, versions = time.monotonic() - began_s, _versions(hub) - versions
        spent_s = {name: _cpu_s(hub, name) - before[name] for name in names}
    report = json.loads(hub.report.read_text(encoding="utf-8"))
    hub_s = spent_s["broker"] + spent_s["aggregator"]
    return Sample(
        sync_share=median(each["sync_share"] for each in report["islands"].values()),
        versions_per_s=versions / took_s,
        hub_cpu=hub_s / took_s,
        hub_s_per_version=hub_s / max(1, versions),
        island_cpu=median(spent_s[name] for name in names[2:]) / took_s,
        scrapes=scraper.scrapes,
        hub_ratio=_spent(turns[1], names[:2]) / _spent(turns[0], names[:2]) if metrics else None,
        hub_s_per_scrape=_per_scrape(turns, names[:2], len(names)) if metrics else None,
        island_s_per_scrape=_per_scrape(turns, names[2:], len(names)) if metrics else None,
    )


class Turn:
    """Processor seconds of each process and scrapes, summed over the windows of one sort."""

    def __init__(self) -> None:
        self.cpu_s: Counter[str] = Counter()
        self.scrapes = 0

    def begin(self, cpu_s: Mapping[str, float], scrapes: int) -> None:
        """A window opens."""
        self.cpu_s.subtract(cpu_s)
        self.scrapes -= scrapes

    def end(self, cpu_s: Mapping[str, float], scrapes: int) -> None:
        """It closes."""
        self.cpu_s.update(cpu_s)
        self.scrapes += scrapes


def _spent(turn: Turn, names: Sequence[str]) -> float:
    return max(1 / _TICKS, sum(turn.cpu_s[name] for name in names))


def _per_scrape(turns: Sequence[Turn], names: Sequence[str], processes: int) -> float:
    """Returns what one scrape of one of these processes costs it; all processes are scraped equally often."""
    without, scraped = turns
    more_s = _spent(scraped, names) - _spent(without, names)
    return more_s / len(names) / max(1.0, (scraped.scrapes - without.scrapes) / processes)


def _island(hub: Hub, directory: Path, name: str, port: int, pace_s: float) -> ProcessSpec:
    config = directory / f"{name}.toml"
    settings = {"run_id": RUN, "broker": hub.address, "task": TASK, "island_id": name, "pace": pace_s}
    config.write_text(toml.dump({"island": settings | {"metrics_port": port}}), encoding="utf-8")
    command = our_command("island", "--config", os.fspath(config))
    return ProcessSpec(name=name, command=command, environment=hub.numeric_environment(), ends_by_itself=True)


def _wait(hub: Hub, args: argparse.Namespace, over: Any) -> None:
    ends_s = time.monotonic() + args.seconds + START_WITHIN_S
    while not over():
        for event in hub.cluster.poll():
            if event.change is not Change.ENDED:
                raise Unavailable(f"{event.detail}: see {hub.cluster.log_of(event.process)}", definite=True)
        if time.monotonic() > ends_s:
            raise Unavailable("the fleet has not trained in time", definite=True)
        time.sleep(0.05)


def _versions(hub: Hub) -> int:
    return hub.tape.read_bytes().count(_COMMITTED) if hub.tape.exists() else 0


def _cpu_s(hub: Hub, name: str) -> float:
    return cpu_s(hub.pid(name))


def row_of(samples: list[Sample], *, metrics: bool) -> dict[str, Any]:
    """Returns a line of medians."""
    ratios = [each.hub_ratio for each in samples if each.hub_ratio is not None]
    return {
        "metrics": "scraped" if metrics else "none",
        "repetitions": len(samples),
        "sync_share": median(each.sync_share for each in samples),
        "versions_per_s": median(each.versions_per_s for each in samples),
        "hub_cpu": median(each.hub_cpu for each in samples),
        "hub_ms_per_version": 1e3 * median(each.hub_s_per_version for each in samples),
        "hub_ratio": median(ratios) if ratios else None,
        "island_cpu": median(each.island_cpu for each in samples),
        "scrapes": sum(each.scrapes for each in samples),
        "hub_ms_per_scrape": _ms([each.hub_s_per_scrape for each in samples]),
        "island_ms_per_scrape": _ms([each.island_s_per_scrape for each in samples]),
    }


def _ms(seconds: Sequence[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return 1e3 * median(known) if known else None


def measure(args: argparse.Namespace) -> int:
    """Trains with and without, in turn, then prints a line for each."""
    if args.quick:
        args.repetitions, args.seconds, args.islands, args.every = 1, 3.0, 1, 0.1
    if args.seconds <= 0 or args.pace < 0:
        raise ConfigError("seconds", args.seconds, "must be above 0, and --pace not below")
    printer = Printer(COLUMNS, as_json=args.json)
    samples: dict[bool, list[Sample]] = {False: [], True: []}
    for repetition in range(args.repetitions):
        for metrics in (False, True) if repetition % 2 == 0 else (True, False):
            with tempfile.TemporaryDirectory(prefix="atoll-metrics-", dir=args.dir) as directory:
                found = run(args, Path(directory), metrics=metrics)
            samples[metrics].append(found)
            what = f"{'with' if metrics else 'without'} metrics, {repetition + 1} of {args.repetitions}"
            cost = f"{1e3 * found.hub_s_per_version:.2f} ms per version, sync share {found.sync_share:.3%}"
            printer.say(f"{what}: hub {found.hub_cpu:.2%} of a processor, {cost}")
    for metrics, measured in samples.items():
        printer.add(row_of(measured, metrics=metrics))
    printer.close()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Parses, measures, prints."""
    parser = output.parser_of("metrics_cost", __doc__, "--islands 4 --seconds 30 --repetitions 5")
    output.add_arguments(parser)
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds of an inner step (0.05)")
    parser.add_argument("--sync-interval", type=int, default=20, help="steps between two syncs of a fragment (20)")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured per run, after a warm-up (20)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two scrapes (1)")
    parser.add_argument("--repetitions", type=int, default=5, help="of both, in turn (5)")
    parser.add_argument("--dir", default=None, help="where temporary stores are written")
    return output.guarded(measure, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
