"""The small files of a model: what may be one, and the same bytes after the wire; whatever else comes is refused."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.process import model_folder
from broker.wire.small_files import (
    MOST_BYTES,
    MOST_FILES,
    MOST_PARTS,
    PART_BYTES,
    digest_of,
    flaw_in,
    joined,
    pack,
    packed_for_wire,
    unpack,
)
from tests.profiles import examples

PLAIN = st.lists(st.text("abzAZ09_-", min_size=1, max_size=8), min_size=1, max_size=4).map(
    lambda parts: "/".join(parts) + ".json"
)


@examples(100)
@given(files=st.dictionaries(PLAIN, st.binary(max_size=50), min_size=1))
def test_files_come_out_as_they_went_in_and_have_one_name_in_any_order(files):
    digest, size, parts = packed_for_wire(files)
    packed = joined(parts, size)
    assert (digest_of(packed), unpack(packed)) == (digest, files)
    assert pack(dict(reversed(files.items()))) == packed


def test_as_many_bytes_as_are_allowed_go_in_as_many_parts():
    digest, size, parts = packed_for_wire({"a.json": bytes(MOST_BYTES)})
    assert len(parts) == MOST_PARTS
    assert [len(each.data) for (each,) in parts[:-1]] == [PART_BYTES] * (MOST_PARTS - 1)
    assert digest_of(joined(parts, size)) == digest


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "..",
        "../a",
        "a/../b",
        ".",
        "./a",
        ".git/x",
        "a/.b",
        "C:a",
        "a\\b",
        "a\0b",
        "a\n",
        "x" * 256,
    ],
)
def test_a_name_that_is_no_plain_relative_one_is_refused(name):
    assert "is no plain relative name: rename it" in flaw_in({name: 1})
    with pytest.raises(ValueError, match="no plain relative name"):
        unpack(pack({name: b"x"}))


@examples(100)
@given(name=st.text(max_size=12))
def test_no_name_that_is_taken_leads_out_of_its_folder_or_hides(name):
    if not flaw_in({name: 1}):
        assert not name.startswith("/")
        assert all(part and part[0] != "." for part in name.split("/"))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"model-00001-of-00002.safetensors": 1}, "weights travel as tensors"),
        ({"a/pytorch_model.bin": 1}, "weights travel as tensors"),
        ({f"{i}.json": 1 for i in range(MOST_FILES + 1)}, "has 1025 files, more than 1024"),
        ({"a.json": MOST_BYTES, "b.json": 1}, "has 32.0 MB beside its weights, more than 32 MB: a.json has 32.0;"),
    ],
)
def test_what_is_too_much_is_refused_with_the_largest_file_and_the_cure(sizes, said):
    assert said in flaw_in(sizes)


@pytest.mark.parametrize(
    "packed",
    [b"", b"\xc1", msgpack.packb([1]), msgpack.packb({1: b"x"}), msgpack.packb({"a": "x"}), pack({"a": b""}) + b"x"],
)
def test_what_is_no_map_of_names_and_bytes_is_refused(packed):
    with pytest.raises(ValueError, match=r"no packed files|no map"):
        unpack(packed)


def test_a_folder_is_read_without_weights_and_hidden_files_and_written_whole_or_not_at_all(tmp_path):
    source = tmp_path / "source"
    for name in ("config.json", "1_Pooling/config.json", "model.safetensors", ".git/config", "a.bin"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / "alias.json").symlink_to("config.json")
    files = model_folder.read(source)
    assert files.keys() == {"config.json", "1_Pooling/config.json", "alias.json"}
    model_folder.write(tmp_path / "kept", pack(files))
    assert model_folder.read(tmp_path / "kept") == files
    with pytest.raises(ValueError, match="no plain relative name"):
        model_folder.write(tmp_path / "kept", pack({"fine.json": b"x", "../evil": b"x"}))
    with pytest.raises(OSError, match="exists"):
        model_folder.write(tmp_path / "kept", pack({"a": b"x", "a/b": b"x"}))
    assert model_folder.read(tmp_path / "kept") == files
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept", "source"]
    model_folder.write(tmp_path / "kept", pack({"other.json": b"x"}))
    assert model_folder.read(tmp_path / "kept") == {"other.json": b"x"}


def test_a_link_out_of_the_folder_and_too_many_bytes_are_refused_with_their_cure(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "secret").write_text("x")
    (source / "config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(model_folder.ConfigError, match=r"config.json'?: leads out of .*: put a copy there"):
        model_folder.read(source)
    assert model_folder.read(source, within=tmp_path) == {"config.json": b"x"}
    (source / "config.json").unlink()
    with (source / "train.log").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(model_folder.ConfigError, match=r"train.log has 32.0; move files that"):
        model_folder.read(source)
