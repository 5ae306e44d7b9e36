"""What a plan says of the limits of a run: those that aggregator and islands ask about when somebody joins."""

import json
from dataclasses import replace

import pytest

from aggregator.interface.config import AggregatorConfig
from aggregator.state.model_limits import misfit
from broker.wire.fragments import Kind, TensorSpec, partition
from broker.wire.messages import Codec
from ops import cli
from ops.forecast.fleet import Assume
from ops.forecast.footprint import cut
from ops.forecast.planner import notes, plan
from tests.planned_fleets import fleet

PARAMETERS = 4 * 10**9
#: Limits that a run has been given.
GIVEN = {"max_message_bytes": 1 << 30, "held_bytes": 1 << 30}


def large_fleet(sites=4, parameters=PARAMETERS, **changes):
    return fleet(sites, parameters=parameters, step_s=60.0, **GIVEN, **changes)


def note_on(setting, asked):
    """Returns what the notes say of a setting; at most one of them does."""
    found = [each for each in notes(asked, plan(asked)) if setting in each]
    assert len(found) <= 1
    return "".join(found)


def tensors_of(sizes):
    named = enumerate(sizes)
    return tuple(TensorSpec(name=f"t{i}", shape=(size,), dtype="float32", kind=Kind.RDA) for i, size in named)


def refusal(asked, **settings):
    """Returns what an aggregator says of the fleet's model, with the settings of the fleet or others."""
    model = asked.tensors or tensors_of(sum(each) for each in cut(asked.parameters, (), asked.fragments))
    values = {"islands": len(asked.sites), "fragments": asked.fragments, "held_bytes": 1 << 50}
    config = AggregatorConfig(**(values | {"sync_interval": asked.sync_interval} | settings))
    found = misfit(partition(model, asked.fragments), config)
    return "" if found is None else str(found)


@pytest.mark.parametrize(("large", "interval"), [(None, 24), (2 * 10**8, 24), (4 * 10**8, 24), (None, 8)])
@pytest.mark.parametrize("version_codec", [Codec.F32, Codec.BF16])
def test_messages_that_are_too_large_are_told_with_what_the_aggregator_asks_for(large, interval, version_codec):
    """Whatever the codecs: what an island supplies of version 0 is float32."""
    sizes = () if large is None else (large, *[(PARAMETERS - large) // 100] * 100)
    asked = large_fleet(sync_interval=interval, tensors=tensors_of(sizes), version_codec=version_codec)
    assert note_on("max_message_bytes", replace(asked, max_message_bytes=0)) == ""
    needed = int(note_on("max_message_bytes", asked).split("the islands need ")[1].split(":")[0])
    assert f"must be at least {needed}" in refusal(asked, max_message_bytes=1 << 30)
    assert refusal(asked) == ""
    assert refusal(asked, max_message_bytes=needed) == ""
    assert note_on("max_message_bytes", replace(asked, max_message_bytes=needed)) == ""


def test_a_round_for_which_the_aggregator_has_no_room_is_told_with_the_room_it_takes():
    asked = large_fleet(8, parameters=10**9)
    said = note_on("held_bytes", asked)
    assert said == "held_bytes is 1073741824, and the islands need 4000000000: raise it."
    assert "held_bytes = 1073741824: must be at least 4000000000" in refusal(asked, held_bytes=1 << 30)
    for held_bytes, told in ((4_000_000_000, False), (3_999_999_999, True)):
        assert bool(refusal(asked, held_bytes=held_bytes)) is told
        assert bool(note_on("held_bytes", replace(asked, held_bytes=held_bytes))) is told
    assert note_on("held_bytes", replace(asked, assume=Assume.PAPER)) == ""


@pytest.mark.parametrize(
    ("flags", "raised"),
    [
        (("--params", "1B", "--sites", 8), " --fragments 8"),
        (
            ("--params", "1M", "--tokens-per-step", "100M"),
            " --fragments 8, with [aggregator] max_tokens_per_step = 100000000 in the file of --config",
        ),
        (("--params", "1M"), " --fragments 8"),
    ],
)
def test_what_to_try_next_raises_the_limits_that_would_be_in_the_way(capsys, flags, raised):
    links = ("--step-time", 2, "--bandwidth", 10)
    assert cli.main(["plan", *map(str, (*flags, *links))]) == 0
    following = capsys.readouterr().out.splitlines()[-1]
    assert following.startswith("next: atoll up --codec bf16 --version-codec bf16 --sync-interval 24 --fragments 8")
    assert following.endswith(raised)


def test_the_limits_of_a_run_are_those_of_its_file(capsys, tmp_path):
    path = tmp_path / "config.toml"
    task = '[island]\ntask = "examples.numpy_task:task"\n[task]\nhidden = 300000\n'
    own = "islands = 3\nfragments = 4\nheld_bytes = 1000000\nmax_tokens_per_step = 9\n"

    def noted(text):
        path.write_text(f"{task}{text}")
        assert cli.main(["plan", "--model", str(path), "--step-time", "1", "--bandwidth", "0.005", "--json"]) == 0
        return [note.split(",")[0] for note in json.loads(capsys.readouterr().out)["notes"] if "raise it" in note]

    assert noted("") == []
    assert noted(f"[aggregator]\n{own}[run]\nmax_message_bytes = 4300000\n") == [
        "max_message_bytes is 4300000",
        "held_bytes is 1000000",
        "max_tokens_per_step is 9",
    ]
    assert noted("[broker]\nmax_message_bytes = 5000000\n") == ["max_message_bytes is 5000000"]
