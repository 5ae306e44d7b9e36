"""The exported model, as other programs read it."""

import argparse
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from aggregator.interface.events import Commit
from aggregator.merge.fragment_state import FragmentState
from aggregator.state.records import manifest_to_rows
from aggregator.state.run_settings import settled
from aggregator.store.layout import read_run
from aggregator.store.store import Store
from broker.base.errors import ConfigError, Unavailable
from broker.wire.fragments import FragmentManifest, Kind, TensorSpec, cut, partition
from broker.wire.tensors import fragment_digest
from ops.models.export import add_arguments, run
from ops.models.global_model import Which, export


def spec(name, *shape, kind=Kind.RDA):
    return TensorSpec(name=name, shape=shape, dtype="float32", kind=kind)


MANIFEST = FragmentManifest(
    (
        (spec("layers/0/query", 8, 4), spec("layers/0/norm", 4, kind=Kind.MEAN), spec("scale", kind=Kind.MEAN)),
        (spec("embed", 16, 4, kind=Kind.MEAN),),
        (spec("rotary", 2, 3, kind=Kind.FROZEN),),
    )
)
VERSIONS = (3, 5, 0)


def params_of(fragment_id, version):
    size = MANIFEST.sizes[fragment_id]
    return np.random.default_rng(100 * fragment_id + version).standard_normal(size, dtype=np.float32)


def write_run(directory, name="store", versions=VERSIONS, epoch=1):
    """A run directory with a live writer's store in it; returns the open store."""
    (directory / name).parent.mkdir(exist_ok=True)
    store = Store.open(directory / name)
    store.load()
    store.save_run({"run_id": "demo", "epoch": epoch, "manifest": manifest_to_rows(MANIFEST)})
    for fragment_id, newest in enumerate(versions):
        for version in range(newest + 1):
            params = params_of(fragment_id, version)
            commit = Commit(
                fragment_id=fragment_id,
                fragment_version=version,
                epoch=epoch,
                digest=fragment_digest(params),
                round_id=version,
                contributions=(),
                ledger={},
            )
            store.commit(commit, FragmentState(params=params, momentum=np.zeros_like(params), version=version))
    return store


def expected(versions):
    arrays = {}
    for fragment_id, specs in enumerate(MANIFEST.fragments):
        flat = params_of(fragment_id, versions[fragment_id])
        for tensor in specs:
            arrays[tensor.name], flat = flat[: tensor.size].reshape(tensor.shape), flat[tensor.size :]
    return arrays


def assert_same(found, wanted):
    assert sorted(found) == sorted(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array), name


@pytest.fixture
def run_dir(tmp_path):
    with write_run(tmp_path):
        yield tmp_path


@pytest.mark.parametrize("place", [".", "store"])
def test_the_newest_model_is_exported_by_name_and_shape_while_the_run_is_live(run_dir, place):
    exported = export(run_dir / place, run_dir / "out.safetensors")
    assert_same(load_file(run_dir / "out.safetensors"), expected(VERSIONS))
    assert (exported.versions, exported.parameters) == (VERSIONS, sum(MANIFEST.sizes))
    assert exported.file_bytes == (run_dir / "out.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("versions", "epoch", "newest"),
    [
        ((4, 6, 0), 2, (4, 6, 0)),  # it led last
        ((3, 2, 0), 1, (3, 5, 0)),  # it followed, and was cut off before the last versions
        ((1, 1, 0), 2, (1, 1, 0)),  # it led a lineage that went back behind them
    ],
)
def test_the_newest_version_may_be_in_the_store_of_a_standby(run_dir, versions, epoch, newest):
    with write_run(run_dir, "standby-1/store", versions, epoch):
        exported = export(run_dir, run_dir / "out.safetensors")
    assert exported.versions == newest
    assert_same(load_file(run_dir / "out.safetensors"), expected(newest))


def test_bf16_rounds_to_nearest_and_takes_half_the_space(run_dir):
    export(run_dir, run_dir / "out.safetensors", dtype="bf16")
    content = (run_dir / "out.safetensors").read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    for name, array in expected(VERSIONS).items():
        begin, end = header[name]["data_offsets"]
        raw = content[8 + header_bytes + begin : 8 + header_bytes + end]
        assert header[name]["dtype"] == "BF16"
        assert raw == array.astype(ml_dtypes.bfloat16).tobytes()


def test_an_earlier_file_is_replaced_and_survives_a_failure(run_dir, monkeypatch):
    out = run_dir / "out.safetensors"
    out.write_text("earlier")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(Unavailable, match="free space"):
            export(run_dir, out)
    assert out.read_text() == "earlier"
    export(run_dir, out)
    assert_same(load_file(out), expected(VERSIONS))
    assert [path.name for path in run_dir.iterdir() if "tmp" in path.name] == []


def test_the_command_prints_what_it_wrote(run_dir, capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args([str(run_dir), "--json"])) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["path"] == str(run_dir / "model.safetensors")
    assert printed["versions"] == list(VERSIONS)
    assert run(parser.parse_args([str(run_dir)])) == 0
    assert "fragment versions: 3 5 0" in capsys.readouterr().out
    assert export(run_dir, run_dir / "seed.safetensors", which=Which.SEED).versions == (0, 0, 0)


def test_what_the_run_has_cut_is_whole_in_the_file(tmp_path, monkeypatch):
    whole = spec("embed", 23, 4, kind=Kind.MEAN)
    manifest = partition(cut((whole, spec("norm", 4, kind=Kind.MEAN)), 8), 5)
    assert len(manifest.sections) == 12
    monkeypatch.setitem(globals(), "MANIFEST", manifest)
    versions = (1,) * len(manifest)
    with write_run(tmp_path, versions=versions):
        exported = export(tmp_path, tmp_path / "model.safetensors")
    found, parts = load_file(tmp_path / "model.safetensors"), expected(versions)
    rows = [parts[f"embed#{i}of12"] for i in range(12)]
    assert_same(found, {"embed": np.concatenate(rows), "norm": parts["norm"]})
    assert exported.parameters == 23 * 4 + 4


def test_of_a_run_with_one_share_of_the_data_for_each_island_the_model_can_be_exported_and_no_more(tmp_path):
    with write_run(tmp_path) as store:
        older = {"settings": {"data_ahead_s": 0.0}, "shares": {"0": ["a", 1, 8]}}
        store.save_run({"run_id": "demo", "epoch": 1, "manifest": manifest_to_rows(MANIFEST), **older})
    exported = export(tmp_path, tmp_path / "model.safetensors")
    assert_same(load_file(exported.path), expected(VERSIONS))
    with pytest.raises(ConfigError, match=r"data_ahead_s.*export its model"):
        settled({"run_id": "demo"}, read_run(tmp_path / "store"))
