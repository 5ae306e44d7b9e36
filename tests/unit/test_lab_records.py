"""Records of laboratory runs: on a line and back, torn ends, wrong lines, many writers."""

import errno
import inspect
import json
import logging
import math
import os
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.wire.errors import ConfigError, Unavailable
from ops.lab import records
from ops.lab.records import Record, Stage, append, edited_since, newest, of_newest_code, pack, path_of, read
from tests.synthetic import record


def test_a_record_comes_back_as_it_was():
    written = record(3.0123456789012345, mode="decoupled", islands=4, task__learning_rate=0.002, flag=True)
    line = written.to_json()
    assert "\n" not in line
    assert Record.from_json(line) == written
    assert Record.from_json(line).stage is Stage.FINAL


@given(st.floats(0.1, 20), st.integers(0, 2**62))
def test_numbers_keep_their_last_bit(loss, tokens):
    written = replace(record(), loss=loss, tokens=tokens)
    assert Record.from_json(written.to_json()) == written


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_a_number_is_infinite_null_on_disk_and_diverged(loss):
    written = replace(record(), loss=loss, curve=((10, 1.0, 4.0), (20, 2.0, loss)), cosine=math.nan)
    assert json.loads(written.to_json())["loss"] is None
    again = Record.from_json(written.to_json())
    assert again.loss == again.curve[1][2] == math.inf
    assert again.diverged
    assert again.cosine is None


def test_a_baseline_may_leave_out_what_it_does_not_have():
    table = json.loads(record(mode="diloco").to_json())
    for name in ("cosine", "staleness", "wasted"):
        del table[name]
    again = Record.from_json(json.dumps(table))
    assert (again.cosine, again.staleness, again.wasted) == (None, {}, {})


@pytest.mark.parametrize(
    ("change", "field", "cure"),
    [
        ({"loss_per_byte": 1.0}, "loss_per_byte", "is no setting"),
        ({"participaton": 1.0}, "participaton", "participation"),
        ({"seed": "one"}, "seed", "whole number"),
        ({"seed": 1.5}, "seed", "whole number"),
        ({"seed": True}, "seed", "whole number"),
        ({"stage": "middle"}, "stage", "tune, final"),
        ({"cell": [1]}, "cell", "table"),
        ({"cell": {"a": {"b": 1}}}, "cell.a", "text, a number"),
        ({"curve": [[1, 2]]}, "curve", "3 numbers"),
        ({"wasted": {"stale": "many"}}, "wasted.stale", "whole number"),
        ({"seed": None}, "seed", "needed"),
    ],
)
def test_a_wrong_record_is_refused_with_field_and_cure(change, field, cure):
    table = json.loads(record(mode="diloco").to_json()) | change
    with pytest.raises(ConfigError) as refused:
        Record.from_json(json.dumps(table))
    assert field in refused.value.field
    assert cure in refused.value.cure


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null"])
def test_what_is_no_object_is_no_record(text):
    with pytest.raises(ConfigError):
        Record.from_json(text)


# --- files --------------------------------------------------------------------------------------------------------


def test_records_are_appended_and_read_in_order(tmp_path):
    written = [record(seed=seed, mode="diloco") for seed in range(3)]
    for each in written:
        append(tmp_path / "records", each)
    assert read(tmp_path / "records", "parity") == tuple(written)
    assert read(tmp_path / "records") == tuple(written)
    assert (tmp_path / "records" / "parity.jsonl").read_text().count("\n") == 3


def test_no_file_and_no_directory_are_no_records(tmp_path):
    assert read(tmp_path, "parity") == read(tmp_path / "nothing") == ()


@pytest.mark.parametrize("lost", [1, 5, 200])
def test_a_torn_end_is_dropped_with_a_warning_and_cut_off_by_the_next_writer(tmp_path, caplog, lost):
    for seed in range(2):
        append(tmp_path, record(seed=seed))
    path = path_of(tmp_path, "parity")
    path.write_bytes(path.read_bytes()[: -1 - lost])
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, path.stem) == (record(seed=0),)
    assert "lab.record_torn" in caplog.text
    append(tmp_path, record(seed=2))
    assert read(tmp_path, path.stem) == (record(seed=0), record(seed=2))


def test_a_whole_last_line_without_its_end_is_kept(tmp_path):
    path = path_of(tmp_path, "parity")
    path.write_text(record(seed=0).to_json())
    assert read(tmp_path, path.stem) == (record(seed=0),)
    append(tmp_path, record(seed=1))
    assert read(tmp_path, path.stem) == (record(seed=0), record(seed=1))


def test_a_wrong_line_in_the_middle_is_named(tmp_path):
    path = path_of(tmp_path, "parity")
    path.write_text(f"{record().to_json()}\n{{broken\n{record(seed=1).to_json()}\n")
    with pytest.raises(ConfigError, match=r"parity\.jsonl:2.*restore the file"):
        read(tmp_path, path.stem)


def test_a_record_in_the_file_of_another_experiment_is_refused(tmp_path):
    path = path_of(tmp_path, "other")
    path.write_text(record().to_json() + "\n")
    for experiment in ("other", None):
        with pytest.raises(ConfigError, match="own file"):
            read(tmp_path, experiment)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "records").write_text("a file")
    with pytest.raises(Unavailable, match="cannot append"):
        append(tmp_path / "records", record())


def test_a_disk_that_takes_a_part_of_a_record_is_noticed_and_the_record_is_written_later(tmp_path, monkeypatch):
    append(tmp_path, record(seed=0))
    write, room = os.write, [100]

    def nearly_full(fd, data):
        taken = min(len(data), room[0])
        room[0] -= taken
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:taken])

    with monkeypatch.context() as full:
        full.setattr(records.os, "write", nearly_full)
        with pytest.raises(Unavailable, match="No space left"):
            append(tmp_path, record(seed=1))
    with path_of(tmp_path, "parity").open("a") as by_hand:  # as whoever was told to adds the line
        by_hand.write(record(seed=2).to_json() + "\n")
    append(tmp_path, record(seed=1))
    assert [each.seed for each in read(tmp_path, "parity")] == [0, 2, 1]


def test_a_compressed_file_has_what_tables_and_plots_need_and_gives_the_same_bytes(tmp_path):
    written = [record(3.0 + seed / 7, seed=seed, experiment=name) for seed in range(3) for name in ("parity", "wire")]
    (tmp_path / "records.jsonl.xz").write_bytes(pack(written))
    found = read(tmp_path / "records.jsonl.xz", "wire")
    assert [(each.seed, each.loss, each.key, each.settings) for each in found] == [
        (each.seed, each.loss, each.key, each.settings) for each in written if each.experiment == "wire"
    ]
    assert [row[2] for row in found[0].curve] == pytest.approx([row[2] for row in written[1].curve], abs=1e-4)
    assert pack(read(tmp_path / "records.jsonl.xz")) == pack(written)


def test_fields_that_records_had_once_are_dropped():
    table = json.loads(record().to_json()) | {"blocks": [1.0], "gantt": [[1, 2, 3, 4, 5]], "loss_se": None}
    assert Record.from_json(json.dumps(table)) == record()


def test_records_of_a_task_that_was_edited_do_not_count():
    old, new = (replace(record(seed=i), task_code={"mine": digest}) for i, digest in enumerate(("old", "new")))
    plain = record(seed=2)
    assert of_newest_code([old, new, plain]) == (new, plain), "a later run has seen another form"
    assert of_newest_code([old, plain], {"mine": "newer"}) == (plain,)


def test_of_runs_with_the_same_key_the_last_one_counts():
    old, new, tuned = record(3.0), record(2.9), record(3.1, stage="tune")
    assert newest([old, tuned, record(seed=1), new]) == (tuned, record(seed=1), new)


def test_what_was_edited_since_a_run_is_named():
    run = replace(record(), task_code={"mine": "old", "data text": "same"})
    assert edited_since(run, {"mine": "new", "data text": "same"}) == "mine"
    assert edited_since(run, {"mine": "old"}) == "", "of the other nothing is known"
    assert edited_since(record(), {"mine": "new"}) == ""


def test_every_field_of_a_record_is_described():
    described = inspect.cleandoc(Record.__doc__ or "")  # from Python 3.13 on it comes without its indentation
    for name in asdict(record()):
        assert f"\n    {name}: " in described
