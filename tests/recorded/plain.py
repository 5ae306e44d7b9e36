"""A run of two islands to its end, with everything that looks on: page, metrics, traces, evaluation, status."""

import os
import signal

from ops.processes.cluster import free_ports
from tests.live_views import Collector, Page, scrape
from tests.local_run import ROOT, Up, wait_for
from tests.recorded.recording import points_in, ports_of_metrics, process_of, said, status_of

#: Samples that grow while a run trains. Some exist only once an island has joined, or its first work is merged.
GROWING = (
    ("broker", "atoll_broker_received_messages_total", {}),
    ("broker", "atoll_broker_sent_bytes_total", {}),
    ("aggregator", "atoll_aggregator_versions_total", {}),
    ("aggregator", "atoll_aggregator_contributors_total", {}),
    ("aggregator", "atoll_aggregator_merged_tokens_total", {}),
    ("aggregator", "atoll_aggregator_island_tokens_total", {"island": "island-1"}),
    ("aggregator", "process_cpu_seconds_total", {}),
    ("island-0", "atoll_island_steps_total", {}),
    ("island-0", "atoll_island_contributions_total", {"fate": "merged"}),
    ("island-1", "atoll_island_sent_bytes_total", {}),
)
TOKENS = 90_000
BENCHMARKS = """
import numpy as np


def norm(params):
    return np.sqrt(sum(float((x**2).sum()) for layer in params.values() for x in layer.values()))


def broken(params):
    raise RuntimeError("this benchmark never works")
"""


def plain(folder):
    """Records the run, and what each view showed of it."""
    (folder / "mine.py").write_text(BENCHMARKS)
    page = free_ports(5)
    first = page + 1
    flags = ["--islands", 2, "--tokens", TOKENS, "--pace", 0.03, "--json", "--dashboard", page, "--metrics", first]
    flags += ["--evaluate-every", 5000, "--benchmark", "mine:norm", "mine:broken", "--log-to"]
    with (
        Collector(folder / "traces") as collector,
        Up(folder / "run", *flags, f"otlp:{collector.endpoint}", PYTHONPATH=f"{folder}{os.pathsep}{ROOT}") as up,
    ):
        wait_for((up.run_dir / "metrics.json").exists, "a run", evidence=lambda: up.err)
        seen = {"first": first, "ports": ports_of_metrics(up), "metrics": _growing(up), "statuses": []}
        wait_for(lambda: _tells_all(up, seen["statuses"]), "status with everything in it", evidence=lambda: up.err)
        seen["status"] = said("status", up.run_dir)
        wait_for(lambda: len(points_in(up.run_dir)) >= 2, "second evaluation", evidence=lambda: up.err)
        os.kill(wait_for(lambda: process_of(up, " ops evaluate "), "follower"), signal.SIGKILL)
        seen["evaluation"] = status_of(up.run_dir)["evaluation"]
        seen["frame"] = wait_for(lambda: _frame(page), "the page", evidence=lambda: up.err)
        seen["exit"] = up.wait()
    return seen | {"page_after": _frame(page)}


def _growing(up):
    """Waits until every sample that grows has grown; returns process -> its metrics then, as text."""
    ports = ports_of_metrics(up)

    def values(process, name, labels):
        found = scrape(ports[process])
        return [] if found is None else found.all(name, **labels)

    for asked in GROWING:
        (old,) = wait_for(lambda asked=asked: values(*asked), f"sample {asked}", evidence=lambda: up.err)
        wait_for(lambda asked=asked, old=old: values(*asked) > [old], f"more than {old} of {asked}")
    return {name: scrape(port).text for name, port in ports.items()}


def _tells_all(up, statuses):
    """Asks once more; whether this is the third, and has steps of two islands and a version of each fragment."""
    last = status_of(up.run_dir)
    statuses.append(last)
    steps = [each["inner_step"] for each in last["islands"].values()]
    merged = [each["version"] for each in last["fragments"].values()]
    return len(statuses) >= 3 and len(steps) == 2 and any(steps) and len(merged) == 4 and all(merged)


def _frame(port):
    try:
        frame = Page(f"http://127.0.0.1:{port}").data("frame")
    except OSError:
        return None
    return frame if frame["run"] else None
