"""Islands of several processes of a jax.distributed job: hosts train as one, are lost, and come back on others."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from aggregator.interface.events import Pieced
from broker.wire.messages import Codec
from islands.hosts.loss import MISTAKEN, STATUS
from ops.processes.cluster import free_ports
from tests.hub import Hub
from tests.local_run import wait_for
from tests.several_hosts import Merges, islands_in, live_again

PATIENCE_S = 120.0  # of one test; nothing here depends on how long it takes
pytestmark = pytest.mark.timeout(300)


@pytest.mark.full("three processes compile and train")
def test_two_hosts_train_as_one_island_and_every_version_is_that_of_the_formulas(tmp_path):
    settings = {"islands": 2, "fragments": 3, "sync_interval": 6, "total_tokens": 12_000}
    with Merges() as merges, Hub(tmp_path / "store", **settings) as hub, islands_in(tmp_path, hub) as start:
        a = start("a", 2)
        wait_for(lambda: a[0].lines("restored"), "both hosts train", PATIENCE_S)
        b = start("b", 1, devices=1, pace_s=0.1)
        for host in a + b:
            assert host.process.wait(PATIENCE_S) == 0, host.err.read_text()[-2000:]
    first, second = (host.lines() for host in a)
    for line in first + second:
        line.pop("sync")
    assert len(first) > 10
    assert first == second  # losses, versions, the data's cursor, the schedule, the end: at the same steps
    assert np.mean([line["loss"] for line in first[-5:]]) < 0.8 * first[0]["loss"]
    ends = [host.lines("ended")[0] for host in a + b]
    assert ends[0]["sum"] == ends[1]["sum"] == pytest.approx(ends[2]["sum"], rel=1e-5)
    in_pieces = merges.of("a")
    assert len(in_pieces) >= 2
    assert all(isinstance(tensor, Pieced) for part in in_pieces for tensor in part.payload)
    merges.check()


@pytest.mark.full("three lives of an island, each of which compiles")
def test_an_island_that_loses_a_host_comes_back_on_as_many_on_fewer_and_on_more(tmp_path):
    store = tmp_path / "store"
    settings = {"islands": 2, "fragments": 3, "sync_interval": 6}
    kept = {"state_dir": str(tmp_path / "state"), "checkpoint_interval_s": 1.0}
    with Hub(store, **settings) as hub, islands_in(tmp_path, hub, **kept) as start:
        (other,) = start("b", 1, devices=1, pace_s=0.3)
        here = live_again(start, store, tmp_path / "state" / "a.checkpoint", (2, 1, 2), PATIENCE_S, pace_s=0.2)
        steps = other.lines()
    assert len(steps) > 10
    losses = [line["loss"] for line in here.lines()]
    assert max(losses[:3]) < 4.0  # it did not begin anew: that would be about 5.5


@pytest.mark.full("another island of two hosts, and seconds of silence")
def test_a_host_that_stands_still_ends_the_island_within_seconds(tmp_path):
    with Hub(tmp_path / "store", islands=1) as hub, islands_in(tmp_path, hub) as start:
        speaker, silent = start("a", 2)
        wait_for(lambda: len(speaker.lines()) > 2, "both train", PATIENCE_S)
        silent.process.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        assert speaker.process.wait(30) == STATUS
        assert time.monotonic() - began_s < 20  # 5 s of silence, and 3 s to end by itself
    assert "host 1 of 2 has said nothing for 5 s" in speaker.err.read_text()


@pytest.mark.full("three islands of two hosts each compile")
@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ({"recipe": {"codec": "bf16"}}, "codec is bf16 at the island"),
        ({"loses_a_leaf": 0}, "10 leaves, without embed"),
        ({"loses_a_leaf": 1}, "10 leaves, without embed"),
    ],
    ids=["refused", "speaker", "other"],
)
def test_a_wrong_setting_ends_every_host_with_the_status_that_no_launcher_starts_again(tmp_path, mistake, says):
    with Hub(tmp_path / "store", islands=1, codec=Codec.F32) as hub, islands_in(tmp_path, hub) as start:
        hosts = start("a", 2, **mistake)
        statuses = [host.process.wait(PATIENCE_S) for host in hosts]
        errors = [host.err.read_text() for host in hosts]
    assert statuses == [MISTAKEN, MISTAKEN], errors
    for each in errors:
        assert says in each


PROGRAM = """
import json, os, sys, time
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
port, me = int(sys.argv[1]), int(sys.argv[2])
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=me)
import islands
from broker.base.errors import AtollError
mesh = Mesh(np.array(jax.devices()), ("data",))

def array(dtype=np.float32, devices=mesh):
    rows = NamedSharding(devices, P("data"))
    return jax.make_array_from_callback((8, 4), rows, lambda at: np.ones((8, 4), dtype)[at])

for case in ("dtype", "names", "mesh", "tokens", "numpy", "silent"):
    params, tokens = {"v": array(), "w": array()}, 10
    if case == "dtype" and me:
        params["w"] = array(np.float16)
    if case == "names" and me:
        params["x"] = params.pop("w")
    if case == "mesh" and me:
        params["w"] = array(devices=Mesh(np.array(jax.devices())[::-1], ("data",)))
    if case == "tokens":
        tokens += me
    if case == "numpy":
        params["w"] = np.ones((8, 4), np.float32)
    if case == "silent" and me:
        time.sleep(10)
        break
    try:
        islands.join("tcp://127.0.0.1:1", params, run="demo", tokens_per_step=tokens, timeout_s=6)
    except AtollError as err:
        print(json.dumps([case, str(err)]), flush=True)
os._exit(0)
"""


@pytest.mark.full("six seconds of waiting for a host that is silent")
def test_hosts_that_make_no_island_are_refused_by_name_with_the_cure():
    port = free_ports(1)
    command = [sys.executable, "-c", PROGRAM, str(port)]
    started = [subprocess.Popen([*command, str(me)], stdout=subprocess.PIPE, text=True) for me in range(2)]
    try:
        out = [process.communicate(timeout=90)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    said = [dict(json.loads(line) for line in each.splitlines() if line.startswith('["')) for each in out]
    refused = {
        "dtype": ("params w", "float32[8, 4] (mean, 0 unit axes) at the speaker, float16[8, 4]", "the same model"),
        "names": ("params w", "only the speaker has it", "the same model"),
        "mesh": ("params w", "the regions of 2 hosts do not make it", "the same mesh"),
        "tokens": ("tokens_per_step", "10 at the speaker, 11 at host 1", "that of the whole island"),
        "numpy": ("params w", "float32[8, 4]", "place it on the mesh"),
    }
    for case, parts in refused.items():
        for each in said:
            assert all(part in each[case] for part in parts), each[case]
    assert "not all 2 hosts of this island have joined within 6 s" in said[0]["silent"]
