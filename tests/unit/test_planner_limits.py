"""What a plan says of the limits of a run: those that aggregator and islands ask about when somebody joins."""

from dataclasses import replace

import pytest

from aggregator.config import AggregatorConfig
from aggregator.fitting import misfit
from broker.fragments import Kind, TensorSpec, partition
from broker.messages import Codec
from ops.planning.fleet import MESSAGE_LIMIT_BYTES, Fleet, Site, largest_message_bytes
from ops.planning.links import Mode
from ops.planning.notes import notes
from ops.planning.planner import plan

PARAMETERS = 4 * 10**9


def tensors_of(*large):
    """Some large tensors, and the rest of the parameters in a hundred equal ones."""
    sizes = (*large, *[(PARAMETERS - sum(large)) // 100] * 100)
    return tuple(
        TensorSpec(name=f"t{i}", shape=(size,), dtype="float32", kind=Kind.RDA) for i, size in enumerate(sizes)
    )


def fleet(**changes):
    site = Site(name="site", step_s=60.0, tokens_per_step=1000)
    return Fleet(**({"parameters": PARAMETERS, "sites": (site,) * 4} | changes))


def note_on(setting, asked):
    """Returns the one note that names a setting, or None."""
    found = [each for each in notes(asked, plan(asked, Mode.DECOUPLED)) if setting in each]
    assert len(found) <= 1
    return found[0] if found else None


def refusal(asked, **settings):
    """Returns what an aggregator says of the fleet's model, as it is or with other settings."""
    model = asked.tensors or tuple(
        TensorSpec(name=f"t{i}", shape=(PARAMETERS // asked.fragments,), dtype="float32", kind=Kind.RDA)
        for i in range(asked.fragments)
    )
    values = {"islands": len(asked.sites), "fragments": asked.fragments, "held_bytes": 1 << 50}
    config = AggregatorConfig(**(values | {"sync_interval": asked.sync_interval_steps} | settings))
    found = misfit(partition(model, asked.fragments), config)
    return "" if found is None else str(found)


@pytest.mark.parametrize(
    ("large", "interval", "cure"),
    [
        (None, 24, ", or cut the model into 15 fragments or more."),
        ((2 * 10**8,), 24, ", or cut the model into 16 fragments or more."),
        ((4 * 10**8,), 24, ": with H = 24 there are 24 fragments at most, whose largest is larger still."),
        (None, 8, ": with H = 8 there are 8 fragments at most, whose largest is larger still."),
    ],
)
@pytest.mark.parametrize("version_codec", [Codec.F32, Codec.BF16])
def test_messages_that_are_too_large_have_a_cure_that_cures(large, interval, cure, version_codec):
    """Whatever the codecs: what an island supplies of version 0 is float32."""
    tensors = () if large is None else tensors_of(*large)
    asked = fleet(sync_interval_steps=interval, tensors=tensors, version_codec=version_codec)
    said = note_on("max_message_bytes", asked)
    assert said.split("raise it everywhere")[1] == cure
    needed = int(said.split("the largest fragment needs ")[1].split(":")[0])
    assert f"must be at least {needed}" in refusal(asked)
    assert refusal(asked, max_message_bytes=needed) == ""
    if "cut the model" in cure:
        fragments = int(cure.split("into ")[1].split()[0])
        assert note_on("max_message_bytes", replace(asked, fragments=fragments)) is None
        assert refusal(replace(asked, fragments=fragments)) == ""
        assert largest_message_bytes(replace(asked, fragments=fragments - 1)) > MESSAGE_LIMIT_BYTES
