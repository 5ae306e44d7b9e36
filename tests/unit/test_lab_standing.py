"""Where an experiment stands, as JSON."""

import json
from pathlib import Path

import pytest

from ops.lab.command import _SHOW_EPILOG
from ops.lab.experiment import load
from ops.lab.standing import stand

ROOT = Path(__file__).resolve().parents[2]
PARITY = load(ROOT / "examples/lab/parity.toml")


@pytest.fixture(scope="module")
def row():
    return stand(PARITY, ROOT / "docs/results/records").row()


def test_the_help_names_every_key(row):
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    for name in (*row, *row["tuned"][0], *row["claims"][0]):
        assert name in _SHOW_EPILOG, name


def test_records_are_counted_judged_and_their_rates_told(row):
    assert row["due"] == row["due_after_them"] == 0
    assert row["runs"] > len(PARITY.comparisons) * 4
    assert {each["setting"] for each in row["tuned"]} == {"task.learning_rate"}
    for claim in row["claims"]:
        assert claim["seeds"] >= 4
        low, high = claim["difference"] - claim["half_width"], claim["difference"] + claim["half_width"]
        verdict = "holds" if high < claim["margin"] else "fails" if low > claim["margin"] else "inconclusive"
        assert claim["verdict"] == verdict


def test_without_records_everything_is_due_and_nothing_known(tmp_path):
    row = stand(PARITY, tmp_path).row()
    assert (row["runs"], row["tuning_runs"], row["spent_s"], row["left_out"], row["tuned"]) == (0, 0, 0, "", [])
    assert row["due"] > 0
    assert {(each["seeds"], each["difference"], each["half_width"]) for each in row["claims"]} == {(0, None, None)}


def test_one_pair_has_a_difference_and_no_interval(tmp_path):
    records = (ROOT / "docs/results/records/parity.jsonl").read_text().splitlines()
    first = [line for line in records if json.loads(line)["seed"] in (0, 1000)]
    (tmp_path / "parity.jsonl").write_text("\n".join(first) + "\n")
    claims = stand(PARITY, tmp_path).row()["claims"]
    assert all(each["half_width"] is None for each in claims)
    assert any(each["difference"] is not None and each["seeds"] == 1 for each in claims)
