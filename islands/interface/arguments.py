"""Checks arguments of a caller, and turns them into plain values for messages and files. Pure.

Whatever Python takes for an integer (``operator.index``) or a number (``float``) is taken, numpy's scalars and 0-d
arrays among them. The rest is refused by the call that was given it: the wire would refuse it too, steps later and in
another thread. Nothing here waits for a device unless it is told that it may.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from broker.base.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.frames import decode, encode
from broker.wire.headers import Limits
from broker.wire.messages import AGGREGATOR, Envelope, Join, joining
from broker.wire.schema import INT_MAX, MAX_ITEMS, MAX_TEXT, Record, Unfit

#: Of a header: what the answer to a join may hold besides the tensors that the join has listed.
_ANSWER_BYTES = 1 << 16
_TENSOR = Record(TensorSpec)


# --- numbers ------------------------------------------------------------------------------------------------------

_TOKENS = "must be how many tokens this step trained: a whole number, 0 or more"
_LOSS = "must be a number, or a device array of shape (): give its mean, or None"

#: Stands in a call for an argument that may be None and was not given.
NOT_GIVEN: Any = object()


def whole(field: str, value: Any, cure: str, *, least: int = 0, most: int = INT_MAX, may_wait: bool = False) -> int:
    """Returns a count as a plain integer; a float that is integral, such as 8.0, is one.

    Raises:
        ConfigError: It is none, or below ``least``, or above ``most``; or it is on a device, unless this may wait.
    """
    if on_device(value) and not may_wait:
        raise ConfigError(field, shown(value), "is on a device, which nothing waits for here: count on the host")
    try:
        number = operator.index(value)
    except TypeError:
        given = _float(value)
        if given is None or not given.is_integer():  # NaN and infinities are not
            raise ConfigError(field, shown(value), cure) from None
        number = int(given)
    if not least <= number <= most:
        raise ConfigError(field, shown(value), cure)
    return number


def number(field: str, value: Any, cure: str) -> float:
    """Returns a number as a plain float.

    Raises:
        ConfigError: It is none, or not a number (NaN).
    """
    given = _float(value)
    if given is None or math.isnan(given):
        raise ConfigError(field, shown(value), cure)
    return given


def scalar(field: str, value: Any, cure: str) -> Any:
    """Returns a number as a float, or unread if a device may still be computing it.

    Raises:
        ConfigError: It is no real number, or an array of several.
    """
    if type(value) is float:
        return value
    if not on_device(value):
        given = _float(value)
        if given is None:
            raise ConfigError(field, shown(value), cure)
        return given
    if tuple(value.shape) or not is_real(value.dtype):
        raise ConfigError(field, shown(value), cure)
    return value


def on_device(value: Any) -> bool:
    """Returns whether reading a value may wait for a device: an array of JAX, by what only those have."""
    return hasattr(value, "block_until_ready")


def is_real(dtype: Any) -> bool:
    """Returns True if a dtype is real: integers, booleans and floats, also those of JAX alone."""
    try:
        known = np.dtype(dtype)
    except TypeError:  # a random key of JAX, or another library's
        return False
    return known.kind in "biuf" or is_floating(known) or _is_small_integer(known)


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Returns whether elements are real floating-point numbers, bfloat16 and smaller ones included."""
    try:
        ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    except (TypeError, ValueError):
        return False
    return dtype.kind != "c"


def is_key(dtype: Any) -> bool:
    """Returns whether elements are keys of random sequences in JAX."""
    return str(dtype).startswith("key<")


def is_carried(dtype: Any) -> bool:
    """Returns whether an array's bytes are its elements, without pointers, so that a file can hold it."""
    if is_key(dtype):  # saved as its data
        return True
    try:
        known = np.dtype(dtype)
    except TypeError:
        return False
    return known.kind in "cUSmM" or is_real(known)


def _is_small_integer(dtype: np.dtype[Any]) -> bool:
    try:
        ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    except (TypeError, ValueError):
        return False
    return True


def _float(value: Any) -> float | None:
    """Returns a number as a float; None for text, arrays with dimensions, complex numbers and others."""
    if isinstance(value, str | bytes | bytearray) or tuple(getattr(value, "shape", ())):
        return None
    if isinstance(value, np.generic | np.ndarray) and not is_real(value.dtype):
        return None  # numpy would read text, and drop an imaginary part
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


# --- everything else ------------------------------------------------------------------------------------------------


def pair(value: Any) -> tuple[Any, int | None]:
    """Returns ``state`` as :meth:`islands.Island.step` takes it: optimizer's state, and cursor or None.

    Raises:
        ConfigError: It is no such pair.
    """
    if type(value) not in (tuple, list) or len(value) != 2:
        cure = "must be (opt_state, cursor); the cursor is a place in your data, or None"
        raise ConfigError("state", shown(value), cure)
    opt_state, cursor = value
    if cursor is not None and type(cursor) is not int:
        cursor = whole("state[1]", cursor, _CURSOR)
    if cursor is not None and not 0 <= cursor <= INT_MAX:
        raise ConfigError("state[1]", cursor, _CURSOR)
    return opt_state, cursor


_CURSOR = "must be a cursor: a whole number from 0, or None"


def mapping(field: str, value: Any) -> dict[str, Any]:
    """Returns patterns with their values; an empty mapping for None.

    Raises:
        ConfigError: It is no mapping, or one of its keys is no text.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(field, shown(value), "must be a mapping: regular expression over names -> value")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(field, shown(key), "must be a regular expression over parameter names, as text")
    return dict(value)


def path(field: str, value: Any) -> Path | None:
    """Returns a path; None stays.

    Raises:
        ConfigError: It is none.
    """
    try:
        return None if value is None else Path(value)
    except TypeError:
        raise ConfigError(field, shown(value), "must be a path") from None


def addresses(value: Any) -> str:
    """Returns the address of a broker, or those of several with commas between them.

    Raises:
        ConfigError: It is neither text nor a sequence of texts.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        raise ConfigError("address", shown(value), "must be text such as tcp://hub:7001, or a list of such texts")
    return ",".join(value)


def function(field: str, value: Any, cure: str) -> None:
    """Raises ConfigError unless ``value`` can be called."""
    if not callable(value):
        raise ConfigError(field, shown(value), cure)


def shown(value: Any) -> Any:
    """Returns a value as an error shows it: arrays unread, by dtype and shape; others in short."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return value if isinstance(value, str | int | float) else reprlib.repr(value)


# --- what a join lists ------------------------------------------------------------------------------------------------


def check_tensor(spec: TensorSpec) -> None:
    """Checks one parameter against the schema of messages.

    Raises:
        ConfigError: It cannot stand in a message; names it and says why.
    """
    try:
        _TENSOR.write(spec)
    except Unfit as unfit:
        cure = f"its {unfit.field} must be {unfit.expected}: rename or reshape it"
        raise ConfigError(f"params {spec.name[:MAX_TEXT]!r}", shown(unfit.got), cure) from unfit


def check_join(tensors: Sequence[TensorSpec], run_id: str, limits: Limits) -> None:
    """Checks that the parameters of an island fit into the message that lists them, and into its answer.

    Raises:
        ConfigError: They are too many, or their names too long; or there is nothing to synchronise.
    """
    if not any(tensor.size for tensor in tensors if tensor.kind is not Kind.FROZEN):
        cure = "nothing is left to synchronise: give floating-point arrays that are neither frozen nor local (kinds)"
        raise ConfigError("params", f"{len(tensors)} arrays", cure)
    listed = f"{len(tensors)} arrays"
    cure = "; stack those of equal shape (all layers in one array), or give them shorter names"
    if len(tensors) > MAX_ITEMS:
        raise ConfigError("params", listed, f"must be at most {MAX_ITEMS}{cure}")
    nonce = "join"
    join = Join(nonce=nonce, island_id="", hint="", tensors=tuple(tensors), tokens_per_step=0)
    envelope = Envelope(run_id=run_id, sender=joining(nonce), incarnation=0, sequence=0, to=AGGREGATOR, message=join)
    try:
        frames = encode(envelope)
        size, most = len(frames[0]), limits.max_header_bytes - _ANSWER_BYTES
        if size > most:
            raise ConfigError("params", listed, f"their names and shapes take {size} bytes, at most {most} fit{cure}")
        decode(frames, limits)
    except (LocalProtocolError, RemoteProtocolError) as err:
        raise ConfigError("params", listed, f"no message can list them ({err}){cure}") from err


def of_step(
    tokens: Any, loss: Any, state: tuple[Any, int | None] | None, before: int, most: int
) -> tuple[int, Any, tuple[Any, int | None] | None]:
    """Returns the arguments of a step as plain values, before anything is done with one of them.

    Args:
        tokens: As given; None: ``most``.
        loss: As given.
        state: As given.
        before: Tokens trained before this step.
        most: What a step may train, as declared when joining; 0: that was left open.

    Raises:
        ConfigError: One of them is not what :meth:`islands.Island.step` takes.
    """
    if tokens is None:
        if not most:
            cure = "say how many this step trained, or join with tokens_per_step, which then stands for each"
            raise ConfigError("tokens", None, cure)
        tokens = most
    if type(tokens) is not int:
        tokens = whole("tokens", tokens, _TOKENS)
    if not 0 <= tokens <= INT_MAX - before:
        raise ConfigError("tokens", tokens, _TOKENS)
    if tokens > most > 0:
        cure = f"island.join was told {most} tokens_per_step: give the most that a step can train"
        raise ConfigError("tokens", tokens, cure)
    if loss is not None and type(loss) is not float:
        loss = scalar("loss", loss, _LOSS)
    return tokens, loss, None if state is None else pair(state)
