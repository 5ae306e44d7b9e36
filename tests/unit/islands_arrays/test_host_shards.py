"""Arrays on several devices: two hosts of two devices each, or one of four; in a process of four."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PRELUDE = """
import jax, ml_dtypes, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from islands.arrays.reference import adopted

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
rng = np.random.default_rng(0)
"""

TWO_HOSTS = """
from broker.base.errors import ConfigError
from broker.wire.fragments import FragmentManifest, Kind, Region, TensorSpec, flaw_in
from broker.wire.messages import Codec
from broker.wire.tensors import decode_tensor, encode_tensor
from islands.arrays import jax_placement
from islands.arrays.host_shards import HostPlacement, held_tensors
from islands.arrays.placement import sample
from islands.session.array_work import ArrayWork

layouts = [P("data"), P("data", "model"), P(None, "model"), P(), P(("data", "model"))]
values = [rng.normal(size=(8, 4)).astype(t) for t in (np.float32, ml_dtypes.bfloat16) for _ in layouts]
leaves = [jax.device_put(v, NamedSharding(mesh, p)) for v, p in zip(values, 2 * layouts)]
specs = [TensorSpec(name=f"w{i}", shape=v.shape, dtype=str(v.dtype), kind=Kind.RDA) for i, v in enumerate(values)]
held = held_tensors(specs, {spec.name: leaf for spec, leaf in zip(specs, leaves)})
assert all(flaw_in(each.regions, each.tensor.shape) == "" for each in held)
# This host hands the first region of each leaf over, and another one the rest.
here = HostPlacement(leaves, [frozenset(each.regions[:1]) for each in held])
assert [(each.leaf, each.region) for each in here.regions] == [(i, r) for i, x in enumerate(held) for r in x.regions]
assert [spec.shape for spec in here.parts.tensors(specs)] == [each.region.shape for each in here.regions]

whole = tuple(encode_tensor(v.astype(np.float32), Codec.F32) for v in values)
cut = here.parts.cut(whole)
for each, encoded, part in zip(here.regions, cut, here.values(leaves)):
    assert np.array_equal(decode_tensor(encoded), values[each.leaf].astype(np.float32)[each.region.slices])
    assert np.array_equal(part, values[each.leaf][each.region.slices])
payload, places = here.parts.handed(cut)
assert [(place.tensor, place.start) for place in places] == [(i, x.regions[0].start) for i, x in enumerate(held)]
assert [encoded.shape for encoded in payload] == [x.regions[0].shape for x in held]

for each, copy in zip(here.regions, here.copy(leaves)):
    assert np.array_equal(np.asarray(copy), values[each.leaf][each.region.slices])

targets = [rng.normal(size=v.shape).astype(np.float32) for v in values]
for keep in (0.0, 1.0, 0.5):
    placed = here.place([targets[h.leaf][h.region.slices] for h in here.regions], keep)
    for leaf, value, target, new in zip(leaves, values, targets, here.install(leaves, placed, keep)):
        expected = target.astype(value.dtype) if keep == 0 else np.asarray(adopted(value, target, keep))
        assert new.sharding == leaf.sharding and new.dtype == leaf.dtype
        tolerance = 1e-2 if keep == 0.5 else 0
        np.testing.assert_allclose(np.asarray(new, np.float32), expected.astype(np.float32), rtol=tolerance)
here.warm_up(leaves, 0.5)
compiled = jax_placement._sample._cache_size()
places = here.places([targets[each.leaf][each.region.slices] for each in here.regions])
assert len(places) == 4
for (i, place), elements in zip(places.items(), sample([leaves[i] for i in places], list(places.values()))):
    first = min(leaves[i].addressable_shards, key=lambda shard: shard.device.id)
    assert np.array_equal(np.asarray(elements), values[i][first.index][tuple(np.asarray(place))])
assert jax_placement._sample._cache_size() == compiled

def spread(spec):
    return {"w0": jax.device_put(values[0], NamedSharding(mesh, spec))}

work = ArrayWork(spread(P("data")), None, several=True)
work.open(FragmentManifest((tuple(specs[:1]),)), {"w0": frozenset(held[0].regions)})
work.place_from(spread(P("data", None)))  # the same under another name
others, joined = list(spread(P("model")).values()), work.placements[0]
placed = joined.place([targets[0][each.region.slices] for each in joined.regions], 0.5)
first = lambda: work.place_from(spread(P("model")))  # as a first step returns them
for call in (first, lambda: joined.copy(others), lambda: joined.install(others, placed, 0.5)):
    try:
        call()
    except ConfigError as err:
        value, cure = str(err).split(": it joined as ")
        assert value.startswith("params w0 = ") and "'model'" in value and "'data'" in cure and "out_shardings" in cure
    else:
        raise AssertionError("it was taken")
work.close()
print("ok")
"""

ONE_HOST = """
from islands.arrays.placement import Placement, sample

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
    other = [jax.device_put(v, NamedSharding(mesh, P("model", "data"))) for v in values]  # of a later train step
    followed = placement.install(other, placement.place(shifts, 1.0), 1.0)
    for leaf, value, shift, new in zip(other, values, shifts, followed):
        assert new.sharding == leaf.sharding and np.array_equal(np.asarray(new), adopted(value, shift, 1.0))
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


@pytest.mark.parametrize("program", [TWO_HOSTS, ONE_HOST], ids=["two hosts", "one host"])
def test_shards_are_copied_and_installed_device_by_device_in_every_layout(program):
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    command = [sys.executable, "-c", PRELUDE + program]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=55)
    assert (said.returncode, said.stdout) == (0, "ok\n"), said.stderr[-2000:]
