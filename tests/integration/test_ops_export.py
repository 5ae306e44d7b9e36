"""The exported model, as other programs read it."""

import argparse
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from aggregator.events import Commit
from aggregator.merge.outer_step import FragmentState
from aggregator.state.records import manifest_to_rows
from aggregator.store.store import Store
from broker.wire.errors import ConfigError, Unavailable
from broker.wire.fragments import FragmentManifest, Kind, TensorSpec
from broker.wire.tensors import fragment_digest
from ops.inspect.export import Which, add_arguments, export, run


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


def test_a_folder_is_no_file_to_write(run_dir):
    with pytest.raises(ConfigError, match=r"is a folder; name the file in it.*model\.safetensors"):
        export(run_dir, run_dir)


def test_the_seed_is_the_model_before_training(run_dir):
    exported = export(run_dir, run_dir / "out.safetensors", which=Which.SEED)
    assert_same(load_file(run_dir / "out.safetensors"), expected((0, 0, 0)))
    assert exported.versions == (0, 0, 0)


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


def test_the_metadata_names_the_run_and_every_fragment_version(run_dir):
    export(run_dir, run_dir / "out.safetensors")
    with safe_open(run_dir / "out.safetensors", framework="np") as file:
        metadata = file.metadata()
    assert metadata["run_id"] == "demo"
    assert metadata["manifest_digest"] == MANIFEST.digest
    assert json.loads(metadata["fragment_versions"]) == list(VERSIONS)
    digests = [fragment_digest(params_of(p, v)) for p, v in enumerate(VERSIONS)]
    assert json.loads(metadata["fragment_digests"]) == digests


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
    assert run(parser.parse_args([str(run_dir), "--seed-version", "--out", str(run_dir / "seed.safetensors")])) == 0
    assert "fragment versions: 0 0 0" in capsys.readouterr().out


def test_a_directory_without_a_store_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="RUN_DIR"):
        export(tmp_path, tmp_path / "out.safetensors")


def test_a_store_before_its_first_island_has_no_model_yet(tmp_path):
    with Store.open(tmp_path) as store:
        store.save_run({"run_id": "demo", "manifest": None})
    with pytest.raises(Unavailable, match="wait until an island has joined"):
        export(tmp_path, tmp_path / "out.safetensors")


def test_an_output_that_cannot_be_written_is_an_error_with_its_path(run_dir):
    with pytest.raises(Unavailable, match=r"cannot write .*missing/out"):
        export(run_dir, run_dir / "missing" / "out.safetensors")
