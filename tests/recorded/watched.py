"""A run that is watched from its host and through its broker: an island is killed, Redis stops, Ctrl-C ends it."""

import json
import os
import signal
import time
import tomllib
from urllib.error import HTTPError

from ops.processes.cluster import free_ports
from tests.live_views import dashboard, scrape
from tests.local_run import Up, end_by_signal, ops, wait_for
from tests.recorded.recording import ports_of_metrics, said, status_of


def watched(folder):
    """Records the run, and what its host and an observer with a key saw of it."""
    first = free_ports(4)
    settings = folder / "settings.toml"
    settings.write_text("[aggregator]\ntape_segment_mb = 0.02\n")  # its tape is closed every few moments
    flags = ("--keys", "--islands", 2, "--tokens", 0, "--pace", 0.02, "--metrics", first, "--json")
    with Up(folder / "run", *flags, "--config", settings) as up:
        run_dir = up.run_dir
        needed = ("redis-url", "config.toml", "metrics.json")
        wait_for(lambda: all((run_dir / name).exists() for name in needed), "a run", evidence=lambda: up.err)
        keys = run_dir / "keys"
        said("keys", "new", "observer", "watch", "--dir", keys)
        address = tomllib.loads((run_dir / "config.toml").read_text())["run"]["broker"]
        asked = ["--broker", address, "--key", str(keys / "observer-watch.secret")]
        up.wait_for_progress(2)
        seen = {"first": first, "statuses": [status_of(run_dir), answer("status", *asked), status_of(run_dir)]}
        said("status", *asked, "--leader")
        seen["explained"] = answer("explain", "0", *asked)
        name = f"{seen['explained']['fragment']}:{seen['explained']['version']}"
        seen["explained_here"] = answer("explain", name, run_dir)
        seen["unknown"] = ops("explain", "0:99999", *asked).stderr
        with Up(folder / "other", "--islands", 2, "--metrics", first) as other:
            seen["other"] = [other.wait(), other.err, other.run_dir.exists()]
        with dashboard(run_dir) as page, dashboard(*asked) as far:
            for each in (page, far):
                wait_for(lambda each=each: _explained(each), "both islands and a version", evidence=lambda: up.err)
            seen["pages"] = [_explained(page), _explained(far)]
            seen["missing"] = _status(page, "version/0/99999")
            _trouble(up, page, far, asked, seen)
            wait_for(lambda: far.state("island-1") == "alive", "the island is back")
            wait_for(lambda: page.data("frame")["islands"]["island-1"]["lives"] == 2, "its second life")
            wait_for(lambda: _lives(up) == (2, 2), "metrics of the second life", evidence=lambda: up.err)
            seen["metrics"] = {name: scrape(port).text for name, port in ports_of_metrics(up).items()}
            seen["frame"] = page.data("frame")
        seen["report"] = end_by_signal(up, signal.SIGINT, up.signal_group)
    return seen


def answer(*words):
    return json.loads(said(*words, "--json"))


def _trouble(up, page, far, asked, seen):
    """Kills an island and, while nobody starts it again, stops Redis for a moment."""
    with up.nobody_restarts():
        up.kill("island-1")
        killed_at_s = time.monotonic()
        wait_for(lambda: page.state("island-1") != "alive", "the loss is seen")
        seen["lost_after_s"] = time.monotonic() - killed_at_s
        wait_for(lambda: far.state("island-1") != "alive", "the loss is seen through the broker")
        redis = up.process("redis")
        os.kill(redis, signal.SIGSTOP)
        try:
            wait_for(lambda: "cannot say: Redis at" in far.data("frame")["failure"], "word of Redis")
            seen["without_redis"] = ops("status", *asked).stderr
        finally:
            os.kill(redis, signal.SIGCONT)
        wait_for(lambda: far.data("frame")["failure"] == "", "Redis is back")


def _explained(page):
    """Returns what a page says of the newest version, once it shows both islands; None before that."""
    frame = page.data("frame")
    row = next((row for row in reversed(frame["rounds"]) if row[5] is not None), None)
    states = {each["state"] for each in frame["islands"].values()}
    if row is None or len(frame["islands"]) < 2 or states != {"alive"}:
        return None
    return page.data(f"version/{row[1]}/{row[5]}")


def _status(page, path):
    try:
        page.ask(path)
    except HTTPError as err:
        return err.code
    return 200


def _lives(up):
    """Returns how many lives of island-1 the aggregator has counted, and which one it is by its own metrics."""
    ports = ports_of_metrics(up)
    hub, island = scrape(ports["aggregator"]), scrape(ports["island-1"])
    if hub is None or island is None:
        return None
    (counted,) = hub.all("atoll_aggregator_island_lives_total", island="island-1")
    return counted, next(iter(island.all("atoll_island_incarnation")), None)
