"""Records of laboratory runs: on a line and back, in files, and refused where they are wrong."""

import inspect
import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import ConfigError, Unavailable
from ops.lab.records import Record, append, newest, pack, path_of, read
from tests.synthetic import record


@given(st.floats(0.1, 20), st.integers(0, 2**62))
def test_a_record_comes_back_as_it_was_to_the_last_bit(loss, tokens):
    written = replace(record(mode="decoupled", islands=4, task__learning_rate=0.002), loss=loss, tokens=tokens)
    assert "\n" not in written.to_json()
    assert Record.from_json(written.to_json()) == written


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_a_number_is_infinite_null_on_disk_and_diverged(loss):
    written = replace(record(), loss=loss, curve=((10, 1.0, 4.0), (20, 2.0, loss)))
    assert json.loads(written.to_json())["loss"] is None
    again = Record.from_json(written.to_json())
    assert again.loss == again.curve[1][2] == math.inf
    assert again.diverged


@pytest.mark.parametrize(
    ("change", "field", "cure"),
    [
        ({"virtual": 1.0}, "virtual", "virtual_s"),
        ({"seed": 1.5}, "seed", "whole number"),
        ({"seed": True}, "seed", "whole number"),
        ({"cell": [1]}, "cell", "table"),
        ({"curve": [[1, 2]]}, "curve", "3 numbers"),
        ({"seed": None}, "seed", "needed"),
    ],
)
def test_a_wrong_record_is_refused_with_field_and_cure(change, field, cure):
    table = json.loads(record(mode="diloco").to_json()) | change
    with pytest.raises(ConfigError) as refused:
        Record.from_json(json.dumps(table))
    assert field in refused.value.field
    assert cure in refused.value.cure


def test_a_field_that_is_younger_than_a_record_may_lack():
    table = json.loads(record().to_json())
    del table["code"]
    assert Record.from_json(json.dumps(table)) == replace(record(), code="")


def test_records_are_appended_and_read_in_order(tmp_path):
    written = [record(seed=seed, mode="diloco") for seed in range(3)]
    assert read(tmp_path, "parity") == read(tmp_path / "nothing") == ()
    append(tmp_path / "records", written[0])
    path = path_of(tmp_path / "records", "parity")
    path.write_text(path.read_text().rstrip("\n"))  # a person may cut the end
    for each in written[1:]:
        append(tmp_path / "records", each)
    assert read(tmp_path / "records", "parity") == read(tmp_path / "records") == tuple(written)
    assert [each.name for each in (tmp_path / "records").iterdir()] == ["parity.jsonl"]


@pytest.mark.parametrize("line", ["", "{broken", "[]", "null"])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    path = path_of(tmp_path, "parity")
    path.write_text(f"{record().to_json()}\n{line}\n{record(seed=1).to_json()}\n")
    with pytest.raises(ConfigError, match=r"parity\.jsonl:2.*restore the file"):
        read(tmp_path, path.stem)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "records").write_text("a file")
    with pytest.raises(Unavailable, match="cannot append"):
        append(tmp_path / "records", record())


def test_a_compressed_file_has_what_tables_and_plots_need_and_gives_the_same_bytes(tmp_path):
    written = [record(3.0 + seed / 7, seed=seed, experiment=name) for seed in range(3) for name in ("parity", "wire")]
    (tmp_path / "records.jsonl.xz").write_bytes(pack(written))
    found = read(tmp_path / "records.jsonl.xz", "wire")
    for ours, theirs in zip(found, written[1::2], strict=True):
        assert (ours.seed, ours.loss, ours.key, ours.settings) == (
            theirs.seed,
            theirs.loss,
            theirs.key,
            theirs.settings,
        )
        assert [row[2] for row in ours.curve] == pytest.approx([row[2] for row in theirs.curve], abs=1e-4)
    assert pack(read(tmp_path / "records.jsonl.xz")) == pack(written)


def test_of_runs_with_the_same_key_the_last_one_counts():
    assert list(newest([record(3.0), record(seed=1), record(2.9)])) == [record(2.9), record(seed=1)]


def test_every_field_of_a_record_is_described():
    described = inspect.cleandoc(Record.__doc__ or "")  # from Python 3.13 on it comes without its indentation
    for name in asdict(record()):
        assert f"\n    {name}: " in described
