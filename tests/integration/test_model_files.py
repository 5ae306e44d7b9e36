"""The small files of a model go once from the first island to the hub's store, over real sockets."""

import random
import re
import sys

import pytest

from aggregator.store.layout import model_path
from broker.base.errors import ConfigError
from broker.process import model_folder
from broker.wire.small_files import PART_BYTES
from ops import cli
from tests.hub import Hub
from tests.local_run import wait_for
from tests.training_loops import join, params_of

LARGE = random.Random(7).randbytes(2 * PART_BYTES + 3)
FILES = {"config.json": b"{}", "tokenizer.json": LARGE, "1_Pooling/config.json": b"{}"}


def kept(hub):
    return hub.core._files._here


def test_they_are_kept_once_and_whoever_goes_on_with_the_store_has_them(tmp_path, monkeypatch, capsys):
    store, asked = tmp_path / "store", []
    with Hub(store, islands=2) as hub, join(hub, params_of(), files=FILES) as first:
        wait_for(lambda: kept(hub), "files", evidence=lambda: str(hub.core.run.origin.inputs))
        assert model_folder.read(model_path(store)) == FILES
        assert kept(hub) == hub.core.run.origin.inputs["files"]
        with join(hub, params_of(), files={"config.json": b"other"}), join(hub, params_of()):
            assert hub.core.run.origin.inputs["files"] == kept(hub)
        first.leave("enough")
    before = (model_path(store) / "config.json").stat().st_ino
    with Hub(store, islands=2) as hub:
        ask, hub.core._files._ask = hub.core._files._ask, lambda: asked.append(ask())
        wait_for(lambda: kept(hub), "files that are there")
        with join(hub, params_of(), files=FILES):
            assert not asked
    assert (model_path(store) / "config.json").stat().st_ino == before
    for name in [each for each in sys.modules if each.startswith("islands.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["export", str(store), "--hf", str(tmp_path / "out")]) == 2
    assert re.search(r"hf = .*imports \w+, which is not installed: pip install it", capsys.readouterr().err)


def test_what_cannot_travel_is_refused_before_the_island_joins(tmp_path):
    with Hub(tmp_path / "store") as hub:
        for name, said in (("../config.json", "no plain relative name"), ("model.safetensors", "weights travel")):
            with pytest.raises(ConfigError, match=f"files = .*{said}"):
                join(hub, params_of(), files={name: b"x"})
        assert hub.core.run.model.manifest is None
    assert not model_path(tmp_path / "store").exists()
