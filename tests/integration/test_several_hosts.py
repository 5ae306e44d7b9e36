"""Processes of one jax.distributed job that join: what is not supported is refused, and says what to do."""

import subprocess
import sys

from ops.processes.cluster import free_ports

PROGRAM = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
port, me = int(sys.argv[1]), int(sys.argv[2])
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=me)
import islands
from broker.wire.errors import ConfigError
mesh = Mesh(np.array(jax.devices()), ("data",))
w = jax.make_array_from_callback((8, 4), NamedSharding(mesh, PartitionSpec("data")), lambda at: np.ones((8, 4))[at])
try:
    islands.join("tcp://127.0.0.1:1", {"w": w}, run="demo", timeout_s=5)
except ConfigError as err:
    print(err)
"""


def test_an_array_that_several_processes_share_is_refused_by_name_with_the_cure():
    port = free_ports(1)
    started = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(port), str(me)], stdout=subprocess.PIPE, text=True)
        for me in range(2)
    ]
    try:
        said = [process.communicate(timeout=45)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for each in said:
        assert "params w" in each
        assert "let each process train an island of its own" in each
