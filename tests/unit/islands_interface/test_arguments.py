"""What callers give: taken where Python takes it for what it should be, refused by name where nobody could use it."""

import decimal
import fractions
import math
import re
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import islands
from broker.base.errors import ConfigError
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.frames import decode, encode
from broker.wire.headers import DEFAULT_LIMITS
from broker.wire.messages import AGGREGATOR, Envelope, Share, Welcome, joining
from broker.wire.schema import INT_MAX, MAX_DIMENSIONS, MAX_ITEMS, MAX_TEXT
from islands.interface import arguments
from islands.interface.config import SETTINGS as SETTINGS_OF
from islands.interface.config import IslandConfig, JoinOptions
from islands.tasks.task import Task
from tests.aggregator_hand import id_of
from tests.island_hand import SETTINGS

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine

NOBODY = "tcp://127.0.0.1:9"  # is never connected to here: each join is refused before


class OnDevice:
    """An array of JAX that is not computed yet: reading it would wait."""

    def __init__(self, shape=(), dtype="float32"):
        self.shape, self.dtype = shape, jnp.dtype(dtype)

    def block_until_ready(self):
        raise AssertionError("something has waited for a device")

    __float__ = __int__ = __index__ = __bool__ = __array__ = block_until_ready


@pytest.mark.parametrize(
    "value", [8, 8.0, True, np.int64(8), np.uint8(8), np.float32(8), np.array(8), np.array(8.0), fractions.Fraction(8)]
)
def test_whatever_is_a_whole_number_is_a_count(value):
    found = arguments.whole("tokens", value, "must be a count")
    assert (type(found), found) == (int, 8 if value is not True else 1)


@pytest.mark.parametrize(
    "value",
    [
        *(-1, 8.5, math.nan, math.inf, "8", b"8", None, [8], {}, 1j, INT_MAX + 1, 1e300),
        *(np.array([8]), np.array("8"), np.complex64(8), OnDevice(dtype="int32")),
    ],
    ids=id_of,
)
def test_what_is_no_count_is_refused_with_argument_and_value(value):
    with pytest.raises(ConfigError, match=r"^tokens = .*: (must be a count|is on a device)"):
        arguments.whole("tokens", value, "must be a count")


@pytest.mark.parametrize(
    "value",
    [0.5, 1, True, np.float32(0.5), np.array(0.5), ml_dtypes.bfloat16(0.5), decimal.Decimal("0.5"), math.nan, math.inf],
)
def test_whatever_is_a_number_is_a_loss(value):
    assert type(arguments.scalar("loss", value, "must be a number")) is float


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_loss_on_a_device_is_passed_on_unread(dtype):
    for loss in (OnDevice(dtype=dtype), jnp.asarray(0.5, dtype)):
        assert arguments.scalar("loss", loss, "") is loss


ARRAYS = {"w": np.zeros((64, 64), np.float32)}


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("tokens_per_step", {"tokens_per_step": -1}),
        *(("run", {"run": value}) for value in ("a b", None, "x" * 65, "a\nb")),
        *(("island_id", {"island_id": value}) for value in ("a\nb", 5, "broker")),
        *((name, {name: 5}) for name in ("key", "state_dir")),
        *((name, {name: each}) for name in ("timeout_s", "broker_silent_s") for each in (0, -1, math.nan, math.inf)),
        *((name, {name: each}) for name in ("timeout_s", "donor_wait_s") for each in ("5", None, np.ones(2))),
        ("checkpoint_interval_s", {"checkpoint_interval_s": math.nan}),
        *(("donor_wait_s", {"donor_wait_s": value}) for value in (-1, math.nan)),
        *(("max_message_bytes", {"max_message_bytes": value}) for value in (1, "1G")),
        ("init", {"init": {"w": 1}}),
        ("check", {"check": None}),
        *(("kinds", {"kinds": value}) for value in (["w"], {5: "mean"}, {"(": "mean"})),
        (r"kinds\['w'\]", {"kinds": {"w": ["mean"]}}),
        ("unit_axes", {"unit_axes": 1}),
        *(("unit_axes of w", {"unit_axes": {"w": value}}) for value in (1.5, "1", -1, 3)),
        ("params", {"kinds": {"w": "frozen"}}),
    ],
    ids=str,
)
def test_a_join_refuses_what_no_message_can_say_and_names_it(field, given):
    with pytest.raises(ConfigError, match=rf"^{field} = .+: .+"):
        islands.join(NOBODY, ARRAYS, **given)


@pytest.mark.parametrize("address", [None, 5, ["tcp://a:1", 5], "hub", []])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match=r"^address = "):
        islands.join(address, ARRAYS)


@pytest.mark.parametrize(
    "joins", [lambda **given: islands.join(NOBODY, ARRAYS, **given), partial(islands.Hook, NOBODY)]
)
def test_a_name_that_no_join_has_is_refused_with_the_nearest(joins):
    with pytest.raises(TypeError, match=r"no argument 'timeout'; did you mean timeout_s\?"):
        joins(timeout=5)


@pytest.mark.parametrize("name", JoinOptions.__annotations__)
def test_the_help_of_join_says_what_each_option_means_and_its_default(name):
    said = re.search(rf"^        {name}: (.+(\n            .+)*)", islands.join.__doc__, re.MULTILINE)
    setting = IslandConfig.__dataclass_fields__.get(SETTINGS_OF.get(name, name))
    assert said
    if setting is not None and setting.default:
        assert re.search(rf'\("?{str(setting.default).removesuffix(".0")}"?\)', said[1])


def test_without_a_key_the_cure_names_arguments_of_join_and_no_flags():
    with pytest.raises(ConfigError, match="secret file with key=; or accept with insecure=True that") as caught:
        islands.join("tcp://hub.example.com:7001", {"w": np.zeros(2, np.float32)}, run="demo", tokens_per_step=1)
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"a\nb": np.zeros((64, 64), np.float32)}, r"params 'a\\nb' = .*its name must be printable text"),
        ({"a\ud800": np.zeros((64, 64), np.float32)}, "its name must be printable text"),
        ({"a" * (MAX_TEXT + 1): np.zeros((64, 64), np.float32)}, f"at most {MAX_TEXT} characters"),
        ({"a": np.zeros((1,) * (MAX_DIMENSIONS + 1), np.float32)}, f"an array of at most {MAX_DIMENSIONS} items"),
        ({"n": np.zeros(3, int)}, "nothing is left to synchronise"),
        ({}, "nothing is left to synchronise"),
        ({f"layers/{i}": np.zeros(1, np.float32) for i in range(70_000)}, f"at most {MAX_ITEMS}; stack"),
        ({f"{i:0>900}": np.zeros(1, np.float32) for i in range(5_000)}, "names and shapes take .* bytes.*stack"),
    ],
    ids=["line break", "surrogate", "long name", "dimensions", "integers", "empty", "70000", "long names"],
)
def test_parameters_that_no_message_can_list_are_refused_with_the_cure(params, says):
    with pytest.raises(ConfigError, match=says):
        islands.join(NOBODY, params)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("tokens_per_step", value) for value in (0, 8.5)),
        *((name, None) for name in ("init", "train", "data", "evaluate", "fresh_optimizer")),
        ("kinds", ["w"]),
        ("kinds", {5: "mean"}),
        ("unit_axes", "w"),
    ],
)
def test_a_task_refuses_what_it_cannot_be_made_of(field, value):
    functions = ("init", "train", "data", "evaluate", "fresh_optimizer")
    with pytest.raises(ConfigError, match=rf"^{field} = "):
        Task(**(dict.fromkeys(functions, lambda *given: None) | {"tokens_per_step": 8, field: value}))


def test_where_a_join_fits_its_answer_does_too():
    """The answer lists the same tensors, and more than a join has."""
    name_bytes = MAX_TEXT - 100  # few tensors fill a header then
    tensors = [
        TensorSpec(name=f"{i:0{name_bytes}}", shape=(1,), dtype="float32", kind=Kind.MEAN)
        for i in range(DEFAULT_LIMITS.max_header_bytes // name_bytes)
    ]
    while True:
        try:
            arguments.check_join(tensors, "demo", DEFAULT_LIMITS)
            break
        except ConfigError:
            del tensors[-8:]
    share = Share(index=0, count=1000, share_epoch=1, lane=3, cursor=10**9)
    welcome = Welcome(
        nonce="a" * 64,
        island_id="b" * 64,
        incarnation=1000,
        epoch=1000,
        fragments=(tuple(tensors),),
        settings=replace(SETTINGS, total_tokens=10**12, tokens_per_fleet_step=10**6),
        share=share,
        taken_over=(share,) * 1000,
        start_step=10**9,
        start_tokens=10**12,
    )
    envelope = Envelope(
        run_id="demo", sender=AGGREGATOR, incarnation=0, sequence=10**9, to=joining("a" * 59), message=welcome
    )
    assert decode(encode(envelope)).message == welcome
    assert len(tensors) > 4000
