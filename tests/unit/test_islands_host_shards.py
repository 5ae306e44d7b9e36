"""Arrays on several devices: two hosts of two devices each, or one of four; in a process of four."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, ml_dtypes
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from broker.wire.fragments import flaw_in
from islands.arrays.host_shards import HostShards
from islands.arrays.reference import adopted

devices = np.array(jax.devices()).reshape(2, 2)
assert devices.size == 4
mesh = Mesh(devices, ("data", "model"))
host_of = {device: host for host in range(2) for device in devices[host]}.__getitem__
rng = np.random.default_rng(0)
layouts = [P("data"), P("data", "model"), P(None, "model"), P(), P(("data", "model"))]
values = [rng.normal(size=(8, 4)).astype(t) for t in (np.float32, ml_dtypes.bfloat16) for _ in layouts]
leaves = [jax.device_put(v, NamedSharding(mesh, p)) for v, p in zip(values, 2 * layouts)]
hosts = [HostShards(leaves, host, host_of) for host in range(2)]

for i, value in enumerate(values):
    own = [each.region for host in hosts for each in host.held if each.leaf == i and each.own]
    assert flaw_in(own, value.shape) == "", (i, own)

copies = [host.copy(leaves) for host in hosts]
for host, copied in zip(hosts, copies):
    for each, copy in zip(host.held, copied):
        assert np.array_equal(np.asarray(copy), values[each.leaf][each.region.slices])

targets = [rng.normal(size=v.shape).astype(np.float32) for v in values]
dtypes = [v.dtype for v in values]
for keep in (0.0, 1.0, 0.5):
    shards = {}
    for host in hosts:
        placed = host.place([targets[h.leaf][h.region.slices] for h in host.held], keep, dtypes)
        shards |= host.install(leaves, placed, keep)
    for leaf, value, target, new in zip(leaves, values, targets, hosts[0].joined(shards)):
        expected = target.astype(value.dtype) if keep == 0 else np.asarray(adopted(value, target, keep))
        assert new.sharding == leaf.sharding and new.dtype == leaf.dtype
        if keep == 0.5:
            assert np.allclose(np.asarray(new, np.float32), np.asarray(expected, np.float32), rtol=1e-2)
        else:
            assert np.array_equal(np.asarray(new), expected)
print("ok", len(hosts[0].held), len(hosts[1].held))
"""

PLACEMENT = """
import jax, ml_dtypes, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from islands.arrays.placement import Placement, sample
from islands.arrays.reference import adopted

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
rng = np.random.default_rng(0)
for layout in (P(), P("data"), P("data", "model"), P(None, "model")):
    values = [rng.normal(size=(64, 32)).astype(t) for t in (np.float32, ml_dtypes.bfloat16)]
    leaves = [jax.device_put(v, NamedSharding(mesh, layout)) for v in values]
    shifts = [rng.normal(size=(64, 32)).astype(np.float32) for _ in values]
    placement = Placement(leaves)
    placement.warm_up(leaves, 1.0)
    copies = placement.copy(leaves)
    installed = placement.install(leaves, placement.place(shifts, 1.0), 1.0)
    for leaf, value, shift, copy, new in zip(leaves, values, shifts, copies, installed):
        assert copy.sharding == leaf.sharding and np.array_equal(np.asarray(copy), value)
        assert new.sharding == leaf.sharding and new.dtype == leaf.dtype
        assert np.array_equal(np.asarray(new), adopted(value, shift, 1.0))
    places = placement.places(shifts)
    found = sample([leaves[i] for i in places], list(places.values()))
    for (i, place), elements in zip(places.items(), found):
        first = min(leaves[i].addressable_shards, key=lambda shard: shard.device.id)
        assert np.array_equal(np.asarray(elements), values[i][first.index][tuple(np.asarray(place))])
    step = jax.jit(lambda given: [2 * x for x in given], donate_argnums=0)
    step(step(leaves)), step(copies), step(installed)
    assert step._cache_size() == 1  # no train step is traced again for what was installed
print("ok")
"""


@pytest.mark.parametrize("program", [PROGRAM, PLACEMENT], ids=["two hosts", "one host"])
def test_shards_are_copied_and_installed_device_by_device_in_every_layout(program):
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=55, check=False
    )
    assert said.returncode == 0, said.stderr[-2000:]
    assert said.stdout.startswith("ok")
