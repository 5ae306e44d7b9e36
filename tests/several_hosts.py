"""Islands of several processes in tests: their programs, what these print, and versions by the formulas."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np

from aggregator.interface.events import Pieced
from aggregator.process import workers
from broker.wire.fragments import Kind
from broker.wire.tensors import decode_tensor
from islands.hosts.loss import STATUS
from ops.processes.cluster import free_ports
from tests.hub import RUN
from tests.local_run import wait_for
from tests.unit.aggregator_merge.test_merge import twin_mean, twin_rda


class Host:
    """One process of an island, and what it has printed."""

    def __init__(self, folder, module, spec):
        self.out, self.err = folder / f"{spec['name']}.out", folder / f"{spec['name']}.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            command = [sys.executable, "-m", module, json.dumps(spec)]
            self.process = subprocess.Popen(command, stdout=out, stderr=err)

    def lines(self, event="step"):
        # The libraries that carry JAX's collective operations print lines of their own.
        said = [json.loads(line) for line in self.out.read_text().splitlines() if line.startswith('{"event"')]
        return [line for line in said if line["event"] == event]


@contextmanager
def islands_in(folder, hub, module="tests.fsdp_island", **common):
    """Starts hosts, and leaves none behind."""
    started = []

    def start(island, hosts, **more):
        port = free_ports(1)
        spec = {"address": hub.address, "run": RUN, "island": island, "processes": hosts, "port": port, "devices": 2}
        found = []
        for process in range(hosts):
            name = f"{island}-{len(started)}"
            found.append(Host(folder, module, spec | {"process": process, "name": name} | common | more))
            started.append(found[-1])
        return found

    try:
        yield start
    finally:
        for host in started:
            host.process.kill()
            host.process.wait()


def ledger(store):
    return [json.loads(line) for line in (store / "ledger.jsonl").read_text().splitlines()]


def merged_of(store, island, incarnation):
    if not (store / "ledger.jsonl").exists():
        return 0
    of = [c for line in ledger(store) for c in line["contributions"]]
    return sum((c["island_id"], c["incarnation"]) == (island, incarnation) for c in of)


def live_again(start, store, checkpoint, lives, within_s, **more):
    """Has island a live on so many hosts, again and again: each life ends with the loss of one of them.

    A life lasts until the run has merged something of it, and its state is written down. The first loses its last host,
    later ones the speaker. Returns the last life's speaker.
    """
    for life, hosts in enumerate(lives, 1):
        written = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        here = start("a", hosts, **more)

        def back(life=life, here=here, written=written):
            assert all(host.process.poll() is None for host in here), here[0].err.read_text()[-2000:]
            written_anew = checkpoint.exists() and checkpoint.stat().st_mtime_ns > written
            return merged_of(store, "a", life) and written_anew

        wait_for(back, "the island is merged, and has written a checkpoint", within_s)
        restored = [host.lines("restored")[0] for host in here]
        assert [each["source"] for each in restored] == ["fresh" if life == 1 else "checkpoint"] * hosts
        assert len({json.dumps(each) for each in restored}) == 1
        assert (restored[0]["step"] > 0) == (life > 1)
        victim = here[-1 if life == 1 else 0]
        victim.process.kill()
        # JAX aborts by itself when the process is gone that all others report to, which is the speaker.
        assert {host.process.wait(30) for host in here if host is not victim} <= {STATUS, -signal.SIGABRT}
    return here[0]


def array_of(tensor):
    if not isinstance(tensor, Pieced):
        return decode_tensor(tensor)
    whole = np.full(tensor.shape, np.nan, np.float32)
    for piece in tensor.pieces:
        whole[piece.region.slices] = decode_tensor(piece.encoded)
    return whole


class Merges:
    """The merges of an aggregator in this process, each with the version that it led to.

    As a context manager it records them.
    """

    def __init__(self):
        self.made, self._merge = [], workers.versions.merge

    def __enter__(self):
        workers.versions.merge = self._record
        return self

    def __exit__(self, *_):
        workers.versions.merge = self._merge

    def _record(self, tensors, action, before, *how, **more):
        made, merged = self._merge(tensors, action, before, *how, **more)
        self.made.append((tensors, action, before, made.state))
        return made, merged

    def of(self, island):
        return [part for _, action, _, _ in self.made for part in action.parts if part.island_id == island]

    def check(self):
        """Compares each version, before it was rounded for the wire, with the formulas."""
        assert self.made
        for tensors, action, before, after in self.made:
            expected = reference(tensors, action, before)
            np.testing.assert_allclose(after.exact, expected, rtol=1e-5, atol=1e-6)


def reference(tensors, action, before):
    """The next version as the paper's formulas have it, in numpy and float64."""
    merged = []
    for i, tensor in enumerate(tensors):
        deltas = [array_of(part.payload[i]) for part in action.parts]
        weights = [[part.token_weight for part in action.parts], [part.staleness_weight for part in action.parts]]
        merge = twin_rda if tensor.kind is Kind.RDA else twin_mean
        merged.append(np.ravel(merge(deltas, *weights)))
    delta = np.concatenate(merged)
    rate, kept = action.outer_rule
    return before.exact - rate * (delta + kept * (delta + kept * before.momentum))
